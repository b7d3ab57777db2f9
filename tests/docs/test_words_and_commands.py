"""Pages use plain words, name commands that exist, and show configuration that can be read."""

from __future__ import annotations

import configparser
import re
import shlex

import click
import pytest
import yaml
from doc_pages import DOCS, PAGES, ROOT, blocks, name_of

from perdure.cli.main import root

TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
]
VAGUE = re.compile(r"\b(nobody|whoever|somebody|whatever)\b", re.IGNORECASE)
PLACEHOLDER = re.compile(r"example\.invalid|\b(TODO|FIXME|TBD)\b")
# A line or code between backticks that begins with the command; or a list, as in YAML.
COMMAND = re.compile(r"(?:^\$? ?|`|ExecStart=\S*/)(perdure [a-z][^`\n|]*)", re.MULTILINE)
LISTED = re.compile(r'\["perdure", ([^\]]*)\]')


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_a_text_names_its_subjects_and_leaves_nothing_open(text):
    assert VAGUE.findall(text.read_text()) == []
    assert PLACEHOLDER.findall(text.read_text()) == []


def commands(page):
    text = page.read_text()
    written = [found.partition(" #")[0] for found in COMMAND.findall(text)]
    return written + [f"perdure {found.replace(',', ' ')}" for found in LISTED.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page):
    for line in commands(page):
        try:
            words = shlex.split(line)[1:]
        except ValueError:  # prose with an apostrophe
            continue
        command: click.Command = root
        context = click.Context(root)
        while words and isinstance(command, click.Group):
            found = command.get_command(context, words[0].rstrip(",.:"))
            assert found is not None, f"{page.name}: {line!r}"
            command, words = found, words[1:]
        known = {
            name
            for option in command.get_params(context)
            for name in (*option.opts, *option.secondary_opts)
        } | {"--help"}
        words = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert options <= known, f"{page.name}: {line!r} has unknown options {options - known}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_shell_does_not_take_a_time_for_a_file(page):
    """created:<1d is a redirection unless it is quoted."""
    for line in commands(page):
        assert not re.search(r":[<>]", re.sub(r"'[^']*'", "", line)), f"{page.name}: {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configuration_can_be_read(page):
    for block in blocks(page):
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
        elif block.language == "ini":
            configparser.ConfigParser(strict=False).read_string(block.text)


def test_every_page_begins_with_one_title():
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def test_the_readme_links_to_no_file():
    """The same text is shown where the files are not, such as on PyPI."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())

    assert [link for link in links if not link.startswith("https://")] == []
