"""Refuses real I/O, threads, processes and blocking calls while orchestration code runs."""

from __future__ import annotations


def enter() -> None:
    """Start guarding this thread."""


def leave() -> None:
    """Stop guarding this thread."""
