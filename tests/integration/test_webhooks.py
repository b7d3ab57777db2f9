"""Webhooks: what is signed is stored before 200, what is not is refused, repeats change nothing."""

import hashlib
import hmac
import json
import time

import pytest

from perdure import Client, Runtime, orchestration, promise
from perdure.errors import InvalidValue, StoreUnavailable, UsageError
from perdure.webhooks import (
    BadSignature,
    github_signature,
    hmac_signature,
    stripe_signature,
    webhook,
)

SECRET = "whsec_test"
BODY = json.dumps({"id": "evt_1", "payment": "pi_42", "cents": 1200}).encode()


@orchestration
async def order(payment: str) -> int:
    return (await promise(f"stripe:{payment}", dict))["cents"]


@orchestration
async def on_event(event: dict) -> str:
    return event["id"]


def signed(body, secret=SECRET, algorithm="sha256"):
    return hmac.new(secret.encode(), body, algorithm).hexdigest()


def github_headers(body=BODY, secret=SECRET):
    return {"X-Hub-Signature-256": f"sha256={signed(body, secret)}"}


def stripe_headers(body=BODY, moment=None, secret=SECRET):
    moment = round(time.time()) if moment is None else moment
    return {
        "Stripe-Signature": f"t={moment},v1={signed(f'{moment}.'.encode() + body, secret)},v0=x"
    }


async def post(app, body=BODY, headers=None, method="POST", parts=3):
    """Call the application as a server does, with the body in several messages."""
    step = max(1, -(-len(body) // parts))
    chunks = [body[place : place + step] for place in range(0, len(body), step)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": chunk is not chunks[-1]}
        for chunk in chunks
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    named = [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()]
    await app({"type": "http", "method": method, "headers": named}, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


async def test_a_signed_event_resolves_a_promise(make_runtime):
    async with make_runtime([order]) as runtime:
        app = webhook(
            runtime,
            verify=stripe_signature(SECRET),
            resolve=lambda event: f"stripe:{event['payment']}",
        )
        handle = await runtime.start(order, "pi_42")
        assert await post(app, headers=stripe_headers()) == (200, "stored")
        assert await handle.result() == 1200
        assert await post(app, headers=stripe_headers()) == (200, "stored"), "a repeat"
        other = BODY.replace(b"1200", b"1300")
        status, text = await post(app, other, stripe_headers(other))
        assert (status, "before with other data" in text) == (200, True)


async def test_an_event_starts_one_instance(make_runtime):
    async with make_runtime([on_event]) as runtime:
        app = webhook(
            runtime,
            verify=github_signature(SECRET),
            start=on_event,
            event_id=lambda event: event["id"],
        )
        for _ in range(3):
            assert await post(app, headers=github_headers()) == (200, "stored")
        assert await runtime.get("webhook:evt_1").result() == "evt_1"
        assert len([view async for view in runtime.admin.instances()]) == 1


async def test_a_client_stores_the_event_without_a_worker(tmp_path):
    async with Client(tmp_path / "store.db") as client:
        app = webhook(client, verify=github_signature(SECRET), resolve=lambda event: event["id"])
        assert (await post(app, headers=github_headers()))[0] == 200
        assert (await client.describe("promise:evt_1")).status == "Pending"
        ignoring = webhook(client, verify=github_signature(SECRET), resolve=lambda _: None)
        assert await post(ignoring, headers=github_headers()) == (200, "ignored")


@pytest.mark.parametrize(
    ("verify", "headers", "text"),
    [
        (stripe_signature(SECRET), {}, "stripe-signature is missing"),
        (stripe_signature(SECRET), {"Stripe-Signature": "v1=abc"}, "no time"),
        (stripe_signature(SECRET), {"Stripe-Signature": "t=1,t=2,v1=abc"}, "no time"),
        (stripe_signature(SECRET), stripe_headers(secret="other"), "is wrong"),
        (stripe_signature(SECRET), stripe_headers(BODY + b" "), "is wrong"),
        (stripe_signature(SECRET), stripe_headers(moment=1_700_000_000), "seconds old"),
        (github_signature(SECRET), {}, "is missing"),
        (github_signature(SECRET), github_headers(secret="other"), "is wrong"),
        (github_signature(SECRET), {"X-Hub-Signature-256": signed(BODY)}, "is wrong"),
        (github_signature(SECRET), {"X-Hub-Signature-256": "sha256=ä"}, "is wrong"),
        (hmac_signature(SECRET, header="X-Sum", algorithm="sha512"), {"X-Sum": "0"}, "is wrong"),
    ],
)
async def test_a_wrong_old_or_missing_signature_is_refused(make_runtime, verify, headers, text):
    async with make_runtime([order]) as runtime:
        app = webhook(runtime, verify=verify, resolve=lambda event: event["id"])
        status, told = await post(app, headers=headers)
        assert (status, text in told) == (401, True), told
        assert [view async for view in runtime.admin.instances()] == []


async def test_other_algorithms_and_checks_of_your_own(make_runtime):
    async with make_runtime([order]) as runtime:
        named = hmac_signature(SECRET, header="X-Sum", algorithm="sha512")
        app = webhook(runtime, verify=named, resolve=lambda event: event["id"])
        headers = {"X-Sum": signed(BODY, algorithm="sha512")}
        assert (await post(app, headers=headers))[0] == 200

        def own(headers, body):
            if headers.get("token") != hashlib.sha256(body).hexdigest():
                raise BadSignature("no such token")

        app = webhook(runtime, verify=own, resolve=lambda event: event["id"])
        assert await post(app, headers={"Token": "x"}) == (401, "no such token")
        token = {"Token": hashlib.sha256(BODY).hexdigest()}
        assert (await post(app, headers=token))[0] == 200


async def test_bad_requests_are_refused_and_nothing_is_stored(make_runtime):
    async with make_runtime([order]) as runtime:
        app = webhook(
            runtime,
            verify=github_signature(SECRET),
            resolve=lambda event: event["id"],
            body_bytes_max=100,
        )
        long = b'"' + b"x" * 100 + b'"'
        assert (await post(app, long, github_headers(long)))[0] == 413
        assert (await post(app, b"{", github_headers(b"{")))[0] == 400
        assert (await post(app, b"\xff", github_headers(b"\xff")))[0] == 400
        assert (await post(app, b"{}", github_headers(b"{}")))[0] == 422
        assert (await post(app, b'{"id": 7}', github_headers(b'{"id": 7}')))[0] == 422
        assert (await post(app, method="GET"))[0] == 405
        assert [view async for view in runtime.admin.instances()] == []


async def test_a_store_that_is_away_lets_the_sender_try_again(make_runtime, monkeypatch):
    async with make_runtime([order]) as runtime:
        app = webhook(runtime, verify=github_signature(SECRET), resolve=lambda event: event["id"])

        async def away(*_args, **_kwargs):
            raise StoreUnavailable("enqueue", "the server is out")

        monkeypatch.setattr(runtime.provider, "enqueue_for_orchestrator", away)
        assert (await post(app, headers=github_headers()))[0] == 503


def test_a_webhook_is_checked_where_it_is_made():
    client = Client("memory:")
    check = github_signature(SECRET)
    for options in ({}, {"start": order}, {"start": order, "resolve": str}, {"event_id": str}):
        with pytest.raises(UsageError, match="either start"):
            webhook(client, verify=check, **options)
    with pytest.raises(InvalidValue, match="secret"):
        stripe_signature("")
    with pytest.raises(InvalidValue, match="hash algorithm"):
        hmac_signature(SECRET, header="X", algorithm="rot13")


async def test_it_is_mounted_in_an_application():
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with Runtime("memory:", [order]) as runtime:
        hook = webhook(runtime, verify=github_signature(SECRET), resolve=lambda event: event["id"])
        app = Starlette(routes=[Mount("/hook", app=hook)])
        sent = []
        messages = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        ((name, value),) = github_headers().items()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/hook/",
            "raw_path": b"/hook/",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode())],
        }
        await app(scope, receive, send)
        assert sent[0]["status"] == 200
