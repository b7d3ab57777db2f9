"""Probes and metrics of a runtime over HTTP: ``/livez``, ``/readyz`` and ``/metrics``.

``Probes`` gives the answers, and a web application can serve them as well. ``ProbeServer`` is a
small server for programs that have none. It reads one request of each connection and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.errors import InvalidValue, PerdureError, UsageError
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery
from perdure.runtime.metrics import Gauge, log

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.contract import Provider

_ADDRESS: Final = re.compile(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})")
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 501: "Not Implemented"}
_TEXT: Final = "text/plain; charset=utf-8"
_STORE_SECONDS: Final = 5.0
"""Time for the store to answer a probe."""
_REQUEST_SECONDS: Final = 5.0
_REQUEST_BYTES_MAX: Final = 16_384
_NO_ANSWER: Final = (
    OSError,
    TimeoutError,
    ValueError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)
"""A client that is gone, too slow or no HTTP client gets no answer."""
_COUNT_SECONDS: Final = 10.0
"""Instances and queues are counted again after this time at the earliest."""


def parse_address(value: object, what: str = "health") -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; raise InvalidValue for another form."""
    matched = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if matched is None or int(matched[2]) > 65_535:
        raise InvalidValue(
            f"{what} must be HOST:PORT, as 127.0.0.1:9000, [::1]:9000 or 0.0.0.0:9000; not "
            f"{value!r}"
        )
    return matched[1].strip("[]"), int(matched[2])


class Response(NamedTuple):
    """An answer to an HTTP request."""

    status: int
    body: bytes
    content_type: str = _TEXT


class Probes:
    """Answers the paths of probes.

    ``problem`` returns the reason why the runtime can take no work, or None. ``gauges`` returns the
    numbers of the runtime itself.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        problem: Callable[[], str | None],
        is_dead: Callable[[], bool],
        gauges: Callable[[], list[Gauge]],
    ) -> None:
        self._provider = provider
        self._problem = problem
        self._is_dead = is_dead
        self._gauges = gauges
        self._counted: tuple[float, list[Gauge]] | None = None

    async def answer(self, path: str) -> Response:
        match path:
            case "/livez":
                if self._is_dead():
                    return _text(503, "the store has closed for good")
                return _text(200, "ok")
            case "/readyz":
                problem = self._problem() or await self._store_problem()
                return _text(200, "ok") if problem is None else _text(503, problem)
            case "/metrics":
                return await self._metrics()
            case _:
                return _text(404, "there are /livez, /readyz and /metrics")

    async def _store_problem(self) -> str | None:
        if not self._provider.capabilities.admin:
            return None
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self._provider.admin.get_store_info()
        except TimeoutError:
            return f"the store has not answered within {_STORE_SECONDS:g} s"
        except PerdureError as error:
            return f"the store does not answer: {error}"
        return None

    async def _metrics(self) -> Response:
        try:
            from perdure.runtime.prometheus import CONTENT_TYPE, render
        except ModuleNotFoundError as error:
            return _text(501, str(error))
        gauges = [*self._gauges()]
        if self._problem() is None:
            with contextlib.suppress(PerdureError, TimeoutError):  # an outage has its own metrics
                async with asyncio.timeout(_STORE_SECONDS):
                    gauges += await self._store_gauges()
        return Response(200, render(gauges), CONTENT_TYPE)

    async def _store_gauges(self) -> list[Gauge]:
        """Return the numbers of instances and queues, which are the same for all workers."""
        now = asyncio.get_running_loop().time()
        if self._counted is not None and now < self._counted[0] + _COUNT_SECONDS:
            return self._counted[1]
        if not self._provider.capabilities.admin:
            return []
        admin = self._provider.admin
        gauges: list[Gauge] = []
        for status in Status:
            query = InstanceQuery(statuses=frozenset({status}))
            number = await admin.count_instances(query)
            gauges.append(("instances", {"status": status}, number))
        depths = await admin.get_queue_depths()
        queues = [("orchestrator", "", "", depths.orchestrator)]
        queues += [("worker", each.name, each.tag or "", each) for each in depths.activities]
        for queue, name, tag, depth in queues:
            labels = {"queue": queue, "name": name, "tag": tag}
            for state in ("visible", "delayed", "locked"):
                number = getattr(depth, state)
                gauges.append(("queue_items", {**labels, "state": state}, number))
            age_ms = depth.oldest_visible_age_ms or 0
            gauges.append(("queue_oldest_seconds", labels, age_ms / 1000))
        gauges.append(("dead_letters", {}, depths.dead_letters))
        self._counted = (now, gauges)
        return gauges


def _text(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode())


class ProbeServer:
    """Serves the probes of one runtime over HTTP. It has no authentication."""

    def __init__(self, address: str, probes: Probes) -> None:
        self._host, self._port = parse_address(address)
        self._probes = probes
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> tuple[str, int]:
        """Listen; return the host and the port, which the system chooses for port 0."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self._host}:{self._port} for probes: {error.strerror}; choose "
                "another HOST:PORT for health"
            ) from error
        host, port, *_ = self._server.sockets[0].getsockname()
        log.info("probes at http://%s:%d/livez, /readyz and /metrics", host, port)
        return host, port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._open:
                writer.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(*_NO_ANSWER):
                async with asyncio.timeout(_REQUEST_SECONDS + _STORE_SECONDS):
                    writer.write(await self._respond(reader))
                    await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(_REQUEST_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        method, target, _version = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if method in {"GET", "HEAD"}:
            answer = await self._probes.answer(target.partition("?")[0])
        else:
            answer = _text(405, "GET and HEAD only")
        reason = _REASONS.get(answer.status, "Service Unavailable")
        fields = (
            f"HTTP/1.1 {answer.status} {reason}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nCache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        )
        return fields.encode("latin-1") + (b"" if method == "HEAD" else answer.body)
