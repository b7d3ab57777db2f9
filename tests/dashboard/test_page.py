"""The page in a real browser: every view and action, light and dark, wide and narrow."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket

import pytest
import uvicorn

from dashboard.conftest import running_shop
from patience import HANG_SECONDS
from perdure.dashboard import dashboard
from perdure.dashboard.app import STATIC

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="a browser is missing: install Debian's chromium"),
    pytest.mark.skipif(
        not (STATIC / "index.html").is_file(), reason="the page is not built: run make ui (npm)"
    ),
]

HANG_MS = HANG_SECONDS * 1000


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a server, under a prefix as in a larger application."""
    from starlette.applications import Starlette

    with running_shop(str(tmp_path_factory.mktemp("page") / "shop.db")) as (loop, runtime):
        app = Starlette()
        app.mount("/ops", dashboard(runtime, hosts=["127.0.0.1"]))
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), loop.loop)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/ops"
        server.should_exit = True
        serving.result(HANG_SECONDS)
        listener.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A tab that fails the test if the page logs an error or asks another server."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    tab = context.new_page()
    tab.set_default_timeout(HANG_MS)
    troubles = []
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on(
        "console",
        lambda said: (
            troubles.append(said.text)
            if said.type == "error" and "404" not in said.text and "400" not in said.text
            else None
        ),
    )
    tab.on(
        "request",
        lambda asked: (
            troubles.append(asked.url)
            if not asked.url.startswith(("http://127.0.0.1", "data:"))
            else None
        ),
    )
    yield tab
    context.close()
    assert troubles == []


def expect_text(page, text):
    page.get_by_text(re.compile(text)).first.wait_for()


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("/", "Needs attention"),
        ("/runs", "retry-1"),
        ("/runs?q=status:failed", "no anvil in stock"),
        ("/errors", "retry all"),
        ("/inbox", "approval"),
        ("/workers", "slots|of 1000"),
        ("/definitions", "its code is needed"),
        ("/store", "sqlite"),
        ("/run?id=big-1", "Waiting .* for event 'approval'"),
        ("/run?id=retry-1", "attempt 2 of 5"),
        ("/run?id=bad-1", "retry lets it go on from where it failed"),
        ("/run?id=fan-1", "30 . reserve"),
        ("/run?id=big-1&tab=source", "waits for event approval"),
        ("/run?id=o-1&tab=events", "OrchestrationStarted"),
        ("/run?id=o-1&tab=state", "items"),
        ("/run?id=o-1&tab=family", "deliver"),
        ("/run?id=bad-1&tab=compare", "anvil"),
        ("/run?id=nobody-1", "no instance"),
        ("/runs?q=nome:x", "did you mean 'name'"),
    ],
)
def test_every_view_is_an_address(address, page, view, words):
    page.goto(address + view)
    expect_text(page, words)


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_is_wider_than_the_window(address, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    tab.set_default_timeout(HANG_MS)
    for view in ("/", "/runs", "/run?id=big-1", "/run?id=bad-1", "/definitions"):
        tab.goto(address + view)
        tab.locator("main h1, main h2").first.wait_for()
        wide = tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, view
    context.close()


def test_an_event_is_sent_from_the_run_and_the_page_follows(address, page):
    page.goto(f"{address}/definitions")
    section = page.locator("section.group", has_text="checkout")
    section.get_by_text("Start one").click()
    section.get_by_label(re.compile("order: str")).fill('["big-page", ["lamp"]]')
    section.get_by_label("id", exact=True).fill("big-page")
    section.get_by_role("button", name="Start").click()
    expect_text(page, "Waiting .* for event 'approval'")
    page.get_by_role("button", name="Send").click()
    page.locator("h1 .status.completed").wait_for()


def test_an_action_asks_first_and_shows_its_command(address, page):
    page.goto(f"{address}/run?id=retry-1")
    page.get_by_role("button", name="pause").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("The same from a terminal").click()
    dialog.get_by_text("perdure pause retry-1").wait_for()
    dialog.get_by_role("button", name="Pause").click()
    page.locator("h1 .status.paused").wait_for()
    page.get_by_role("button", name="resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    page.locator("h1 .status.retrying").wait_for()


def test_a_child_opens_in_place_and_a_step_shows_its_details(address, page):
    page.goto(f"{address}/run?id=o-1")
    page.get_by_role("button", name=re.compile("^steps of o-1")).click()
    expect_text(page, "van for o-1")
    page.get_by_role("button", name=re.compile("charge")).click()
    page.locator("dl.panel").get_by_text(re.compile(r"shop\.py:\d+")).wait_for()
    assert "step=" in page.url


def test_the_keyboard_reaches_everything(address, page):
    page.goto(f"{address}/")
    page.locator("main h2").first.wait_for()
    page.keyboard.press("/")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("name:fan_out")
    page.keyboard.press("Enter")
    page.locator("table.runs a", has_text="fan-1").wait_for()
    page.locator("main h1").click()
    page.keyboard.press("j")
    page.locator("tr.at").wait_for()
    page.keyboard.press("Enter")
    expect_text(page, "30 . reserve")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.get_by_role("dialog", name="Go to").get_by_role("textbox").fill("store")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Store").wait_for()


def test_html_and_escapes_of_payloads_are_shown_as_text(address, page):
    evil = '<img src=x onerror="document.title=1">\\u001b[31m'
    page.goto(f"{address}/definitions")
    section = page.locator("section.group", has_text="checkout")
    section.get_by_text("Start one").click()
    section.get_by_label(re.compile("order: str")).fill(
        f'["big-evil", ["{evil.replace(chr(34), chr(39))}"]]'
    )
    section.get_by_label("id", exact=True).fill("<b>evil</b>")
    section.get_by_role("button", name="Start").click()
    page.locator("h1 .id", has_text="<b>evil</b>").wait_for()
    expect_text(page, "onerror")
    assert page.locator("main img").count() == 0
