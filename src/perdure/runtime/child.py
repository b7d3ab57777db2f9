"""The program of a child process: take a call, run the activity, answer, until the pipe closes."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.activity_context import ActivityInfo, enter_scope, leave_scope
from perdure.codec import JSON
from perdure.errors import UsageError
from perdure.runtime.failures import failure_from
from perdure.runtime.processes import Answer, Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring import Activity
    from perdure.runtime.sources import Source

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
    _pose_as_the_program(sys.argv[3], sys.argv[4:])
    os.set_inheritable(descriptor, False)
    _end_with(parent)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as pipe:
        while header := pipe.read(4):
            call = msgspec.json.decode(pipe.read(int.from_bytes(header)), type=Call)
            answer = _answer(call, begin=partial(_send, connection, b""))
            _send(connection, msgspec.json.encode(answer))


def _pose_as_the_program(path: str, arguments: list[str]) -> None:
    """Its script may look at its arguments, and what it starts has nothing to do with our path."""
    sys.argv = arguments
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        del os.environ["PYTHONPATH"]


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
        activity = _found(call.source)
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
def _found(source: Source) -> Activity[..., Any]:
    return source.find()


if __name__ == "__main__":
    main()
