"""The JSON API: what each endpoint answers, and what bad input gets."""

from __future__ import annotations

import time

import pytest

from dashboard.conftest import WRITE
from patience import HANG_SECONDS

API = "/api/v1"


def read(client, path, **given):
    response = client.get(API + path, params=given)
    assert response.status_code == 200, response.text
    return response.json()


def write(client, path, **given):
    return client.post(API + path, json=given, headers=WRITE)


def wait_for_status(client, instance_id, status):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if read(client, "/run", id=instance_id)["status"] == status:
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
    assert [step["call"].split("(")[0] for step in steps] == ["reserve", "charge", "deliver"]
    events = read(client, "/run/events", id="o-1", limit=3)
    assert [event["id"] for event in events["events"]] == [1, 2, 3]
    assert events["next_after"] == 3
    assert read(client, "/run/event", id="o-1", event=1)["type"] == "OrchestrationStarted"
    assert read(client, "/run/state", id="o-1")["entries"][0]["value"] == 1
    family = read(client, "/run/family", id="o-1")
    assert [child["name"] for child in family["children"]] == ["deliver"]
    source = read(client, "/run/source", id="big-1")
    assert source["executed"]
    assert any("approval" in wait["waits_for"] for wait in source["waits"])
    assert any("wait_for_event" in line for line in source["lines"])


def test_two_runs_are_compared_by_default_with_the_last_good_one(client):
    compared = read(client, "/run/compare", left="bad-1")
    assert read(client, "/run", id=compared["right"])["status"] == "Completed"
    assert any(not line["same"] for line in compared["lines"])


def test_errors_are_grouped_by_type_line_and_shape(client):
    group = next(each for each in read(client, "/errors") if each["names"].get("checkout"))
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
    assert write(client, "/run/send", id="big-2", name="approval", value=True).status_code == 200
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


def test_health_and_unknown_addresses(client):
    assert client.get("/livez").text == "ok\n"
    assert client.get("/readyz").text == "ok\n"
    assert 'perdure_instances{status="Failed"}' in client.get("/metrics").text
    assert client.get(f"{API}/nothing").status_code == 404
