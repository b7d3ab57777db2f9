"""Every Python block of the README and the docs runs, page by page; fragments at least compile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Pages whose blocks are parts of something larger.
FRAGMENTS = {"writing-a-provider.md", "postgres.md", "many-servers.md", "performance.md"}

GUIDE_FOR_TESTS = ROOT / "docs" / "guides" / "testing.md"
# Pages that a newcomer copies from, block by block.
WHOLE = [*sorted((ROOT / "docs" / "tutorial").glob("*.md")), GUIDE_FOR_TESTS]


def blocks(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_compile(page):
    for block in blocks(page):
        compile(block, page.name, "exec")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.name not in FRAGMENTS],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_blocks_of_a_page_run_one_after_the_other_and_once_more(page, tmp_path):
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks(page)))

    run([str(program)], tmp_path)
    run([str(program)], tmp_path)


@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_block_is_a_program_of_its_own(page, tmp_path):
    for number, block in enumerate(blocks(page)):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block)
        run([str(program)], tmp_path)


def test_the_tests_in_the_guide_for_tests_run_under_pytest(tmp_path):
    for number, block in enumerate(blocks(GUIDE_FOR_TESTS)):
        (tmp_path / f"test_block_{number}.py").write_text(block)

    said = run(["-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"], tmp_path)

    assert "2 passed" in said


def run(args, cwd):
    finished = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()

    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation, page
