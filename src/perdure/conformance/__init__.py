"""The conformance kit: every behaviour that a provider owes, as pytest classes to star-import.

Each module of this package that is not part of the kit's machinery is a theme; its ``Test...``
classes are found by looking, so that no list can forget one. PYTEST_DONT_REWRITE: this module holds
no checks, and the themes are registered for rewriting below, before anything imports them.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Final

import pytest

MACHINERY: Final = frozenset({"factories", "harness", "observation", "requires", "stateful"})
"""Modules that are not themes."""

THEMES: Final = tuple(
    sorted(
        f"{__name__}.{module.name}"
        for module in pkgutil.iter_modules(__path__)
        if module.name not in MACHINERY and not module.name.startswith("_")
    )
)

pytest.register_assert_rewrite(*THEMES, f"{__name__}.factories")


def check_classes() -> dict[str, type]:
    """Every class of checks by its name."""
    found: dict[str, type] = {}
    for theme in THEMES:
        for name, value in vars(importlib.import_module(theme)).items():
            if name.startswith("Test") and isinstance(value, type) and value.__module__ == theme:
                if name in found:
                    raise ImportError(f"two themes define {name}: one would hide the other")
                found[name] = value
    return found


def __getattr__(name: str) -> object:
    # Themes are imported on the first use of a class, not with the package: a theme imports the
    # harness, which is in this package, and a provider's conftest.py imports only the harness.
    if name == "__all__":
        return sorted(check_classes())
    if name.startswith("Test"):
        try:
            return check_classes()[name]
        except KeyError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
