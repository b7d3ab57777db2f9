"""The kit covers every verb of the contract, and each check is named by what it checks."""

from __future__ import annotations

import re

import pytest

from perdure.conformance import THEMES, check_classes
from perdure.providers.administration import ProviderAdmin
from perdure.providers.contract import Provider

NUMBERED = re.compile(r"test_[a-z]?\d+")
CHECKS_MIN = 600


def checks_of(cls: type) -> list[str]:
    return [name for name in vars(cls) if name.startswith("test_")]


def public_verbs(contract: type) -> set[str]:
    return {name for name in vars(contract) if not name.startswith("_")}


def test_checks_are_named_by_what_they_check():
    names = [name for cls in check_classes().values() for name in checks_of(cls)]

    assert [name for name in names if NUMBERED.match(name)] == []


def test_no_check_got_lost():
    assert sum(len(checks_of(cls)) for cls in check_classes().values()) >= CHECKS_MIN


def test_every_check_class_says_which_verbs_it_covers():
    known = public_verbs(Provider) | public_verbs(ProviderAdmin)

    for name, cls in check_classes().items():
        assert cls.verbs, f"{name} declares no verbs"
        assert set(cls.verbs) <= known, f"{name} covers unknown verbs {set(cls.verbs) - known}"


@pytest.mark.parametrize("contract", [Provider, ProviderAdmin])
def test_every_verb_of_the_contract_is_covered(contract):
    covered = {verb for cls in check_classes().values() for verb in cls.verbs}

    assert public_verbs(contract) <= covered


def test_every_theme_has_checks():
    themes_with_checks = {cls.__module__ for cls in check_classes().values() if checks_of(cls)}

    assert themes_with_checks == set(THEMES)


def test_every_async_check_runs_on_the_runner_of_its_store():
    for cls in check_classes().values():
        for name in checks_of(cls):
            assert not vars(cls)[name].__code__.co_flags & 0x80, f"{cls.__name__}.{name} is async"
