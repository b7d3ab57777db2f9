"""A terminal of a given width for a command: what a person would see."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from patience import HANG_SECONDS

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Cursor movements and screen switches of live views.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def see(args, width, environ, cwd, *, height=40, answers=b"", colours=True, program=None):
    """Run the command in a terminal; returns its exit code and the raw bytes it wrote, as text."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environ = {**environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    if not colours:
        environ["NO_COLOR"] = "1"
    process = subprocess.Popen(
        [*(program or (sys.executable, "-m", "perdure")), *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ,
        cwd=cwd,
        start_new_session=True,
    )
    os.close(slave)
    os.write(master, answers)
    seen = bytearray()
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the last writer has gone
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    return process.wait(HANG_SECONDS), seen.decode()


def plain(text):
    """Without colours, and with the line ends of a file."""
    return _CONTROL.sub("", _COLOUR.sub("", text)).replace("\r\n", "\n").replace("\r", "\n")
