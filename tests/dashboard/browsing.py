"""A server for the tests of the page, and a tab of a browser that remembers what it saw."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import uvicorn

from patience import HANG_SECONDS
from perdure.dashboard import live
from perdure.dashboard.app import STATIC

AXE = Path(__file__).parents[2] / "ui/node_modules/axe-core/axe.min.js"
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)


def _missing() -> str | None:
    if CHROMIUM is None:
        return "a browser is missing: install Debian's chromium, or name one in CHROMIUM"
    if not (STATIC / "index.html").is_file() or not AXE.is_file():
        return "the page is not built: install npm, then run make ui"
    return None


NEEDS_BROWSER = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))

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
"""Each kind of view, and words that show that it is there."""


@contextmanager
def launched():
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()


@contextmanager
def serving(app, loop):
    """Serve on the loop of a runtime. It looks often at the store, so that no test waits for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    with mock.patch.object(live, "LOOK_SECONDS", 0.05), mock.patch.object(live, "READ_SHARE", 0):
        running = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), loop.loop)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        running.result(HANG_SECONDS)
        listener.close()


class Tab:
    """A tab of the browser on one server. ``page`` is Playwright's."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.troubles: list[str] = []
        """Errors that the page logged, and requests to other servers."""
        self._requests: list[str] = []
        self.context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce"} | options
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(HANG_MS)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        self.page.on("response", lambda it: self._requests.append(f"{it.status} {it.url}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.context.close()

    def forget(self) -> None:
        self.troubles.clear()
        self._requests.clear()

    def _on_console(self, said: Any) -> None:
        is_refused = re.search(r"status of (400|401|404|409)", said.text)
        if said.type == "error" and not is_refused:
            self.troubles.append(said.text)

    def _on_request(self, asked: Any) -> None:
        self._requests.append(f"    {asked.method} {asked.url}")
        if not asked.url.startswith(("http://127.0.0.1", "data:", "blob:", "file:")):
            self.troubles.append(asked.url)

    def describe(self) -> str:
        """Return what the page shows, what it logged, and its last requests."""
        try:
            shown = self.page.inner_text("body", timeout=5_000)
        except Exception as error:  # a report of a failure must not fail
            shown = f"(its text cannot be read: {error})"
        parts = [self.page.url, shown, *self.troubles, *self._requests[-30:]]
        return "\n".join(parts)

    # --- what a person does

    def load(self, view: str) -> Any:
        """Load a view by its address."""
        self.page.goto(self.address + view)
        return self.page

    def visit(self, view: str) -> Any:
        """Change to a view as the buttons "back" and "forward" do, without loading the page."""
        if not self.page.url.startswith(self.address):
            return self.load(view)
        self.page.evaluate(
            """to => {
                history.pushState(null, "", to);
                dispatchEvent(new PopStateEvent("popstate"));
            }""",
            self.address + view,
        )
        return self.page

    def see(self, words: str) -> None:
        """Wait until a text that fits is in sight."""
        self.page.get_by_text(re.compile(words)).filter(visible=True).first.wait_for()

    def press(self, name: str) -> None:
        """Press a button."""
        self.page.get_by_role("button", name=name, exact=True).click()

    def confirm(self, name: str | re.Pattern[str]) -> None:
        """Press a button of the dialog, and wait until it is closed."""
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("button", name=name).click()
        dialog.wait_for(state="detached")

    def see_run(self, word: str) -> None:
        """Wait until the run that is shown has this status."""
        self.page.locator(f".now-card.{word}").wait_for()


@dataclass
class Served:
    """A server on a store, with a tab."""

    tab: Tab
    loop: Any
    runtime: Any
