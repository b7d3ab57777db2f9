"""Group commit over the network: operations that arrive during a commit share the next one.

A lane has one batch in flight. Each batch has a number, under which the server keeps its answer: a
batch whose answer was lost is sent again with the same number and applied once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, LiteralString, TypeAlias

import msgspec
import psycopg

from perdure.errors import (
    DuplicateEvent,
    InvalidValue,
    LockLost,
    PerdureError,
)
from perdure.providers import rules
from perdure.providers.postgres.faults import (
    Remedy,
    remedy_for,
    repeat,
    violated,
)
from perdure.providers.postgres.statements import ENQUEUE_MESSAGES, Statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.postgres.pool import ConnectionPool

Refusal: TypeAlias = tuple[str, str | None]
"""A code, and the token, instance or status that it is about."""

_IN_ORDER: Final = ENQUEUE_MESSAGES
"""Operations of this statement are committed in the order in which they were sent."""
_OPERATIONS_MAX: Final = 500
_BYTES_MAX: Final = 4 * 1024 * 1024
_ONE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Limit of one operation. A bigger one exceeds the statement timeout or cannot be sent at all."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of the server to a batch."""

    now: int
    refused: dict[str, Refusal] | None = None
    """Refused operations by position in the batch."""
    turns_at: int | None = None
    """When an instance becomes ready because of the batch."""
    work_at: int | None = None
    """When a work item becomes ready because of the batch."""


_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_waiting: msgspec.json.Decoder[tuple[str, int, int, int, int]] = msgspec.json.Decoder(
    tuple[str, int, int, int, int]
)
"""The arguments of ``rules.queue_full``."""
_encoder = msgspec.json.Encoder()


@dataclass(slots=True, eq=False)
class Operation:
    """One call, waiting for the batch that carries it."""

    name: str
    template: LiteralString
    row: dict[str, Any]
    key: str
    """Two operations with one key never share a batch, because the second must see the effect of
    the first. Any number of operations with an empty key share one."""
    call: str = ""
    """Operations of one call always share a batch."""
    parts: int = 0
    """The steps of the function that the operation needs."""
    size: int = 0
    """Roughly the bytes that it writes, to limit a batch."""
    sets_timers: bool = False
    """It has times that were computed from the clock of this process."""
    done: Callable[[], None] | None = None
    """Is called after the commit, also if the outcome was cancelled meanwhile."""
    answers: bool = True
    outcome: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """False if the instance exists already, otherwise True, or None without ``answers``; the error
    if the server refuses the operation."""

    def complete(self, refused: Refusal | None) -> None:
        """Set the outcome from the answer of the server."""
        try:
            is_done = _raise_refusal(self.name, self.row, refused)
            if is_done and self.done is not None:
                self.done()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if not self.outcome.done():
                self.outcome.set_exception(error)
        else:
            if not self.outcome.done():
                self.outcome.set_result(is_done if self.answers else None)

    def fail(self, error: Exception) -> None:
        if self.outcome.done():
            return
        if isinstance(error, PerdureError):
            own = _contract_error(self.name, error, self.row)
            own.__cause__ = error.__cause__
            error = own
        self.outcome.set_exception(error)


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    batch: int = 0
    """The number of the last batch that was sent."""


class CommitPipeline:
    """A few lanes that take the waiting operations in turn."""

    def __init__(
        self,
        pool: ConnectionPool,
        statements: Statements,
        *,
        lanes: int,
        require_here: Callable[[str], None],
        now_ms: Callable[[], int],
        applied: Callable[[Answer, float], None],
    ) -> None:
        self._pool = pool
        self._statements = statements
        self._require_here = require_here
        self._now_ms = now_ms
        self._applied = applied
        handle = secrets.token_hex(8)
        self._lanes = [_Lane(f"{handle}-{number}") for number in range(lanes)]
        self._idle: list[_Lane] = []
        self._under_way = 0
        self._waiting: dict[str, deque[Operation]] = {}
        self._is_ordering = False
        self._is_waking = False
        self._at_rest = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def lane_names(self) -> list[str]:
        return [lane.name for lane in self._lanes]

    def open(self) -> None:
        self._idle = list(self._lanes)
        self._under_way = 0
        self._is_ordering = self._is_waking = False
        self._at_rest = asyncio.Event()

    async def drain(self) -> None:
        """Wait until all that was accepted is committed."""
        while self._under_way or self._waiting:
            self._at_rest.clear()
            await self._at_rest.wait()

    def send(self, operation: Operation) -> asyncio.Future[Any]:
        """Commit an operation together with others; it is queued when this returns."""
        try:
            self._require_here(operation.name)
            _check_size(operation)
        except PerdureError as error:
            operation.outcome.set_exception(error)
        else:
            self._waiting.setdefault(operation.template, deque()).append(operation)
            self._wake()
        return operation.outcome

    # --- lanes

    def _wake(self) -> None:
        # Not at once: operations that arrive in this round of the event loop join the batch.
        if self._idle and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        """Send a batch of the waiting operations if a lane is idle."""
        self._is_waking = False
        batch = self._take() if self._idle else []
        if not batch:
            return
        lane = self._idle.pop()
        self._under_way += 1
        if self._waiting:
            self._wake()
        self._is_ordering = self._is_ordering or batch[0].template == _IN_ORDER
        lane.batch += 1
        try:
            statement, parameters = self._call_of(lane, batch, again=False)
        except Exception as failure:  # noqa: BLE001 - the lane must become idle again
            _fail(batch, failure)
            self._finish(lane, batch)
            return
        sent_at = time.monotonic()

        def answered(text: bytes, error: BaseException | None) -> None:
            if error is None:
                self._complete(batch, text, sent_at)
                self._finish(lane, batch)
            else:
                self._commit_in_task(lane, batch, error, sent_at)

        if not self._pool.call_now(statement, parameters, answered):
            self._commit_in_task(lane, batch)

    def _finish(self, lane: _Lane, batch: list[Operation]) -> None:
        if batch[0].template == _IN_ORDER:
            self._is_ordering = False
        self._idle.append(lane)
        self._under_way -= 1
        self._start()
        if not self._under_way:
            self._at_rest.set()

    def _commit_in_task(
        self,
        lane: _Lane,
        batch: list[Operation],
        error: BaseException | None = None,
        sent_at: float | None = None,
    ) -> None:
        """Commit with waiting and repeating. If the batch was sent: its error, and when it was."""

        async def commit() -> None:
            try:
                await self._commit(lane, batch, error, sent_at)
            finally:
                self._finish(lane, batch)

        task = asyncio.create_task(commit(), name=f"perdure-lane-{lane.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self) -> list[Operation]:
        """Return a batch for the statement whose operations have waited longest."""
        template = next(
            (each for each in self._waiting if not (self._is_ordering and each == _IN_ORDER)),
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
        size = 0
        while waiting and (
            (len(batch) < _OPERATIONS_MAX and size <= _BYTES_MAX)
            or (waiting[0].call and waiting[0].call == batch[-1].call)
        ):
            operation = waiting.popleft()
            if operation.key:
                if operation.key in keys:
                    put_off.append(operation)
                    continue
                keys.add(operation.key)
            size += operation.size
            batch.append(operation)
        waiting.extendleft(reversed(put_off))
        if waiting:
            self._waiting[template] = waiting
        return batch

    async def _commit(
        self,
        lane: _Lane,
        batch: list[Operation],
        error: BaseException | None = None,
        sent_at: float | None = None,
    ) -> None:
        """Commit a batch; if it was sent already, ``error`` and ``sent_at`` tell of that.

        The answer can be the stored one of the first try, with the time that it was then.
        """

        async def attempt(again: bool) -> bytes:
            nonlocal error, sent_at
            if error is not None:
                failure, error = error, None
                raise failure
            if sent_at is None or not again:
                sent_at = time.monotonic()
            statement, parameters = self._call_of(lane, batch, again=again)
            return await self._pool.call_once(name, statement, parameters)

        name = batch[0].name
        try:
            text = await repeat(
                name, self._pool.location, self._pool.retry_seconds, attempt, is_commit=True
            )
        except Exception as failure:  # noqa: BLE001 - the lane must become idle again
            cause = failure.__cause__
            cannot_be_written = (
                isinstance(cause, psycopg.Error) and remedy_for(cause) is Remedy.NONE
            )
            if cannot_be_written and len(batch) > 1:
                # One of them cannot be written. Sent alone, each operation gets its own answer.
                for operation in batch:
                    lane.batch += 1
                    await self._commit(lane, [operation])
            else:
                _fail(batch, failure)
        else:
            assert sent_at is not None
            self._complete(batch, text, sent_at)

    def _complete(self, batch: list[Operation], text: bytes, sent_at: float) -> None:
        try:
            answer = _answers.decode(text)
            self._applied(answer, sent_at)
        except Exception as failure:  # noqa: BLE001 - the lane must become idle again
            _fail(batch, failure)
            return
        refused = answer.refused or {}
        for position, operation in enumerate(batch):
            operation.complete(refused.get(str(position)))

    def _call_of(
        self, lane: _Lane, batch: list[Operation], *, again: bool
    ) -> tuple[bytes, tuple[bytes, ...]]:
        parts, sets_timers = 0, False
        for position, operation in enumerate(batch):
            operation.row["n"] = position
            parts |= operation.parts
            sets_timers = sets_timers or operation.sets_timers
        if sets_timers:
            batch[0].row["sent"] = self._now_ms()
        rows = _encoder.encode([operation.row for operation in batch])
        number, mark = b"%d" % lane.batch, b"t" if again else b"f"
        statement = self._statements(batch[0].template)
        return statement, (lane.name.encode(), number, mark, rows, b"%d" % parts)


def _check_size(operation: Operation) -> None:
    if operation.size > _ONE_BYTES_MAX:
        raise InvalidValue(
            f"{operation.name}: {operation.size >> 20} MB are too much for one commit on "
            f"Postgres, at most {_ONE_BYTES_MAX >> 20} are possible; start fewer steps at once, "
            "or store the values elsewhere and pass references"
        )


def _fail(batch: list[Operation], failure: Exception) -> None:
    for operation in batch:
        operation.fail(failure)


# --- answers in the terms of the contract


def _raise_refusal(operation: str, row: dict[str, Any], refused: Refusal | None) -> bool:
    """Return True for an applied operation, False for one whose instance exists; else raise."""
    match refused:
        case None:
            return True
        case ("present", _):
            return False
        case ("lost", token):
            raise rules.lock_lost(operation, token or "")
        case ("missing", _):
            raise rules.no_instance(row["instance_id"])
        case ("full", text):
            raise rules.queue_full(*_waiting.decode(text or ""))
        case ("child", parent_id):
            raise rules.not_a_root(row["instance_id"], parent_id or "")
        case ("ended", status):
            raise rules.instance_finished(row["instance_id"], status)
        case _:
            raise InvalidValue(
                f"{operation}: the message belongs to another instance or work item than the lock "
                f"of {row['instance_id']!r}"
            )


def _contract_error(operation: str, error: PerdureError, row: dict[str, Any]) -> PerdureError:
    """Translate a violated unique constraint, or an error code that a function raised."""
    cause = error.__cause__
    constraint = None if cause is None else violated(cause)
    if constraint == "history_pkey":
        detail = cause.diag.message_detail if isinstance(cause, psycopg.Error) else ""
        return DuplicateEvent(
            operation, f"{row['instance_id']!r} has an event with that id already: {detail}"
        )
    if constraint is not None:
        return InvalidValue(f"{operation}: one of the given lock tokens is in use")
    match cause.sqlstate if isinstance(cause, psycopg.Error) else None:
        case "PD001":
            return LockLost(operation, "a work item that the turn completes is not held")
        case "PD002":
            return InvalidValue(
                f"{operation}: a work item that the turn completes belongs to another instance"
            )
        case "PD003":
            return rules.message_lost(operation, row["token"])
        case "PD004":
            return rules.event_missing(operation, row["token"], row["after"], row["execution_id"])
        case _:
            pass
    return error
