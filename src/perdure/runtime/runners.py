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
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from perdure.runtime.running import Running


_ENDED: Final = object()
"""What a course of activities yields when it has run one to its end."""


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
        self._fresh: set[asyncio.Task[None]] = set()
        """Tasks that have not begun, or were woken and have not gone on."""
        self._parked: tuple[asyncio.Future[None], asyncio.Task[None]] | None = None
        """The task that has nothing to do, and what wakes it; a chain of steps needs no other."""
        self._context = contextvars.copy_context()
        """That of the runtime. What led to an activity may have run elsewhere, long ago."""
        self._is_retiring = False
        """No task waits for more to do."""

    def launch(self, running: Running) -> None:
        self._launched.append(running)
        if not self._fresh:
            self._start()

    def retire(self) -> None:
        """From now on every task ends when it has nothing to do, as whoever awaits it expects."""
        self._is_retiring = True
        if self._parked is not None:
            self._start()

    def close(self) -> None:
        """Begin none of those that have not begun."""
        self._launched.clear()
        self.retire()

    def _start(self) -> None:
        parked, self._parked = self._parked, None
        if parked is None or parked[0].done():  # done: cancelled, which it has not heard of yet
            task = self._loop.create_task(self._serve(), context=self._context.copy())
            task.add_done_callback(self._ended)
        else:
            waker, task = parked
            waker.set_result(None)
        self._fresh.add(task)
        self._tasks.add(task)

    async def _serve(self) -> None:
        """Run what was launched, until the task belongs to an activity that has waited on it."""
        task: Any = asyncio.current_task()
        course: Any = self._course()
        proceed, copy_context = course.send, self._context.copy
        proceed(None)
        launched = self._launched
        running: Running | None
        context: contextvars.Context | None
        while True:
            self._fresh.discard(task)
            while launched:
                running = launched.popleft()
                running.task = task
                context = copy_context()
                try:
                    awaited = context.run(proceed, running)
                    if awaited is not _ENDED:
                        self._widen()
                        await _go_on(course, awaited, context)
                        return
                except Exception as error:  # noqa: BLE001 - told there
                    self._give_up(running, error)
                    return  # it may have waited
                except BaseException as error:  # cancelled, or a signal that breaks into it
                    self._give_up(running, error)
                    raise
                finally:
                    running.task = running.scope = None
                # The second: 3.11 and 3.12 keep a cancellation in mind that was taken back.
                if task.cancelling() or task._must_cancel:  # noqa: SLF001
                    return
            if self._parked is not None or self._is_retiring:
                return
            running = context = None  # it may have nothing to do for long
            await self._park(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A callback, for it may have been cancelled before its first line, or while it waited."""
        self._tasks.discard(task)
        self._fresh.discard(task)
        if self._parked is not None and self._parked[1] is task:
            self._parked = None
        if self._launched and not self._fresh:
            self._start()

    @types.coroutine
    def _course(self) -> Generator[Any, Any, None]:
        """Runs what it is sent, one after the other: that spares a quick one its own coroutine."""
        run = self._run
        while True:
            yield from run((yield _ENDED))

    def _park(self, task: asyncio.Task[None]) -> asyncio.Future[None]:
        """Give it something to wait for."""
        self._tasks.discard(task)
        waker: asyncio.Future[None] = self._loop.create_future()
        self._parked = (waker, task)
        return waker

    def _widen(self) -> None:
        """An activity waits: two more tasks take its place, so that many begin at nearly once."""
        for _ in range(min(2, len(self._launched) - len(self._fresh))):
            self._start()


@types.coroutine
def _go_on(
    course: Generator[Any, Any, None], awaited: Any, context: contextvars.Context
) -> Generator[Any, Any, None]:
    """Go on, in that context, with one that has begun and waits for something."""
    while awaited is not _ENDED:
        proceed: Callable[[Any], Any] = course.send
        try:
            given = yield awaited
        except BaseException as error:  # noqa: BLE001
            proceed, given = course.throw, error  # handed on outside: it is not handled here
        try:
            awaited = context.run(proceed, given)
        finally:
            given = None
