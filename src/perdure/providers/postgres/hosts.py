"""Finds the server that accepts writes, and refuses one that is no longer the primary.

A promoted standby begins a new timeline: a number that only grows. A primary that comes back after
its standby was promoted is still on the older one. What is written there is lost, so a process that
has seen a timeline of a database system does not work on an older one any more.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg

from perdure.logs import get_logger
from perdure.providers.postgres.calling import RawConnection
from perdure.providers.postgres.faults import NotPrimary, OldPrimary

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.providers.postgres.address import HostAddress, StoreAddress

log = get_logger(__name__)

Row: TypeAlias = tuple[Any, ...]

TIMELINE: Final = b"pg_walfile_name(pg_current_wal_lsn())"
"""The name of the file that is written now. Its first 8 digits are the timeline. The checkpoint in
the control file would show a new timeline late."""

_FACTS: Final = (
    b"""
    SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
        CASE WHEN NOT pg_is_in_recovery() THEN %b END,
        (SELECT system_identifier FROM pg_control_system())
"""
    % TIMELINE
)
_FACTS_WITHOUT_TIMELINE: Final = b"""
    SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', NULL, NULL
"""
_WAITING_COMMITS: Final = b"""
    SELECT count(*), current_setting('synchronous_standby_names') FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND datname = current_database() AND usename = current_user
"""
_STAGGER_SECONDS: Final = 1.0
"""A server that has not answered for so long is given more time while the next one is tried."""
_LOOK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Server:
    """The server of a connection, as it was when the connection was made."""

    host: HostAddress
    is_standby: bool
    is_read_only: bool
    timeline: int | None
    """None: a standby, or the role may not read it."""
    system: int | None
    """The identifier of the database system, which standbys share with their primary."""


class ServerConnection(psycopg.AsyncConnection[Row]):
    """A connection that knows its server."""

    server: Server


def timeline_of(file_name: str | bytes) -> int:
    """Return the timeline in the name of a WAL file."""
    return int(file_name[:8], 16)


# --- the newest timeline

_newest: dict[int, int] = {}
"""The newest timeline that this process has seen, by system identifier."""
_fences: set[Fence] = set()
"""Those of open handles."""


class Fence:
    """Refuses connections to old primaries, for all connections of one handle.

    ``rose`` is called, on the event loop that opened the handle, when any handle of this process
    has seen a newer timeline.
    """

    def __init__(self, rose: Callable[[], None]) -> None:
        self._rose = rose
        self.is_settled = False
        self._system: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self.is_settled, self._system = False, None
        self._loop = asyncio.get_running_loop()
        _fences.add(self)

    def close(self) -> None:
        _fences.discard(self)
        self._loop = None

    @property
    def newest(self) -> int:
        """The newest timeline of the system that this handle works on; 0 if it is unknown."""
        return 0 if self._system is None else _newest.get(self._system, 0)

    def note(self, server: Server) -> None:
        """Take a server into account that accepts writes. Any thread may call it."""
        system, timeline = server.system, server.timeline
        if system is None or timeline is None:
            return
        before = _newest.get(system, 0)
        if timeline <= before:
            return
        _newest[system] = timeline
        if before:
            log.warning(
                "%s is the primary on timeline %d now; connections to timeline %d and older ones "
                "are closed",
                server.host,
                timeline,
                before,
            )
            for fence in list(_fences):
                fence._announce(system)  # noqa: SLF001

    def settle(self, server: Server) -> None:
        """Work on the system of this server from now on."""
        if not self.is_settled:
            self.is_settled, self._system = True, server.system

    def refusal(self, server: Server) -> OldPrimary | None:
        """Return the error for an old primary or another system."""
        system, timeline = server.system, server.timeline
        if system is None or timeline is None:
            return None
        if self.is_settled and system != self._system:
            return OldPrimary(
                f"{server.host} belongs to another database system (identifier {system}) than the "
                f"one that this process has worked on ({self._system}); if that is intended, "
                "start the process again"
            )
        newest = _newest.get(system, 0)
        if timeline < newest:
            return OldPrimary(
                f"{server.host} is an old primary: it is on timeline {timeline}, and timeline "
                f"{newest} was seen. Writes there would be lost. Stop it, and let it follow the "
                "new primary (pg_rewind)"
            )
        return None

    def _announce(self, system: int) -> None:
        loop = self._loop
        if loop is not None and self._system == system:
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(self._rose)


# --- connecting


class Hosts:
    """The servers of an address. May be used from several event loops."""

    def __init__(self, address: StoreAddress, fence: Fence) -> None:
        self.address = address
        self.fence = fence
        self._facts = _FACTS
        self._primary: HostAddress | None = None
        """The last one that was found to accept writes."""
        self._silent: set[HostAddress] = set()
        """Those that did not answer when they were tried last."""
        self._logged: set[str] = set()
        """Refusals of old primaries that the log has."""
        self.waiting_commits = 0
        """Commits that waited for a synchronous standby when an answer was late."""

    @property
    def are_many(self) -> bool:
        return len(self.address.hosts) > 1

    @property
    def knows_timelines(self) -> bool:
        """Return False if the role may not read the timeline of the server."""
        return self._facts == _FACTS

    async def connect(self) -> ServerConnection:
        """Return a connection to a server that accepts writes and is no old primary.

        Tries the last primary first, and those that were silent last. Raises what the driver
        raises; with several servers, an error with what each of them said.
        """
        hosts = await self._resolved()
        if len(hosts) == 1:
            return await self._connect_to(hosts[0])
        hosts.sort(key=lambda host: (host in self._silent, host != self._primary))
        failures: list[Exception] = []
        tasks: set[asyncio.Task[ServerConnection]] = set()
        try:
            for host in hosts:
                tasks.add(asyncio.ensure_future(self._connect_to(host)))
                if (found := await _first(tasks, failures, _STAGGER_SECONDS)) is not None:
                    break
            else:
                found = await _first(tasks, failures, None)
        finally:
            # Without awaiting them: a connection that was found would be lost on cancellation.
            for task in tasks:
                task.add_done_callback(_close_found)
                task.cancel()
        if found is None:
            raise _joined(failures)
        if (refused := self.fence.refusal(found.server)) is not None:
            found.pgconn.finish()  # a newer primary was seen since it was admitted
            raise refused
        return found

    async def look(self, seconds: float = _LOOK_SECONDS, *, is_late: bool = False) -> None:
        """Ask each server whether it is the primary, to learn of a newer timeline.

        ``is_late``: an answer is late. Ask the primary too whether commits wait for a standby.
        """

        async def ask(host: HostAddress) -> None:
            with suppress(psycopg.Error, OSError):
                async with asyncio.timeout(seconds):
                    connection = await self._connect_to(host, is_look=True)
                    try:
                        if is_late:
                            row = await _one_row(connection, _WAITING_COMMITS, seconds)
                            self._note_waiting(host, *row)
                    finally:
                        connection.pgconn.finish()

        with suppress(psycopg.Error):  # no name was resolved
            await asyncio.gather(*[ask(host) for host in await self._resolved()])

    def _note_waiting(self, host: HostAddress, number: int, standbys: str) -> None:
        if number and not self.waiting_commits:
            log.warning(
                "the synchronous standby does not answer: %d commits on %s wait for it. They are "
                "not acknowledged until it is back, or synchronous_standby_names (%s) is changed",
                number,
                host,
                standbys,
            )
        elif self.waiting_commits and not number:
            log.warning("the synchronous standby answers: commits on %s go on", host)
        self.waiting_commits = number

    async def _resolved(self) -> list[HostAddress]:
        """Return one entry for each address: a name can stand for several servers.

        Leaves out names that are not resolved in time; raises if none is left.
        """
        found = await asyncio.gather(*[self._addresses_of(host) for host in self.address.hosts])
        hosts = [host for each in found for host in each]
        if not hosts:
            raise psycopg.OperationalError(
                f"no name was resolved within {self.address.connect_seconds} s"
            )
        return hosts

    async def _addresses_of(self, host: HostAddress) -> list[HostAddress]:
        if not host.host or host.hostaddr or host.host.startswith(("/", "@")):
            return [host]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.address.connect_seconds):
                places = await loop.getaddrinfo(host.host, None, type=socket.SOCK_STREAM)
        except TimeoutError:
            return []
        except OSError:
            return [host]  # the driver says so when it connects
        addresses = dict.fromkeys(str(place[4][0]) for place in places)
        return [replace(host, hostaddr=address) for address in addresses]

    async def _connect_to(self, host: HostAddress, *, is_look: bool = False) -> ServerConnection:
        try:
            connection = await ServerConnection.connect(
                self.address.conninfo_of(host), autocommit=True, prepare_threshold=None
            )
            try:
                connection.server = await self._ask(connection, host)
                self._admit(connection.server)
                if not is_look:
                    self.fence.settle(connection.server)
                if self.fence.is_settled:
                    self._primary = host
            except BaseException:
                connection.pgconn.finish()
                raise
        except BaseException as error:
            if isinstance(error, NotPrimary | OldPrimary):
                self._silent.discard(host)
            else:
                self._silent.add(host)
            raise
        self._silent.discard(host)
        return connection

    async def _ask(self, connection: ServerConnection, host: HostAddress) -> Server:
        try:
            row = await _one_row(connection, self._facts, self.address.connect_seconds)
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            if not self.knows_timelines:
                raise
            log.info("no protection against old primaries on %s: %s", host, error)
            self._facts = _FACTS_WITHOUT_TIMELINE
            return await self._ask(connection, host)
        is_standby, is_read_only, file_name, system = row
        timeline = None if file_name is None else timeline_of(file_name)
        return Server(host, is_standby, is_read_only, timeline, system)

    def _admit(self, server: Server) -> None:
        """Raise NotPrimary or OldPrimary for a server that the store must not work on."""
        if server.is_standby:
            raise NotPrimary(f"{server.host} is a standby and accepts no writes")
        if server.is_read_only:
            raise NotPrimary(f"{server.host} is read-only and accepts no writes")
        self.fence.note(server)
        refused = self.fence.refusal(server)
        if refused is not None:
            if str(refused) not in self._logged:
                self._logged.add(str(refused))
                log.warning("%s", refused)
            raise refused


async def _one_row(connection: ServerConnection, statement: bytes, seconds: float) -> Row:
    raw = RawConnection(connection)
    try:
        (row,) = await raw.call_for_rows(statement, (), prepare=False, seconds=seconds)
        return row
    finally:
        raw.stop()


async def _first(
    tasks: set[asyncio.Task[ServerConnection]], failures: list[Exception], seconds: float | None
) -> ServerConnection | None:
    """Return the first connection within that time. None: there is none yet, or all have failed."""
    while tasks:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return None
        for task in done:
            if task.exception() is None:
                tasks.discard(task)
                return task.result()
        for task in done:
            tasks.discard(task)
            error = task.exception()
            if not isinstance(error, psycopg.Error | OSError):
                raise error or AssertionError
            failures.append(error)
    return None


def _close_found(task: asyncio.Task[ServerConnection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().pgconn.finish()


def _joined(failures: list[Exception]) -> Exception:
    """Return one error for all servers."""
    text = "; ".join(" ".join(str(each).split()) for each in failures)
    kinds = {type(each) for each in failures}
    if kinds == {NotPrimary}:
        return NotPrimary(text)
    return psycopg.OperationalError(text)
