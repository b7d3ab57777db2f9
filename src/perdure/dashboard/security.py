"""Access to the dashboard: scopes, tokens, and the checks of every request.

The rules:

- The page itself holds no data and is served to everyone who reaches the port.
- A request to the API needs an identity: from ``auth``, from a token, or, without both, the
  local operator. ``perdure serve`` refuses an address that others can reach unless there are
  tokens.
- A request that writes must carry the header ``X-Perdure-Write: 1``, which a foreign page cannot
  send without asking first, and must not come from another origin.
- The name in ``Host`` must be one of the names under which the server was started. So a foreign
  page cannot reach it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from perdure.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
WRITE_MARKER: Final = "x-perdure-write"
TOKEN_CHARACTERS_MIN: Final = 20
RATE_PER_SECOND: Final = 100
RATE_BURST: Final = 1_000
"""Requests of one caller. Fifty open pages that all read again at once stay below."""
_CALLERS_MAX: Final = 1_000


class Scope(IntEnum):
    """The rights of an identity. Each scope includes those before it."""

    READ = 1
    OPERATE = 2
    """Send, start, cancel, pause, resume, retry, rerun."""
    ADMIN = 3
    """Terminate, delete, and everything for many instances at once."""


class Identity(msgspec.Struct, frozen=True):
    """The person or program behind a request."""

    name: str
    scope: Scope


LOCAL: Final = Identity("local", Scope.ADMIN)


class Refused(Exception):
    """The request may not be fulfilled."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Token(msgspec.Struct, frozen=True):
    """One line of a file of tokens."""

    secret: bytes
    identity: Identity


def read_tokens(path: str | os.PathLike[str]) -> list[Token]:
    """Read a file of tokens: ``NAME SCOPE TOKEN`` in each line; ``#`` begins a comment."""
    found: list[Token] = []
    file = Path(path)
    if file.stat().st_mode & 0o077:
        raise UsageError(f"{file} can be read by other users; run: chmod 600 {file}")
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 3:
            raise UsageError(f"line {number} of {file} is not: NAME SCOPE TOKEN")
        name, scope, secret = words
        if scope.upper() not in Scope.__members__:
            raise UsageError(
                f"line {number} of {file}: there is no scope {scope!r}; known: read, operate, admin"
            )
        if len(secret) < TOKEN_CHARACTERS_MIN:
            raise UsageError(
                f"line {number} of {file}: the token of {name!r} is shorter than "
                f"{TOKEN_CHARACTERS_MIN} characters; make one with: openssl rand -hex 24"
            )
        found.append(Token(secret.encode(), Identity(name, Scope[scope.upper()])))
    if not found:
        raise UsageError(f"{file} holds no token; write lines of: NAME SCOPE TOKEN")
    return found


def identity_of(header: str, tokens: Sequence[Token]) -> Identity:
    """Return the identity of an ``Authorization`` header. Every token is compared, in full."""
    scheme, _, secret = header.partition(" ")
    given = secret.strip().encode()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.secret, given):
            found = token.identity
    if scheme.lower() != "bearer" or found is None:
        raise Refused(401, "the token is missing or not known; send Authorization: Bearer TOKEN")
    return found


def check_host(headers: Mapping[str, str], hosts: Sequence[str] | None) -> None:
    """Refuse a name in ``Host`` that is not one of ``hosts``; None: any."""
    if hosts is None:
        return
    name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    if name not in hosts:
        raise Refused(
            421, f"this server does not answer as {name!r}; allow the name with --allow-host"
        )


def check_write(request: Request) -> None:
    """Refuse a write that a page of another origin may have sent."""
    headers = request.headers
    if headers.get(WRITE_MARKER) != "1":
        raise Refused(403, "a request that writes needs the header X-Perdure-Write: 1")
    if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        raise Refused(403, "only this page and programs may send requests that write")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise Refused(403, f"the page of {origin} may not write here")


class RateLimit:
    """Bounds the requests of each caller: a bucket that fills at a steady rate."""

    def __init__(self, per_second: float = RATE_PER_SECOND, burst: float = RATE_BURST) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}
        """Requests that are left, and the time of that number, by caller."""

    def check(self, caller: str, now: float | None = None) -> None:
        """Take one request from the bucket of the caller; refuse it if none is left."""
        now = time.monotonic() if now is None else now
        if len(self._buckets) >= _CALLERS_MAX and caller not in self._buckets:
            self._buckets = {
                each: (left, at)
                for each, (left, at) in self._buckets.items()
                if left + (now - at) * self._per_second < self._burst
            }
        left, at = self._buckets.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        if left < 1:
            raise Refused(429, "too many requests; come again in a second")
        self._buckets[caller] = (left - 1, now)
