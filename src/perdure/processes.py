"""Processes and signals: what POSIX systems and Windows do in different ways; audit events."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

_auditors: dict[str, list[Callable[[str, tuple[Any, ...]], None]]] = {}


def on_audit_events(events: Iterable[str], handler: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call the handler, for ever, with the name and the arguments of each of these events.

    The interpreter calls every hook for every event, also for those that asyncio raises all the
    time, so there is one hook for all handlers.
    """
    if not _auditors:
        sys.addaudithook(_audit)
    for event in events:
        _auditors.setdefault(event, []).append(handler)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _auditors:
        for handler in _auditors[event]:
            handler(event, args)


if sys.platform == "win32":
    STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGBREAK, signal.SIGTERM)
    """Signals that ask a program to end: Ctrl-C, Ctrl-Break, and one that it sends to itself."""
else:
    STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
    """Signals that ask a program to end."""
_SOCKET: Final = "PERDURE_CHILD_SOCKET"


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call the function in each forked child. Windows has no fork."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=function)


@contextmanager
def on_stop_signals(handler: Callable[[int], object]) -> Generator[None]:
    """Call the handler on the running event loop with the number of each stop signal."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    try:
        for each in STOP_SIGNALS:
            if sys.platform == "win32":
                before[each] = signal.signal(
                    each, lambda number, _: loop.call_soon_threadsafe(handler, number)
                )
            else:
                loop.add_signal_handler(each, handler, each)
        yield
    finally:
        for each in STOP_SIGNALS:
            if sys.platform != "win32":
                loop.remove_signal_handler(each)
            elif each in before:
                signal.signal(each, before[each])


def start_program(arguments: Sequence[str], *, own_group: bool = True) -> subprocess.Popen[bytes]:
    """Start a program that ``ask_to_stop`` can reach.

    With ``own_group=False``, Ctrl-C in a terminal reaches it too. On Windows a program in the group
    of another one cannot be asked to stop, so it always gets a group of its own.
    """
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
        return subprocess.Popen(arguments, creationflags=flags)  # noqa: S603
    return subprocess.Popen(arguments, process_group=0 if own_group else None)  # noqa: S603


def ask_to_stop(program: subprocess.Popen[bytes]) -> None:
    """Send the signal that asks a program to end.

    On Windows that is Ctrl-Break, as Ctrl-C is not passed on. Without a console there are no
    signals there, and the program is ended as by a crash.
    """
    if program.poll() is not None:
        return
    if sys.platform == "win32":
        try:
            program.send_signal(signal.CTRL_BREAK_EVENT)
        except OSError:
            program.terminate()
    else:
        program.terminate()


def pass_interrupt_on(program: subprocess.Popen[bytes]) -> None:
    """Pass Ctrl-C on to a program with a group of its own, which has not got it from the console.

    A terminal of other systems has sent it to every program in it. A second one would cut an
    orderly end short.
    """
    if sys.platform == "win32":
        ask_to_stop(program)


async def start_with_socket(
    theirs: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start a program and give it one end of a pair of sockets: ``inherited_socket``."""
    if sys.platform == "win32":
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        process.stdin.write(theirs.share(process.pid))
        process.stdin.close()
        return process
    descriptor = theirs.fileno()
    return await asyncio.create_subprocess_exec(
        *arguments,
        pass_fds=(descriptor,),
        stdin=asyncio.subprocess.DEVNULL,
        env={**environment, _SOCKET: str(descriptor)},
    )


def inherited_socket() -> socket.socket:
    """Return the socket that ``start_with_socket`` has given to this program."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read())
    descriptor = int(os.environ.pop(_SOCKET))
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
