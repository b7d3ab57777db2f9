"""Tasks and futures that know their place in the program.

Each task is a branch with a path (``0`` is the orchestration's own, ``0.2`` its second child), and
each future hashes by its place in its branch, never by its address: asyncio keeps futures in sets,
and sets must iterate alike on every replay, under every hash seed, whatever other branches do.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine
    from contextvars import Context

_IDENTITY_BITS = 24


class Branch:
    """Counters of one task: what it asked for, whom it started, what it created."""

    __slots__ = ("_children", "_identity", "_operations", "_rng", "_seed", "path", "site")

    def __init__(self, path: str, seed: str, site: str = "") -> None:
        self.path = path
        self.site = site
        """Where the task was created: the place of steps that it asks for without own code."""
        self._seed = seed
        # The seed keeps tasks of different executions apart in asyncio's process-wide set.
        self._identity = zlib.crc32(f"{seed}/{path}".encode()) << _IDENTITY_BITS
        self._operations = 0
        self._children = 0
        self._rng: random.Random | None = None

    def next_operation(self) -> str:
        self._operations += 1
        return f"{self.path}/{self._operations}"

    def coming_operation(self) -> str:
        """What ``next_operation`` will give."""
        return f"{self.path}/{self._operations + 1}"

    def next_identity(self) -> int:
        """A hash: consecutive in a branch, so that small sets keep the order of creation."""
        self._identity += 1
        return self._identity

    def child(self, site: str = "") -> Branch:
        self._children += 1
        return Branch(f"{self.path}.{self._children}", self._seed, site)

    def rng(self) -> random.Random:
        """Seeded by the execution and the path, so that branches do not disturb each other."""
        if self._rng is None:
            from random import Random

            self._rng = Random(f"{self._seed}/{self.path}")
        return self._rng


class DurableTask(asyncio.Task[Any]):
    """A task of the durable loop, bound to its branch."""

    __slots__ = ("_identity", "branch")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        branch: Branch,
        identity: int,
        name: str | None,
        context: Context | None,
    ) -> None:
        # Before the base class: it puts the task into a set at once.
        self._identity = identity
        self.branch = branch
        super().__init__(coro, loop=loop, name=name or f"Task-{branch.path}", context=context)
        # The engine closes what is left over; asyncio has nothing to complain about.
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._identity


class DurableFuture(asyncio.Future[Any]):
    """What ``loop.create_future()`` gives: locks, queues and sleeps wait on these."""

    __slots__ = ("_identity",)

    def __init__(self, *, loop: asyncio.AbstractEventLoop, identity: int) -> None:
        self._identity = identity
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._identity
