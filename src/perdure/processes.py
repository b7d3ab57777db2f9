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

    def after_fork_in_child(function: Callable[[], object]) -> None:
        """Call the function in each forked child. Windows has no fork."""

    @contextmanager
    def on_stop_signals(handler: Callable[[int], object]) -> Generator[None]:
        """Call the handler on the running event loop with the number of each stop signal."""
        loop = asyncio.get_running_loop()
        before: dict[signal.Signals, Any] = {}
        try:
            for each in STOP_SIGNALS:
                before[each] = signal.signal(
                    each, lambda number, _: loop.call_soon_threadsafe(handler, number)
                )
            yield
        finally:
            for each, found in before.items():
                signal.signal(each, found)

    def start_program(
        arguments: Sequence[str], *, own_group: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start a program that ``ask_to_stop`` can reach.

        ``own_group=False`` is meant to let Ctrl-C in a terminal reach it too. Here a program in the
        group of another one cannot be asked to stop, so it gets a group of its own.
        """
        del own_group
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
        return subprocess.Popen(arguments, creationflags=flags)  # noqa: S603

    def ask_to_stop(program: subprocess.Popen[bytes]) -> None:
        """Send the signal that asks a program to end: Ctrl-Break, as Ctrl-C is not passed on.

        Without a console there are no signals, and the program is ended as by a crash.
        """
        if program.poll() is None:
            try:
                program.send_signal(signal.CTRL_BREAK_EVENT)
            except OSError:
                program.terminate()

    def pass_interrupt_on(program: subprocess.Popen[bytes]) -> None:
        """After Ctrl-C: a program with a group of its own has not got it from the console."""
        ask_to_stop(program)

    async def start_with_socket(
        theirs: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Start a program and give it one end of a pair of sockets: ``inherited_socket``."""
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        process.stdin.write(theirs.share(process.pid))
        process.stdin.close()
        return process

    def inherited_socket() -> socket.socket:
        """Return the socket that ``start_with_socket`` has given to this program."""
        shared = sys.stdin.buffer.read()
        return socket.fromshare(shared)

else:
    STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
    """Signals that ask a program to end."""
    _SOCKET: Final = "PERDURE_CHILD_SOCKET"

    def after_fork_in_child(function: Callable[[], object]) -> None:
        """Call the function in each forked child."""
        os.register_at_fork(after_in_child=function)

    @contextmanager
    def on_stop_signals(handler: Callable[[int], object]) -> Generator[None]:
        """Call the handler on the running event loop with the number of each stop signal."""
        loop = asyncio.get_running_loop()
        for each in STOP_SIGNALS:
            loop.add_signal_handler(each, handler, each)
        try:
            yield
        finally:
            for each in STOP_SIGNALS:
                loop.remove_signal_handler(each)

    def start_program(
        arguments: Sequence[str], *, own_group: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start a program that ``ask_to_stop`` can reach.

        With ``own_group=False``, Ctrl-C in a terminal reaches it too.
        """
        return subprocess.Popen(arguments, process_group=0 if own_group else None)  # noqa: S603

    def ask_to_stop(program: subprocess.Popen[bytes]) -> None:
        """Send the signal that asks a program to end."""
        if program.poll() is None:
            program.terminate()

    def pass_interrupt_on(program: subprocess.Popen[bytes]) -> None:
        """After Ctrl-C: the terminal has sent it to every program in it; a second one would cut
        an orderly end short.
        """

    async def start_with_socket(
        theirs: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Start a program and give it one end of a pair of sockets: ``inherited_socket``."""
        descriptor = theirs.fileno()
        return await asyncio.create_subprocess_exec(
            *arguments,
            pass_fds=(descriptor,),
            stdin=asyncio.subprocess.DEVNULL,
            env={**environment, _SOCKET: str(descriptor)},
        )

    def inherited_socket() -> socket.socket:
        """Return the socket that ``start_with_socket`` has given to this program."""
        descriptor = int(os.environ.pop(_SOCKET))
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
