"""The JSON API: what each endpoint answers, and what bad input gets."""

from __future__ import annotations

import time
from unittest import mock

import msgspec
import pytest
from starlette.testclient import TestClient

from dashboard.conftest import WRITE, OnLoop
from patience import HANG_SECONDS
from perdure.dashboard import dashboard

API = "/api/v1"
YES = {"approved": True, "by": "ann"}


def read(client, path, **given):
    response = client.get(API + path, params=given)
    assert response.status_code == 200, response.text
    return response.json()


def write(client, path, **given):
    return client.post(API + path, json=given, headers=WRITE)


def wait_for_status(client, instance_id, status):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        found = client.get(f"{API}/run", params={"id": instance_id})
        if found.status_code == 200 and found.json()["status"] == status:
            return
        time.sleep(0.02)
    raise AssertionError(f"{instance_id} did not become {status}")


def test_home_counts_runs_and_names_what_failed(client):
    home = read(client, "/home")
    assert home["counts"]["Failed"] >= 1
    assert home["workers"] == 1
    failed = [each for each in home["attention"] if each["kind"] == "failed"]
    assert failed[0]["query"] == "status:failed completed:<1d"
    assert sum(bucket["started"] for bucket in home["series"]) >= 5


def test_messages_of_a_blocked_run_are_no_overdue_work(client):
    home = read(client, "/home")
    assert home["counts"]["Blocked"] == 1
    assert home["messages"]["ready"] >= 1
    assert home["messages"]["oldest_ms"] is None


def test_runs_are_found_by_query_page_by_page(client):
    q = "id:o-1,big-1,retry-1,bad-1"
    first = read(client, "/runs", q=q, limit=2)
    assert len(first["runs"]) == 2
    second = read(client, "/runs", q=q, limit=2, cursor=first["next_cursor"])
    ids = {run["id"] for run in first["runs"] + second["runs"]}
    assert ids == {"o-1", "big-1", "retry-1", "bad-1"}
    assert read(client, "/count", q=f"{q} name:check*") == {"count": 4}


def test_a_bad_query_points_at_the_word(client):
    response = client.get(f"{API}/runs", params={"q": "status:failed nome:x"})
    assert response.status_code == 400
    assert response.json()["position"] == 14
    assert "did you mean 'name'" in response.json()["message"]


@pytest.mark.parametrize(
    ("instance_id", "words"),
    [
        ("big-1", "for event 'approval'"),
        ("retry-1", "Retrying charge: attempt 2 of 5"),
        ("bad-1", "no anvil in stock"),
        ("o-1", "Completed in"),
    ],
)
def test_a_run_says_what_it_is_doing(client, instance_id, words):
    run = read(client, "/run", id=instance_id)
    assert words in run["sentence"]
    assert run["commands"]


def test_a_run_has_its_journal_events_state_family_and_source(client):
    steps = read(client, "/run/journal", id="o-1")["steps"]
    calls = [step["call"].split("(")[0] for step in steps]
    assert calls == ["reserve", "price", "charge", "notify", "deliver"]
    events = read(client, "/run/events", id="o-1", limit=3)
    assert [event["id"] for event in events["events"]] == [1, 2, 3]
    assert events["next_after"] == 3
    assert read(client, "/run/event", id="o-1", event=1)["type"] == "OrchestrationStarted"
    assert read(client, "/run/state", id="o-1")[0]["value"] == 1
    family = read(client, "/run/family", id="o-1")
    assert [child["name"] for child in family["children"]] == ["deliver"]
    found = read(client, "/run/events", id="o-1", text="SCHEDULED")["events"]
    assert {event["type"] for event in found} == {
        "ActivityScheduled",
        "SubOrchestrationScheduled",
    }
    source = read(client, "/run/source", id="big-1")
    assert source["executed"]
    assert any("approval" in wait["waits_for"] for wait in source["waits"])
    assert any("wait_for_event" in line for line in source["lines"])


def test_two_runs_are_compared_by_default_with_the_last_good_one(client):
    compared = read(client, "/run/compare", left="bad-1")
    assert read(client, "/run", id=compared["right"])["status"] == "Completed"
    assert any(not line["same"] for line in compared["lines"])


def test_errors_are_grouped_by_type_line_and_shape(client):
    groups = read(client, "/errors")
    assert any(each["type"] == "Blocked: nondeterminism" for each in groups)
    group = next(each for each in groups if each["names"].get("checkout"))
    assert group["shape"].endswith("no anvil in stock …")
    assert "shop.py:" in group["line"]
    assert group["ids"] == ["bad-1"]


def test_inbox_lists_who_waits_and_an_answer_lets_it_go_on(shop_runtime, client):
    loop, runtime = shop_runtime
    from dashboard import shop

    loop.run(runtime.start(shop.checkout, "big-2", ["lamp"], id="big-2"))
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        waiting = read(client, "/inbox")["waiting"]
        if "big-2" in {each["run"]["id"] for each in waiting}:
            break
    assert {each["name"] for each in waiting} == {"approval"}
    assert write(client, "/run/send", id="big-2", name="approval", value=YES).status_code == 200
    wait_for_status(client, "big-2", "Completed")


def test_a_run_is_started_paused_resumed_cancelled_and_rerun(client):
    started = write(
        client, "/start", name="checkout", arguments=["big-3", ["lamp"]], id="big-3"
    ).json()
    assert started["created"] is True
    again = write(client, "/start", name="checkout", arguments=["big-3", ["lamp"]], id="big-3")
    assert again.json()["created"] is False
    for action, status in (("pause", "Paused"), ("resume", "Running"), ("cancel", "Cancelled")):
        assert write(client, f"/run/{action}", id="big-3").status_code == 200
        wait_for_status(client, "big-3", status)
    done = write(client, "/run/rerun", id="o-1", input=["o-1b", ["lamp"]]).json()
    wait_for_status(client, done["id"], "Completed")
    assert write(client, "/run/delete", id=done["id"]).status_code == 200
    assert client.get(f"{API}/run", params={"id": done["id"]}).status_code == 404


def test_many_are_counted_first_and_then_changed(client):
    dry = write(client, "/bulk", action="retry", q="status:failed name:checkout").json()
    assert (dry["count"], dry["done"]) == (1, ["bad-1"])
    done = write(client, "/bulk", action="retry", ids=["bad-1"], dry_run=False).json()
    assert done["done"] == ["bad-1"]
    wait_for_status(client, "bad-1", "Failed")
    for given in ({"q": "  "}, {}, {"q": "status:failed", "ids": ["x"]}):
        assert write(client, "/bulk", action="cancel", **given).status_code == 400
    wrong = write(client, "/bulk", action="cancel", q="status:completed")
    assert "takes only" in wrong.json()["message"]


def test_an_unknown_id_names_similar_ones(client):
    response = client.get(f"{API}/run", params={"id": "bigg-1"})
    assert response.status_code == 404
    assert "big-1" in response.json()["near"]


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("/runs", {"limit": 0}, "write 1 to 200"),
        ("/runs", {"limit": "many"}, "Expected `int`"),
        ("/runs", {"colour": "red"}, "unknown field `colour`"),
        ("/run", {}, "missing required field `id`"),
        ("/run/event", {"id": "o-1", "event": 999}, "has no event 999"),
        ("/run/compare", {"left": "fan-1"}, "name a run to compare with"),
        ("/run/step", {"id": "o-1", "event": 1}, "no step that began with event 1"),
        ("/run/events", {"id": "o-1", "after": -1}, "Expected `int` >= 0"),
    ],
)
def test_bad_input_is_refused_with_the_reason(client, path, given, words):
    response = client.get(API + path, params=given)
    assert response.status_code == 400
    assert words in response.json()["message"]


def test_the_document_describes_every_endpoint(client):
    document = read(client, "/openapi.json")
    assert len(document["paths"]) > 20
    run = document["paths"]["/api/v1/run"]["get"]
    assert run["parameters"][0]["name"] == "id"
    answer = run["responses"]["200"]["content"]["application/json"]["schema"]
    name = answer["$ref"].rsplit("/", 1)[1]
    assert "sentence" in document["components"]["schemas"][name]["properties"]


def test_it_works_in_fastapi_and_beside_django_under_a_prefix(shop_runtime):
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from fastapi import FastAPI
    from starlette.applications import Starlette
    from starlette.routing import Mount

    loop, runtime = shop_runtime
    if not settings.configured:
        settings.configure(ROOT_URLCONF=(), ALLOWED_HOSTS=["*"], SECRET_KEY="x" * 50)
    fast = FastAPI()
    fast.mount("/perdure", dashboard(runtime))
    beside = Starlette(
        routes=[Mount("/perdure", dashboard(runtime)), Mount("/", get_asgi_application())]
    )
    for app in (fast, beside):
        client = TestClient(OnLoop(app, loop), base_url="http://localhost")
        assert client.get("/perdure/api/v1/home").json()["workers"] == 1
        assert client.get("/perdure/livez").text == "ok\n"
        body = {"name": "report", "arguments": ["Rome"]}
        started = client.post("/perdure/api/v1/start", json=body, headers=WRITE)
        assert started.json()["created"] is True


def test_health_and_unknown_addresses(client):
    assert client.get("/livez").text == "ok\n"
    assert client.get("/readyz").text == "ok\n"
    assert 'perdure_instances{status="Failed"}' in client.get("/metrics").text
    assert client.get(f"{API}/nothing").status_code == 404


def test_a_step_has_its_whole_input_outcome_and_traceback(client):
    steps = {step["call"].split("(")[0]: step for step in read(client, "/run", id="o-1")["steps"]}
    charge = read(client, "/run/step", id="o-1", event=steps["charge"]["event"])
    assert (charge["input"], charge["output"]) == (["o-1", 400], "receipt-o-1")
    assert read(client, "/run/step", id="o-1", event=steps["notify"]["event"])["step"][
        "attempts"
    ] == 2  # fmt: skip
    (failed,) = (s for s in read(client, "/run", id="bad-1")["steps"] if s["state"] == "failed")
    detail = read(client, "/run/step", id="bad-1", event=failed["event"])
    assert "in reserve" in detail["failure"]["traceback"]
    open_step = read(client, "/run", id="retry-1")["steps"][-1]
    attempt = read(client, "/run/step", id="retry-1", event=open_step["event"])["attempt"]
    assert (attempt["number"], attempt["of"]) == (2, 5)


def test_forms_come_from_the_types_of_the_code(client):
    (form,) = read(client, "/run/forms", id="big-1")
    decision = form["schema"]["$defs"]["Decision"]
    assert decision["required"] == ["approved", "by"]
    assert decision["properties"]["level"]["enum"] == ["board", "team"]
    assert read(client, "/run/forms", id="o-1") == []
    checkout = next(each for each in read(client, "/definitions") if each["name"] == "checkout")
    assert [each["type"] for each in checkout["parameters"]] == ["str", "list[str]"]
    assert [each["schema"] for each in checkout["parameters"]] == [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
    ]


def schedule(client, name):
    found = read(client, "/schedules")
    return next(each for each in found if each["id"] == name)


def wait_for(is_reached):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if (found := is_reached()) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def test_schedules_are_listed_paused_resumed_and_triggered(client):
    berlin = schedule(client, "report-berlin")
    assert berlin["rhythm"] == "30 2 * * mon-fri Europe/Berlin"
    assert len(berlin["coming"]) == 5
    paused = write(client, "/schedule/pause", id="report-berlin", reason="moving house")
    assert paused.status_code == 200, paused.text
    wait_for(lambda: schedule(client, "report-berlin")["paused"] == "moving house" or None)
    said = write(client, "/schedule/trigger", id="report-berlin").json()["said"]
    wait_for_status(client, said.removeprefix("started "), "Completed")
    assert write(client, "/schedule/resume", id="report-berlin").status_code == 200
    wait_for(lambda: schedule(client, "report-berlin")["paused"] is None or None)
    dry = write(client, "/schedule/backfill", id="sync", start="3h", end="0s").json()
    assert dry["said"] == "3 slots without an instance"
    assert write(client, "/schedule/backfill", id="sync", start="1h", end="2h").status_code == 400
    unknown = write(client, "/schedule/pause", id="nothing")
    assert (unknown.status_code, unknown.json()["error"]) == (404, "NotFound")


def test_a_removed_schedule_is_gone(shop_runtime, client):
    loop, runtime = shop_runtime
    from dashboard import shop

    loop.run(runtime.schedules.create("short-lived", shop.report, "Rome", every=3600))
    assert schedule(client, "short-lived")["is_declared"] is False
    assert write(client, "/schedule/remove", id="short-lived").status_code == 200
    ids = {each["id"] for each in read(client, "/schedules")}
    assert "short-lived" not in ids


def test_a_late_schedule_needs_attention(shop_runtime):
    from perdure.client.schedules import ScheduleInfo
    from perdure.dashboard.overview import _late
    from perdure.schedules.spec import Run

    loop, runtime = shop_runtime
    info: ScheduleInfo = loop.run(runtime.schedules.describe("sync"))
    due_ms = round(info.next_at.timestamp() * 1000)

    def said(now_ms=due_ms, **changes):
        found = _late(msgspec.structs.replace(info, **changes), now_ms)
        return [each.sentence for each in found]

    assert said() == []
    assert said(due_ms + 300_000) == ["Schedule sync missed a slot 5m ago"]
    missed = Run(slot_ms=due_ms, status="Skipped", reason="missed")
    assert "missed its slot of" in said(recent=(missed,))[0]
    assert "paused after 3 failures" in said(paused="", failures=3, next_at=None)[0]
    assert "has stopped: failed" in said(status=type(info.status)("Failed"))[0]


def test_a_promise_is_listed_and_resolved(shop_runtime, client):
    loop, runtime = shop_runtime
    from dashboard import shop

    loop.run(runtime.start(shop.pay, "o-10", id="pay-2"))
    wait_for(
        lambda: next(
            (
                each
                for each in read(client, "/promises")
                if each["key"] == "payment:o-10" and each["awaited_by"] == ["pay-2"]
            ),
            None,
        )
    )
    assert write(client, "/promise/resolve", key="payment:o-10", value="paid").status_code == 200
    wait_for_status(client, "pay-2", "Completed")
    again = write(client, "/promise/resolve", key="payment:o-10", value="other")
    assert again.status_code == 409, again.text
    assert write(client, "/promise/reject", key="payment:new", reason="no").status_code == 200


def test_a_run_is_saved_as_one_file_with_its_children(client):
    response = client.get(f"{API}/run/report", params={"id": "o-1"})
    assert response.headers["content-disposition"] == 'attachment; filename="o-1.html"'
    report = msgspec.json.decode(
        response.text.split('id="report">')[1].split("</script>")[0].encode()
    )
    assert list(report["runs"]) == ["o-1", "o-1::1.11"]
    assert report["runs"]["o-1"]["run"]["status"] == "Completed"
    assert "script-src 'sha256-" in response.text
    assert client.get(f"{API}/run/report", params={"id": "nothing"}).status_code == 404


def test_an_export_file_is_described_and_not_stored(shop_runtime, client):
    loop, runtime = shop_runtime

    async def lines():
        found = [line async for line in runtime.admin.export("o-1")]
        return "\n".join(found).replace("o-1", "o-x")

    text = loop.run(lines())
    changed = client.post(f"{API}/file?name=o.jsonl", content=text, headers=WRITE)
    assert (changed.status_code, "checksum" in changed.text) == (400, True)
    response = client.post(
        f"{API}/file?name=o.jsonl", content=text.replace("o-x", "o-1"), headers=WRITE
    )
    assert response.status_code == 200, response.text
    report = response.json()
    assert (report["origin"], report["first"]) == ("o.jsonl", "o-1")
    assert report["runs"]["o-1"]["run"]["output"] == "receipt-o-1"
    for content in ("", "hello", "{"):
        assert client.post(f"{API}/file", content=content, headers=WRITE).status_code == 400
    assert client.post(f"{API}/file", content=text).status_code == 403


def test_the_store_says_how_it_grows_and_what_could_go(client):
    store = read(client, "/store")
    assert store["started_in_a_day"] >= 5
    assert [each["days"] for each in store["kept"]] == [7, 30, 90]
    assert all(each["count"] == 0 for each in store["kept"])


def test_without_a_built_page_the_api_works_and_the_way_to_build_it_is_said(client, tmp_path):
    with mock.patch("perdure.dashboard.app.STATIC", tmp_path):
        assert "make ui" in client.get("/").text
        assert read(client, "/home")["counts"]
        report = client.get(f"{API}/run/report", params={"id": "o-1"})
    assert (report.status_code, "make ui" in report.text) == (400, True)


def test_a_dead_letter_is_unknown_until_there_is_one(client):
    assert read(client, "/letters") == []
    for action in ("requeue", "delete"):
        assert write(client, f"/letter/{action}", letter=7).status_code == 404
