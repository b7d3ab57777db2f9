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

    from perdure.runtime.running import Running


class Runners:
    """The tasks of one dispatcher's activities."""

    def __init__(
        self,
        run: Callable[[Running], Coroutine[Any, Any, None]],
        give_up: Callable[[Running, BaseException], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._run = run
        self._give_up = give_up
        """What becomes of one whose run has raised."""
        self._tasks = tasks
        """Where every task is, until it ends."""
        self._loop = asyncio.get_running_loop()
        self._launched: deque[Running] = deque()
        self._fresh = 0
        """Tasks that have not begun, or were woken and have not gone on."""
        self._parked: tuple[asyncio.Future[None], asyncio.Task[None]] | None = None
        """The task that has nothing to do, and what wakes it; a chain of steps needs no other."""
        self._context = contextvars.copy_context()
        """That of the runtime. What led to an activity may have run elsewhere, long ago."""
        self._is_closed = False

    def launch(self, running: Running) -> None:
        self._launched.append(running)
        if not self._fresh:
            self._start()

    def close(self) -> None:
        """Begin none of those that have not begun."""
        self._is_closed = True
        self._launched.clear()
        if self._parked is not None:
            self._start()

    def _start(self) -> None:
        self._fresh += 1
        if self._parked is None:
            task = self._loop.create_task(self._serve(), context=self._context.copy())
        else:
            waker, task = self._parked
            self._parked = None
            waker.set_result(None)
        self._tasks.add(task)

    async def _serve(self) -> None:
        task: Any = asyncio.current_task()
        try:
            while await self._take_launched(task) and self._parked is None and not self._is_closed:
                await self._park(task)
        finally:
            self._tasks.discard(task)
            if self._launched and not self._fresh:
                self._start()

    async def _park(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        parked = self._parked = (self._loop.create_future(), task)
        try:
            await parked[0]
        finally:
            if self._parked is parked:  # cancelled by somebody who cancels every task
                self._parked = None

    async def _take_launched(self, task: asyncio.Task[None]) -> bool:
        """Run them one after the other; False once the task belongs to one of them."""
        self._fresh -= 1
        launched = self._launched
        while launched:
            running = launched.popleft()
            running.task = task
            try:
                has_waited = await _run_apart(self._run(running), self._context.copy(), self._widen)
            except Exception as error:  # noqa: BLE001 - told there
                self._give_up(running, error)
                return False  # it may have waited
            except BaseException as error:  # cancelled, or a signal that breaks into it
                self._give_up(running, error)
                raise
            finally:
                running.task = running.scope = None
            if has_waited or task.cancelling():
                return False
        return True

    def _widen(self) -> None:
        """An activity waits: two more tasks take its place, so that many begin at nearly once."""
        for _ in range(min(2, len(self._launched) - self._fresh)):
            self._start()


@types.coroutine
def _run_apart(
    coro: Coroutine[Any, Any, None],
    context: contextvars.Context,
    before_waiting: Callable[[], None],
) -> Generator[Any, Any, bool]:
    """Run it in that context; tells whether it had to wait."""
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
