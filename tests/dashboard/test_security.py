"""The threats of the server, one test for each row of the table in docs/guides/dashboard.md."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
from starlette.requests import Request

from dashboard.conftest import WRITE, make_client, running_shop
from perdure.dashboard import Identity, Scope, read_tokens
from perdure.dashboard.app import BODY_BYTES_MAX
from perdure.dashboard.live import Changes, Tab
from perdure.dashboard.security import RateLimit, Refused
from perdure.errors import UsageError

API = "/api/v1"
SECRETS = {scope: f"{scope}-" + "x" * 30 for scope in ("read", "operate", "admin")}


@pytest.fixture(scope="module")
def shop_runtime():
    """One store: what is checked here comes before any store."""
    with running_shop("memory:") as found:
        yield found


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("\n".join(f"{name} {name} {secret}" for name, secret in SECRETS.items()))
    file.chmod(0o600)
    return read_tokens(file)


def bearer(scope):
    return {"Authorization": f"Bearer {SECRETS[scope]}", **WRITE}


def test_a_foreign_page_cannot_write(client):
    body = {"id": "big-1"}
    assert client.post(f"{API}/run/pause", json=body).status_code == 403
    for header in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        response = client.post(f"{API}/run/pause", json=body, headers=WRITE | header)
        assert response.status_code == 403


def test_a_name_of_another_site_is_not_answered(shop_runtime):
    client = make_client(*shop_runtime, hosts=["localhost"])
    assert client.get(f"{API}/home").status_code == 200
    for path in ("/", f"{API}/home", f"{API}/stream"):
        response = client.get(path, headers={"Host": "evil.example:7700"})
        assert response.status_code == 421


def test_tokens_are_needed_and_their_scopes_hold(shop_runtime, tokens):
    client = make_client(*shop_runtime, tokens=tokens)
    assert client.get(f"{API}/home").status_code == 401
    wrong = {"Authorization": "Bearer " + "y" * 34}
    assert client.get(f"{API}/home", headers=wrong).status_code == 401
    assert client.get(f"{API}/home", headers=bearer("read")).status_code == 200
    pause = {"id": "big-1"}
    assert client.post(f"{API}/run/pause", json=pause, headers=bearer("read")).status_code == 403
    assert client.post(f"{API}/run/pause", json=pause, headers=bearer("operate")).status_code == 200
    assert (
        client.post(f"{API}/run/resume", json=pause, headers=bearer("operate")).status_code == 200
    )
    end = client.post(f"{API}/run/terminate", json=pause, headers=bearer("operate"))
    assert end.status_code == 403
    assert "needs admin" in end.json()["message"]
    settings = client.get(f"{API}/settings", headers=bearer("operate")).json()
    assert (settings["identity"], settings["scope"]) == ("operate", "operate")


def test_auth_of_the_application_decides(shop_runtime):
    async def auth(request: Request) -> Identity | None:
        return Identity("ann", Scope.READ) if request.headers.get("x-user") == "ann" else None

    client = make_client(*shop_runtime, auth=auth)
    assert client.get(f"{API}/home").status_code == 401
    assert client.get(f"{API}/home", headers={"X-User": "ann"}).status_code == 200


def test_read_only_refuses_every_write(shop_runtime):
    client = make_client(*shop_runtime, read_only=True)
    assert client.get(f"{API}/home").status_code == 200
    response = client.post(f"{API}/run/pause", json={"id": "big-1"}, headers=WRITE)
    assert response.status_code == 403


def test_answers_forbid_foreign_content(client):
    for path in ("/", f"{API}/home"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert "frame-ancestors 'none'" in policy
    assert client.get(f"{API}/home").headers["cache-control"] == "no-store"


def test_payloads_can_be_hidden(shop_runtime):
    client = make_client(*shop_runtime, redact=lambda where, _: f"hidden {where}")
    run = client.get(f"{API}/run", params={"id": "o-1"}).json()
    assert run["input"] == "hidden input"
    assert run["output"] == "hidden output"
    assert {step["call"] for step in run["steps"]} == {"hidden call"}
    text = client.get(f"{API}/run/events", params={"id": "o-1"}).text
    assert "lamp" not in text
    assert "lamp" not in client.get(f"{API}/run/compare", params={"left": "bad-1"}).text


def test_a_large_body_is_refused(client):
    body = {"id": "big-1", "name": "x", "value": "x" * BODY_BYTES_MAX}
    assert client.post(f"{API}/run/send", json=body, headers=WRITE).status_code == 413


def test_too_many_requests_at_once_and_open_pages_are_asked_to_come_again(client):
    for limit, path in (("app.WAITING_MAX", "/home"), ("live.STREAMS_MAX", "/stream")):
        with mock.patch(f"perdure.dashboard.{limit}", 0):
            response = client.get(API + path)
        assert (response.status_code, response.json()["error"]) == (503, "Busy")
        assert int(response.headers["retry-after"]) > 0


def test_a_caller_with_too_many_requests_is_asked_to_wait():
    rates = RateLimit(per_second=1, burst=2)
    rates.check("ann", now=0)
    rates.check("ann", now=0)
    with pytest.raises(Refused, match="too many requests") as refused:
        rates.check("ann", now=0)
    assert refused.value.status == 429
    rates.check("bob", now=0)
    rates.check("ann", now=1)


def test_a_slow_reader_keeps_no_more_than_its_topics(shop_runtime):
    async def note_often():
        changes, tab = Changes(None), Tab("o-1")
        changes._tabs.add(tab)
        for _ in range(1000):
            changes._note("counts")
            changes._note("run", "o-1")
            changes._note("run", "o-2")
        return tab.topics

    loop, _ = shop_runtime
    assert loop.run(note_often()) == {"counts", "run"}


def test_every_write_leaves_a_line_without_payloads(client, caplog):
    caplog.set_level(logging.INFO, "perdure.audit")
    body = {"id": "big-1", "name": "noise", "value": "a secret"}
    assert client.post(f"{API}/run/send", json=body, headers=WRITE).status_code == 200
    assert 'local /run/send {"id":"big-1","name":"noise"' in caplog.text
    assert "a secret" not in caplog.text


def test_files_outside_of_the_page_are_not_served(client):
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/app.py"):
        assert "def dashboard" not in client.get(path).text


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("ann read " + "x" * 30, 0o644, "other users"),
        ("ann read short", 0o600, "shorter than"),
        ("ann king " + "x" * 30, 0o600, "no scope 'king'"),
        ("ann read", 0o600, "is not: NAME SCOPE TOKEN"),
        ("# nothing", 0o600, "no token"),
    ],
)
def test_a_bad_file_of_tokens_is_refused(tmp_path, text, mode, words):
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UsageError, match=words):
        read_tokens(file)
