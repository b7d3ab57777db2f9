"""One thread that does blocking work for one event loop, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast

_Result = TypeVar("_Result")
_Done: TypeAlias = Callable[[_Result | None, BaseException | None], None]


class IoThread:
    """Cheaper than an executor: no locks on the loop's side, one wake-up per answer."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], _Done[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], _Result], done: _Done[_Result]) -> None:
        """Do the job after those before it, then call ``done`` on the loop."""
        self._jobs.put((job, done))

    def run(self, job: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """As ``post``; the future gives what the job returned or raised."""
        answer: asyncio.Future[_Result] = self._loop.create_future()

        def settle(result: _Result | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(cast("_Result", result))
            else:
                answer.set_exception(error)

        self._jobs.put((job, settle))
        return answer

    def close(self) -> None:
        """Let the thread end after the jobs that it has, and wait for it."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:  # noqa: BLE001 - goes to whoever waits for the answer
                error = raised
            try:
                self._loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:
                # The loop was closed without closing the provider: nobody is left to be told.
                return
