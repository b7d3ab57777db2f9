"""Webhooks: an ASGI application that stores an event of another system before it answers 200.

It checks the signature of the request, and then starts an orchestration for the event, or resolves
a promise. An event that is sent again changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from perdure.arguments import check_number
from perdure.errors import (
    AlreadyResolved,
    InvalidValue,
    PayloadError,
    ProviderError,
    UsageError,
    shown,
)
from perdure.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from perdure.authoring.definitions import Orchestration
    from perdure.client.client import Client

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = get_logger("perdure.webhooks")
_BODY_BYTES_MAX = 512 * 1024


class BadSignature(Exception):
    """The request does not come from the system that it claims to come from."""


class Verify(Protocol):
    """Checks a request: raises BadSignature. Header names are lower case."""

    def __call__(self, headers: Mapping[str, str], body: bytes) -> None: ...


def hmac_signature(
    secret: str, *, header: str, prefix: str = "", algorithm: str = "sha256"
) -> Verify:
    """Check a header that holds the hexadecimal HMAC of the body, after an optional prefix."""
    key, name = _key(secret), header.lower()
    if algorithm not in hashlib.algorithms_available:
        raise InvalidValue(f"there is no hash algorithm {algorithm!r}; use 'sha256'")

    def verify(headers: Mapping[str, str], body: bytes) -> None:
        given = _required(headers, name)
        expected = prefix + hmac.new(key, body, algorithm).hexdigest()
        if not hmac.compare_digest(given.encode(), expected.encode()):
            raise BadSignature(f"the signature in {header} is wrong")

    return verify


def github_signature(secret: str) -> Verify:
    """Check ``X-Hub-Signature-256`` of GitHub."""
    return hmac_signature(secret, header="X-Hub-Signature-256", prefix="sha256=")


def stripe_signature(
    secret: str, *, tolerance: float = 300, now: Callable[[], float] = time.time
) -> Verify:
    """Check ``Stripe-Signature``. A request that is older than ``tolerance`` seconds is refused."""
    key = _key(secret)

    def verify(headers: Mapping[str, str], body: bytes) -> None:
        given = _required(headers, "stripe-signature")
        parts = [part.partition("=") for part in given.split(",")]
        moments = [value for name, _, value in parts if name.strip() == "t"]
        if len(moments) != 1 or not moments[0].isdecimal():
            raise BadSignature("Stripe-Signature has no time")
        expected = hmac.new(key, moments[0].encode() + b"." + body, "sha256").hexdigest()
        signatures = [value for name, _, value in parts if name.strip() == "v1"]
        same = [hmac.compare_digest(each.encode(), expected.encode()) for each in signatures]
        if not any(same):
            raise BadSignature("the signature in Stripe-Signature is wrong")
        if abs(now() - int(moments[0])) > tolerance:
            raise BadSignature(f"the request is more than {tolerance:g} seconds old")

    return verify


def webhook(
    client: Client,
    *,
    verify: Verify,
    start: Orchestration[..., Any] | str | None = None,
    event_id: Callable[[Any], str] | None = None,
    resolve: Callable[[Any], str | None] | None = None,
    body_bytes_max: int = _BODY_BYTES_MAX,
) -> Webhook:
    """Return an ASGI application for ``POST`` requests with a JSON body.

    Either ``start`` and ``event_id``: the orchestration is started with the body, under the id
    ``webhook:EVENT_ID``, so a repeated event starts nothing. Or ``resolve``: returns the key of the
    promise that gets the body; None ignores the event.

        stripe = webhook(client, verify=stripe_signature(SECRET), resolve=payment_key)
        app.add_route("/stripe", stripe, methods=["POST"])
    """
    if not callable(verify):
        raise UsageError(
            f"verify must be a function such as github_signature(SECRET), not {shown(verify)}"
        )
    if (start is None) == (resolve is None) or (start is None) != (event_id is None):
        raise UsageError("a webhook has either start= and event_id=, or resolve=")
    check_number(body_bytes_max, "body_bytes_max", minimum=1)
    return Webhook(client, verify, start, event_id, resolve, body_bytes_max)


@dataclass(frozen=True, eq=False)
class Webhook:
    """The ASGI application that ``webhook()`` returns."""

    client: Client
    verify: Verify
    start: Orchestration[..., Any] | str | None
    event_id: Callable[[Any], str] | None
    resolve: Callable[[Any], str | None] | None
    body_bytes_max: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise UsageError(f"a webhook answers http, not {scope['type']}")
        status, text = await self._answer(scope, receive)
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, str]:
        if scope["method"] != "POST":
            return 405, "send a POST request"
        body = await self._body(receive)
        if body is None:
            return 413, f"the body has more than {self.body_bytes_max} bytes"
        names: list[tuple[bytes, bytes]] = list(scope["headers"])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in names}
        try:
            self.verify(headers, body)
        except BadSignature as error:
            _log.warning("a webhook request is refused: %s", error)
            return 401, str(error)
        try:
            event: Any = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return 400, f"the body is not JSON: {error}"
        try:
            return 200, await self._store(event)
        except AlreadyResolved as error:
            _log.warning("%s", error)  # sending it again would not help
            return 200, str(error)
        except (InvalidValue, PayloadError, KeyError, TypeError, IndexError) as error:
            return 422, f"the event does not fit: {type(error).__name__}: {error}"
        except ProviderError as error:
            _log.error("a webhook event could not be stored: %s", error)
            return 503, "the event could not be stored; send it again"

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body; None if it is longer than allowed."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ConnectionError("the client has disconnected")
            body += message.get("body", b"")
            if len(body) > self.body_bytes_max:
                return None
            if not message.get("more_body", False):
                return bytes(body)

    async def _store(self, event: Any) -> str:
        if self.start is not None and self.event_id is not None:
            name = f"webhook:{self.event_id(event)}"
            target: Any = self.start
            await self.client.start(target, event, id=name)
            return "stored"
        key = None if self.resolve is None else self.resolve(event)
        if key is None:
            return "ignored"
        await self.client.resolve(key, event)
        return "stored"


def _key(secret: object) -> bytes:
    if not isinstance(secret, str) or not secret:
        raise InvalidValue("the secret of a webhook must be a text that is not empty")
    return secret.encode()


def _required(headers: Mapping[str, str], name: str) -> str:
    given = headers.get(name)
    if given is None:
        raise BadSignature(f"the header {name} is missing")
    return given
