"""The program of a child process: read a call, run the activity, answer, until the pipe closes."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.authoring.context import ActivityInfo, enter_scope, leave_scope
from perdure.codec import JSON
from perdure.errors import UsageError
from perdure.processes import STOP_SIGNALS, inherited_socket
from perdure.runtime.executors import Answer, Call, Source, failure_from

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from perdure.authoring.definitions import Activity

_PR_SET_PDEATHSIG = 1


class ChildScope:
    """The attempt as its code sees it in a child, which is killed when it is cancelled."""

    def __init__(self, info: ActivityInfo) -> None:
        self.info = info

    def heartbeat(self, details: object) -> None:
        raise self._not_supported("heartbeat()")

    def last_heartbeat(self, type_: Any) -> Any:
        raise self._not_supported("last_heartbeat()")

    def is_cancelled(self) -> bool:
        raise self._not_supported("is_cancelled()")

    def connection(self) -> Any:
        raise self._not_supported("transaction()")

    def client(self) -> Any:
        raise self._not_supported("activity_client()")

    def _not_supported(self, what: str) -> UsageError:
        return UsageError(
            f"{what} does not work in activity {self.info.activity_name!r}, because it runs in a "
            "process of its own, which is killed when it times out or is cancelled; "
            "executor='thread' has it"
        )


def main() -> None:
    # Ctrl-C in a terminal and a SIGTERM to the process group reach the children too, but the worker
    # decides what ends. Not SIG_IGN: the programs that an activity starts would inherit that.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    _end_with_parent(int(sys.argv[1]))
    _restore_arguments_and_path(sys.argv[2], sys.argv[3:])
    with inherited_socket() as connection, connection.makefile("rb") as pipe:
        while header := pipe.read(4):
            call = msgspec.json.decode(pipe.read(int.from_bytes(header)), type=Call)
            answer = _answer(call, begin=partial(_send, connection, b""))
            _send(connection, msgspec.json.encode(answer))


def _restore_arguments_and_path(path: str, arguments: list[str]) -> None:
    """Show the script the program's own arguments, and its children the program's own path."""
    sys.argv = arguments
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        del os.environ["PYTHONPATH"]


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4) + data)


def _end_with_parent(parent: int) -> None:
    """Let the system kill this child when its worker dies: its answer would reach no reader."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died already
            sys.exit(1)


def _answer(call: Call, begin: Callable[[], None]) -> Answer:
    raises: tuple[type[Exception], ...] = ()
    try:
        activity = _load(call.source)
        raises = activity.settings.raises
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
        return Answer(failure=failure_from(error, 1, raises))


@cache
def _load(source: Source) -> Activity[..., Any]:
    return source.load()


if __name__ == "__main__":
    main()
