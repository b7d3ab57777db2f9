"""The program of a child process: take a call, run the activity, answer, until the pipe closes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import runpy
import signal
import socket
import sys
from functools import cache, reduce
from typing import Any

import msgspec

from perdure.codec import JSON
from perdure.runtime.failures import failure_from
from perdure.runtime.processes import Answer, Call

_MAIN = "__perdure_main__"


def main() -> None:
    # Ctrl-C in a terminal comes here too, but it is the worker's to say what ends. Not SIG_IGN:
    # the programs that an activity starts would inherit that.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as pipe:
        while header := pipe.read(4):
            call = msgspec.json.decode(pipe.read(int.from_bytes(header)), type=Call)
            data = msgspec.json.encode(_answer(call))
            pipe.write(len(data).to_bytes(4) + data)
            pipe.flush()


def _answer(call: Call) -> Answer:
    try:
        activity = _activity(call.module, call.qualname, call.main_path)
        args, kwargs = activity.signature.decode_arguments(call.input, JSON)
        value = activity.fn(*args, **kwargs)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return Answer(result=activity.signature.encode_result(value, JSON))
    except BaseException as error:  # noqa: BLE001
        return Answer(failure=failure_from(error, attempts=1))


@cache
def _activity(module: str, qualname: str, main_path: str | None) -> Any:
    if main_path is not None:
        # The program's own file, under another name so that its main part does not run.
        found: Any = runpy.run_path(main_path, run_name=_MAIN)[qualname.split(".", maxsplit=1)[0]]
        return reduce(getattr, qualname.split(".")[1:], found)
    return reduce(getattr, qualname.split("."), importlib.import_module(module))


if __name__ == "__main__":
    main()
