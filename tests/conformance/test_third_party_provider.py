"""A third party proves its provider with the two documented lines and stock pytest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parent / "toy"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "writing-a-provider.md"

DECLARED = re.compile(
    r"the provider (does not declare|declares) the capability '\w+'"
    r"|the factory cannot damage stored history"
)

BUGGY_CONFTEST = """
import pytest
from toy_provider import ToyProvider, ToyStore

from perdure.conformance.harness import ProviderFactory

pytest_plugins = ["perdure.pytest_plugin"]


class LosingProvider(ToyProvider):
    async def ack_work_item(self, lock_token, completion=None, retry=None):
        await super().ack_work_item(lock_token)

    def _fetched(self, row):
        row.attempts += 1
        return super()._fetched(row)


class LosingFactory(ProviderFactory):
    def create(self, clock):
        return LosingProvider(ToyStore(), clock)


@pytest.fixture
def provider_factory():
    return LosingFactory()
"""


@pytest.fixture
def project(tmp_path):
    """The toy's own repository, outside of ours."""
    return Path(shutil.copytree(TOY, tmp_path / "toy"))


def run_pytest(project, *arguments):
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={"PYTHONPATH": str(project), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    return finished.returncode, finished.stdout + finished.stderr


def test_the_toy_uses_exactly_the_lines_of_the_guide():
    guide = GUIDE.read_text()
    test_module = (TOY / "tests" / "test_toy_provider.py").read_text()

    assert (TOY / "tests" / "conftest.py").read_text() in guide
    assert test_module.removesuffix("  # noqa: F403\n") in guide


def test_a_correct_provider_passes_and_every_skip_names_a_capability(project):
    # Rewriting the asserts of all checks at once meets a fault of CPython 3.11 now and then.
    exit_code, output = run_pytest(project, "-rs", "--assert=plain")

    assert exit_code == 0, output
    summary = re.search(r"(\d+) checks \(213 of them numbered\), \d+ runs: (\d+) passed", output)
    assert summary, output
    assert int(summary[2]) > 300
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", output, re.MULTILINE)
    assert reasons
    assert [reason for reason in reasons if not DECLARED.fullmatch(reason)] == []


def test_a_planted_bug_is_caught_by_the_check_that_it_breaks(project):
    (project / "tests" / "conftest.py").write_text(BUGGY_CONFTEST)

    selected = "one-handle and (test_c044 or test_c045 or test_c053)"
    exit_code, output = run_pytest(project, "-k", selected)

    failed = re.findall(r"^FAILED \S+::(test_c\d+)", output, re.MULTILINE)
    assert (exit_code, sorted(failed)) == (1, ["test_c045", "test_c053"]), output
    assert "assert 2 == 1" in output, "pytest could not rewrite the assertions of the kit"


def test_without_a_factory_the_kit_says_what_is_missing(project):
    (project / "tests" / "conftest.py").write_text('pytest_plugins = ["perdure.pytest_plugin"]\n')

    exit_code, output = run_pytest(project, "-k", "test_c011")

    assert exit_code == 1
    assert "needs a fixture named 'provider_factory'" in output
    assert "Traceback" not in output


def test_loading_the_plugin_first_or_the_harness_first_makes_no_difference(project):
    conftest = project / "tests" / "conftest.py"
    plugin_line = 'pytest_plugins = ["perdure.pytest_plugin"]\n'
    conftest.write_text(plugin_line + conftest.read_text().replace(plugin_line, ""))

    exit_code, output = run_pytest(project, "-p", "perdure.pytest_plugin", "-k", "test_c01")

    assert exit_code == 0, output
