"""Refuses real I/O, threads, processes and blocking calls while orchestration code runs.

An audit hook sees them all, in C code too, and costs next to nothing elsewhere; it cannot be taken
out again, so it looks at the thread first. Roads not taken: a sandbox that imports modules anew
(breaks everyday libraries), and replacing modules for good (other threads share them). What an
older interpreter does not report is swapped for the time of the turn only.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from perdure.authoring.recorder import running
from perdure.engine.sites import find_user_frame, site_of
from perdure.errors import ForbiddenInOrchestration

if TYPE_CHECKING:
    from types import FrameType

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
_REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(_FILE_EVENTS.split(), _FILES),
    **dict.fromkeys(_NETWORK_EVENTS.split(), _NETWORK),
    **dict.fromkeys(_PROCESS_EVENTS.split(), _PROCESS),
    "time.sleep": _SLEEP,
}

# Reading source, time zones and modules is part of running Python, and a logger's file or a
# debugger's settings are not the orchestration's own work.
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
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if running and event in _REFUSED and threading.get_ident() in running:
        frame = sys._getframe(1)  # noqa: SLF001
        if not _is_allowed(frame) and not _is_time_zone(event, args):
            raise refusal(event, args, frame)


def refusal(event: str, args: tuple[Any, ...], frame: FrameType | None) -> ForbiddenInOrchestration:
    user = find_user_frame(frame)
    where = site_of(user) if user is not None else "an unknown place"
    subject = f"({args[0]!r})" if args and isinstance(args[0], (str, int, float)) else ""
    return ForbiddenInOrchestration(
        f"{event}{subject} at {where} inside an orchestration: {_REFUSED[event]}; "
        "make it an activity and await that"
    )


def _is_time_zone(event: str, args: tuple[Any, ...]) -> bool:
    # Read in C, so that no frame tells who asks.
    return event == "open" and isinstance(args[0], str) and "/zoneinfo/" in args[0]


def _is_allowed(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _ALLOWED_MODULES:
            return True
        # A finalizer comes by whenever the garbage collector does: not the orchestration's doing.
        if frame.f_code.co_name == "__del__":
            return True
        if frame.f_code.co_name == "run_dry":
            return False
        frame = frame.f_back
    return False


if sys.version_info >= (3, 13):

    def enter() -> None:
        """Guard the threads that run orchestration code; this is one of them now."""
        if not _is_installed:
            _install()

    def leave() -> None:
        """Nothing was swapped: everything is reported by the interpreter."""

else:
    # Swapped in each turn, and as attributes of the modules it would cost three times as much.
    _time = time.__dict__
    _threading = threading.__dict__
    _sleep: Any = _time["sleep"]
    _start_thread: Any = _threading["_start_new_thread"]

    def _guarded_sleep(seconds: Any, /) -> None:
        if threading.get_ident() in running:
            raise refusal("time.sleep", (seconds,), sys._getframe(1))  # noqa: SLF001
        _sleep(seconds)

    def _guarded_start(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)  # noqa: SLF001
        if threading.get_ident() in running and not _is_allowed(frame):
            raise refusal("_thread.start_new_thread", (), frame)
        return _start_thread(*args, **kwargs)

    def enter() -> None:
        """Guard the threads that run orchestration code; this is one of them now."""
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
        """This thread runs no orchestration code any more, or that of whoever was there before."""
        if not running:
            # The last thread that leaves a turn puts things back.
            _time["sleep"] = _sleep
            _threading["_start_new_thread"] = _start_thread
