"""Providers that are wrong on purpose, one fault each, to prove that a test suite can fail.

Each is the oracle with a fault that a real store has had or could well have; its
docstring says what is wrong.
"""

from __future__ import annotations

from typing import Final

from broken import administration, intake, turns, work
from model import ModelProvider

BROKEN: Final[tuple[type[ModelProvider], ...]] = tuple(
    found
    for module in (administration, intake, turns, work)
    for found in vars(module).values()
    if isinstance(found, type)
    and issubclass(found, ModelProvider)
    and found.__module__ == module.__name__
    and not found.__name__.startswith("_")
)
"""All of them."""

__all__ = ["BROKEN"]
