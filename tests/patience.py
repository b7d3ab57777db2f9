"""Limits for tests that hang: the one deadline, and where each task stood when it came."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")

HANG_SECONDS = 120
"""Far more than any wait takes on a busy machine, and less than the limit of a whole test."""


def run_and_watch(main: Coroutine[Any, Any, _Result], seconds: float = HANG_SECONDS) -> _Result:
    """Like ``asyncio.run``; print where each task waits whenever that time has passed."""

    async def watched() -> _Result:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            nonlocal alarm
            print(f"not done after {seconds:g} s; the tasks:\n{describe_tasks()}", file=sys.stderr)
            alarm = loop.call_later(seconds, tell)

        alarm = loop.call_later(seconds, tell)
        try:
            return await main
        finally:
            alarm.cancel()

    return asyncio.run(watched())


def describe_tasks() -> str:
    """Return the tasks of the running loop, each with the lines at which its coroutines wait."""
    return "\n".join(
        f"{task.get_name()}\n{_waits_of(task.get_coro())}" for task in asyncio.all_tasks()
    )


def _waits_of(awaited: Any) -> str:
    lines: list[str] = []
    while awaited is not None:
        frame = next(
            (
                found
                for each in ("cr", "gi", "ag")
                if (found := getattr(awaited, f"{each}_frame", None))
            ),
            None,
        )
        if frame is None:
            lines.append(f"    {awaited!r}")
            break
        code = frame.f_code
        lines.append(f"    {code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        awaited = next(
            (
                found
                for each in ("cr_await", "gi_yieldfrom", "ag_await")
                if (found := getattr(awaited, each, None))
            ),
            None,
        )
    return "\n".join(lines)
