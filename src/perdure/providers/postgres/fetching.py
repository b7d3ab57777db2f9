"""Looking for work on the server, for as many calls at once as want the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from perdure.errors import PerdureError
from perdure.providers._shared import rules
from perdure.providers.postgres import queries, rows
from perdure.providers.postgres.desk import Desk, Seen
from perdure.providers.postgres.faults import is_damage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
        self._desk: Desk[TurnWant, FetchedOrchestration] = Desk(
            self._look, give_back, lambda: handle.poll_seconds
        )
        handle.turn_desk = self._desk

    async def fetch(self, want: TurnWant, poll_timeout_ms: int) -> FetchedOrchestration | None:
        return await self._desk.fetch(want, poll_timeout_ms / 1000)

    async def _look(self, want: TurnWant, number: int) -> Seen[FetchedOrchestration]:
        operation = "fetch_orchestration_item"
        tokens = [rules.new_lock_token() for _ in range(number)]
        parameters: list[Any] = [
            tokens,
            want.lock_timeout_ms,
            want.owner,
            rows.routes_of(want.filter),
            rows.ranges_of(want.filter),
            self._orphan_grace_ms,
        ]
        try:
            found = await self._handle.ask(
                operation, queries.FETCH_TURNS, [*parameters, True], binary=True
            )
            fetched = [rows.fetched_turn(row) for row in found if row[0] is not None]
        except PerdureError as error:
            if error.__cause__ is None or not is_damage(error.__cause__):
                raise
            found = await self._handle.ask(
                operation, queries.FETCH_TURNS, [*parameters, False], binary=True
            )
            fetched = [await self._with_history(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.item.instance_id)
        return Seen(fetched, _due_seconds(found))

    async def _with_history(self, row: Row) -> FetchedOrchestration:
        """Read apart, so that damage to one history does not keep the others from being read."""
        if row[2]:
            return rows.fetched_turn(row)
        instance_id, execution_id = row[0], row[6]
        try:
            found = await self._handle.ask_once(
                "fetch_orchestration_item",
                queries.READ_HISTORY,
                (instance_id, execution_id, 0, None),
            )
        except (psycopg.Error, UnicodeDecodeError) as error:
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
        self._handle = handle
        self._tokens = tokens
        self._desk: Desk[WorkWant, FetchedWork] = Desk(
            self._look, give_back, lambda: handle.poll_seconds
        )
        handle.work_desk = self._desk

    async def fetch(self, want: WorkWant, poll_timeout_ms: int) -> FetchedWork | None:
        return await self._desk.fetch(want, poll_timeout_ms / 1000)

    async def _look(self, want: WorkWant, number: int) -> Seen[FetchedWork]:
        names = None if want.activities is None else sorted(want.activities)
        suffixes = rows.suffixes_of(want.tags)
        session = want.session
        found = await self._handle.ask(
            "fetch_work_item",
            queries.FETCH_WORK,
            (
                [rules.new_lock_token() for _ in range(number)],
                want.lock_timeout_ms,
                rows.work_routes(names, suffixes),
                names,
                suffixes,
                None if session is None else session.owner_id,
                None if session is None else session.lock_timeout_ms,
                session is not None and session.only_owned,
            ),
            binary=True,
        )
        fetched = [rows.fetched_work(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.identity.instance_id)
        return Seen(fetched, _due_seconds(found))


def _due_seconds(found: list[Row]) -> float | None:
    """From the last two columns: now, and when something falls due."""
    now_ms, due_ms = found[0][-2:]
    return None if due_ms is None else (due_ms - now_ms) / 1000
