"""The page in a real browser: every view and action, light and dark, wide and narrow."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette

from dashboard import shop
from dashboard.browsing import HANG_MS, NEEDS_BROWSER, VIEWS, expect_text, serving
from dashboard.conftest import STORES, running_shop, store_of
from perdure import Client
from perdure.dashboard import dashboard, read_tokens

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module", params=STORES)
def served(request, tmp_path_factory):
    """The address of a server on each store, under a prefix as in a larger application."""
    with running_shop(store_of(request.param, tmp_path_factory)) as (loop, runtime):
        app = Starlette()
        app.mount("/ops", dashboard(runtime, hosts=["127.0.0.1"]))
        with serving(app, loop) as address:
            yield f"{address}/ops", loop, runtime


@pytest.fixture
def address(served):
    return served[0]


def test_every_view_is_an_address(address, page):
    others = [
        ("/runs?q=status:failed", "no anvil in stock"),
        ("/run?id=bigg-1", "Do you mean"),
        ("/runs?q=nome:x", "did you mean 'name'"),
        ("/file", "Drop a file"),
    ]
    for view, words in [*VIEWS, *others]:
        page.goto(address + view)
        expect_text(page, words)


def start(page, address, order, *, items='["lamp"]', instance_id=None):
    page.goto(f"{address}/definitions")
    section = page.locator("section.group", has_text="checkout")
    section.get_by_text("Start one").click()
    section.get_by_label(re.compile("^order")).fill(order)
    section.get_by_label(re.compile("^items")).fill(items)
    section.get_by_label(re.compile("^id")).fill(instance_id or order)
    section.get_by_role("button", name="Start").click()


def test_an_event_is_sent_by_a_form_of_its_type_and_the_page_follows(address, page):
    start(page, address, "big-page")
    expect_text(page, "for event 'approval'")
    page.get_by_label("by", exact=True).fill("ann")
    page.get_by_label("level").select_option("board")
    page.get_by_role("button", name="Send").click()
    page.locator(".now-card.completed").wait_for()
    page.goto(f"{address}/run?id=big-page&tab=events")
    page.get_by_label("Filter events").fill("ExternalEvent")
    expect_text(page, '"by":"ann","level":"board"')


def confirm(page, name):
    page.get_by_role("dialog").get_by_role("button", name=name).click()


def test_an_action_asks_first_and_shows_its_command(address, page):
    page.goto(f"{address}/run?id=retry-1")
    page.get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("The same from a terminal").click()
    dialog.get_by_text("perdure pause retry-1").wait_for()
    dialog.get_by_text('await client.get("retry-1").pause()').wait_for()
    confirm(page, "Pause")
    page.locator(".now-card.paused").wait_for()
    page.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    page.locator(".now-card.retrying").wait_for()


def test_a_run_is_cancelled_terminated_retried_rerun_and_deleted(address, page):
    start(page, address, "big-life")
    page.get_by_role("button", name="Cancel").click()
    confirm(page, "Cancel")
    page.locator(".now-card.cancelled").wait_for()
    page.get_by_role("button", name="Retry").click()
    confirm(page, "Retry")
    page.locator(".now-card.waiting").wait_for()
    page.get_by_role("button", name="Terminate").click()
    confirm(page, "Terminate")
    page.locator(".now-card.terminated").wait_for()
    page.get_by_role("button", name="Rerun").click()
    page.get_by_role("dialog").get_by_label(re.compile("Arguments")).fill('["o-again", ["lamp"]]')
    confirm(page, "Rerun")
    page.locator(".now-card.completed").wait_for()
    page.get_by_role("button", name=re.compile("charge")).click()
    page.get_by_role("button", name="Rerun from here").click()
    confirm(page, "Rerun")
    page.locator(".now-card.completed").wait_for()
    page.get_by_role("button", name="Delete").click()
    confirm(page, "Delete")
    page.locator("h1", has_text="Runs").wait_for()


def test_many_are_chosen_confirmed_by_their_number_and_cancelled(served, page):
    address, loop, runtime = served

    async def begin():
        pairs = [(f"many-{n}", (f"big-{n}", ["lamp"])) for n in range(101)]
        await runtime.start_many(shop.checkout, pairs)

    loop.run(begin())
    page.goto(f"{address}/runs?q=id:many-*")
    page.get_by_role("button", name="Terminate").click()
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name="Terminate 101 runs")
    assert button.is_disabled()
    dialog.get_by_label("Type 101 to confirm").fill("101")
    button.click()
    expect_text(page, "101 runs done")
    page.goto(f"{address}/runs?q=id:many-* status:terminated")
    page.get_by_label(re.compile("^Select many-")).first.check()
    page.get_by_role("button", name="Delete").click()
    confirm(page, "Delete 1 run")
    expect_text(page, "1 run done")


def test_a_schedule_is_paused_and_a_promise_is_resolved(served, page):
    address, loop, runtime = served
    page.goto(f"{address}/schedules")
    group = page.locator("section.group", has_text="report-berlin")
    group.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("moving house")
    confirm(page, "Pause")
    group.get_by_text("moving house").wait_for()
    group.get_by_role("button", name="Run now").click()
    confirm(page, "Run now")
    group.locator("a.slot").first.wait_for()
    group.get_by_role("button", name="Resume").click()
    group.locator(".status", has_text="active").wait_for()

    loop.run(runtime.start(shop.pay, "o-11", id="pay-page"))
    page.goto(f"{address}/inbox")
    group = page.locator("section.group", has_text="payment:o-11")
    group.get_by_label("value").fill('"paid"')
    group.get_by_role("button", name="Resolve").click()
    group.wait_for(state="detached")
    page.goto(f"{address}/run?id=pay-page")
    page.locator(".now-card.completed").wait_for()


def test_a_file_is_looked_at_and_a_saved_page_needs_no_server(served, browser, page, tmp_path):
    address, loop, runtime = served

    async def lines():
        return "\n".join([line async for line in runtime.admin.export("o-1")])

    page.goto(address + "/")
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "o-1.jsonl"));
            dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
        }""",
        loop.run(lines()),
    )
    expect_text(page, "o-1.jsonl, 2 runs")
    page.locator(".now-card.completed").wait_for()
    page.get_by_role("link", name="events").click()
    expect_text(page, "OrchestrationStarted")
    assert page.get_by_role("button", name="Delete").count() == 0

    page.goto(f"{address}/run?id=o-1")
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save page").click()
    file = tmp_path / "o-1.html"
    saving.value.save_as(file)
    context = browser.new_context(offline=True)
    alone = context.new_page()
    alone.set_default_timeout(HANG_MS)
    troubles = []
    alone.on("pageerror", lambda error: troubles.append(str(error)))
    alone.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    alone.goto(file.as_uri())
    alone.locator(".now-card.completed").wait_for()
    alone.get_by_role("button", name=re.compile("^steps of o-1")).click()
    expect_text(alone, "van for o-1")
    alone.get_by_role("link", name="family").click()
    expect_text(alone, "deliver")
    assert troubles == []
    context.close()


def test_a_run_that_is_deleted_while_it_is_looked_at_is_said_to_be_gone(served, page):
    address, loop, runtime = served

    async def begin():
        await (await runtime.start(shop.report, "Rome", id="gone-1")).result()

    loop.run(begin())
    page.goto(f"{address}/run?id=gone-1")
    page.locator(".now-card.completed").wait_for()
    loop.run(runtime.admin.delete("gone-1"))
    page.get_by_role("link", name="family").click()
    expect_text(page, "there is no instance 'gone-1'")


def test_a_large_payload_does_not_stop_the_page(served, page):
    address, loop, runtime = served

    async def begin():
        handle = await runtime.start(shop.report, "x" * 1_000_000, id="large-1")
        await handle.result()

    loop.run(begin())
    page.goto(f"{address}/run?id=large-1&tab=state")
    expect_text(page, "bytes in all")


def test_a_token_is_asked_for_and_an_unknown_one_is_refused(served, browser, tmp_path):
    _, loop, runtime = served
    file = tmp_path / "tokens"
    file.write_text("ann operate " + "t" * 30)
    file.chmod(0o600)
    with serving(dashboard(runtime, tokens=read_tokens(file)), loop) as address:
        context = browser.new_context()
        tab = context.new_page()
        tab.set_default_timeout(HANG_MS)
        tab.goto(f"{address}/run?id=big-1")
        field = tab.get_by_label("This server asks for a token.")
        field.fill("wrong" * 8)
        with tab.expect_response(lambda answer: answer.status == 401):
            tab.get_by_role("button", name="Enter").click()
        field.fill("t" * 30)
        tab.get_by_role("button", name="Enter").click()
        tab.locator(".now-card").wait_for()
        assert tab.get_by_role("button", name="Terminate").count() == 0
        tab.evaluate("sessionStorage.setItem('perdure-token', 'expired-and-unknown')")
        tab.reload()
        tab.get_by_label("This server asks for a token.").wait_for()
        context.close()


def test_a_store_that_is_away_is_said_on_the_page(browser, tmp_path):
    with running_shop(str(tmp_path / "shop.db")) as (loop, _):
        client = Client(tmp_path / "shop.db")
        loop.run(client.__aenter__())
        with serving(dashboard(client), loop) as address:
            context = browser.new_context()
            tab = context.new_page()
            tab.set_default_timeout(HANG_MS)
            tab.goto(f"{address}/")
            expect_text(tab, "Needs attention")
            loop.run(client.__aexit__(None, None, None))
            tab.get_by_label("Pages").get_by_role("link", name="Store").click()
            expect_text(tab, "closed|not open")
            context.close()


def test_a_child_opens_in_place_and_a_step_shows_its_details(address, page):
    page.goto(f"{address}/run?id=o-1")
    page.get_by_role("button", name=re.compile("^steps of o-1")).click()
    expect_text(page, "van for o-1")
    page.get_by_role("button", name=re.compile("charge")).click()
    page.locator(".panel").get_by_text(re.compile(r"shop\.py:\d+")).wait_for()
    page.locator(".panel pre", has_text="receipt-o-1").wait_for()
    assert "step=" in page.url


def test_the_keyboard_reaches_everything(address, page):
    page.goto(f"{address}/")
    page.locator("main h2").first.wait_for()
    page.keyboard.press("/")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("name:fan_out")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('table.runs tbody tr').length === 1")
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
    evil = "<img src=x onerror='document.title=1'>\\u001b[31m"
    start(page, address, "big-evil", items=f'["{evil}"]', instance_id="<b>evil</b>")
    page.locator("h1 .id", has_text="<b>evil</b>").wait_for()
    expect_text(page, "onerror")
    assert page.locator("main img").count() == 0
