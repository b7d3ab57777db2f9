"""The ASGI application: routes, checks of each request, errors as answers, static files."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure.client.client import Client
from perdure.dashboard import actions, one_run, views
from perdure.dashboard.endpoints import ENDPOINTS, PREFIX, Endpoint, Problem, openapi
from perdure.dashboard.live import Changes, stream
from perdure.dashboard.reports import FILE_BYTES_MAX, html_of, report_of, report_of_file
from perdure.dashboard.security import (
    HEADERS,
    LOCAL,
    Identity,
    RateLimit,
    Refused,
    Scope,
    check_host,
    check_write,
    identity_of,
)
from perdure.dashboard.service import Service, UnknownInstance, audit
from perdure.errors import (
    AlreadyExists,
    AlreadyResolved,
    InstanceFinished,
    InstanceStillRunning,
    NotARoot,
    NotFound,
    NotSupported,
    PerdureError,
    ProviderError,
    QueueFull,
    UsageError,
)
from perdure.logs import get_logger
from perdure.runtime.health import Probes
from perdure.runtime.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from perdure.dashboard.security import Token

    Auth = Callable[[Request], Awaitable[Identity | None]]

_log = get_logger("perdure.dashboard")

BODY_BYTES_MAX: Final = 2 * 1024 * 1024
REQUESTS_MAX: Final = 64
"""Requests under way at once; further ones wait for them."""
WAITING_MAX: Final = 512
"""Requests that may wait; each further one is refused with 503."""
STATIC: Final = Path(__file__).parent / "static"
_STATUSES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (NotFound, 404),
    (AlreadyExists, 409),
    (AlreadyResolved, 409),
    (InstanceFinished, 409),
    (InstanceStillRunning, 409),
    (NotARoot, 409),
    (QueueFull, 429),
    (NotSupported, 501),
    (UsageError, 400),
    (ProviderError, 503),
)
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_NO_PAGE: Final = """\
The page is not built in this checkout; the API works under {prefix}.
Build it with node:  make ui
Or install a released wheel, which holds the page.
"""

_DECLARE_ENDPOINTS: Final = (actions, one_run, views)


def dashboard(
    client: Client,
    *,
    auth: Auth | None = None,
    tokens: Sequence[Token] = (),
    read_only: bool = False,
    redact: Callable[[str, Any], Any] | None = None,
    hosts: Sequence[str] | None = None,
    registry: Any = None,
) -> Starlette:
    """Return an ASGI application with the page, the JSON API and the health checks.

    ``client`` is an open ``Client`` or ``Runtime``. Mount it: ``app.mount("/perdure",
    dashboard(runtime, auth=...))``.

    - ``auth(request)`` returns an ``Identity``, or None to refuse the request. ``tokens`` are an
      alternative, see ``read_tokens``. Without both, everyone who reaches the port may do
      everything: keep it on the loopback address, or behind the login of your own application.
    - ``read_only`` refuses every write.
    - ``redact(where, value)`` returns what is shown instead of a payload.
    - ``hosts`` are the names under which the server answers; None: any.
    """
    if not isinstance(client, Client):
        raise UsageError(f"dashboard() takes a Client or a Runtime, not {client!r}")
    if auth is not None and tokens:
        raise UsageError("give auth= or tokens=, not both")
    code = registry if registry is not None else getattr(client, "registry", None)
    service = Service(client, registry=code, read_only=read_only, redact=redact)
    return _Dashboard(service, auth, tokens, hosts).app


class _Dashboard:
    def __init__(
        self,
        service: Service,
        auth: Auth | None,
        tokens: Sequence[Token],
        hosts: Sequence[str] | None,
    ) -> None:
        self._service = service
        self._auth = auth
        self._tokens = tokens
        self._hosts = hosts
        self._changes = Changes(service)
        client = service.client
        self._probes = (
            client.probes()
            if isinstance(client, Runtime)
            else Probes(
                client.provider, problem=lambda: None, is_dead=lambda: False, gauges=list[Any]
            )
        )
        self._under_way = asyncio.Semaphore(REQUESTS_MAX)
        self._waiting = 0
        self._rates = RateLimit()
        self._document = msgspec.json.encode(openapi())
        routes = [
            Route(PREFIX + each.path, self._route(each), methods=[each.method])
            for each in ENDPOINTS
        ]
        routes += [
            Route(f"{PREFIX}/openapi.json", self._openapi),
            Route(f"{PREFIX}/stream", self._guarded(self._stream)),
            Route(f"{PREFIX}/run/report", self._guarded(self._report)),
            Route(f"{PREFIX}/file", self._guarded(self._file), methods=["POST"]),
            *(Route(path, self._probe) for path in ("/livez", "/readyz", "/metrics")),
            Route("/{path:path}", self._static),
        ]
        self.app = Starlette(routes=routes)
        self.app.state.end_streams = self._changes.end

    # --- the API

    def _route(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            identity = await self._identify(request, endpoint.scope, is_write=endpoint.is_write)
            return await self._call(endpoint, request, identity)

        return self._guarded(answer)

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Bound the requests under way, and turn errors into answers."""

        async def guarded(request: Request) -> Response:
            if self._waiting >= WAITING_MAX:
                return _problem(503, "Busy", "too many requests at once; try again", retry=1)
            began = time.monotonic()
            self._waiting += 1
            try:
                await self._under_way.acquire()
            finally:
                self._waiting -= 1
            try:
                return await answer(request)
            except Refused as error:
                retry = 1 if error.status == 429 else None
                return _problem(error.status, "Refused", str(error), retry=retry)
            except (PerdureError, msgspec.ValidationError, msgspec.DecodeError) as error:
                return _answer_to(error)
            except Exception:  # noqa: BLE001 - logged; the caller learns nothing of the inside
                _log.exception("%s %s failed", request.method, request.url.path)
                return _problem(500, "Internal", "an unexpected error; the server's log has it")
            finally:
                self._under_way.release()
                took_ms = (time.monotonic() - began) * 1000
                _log.debug("%s %s %.0f ms", request.method, request.url.path, took_ms)

        return guarded

    async def _identify(self, request: Request, scope: Scope, *, is_write: bool) -> Identity:
        check_host(request.headers, self._hosts)
        if is_write:
            check_write(request)
            if self._service.read_only:
                raise Refused(403, "this page is read-only")
        self._rates.check("" if request.client is None else request.client.host)
        identity: Identity | None = LOCAL
        if self._auth is not None:
            identity = await self._auth(request)
        elif self._tokens:
            identity = identity_of(request.headers.get("authorization", ""), self._tokens)
        if identity is None:
            raise Refused(401, "you are not signed in")
        if identity.scope < scope:
            raise Refused(
                403,
                f"{identity.name!r} has the scope {identity.scope.name.lower()}; this needs "
                f"{scope.name.lower()}",
            )
        return identity

    async def _call(self, endpoint: Endpoint, request: Request, identity: Identity) -> Response:
        service = self._service.for_identity(identity)
        if endpoint.is_write:
            given = msgspec.json.decode(await _body(request), type=endpoint.given)
            answer = await endpoint.call(service, given)
            service.answers.clear()
            audited = msgspec.json.encode(_audited(given)).decode()
            audit.info("%s %s %s", identity.name, endpoint.path, audited)
            return _json(msgspec.json.encode(answer))
        pairs = dict(request.query_params)
        given = msgspec.convert(pairs, endpoint.given, strict=False)

        async def read() -> bytes:
            return msgspec.json.encode(await endpoint.call(service, given))

        with self._changes.reading():
            if not endpoint.kept:
                return _json(await read())
            key = (endpoint.path, *sorted(f"{name}={value}" for name, value in pairs.items()))
            return _json(await service.answers.get(key, read, endpoint.kept))

    async def _openapi(self, request: Request) -> Response:
        return _json(self._document)

    async def _stream(self, request: Request) -> Response:
        await self._identify(request, Scope.READ, is_write=False)
        instance_id = request.query_params.get("id")
        if instance_id is not None:
            await self._service.info(instance_id)
        if self._changes.is_full:
            return _problem(503, "Busy", "too many open pages; close some", retry=10)
        last_id = request.headers.get("last-event-id")
        return _Stream(
            stream(self._changes, instance_id, last_id),
            media_type="text/event-stream",
            headers=HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _report(self, request: Request) -> Response:
        """Answer with an instance as one HTML file to keep or to send."""
        identity = await self._identify(request, Scope.READ, is_write=False)
        instance_id = request.query_params.get("id", "")
        report = await report_of(self._service.for_identity(identity), instance_id)
        name = re.sub(r"[^\w.-]+", "-", instance_id, flags=re.ASCII).strip("-.") or "run"
        headers = HEADERS | {
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="{name[:80]}.html"',
        }
        return Response(html_of(report, STATIC), headers=headers, media_type="text/html")

    async def _file(self, request: Request) -> Response:
        """Describe the instances in an export file. Nothing is stored, so it may be read-only."""
        check_write(request)
        identity = await self._identify(request, Scope.READ, is_write=False)
        text = (await _body(request, FILE_BYTES_MAX)).decode(errors="replace")
        name = request.query_params.get("name", "a file")
        report = await report_of_file(self._service.for_identity(identity), name, text)
        return _json(msgspec.json.encode(report))

    # --- health and files

    async def _probe(self, request: Request) -> Response:
        status, body, content_type = await self._probes.answer(
            f"/{request.url.path.rpartition('/')[2]}"
        )
        return Response(body, status, media_type=content_type)

    async def _static(self, request: Request) -> Response:
        """Serve a file of the page. Each view of the page is an address, so others get the page."""
        try:
            check_host(request.headers, self._hosts)
        except Refused as error:
            return _problem(error.status, "Refused", str(error))
        name = request.path_params["path"]
        if name.startswith("api/"):
            return _problem(404, "NotFound", f"there is no {name}; see {PREFIX}/openapi.json")
        file = STATIC / name
        if Path(name).name != name or file.suffix not in _TYPES or not file.is_file():
            file = STATIC / "index.html"
        if not file.is_file():
            return PlainTextResponse(_NO_PAGE.format(prefix=PREFIX), headers=HEADERS)
        content = file.read_bytes()
        if file.suffix == ".html":
            base = request.scope.get("root_path", "").rstrip("/") + "/"
            content = content.replace(b"__BASE__", base.encode())
        return Response(
            content,
            media_type=_TYPES[file.suffix],
            headers=HEADERS | {"Cache-Control": "no-cache"},
        )


class _Stream(StreamingResponse):
    """A stream that sends its last chunk when a stopping server cancels it."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(request: Request, most: int = BODY_BYTES_MAX) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise Refused(413, f"the request is larger than {most:,} bytes")
    return bytes(found) or b"{}"


def _audited(given: Any) -> dict[str, Any]:
    """Return what a log may hold of a request: no payloads."""
    hidden = {"value", "input", "arguments"}
    fields = {name: getattr(given, name) for name in given.__struct_fields__ if name not in hidden}
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _answer_to(error: Exception) -> Response:
    status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 400)
    near = error.near if isinstance(error, UnknownInstance) else []
    position = getattr(error, "position", None)
    return _problem(status, type(error).__name__, str(error), near=near, position=position)


def _problem(
    status: int,
    kind: str,
    message: str,
    *,
    near: Sequence[str] = (),
    position: int | None = None,
    retry: int | None = None,
) -> Response:
    body = Problem(error=kind, message=message, near=list(near), position=position)
    response = _json(msgspec.json.encode(body), status)
    if retry is not None:
        response.headers["Retry-After"] = str(retry)
    return response


def _json(data: bytes, status: int = 200) -> Response:
    headers = HEADERS | {"Cache-Control": "no-store"}
    return Response(data, status, headers, media_type="application/json")
