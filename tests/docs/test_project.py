"""The project says the same about itself in metadata, workflow and pages."""

from __future__ import annotations

import re
import tomllib

import yaml
from doc_pages import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def declared_pythons():
    return re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def test_the_declared_pythons_are_those_that_the_workflow_tests():
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == declared_pythons()
    assert WORKFLOW["jobs"]["demo"]["strategy"]["matrix"]["python"] == declared_pythons()


def test_the_declared_pythons_are_those_of_the_pages():
    listed = ", ".join(declared_pythons())
    *before, last = declared_pythons()
    spoken = f"{', '.join(before)} and {last}"

    assert f"| Python {listed} on Linux |" in (DOCS / "guides" / "upgrading.md").read_text()
    assert spoken in (DOCS / "tutorial" / "1-first-steps.md").read_text()
    assert spoken in (DOCS / "cookbook" / "faq.md").read_text()
    assert spoken.replace(" and ", " or ") in (ROOT / "README.md").read_text()


def test_the_least_python_is_the_first_declared_one():
    assert PROJECT["requires-python"] == f">={declared_pythons()[0]}"


def test_the_changelog_has_a_section_for_what_comes_next():
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text()
