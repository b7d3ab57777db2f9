"""The page in a real browser: every view and action on each store, bad input, keyboard, look."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.sync_api import expect

from dashboard import shop
from dashboard.browsing import AXE, NEEDS_BROWSER, VIEWS, serving
from dashboard.conftest import running_shop
from perdure import Client
from perdure.conformance.factories import raised
from perdure.dashboard import dashboard, read_tokens

pytestmark = NEEDS_BROWSER
once = pytest.mark.parametrize("served", ["sqlite"], indirect=True)


def start(tab, order, *, items='["lamp"]', instance_id=None):
    page = tab.load("/definitions")
    section = page.locator("section.group", has_text="checkout")
    section.get_by_text("Start one").click()
    section.get_by_label(re.compile("^order")).fill(order)
    section.get_by_label(re.compile("^items")).fill(items)
    section.get_by_label(re.compile("^id")).fill(instance_id or order)
    section.get_by_role("button", name="Start").click()


def answer(tab, **parts):
    """Read the API as the page does."""
    path = parts.pop("path")
    return tab.page.evaluate(
        "([path, given]) => fetch(`api/v1${path}?${new URLSearchParams(given)}`)"
        ".then(answer => answer.json())",
        [path, parts],
    )


# --- every view and action, on each store


def test_every_view_is_shown(tab):
    others = [
        ("/runs?q=status:failed", "no anvil in stock"),
        ("/run?id=bigg-1", "Do you mean"),
        ("/file", "Drop a file"),
        ("/nothing", "There is no page nothing"),
    ]
    tab.load("/")
    for view, words in [*VIEWS, *others]:
        tab.visit(view)
        tab.see(words)


def test_an_event_is_sent_by_a_form_of_its_type_and_the_page_follows(tab):
    start(tab, "big-page")
    tab.see("for event 'approval'")
    tab.page.get_by_label("by", exact=True).fill("ann")
    tab.page.get_by_label("level").select_option("board")
    tab.press("Send")
    tab.see_run("completed")
    tab.visit("/run?id=big-page&tab=events")
    tab.page.get_by_label("Filter events").fill("ExternalEvent")
    tab.see(r'"approved":true,"by":"ann","level":"board","limit":100')


def test_an_action_asks_first_and_shows_its_command(tab):
    tab.visit("/run?id=retry-1")
    tab.press("Pause")
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_text("The same from a terminal").click()
    dialog.get_by_text("perdure pause retry-1").wait_for()
    dialog.get_by_text('await client.get("retry-1").pause()').wait_for()
    dialog.get_by_role("button", name="Leave it").click()
    tab.see_run("retrying")
    tab.press("Pause")
    tab.confirm("Pause")
    tab.see_run("paused")
    tab.press("Resume")
    tab.confirm("Resume")
    tab.see_run("retrying")


def test_a_run_is_cancelled_terminated_retried_rerun_and_deleted(tab):
    start(tab, "big-life")
    tab.see_run("waiting")
    for action, status in (
        ("Cancel", "cancelled"),
        ("Retry", "waiting"),
        ("Terminate", "terminated"),
    ):
        tab.press(action)
        tab.confirm(action)
        tab.see_run(status)
    tab.press("Rerun…")
    arguments = tab.page.get_by_role("dialog").get_by_label(re.compile("Arguments"))
    arguments.fill('["o-again", ["lamp"]]')
    tab.confirm("Rerun")
    tab.see_run("completed")
    tab.page.get_by_role("button", name=re.compile("await charge")).click()
    tab.press("Rerun from here")
    tab.confirm("Rerun")
    expect(tab.page.locator(".panel")).to_have_count(0)
    tab.see_run("completed")
    tab.press("Delete")
    tab.confirm("Delete")
    tab.page.locator("h1", has_text="Runs").wait_for()


def test_many_are_confirmed_by_their_number_and_ended_in_parts(served, tab):
    pairs = [(f"many-{n}", (f"big-{n}", ["lamp"])) for n in range(101)]
    served.loop.run(served.runtime.start_many(shop.checkout, pairs))
    tab.visit("/runs?q=id:many-*")
    tab.press("Terminate")
    dialog = tab.page.get_by_role("dialog")
    button = dialog.get_by_role("button", name="Terminate 101 runs")
    expect(button).to_be_disabled()
    dialog.get_by_label("Type 101 to confirm").fill("101")
    button.click()
    tab.see("101 runs done")
    tab.visit("/runs?q=id:many-*%20status:terminated")
    tab.page.get_by_label(re.compile("^Select many-")).first.check()
    tab.see("1 selected")
    tab.press("Delete")
    tab.confirm("Delete 1 run")
    tab.see("1 run done")


def test_failed_and_blocked_runs_are_retried_from_home_and_errors(tab):
    tab.visit("/")
    item = tab.page.locator("ul.attention li", has_text="failed in the last 24 hours")
    item.get_by_role("button", name="Retry all").click()
    tab.confirm(re.compile("^Retry . runs?$"))
    tab.see(". runs? done")
    tab.visit("/errors")
    group = tab.page.locator("section.group", has_text="no anvil in stock")
    group.get_by_role("button", name="Retry all 1").click()
    tab.confirm("Retry 1 run")
    tab.visit("/run?id=blocked-1")
    tab.see_run("blocked")
    tab.see("its code no longer does what its history says")
    tab.see("The code was changed while the run was in progress")
    row = tab.page.locator(".line.blocked", has_text='wait_for_event("go")')
    row.get_by_text('the code did activity price("o-7")').wait_for()
    tab.see("Retry helps only after such a deploy")
    tab.see("Has arrived, and the code gets it when the run goes on: event go")
    tab.press("Retry")
    tab.confirm("Retry")
    tab.see_run("blocked")


def test_a_button_says_what_it_does_before_it_is_pressed(tab):
    said = {
        "big-1": {"Cancel": "to clean up", "Terminate": "It ends now", "Rerun…": "new run"},
        "bad-1": {"Retry": "from where it stopped", "Rerun…": "new run", "Delete": "children"},
    }
    for run, buttons in said.items():
        tab.visit(f"/run?id={run}")
        for name, words in buttons.items():
            button = tab.page.locator(".now-card").get_by_role("button", name=name, exact=True)
            expect(button).to_have_attribute("title", re.compile(words))
            expect(button).to_have_attribute("aria-description", re.compile(words))


def test_a_schedule_is_paused_run_backfilled_and_removed(served, tab):
    loop, runtime = served.loop, served.runtime
    loop.run(runtime.schedules.create("short-lived", shop.report, "Rome", every=3600))
    tab.visit("/schedules")
    group = tab.page.locator("section.group", has_text="short-lived")
    group.get_by_role("button", name="Pause…").click()
    tab.page.get_by_role("dialog").get_by_label("Reason").fill("moving house")
    tab.confirm("Pause")
    group.get_by_text("moving house").wait_for()
    group.get_by_role("button", name="Resume").click()
    group.locator(".status", has_text="active").wait_for()
    group.get_by_role("button", name="Run now…").click()
    tab.confirm("Run now")
    group.locator("a.slot").first.wait_for()
    group.get_by_role("button", name="Backfill…").click()
    tab.page.get_by_role("dialog").get_by_label(re.compile("^From")).fill("2h")
    tab.confirm("Backfill")
    tab.see("2 slots started")
    group.get_by_role("button", name="Remove…").click()
    tab.confirm("Remove")
    group.wait_for(state="detached")


def test_promises_are_resolved_and_rejected_in_the_inbox(served, tab):
    for order in ("yes", "no"):
        served.loop.run(served.runtime.start(shop.pay, order, id=f"pay-{order}"))
    tab.visit("/inbox")
    group = tab.page.locator("section.group", has_text="payment:yes")
    group.get_by_label("value").fill('"paid"')
    group.get_by_role("button", name="Resolve").click()
    group.wait_for(state="detached")
    group = tab.page.locator("section.group", has_text="payment:no")
    group.get_by_role("button", name="Reject…").click()
    tab.page.get_by_role("dialog").get_by_label(re.compile("^Reason")).fill("no money")
    tab.confirm("Reject")
    group.wait_for(state="detached")
    tab.visit("/run?id=pay-yes")
    tab.see_run("completed")
    tab.visit("/run?id=pay-no")
    tab.see("no money")


def test_dead_letters_are_deleted_and_requeued(served, tab):
    provider = served.runtime.provider

    async def lose(instance_id):
        await provider.enqueue_for_orchestrator(raised(instance_id, "paid", 12))
        while True:
            letters = await provider.admin.list_dead_letters()
            if instance_id in {each.message.instance_id for each in letters}:
                return
            await asyncio.sleep(0.01)

    for instance_id, button, said in (
        ("lost-1", "Delete", "^deleted$"),
        ("lost-2", "Requeue", "back in the queue"),
    ):
        served.loop.run(lose(instance_id))
        tab.load("/store")
        letter = tab.page.locator("section.group", has_text=instance_id)
        letter.get_by_role("button", name=button).click()
        tab.see(said)
    expect(tab.page.locator("section.group", has_text="lost-1")).to_have_count(0)


def test_a_file_is_looked_at_and_a_saved_page_needs_no_server(served, tab, new_tab, tmp_path):
    async def lines():
        return "\n".join([line async for line in served.runtime.admin.export("o-1")])

    page = tab.visit("/")
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "o-1.jsonl"));
            dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
        }""",
        served.loop.run(lines()),
    )
    tab.see("o-1.jsonl, 2 runs")
    tab.see_run("completed")
    page.get_by_role("link", name="events").click()
    tab.see("OrchestrationStarted")
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)

    tab.visit("/run?id=o-1")
    with page.expect_download() as saving:
        tab.press("Save page")
    file = tmp_path / "o-1.html"
    saving.value.save_as(file)
    alone = new_tab(file.as_uri(), offline=True)
    alone.load("")
    alone.see_run("completed")
    alone.page.get_by_role("button", name=re.compile("^steps of o-1")).click()
    alone.see("van for o-1")
    alone.page.get_by_role("link", name="family").click()
    alone.see("deliver")
    assert alone.troubles == []


def test_a_child_opens_in_place_and_a_step_shows_its_details(tab):
    page = tab.visit("/run?id=o-1")
    page.get_by_role("button", name=re.compile("^steps of o-1")).click()
    tab.see("van for o-1")
    page.get_by_role("button", name=re.compile("await charge")).click()
    page.locator(".panel").get_by_text(re.compile(r"shop\.py:\d+")).wait_for()
    page.locator(".panel pre", has_text="receipt-o-1").wait_for()
    assert "step=" in page.url
    tab.visit("/run?id=fan-1")
    page.get_by_role("button", name=re.compile("30 . reserve")).click()
    expect(page.get_by_role("button", name=re.compile("await reserve"))).to_have_count(30)


# --- once: what does not depend on the store


@once
def test_the_keyboard_reaches_everything(tab):
    page = tab.load("/")
    page.locator("main h2").first.wait_for()
    page.keyboard.press("/")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("name:fan_out")
    page.keyboard.press("Enter")
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    page.locator("main h1").click()
    page.keyboard.press("j")
    page.locator("tr.at").wait_for()
    page.keyboard.press("x")
    tab.see("1 selected")
    page.keyboard.press("Enter")
    tab.see("30 . reserve")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.get_by_role("dialog", name="Go to").get_by_role("textbox").fill("store")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Store").wait_for()


@once
def test_a_late_answer_to_an_older_query_does_not_replace_the_list(tab):
    page, held = tab.visit("/store"), []

    def hold(route):
        held.append(route)

    page.route(re.compile(r"/api/v1/runs$"), hold)
    with page.expect_request(re.compile(r"/api/v1/runs$")):
        tab.visit("/runs")
    tab.visit("/runs?q=name:fan_out")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(1)
    with page.expect_response(re.compile(r"/api/v1/runs$")):
        held[0].continue_()
    page.unroute_all()
    answer(tab, path="/settings")  # the page has handled the answers before this one
    expect(rows).to_have_count(1)


@once
def test_a_bad_query_keeps_the_list_and_points_at_the_word(tab):
    page = tab.visit("/runs?q=id:o-1")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(1)
    page.get_by_label("Query").fill("status:failed nome:x")
    tab.press("Find")
    tab.see("did you mean 'name'")
    assert page.locator(".problem pre").inner_text().splitlines()[-1].index("^") == 14
    expect(rows).to_have_count(1)


@once
def test_new_runs_are_counted_and_do_not_move_the_list(served, tab):
    served.loop.run(served.runtime.start(shop.report, "Oslo", id="new-1"))
    page = tab.visit("/runs?q=id:new-*")
    page.get_by_role("link", name="new-1").wait_for()
    rows = page.locator("table.runs tbody tr")
    served.loop.run(served.runtime.start(shop.report, "Rome", id="new-2"))
    page.get_by_role("button", name="1 new run: show").wait_for()
    expect(rows).to_have_count(1)
    tab.press("1 new run: show")
    expect(rows).to_have_count(2)


@once
def test_an_action_for_many_can_be_stopped_and_lists_what_could_not_be_done(served, tab):
    pairs = [(f"stop-{n}", (f"big-{n}", ["lamp"])) for n in range(51)]
    served.loop.run(served.runtime.start_many(shop.checkout, pairs))
    page, held = tab.visit("/runs?q=id:stop-*"), []

    def hold(route):
        held.append(route)

    dialog = page.get_by_role("dialog")
    tab.press("Pause")
    dialog.get_by_role("button", name="Pause 51 runs").wait_for()
    page.route(re.compile("/api/v1/bulk$"), hold)
    with page.expect_request(re.compile("/api/v1/bulk$")):
        dialog.get_by_role("button", name="Pause 51 runs").click()
    dialog.get_by_role("button", name="Stop").click()
    held.pop().continue_()
    tab.see("50 runs done, stopped before 1 others")
    page.unroute_all()

    tab.visit("/runs?q=id:o-1")
    page.get_by_label("Select o-1").check()
    tab.press("Pause")
    dialog.get_by_role("button", name="Pause 1 run").click()
    dialog.get_by_text("1 could not be done").wait_for()
    dialog.get_by_role("link", name="o-1").wait_for()
    dialog.get_by_role("button", name="Close").click()


@once
def test_without_a_stream_the_page_reads_every_ten_seconds(served, new_tab):
    tab = new_tab(served.tab.address)
    tab.page.route(re.compile("/api/v1/stream"), lambda route: route.abort())
    tab.page.clock.install()
    tab.load("/store")
    tab.see("Dead letters")
    for _ in range(3):
        with tab.page.expect_request(re.compile("/api/v1/store$")):
            tab.page.clock.run_for(10_000)


@once
def test_what_was_chosen_for_an_event_is_shown_and_sent(served, tab):
    served.loop.run(served.runtime.start(shop.long_history, 1, id="choose-1"))
    page = tab.visit("/run?id=choose-1")
    tab.see_run("waiting")
    page.get_by_label("go", exact=False).select_option("false")
    tab.see("--data false")
    expect(page.get_by_label("go", exact=False)).to_have_value("false")
    tab.press("Send")
    tab.see_run("completed")
    events = answer(tab, path="/run/events", id="choose-1", text="ExternalEvent")["events"]
    assert [each["data"]["data"] for each in events] == [False]


@once
def test_a_run_that_is_deleted_while_it_is_looked_at_is_said_to_be_gone(served, tab):
    async def begin():
        await (await served.runtime.start(shop.report, "Rome", id="gone-1")).result()

    served.loop.run(begin())
    page = tab.visit("/run?id=gone-1")
    tab.see_run("completed")
    served.loop.run(served.runtime.admin.delete("gone-1"))
    page.get_by_role("link", name="family").click()
    tab.see("there is no instance 'gone-1'")


@once
def test_ten_megabytes_of_payloads_do_not_stop_the_page(served, tab):
    async def begin():
        await (await served.runtime.start(shop.large_values, 10, 1_000_000, id="large-1")).result()

    served.loop.run(begin())
    page = tab.visit("/run?id=large-1")
    tab.see_run("completed")
    page.get_by_role("button", name=re.compile("await copy")).first.click()
    page.locator(".panel").get_by_text("bytes in all").first.wait_for()
    page.get_by_role("link", name="events").click()
    page.get_by_role("button", name=re.compile("ActivityCompleted")).first.click()
    tab.press("show all")
    expect(page.locator(".json pre")).to_contain_text("x" * 1_000_000)


@once
def test_html_and_escapes_are_shown_as_text(tab):
    evil = "<img src=x onerror='document.title=1'>\\u001b[31m"
    start(tab, "big-evil", instance_id="evil\x1b[31m")
    tab.see("id has control characters")
    tab.press("close")
    start(tab, "big-evil", items=f'["{evil}"]', instance_id="<b>evil</b>")
    tab.page.locator("h1 .id", has_text="<b>evil</b>").wait_for()
    tab.see("onerror")
    for view in ("tab=events", "tab=state", "tab=family"):
        tab.visit(f"/run?id=<b>evil</b>&{view}")
        tab.see("onerror|<b>evil")
    tab.visit("/runs?q=name:checkout")
    tab.see("<b>evil</b>")
    expect(tab.page.locator("main img, main .id b")).to_have_count(0)
    assert "Perdure" in tab.page.title()


@once
def test_a_token_is_asked_for_and_an_unknown_one_is_refused(served, new_tab, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("ann operate " + "t" * 30)
    file.chmod(0o600)
    app = dashboard(served.runtime, tokens=read_tokens(file))
    with serving(app, served.loop) as address:
        tab = new_tab(address)
        page = tab.load("/run?id=big-1")
        field = page.get_by_label("This server asks for a token.")
        field.fill("wrong" * 8)
        tab.press("Enter")
        tab.see("not known here")
        field.fill("t" * 30)
        tab.press("Enter")
        tab.see_run("waiting")
        tab.see("ann")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(1)
        expect(page.get_by_role("button", name="Terminate")).to_have_count(0)
        page.evaluate("sessionStorage.setItem('perdure-token', 'expired-and-unknown')")
        tab.visit("/store")
        tab.see("it has expired")
        tab.close()


def test_a_store_that_is_away_is_said_on_the_page(new_tab, tmp_path):
    with running_shop(str(tmp_path / "shop.db")) as (loop, _):
        client = Client(tmp_path / "shop.db")
        loop.run(client.__aenter__())
        with serving(dashboard(client), loop) as address:
            tab = new_tab(address)
            page = tab.load("/")
            tab.see("Needs attention")
            loop.run(client.__aexit__(None, None, None))
            page.get_by_label("Pages").get_by_role("link", name="Store").click()
            tab.see("closed|not open")
            tab.close()


# --- the look


def violations(tab):
    """Return what axe finds on the page. Its script is loaded once for the whole tab."""
    if not tab.page.evaluate("'axe' in window"):
        tab.page.add_script_tag(path=AXE)
    found = tab.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


LOOKS = [(1440, "light"), (360, "dark")]
"""Both widths and both schemes; ``campaigns.dashboard`` has all pairs of them."""


def look_at_every_view(tab, looks):
    """Return the faults of every view: wider than the window, or what axe says."""
    faults = []
    for view, words in VIEWS:
        tab.visit(view)
        tab.see(words)
        for width, scheme in looks:
            tab.page.set_viewport_size({"width": width, "height": 800})
            tab.page.emulate_media(color_scheme=scheme)
            wide = tab.page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                faults.append(f"{view} is {wide} wide in a window of {width}")
            faults += [f"{view} {width} {scheme}: {each}" for each in violations(tab)]
    return faults


@once
def test_the_row_of_a_step_with_an_error_shows_its_whole_error_and_place(served, new_tab):
    tab = new_tab(served.tab.address, viewport={"width": 1120, "height": 700})
    cut = "it => it.scrollWidth > it.clientWidth || it.scrollHeight > it.clientHeight"
    for run, call in (("bad-1", 'reserve("anvil")'), ("retry-1", 'charge("retry-1"')):
        tab.load(f"/run?id={run}")
        row = tab.page.locator(".line:is(.failed, .retrying)", has_text=call).first
        for part in (".text", ".site"):
            assert not row.locator(part).evaluate(cut), (run, part)


@once
def test_a_step_that_is_tried_again_shows_its_failure_and_the_pause_after_it(tab):
    tab.visit("/run?id=retry-1")
    lane = tab.page.locator(".line.retrying .lane")
    for part, number in ((".mark.failed", 1), (".pause", 1), (".future", 1), (".open", 0)):
        expect(lane.locator(part)).to_have_count(number)


@once
def test_a_narrow_window_has_the_time_of_a_step_below_its_text(served, new_tab):
    tab = new_tab(served.tab.address, viewport={"width": 360, "height": 800})
    row = tab.load("/run?id=o-1").locator(".line", has_text="price")
    text, lane = (row.locator(part).bounding_box() for part in (".text", ".lane"))
    assert lane["y"] >= text["y"] + text["height"] / 2
    assert lane["width"] > 300
    assert not row.locator(".text").evaluate("it => it.scrollWidth > it.clientWidth")


@once
def test_no_view_is_too_wide_and_axe_finds_nothing(served, new_tab):
    tab = new_tab(served.tab.address, bypass_csp=True)  # for the script of axe, not for the page
    tab.load("/")
    assert look_at_every_view(tab, LOOKS) == []


@once
def test_every_view_is_an_address(tab):
    for view, words in VIEWS:
        tab.load(view)
        tab.see(words)
