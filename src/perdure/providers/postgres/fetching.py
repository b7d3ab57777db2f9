"""Looking for work on the server, for as many calls at once as want the same.

A fetch whose answer was lost is sent again with its tokens, until the server has said what it
handed out under them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import psycopg

from perdure.errors import CorruptData, ProviderError
from perdure.providers._shared import rules
from perdure.providers.postgres import queries, rows
from perdure.providers.postgres.connections import Rank
from perdure.providers.postgres.desk import Desk, Seen
from perdure.providers.postgres.faults import is_damage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from typing import LiteralString

    from perdure.providers.items import (
        FetchedOrchestration,
        FetchedWork,
        OrchestrationFilter,
        SessionFetch,
        TagFilter,
    )
    from perdure.providers.postgres.connections import Row
    from perdure.providers.postgres.handle import Handle
    from perdure.providers.postgres.tokens import TokenBook

_FETCH_TURN: Final = "fetch_orchestration_item"
_FETCH_WORK: Final = "fetch_work_item"
_TURNS_AT_ONCE_MAX: Final = 64
_WORK_AT_ONCE_MAX: Final = 500
_WantT = TypeVar("_WantT", bound="Hashable")


class TurnWant(NamedTuple):
    """Calls that are equal in this are served together."""

    lock_timeout_ms: int
    filter: OrchestrationFilter | None
    owner: str | None


class WorkWant(NamedTuple):
    lock_timeout_ms: int
    session: SessionFetch | None
    tags: TagFilter
    activities: frozenset[str] | None


class _Fetches(Generic[_WantT]):
    """Sends fetches, and remembers the tokens of those that were never answered."""

    def __init__(self, handle: Handle, operation: str, template: LiteralString, rank: Rank) -> None:
        self._handle = handle
        self._rank = rank
        self._operation = operation
        self._template: LiteralString = template
        self._unanswered: dict[_WantT, list[str]] = {}

    async def send(self, want: _WantT, number: int, *arguments: Any) -> list[Row]:
        tokens = self._unanswered.pop(want, None)
        was_sent = tokens is not None
        tokens = tokens or [rules.new_lock_token() for _ in range(number)]
        try:
            return await self._handle.fetch(
                self._operation,
                self._template,
                lambda again: [rows.parameter(each) for each in (tokens, again, *arguments)],
                was_sent=was_sent,
                rank=self._rank,
            )
        except ProviderError as error:
            if was_sent or error.retryable:
                self._unanswered[want] = tokens
            raise


class Turns:
    """The orchestrator queue, seen from a dispatcher."""

    def __init__(
        self,
        handle: Handle,
        tokens: TokenBook,
        orphan_grace_ms: int,
        give_back: Callable[[FetchedOrchestration], Awaitable[None]],
    ) -> None:
        self._handle = handle
        self._tokens = tokens
        self._orphan_grace_ms = orphan_grace_ms
        self._fetches: _Fetches[TurnWant] = _Fetches(
            handle, _FETCH_TURN, queries.FETCH_TURNS, Rank.FETCH_TURNS
        )
        self._desk: Desk[TurnWant, FetchedOrchestration] = Desk(
            self._look, give_back, lambda: handle.poll_seconds, _TURNS_AT_ONCE_MAX
        )
        handle.turn_desk = self._desk

    async def fetch(self, want: TurnWant, poll_timeout_ms: int) -> FetchedOrchestration | None:
        found = await self._desk.fetch(want, 1, poll_timeout_ms / 1000)
        return found[0] if found else None

    async def _look(self, want: TurnWant, number: int) -> Seen[FetchedOrchestration]:
        arguments = (
            want.lock_timeout_ms,
            want.owner,
            rows.routes_of(want.filter),
            rows.ranges_of(want.filter),
            self._orphan_grace_ms,
        )
        try:
            found = await self._fetches.send(want, number, *arguments, True)
            fetched = [rows.fetched_turn(row) for row in found if row[0] is not None]
        except CorruptData:
            # Some history cannot be read. The others shall not suffer, so each is read apart.
            found = await self._fetches.send(want, number, *arguments, False)
            fetched = [await self._with_history(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.item.instance_id)
        return Seen(fetched, _due_seconds(found))

    async def _with_history(self, row: Row) -> FetchedOrchestration:
        instance_id, continues, execution_id = row[0], row[2], row[6]
        if continues:
            return rows.fetched_turn(row)
        try:
            found = await self._handle.ask_once(
                _FETCH_TURN, queries.READ_HISTORY, (instance_id, execution_id, 0, None)
            )
        except psycopg.Error as error:
            if not is_damage(error):
                raise
            return rows.fetched_turn(row, history_error=str(error))
        events = [event_id for event_id, _ in found], [data for _, data in found]
        return rows.fetched_turn((*row[:10], *events, *row[12:]))


class Work:
    """The worker queue, seen from a worker."""

    def __init__(
        self,
        handle: Handle,
        tokens: TokenBook,
        give_back: Callable[[FetchedWork], Awaitable[None]],
    ) -> None:
        self._tokens = tokens
        self._fetches: _Fetches[WorkWant] = _Fetches(
            handle, _FETCH_WORK, queries.FETCH_WORK, Rank.FETCH_WORK
        )
        self._desk: Desk[WorkWant, FetchedWork] = Desk(
            self._look, give_back, lambda: handle.poll_seconds, _WORK_AT_ONCE_MAX
        )
        handle.work_desk = self._desk

    async def fetch(self, want: WorkWant, limit: int, poll_timeout_ms: int) -> list[FetchedWork]:
        return await self._desk.fetch(want, limit, poll_timeout_ms / 1000)

    async def _look(self, want: WorkWant, number: int) -> Seen[FetchedWork]:
        names = None if want.activities is None else sorted(want.activities)
        suffixes = rows.suffixes_of(want.tags)
        session = want.session
        found = await self._fetches.send(
            want,
            number,
            want.lock_timeout_ms,
            rows.work_routes(names, suffixes),
            names,
            suffixes,
            None if session is None else session.owner_id,
            None if session is None else session.lock_timeout_ms,
            session is not None and session.only_owned,
        )
        fetched = [rows.fetched_work(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.identity.instance_id)
        return Seen(fetched, _due_seconds(found))


def _due_seconds(found: list[Row]) -> float | None:
    """From the last two columns: now, and when something falls due."""
    now_ms, due_ms = found[0][-2:]
    return None if due_ms is None else (due_ms - now_ms) / 1000
