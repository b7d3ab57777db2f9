"""The interface between a workload and an engine. Knows neither workloads nor any engine."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Settings = dict[str, Any]
"""Tuning of one engine for one workload; the adapter documents its keys."""


class Peer(abc.ABC):
    """An engine with three workflows, the same in every adapter.

    ``chain(n)`` runs n steps one after the other and returns the last result; ``fan(n)`` runs n
    steps at once and returns how many different results came back; ``gate(n)`` runs n steps,
    shows that it is ready, waits for one signal and returns the result of one more step.
    A step takes a number and returns ``ok-<number>``.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory = directory
        self.settings = settings

    @abc.abstractmethod
    async def open(self, *, worker: bool) -> None:
        """Make the store ready and, unless told otherwise, start working on it."""

    async def close(self) -> None:
        """Stop what ``open`` started."""
        return

    @abc.abstractmethod
    async def start(self, flow: str, workflow_id: str, n: int) -> Any:
        """Start one workflow; return its handle once the store has it."""

    @abc.abstractmethod
    async def result(self, handle: Any) -> Any:
        """Wait for a workflow and return its result; raise if it failed."""

    @abc.abstractmethod
    async def start_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> None:
        """Start many workflows as fast as the engine can; return once the store has them."""

    @abc.abstractmethod
    async def run_all(self, flow: str, workflow_ids: Sequence[str], n: int) -> list[Any]:
        """Run many workflows as fast as the engine can and return their results."""

    @abc.abstractmethod
    async def attach(self, workflow_id: str) -> Any:
        """Return the handle of a ``gate`` that another process started."""

    @abc.abstractmethod
    async def wait_ready(self, workflow_id: str) -> None:
        """Wait until a ``gate`` has run its steps and waits for its signal."""

    @abc.abstractmethod
    async def signal(self, workflow_id: str) -> None:
        """Let a ``gate`` go on."""

    @abc.abstractmethod
    async def count(self) -> int:
        """Return the number of workflows in the store."""

    @abc.abstractmethod
    def about(self) -> dict[str, Any]:
        """Versions and effective settings, as far as the engine tells them."""
