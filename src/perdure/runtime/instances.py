"""The instances of a runtime: how one is read from the store, kept live, and released.

``Intake`` decides what a fetched instance needs, ``LiveCache`` keeps those that run, and
``LockReleaser`` gives them back to the store.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from perdure.engine.execution import Execution
from perdure.errors import (
    CorruptData,
    LockLost,
    Nondeterminism,
    NotFound,
    NotRegistered,
    PayloadError,
)
from perdure.model import events, wire, work
from perdure.model.failures import Block, BlockReason, Mismatch, bounded_text, describe_exception
from perdure.model.wire import end_notices
from perdure.model.work import started_by
from perdure.providers.records import ExecutionMetadata, OrchestratorMessage, TurnCommit
from perdure.providers.sealing import Sealing
from perdure.runtime.commit_builder import ending_of, replies_to
from perdure.runtime.metrics import Code, log
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from perdure.authoring.definitions import Orchestration
    from perdure.client.endings import Ending, Finished
    from perdure.providers.records import FetchedOrchestration, OrchestrationItem
    from perdure.runtime.worker import BackgroundTasks, Worker

_EVICTION_CANDIDATES = 16
"""Of a full cache, only this many of the least recently used are checked for being idle."""
_REMEMBERED_MAX = 256
_NEXT_EXECUTION_MS = 500
"""Delay before an instance between two executions is fetched again. Long enough for a damaged one,
whose next execution never begins."""
_BLOCKED_MS = {
    BlockReason.POISON: 365 * 86_400_000,  # only other code or an operator can continue it
    BlockReason.NONDETERMINISM: 60_000,
    BlockReason.UNKNOWN_HANDLER: 5_000,
    BlockReason.UNDECODABLE: 60_000,
    BlockReason.LIMIT: 60_000,
}
"""The time until a Blocked instance is tried again."""
_COUNTED_REASONS = frozenset({BlockReason.POISON, BlockReason.LIMIT})
"""Tries after these count as attempts: code that never returns holds up the whole worker, so it
must not be tried for ever. For the other reasons, reaching the limit would only hide the reason."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A work item for the next turn, and the row of the store that the turn's commit deletes."""

    item: work.OrchestratorItem
    message_id: int | None = None
    """Set if it came through the orchestrator queue."""
    work_token: str | None = None
    """Set if it is the completion of an activity that ran here: the lock of its work item."""


def arrivals_of(item: OrchestrationItem) -> list[Arrival]:
    """Decode the messages of a fetched item, or raise CorruptData.

    A message in the queue of one instance may not speak for another one.
    """
    arrivals = [
        Arrival(wire.decode_item(delivery.body), delivery.message_id) for delivery in item.messages
    ]
    for arrival in arrivals:
        _check_owner(arrival.item.instance_id, item.instance_id, "a message")
    return arrivals


def _check_owner(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise CorruptData("read", f"{what} of {expected!r} names the instance {found!r} inside")


# --- reading a fetched instance


class Runnable(msgspec.Struct, frozen=True, kw_only=True):
    """There is a turn to run."""

    execution: Execution
    arrivals: list[Arrival]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The instance has ended, so its messages came too late."""

    execution_id: int
    message_ids: list[int]
    replies: list[OrchestratorMessage]
    """Answers to starts that came for an id in use, and to watchers."""
    unread: list[str]
    """Names of the events and queue messages from outside among them."""


IntakeResult: TypeAlias = Runnable | Ended | Block
"""A Block means that the instance cannot continue with this code. Its history is kept."""


class Intake:
    """Reads fetched items with the handlers and the codec of one runtime.

    It finds the code, and handles duplicate starts and late messages. It is pure apart from the
    random seed of a new execution.
    """

    def __init__(self, worker: Worker) -> None:
        self._registry = worker.registry
        self._codec = worker.codec
        self._max_attempts = worker.options.max_attempts

    def read(self, fetched: FetchedOrchestration, now_ms: int) -> IntakeResult:
        """Return the turn to run, the late messages of an ended instance, or why it is Blocked."""
        item = fetched.item
        if fetched.attempt_count > self._max_attempts:
            return self.block(
                item,
                BlockReason.POISON,
                f"delivered {fetched.attempt_count} times without a committed turn",
                "\n".join(delivery.body for delivery in item.messages)[:10_000],
            )
        try:
            if item.history_error is not None:
                raise CorruptData("read_history", item.history_error)
            history = wire.decode_history(item.history)
            if history:
                _check_owner(history[0].instance_id, item.instance_id, "the history")
            arrivals = arrivals_of(item)
        except CorruptData as error:
            return self.block(item, BlockReason.UNDECODABLE, error.message)
        try:
            return self._decide(item, history, arrivals, now_ms)
        except NotRegistered as error:
            return self.block(item, BlockReason.UNKNOWN_HANDLER, str(error))
        except Nondeterminism as error:
            return self.block(item, BlockReason.NONDETERMINISM, str(error), error.mismatch or "")
        except (CorruptData, PayloadError) as error:
            return self.block(item, BlockReason.UNDECODABLE, str(error))

    def _decide(
        self,
        item: OrchestrationItem,
        history: Sequence[events.Event],
        arrivals: list[Arrival],
        now_ms: int,
    ) -> Runnable | Ended:
        has_ended = bool(history) and isinstance(history[-1], events.Terminal)
        kv = {key: entry.value for key, entry in item.kv_snapshot.items()}
        if history and not has_ended:
            execution = self._replay(history, kv)
            return Runnable(execution=execution, arrivals=arrivals)
        start = _next_start(arrivals, item.execution_id + 1 if has_ended else None)
        if start is not None:
            execution = self.begin(start, kv=kv, now_ms=now_ms)
            return Runnable(execution=execution, arrivals=arrivals)
        return Ended(
            execution_id=item.execution_id,
            message_ids=[arrival.message_id for arrival in arrivals if arrival.message_id],
            replies=[
                *replies_to([arrival.item for arrival in arrivals], None),
                *_late_notices(history, [arrival.item for arrival in arrivals]),
            ],
            unread=[
                arrival.item.name
                for arrival in arrivals
                if isinstance(arrival.item, (work.ExternalRaised, work.QueueMessage))
                and not arrival.item.name.startswith("perdure.")  # a second answer of a promise
            ],
        )

    def _replay(self, history: Sequence[events.Event], kv: Mapping[str, str]) -> Execution:
        started = history[0]
        if not isinstance(started, events.OrchestrationStarted):
            raise CorruptData("replay", f"history begins with {type(started).__name__}")
        handler = self._registry.resolve_orchestration(started.name, started.version)
        return Execution.replay(handler, history, kv=kv, codec=self._codec)

    def begin(
        self,
        first: work.StartOrchestration | work.ContinueAsNew,
        *,
        kv: Mapping[str, str],
        now_ms: int,
    ) -> Execution:
        """Return a new execution, before its first turn."""
        handler = self._registry.resolve_orchestration(first.name, first.version)
        started = started_by(
            first, version=handler.version, framework_version=VERSION, now_ms=now_ms, state=kv
        )
        return Execution.begin(
            handler,
            started,
            codec=self._codec,
            carried=first.carried,
            watchers=first.watchers if isinstance(first, work.ContinueAsNew) else (),
        )

    def block(
        self,
        code: OrchestrationItem | Orchestration[Any, Any],
        reason: BlockReason,
        message: str,
        detail: str | Mismatch = "",
    ) -> Block:
        """Return a block that names the code of this worker, so that other code tries again."""
        fingerprint = self.fingerprint(code.name, code.version)
        return Block(
            reason=reason,
            message=bounded_text(message),
            detail=bounded_text(detail) if isinstance(detail, str) else detail,
            code=fingerprint,
        )

    def fingerprint(self, name: str, version: str | None) -> str:
        """Return the identity of an instance's code and codec; empty if the code is missing."""
        try:
            code = self._registry.resolve_orchestration(name, version).fingerprint
        except NotRegistered:
            return ""
        return "+".join((code, *self._codec.names))


def _late_notices(
    history: Sequence[events.Event], items: Sequence[work.OrchestratorItem]
) -> list[OrchestratorMessage]:
    """Return the notices for watchers that came when the instance had ended."""
    watchers = [item.watcher for item in items if isinstance(item, work.WatchEnd)]
    ending = ending_of(history[-1]) if watchers and history else None
    if ending is None or not ending[0].is_final:
        return []
    return end_notices(watchers, history[0].instance_id, *ending)


def _next_start(
    arrivals: Sequence[Arrival], execution_id: int | None
) -> work.StartOrchestration | work.ContinueAsNew | None:
    """Return the message that begins the execution: a start, or after an end its continuation."""
    for arrival in arrivals:
        item = arrival.item
        if isinstance(item, work.ContinueAsNew):
            if execution_id is None or item.execution_id == execution_id:
                return item
        elif isinstance(item, work.StartOrchestration) and execution_id is None:
            return item
    return None


# --- live instances


def _new_future() -> Finished:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class LiveInstance:
    """An instance whose lock this runtime holds. At most one turn is under way at any time."""

    lock_token: str
    execution: Execution
    start: OrchestratorMessage | None = None
    """The start message, until the first commit has created the instance in the store."""
    ended: Finished = field(default_factory=_new_future)
    """The committed end; None if the instance leaves this runtime before it ends."""
    instance_id: str = field(init=False)
    inbox: deque[Arrival] = field(init=False)
    mail: list[Arrival] = field(init=False)
    """Mail that the code does not want yet. The lock carries it in the store."""
    busy: bool = True
    """A turn is due or was run, and its commit is not answered yet. An instance is made live only
    for a turn that runs at once. If it is not busy, its inbox is empty."""
    used_at_ms: int = 0
    history_bytes: int = 0
    """The length of the history as JSON texts."""
    sent_in_turn: int = 0
    """The turn after which the client of this process has sent a message."""
    counted_events: int = 0
    """The number of events that the cache counts for it."""

    def __post_init__(self) -> None:
        self.instance_id = self.execution.instance_id
        self.inbox = deque()
        self.mail = []

    def close(self, ending: Ending | None = None) -> None:
        """Drop the coroutine and resolve ``ended``."""
        self.execution.close()
        if not self.ended.done():
            self.ended.set_result(ending)


class LiveCache:
    """The live instances of a runtime, least recently used first, bounded by count and memory."""

    def __init__(
        self,
        instances_max: int,
        events_max: int,
        enqueue_completion: Callable[[str], None],
    ) -> None:
        self._instances_max = instances_max
        self._events_max = events_max
        self._enqueue_completion = enqueue_completion
        """Sends the completion of an activity that ran here through the orchestrator queue."""
        self._live: OrderedDict[str, LiveInstance] = OrderedDict()
        self._events = 0
        self._room_freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._live

    def __iter__(self) -> Iterator[LiveInstance]:
        """Iterate over a copy: instances may leave meanwhile. Safe from another thread."""
        return iter(list(self._live.values()))

    def get(self, instance_id: str) -> LiveInstance | None:
        return self._live.get(instance_id)

    @property
    def room(self) -> int:
        """The number of instances that fit without evicting one."""
        if self._events >= self._events_max:
            return 0
        return max(0, self._instances_max - len(self._live))

    async def wait_for_room(self) -> None:
        """Wait until an instance leaves, or ``wake`` is called."""
        self._room_freed.clear()
        await self._room_freed.wait()

    def wake(self) -> None:
        self._room_freed.set()

    def add(self, live: LiveInstance) -> None:
        """Add an instance. It replaces an entry that has lost its lock without knowing it yet."""
        stale = self._live.get(live.instance_id)
        if stale is not None:
            self._remove(stale)
        self._live[live.instance_id] = live
        live.counted_events = live.execution.event_count
        self._events += live.counted_events

    def used(self, live: LiveInstance, now_ms: int, events: int) -> None:
        """Note that an instance had a turn, which added this many events to its history."""
        live.used_at_ms = now_ms
        if self._live.get(live.instance_id) is live:
            self._live.move_to_end(live.instance_id)
            live.counted_events += events
            self._events += events

    def forget(self, live: LiveInstance, ending: Ending | None = None) -> None:
        """Drop an instance that has ended, or whose lock is lost or about to be released.

        The completions in its inbox go through the queue, since no turn here will consume them.
        """
        self._remove(live)
        live.close(ending)
        for arrival in live.inbox:
            if arrival.work_token is not None:
                self._enqueue_completion(arrival.work_token)
        live.inbox.clear()

    def _remove(self, live: LiveInstance) -> None:
        if self._live.get(live.instance_id) is live:
            del self._live[live.instance_id]
            self._events -= live.counted_events
            self._room_freed.set()

    def oldest_idle(self) -> LiveInstance | None:
        oldest = islice(self._live.values(), _EVICTION_CANDIDATES)
        return next((live for live in oldest if not live.busy), None)

    def idle_since(self, before_ms: int) -> list[LiveInstance]:
        """Return the idle instances whose last turn is at least that old."""
        found: list[LiveInstance] = []
        for live in self._live.values():
            if live.used_at_ms > before_ms:
                break  # the rest was used later
            if not live.busy:
                found.append(live)
        return found


# --- release


class LockReleaser:
    """Releases instance locks in the background: as they are, Blocked, or without late messages.

    When a release fails, the lock expires instead.
    """

    def __init__(self, worker: Worker, background: BackgroundTasks) -> None:
        self._provider = worker.provider
        self._codec = worker.codec
        self._clock = worker.clock
        self._observer = worker.observer
        self._background = background
        self._errors: dict[str, str] = {}
        """The last error of instances whose turn failed here."""
        self._remembered: dict[str, Block] = {}

    def release(self, lock_token: str) -> None:
        """Release an instance without a fault: the next fetch does not count as a retry."""
        self._abandon(lock_token, ignore_attempt=True)

    def return_mail(self, live: LiveInstance) -> None:
        """Release an instance that does not want the mail it was given."""
        commit = TurnCommit(
            execution_id=live.execution.execution_id,
            consumed=(),
            returned=tuple([arrival.message_id for arrival in live.mail if arrival.message_id]),
            after_event_id=live.execution.event_count,
        )
        self._background.spawn_logged(
            self._provider.ack_orchestration_item(live.lock_token, commit)
        )

    def replay(self, lock_token: str) -> None:
        """Release an instance whose turn the store refused, in case its lock is still held.

        It was ahead of the store. Its next fetch replays the stored history.
        """
        self._abandon(lock_token)

    def fail(self, instance_id: str, lock_token: str, error: BaseException) -> None:
        """Release an instance after an unexpected error of a turn or of its commit."""
        _make_room(self._errors)
        self._errors[instance_id] = str(describe_exception(error))
        self._abandon(lock_token, delay_ms=1000)

    def block(self, code: Code, instance_id: str, lock_token: str, block: Block) -> None:
        """Release an instance as Blocked: it cannot continue with the code of this worker."""
        error = self._errors.pop(instance_id, None)
        if error is not None and block.reason is BlockReason.POISON:
            message = f"{block.message}; the last time here: {error}"
            block = msgspec.structs.replace(block, message=message)
        self._observer.blocked(code, instance_id, block)
        self._background.spawn_logged(self._block(instance_id, lock_token, block))

    async def _block(self, instance_id: str, lock_token: str, block: Block) -> None:
        stored = msgspec.structs.replace(block, since_ms=self._clock.now_ms())
        if self._codec.transform_names:
            stored = Sealing(self._codec).block(stored, instance_id)
        try:
            await self._provider.abandon_orchestration_item(
                lock_token,
                _BLOCKED_MS[block.reason],
                ignore_attempt=block.reason not in _COUNTED_REASONS,
                block=stored,
            )
        except LockLost:
            if block.reason is BlockReason.LIMIT:
                # The turn that ran too long also kept the event loop from renewing its lock.
                self.remember_block(instance_id, block)
            raise

    def remember_block(self, instance_id: str, block: Block) -> None:
        """Block an instance at its next fetch: running it again would hold up the worker again."""
        _make_room(self._remembered)
        self._remembered[instance_id] = block

    def block_remembered(self, fetched: FetchedOrchestration) -> bool:
        """Block a fetched instance if ``remember_block`` was called for it; return True if so."""
        block = self._remembered.pop(fetched.item.instance_id, None)
        if block is not None:
            self.block(fetched.item, fetched.item.instance_id, fetched.lock_token, block)
        return block is not None

    def consume_late_messages(self, fetched: FetchedOrchestration, ended: Ended) -> None:
        """Delete the messages of an instance that has ended, and release it."""
        self._background.spawn_logged(self._consume_late_messages(fetched, ended))

    async def _consume_late_messages(self, fetched: FetchedOrchestration, ended: Ended) -> None:
        instance_id = fetched.item.instance_id
        if await self._has_next_execution(instance_id):
            # The next execution will read them. Its start is not visible yet: the clock was set
            # back, or the fetch read the clock before the start was written.
            await self._provider.abandon_orchestration_item(
                fetched.lock_token, _NEXT_EXECUTION_MS, ignore_attempt=True
            )
            return
        if ended.unread:
            names = ", ".join(sorted(set(ended.unread)))
            log.warning(
                "%r has ended without reading %d of %s", instance_id, len(ended.unread), names
            )
        else:  # a completion, timer or cancellation that crossed the end: that is usual
            log.debug("%r has ended before %d messages", instance_id, len(ended.message_ids))
        commit = TurnCommit(
            execution_id=ended.execution_id,
            orchestrator_items=tuple(ended.replies),
            consumed=tuple(ended.message_ids),
            metadata=ExecutionMetadata(),
        )
        await self._provider.ack_orchestration_item(fetched.lock_token, commit)

    async def _has_next_execution(self, instance_id: str) -> bool:
        """Return True if the instance is alive although its last execution has ended.

        Called while the instance is locked.
        """
        if not self._provider.capabilities.admin:
            return False
        admin = self._provider.admin
        try:
            return not (await admin.get_instance_info(instance_id)).status.is_final
        except NotFound:
            return False

    def _abandon(
        self, lock_token: str, *, delay_ms: int | None = None, ignore_attempt: bool = False
    ) -> None:
        self._background.spawn_logged(
            self._provider.abandon_orchestration_item(
                lock_token, delay_ms, ignore_attempt=ignore_attempt
            )
        )


def _make_room(remembered: dict[str, Any]) -> None:
    if len(remembered) >= _REMEMBERED_MAX:
        del remembered[next(iter(remembered))]
