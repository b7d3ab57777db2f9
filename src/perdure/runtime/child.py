"""The program of a child process: take a call, run the activity, answer, until the pipe closes."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import os
import runpy
import signal
import socket
import sys
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import ActivityInfo, enter_scope, leave_scope
from perdure.codec import JSON
from perdure.errors import UsageError
from perdure.runtime.failures import failure_from
from perdure.runtime.processes import MAIN_NAME, Answer, Call

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


class ChildScope:
    """An attempt as its code sees it here: it is killed when nobody wants it any more."""

    def __init__(self, info: ActivityInfo) -> None:
        self.info = info

    def heartbeat(self, details: object) -> None:
        raise self._refusal("heartbeat()")

    def last_heartbeat(self, type_: Any) -> Any:
        raise self._refusal("last_heartbeat()")

    def is_cancelled(self) -> bool:
        raise self._refusal("is_cancelled()")

    def connection(self) -> Any:
        raise self._refusal("transaction()")

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"{what} does not work in activity {self.info.activity_name!r}, because it runs in a "
            "process of its own, which is killed when it times out or is cancelled; "
            "executor='thread' has it"
        )


def main() -> None:
    # Ctrl-C in a terminal comes here too, and a SIGTERM to the whole group, but it is the worker's
    # to say what ends. Not SIG_IGN: the programs that an activity starts would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)
    descriptor, parent = map(int, sys.argv[1:3])
    os.set_inheritable(descriptor, False)
    _end_with(parent)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as pipe:
        while header := pipe.read(4):
            call = msgspec.json.decode(pipe.read(int.from_bytes(header)), type=Call)
            answer = _answer(call, begin=partial(_send, connection, b""))
            _send(connection, msgspec.json.encode(answer))


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4) + data)


def _end_with(parent: int) -> None:
    """Nobody waits for what a child does after its worker was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # already
            sys.exit(1)


def _answer(call: Call, begin: Callable[[], None]) -> Answer:
    try:
        activity = _activity(call.module, call.qualname, call.main_path)
        args, kwargs = activity.signature.decode_arguments(call.input, JSON)
        token = enter_scope(ChildScope(call.info))
        begin()
        try:
            value = activity.fn(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        finally:
            leave_scope(token)
        return Answer(result=activity.signature.encode_result(value, JSON))
    except BaseException as error:  # noqa: BLE001
        return Answer(failure=failure_from(error, attempts=1))


@cache
def _activity(module: str, qualname: str, main_path: str | None) -> Any:
    if main_path is not None:
        # The program's own file, under another name so that its main part does not run.
        found: Any = runpy.run_path(main_path, run_name=MAIN_NAME)[
            qualname.split(".", maxsplit=1)[0]
        ]
        return reduce(getattr, qualname.split(".")[1:], found)
    return reduce(getattr, qualname.split("."), importlib.import_module(module))


if __name__ == "__main__":
    main()
