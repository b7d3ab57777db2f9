"""A pool of connections, and how often a statement is tried. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import psycopg

from perdure.errors import StoreBusy, StoreClosed
from perdure.providers.postgres.backoff import Backoff
from perdure.providers.postgres.calling import Receiver, call, call_back, call_for_rows
from perdure.providers.postgres.faults import Remedy, refusal, remedy_for
from perdure.providers.postgres.place import ANSWER_SECONDS
from perdure.providers.postgres.silence import answer_within
from perdure.providers.postgres.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from perdure.providers.postgres.place import Place

Row: TypeAlias = tuple[Any, ...]
Parameters: TypeAlias = "Sequence[Any] | Mapping[str, Any]"
_Connection: TypeAlias = "psycopg.AsyncConnection[Row]"
_Answer = TypeVar("_Answer")

RETRY_SECONDS: Final = 10.0
"""A restart or a failover is over by then; the caller may go on trying."""

_SETTLING_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 0.01
_NEXT_COMMIT_SECONDS: Final = 0.001
_NAMED_AFTER_RUNS: Final = 3
"""Giving a statement a name takes a round trip, from which a program that ends soon has nothing."""
_LIFE_SECONDS: Final = 3600.0
"""What a session of the server gathers in its memory is let go from time to time."""


class Rank(IntEnum):
    """Who goes first when connections are scarce."""

    COMMIT = 0
    FETCH_TURNS = 1
    FETCH_WORK = 2
    READ = 3
    CHORE = 4


_PATIENCE_SECONDS: Final = {
    Rank.COMMIT: 0.02,
    Rank.FETCH_TURNS: 0.05,
    Rank.FETCH_WORK: 0.005,
    Rank.READ: 0.05,
    Rank.CHORE: 0.1,
}
"""How long to wait for a connection in use before another one is opened. A new one has to learn the
tables first, and the server has better things to do when a program starts."""


@dataclass(slots=True, eq=False)
class Link:
    """An open connection."""

    connection: _Connection
    opened_at: float
    receiver: Receiver
    runs: Counter[bytes] = field(default_factory=Counter[bytes])
    """How often it has run each statement. One that it knows, the server need not plan again."""
    prepared: set[bytes] = field(default_factory=set[bytes])
    """Those that have a name."""


class Connections:
    """A bounded pool, every connection in autocommit: a statement is a transaction.

    A statement goes to a connection that has run it before, if one is free, else to the last one
    used. One connection at a time is opened; whoever waits takes what is free first, and waits a
    moment before it asks for a connection more: opening one costs the server more than most
    statements. What is of a lower rank lets others go first and waits longer.
    """

    def __init__(self, place: Place, *, size: int, prepare: bool, retry_seconds: float) -> None:
        self._place = place
        self._retry_seconds = retry_seconds
        self._prepares = prepare
        self._slots = Slots(size)
        self._free: list[Link] = []
        self._count = 0
        """Free ones and those in use."""
        self._opened_at = self._used_at = 0.0
        self.is_settled = False
        """Nothing has to wait because a program is at its first turns."""
        self._waiting: dict[Rank, deque[asyncio.Future[None]]] = {rank: deque() for rank in Rank}
        self._waking: asyncio.TimerHandle | None = None
        self._is_opening = False
        self._is_open = False
        self._rehearsals: set[asyncio.Task[bytes]] = set()

    @property
    def location(self) -> str:
        return self._place.location

    async def settle(self) -> None:
        """Before what is not urgent: while a program is at its first turns, it waits for a moment
        at which nothing is going on.
        """
        loop = asyncio.get_running_loop()
        while not self.is_settled and loop.time() < self._opened_at + _SETTLING_SECONDS:
            is_used = self._count > len(self._free)
            if not is_used and loop.time() >= self._used_at + _IDLE_SECONDS:
                break
            await asyncio.sleep(_IDLE_SECONDS)
        self.is_settled = True

    async def connect(self) -> _Connection:
        """A connection of one's own; raises what the driver raises."""
        return await psycopg.AsyncConnection[Row].connect(
            self._place.conninfo,
            autocommit=True,
            prepare_threshold=_NAMED_AFTER_RUNS if self._prepares else None,
        )

    def open(self) -> None:
        self._is_open = True
        self._opened_at = asyncio.get_running_loop().time()
        self.is_settled = False

    def adopt(self, connection: _Connection, rehearsal: bytes) -> None:
        """Take over a connection of one's own, as the first of the pool."""
        self._count += 1
        self._slots.take_now()
        self._rehearse(_link_to(connection), rehearsal)

    async def close(self) -> None:
        self._is_open = False
        self._drop_free()
        for task in self._rehearsals:
            task.cancel()
        await asyncio.gather(*self._rehearsals, return_exceptions=True)

    async def run(
        self,
        operation: str,
        statement: bytes,
        parameters: Parameters = (),
        *,
        binary: bool = False,
        rank: Rank = Rank.READ,
        seconds: float = ANSWER_SECONDS,
    ) -> list[Row]:
        """Rows of a statement that may be repeated; it is, for as long as that can help.

        ``seconds``: how long an answer may take.
        """
        return await self._repeat(
            operation,
            statement,
            lambda link, _: _ask(
                link.connection, statement, parameters, binary=binary, seconds=seconds
            ),
            rank=rank,
        )

    async def fetch(
        self,
        operation: str,
        statement: bytes,
        parameters: Callable[[bool], Sequence[bytes | None]],
        *,
        was_sent: bool,
        rank: Rank,
        rehearsal: Callable[[list[Row]], bytes | None] | None,
    ) -> list[Row]:
        """As ``run``; the parameters depend on whether the statement may have run before.

        ``rehearsal`` gives a statement for what comes next, if the answer is such that nobody will
        need the connection for a while. Each connection runs it once.
        """
        return await self._repeat(
            operation,
            statement,
            lambda link, again: call_for_rows(
                link.connection,
                statement,
                parameters(again),
                prepared=self._prepared_on(link, statement),
                seconds=ANSWER_SECONDS,
            ),
            rank=rank,
            was_sent=was_sent,
            rehearsal=rehearsal,
        )

    async def _repeat(
        self,
        operation: str,
        statement: bytes,
        ask: Callable[[Link, bool], Awaitable[list[Row]]],
        *,
        rank: Rank,
        was_sent: bool = False,
        rehearsal: Callable[[list[Row]], bytes | None] | None = None,
    ) -> list[Row]:
        async def ask_on(link: Link) -> list[Row]:
            return await ask(link, was_sent)

        backoff = Backoff(self._retry_seconds)
        while True:
            try:
                return await self._with_link(
                    operation,
                    statement,
                    ask_on,
                    rank=rank,
                    rehearsal=rehearsal,
                )
            except (psycopg.Error, OSError) as error:
                remedy = remedy_for(error)
                if remedy is Remedy.NONE or not await backoff.pause():
                    raise refusal(operation, error, self.location) from error
                was_sent = was_sent or remedy is Remedy.RECONNECT

    def _prepared_on(self, link: Link, statement: bytes) -> set[bytes] | None:
        """What has a name on the connection, if this statement shall have one."""
        is_worth_it = self._prepares and link.runs[statement] >= _NAMED_AFTER_RUNS
        return link.prepared if is_worth_it else None

    async def run_once(
        self,
        operation: str,
        statement: bytes,
        parameters: Parameters = (),
        *,
        binary: bool = False,
        rank: Rank = Rank.READ,
        seconds: float = ANSWER_SECONDS,
    ) -> list[Row]:
        """One try; raises what the driver raises, TimeoutError if there is no answer."""
        return await self._with_link(
            operation,
            statement,
            lambda link: _ask(
                link.connection, statement, parameters, binary=binary, seconds=seconds
            ),
            rank=rank,
        )

    async def call_once(
        self, operation: str, statement: bytes, parameters: Sequence[bytes]
    ) -> bytes:
        """One try of a commit, which returns one text. Raises what the driver raises."""
        return await self._with_link(
            operation,
            statement,
            lambda link: call(
                link.connection,
                statement,
                parameters,
                prepared=self._prepared_on(link, statement),
                seconds=ANSWER_SECONDS,
            ),
            rank=Rank.COMMIT,
        )

    def call_now(
        self,
        statement: bytes,
        parameters: Sequence[bytes],
        done: Callable[[bytes, BaseException | None], None],
    ) -> bool:
        """As ``call_once`` if a connection that knows the statement is free, else False.

        ``done`` is called with the text, or with what the driver would raise.
        """
        link = self._pick_known(statement) if self._is_open else None
        if link is None:
            return False

        def answered(text: bytes, error: BaseException | None) -> None:
            self._give_back(link, error, Rank.COMMIT)
            done(text, error)

        try:
            call_back(
                link.connection,
                link.receiver,
                statement,
                parameters,
                is_prepared=self._prepares,
                seconds=ANSWER_SECONDS,
                done=answered,
            )
        except (psycopg.Error, OSError) as error:
            answered(b"", error)
        return True

    async def _with_link(
        self,
        operation: str,
        statement: bytes,
        ask: Callable[[Link], Awaitable[_Answer]],
        *,
        rank: Rank,
        rehearsal: Callable[[_Answer], bytes | None] | None = None,
    ) -> _Answer:
        await self._take_slot(operation)
        try:
            link = await self._take(statement, rank)
        except BaseException as error:
            self._drop_broken(error)
            self._slots.release()
            raise
        link.receiver.stop()
        try:
            answer = await ask(link)
        except BaseException as error:
            self._give_back(link, error, rank)
            raise
        link.runs[statement] += 1
        next_up = None if rehearsal is None else rehearsal(answer)
        if next_up is None:
            self._give_back(link, None, rank)
        else:
            self._rehearse(link, next_up, secrets.token_hex(16).encode())
        return answer

    def _rehearse(self, link: Link, statement: bytes, *parameters: bytes) -> None:
        """Give it back once it has run the statement, for which nobody waits."""
        if statement in link.runs or not self._prepares:
            self._give_back(link, None, Rank.CHORE)
            return
        link.runs[statement] += 1
        task = asyncio.create_task(
            call(link.connection, statement, parameters, prepared=None, seconds=ANSWER_SECONDS),
            name="perdure-rehearsal",
        )
        self._rehearsals.add(task)
        task.add_done_callback(lambda _: self._end_rehearsal(link, task))

    def _end_rehearsal(self, link: Link, task: asyncio.Task[bytes]) -> None:
        self._rehearsals.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._give_back(link, error, Rank.CHORE)

    def _give_back(self, link: Link, error: BaseException | None, used_for: Rank) -> None:
        if error is not None:
            _clear_up(link, error)
            self._drop_broken(error)
        self._put(link)
        self._slots.release()
        if used_for is Rank.COMMIT and self._count == 1 and not self._waiting[Rank.COMMIT]:
            # What a commit leads to is often the next one, and there is this connection only.
            if self._waking is not None:
                self._waking.cancel()
            loop = asyncio.get_running_loop()
            self._waking = loop.call_later(_NEXT_COMMIT_SECONDS, self.wake)
        else:
            self.wake()

    def _drop_broken(self, error: BaseException) -> None:
        if remedy_for(error) is Remedy.RECONNECT:
            # What happened to this one has likely happened to all of them.
            self._drop_free()

    async def _take_slot(self, operation: str) -> None:
        if not self._is_open:
            raise StoreClosed(operation, f"{self.location} is not open")
        if self._slots.take_now():
            return
        try:
            async with asyncio.timeout(self._retry_seconds):
                await self._slots.take()
        except TimeoutError as error:
            raise StoreBusy(
                operation,
                f"{self.location}: all connections were in use for {self._retry_seconds} s; "
                "raise pool_size, or look for what blocks them",
            ) from error

    async def _take(self, statement: bytes, rank: Rank) -> Link:
        if len(self._free) == 1:
            # It goes to whoever is of the highest rank of those that are about to ask.
            for _ in range(rank):
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        open_at = loop.time() + _PATIENCE_SECONDS[rank]
        while True:
            link = None if self._is_outranked(rank) else self._pick(statement)
            if link is not None:
                return link
            may_open = self._count == 0 or loop.time() >= open_at
            if may_open and not self._is_opening:
                return await self._open_link()
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting[rank].append(turn)
            await self._await_turn(turn, None if may_open else open_at)

    async def _await_turn(self, turn: asyncio.Future[None], until: float | None) -> None:
        loop = asyncio.get_running_loop()
        patience = None if until is None else loop.call_at(until, _end_wait, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # it was this one's turn, and it does not take it
            raise
        finally:
            if patience is not None:
                patience.cancel()

    def _is_outranked(self, rank: Rank) -> bool:
        """Somebody waits who is to go first, perhaps for the commit that may follow a commit."""
        return any(not turn.done() for first in range(rank) for turn in self._waiting[Rank(first)])

    def _pick(self, statement: bytes) -> Link | None:
        for position in range(len(self._free) - 1, -1, -1):
            link = self._free[position]
            if link.connection.closed:
                self._count -= 1
                _hang_up(self._free.pop(position))
            elif statement in link.runs:
                return self._free.pop(position)
        return self._free.pop() if self._free else None

    def _pick_known(self, statement: bytes) -> Link | None:
        """With its slot, if there is one that need not wait for anything."""
        if not self._slots.take_now():
            return None
        for position in range(len(self._free) - 1, -1, -1):
            link = self._free[position]
            is_ready = statement in (link.prepared if self._prepares else link.runs)
            if is_ready and not link.connection.closed:
                return self._free.pop(position)
        self._slots.release()
        return None

    async def _open_link(self) -> Link:
        self._is_opening = True
        try:
            link = _link_to(await self.connect())
        except (psycopg.Error, OSError) as error:
            # Others would wait as long for nothing, one after the other.
            for waiting in self._waiting.values():
                while waiting:
                    self._fail(waiting.popleft(), error)
            raise
        else:
            self._count += 1
            return link
        finally:
            self._is_opening = False
            self.wake()

    def _put(self, link: Link) -> None:
        self._used_at = asyncio.get_running_loop().time()
        age = self._used_at - link.opened_at
        if self._is_open and age < _LIFE_SECONDS and not link.connection.closed:
            self._free.append(link)
        else:
            self._count -= 1
            _hang_up(link)

    def wake(self) -> None:
        """Let the first of those who wait look for a connection."""
        for waiting in self._waiting.values():
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return

    @staticmethod
    def _fail(turn: asyncio.Future[None], error: Exception) -> None:
        if not turn.done():
            turn.set_exception(error)

    def _drop_free(self) -> None:
        while self._free:
            self._count -= 1
            _hang_up(self._free.pop())


def _link_to(connection: _Connection) -> Link:
    now = asyncio.get_running_loop().time()
    return Link(connection, now, Receiver(connection.pgconn))


def _clear_up(link: Link, error: BaseException) -> None:
    # A stale plan lives on in an open connection, and an answer that was not waited for would be
    # taken for the next one's.
    if remedy_for(error) is Remedy.RECONNECT or not isinstance(error, psycopg.Error):
        _hang_up(link)


def _hang_up(link: Link) -> None:
    """What the driver's close does; only that it need not be awaited."""
    link.receiver.stop()
    link.connection.pgconn.finish()


def _end_wait(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


async def _ask(
    connection: _Connection,
    statement: bytes,
    parameters: Parameters,
    *,
    binary: bool,
    seconds: float,
) -> list[Row]:
    cursor = connection.cursor(binary=binary)
    with answer_within(connection, seconds):
        await cursor.execute(statement, parameters)
        result = cursor.pgresult
        return await cursor.fetchall() if result is not None and result.nfields else []
