"""Nothing that is stored may move the cursor of the terminal that shows it."""

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import flows
from perdure.escape import clean, clean_block, clean_json

NASTY = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\rb",
    "a\nb",
    "a\x00b",
    "a\x7fb",
    "\u202eevil",
    "\u2066x\u2069",
    "\u2028",
    "\u200bhidden",
    "\ufeff",
    "\x08\x08\x08over",
    "[bold red]markup[/]",
    ":warning:",
]
# Other than the sequences that set colours, which only we write.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@given(st.text())
def test_a_cleaned_text_has_no_control_characters(text):
    shown = clean(text)

    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}]
    assert not RAW.search(shown)
    if text.isprintable():
        assert shown == text


@given(st.text())
def test_a_cleaned_block_keeps_lines_only(text):
    assert not RAW.search(clean_block(text))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda children: st.lists(children) | st.dictionaries(st.text(), children),
        max_leaves=10,
    )
)
def test_cleaned_json_means_the_same(value):
    text = clean_json(json.dumps(value, ensure_ascii=False))

    assert json.loads(text) == value
    assert not RAW.search(text)


@pytest.mark.parametrize("nasty", NASTY)
def test_no_command_prints_what_was_stored_raw(cli, nasty):
    cli.run(("f-1", flows.failing, nasty), ("h-1", flows.hello, nasty))

    for args in (
        ["list"],
        ["list", "-o", "json"],
        ["show", "f-1"],
        ["show", "h-1", "-o", "json"],
        ["history", "f-1"],
        ["history", "f-1", "-o", "jsonl"],
        ["tree", "f-1"],
        ["diff", "f-1", "h-1"],
        ["result", "h-1"],
    ):
        answer = cli(*args)
        assert not RAW.search(answer.out.replace("\n", "")), args
    failed = cli("result", "f-1", code=4)
    assert not RAW.search(failed.err.replace("\n", ""))
    assert cli("result", "h-1", "-o", "json").json["output"] == f"hello {nasty}"


@pytest.mark.parametrize("nasty", [text for text in NASTY if "\n" not in text])
def test_no_error_message_repeats_an_argument_raw(sqlite_cli, nasty):
    sqlite_cli("db", "migrate")

    for args in (["show", nasty], ["list", "--status", nasty], ["start", "x", "--in", nasty]):
        answer = sqlite_cli(*args, code=None)
        assert answer.code in {2, 3}
        assert not RAW.search(answer.err.rstrip("\n"))
