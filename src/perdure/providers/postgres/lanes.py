"""Group commit over the network: operations that arrive while a commit is under way share the next.

A lane has one batch in flight. Each batch has a number, under which the server keeps its answer: a
batch whose answer was lost is sent again and applied once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, LiteralString

import msgspec
import psycopg

from perdure.errors import ProviderError, StoreClosed
from perdure.providers.postgres.connections import Backoff, outcome_unknown
from perdure.providers.postgres.faults import Remedy, refusal, remedy_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.postgres.connections import Connections
    from perdure.providers.postgres.queries import Statements

_OPERATIONS_MAX: Final = 500
_BYTES_MAX: Final = 4 * 1024 * 1024


class Answer(msgspec.Struct, frozen=True):
    """What the server says to a batch."""

    now: int
    refused: dict[str, tuple[str, str | None]] | None = None
    """By position: a code, and what it is about."""
    turns_at: int | None = None
    """When an instance may be handed out because of it."""
    work_at: int | None = None


_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_encoder = msgspec.json.Encoder()


@dataclass(slots=True, eq=False)
class Operation:
    """One call, waiting for the batch that carries it."""

    name: str
    template: LiteralString
    row: dict[str, Any]
    key: str
    """No two operations with one key share a batch: each must see what the other did. Empty: any
    number may."""
    parts: int
    weight: int
    outcome: asyncio.Future[tuple[str, str | None] | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Lanes:
    """A few lanes that take turns at whatever is waiting."""

    def __init__(
        self,
        connections: Connections,
        statements: Statements,
        *,
        lanes: int,
        in_order: str,
        retry_seconds: float,
        applied: Callable[[Answer, float], None],
    ) -> None:
        self._connections = connections
        self._statements = statements
        self._retry_seconds = retry_seconds
        self._applied = applied
        handle = secrets.token_hex(8)
        self.names = [f"{handle}-{number}" for number in range(lanes)]
        self._waiting: dict[str, deque[Operation]] = {}
        self._in_order = in_order
        """Operations of this kind are committed in the order in which they were sent."""
        self._is_ordering = False
        self._idle: list[asyncio.Future[None]] = []
        self._is_waking = False
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._is_closing = False
        self._tasks = [
            asyncio.create_task(self._serve(name), name=f"perdure-lane-{name}")
            for name in self.names
        ]

    async def close(self) -> None:
        """What was accepted is committed first."""
        self._is_closing = True
        while self._idle:
            self._idle.pop().set_result(None)
        await asyncio.gather(*self._tasks)
        self._tasks = []

    def send(
        self,
        name: str,
        template: LiteralString,
        row: dict[str, Any],
        *,
        key: str,
        parts: int = 0,
        weight: int = 0,
    ) -> asyncio.Future[tuple[str, str | None] | None]:
        """None once it is committed, or why the server refused it."""
        if self._is_closing or not self._tasks:
            raise StoreClosed(name, f"{self._connections.location} is not open")
        operation = Operation(name, template, row, key, parts, weight)
        self._waiting.setdefault(template, deque()).append(operation)
        self._wake()
        return operation.outcome

    # --- lanes

    def _wake(self) -> None:
        # One at a time: what arrives before it looks goes along with it.
        if self._idle and not self._is_waking:
            self._is_waking = True
            self._idle.pop().set_result(None)

    async def _serve(self, lane: str) -> None:
        number = 0
        while True:
            self._is_waking = False
            batch = self._take()
            if batch:
                if self._waiting:
                    self._wake()
                is_ordered = batch[0].template == self._in_order
                self._is_ordering = self._is_ordering or is_ordered
                number = await self._commit(lane, number + 1, batch)
                self._is_ordering = self._is_ordering and not is_ordered
            elif self._is_closing:
                return
            else:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                await idle

    def _take(self) -> list[Operation]:
        """Operations of the kind that has waited longest."""
        template = next(
            (each for each in self._waiting if not (self._is_ordering and each == self._in_order)),
            None,
        )
        if template is None:
            return []
        waiting = self._waiting.pop(template)
        batch: list[Operation] = []
        put_off: list[Operation] = []
        keys: set[str] = set()
        weight = 0
        while waiting and len(batch) < _OPERATIONS_MAX and weight <= _BYTES_MAX:
            operation = waiting.popleft()
            if operation.key:
                if operation.key in keys:
                    put_off.append(operation)
                    continue
                keys.add(operation.key)
            weight += operation.weight
            batch.append(operation)
        waiting.extendleft(reversed(put_off))
        if waiting:
            self._waiting[template] = waiting
        return batch

    async def _commit(self, lane: str, number: int, batch: list[Operation]) -> int:
        try:
            answer, sent_at = await self._send(lane, number, batch)
        except psycopg.Error as error:
            if len(batch) > 1:
                # One of them cannot be written. Alone, each gets the answer that is its own.
                for operation in batch:
                    number = await self._commit(lane, number + 1, [operation])
            else:
                _fail(batch, refusal(batch[0].name, error, self._connections.location), error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the lane must go on
            _fail(batch, error, error)
        else:
            refused = answer.refused or {}
            self._applied(answer, sent_at)
            for position, operation in enumerate(batch):
                if not operation.outcome.done():
                    operation.outcome.set_result(refused.get(str(position)))
        return number

    async def _send(self, lane: str, number: int, batch: list[Operation]) -> tuple[Answer, float]:
        """The answer, and when its statement was sent.

        Raises psycopg.Error if nothing was written and repeating is of no use.
        """
        name, statement = batch[0].name, self._statements(batch[0].template)
        lane_name = lane.encode()
        parts = 0
        for position, operation in enumerate(batch):
            operation.row["n"] = position
            parts |= operation.parts
        rows = _encoder.encode([operation.row for operation in batch])
        backoff = Backoff(self._retry_seconds)
        is_unknown = False
        while True:
            sent_at = time.monotonic()
            try:
                text = await self._connections.call_once(
                    name,
                    statement,
                    (lane_name, b"%d" % number, b"t" if is_unknown else b"f", rows, b"%d" % parts),
                )
                return _answers.decode(text), sent_at
            except (psycopg.Error, OSError) as error:
                remedy = remedy_for(error)
                if remedy is Remedy.NONE and isinstance(error, psycopg.Error):
                    raise
                is_unknown = is_unknown or remedy is Remedy.RECONNECT
                if not await backoff.pause():
                    failure = refusal(name, error, self._connections.location)
                    if is_unknown and isinstance(failure, ProviderError):
                        failure = outcome_unknown(name, failure)
                    raise failure from error


def _fail(batch: list[Operation], failure: Exception, cause: BaseException) -> None:
    for operation in batch:
        if not operation.outcome.done():
            failure.__cause__ = cause if cause is not failure else None
            operation.outcome.set_exception(failure)
