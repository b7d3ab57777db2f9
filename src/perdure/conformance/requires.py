"""Marks for checks that only apply to providers which declare, or do not declare, a capability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from perdure.providers.records import Capabilities

REQUIRES = "perdure_requires"
REQUIRES_ABSENT = "perdure_requires_absent"


def requires(*capabilities: str) -> pytest.MarkDecorator:
    """The check, or each check of the class, needs all of these declared."""
    return pytest.mark.perdure_requires(*capabilities)


def requires_absent(*capabilities: str) -> pytest.MarkDecorator:
    """The check, or each check of the class, is for providers without these."""
    return pytest.mark.perdure_requires_absent(*capabilities)


def skip_unless_declared(node: pytest.Item, declared: Capabilities) -> None:
    """Skip the check, with the reason, if it is not meant for such a provider."""
    for mark in node.iter_markers(REQUIRES):
        for name in mark.args:
            if not getattr(declared, name):
                skip_without(name)
    for mark in node.iter_markers(REQUIRES_ABSENT):
        for name in mark.args:
            if getattr(declared, name):
                pytest.skip(f"the provider declares the capability {name!r}")


def skip_without(capability: str) -> None:
    pytest.skip(f"the provider does not declare the capability {capability!r}")
