"""Work that nobody waits for, and whose failure only means that something is done later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError
from perdure.runtime.observe import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine


class Background:
    """Keeps tasks from being collected before they end, and can wait for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def spawn_quietly(self, answer: Awaitable[object]) -> None:
        """Await something whose failure only means that a lock expires instead."""
        self.spawn(quietly(answer))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def quietly(answer: Awaitable[object]) -> None:
    try:
        await answer
    except PerdureError as error:
        log.info("%s", error)
