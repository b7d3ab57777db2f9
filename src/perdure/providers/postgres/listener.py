"""Wake-ups between processes: one LISTEN connection, empty NOTIFYs on hashed channels.

A notification carries no data. A forged or lost one does no harm, because waiters also poll.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from typing import TYPE_CHECKING, Final

import psycopg

from perdure.errors import PerdureError
from perdure.logs import get_logger
from perdure.providers.postgres.calling import RawConnection, cut

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from perdure.providers.postgres.hosts import Hosts, ServerConnection
    from perdure.providers.postgres.pool import ConnectionPool

log = get_logger(__name__)

BUCKETS: Final = 64
"""Instances share this many channels for their changes."""

_SPACING_SECONDS: Final = 0.02
_SEND_SECONDS: Final = 5.0
"""Time limit of all tries. A later notification is useless: waiters have polled by then."""
_CLOSE_SECONDS: Final = 1.0
"""Limit for the last notification at closing, which other processes can do without."""
_RECONNECT_SECONDS: Final = (0.1, 5.0)
_SEND: Final = b"""
    SELECT pg_backend_pid(), pg_notify(c, '')
    FROM unnest($1::text[]) AS c, set_config('synchronous_commit', 'off', true)
"""
"""Nothing is written that a crash could lose, so the commit does not wait for the disk."""


def bucket_of(instance_id: str) -> int:
    return zlib.crc32(instance_id.encode()) % BUCKETS


class Channels:
    """Channel names by purpose, hashed: any role of the database can see them."""

    def __init__(self, schema: str) -> None:
        prefix = "perdure_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self.turns = f"{prefix}_t"
        self.work = f"{prefix}_w"
        self.changes = tuple(f"{prefix}_{bucket}" for bucket in range(BUCKETS))

    @property
    def all(self) -> tuple[str, ...]:
        return (self.turns, self.work, *self.changes)


class Notifier:
    """Notifies other processes, outside of commits: many commits share one notification.

    NOTIFY takes a lock of the whole server at commit, so it must not be part of a turn.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._waiting: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.sessions: set[int] = set()
        """Server sessions that have notified for this handle; it ignores their notifications."""

    def notify(self, channel: str) -> None:
        self._waiting.add(channel)
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="perdure-notifier")

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        if self._task is not None:
            self._task.cancel()

    async def _send(self) -> None:
        try:
            while self._waiting:
                channels, self._waiting = sorted(self._waiting), set()
                rows = await self._pool.run(
                    "notify",
                    _SEND,
                    (channels,),
                    seconds=_SEND_SECONDS,
                    retry_seconds=_SEND_SECONDS,
                )
                self.sessions.update(row[0] for row in rows[:1])
                await asyncio.sleep(_SPACING_SECONDS)
        except PerdureError as error:
            log.debug("other processes were not notified: %s", error)
        finally:
            self._task = None


class Listener:
    """Calls ``notified`` for each notification of another handle, and with None on reconnecting."""

    def __init__(
        self,
        hosts: Hosts,
        channels: Channels,
        own_sessions: AbstractSet[int],
        notified: Callable[[str | None], None],
    ) -> None:
        self._hosts = hosts
        self._address = hosts.address
        self._channels = channels
        self._own_sessions = own_sessions
        self._notified = notified
        self._task: asyncio.Task[None] | None = None
        self._connection: ServerConnection | None = None
        self.is_listening = False

    def open(self) -> None:
        """Listen in the background, and reconnect when the connection is lost."""
        self._task = asyncio.create_task(self._keep_listening(), name="perdure-listener")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.is_listening = False

    def leave_old_primary(self) -> None:
        """Listen on another connection."""
        if self._connection is not None:
            cut(self._connection)

    async def _keep_listening(self) -> None:
        pause = _RECONNECT_SECONDS[0]
        while True:
            try:
                self._connection = connection = await self._hosts.connect()
                try:
                    await self._listen(connection)
                finally:
                    # Close first: the task may be cancelled a second time.
                    await connection.close()
            except (psycopg.Error, OSError) as error:
                log.debug("not listening to %s: %s", self._address.location, error)
            pause = _RECONNECT_SECONDS[0] if self.is_listening else pause
            self._connection = None
            self.is_listening = False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RECONNECT_SECONDS[1])

    async def _listen(self, connection: ServerConnection) -> None:
        raw = RawConnection(connection)
        try:
            # One statement: the channels have names that need no quoting.
            listens = "".join(f"LISTEN {name};" for name in self._channels.all)
            statement = f"DO $$BEGIN {listens} END$$".encode()
            await raw.call(statement, (), prepare=False, seconds=self._address.answer_seconds)
        finally:
            raw.stop()
        self.is_listening = True
        self._notified(None)  # notifications may have been missed
        async for notification in connection.notifies():
            if notification.pid not in self._own_sessions:
                self._notified(notification.channel)
