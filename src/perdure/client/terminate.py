"""End an instance for an operator, without running its code. The operator takes its lock."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from perdure.errors import CorruptData, InstanceFinished, LockLost
from perdure.model import events, wire, work
from perdure.model.failures import Category, Failure
from perdure.model.status import Status
from perdure.model.wire import end_notices, envelope
from perdure.model.work import parent_link, started_by
from perdure.providers.records import (
    ExecutionMetadata,
    OrchestratorMessage,
    TurnCommit,
)
from perdure.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence

    from perdure.clock import Clock
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import OrchestrationItem, QueuedMessage

_LOCK_MS = 10_000
_TRIES = 5
_OTHER_OPERATOR_MS = 500
QUEUED_MAX = 100_000
"""Limit of a read that is to return all messages, or all work items, of an instance."""

_Ended: TypeAlias = events.OrchestrationTerminated | events.OrchestrationCancelled
_Start = TypeVar("_Start", work.StartOrchestration, work.ContinueAsNew)

_under_way: set[asyncio.Task[None]] = set()


class _HasBegun(Exception):
    """Raised if the instance has begun: then its code must see the request and may clean up."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: Status
    category: Category
    events: tuple[type[events.OrchestrationCancelRequested | _Ended], ...]


_TERMINATED = _Verdict(Status.TERMINATED, Category.TERMINATED, (events.OrchestrationTerminated,))
_CANCELLED = _Verdict(
    Status.CANCELLED,
    Category.CANCELLED,
    (events.OrchestrationCancelRequested, events.OrchestrationCancelled),
)


async def terminate(provider: Provider, instance_id: str, reason: str, clock: Clock) -> None:
    """Take the lock from its holder and commit the end. Works on corrupt histories."""
    await _run_to_end(_end_as(_TERMINATED, provider, instance_id, reason, clock))


async def cancel_delayed(provider: Provider, instance_id: str, reason: str, clock: Clock) -> bool:
    """Cancel an instance whose delayed start is still queued: none of its code runs.

    Return False if it may have begun, or has ended.
    """
    info = await provider.admin.get_instance_info(instance_id)
    if info.status not in {Status.PENDING, Status.PAUSED}:
        return False
    queued = await provider.admin.list_messages(instance_id, limit=QUEUED_MAX)
    starts = [each.visible_at_ms for each in queued if each.message.start is not None]
    if not starts or min(starts) <= clock.now_ms():
        return False
    try:
        await _run_to_end(_end_as(_CANCELLED, provider, instance_id, reason, clock))
    except _HasBegun:
        return False
    return True


async def _run_to_end(ending: Coroutine[Any, Any, None]) -> None:
    """Run to the end even if the caller is cancelled: half done, it would leave a lock."""
    task = asyncio.ensure_future(ending)
    _under_way.add(task)
    task.add_done_callback(_note_end)
    await asyncio.shield(task)


def _note_end(task: asyncio.Task[None]) -> None:
    _under_way.discard(task)
    if not task.cancelled():
        task.exception()  # the caller got it from the shield


@asynccontextmanager
async def operator_lock(
    provider: Provider, instance_id: str
) -> AsyncGenerator[tuple[OrchestrationItem, str]]:
    """Take the lock from its holder, for one commit; yield the instance and the lock's token.

    If the commit fails, the lock is given back.
    """
    fetched = await provider.admin.lock_instance(instance_id, _LOCK_MS)
    try:
        yield fetched.item, fetched.lock_token
    except BaseException:
        with suppress(LockLost):
            await provider.abandon_orchestration_item(fetched.lock_token, ignore_attempt=True)
        raise


async def _end_as(
    verdict: _Verdict, provider: Provider, instance_id: str, reason: str, clock: Clock
) -> None:
    admin = provider.admin
    with provider.watch(instance_id) as watch:
        for tries_left in reversed(range(_TRIES)):
            info = await admin.get_instance_info(instance_id)
            if info.status.is_final:
                raise InstanceFinished(f"{instance_id!r} has ended already: {info.status}")
            try:
                async with operator_lock(provider, instance_id) as (item, token):
                    commit = await _final_commit(verdict, admin, item, reason, clock.now_ms())
                    await provider.ack_orchestration_item(token, commit)
            except LockLost:
                if not tries_left:
                    raise
            else:
                return
            # Another operator took the lock; wait for its commit before the next try.
            await watch.wait(_OTHER_OPERATOR_MS)


async def _final_commit(
    verdict: _Verdict, admin: ProviderAdmin, item: OrchestrationItem, reason: str, now_ms: int
) -> TurnCommit:
    failure = Failure(category=verdict.category, message=reason)
    queued_work = await admin.list_work(item.instance_id, limit=QUEUED_MAX)
    messages = await admin.list_messages(item.instance_id, limit=QUEUED_MAX)
    place = _place_to_end(item, messages, now_ms)
    if verdict is _CANCELLED and place.started is None:
        raise _HasBegun
    ending = [
        kind(
            event_id=event_id,
            instance_id=item.instance_id,
            execution_id=place.execution_id,
            timestamp_ms=now_ms,
            turn=place.last_turn + 1,
            reason=reason,
        )
        for event_id, kind in enumerate(verdict.events, place.last_event_id + 1)
    ]
    outgoing = await _cancelled_children(admin, item.instance_id, place.children)
    if place.parent is not None:
        outgoing.append(envelope(work.child_failed(place.parent, item.instance_id, failure)))
    output = msgspec.json.encode(failure).decode()
    outgoing += end_notices(place.watchers, item.instance_id, verdict.status, output)
    return TurnCommit(
        execution_id=place.execution_id,
        history_delta=tuple(
            wire.record_of(each) for each in (place.started, *ending) if each is not None
        ),
        orchestrator_items=tuple(outgoing),
        metadata=_metadata(place, verdict.status, output),
        cancelled_activities=tuple(queued.message.identity for queued in queued_work),
        cancelled_timers=tuple(
            queued.message.timer for queued in messages if queued.message.timer is not None
        ),
    )


def _metadata(place: _Place, status: Status, output: str) -> ExecutionMetadata:
    started = place.started
    if started is None:
        return ExecutionMetadata(status=status, output=output)
    return ExecutionMetadata(
        status=status,
        output=output,
        name=started.name,
        version=started.version or None,
        parent_instance_id=started.parent_instance_id,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """The execution that is to end, and where its history stands."""

    execution_id: int
    last_event_id: int
    last_turn: int
    parent: work.ParentLink | None
    children: frozenset[str] | None = None
    """Those that end with it. None: all, because the history cannot be read."""
    started: events.OrchestrationStarted | None = None
    """Its first event, if it has not begun: then it begins and ends at once."""
    watchers: tuple[events.Watcher, ...] = ()
    """Those who wait for its end."""


def _place_to_end(
    item: OrchestrationItem, messages: Sequence[QueuedMessage], now_ms: int
) -> _Place:
    """Return the latest execution, or the next one if its start is queued.

    Raises InstanceFinished if it has ended for good.
    """
    last_event_id = max((record.event_id for record in item.history), default=0)
    try:
        history = wire.decode_history(item.history)
    except CorruptData:
        return _Place(item.execution_id, last_event_id, 0, None)
    if not history:
        for start in _queued(messages, work.StartOrchestration):
            return _before_it_begins(start, start.version or "", now_ms, {})
    first = history[0] if history else None
    started = first if isinstance(first, events.OrchestrationStarted) else None
    if started is None or not isinstance(history[-1], events.Terminal):
        turn = max((event.turn for event in history), default=0)
        parent = None if started is None else parent_link(started)
        children = frozenset(
            event.child_instance_id
            for event in history
            if isinstance(event, events.SubOrchestrationScheduled)
            and event.on_parent_close != "abandon"
        )
        watchers = tuple(e.watcher for e in history if isinstance(e, events.WatcherAdded))
        return _Place(item.execution_id, last_event_id, turn, parent, children, watchers=watchers)
    for following in _queued(messages, work.ContinueAsNew):
        if following.execution_id == item.execution_id + 1:
            state = {key: entry.value for key, entry in item.kv_snapshot.items()}
            version = following.version or started.version
            return _before_it_begins(following, version, now_ms, state)
    ended = type(history[-1]).__name__.removeprefix("Orchestration")
    raise InstanceFinished(f"{item.instance_id!r} has ended already: {ended}")


def _queued(messages: Sequence[QueuedMessage], kind: type[_Start]) -> Iterator[_Start]:
    for queued in messages:
        if queued.message.kind == kind.__name__:
            item = wire.decode_item(queued.message.body)
            if isinstance(item, kind):
                yield item


def _before_it_begins(
    start: work.StartOrchestration | work.ContinueAsNew,
    version: str,
    now_ms: int,
    state: Mapping[str, str],
) -> _Place:
    begun = started_by(
        start, version=version, framework_version=VERSION, now_ms=now_ms, state=state
    )
    watchers = start.watchers if isinstance(start, work.ContinueAsNew) else ()
    return _Place(begun.execution_id, 1, 0, start.parent, frozenset(), begun, watchers)


async def _cancelled_children(
    admin: ProviderAdmin, instance_id: str, ending: frozenset[str] | None
) -> list[OrchestratorMessage]:
    outgoing: list[OrchestratorMessage] = []
    for child_id in await admin.list_children(instance_id):
        if ending is not None and child_id not in ending:
            continue  # it is to outlive its parent
        info = await admin.get_instance_info(child_id)
        if not info.status.is_final:
            cancel = work.CancelInstance(
                instance_id=child_id,
                reason="parent was terminated",
                parent_instance_id=instance_id,
            )
            outgoing.append(envelope(cancel))
    return outgoing
