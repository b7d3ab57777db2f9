"""The answer of a fetch that found nothing to hand out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nothing:
    """There may be something at ``due_at_ms``, or when something changes."""

    due_at_ms: int | None
