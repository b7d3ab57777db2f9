"""Group commit over the network: operations that arrive while a commit is under way share the next.

A lane has one batch in flight. Each batch has a number, under which the server keeps its answer: a
batch whose answer was lost is sent again and applied once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, TypeAlias

import msgspec
import psycopg

from perdure.errors import InvalidValue, ProviderError, StoreClosed
from perdure.providers.postgres.backoff import Backoff
from perdure.providers.postgres.faults import Remedy, outcome_unknown, refusal, remedy_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.postgres.connections import Connections
    from perdure.providers.postgres.queries import Statements

Refusal: TypeAlias = tuple[str, str | None]
"""A code, and what it is about."""

_OPERATIONS_MAX: Final = 500
_BYTES_MAX: Final = 4 * 1024 * 1024
_ONE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of one operation; more takes the server longer than a statement may, or cannot be sent at all."""


class Answer(msgspec.Struct, frozen=True):
    """What the server says to a batch."""

    now: int
    refused: dict[str, Refusal] | None = None
    """By position in the batch."""
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
    applied: Callable[[Refusal | None], bool | None]
    """Takes note of what the server said and gives or raises what the caller gets."""
    failed: Callable[[Exception], Exception]
    """What the caller gets instead of this."""
    outcome: asyncio.Future[Any]

    def settle(self, refused: Refusal | None) -> None:
        try:
            answer = self.applied(refused)
        except Exception as error:  # noqa: BLE001
            if not self.outcome.done():
                self.outcome.set_exception(error)
        else:
            if not self.outcome.done():
                self.outcome.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(self.failed(error))


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    batch: int = 0
    """The number of the last one sent."""


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
        self._lanes = [_Lane(f"{handle}-{number}") for number in range(lanes)]
        self._idle: list[_Lane] = []
        self._under_way = 0
        self._waiting: dict[str, deque[Operation]] = {}
        self._in_order = in_order
        """Operations of this kind are committed in the order in which they were sent."""
        self._is_ordering = False
        self._is_waking = False
        self._is_open = False
        self._at_rest = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return [lane.name for lane in self._lanes]

    def open(self) -> None:
        self._is_open = True
        self._idle = list(self._lanes)
        self._under_way = 0
        self._is_ordering = self._is_waking = False
        self._at_rest = asyncio.Event()

    async def close(self) -> None:
        """What was accepted is committed first."""
        self._is_open = False
        while self._under_way or self._waiting:
            self._at_rest.clear()
            await self._at_rest.wait()

    def send(self, operation: Operation) -> None:
        """Commit it, together with others."""
        if not self._is_open:
            raise StoreClosed(operation.name, f"{self._connections.location} is not open")
        if operation.weight > _ONE_BYTES_MAX:
            raise InvalidValue(
                f"{operation.name}: {operation.weight >> 20} MB are too much for one commit on "
                f"Postgres, at most {_ONE_BYTES_MAX >> 20} are taken; start fewer steps at once, "
                "or store the values elsewhere and pass references"
            )
        self._waiting.setdefault(operation.template, deque()).append(operation)
        self._wake()

    # --- lanes

    def _wake(self) -> None:
        # Not at once: what arrives meanwhile goes along with it.
        if self._idle and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        """Send a batch of what is waiting, if there is a lane for it."""
        self._is_waking = False
        batch = self._take() if self._idle else []
        if not batch:
            return
        lane = self._idle.pop()
        self._under_way += 1
        if self._waiting:
            self._wake()
        self._is_ordering = self._is_ordering or batch[0].template == self._in_order
        lane.batch += 1
        try:
            statement, parameters = self._call_of(lane, batch, again=False)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the lane must go on
            _fail(batch, failure, failure)
            self._finish(lane, batch)
            return
        sent_at = time.monotonic()

        def answered(text: bytes, error: BaseException | None) -> None:
            if error is None:
                self._settle(batch, text, sent_at)
                self._finish(lane, batch)
            else:
                self._commit_slowly(lane, batch, error)

        if not self._connections.call_now(statement, parameters, answered):
            self._commit_slowly(lane, batch, None)

    def _finish(self, lane: _Lane, batch: list[Operation]) -> None:
        if batch[0].template == self._in_order:
            self._is_ordering = False
        self._idle.append(lane)
        self._under_way -= 1
        self._start()
        if not self._under_way:
            self._at_rest.set()

    def _commit_slowly(
        self, lane: _Lane, batch: list[Operation], error: BaseException | None
    ) -> None:
        """``error``: what came of the first try, if there was one."""
        task = asyncio.create_task(self._run(lane, batch, error), name=f"perdure-lane-{lane.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, lane: _Lane, batch: list[Operation], error: BaseException | None) -> None:
        try:
            await self._commit(lane, batch, error)
        finally:
            self._finish(lane, batch)

    def _take(self) -> list[Operation]:
        """Operations of the kind that has waited longest."""
        template = next(
            (each for each in self._waiting if not (self._is_ordering and each == self._in_order)),
            None,
        )
        if template is None:
            return []
        waiting = self._waiting.pop(template)
        if len(waiting) == 1:
            return [waiting[0]]
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

    async def _commit(
        self, lane: _Lane, batch: list[Operation], error: BaseException | None
    ) -> None:
        try:
            text, sent_at = await self._send(lane, batch, error)
        except psycopg.Error as refused:
            if len(batch) > 1:
                # One of them cannot be written. Alone, each gets the answer that is its own.
                for operation in batch:
                    lane.batch += 1
                    await self._commit(lane, [operation], None)
            else:
                failure = refusal(batch[0].name, refused, self._connections.location)
                _fail(batch, failure, refused)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the lane must go on
            _fail(batch, failure, failure)
        else:
            self._settle(batch, text, sent_at)

    def _settle(self, batch: list[Operation], text: bytes, sent_at: float) -> None:
        try:
            answer = _answers.decode(text)
            self._applied(answer, sent_at)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the lane must go on
            _fail(batch, failure, failure)
            return
        refused = answer.refused or {}
        for position, operation in enumerate(batch):
            operation.settle(refused.get(str(position)))

    def _call_of(
        self, lane: _Lane, batch: list[Operation], *, again: bool
    ) -> tuple[bytes, tuple[bytes, ...]]:
        parts = 0
        for position, operation in enumerate(batch):
            operation.row["n"] = position
            parts |= operation.parts
        rows = _encoder.encode([operation.row for operation in batch])
        number, mark = b"%d" % lane.batch, b"t" if again else b"f"
        statement = self._statements(batch[0].template)
        return statement, (lane.name.encode(), number, mark, rows, b"%d" % parts)

    async def _send(
        self, lane: _Lane, batch: list[Operation], error: BaseException | None
    ) -> tuple[bytes, float]:
        """The answer, and when its statement was sent.

        Raises psycopg.Error if nothing was written and repeating is of no use.
        """
        name = batch[0].name
        backoff = Backoff(self._retry_seconds)
        is_unknown = False
        while True:
            sent_at = time.monotonic()
            try:
                if error is not None:
                    raise error
                statement, parameters = self._call_of(lane, batch, again=is_unknown)
                return await self._connections.call_once(name, statement, parameters), sent_at
            except (psycopg.Error, OSError) as failure:
                error = None
                remedy = remedy_for(failure)
                if remedy is Remedy.NONE and isinstance(failure, psycopg.Error):
                    raise
                is_unknown = is_unknown or remedy is Remedy.RECONNECT
                if not await backoff.pause():
                    told = refusal(name, failure, self._connections.location)
                    if is_unknown and isinstance(told, ProviderError):
                        told = outcome_unknown(name, told)
                    raise told from failure


def _fail(batch: list[Operation], failure: Exception, cause: BaseException) -> None:
    for operation in batch:
        failure.__cause__ = cause if cause is not failure else None
        operation.fail(failure)
