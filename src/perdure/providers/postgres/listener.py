"""Wake-ups between processes: one LISTEN connection, empty NOTIFYs on hashed channels.

A notification carries nothing and promises nothing; forged or lost ones do no harm, because whoever
waits also looks now and then.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import zlib
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from perdure.errors import PerdureError
from perdure.providers.postgres.connections import Rank

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from perdure.providers.postgres.connections import Connections
    from perdure.providers.postgres.place import Place

log = logging.getLogger(__name__)

BUCKETS: Final = 64
"""Watchers of an instance share a channel with those of every 64th other."""

_SPACING_SECONDS: Final = 0.02
_SEND_SECONDS: Final = 5.0
"""Later it is of no use: whoever waits has looked by itself."""
_RECONNECT_SECONDS: Final = (0.1, 5.0)
_SEND: Final = b"""
    SELECT pg_backend_pid(), pg_notify(c, '')
    FROM unnest(%s::text[]) AS c, set_config('synchronous_commit', 'off', true)
"""
"""Nothing is written that a crash could lose, so nobody waits for the disk."""


def bucket_of(instance_id: str) -> int:
    return zlib.crc32(instance_id.encode()) % BUCKETS


class Channels:
    """Names by purpose. Hashed, so that they tell nothing to who may not read the schema."""

    def __init__(self, schema: str) -> None:
        prefix = "perdure_" + hashlib.sha256(schema.encode()).hexdigest()[:16]
        self.turns = f"{prefix}_t"
        self.work = f"{prefix}_w"
        self.changes = tuple(f"{prefix}_{bucket}" for bucket in range(BUCKETS))

    @property
    def all(self) -> tuple[str, ...]:
        return (self.turns, self.work, *self.changes)


class Notifier:
    """Tells other processes, off the path of the commit: many commits share one notification."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._waiting: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.sessions: set[int] = set()
        """Server sessions that have sent for this handle, which needs no telling."""

    def tell(self, channels: Iterable[str]) -> None:
        self._waiting.update(channels)
        if self._task is None and self._waiting:
            self._task = asyncio.create_task(self._send(), name="perdure-notifier")

    async def close(self) -> None:
        if self._task is not None:
            await self._task

    async def _send(self) -> None:
        try:
            while self._waiting:
                channels, self._waiting = sorted(self._waiting), set()
                rows = await self._connections.run(
                    "notify", _SEND, (channels,), rank=Rank.CHORE, seconds=_SEND_SECONDS
                )
                self.sessions.update(row[0] for row in rows[:1])
                await asyncio.sleep(_SPACING_SECONDS)
        except PerdureError as error:
            log.debug("nobody was notified: %s", error)
        finally:
            self._task = None


class Listener:
    """Calls back for each notification of another handle, and after each time it was deaf."""

    def __init__(
        self,
        place: Place,
        channels: Channels,
        own_sessions: set[int],
        heard: Callable[[str | None], None],
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        self._place = place.listening()
        self._channels = channels
        self._own_sessions = own_sessions
        self._heard = heard
        self._begin = begin
        self._task: asyncio.Task[None] | None = None
        self.is_listening = False

    def open(self) -> None:
        """Listens from now on, whenever the server lets it: what was said before that is looked for
        then.
        """
        self._task = asyncio.create_task(self._keep_listening(), name="perdure-listener")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.is_listening = False

    async def _keep_listening(self) -> None:
        await self._begin()
        pause = _RECONNECT_SECONDS[0]
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._place.conninfo, autocommit=True, prepare_threshold=None
                )
                try:
                    await self._listen(connection)
                finally:
                    # Nothing else may come before this: the task may be cancelled once more.
                    await connection.close()
            except (psycopg.Error, OSError) as error:
                log.debug("not listening to %s: %s", self._place.location, error)
            self.is_listening = False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RECONNECT_SECONDS[1])

    async def _listen(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        names = self._channels.all
        await connection.execute(
            sql.SQL("; ").join(sql.SQL("LISTEN {}").format(sql.Identifier(name)) for name in names)
        )
        self.is_listening = True
        self._heard(None)  # whatever was said meanwhile
        async for notification in connection.notifies():
            if notification.pid not in self._own_sessions:
                self._heard(notification.channel)
