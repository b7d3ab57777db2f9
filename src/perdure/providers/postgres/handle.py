"""What a handle is made of: connections, lanes, desks and the listener, opened and closed together.

Verbs of the contract are elsewhere; they use this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from perdure.clock import SystemClock
from perdure.errors import PerdureError, StoreClosed, UsageError
from perdure.providers.postgres import queries
from perdure.providers.postgres.backoff import Backoff
from perdure.providers.postgres.connections import Connections, Rank
from perdure.providers.postgres.faults import asks_for_patience, refusal
from perdure.providers.postgres.lanes import Lanes
from perdure.providers.postgres.listener import BUCKETS, Channels, Listener, Notifier, bucket_of
from perdure.providers.postgres.migrate import migrate, pending, read_ahead
from perdure.providers.postgres.opening import prepare_store
from perdure.providers.postgres.place import place_of
from perdure.providers.postgres.renewals import Renewals
from perdure.providers.postgres.server_clock import ServerClock
from perdure.providers.watching import ChangeHub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from typing import LiteralString

    from perdure.providers._shared.migrate import Migration
    from perdure.providers.postgres.connections import Parameters, Row
    from perdure.providers.postgres.desk import Desk
    from perdure.providers.postgres.lanes import Answer, Operation

_Result = TypeVar("_Result")

_LANES: Final = 3
_LISTENING_POLL_SECONDS: Final = 5.0
_DEAF_POLL_SECONDS: Final = 1.5
_LANE_LIFE_MS: Final = 24 * 3600 * 1000
_GOODBYE_SECONDS: Final = 3.0
"""For what is only tidiness when a handle is closed."""


class Handle:
    """The shared state of a provider and its administration."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        *,
        pool_size: int,
        listen: bool,
        prepare: bool,
        retry_seconds: float,
    ) -> None:
        self.place = place_of(dsn, schema, sessions=prepare)
        self.statements = queries.Statements(schema)
        self._retry_seconds = retry_seconds
        # One connection of the pool's size is kept for renewals.
        self._connections = Connections(
            self.place, size=pool_size - 1, prepare=prepare, retry_seconds=retry_seconds
        )
        self._renewals = Renewals(self.place, prepare=prepare, retry_seconds=retry_seconds)
        self._lanes = Lanes(
            self._connections,
            self.statements,
            lanes=min(_LANES, max(1, pool_size - 2)),
            in_order=queries.ENQUEUE_MESSAGES,
            retry_seconds=retry_seconds,
            applied=self._applied,
        )
        self._listens = listen
        self._channels = Channels(schema)
        self._notifier = Notifier(self._connections)
        self._listener = Listener(
            self.place,
            self._channels,
            self._notifier.sessions,
            self._heard,
            begin=self._connections.settle,
        )
        self._hubs = [ChangeHub(SystemClock()) for _ in range(BUCKETS)]
        self._ticker: asyncio.Task[None] | None = None
        self._process_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.clock = ServerClock()
        self.turn_desk: Desk[Any, Any] | None = None
        self.work_desk: Desk[Any, Any] | None = None

    # --- life

    async def open(self, *, allow_moved: bool, auto_migrate: bool) -> None:
        self._process_id, self._loop = os.getpid(), asyncio.get_running_loop()
        try:
            opening = self._on_own_connection(
                "open",
                lambda connection: prepare_store(
                    connection,
                    self.place,
                    self.statements,
                    self.clock,
                    allow_moved=allow_moved,
                    auto_migrate=auto_migrate,
                ),
                keep=True,
            )
            self._connections.open()
            await asyncio.gather(opening, read_ahead())
        except BaseException:
            await self._connections.close()
            self._process_id = 0
            raise
        self._renewals.open()
        self._lanes.open()
        if self._listens:
            self._listener.open()
        self._ticker = asyncio.create_task(self._tick(), name="perdure-ticker")
        for desk in self._desks:
            desk.open()

    async def close(self) -> None:
        if self._process_id != os.getpid():
            return
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._connections.is_settled = True
        for desk in self._desks:
            await desk.close()
        self._process_id = 0
        await self._lanes.close()
        await self._listener.close()
        await self._notifier.close()
        await self._drop_lanes()
        await self._renewals.close()
        await self._connections.close()
        for hub in self._hubs:
            hub.notify_all()

    def require_open(self, operation: str) -> None:
        if self._process_id != os.getpid():
            reason = "is not open" if self._process_id == 0 else "was inherited by a fork"
            raise StoreClosed(operation, f"{self.place.location} {reason}; open a handle here")

    def require_here(self, operation: str) -> None:
        """Connections of the pool belong to one event loop; renewals go another way."""
        self.require_open(operation)
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(
                f"{operation}: only locks can be renewed from another event loop; use the one that "
                f"opened the handle on {self.place.location}"
            )

    async def migrate(self, *, dry_run: bool) -> Sequence[Migration]:
        """Apply what is due, or only say what is."""
        work = pending if dry_run else migrate
        return await self._on_own_connection(
            "migrate", lambda connection: work(connection, self.place)
        )

    async def _on_own_connection(
        self,
        operation: str,
        work: Callable[[psycopg.AsyncConnection[Row]], Awaitable[_Result]],
        *,
        keep: bool = False,
    ) -> _Result:
        """Repeated only if the server asks for it: a wrong address shall be told at once.

        ``keep``: the connection goes to the pool afterwards.
        """
        backoff = Backoff(self._retry_seconds)
        while True:
            try:
                connection = await self._connections.connect()
                try:
                    result = await work(connection)
                except BaseException:
                    await connection.close()
                    raise
            except (psycopg.Error, OSError) as error:
                if not asks_for_patience(error) or not await backoff.pause():
                    raise refusal(operation, error, self.place.location) from error
            else:
                if keep:
                    touch = self.statements(queries.TOUCH_TABLES)
                    self._connections.adopt(connection, touch)
                else:
                    await connection.close()
                return result

    async def _drop_lanes(self) -> None:
        """And those of handles that were not closed; it does not matter if the server is gone."""
        statement = self.statements(queries.REMOVE_LANES)
        with contextlib.suppress(psycopg.Error, OSError, PerdureError):
            await self._connections.run_once(
                "close",
                statement,
                (self._lanes.names, _LANE_LIFE_MS),
                binary=True,
                seconds=_GOODBYE_SECONDS,
            )

    # --- asking and committing

    async def ask(
        self,
        operation: str,
        template: LiteralString,
        parameters: Parameters = (),
        *,
        binary: bool = False,
        rank: Rank = Rank.READ,
    ) -> list[Row]:
        """Rows of a statement that may be repeated."""
        self.require_here(operation)
        if rank is Rank.CHORE:
            await self._connections.settle()
        return await self._connections.run(
            operation, self.statements(template), parameters, binary=binary, rank=rank
        )

    async def fetch(
        self,
        operation: str,
        template: LiteralString,
        parameters: Callable[[bool], Sequence[bytes | None]],
        *,
        was_sent: bool,
        rank: Rank,
    ) -> list[Row]:
        """Rows of a statement that is told whether it may have run before."""
        if rank is Rank.FETCH_WORK:
            await self._connections.settle()
        sent_at = time.monotonic()
        found = await self._connections.fetch(
            operation,
            self.statements(template),
            parameters,
            was_sent=was_sent,
            rank=rank,
            rehearsal=self._rehearsal if rank is Rank.FETCH_TURNS else None,
        )
        self.clock.note(found[0][-2], sent_at)
        return found

    def _rehearsal(self, found: list[Row]) -> bytes | None:
        """While what was fetched is replayed, the server learns how to commit it."""
        return None if found[0][0] is None else self.statements(queries.REHEARSE_COMMITS)

    async def ask_once(
        self, operation: str, template: LiteralString, parameters: Parameters
    ) -> list[Row]:
        """One try, with the driver's own errors."""
        return await self._connections.run_once(
            operation, self.statements(template), parameters, binary=True
        )

    async def renew(
        self, operation: str, template: LiteralString, parameters: Sequence[Any]
    ) -> list[Row]:
        """On the connection that is kept for renewals."""
        return await self._renewals.run(operation, self.statements(template), parameters)

    def send(self, operation: Operation) -> None:
        """Commit it, together with others."""
        self.require_here(operation.name)
        self._lanes.send(operation)

    # --- telling who waits

    def hub_of(self, instance_id: str) -> ChangeHub:
        return self._hubs[bucket_of(instance_id)]

    def changed(self, instance_ids: Iterable[str], *, tell: bool = True) -> None:
        """Wake who watches these instances, here and, with ``tell``, elsewhere."""
        for instance_id in instance_ids:
            bucket = bucket_of(instance_id)
            self._hubs[bucket].notify((instance_id,))
            if tell and self._listens:
                self._notifier.tell((self._channels.changes[bucket],))

    def released(self) -> None:
        """Instances may be free that were not."""
        self._ring(self.turn_desk, self._channels.turns, 0)

    @property
    def poll_seconds(self) -> float:
        return _LISTENING_POLL_SECONDS if self._listener.is_listening else _DEAF_POLL_SECONDS

    @property
    def _desks(self) -> list[Desk[Any, Any]]:
        return [desk for desk in (self.turn_desk, self.work_desk) if desk is not None]

    def _applied(self, answer: Answer, sent_at: float) -> None:
        self.clock.note(answer.now, sent_at)
        if answer.turns_at is not None:
            self._connections.wake()  # the fetch is next, no other commit
            self._ring(self.turn_desk, self._channels.turns, answer.turns_at - answer.now)
        if answer.work_at is not None:
            self._connections.is_settled = True
            self._ring(self.work_desk, self._channels.work, answer.work_at - answer.now)

    def _ring(self, desk: Desk[Any, Any] | None, channel: str, milliseconds: int) -> None:
        if desk is not None:
            desk.ring_in(milliseconds / 1000)
        if self._listens:
            self._notifier.tell((channel,))

    def _heard(self, channel: str | None) -> None:
        """From the listener; None: anything may have been said."""
        if channel in {None, self._channels.turns} and self.turn_desk is not None:
            self.turn_desk.hear()
        if channel in {None, self._channels.work} and self.work_desk is not None:
            self.work_desk.hear()
        if channel is None:
            for hub in self._hubs:
                hub.notify_all()
        elif channel in self._channels.changes:
            self._hubs[self._channels.changes.index(channel)].notify_all()

    async def _tick(self) -> None:
        """Let watchers look again now and then, whatever was missed."""
        while True:
            await asyncio.sleep(self.poll_seconds)
            for hub in self._hubs:
                hub.notify_all()
