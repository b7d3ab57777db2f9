"""A third party proves its provider with the two documented lines and stock pytest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG_SECONDS

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
    async def _ack_work_item(self, lock_token, completion, retry):
        await super()._ack_work_item(lock_token, None, None)

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
        timeout=HANG_SECONDS,
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
    summary = re.search(r"(\d+) checks, \d+ runs: (\d+) passed", output)
    assert summary, output
    assert int(summary[2]) > 300
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", output, re.MULTILINE)
    assert reasons
    assert [reason for reason in reasons if not DECLARED.fullmatch(reason)] == []


def test_a_planted_bug_is_caught_by_the_check_that_it_breaks(project):
    (project / "tests" / "conftest.py").write_text(BUGGY_CONFTEST)

    hidden = "test_fetched_work_is_hidden_but_not_gone"
    settled = "test_settling_an_item_delivers_exactly_its_completion"
    counted = "test_the_first_delivery_of_work_is_attempt_one"
    selected = f"one-handle and ({hidden} or {settled} or {counted})"
    exit_code, output = run_pytest(project, "-k", selected)

    failed = re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE)
    assert (exit_code, sorted(failed)) == (1, [settled, counted]), output
    assert "assert 2 == 1" in output, "pytest could not rewrite the assertions of the kit"


def test_without_a_factory_the_kit_says_what_is_missing(project):
    (project / "tests" / "conftest.py").write_text('pytest_plugins = ["perdure.pytest_plugin"]\n')

    exit_code, output = run_pytest(project, "-k", "test_an_unknown_instance_has_an_empty_history")

    assert exit_code == 1
    assert "needs a fixture named 'provider_factory'" in output
    assert "Traceback" not in output


def test_loading_the_plugin_first_or_the_harness_first_makes_no_difference(project):
    conftest = project / "tests" / "conftest.py"
    plugin_line = 'pytest_plugins = ["perdure.pytest_plugin"]\n'
    conftest.write_text(plugin_line + conftest.read_text().replace(plugin_line, ""))

    exit_code, output = run_pytest(
        project, "-p", "perdure.pytest_plugin", "-k", "TestErrorHandling"
    )

    assert exit_code == 0, output
