"""Every Python block of the README and the docs runs, page by page; fragments at least compile."""

import re
import subprocess
import sys

import pytest
from doc_pages import DOCS, PAGES, ROOT, blocks, name_of

from patience import HANG_SECONDS

# Pages whose blocks are parts of something larger.
FRAGMENTS = {
    "writing-a-provider.md",
    "conformance.md",
    "postgres.md",
    "many-servers.md",
    "performance.md",
}

GUIDE_FOR_TESTS = DOCS / "guides" / "testing.md"


def python_blocks(page):
    """Blocks that are a program together. Those with a title are files: see test_typed_pages."""
    return [each.text for each in blocks(page) if each.language == "python" and not each.title]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_compile(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, page.name, "exec")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if python_blocks(page) and page.name not in FRAGMENTS],
    ids=name_of,
)
def test_blocks_of_a_page_run_one_after_the_other_and_once_more(page, tmp_path):
    program = tmp_path / "page.py"
    program.write_text("\n".join(python_blocks(page)))

    run([str(program)], tmp_path)
    run([str(program)], tmp_path)


def test_each_block_of_the_guide_for_tests_is_a_program_of_its_own(tmp_path):
    for number, block in enumerate(python_blocks(GUIDE_FOR_TESTS)):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block)
        run([str(program)], tmp_path)


def test_the_tests_in_the_guide_for_tests_run_under_pytest(tmp_path):
    for number, block in enumerate(python_blocks(GUIDE_FOR_TESTS)):
        (tmp_path / f"test_block_{number}.py").write_text(block)

    said = run(["-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"], tmp_path)

    assert "2 passed" in said


def run(args, cwd):
    finished = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_headings_that_exist():
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            if heading.startswith("perdure."):
                continue  # generated from a docstring; the build of the site checks it
            assert heading in headings(page.parent / target if target else page), (
                f"{page.name} links to {target}#{heading}"
            )


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()

    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation, page
