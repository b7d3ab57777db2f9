"""The parts of an open store, used by the provider and its administration.

Opens and closes pool, pipeline, fetches, renewals and listener together. The verbs of the contract
are in ``provider`` and ``admin``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from perdure.clock import SystemClock
from perdure.errors import PerdureError, StoreClosed, UsageError
from perdure.ids import new_id
from perdure.logs import get_logger
from perdure.providers.postgres import statements
from perdure.providers.postgres.address import address_of
from perdure.providers.postgres.clock import ServerClock
from perdure.providers.postgres.faults import Backoff, asks_for_patience, may_change, refusal
from perdure.providers.postgres.hosts import Fence, Hosts, Row, ServerConnection
from perdure.providers.postgres.listener import BUCKETS, Channels, Listener, Notifier, bucket_of
from perdure.providers.postgres.neighbours import Neighbours
from perdure.providers.postgres.opening import migrate, pending, prepare_store, read_files
from perdure.providers.postgres.pipeline import Answer, CommitPipeline
from perdure.providers.postgres.pool import ConnectionPool
from perdure.providers.postgres.renewals import Renewals
from perdure.providers.waiting import ChangeHub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from typing import LiteralString

    from perdure.providers.migrate import Migration
    from perdure.providers.postgres.calling import Parameters
    from perdure.providers.postgres.fetching import FetchCoalescer

_Result = TypeVar("_Result")

log = get_logger(__name__)

_LANES: Final = 3
_POLL_SECONDS: Final = 5.0
_POLL_SECONDS_WITHOUT_LISTENING: Final = 1.5
_LATE_SECONDS: Final = 2.0
"""An answer that takes longer may never come."""
_LOOK_SECONDS: Final = 15.0
"""Each process connects to each listed server so often, to learn of a promotion."""
_LOOK_AT_OPENING_SECONDS: Final = 1.0
_LANE_LIFE_MS: Final = 24 * 3600 * 1000
_CLEANUP_SECONDS: Final = 3.0
"""Limit for the clean-up at closing, which the store can do without."""


class PostgresStore:
    """An open store and its connections."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        *,
        pool_size: int,
        listen: bool | str,
        prepare: bool,
        retry_seconds: float,
        answer_seconds: float,
        connect_seconds: float | None,
    ) -> None:
        read_address = partial(
            address_of,
            schema=schema,
            answer_seconds=answer_seconds,
            connect_seconds=connect_seconds,
        )
        self.address = read_address(dsn, sessions=prepare)
        listening = (
            read_address(listen, sessions=False) if isinstance(listen, str) else self.address
        )
        self.statements = statements.Statements(schema)
        self.clock = ServerClock()
        self._fence = Fence(self._leave_old_primaries)
        self._hosts = Hosts(self.address, self._fence)
        # One connection of the pool's size is kept for renewals.
        self.pool = ConnectionPool(
            self._hosts,
            size=pool_size - 1,
            prepare=prepare,
            retry_seconds=retry_seconds,
        )
        self._renewals = Renewals(self._hosts, prepare=prepare, retry_seconds=retry_seconds)
        self.pipeline = CommitPipeline(
            self.pool,
            self.statements,
            lanes=min(_LANES, max(1, pool_size - 2)),
            require_here=self.require_here,
            now_ms=self.clock.now_ms,
            applied=self._applied,
        )
        self._listens = bool(listen)
        self._channels = Channels(schema)
        self._notifier = Notifier(self.pool)
        self._listener = Listener(
            Hosts(listening.for_listening(), self._fence),
            self._channels,
            # A pooler gives a session to many clients.
            self._notifier.sessions if prepare else frozenset(),
            self._notified,
        )
        self._hubs = [ChangeHub(SystemClock()) for _ in range(BUCKETS)]
        self.neighbours = Neighbours(self._release_dead)
        self._releases: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._process_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn_fetches: FetchCoalescer[Any, Any]
        self._work_fetches: FetchCoalescer[Any, Any]

    def attach_fetches(
        self, turn_fetches: FetchCoalescer[Any, Any], work_fetches: FetchCoalescer[Any, Any]
    ) -> None:
        """Wake, open and close these fetches; to be called before ``open``."""
        self._turn_fetches, self._work_fetches = turn_fetches, work_fetches

    # --- opening and closing

    async def open(self, *, allow_moved: bool, auto_migrate: bool) -> None:
        self._process_id, self._loop = os.getpid(), asyncio.get_running_loop()
        try:
            opening = self._on_own_connection(
                "open",
                lambda connection: prepare_store(
                    connection,
                    self.address,
                    self.clock,
                    allow_moved=allow_moved,
                    auto_migrate=auto_migrate,
                ),
                keep=True,
            )
            self._fence.open()
            self.pool.open()
            await asyncio.gather(opening, read_files())
        except BaseException:
            self._fence.close()
            self.pool.close()
            self._process_id = 0
            raise
        self.neighbours.open()
        self._renewals.open()
        self.pipeline.open()
        if self._listens:
            self._listener.open()
        self._tasks = [
            asyncio.create_task(self._poll(), name="perdure-poll"),
            asyncio.create_task(self._watch_hosts(), name="perdure-hosts"),
        ]
        self._turn_fetches.open()
        self._work_fetches.open()

    async def close(self) -> None:
        """End all calls. Commits that are under way are waited for, as long as they are tried."""
        if self._process_id != os.getpid():
            return
        self.neighbours.close()
        for release in self._releases:
            release.cancel()
        while self._tasks:
            self._tasks.pop().cancel()
        await self._turn_fetches.close()
        await self._work_fetches.close()
        self._process_id = 0
        await self.pipeline.drain()
        await self._listener.close()
        await self._notifier.close()
        await self._remove_lanes()
        await self._renewals.close()
        self.pool.close()
        self._fence.close()
        for hub in self._hubs:
            hub.notify_all()

    def require_open(self, operation: str) -> None:
        if self._process_id != os.getpid():
            reason = "is not open" if self._process_id == 0 else "was inherited by a fork"
            raise StoreClosed(operation, f"{self.address.location} {reason}; open a handle here")

    def require_here(self, operation: str) -> None:
        """Raise UsageError on another event loop than the one that owns the pool.

        Renewals have a thread of their own and work from any event loop.
        """
        self.require_open(operation)
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(
                f"{operation}: only locks can be renewed from another event loop; use the one that "
                f"opened the handle on {self.address.location}"
            )

    async def migrate(self, *, dry_run: bool) -> Sequence[Migration]:
        """Apply the migrations that are due, or only return them."""
        work = pending if dry_run else migrate
        return await self._on_own_connection(
            "migrate", lambda connection: work(connection, self.address)
        )

    async def _on_own_connection(
        self,
        operation: str,
        work: Callable[[ServerConnection], Awaitable[_Result]],
        *,
        keep: bool = False,
    ) -> _Result:
        """Run ``work`` on a new connection, which the pool takes over with ``keep``.

        Repeats only if the server expects that to help: a wrong address must be reported at once.
        With several servers, one of them may become the primary soon.
        """
        is_worth_repeating = may_change if self._hosts.are_many else asks_for_patience
        backoff = Backoff(self.pool.retry_seconds)
        if self._hosts.are_many:
            # The first that accepts writes may be an old primary.
            await self._hosts.look(_LOOK_AT_OPENING_SECONDS)
        while True:
            try:
                connection = await self._hosts.connect()
                try:
                    result = await work(connection)
                except BaseException:
                    await connection.close()
                    raise
            except (psycopg.Error, OSError) as error:
                if not is_worth_repeating(error) or not await backoff.pause():
                    raise refusal(operation, error, self.address.location) from error
            else:
                if keep:
                    self.pool.adopt(connection)
                else:
                    await connection.close()
                return result

    async def _watch_hosts(self) -> None:
        """Look for a newer primary while an answer is late; with several servers also at intervals.

        The process may be connected to a server that has stopped answering, or to an old primary
        that still accepts writes.
        """
        loop = asyncio.get_running_loop()
        look_at = loop.time() + _LOOK_SECONDS
        while True:
            await asyncio.sleep(_LATE_SECONDS / 2)
            is_late = self.pool.is_waiting_since(_LATE_SECONDS)
            is_late = is_late or self._hosts.waiting_commits > 0
            if is_late or (self._hosts.are_many and loop.time() >= look_at):
                await self._hosts.look(is_late=is_late)
                look_at = loop.time() + _LOOK_SECONDS * random.uniform(0.8, 1.2)

    def _leave_old_primaries(self) -> None:
        self.pool.leave_old_primaries()
        self._renewals.leave_old_primary()
        self._listener.leave_old_primary()

    async def _remove_lanes(self) -> None:
        """Delete the lanes of this handle and old ones of handles that were not closed."""
        statement = self.statements(statements.REMOVE_LANES)
        with contextlib.suppress(PerdureError):
            await self.pool.run(
                "close",
                statement,
                (self.pipeline.lane_names, _LANE_LIFE_MS),
                seconds=_CLEANUP_SECONDS,
                retry_seconds=0,
            )

    # --- other workers of this host

    def new_lock_token(self) -> str:
        return self.neighbours.holder + new_id()

    def _release_dead(self, holder: str) -> None:
        """Release everything that a dead process of this host held."""
        release = asyncio.ensure_future(self._release(holder))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def _release(self, holder: str) -> None:
        try:
            ((is_released,),) = await self.ask(
                "release_holder", statements.RELEASE_HOLDER, (holder,)
            )
        except PerdureError as error:
            log.info("the locks of a dead process end by time: %s", error)
            return
        if is_released:
            self.released()
            self._wake(self._work_fetches, self._channels.work, 0)

    # --- statements

    async def ask(
        self, operation: str, template: LiteralString, parameters: Parameters = ()
    ) -> list[Row]:
        """Return the rows of a statement that may be repeated."""
        self.require_here(operation)
        return await self.pool.run(operation, self.statements(template), parameters)

    async def write(
        self, operation: str, template: LiteralString, parameters: Parameters
    ) -> list[Row]:
        """Run a statement that writes: a repeat waits for synchronous standbys."""
        self.require_here(operation)
        return await self.pool.run(operation, self.statements(template), parameters, writes=True)

    async def renew(
        self, operation: str, template: LiteralString, parameters: Parameters
    ) -> list[Row]:
        """Run a statement on the connection that is kept for renewals."""
        return await self._renewals.run(operation, self.statements(template), parameters)

    # --- waking waiters

    def hub_of(self, instance_id: str) -> ChangeHub:
        return self._hubs[bucket_of(instance_id)]

    def changed(self, instance_ids: Iterable[str], *, notify: bool = True) -> None:
        """Wake watchers of these instances, with ``notify`` also those in other processes."""
        for instance_id in instance_ids:
            bucket = bucket_of(instance_id)
            self._hubs[bucket].notify((instance_id,))
            if notify and self._listens:
                self._notifier.notify(self._channels.changes[bucket])

    def released(self) -> None:
        """Wake fetches of turns: an operator may have made instances ready."""
        self._wake(self._turn_fetches, self._channels.turns, 0)

    @property
    def poll_seconds(self) -> float:
        if self._listener.is_listening:
            return _POLL_SECONDS
        return _POLL_SECONDS_WITHOUT_LISTENING

    def _applied(self, answer: Answer, sent_at: float) -> None:
        self.clock.note(answer.now, sent_at)
        if answer.turns_at is not None:
            self._wake(self._turn_fetches, self._channels.turns, answer.turns_at - answer.now)
        if answer.work_at is not None:
            self._wake(self._work_fetches, self._channels.work, answer.work_at - answer.now)

    def _wake(self, fetches: FetchCoalescer[Any, Any], channel: str, milliseconds: int) -> None:
        fetches.wake_after(milliseconds / 1000)
        if self._listens:
            self._notifier.notify(channel)

    def _notified(self, channel: str | None) -> None:
        """Handle a notification; with None, notifications may have been missed."""
        if channel in {None, self._channels.turns}:
            self._turn_fetches.on_notify()
        if channel in {None, self._channels.work}:
            self._work_fetches.on_notify()
        if channel is None:
            for hub in self._hubs:
                hub.notify_all()
        elif channel in self._channels.changes:
            self._hubs[self._channels.changes.index(channel)].notify_all()

    async def _poll(self) -> None:
        """Wake all watchers at intervals, because notifications can be lost."""
        while True:
            await asyncio.sleep(self.poll_seconds)
            for hub in self._hubs:
                hub.notify_all()
