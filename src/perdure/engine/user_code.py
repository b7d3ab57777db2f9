"""Recognises user code on the stack: its lines, the calls that it must not make, and signals.

Real I/O, threads, processes and blocking calls are refused while orchestration code runs. An audit
hook sees all of them, in C code too, and costs little elsewhere. It cannot be removed, so it checks
the thread first. Calls that an older interpreter does not report to audit hooks are replaced during
the turn only.

Alternatives that were rejected: a sandbox that imports modules again (it breaks common libraries),
and replacing functions of modules permanently (other threads use them too).
"""

from __future__ import annotations

import asyncio
import dis
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from perdure.authoring.context import Step, running
from perdure.errors import ForbiddenInOrchestration
from perdure.model.failures import author_line
from perdure.processes import on_audit_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    _AbstractLoop = asyncio.BaseEventLoop  # the standard loop declares what is set below
else:
    _AbstractLoop = asyncio.AbstractEventLoop

F = TypeVar("F", bound="Callable[..., Any]")

# --- lines of user code

_PACKAGE = Path(__file__).parent.parent
_LIBRARY = str(Path(asyncio.__file__).parent.parent) + os.sep
_NOT_USERS = (
    *(
        f"{_PACKAGE / part}{os.sep}"
        for part in ("engine", "authoring", "runtime", "client", "providers")
    ),
    *(str(_PACKAGE / module) for module in ("codec.py", "limits.py", "processes.py")),
    "<frozen ",
)

_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

_boundaries: list[CodeType] = []


def boundary(function: F) -> F:
    """Mark a function of the engine that calls user code: frames below it belong to the host."""
    _boundaries.append(function.__code__)
    return function


def is_boundary(frame: FrameType) -> bool:
    return frame.f_code in _boundaries


class _Source:
    """A file of the author: its shown name, and a cache of its call sites."""

    def __init__(self, shown: str, *, is_installed: bool = False) -> None:
        self.shown = shown
        self.is_installed = is_installed
        # The key decides the line: first line of the code, its line table, last instruction.
        self.sites: dict[tuple[int, bytes, int], str] = {}


_sources: dict[str, _Source | None] = {}
"""The sources by file name; None for files of the library. One entry for each file."""
_UNSEEN = _Source("")


def call_site(depth: int = 1) -> str:
    """Return ``file:line`` of the nearest frame of user code, or "" if there is none.

    ``depth``: number of frames of the engine above it, which are skipped.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        source = _sources.get(code.co_filename, _UNSEEN)
        if source is _UNSEEN:
            source = _look_up(frame)
        if source is not None:
            # f_lineno is slow in long functions, so the result is cached.
            place = (code.co_firstlineno, code.co_linetable, frame.f_lasti)
            site = source.sites.get(place)
            if site is None:
                site = source.sites[place] = f"{source.shown}:{frame.f_lineno}"
            return site
        if code in _boundaries:
            return ""
        frame = frame.f_back
    return ""


def is_user(frame: FrameType) -> bool:
    """Return True for code that is neither perdure's nor of the standard library."""
    return _look_up(frame) is not None


def find_author_site() -> str:
    """Return ``file:line`` of the nearest frame of the author, not of an installed library, or "".

    In a task of a library it is the line of the author that created the task.
    """
    recorder: Any = running[threading.get_ident()]
    package = _top_package(recorder.handler.fn.__module__)
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not is_boundary(frame):
        source = _look_up(frame)
        if source is not None and (
            not source.is_installed or _top_package(frame.f_globals.get("__name__")) == package
        ):
            return site_of(frame)
        frame = frame.f_back
    return recorder.loop.branch().site or call_site()


def _top_package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def with_author_frames(error: BaseException) -> BaseException:
    """Return the error with the frames of the author's code that called the engine."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not is_boundary(frame):
        if is_author(frame):
            error.__traceback__ = TracebackType(
                error.__traceback__, frame, frame.f_lasti, frame.f_lineno
            )
        frame = frame.f_back
    return error


def is_author(frame: FrameType) -> bool:
    """Return True for code that is neither installed nor of the standard library."""
    source = _look_up(frame)
    return source is not None and not source.is_installed


def site_of(frame: FrameType) -> str:
    source = _look_up(frame)
    file = frame.f_code.co_filename if source is None else source.shown
    return f"{file}:{frame.f_lineno}"


def _look_up(frame: FrameType) -> _Source | None:
    file = frame.f_code.co_filename
    if file not in _sources:
        shown = _show(file, frame.f_globals.get("__name__", ""))
        is_installed = not _INSTALLED.isdisjoint(Path(file).parts)
        _sources[file] = None if shown is None else _Source(shown, is_installed=is_installed)
    return _sources[file]


def _show(file: str, module: str) -> str | None:
    """Return the path from the top package on, equal on every machine; None for library code."""
    if file.startswith(_NOT_USERS):
        return None
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return None
    # A library in an archive, as the embeddable Python for Windows has it, has relative names.
    if _top_package(module) in sys.stdlib_module_names and not Path(file).is_absolute():
        return None
    parts = file.replace(os.sep, "/").split("/")
    depth = module.count(".") + 1
    if parts[-1] == "__init__.py":
        depth += 1
    return "/".join(parts[-depth:])


# --- forbidden calls

_FILES: Final = "files are read and written by activities"
_NETWORK: Final = "the network is for activities"
_PROCESS: Final = "processes and threads are started by activities"
_SLEEP: Final = "use `await asyncio.sleep(...)`, which is a durable timer here"

_FILE_EVENTS: Final = """
    open os.listdir os.scandir os.walk os.fwalk os.mkdir os.remove os.rename os.rmdir os.truncate
    os.link os.symlink os.chmod os.chown os.utime os.getxattr os.setxattr os.listxattr
    os.removexattr glob.glob pathlib.Path.glob pathlib.Path.rglob mmap.__new__ shutil.copyfile
    shutil.copytree shutil.move shutil.rmtree shutil.make_archive shutil.unpack_archive
    tempfile.mkdtemp tempfile.mkstemp sqlite3.connect fcntl.flock fcntl.lockf
"""
_NETWORK_EVENTS: Final = """
    socket.__new__ socket.connect socket.bind socket.sendto socket.sendmsg socket.getaddrinfo
    socket.gethostbyname socket.gethostbyaddr socket.getnameinfo http.client.connect
    http.client.send urllib.Request ftplib.connect smtplib.connect imaplib.open poplib.connect
    nntplib.connect telnetlib.Telnet.open webbrowser.open
"""
_PROCESS_EVENTS: Final = """
    subprocess.Popen os.system os.posix_spawn os.spawn os.startfile os.exec os.fork os.forkpty
    os.kill os.killpg pty.spawn _thread.start_new_thread _thread.start_joinable_thread
"""
_REFUSED_EVENTS: Final[dict[str, str]] = {
    **dict.fromkeys(_FILE_EVENTS.split(), _FILES),
    **dict.fromkeys(_NETWORK_EVENTS.split(), _NETWORK),
    **dict.fromkeys(_PROCESS_EVENTS.split(), _PROCESS),
    "time.sleep": _SLEEP,
    "builtins.input": "send the answer as an event, and `await wait_for_event(...)`, or",
}

# Python itself reads source, time zones and modules; loggers and debuggers read files of their own.
# None of that is work of the orchestration.
_ALLOWED_MODULES: Final = frozenset(
    {
        "_frozen_importlib",
        "_frozen_importlib_external",
        "bdb",
        "cmd",
        "code",
        "encodings",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "linecache",
        "logging",
        "logging.handlers",
        "pdb",
        "tokenize",
        "traceback",
        "warnings",
        "weakref",
        "zipimport",
        "zoneinfo",
        "zoneinfo._common",
        "zoneinfo._tzpath",
    }
)

_is_installed = False


def _install() -> None:
    global _is_installed  # noqa: PLW0603
    _is_installed = True
    on_audit_events(_REFUSED_EVENTS, _audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if running and threading.get_ident() in running:
        frame = sys._getframe(2)  # noqa: SLF001
        if not _is_allowed(frame) and not _is_time_zone(event, args):
            raise refusal(event, args)


def refusal(event: str, args: tuple[Any, ...]) -> ForbiddenInOrchestration:
    subject = f"({args[0]!r})" if args and isinstance(args[0], (str, int, float)) else ""
    return ForbiddenInOrchestration(
        f"{event}{subject} at {find_author_site()} inside an orchestration: "
        f"{_REFUSED_EVENTS[event]}; "
        "make it an activity and await that"
    )


def _is_time_zone(event: str, args: tuple[Any, ...]) -> bool:
    # The file is read by C code, so no Python frame shows the caller.
    return event == "open" and isinstance(args[0], str) and "/zoneinfo/" in args[0]


def _is_allowed(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _ALLOWED_MODULES:
            return True
        # A finalizer runs when the garbage collector does; the orchestration did not call it.
        if frame.f_code.co_name == "__del__":
            return True
        if is_boundary(frame):
            return False
        frame = frame.f_back
    return False


if sys.version_info >= (3, 13):

    def enter() -> None:
        """Install the guards; called when a thread begins to run orchestration code."""
        if not _is_installed:
            _install()

    def leave() -> None:
        """Do nothing: this interpreter reports every guarded call, so none is replaced."""

else:
    # Written in each turn through the dict: setting attributes of the modules takes three times as
    # long.
    _time = time.__dict__
    _threading = threading.__dict__
    _sleep: Any = _time["sleep"]
    _start_thread: Any = _threading["_start_new_thread"]

    def _guarded_sleep(seconds: Any, /) -> None:
        if threading.get_ident() in running:
            raise refusal("time.sleep", (seconds,))
        _sleep(seconds)

    def _guarded_start(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in running and not _is_allowed(sys._getframe(1)):  # noqa: SLF001
            raise refusal("_thread.start_new_thread", ())
        return _start_thread(*args, **kwargs)

    def enter() -> None:
        """Install the guards; called when a thread begins to run orchestration code."""
        global _sleep, _start_thread  # noqa: PLW0603
        if not _is_installed:
            _install()
        sleep, start_thread = _time["sleep"], _threading["_start_new_thread"]
        if sleep is not _guarded_sleep:
            _sleep = sleep
            _time["sleep"] = _guarded_sleep
        if start_thread is not _guarded_start:
            _start_thread = start_thread
            _threading["_start_new_thread"] = _guarded_start

    def leave() -> None:
        """Restore the replaced functions when no thread runs orchestration code any more."""
        if not running:
            _time["sleep"] = _sleep
            _threading["_start_new_thread"] = _start_thread


_REAL_WORK = "an orchestration must not do real work itself; make it an activity"
_OWN_LOOP = (
    "the event loop of an orchestration is driven by its history and cannot be changed; leave the "
    "call out, or make it an activity"
)

_REFUSED_METHODS = {
    _REAL_WORK: (
        "run_in_executor getaddrinfo getnameinfo create_connection create_server "
        "create_unix_connection create_unix_server create_datagram_endpoint start_tls sendfile "
        "connect_accepted_socket connect_read_pipe connect_write_pipe subprocess_exec "
        "subprocess_shell add_reader remove_reader add_writer remove_writer sock_recv "
        "sock_recv_into sock_recvfrom sock_recvfrom_into sock_sendall sock_sendto sock_connect "
        "sock_accept sock_sendfile add_signal_handler remove_signal_handler "
        "set_default_executor shutdown_default_executor call_soon_threadsafe"
    ),
    _OWN_LOOP: (
        "run_forever run_until_complete stop close shutdown_asyncgens set_task_factory "
        "set_debug set_exception_handler"
    ),
}


class ForbiddenLoopMethods(_AbstractLoop):
    """An event loop whose methods all raise; a subclass adds the allowed ones."""


def _refused(name: str, advice: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ForbiddenInOrchestration(f"loop.{name}() at {find_author_site()}: {advice}")

    refuse.__name__ = name
    return refuse


for _advice, _names in _REFUSED_METHODS.items():
    for _name in _names.split():
        setattr(ForbiddenLoopMethods, _name, _refused(_name, _advice))


# --- signals

_RAISE: Final = dis.opmap["RAISE_VARARGS"]


def is_interruption(error: BaseException) -> bool:
    """Return True if a signal raised the error. Call it on the thread that caught the error.

    Ctrl-C raises KeyboardInterrupt at the line that happens to run, and a signal handler may raise
    SystemExit there. The end of the process is not an outcome of that code, so it is not recorded.
    """
    if not isinstance(error, (KeyboardInterrupt, SystemExit)):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False  # Python handles signals on the main thread only
    frames = list(_frames(error))
    handlers = set(_handlers())
    if any(each.tb_frame.f_code in handlers for each in frames):
        return True
    if isinstance(error, SystemExit) or not frames:
        return False
    # The default handler has no frame: then the code was not executing a raise statement.
    innermost = frames[-1]
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] != _RAISE


def _frames(error: BaseException) -> Iterator[TracebackType]:
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _handlers() -> Iterator[Any]:
    """Yield the code objects of registered signal handlers."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):  # as asyncio.run() registers its own
            handler = handler.func
        for each in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - an object's own
            code = getattr(each, "__code__", None)
            if code is not None:
                yield code


# --- awaitables of others

_SHARED = "bound to a different event loop"
_SHARED_ADVICE = (
    "the orchestration waited for a lock, queue or event that the program or other instances share",
    "make it inside of the orchestration",
)
_FOREIGN_ADVICE = (
    "the orchestration awaited something foreign",
    "only steps and asyncio's own awaitables can be awaited, make it an activity",
)
_FOREIGN = ("attached to a different loop", _SHARED, "Task got bad yield")


def explain(error: BaseException) -> BaseException:
    """Let an error that a missing ``await`` or a foreign awaitable has caused say what to do."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Step):
        # Not by a __getattr__ of steps, which would slow down every other use of them.
        name = error.name
        error.args = (f"a step has no {name!r}: it was not awaited; write (await ...).{name}",)
        return error
    text = str(error) if type(error) is RuntimeError else ""
    if not any(words in text for words in _FOREIGN):
        return error
    line = author_line("".join(traceback.format_tb(error.__traceback__)))
    advice = _SHARED_ADVICE if _SHARED in text else _FOREIGN_ADVICE
    explained = ForbiddenInOrchestration(f"{advice[0]}{line and f' at {line}'}; {advice[1]}")
    explained.__cause__ = error
    return explained
