"""A browser for the tests of the page, and a server for it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from contextlib import contextmanager

import pytest
import uvicorn

from patience import HANG_SECONDS
from perdure.dashboard.app import STATIC

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)

NEEDS_BROWSER = [
    pytest.mark.skipif(CHROMIUM is None, reason="a browser is missing: install Debian's chromium"),
    pytest.mark.skipif(
        not (STATIC / "index.html").is_file(), reason="the page is not built: run make ui (npm)"
    ),
]

HANG_MS = HANG_SECONDS * 1000
VIEWS = [
    ("/", "Needs attention"),
    ("/runs?q=id:retry-*", "retry-1"),
    ("/errors", "Retry all"),
    ("/inbox", "payment:o-9"),
    ("/schedules", "report-berlin"),
    ("/workers", "of 1000"),
    ("/definitions", "its code is needed"),
    ("/store", "Dead letters"),
    ("/run?id=big-1", "for event 'approval'"),
    ("/run?id=retry-1", "attempt 2 of 5"),
    ("/run?id=blocked-1", "the code did"),
    ("/run?id=bad-1", "it goes on from where it failed"),
    ("/run?id=o-1", "receipt-o-1"),
    ("/run?id=fan-1", "30 . reserve"),
    ("/run?id=big-1&tab=source", "waits for event approval"),
    ("/run?id=o-1&tab=events", "OrchestrationStarted"),
    ("/run?id=o-1&tab=state", "items"),
    ("/run?id=o-1&tab=family", "deliver"),
    ("/run?id=bad-1&tab=compare", "anvil"),
]


@contextmanager
def serving(app, loop):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    running = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), loop.loop)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    running.result(HANG_SECONDS)
    listener.close()


def expect_text(page, text):
    page.get_by_text(re.compile(text)).first.wait_for()
