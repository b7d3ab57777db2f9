"""Fetches turns and work, one statement for all waiting calls that want the same.

A fetch whose answer was lost is sent again with the same tokens, until the server has said which
items it locked with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from perdure.errors import CorruptData, ProviderError
from perdure.providers import rules
from perdure.providers.postgres import records, statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
    from typing import LiteralString

    from perdure.providers.postgres.hosts import Row
    from perdure.providers.postgres.store import PostgresStore
    from perdure.providers.records import (
        FetchedOrchestration,
        FetchedWork,
        OrchestrationFilter,
        SessionFetch,
        TagFilter,
    )

_TOKENS_MAX: Final = 200_000

_PAUSE_SECONDS_MIN: Final = 0.005
_JITTER: Final = 0.2
_NOTIFY_SPACING_SECONDS: Final = 0.02
_CLOSE_SECONDS: Final = 3.0
"""Limit for fetches that are under way at closing. What an unanswered one has locked stays locked
until the locks expire."""

_ItemT = TypeVar("_ItemT")
_WantT = TypeVar("_WantT", bound="Hashable")


# --- waiting calls


@dataclass(slots=True)
class FetchResult(Generic[_ItemT]):
    """The answer to one fetch."""

    items: list[_ItemT]
    due_seconds: float | None = None
    """When the next item may become free, if the server knows."""


@dataclass(slots=True, eq=False)
class _Caller(Generic[_ItemT]):
    until: float
    limit: int
    outcome: asyncio.Future[list[_ItemT]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    was_looked_for: bool = False
    """A fetch has begun since the call."""


class FetchCoalescer(Generic[_WantT, _ItemT]):
    """Serves the waiting calls of one queue; calls with equal wants share a fetch.

    Fetches again after a commit of this process, after a notification of another one, when an item
    falls due, and at intervals in any case.
    """

    def __init__(
        self,
        fetch_from_server: Callable[[_WantT, int], Awaitable[FetchResult[_ItemT]]],
        give_back: Callable[[_ItemT], Awaitable[None]],
        poll_seconds: Callable[[], float],
        at_once_max: int,
    ) -> None:
        self._fetch_from_server = fetch_from_server
        self._at_once_max = at_once_max
        self._give_back = give_back
        self._poll_seconds = poll_seconds
        self._callers: dict[_WantT, deque[_Caller[_ItemT]]] = {}
        self._wake_ups: dict[_WantT, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._notified_at = 0.0
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        """Let every waiting call return without an item."""
        self._is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.wake()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            # Not gather: with tasks that have ended it does not yield, and none would be discarded.
            await asyncio.wait(self._tasks)

    def wake(self) -> None:
        """Fetch again now."""
        for wake_up in self._wake_ups.values():
            wake_up.set()

    def on_notify(self) -> None:
        """Handle a NOTIFY. Wakes the waiting calls at most every 20 ms."""
        now = asyncio.get_running_loop().time()
        if now < self._notified_at + _NOTIFY_SPACING_SECONDS:
            self.wake_after(self._notified_at + _NOTIFY_SPACING_SECONDS - now)
        else:
            self._notified_at = now
            self.wake()

    def wake_after(self, seconds: float) -> None:
        """Fetch again after that time, or earlier."""
        if seconds <= 0:
            self.wake()
            return
        if not self._wake_ups:
            return
        loop = asyncio.get_running_loop()
        if self._alarm is None or self._alarm.when() > loop.time() + seconds:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_later(seconds, self._alarm_ended)

    def _alarm_ended(self) -> None:
        self._alarm = None
        self.wake()

    async def fetch(self, want: _WantT, limit: int, timeout_seconds: float) -> list[_ItemT]:
        """Return up to ``limit`` items as soon as there is one; [] after the timeout."""
        caller = _Caller[_ItemT](asyncio.get_running_loop().time() + timeout_seconds, limit)
        if want not in self._callers:
            self._callers[want] = deque()
            self._wake_ups[want] = asyncio.Event()
            task = asyncio.create_task(self._serve(want), name="perdure-fetches")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._callers[want].append(caller)
        self._wake_ups[want].set()
        try:
            return await caller.outcome
        except asyncio.CancelledError:
            await self._abandon(caller)
            raise

    async def _abandon(self, caller: _Caller[_ItemT]) -> None:
        outcome = caller.outcome
        if outcome.cancelled() or not outcome.done() or outcome.exception() is not None:
            outcome.cancel()
            return
        await asyncio.shield(self._give_back_all(outcome.result()))

    async def _give_back_all(self, items: list[_ItemT]) -> None:
        await asyncio.gather(*[self._give_back(item) for item in items])

    # --- serving the calls of one want

    async def _serve(self, want: _WantT) -> None:
        callers, wake_up = self._callers[want], self._wake_ups[want]
        try:
            while self._drop_ended(callers) and self._is_open:
                wake_up.clear()
                pause = await self._serve_once(want, callers)
                if pause is not None and self._is_open:
                    await self._wait(wake_up, callers, pause)
        finally:
            del self._callers[want], self._wake_ups[want]
            for caller in callers:
                if not caller.outcome.done():
                    caller.outcome.set_result([])

    async def _serve_once(self, want: _WantT, callers: deque[_Caller[_ItemT]]) -> float | None:
        """Return how long to wait before the next fetch; None: fetch again at once."""
        wanted = 0
        for caller in callers:
            caller.was_looked_for = True
            wanted += caller.limit
        try:
            result = await self._fetch_from_server(want, min(wanted, self._at_once_max))
        except Exception as error:  # noqa: BLE001 - the calls raise it
            self._fail(callers, error)
            return None
        if result.items:
            await self._hand_over(result.items, callers)
            return None
        self._end_late(callers)
        return self._poll_seconds() if result.due_seconds is None else result.due_seconds

    async def _hand_over(self, items: list[_ItemT], callers: deque[_Caller[_ItemT]]) -> None:
        while items and self._is_open and self._drop_ended(callers):
            caller = callers.popleft()
            caller.outcome.set_result(items[: caller.limit])
            items = items[caller.limit :]
        await self._give_back_all(items)

    async def _wait(
        self, wake_up: asyncio.Event, callers: deque[_Caller[_ItemT]], pause: float
    ) -> None:
        loop = asyncio.get_running_loop()
        poll = self._poll_seconds() * random.uniform(1 - _JITTER, 1 + _JITTER)
        fetch_at = loop.time() + max(min(pause, poll), _PAUSE_SECONDS_MIN)
        while self._is_open and self._drop_ended(callers):
            until = min(fetch_at, *(caller.until for caller in callers))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await wake_up.wait()
            if wake_up.is_set() or loop.time() >= fetch_at:
                return
            self._end_late(callers)

    @staticmethod
    def _drop_ended(callers: deque[_Caller[_ItemT]]) -> bool:
        """Drop calls that have an outcome or were cancelled; return whether any is left."""
        for _ in range(len(callers)):
            caller = callers.popleft()
            if not caller.outcome.done():
                callers.append(caller)
        return bool(callers)

    @staticmethod
    def _end_late(callers: deque[_Caller[_ItemT]]) -> None:
        """Let calls whose time is up return without an item."""
        now = asyncio.get_running_loop().time()
        for caller in callers:
            is_late = caller.until <= now and caller.was_looked_for
            if is_late and not caller.outcome.done():
                caller.outcome.set_result([])

    @staticmethod
    def _fail(callers: deque[_Caller[_ItemT]], error: Exception) -> None:
        for caller in callers:
            if caller.was_looked_for and not caller.outcome.done():
                caller.outcome.set_exception(error)


# --- tokens


class TokenCache:
    """Remembers which instance a lock token belongs to; asks the server about unknown tokens.

    Statements are addressed by instance, so that a distributed Postgres sends each to one server.
    """

    def __init__(self, find: Callable[[Sequence[str]], Awaitable[dict[str, str]]]) -> None:
        self._find = find
        self._instances: OrderedDict[str, str] = OrderedDict()

    def note(self, token: str, instance_id: str) -> None:
        self._instances[token] = instance_id
        if len(self._instances) > _TOKENS_MAX:
            self._instances.popitem(last=False)

    def forget(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self._instances.pop(token, None)

    def known(self, token: str) -> str | None:
        return self._instances.get(token)

    async def instance_of(self, token: str, operation: str) -> str:
        """Return the instance; raise LockLost if no row of the store has the token."""
        instance_id = (await self.instances_of((token,))).get(token)
        if instance_id is None:
            raise rules.lock_lost(operation, token)
        return instance_id

    async def instances_of(self, tokens: Sequence[str]) -> dict[str, str]:
        """Return instances by token, without the tokens that no row of the store has."""
        found = {token: known for token in tokens if (known := self._instances.get(token))}
        unknown = [token for token in tokens if token not in found and _can_be_stored(token)]
        return {**found, **await self._find(unknown)} if unknown else found


def _can_be_stored(token: str) -> bool:
    try:
        return "\0" not in token and bool(token.encode())
    except UnicodeEncodeError:
        return False


# --- the two queues


class TurnWant(NamedTuple):
    """Calls with equal values are served together."""

    lock_timeout_ms: int
    filter: OrchestrationFilter | None
    owner: str | None


class WorkWant(NamedTuple):
    """Calls with equal values are served together."""

    lock_timeout_ms: int
    session: SessionFetch | None
    tags: TagFilter
    activities: frozenset[str] | None


class _Fetcher(Generic[_WantT, _ItemT]):
    """Fetches from one queue, and remembers the tokens of fetches that were never answered."""

    _operation: ClassVar[str]
    _template: ClassVar[LiteralString]
    _at_once_max: ClassVar[int]

    def __init__(
        self,
        store: PostgresStore,
        tokens: TokenCache,
        give_back: Callable[[_ItemT], Awaitable[None]],
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._unanswered: dict[_WantT, list[str]] = {}
        self.coalescer: FetchCoalescer[_WantT, _ItemT] = FetchCoalescer(
            self._fetch, give_back, lambda: store.poll_seconds, self._at_once_max
        )

    async def _fetch(self, want: _WantT, number: int) -> FetchResult[_ItemT]:
        raise NotImplementedError

    async def _send(self, want: _WantT, number: int, *arguments: Any) -> list[Row]:
        tokens = self._unanswered.pop(want, None)
        was_sent = tokens is not None
        tokens = tokens or [self._store.new_lock_token() for _ in range(number)]
        sent_at = time.monotonic()
        try:
            found = await self._store.pool.run(
                self._operation,
                self._store.statements(self._template),
                lambda again: (tokens, again, *arguments),
                was_sent=was_sent,
                # The items are locked already. One that is damaged is handed out, and blocks its
                # instance; the others run.
                escapes=True,
            )
        except ProviderError as error:
            if was_sent or error.retryable:
                self._unanswered[want] = tokens
            raise
        self._store.clock.note(found[0][-2], sent_at)
        return found


class TurnFetcher(_Fetcher[TurnWant, "FetchedOrchestration"]):
    """Fetches turns from the orchestrator queue."""

    _operation = "fetch_orchestration_item"
    _template = statements.FETCH_TURNS
    _at_once_max = 64

    def __init__(
        self,
        store: PostgresStore,
        tokens: TokenCache,
        give_back: Callable[[FetchedOrchestration], Awaitable[None]],
        orphan_grace_ms: int,
    ) -> None:
        super().__init__(store, tokens, give_back)
        self._orphan_grace_ms = orphan_grace_ms

    async def _fetch(self, want: TurnWant, number: int) -> FetchResult[FetchedOrchestration]:
        arguments = (
            want.lock_timeout_ms,
            want.owner,
            records.routes_of(want.filter),
            records.ranges_of(want.filter),
            self._orphan_grace_ms,
        )
        try:
            found = await self._send(want, number, *arguments, True)
            fetched = [records.fetched_turn(row) for row in found if row[0] is not None]
        except CorruptData:
            # The server cannot read one history, and has locked nothing. Read each by itself, so
            # that the other turns run.
            found = await self._send(want, number, *arguments, False)
            fetched = [await self._with_history(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.item.instance_id)
        return FetchResult(fetched, _due_seconds(found))

    async def _with_history(self, row: Row) -> FetchedOrchestration:
        instance_id, continues, execution_id = row[0], row[2], row[6]
        if continues:
            return records.fetched_turn(row)
        try:
            found = await self._store.ask(
                self._operation, statements.READ_HISTORY, (instance_id, execution_id, 0, None)
            )
        except CorruptData as error:
            return records.fetched_turn(row, history_error=str(error.__cause__))
        events = [event_id for event_id, _ in found], [data for _, data in found]
        return records.fetched_turn((*row[:10], *events, *row[12:]))


class WorkFetcher(_Fetcher[WorkWant, "FetchedWork"]):
    """Fetches items from the worker queue."""

    _operation = "fetch_work_item"
    _template = statements.FETCH_WORK
    _at_once_max = 500

    async def _fetch(self, want: WorkWant, number: int) -> FetchResult[FetchedWork]:
        names = None if want.activities is None else sorted(want.activities)
        suffixes = records.suffixes_of(want.tags)
        session = want.session
        found = await self._send(
            want,
            number,
            want.lock_timeout_ms,
            records.work_routes(names, suffixes),
            names,
            suffixes,
            None if session is None else session.owner_id,
            None if session is None else session.lock_timeout_ms,
            session is not None and session.only_owned,
        )
        fetched = [records.fetched_work(row) for row in found if row[0] is not None]
        for each in fetched:
            self._tokens.note(each.lock_token, each.identity.instance_id)
        return FetchResult(fetched, _due_seconds(found))


def _due_seconds(found: list[Row]) -> float | None:
    """Read the last two columns: the time now, and the time at which an item falls due."""
    now_ms, due_ms = found[0][-2:]
    return None if due_ms is None else (due_ms - now_ms) / 1000
