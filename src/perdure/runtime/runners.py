"""Runs activities on few tasks: one task takes the next as long as none has to wait.

A task of its own costs more than a quick activity does. Each activity has a context of its own, and
the task on which it first waits belongs to it alone from then on, so what it may do with contexts,
cancellation and ``asyncio.timeout`` is what it may do in a task that was made for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from perdure.runtime.activities import Running


class Runners:
    """The tasks of one dispatcher's activities."""

    def __init__(
        self,
        run: Callable[[Running], Coroutine[Any, Any, None]],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._run = run
        self._tasks = tasks
        """Where every task is, until it ends."""
        self._loop = asyncio.get_running_loop()
        self._launched: deque[Running] = deque()
        self._fresh = 0
        """Tasks that have not begun."""

    def launch(self, running: Running) -> None:
        self._launched.append(running)
        if not self._fresh:
            self._start()

    def forget_launched(self) -> None:
        """Begin none of those that have not begun."""
        self._launched.clear()

    def _start(self) -> None:
        self._fresh += 1
        self._tasks.add(self._loop.create_task(self._serve()))

    async def _serve(self) -> None:
        self._fresh -= 1
        task: Any = asyncio.current_task()
        launched = self._launched
        try:
            while launched:
                running = launched.popleft()
                running.task = task
                try:
                    has_waited = await _run_apart(self._run(running), self._widen)
                finally:
                    running.task = running.scope = None
                if has_waited or task.cancelling():
                    return
        finally:
            self._tasks.discard(task)
            if launched and not self._fresh:
                self._start()

    def _widen(self) -> None:
        """An activity waits: two more tasks take its place, so that many begin at nearly once."""
        for _ in range(min(2, len(self._launched) - self._fresh)):
            self._start()


@types.coroutine
def _run_apart(
    coro: Coroutine[Any, Any, None], before_waiting: Callable[[], None]
) -> Generator[Any, Any, bool]:
    """Run it in a context of its own; tells whether it had to wait."""
    context = contextvars.copy_context()
    try:
        awaited = context.run(coro.send, None)
    except StopIteration:
        return False
    before_waiting()
    while True:
        proceed: Callable[[Any], Any] = coro.send
        try:
            given = yield awaited
        except BaseException as error:  # noqa: BLE001
            proceed, given = coro.throw, error  # handed on outside: it is not handled here
        try:
            awaited = context.run(proceed, given)
        except StopIteration:
            return True
        finally:
            given = None
