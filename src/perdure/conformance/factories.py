"""Records and steps with defaults, so that a check only says what it is about.

Builders make one record; the ``async`` steps below them drive a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    ExecutionMetadata,
    FetchedOrchestration,
    FetchedWork,
    HistoryRecord,
    OrchestrationFilter,
    OrchestratorMessage,
    SessionFetch,
    StartRouting,
    TagFilter,
    TimerIdentity,
    TurnCommit,
    Version,
    WorkerMessage,
)

if TYPE_CHECKING:
    from perdure.conformance.harness import Store
    from perdure.providers.contract import Provider

NAME = "TestOrch"
VERSION = "1.0.0"
LOCK_MS = 5_000
OWNER = "owner-1"


# --- history records


def started(
    instance: str,
    execution: int = 1,
    *,
    event_id: int = 1,
    name: str = NAME,
    version: str = VERSION,
    parent: str | None = None,
) -> HistoryRecord:
    """OrchestrationStarted."""
    return record(
        events.OrchestrationStarted(
            event_id=event_id,
            instance_id=instance,
            execution_id=execution,
            timestamp_ms=0,
            turn=1,
            name=name,
            version=version,
            framework_version="0.1.0",
            seed="seed",
            parent_instance_id=parent,
        )
    )


def event(
    instance: str, event_id: int, execution: int = 1, *, data: object = None, name: str = "event"
) -> HistoryRecord:
    """An event whose ``data`` tells it apart."""
    return record(
        events.ExternalEvent(
            event_id=event_id,
            instance_id=instance,
            execution_id=execution,
            timestamp_ms=0,
            turn=1,
            name=name,
            data=raw(data),
        )
    )


def record(value: events.Event) -> HistoryRecord:
    return wire.record_of(value)


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


# --- messages for the orchestrator queue


def start(
    instance: str, name: str = NAME, version: str | None = VERSION, parent: str | None = None
) -> OrchestratorMessage:
    link = None
    if parent is not None:
        link = work.ParentLink(instance_id=parent, execution_id=1, event_id=2)
    item = work.StartOrchestration(instance_id=instance, name=name, version=version, parent=link)
    routing = StartRouting(name=name, version=version, parent_instance_id=parent)
    return message(item, start=routing)


def continue_as_new(
    instance: str, execution: int, name: str = NAME, version: str | None = VERSION
) -> OrchestratorMessage:
    """Starts ``execution`` of an existing instance."""
    item = work.ContinueAsNew(
        instance_id=instance, name=name, execution_id=execution, version=version
    )
    return message(item, start=StartRouting(name=name, version=version))


def completion(
    instance: str, execution: int = 1, activity_id: int = 2, result: object = None
) -> OrchestratorMessage:
    return message(
        work.ActivityCompleted(
            instance_id=instance,
            execution_id=execution,
            activity_id=activity_id,
            result=raw(result),
        )
    )


def timer(
    instance: str, fire_at_ms: int, execution: int = 1, timer_id: int = 2
) -> OrchestratorMessage:
    item = work.TimerFired(
        instance_id=instance, execution_id=execution, timer_id=timer_id, fire_at_ms=fire_at_ms
    )
    identity = TimerIdentity(execution_id=execution, timer_id=timer_id)
    return message(item, visible_at_ms=fire_at_ms, timer=identity)


def raised(instance: str, name: str = "event", data: object = None) -> OrchestratorMessage:
    return message(work.ExternalRaised(instance_id=instance, name=name, data=raw(data)))


def mailbox(instance: str, name: str = "queue", data: object = None) -> OrchestratorMessage:
    return message(work.QueueMessage(instance_id=instance, name=name, data=raw(data)))


def cancel(instance: str, reason: str = "") -> OrchestratorMessage:
    return message(work.CancelInstance(instance_id=instance, reason=reason))


def message(item: work.OrchestratorItem, **routing: Any) -> OrchestratorMessage:
    return OrchestratorMessage(
        instance_id=item.instance_id, kind=type(item).__name__, body=wire.encode(item), **routing
    )


# --- messages for the worker queue


def activity(
    instance: str,
    execution: int = 1,
    activity_id: int = 2,
    *,
    name: str = "act",
    tag: str | None = None,
    session: str | None = None,
    input: object = None,  # noqa: A002
    visible_at_ms: int | None = None,
    claim: Claim | None = None,
) -> WorkerMessage:
    item = work.ActivityExecute(
        instance_id=instance,
        execution_id=execution,
        activity_id=activity_id,
        name=name,
        input=raw(input),
        session_id=session,
        tag=tag,
    )
    return WorkerMessage(
        identity=identity(instance, execution, activity_id),
        name=name,
        body=wire.encode(item),
        session_id=session,
        tag=tag,
        visible_at_ms=visible_at_ms,
        claim=claim,
    )


def identity(instance: str, execution: int = 1, activity_id: int = 2) -> ActivityIdentity:
    return ActivityIdentity(instance_id=instance, execution_id=execution, activity_id=activity_id)


# --- reading what came out


def bodies(fetched: FetchedOrchestration) -> list[str]:
    return [delivery.body for delivery in fetched.item.messages]


# --- steps


async def enqueue(store: Store, *messages: OrchestratorMessage) -> None:
    for each in messages:
        await store.provider.enqueue_for_orchestrator(each)


async def enqueue_work(store: Store, *messages: WorkerMessage) -> None:
    for each in messages:
        await store.provider.enqueue_for_worker(each)


async def fetch(
    store: Store,
    *,
    lock_ms: int = LOCK_MS,
    poll_ms: int = 0,
    filter: OrchestrationFilter | None = None,  # noqa: A002
    owner: str | None = None,
    provider: Provider | None = None,
) -> FetchedOrchestration | None:
    """Fetch through the writing handle, or through the one given."""
    return await (provider or store.provider).fetch_orchestration_item(
        lock_ms, poll_ms, filter, owner
    )


async def take(store: Store, instance: str | None = None, **options: Any) -> FetchedOrchestration:
    """Fetch something: of that instance, if one is named."""
    fetched = await fetch(store, **options)
    assert fetched is not None, "nothing was fetched"
    assert instance in {None, fetched.item.instance_id}
    return fetched


async def fetch_work(
    store: Store,
    *,
    lock_ms: int = LOCK_MS,
    poll_ms: int = 0,
    session: SessionFetch | None = None,
    tags: TagFilter | None = None,
    activities: frozenset[str] | None = None,
    provider: Provider | None = None,
) -> FetchedWork | None:
    """Fetch through the writing handle, or through the one given."""
    return await (provider or store.provider).fetch_work_item(
        lock_ms, poll_ms, session, tags, activities
    )


async def take_work(store: Store, **options: Any) -> FetchedWork:
    fetched = await fetch_work(store, **options)
    assert fetched is not None, "no work item was fetched"
    return fetched


async def create(
    store: Store,
    instance: str,
    *,
    name: str = NAME,
    version: str = VERSION,
    parent: str | None = None,
    framework_version: Version | None = None,
    **fields: Any,
) -> None:
    """Enqueue its start, fetch it and commit a first turn; ``fields`` go to the commit."""
    await enqueue(store, start(instance, name, version, parent))
    metadata = ExecutionMetadata(
        name=name,
        version=version,
        parent_instance_id=parent,
        framework_version=framework_version,
    )
    fields.setdefault("metadata", metadata)
    delta = (started(instance, name=name, version=version, parent=parent),)
    await turn(
        store, instance, poke=False, history_delta=delta + fields.pop("history_delta", ()), **fields
    )


async def turn(
    store: Store,
    instance: str,
    *,
    execution: int | None = None,
    poke: bool = True,
    owner: str | None = None,
    **fields: Any,
) -> FetchedOrchestration:
    """Fetch the instance and ack with a commit of these fields; ``poke`` gives it a message first.

    Without ``execution`` the commit is for the execution that was fetched.
    """
    if poke:
        await enqueue(store, raised(instance, "poke"))
    fetched = await _take_past_others(store, instance, owner)
    commit = TurnCommit(
        execution_id=fetched.item.execution_id if execution is None else execution, **fields
    )
    await store.provider.ack_orchestration_item(fetched.lock_token, commit)
    return fetched


async def finish(
    store: Store,
    instance: str,
    status: Status = Status.COMPLETED,
    output: str | None = '"done"',
    **fields: Any,
) -> FetchedOrchestration:
    """A turn that ends the current execution."""
    return await turn(
        store, instance, metadata=ExecutionMetadata(status=status, output=output), **fields
    )


async def next_execution(
    store: Store,
    instance: str,
    execution: int,
    *,
    name: str = NAME,
    version: str = VERSION,
    framework_version: Version | None = None,
    **fields: Any,
) -> FetchedOrchestration:
    """End the current execution with continue-as-new and commit the first turn of ``execution``."""
    await finish(
        store,
        instance,
        Status.CONTINUED_AS_NEW,
        orchestrator_items=(continue_as_new(instance, execution, name, version),),
    )
    metadata = ExecutionMetadata(name=name, version=version, framework_version=framework_version)
    delta = (started(instance, execution, name=name, version=version),)
    return await turn(
        store,
        instance,
        execution=execution,
        poke=False,
        metadata=metadata,
        history_delta=delta + fields.pop("history_delta", ()),
        **fields,
    )


async def _take_past_others(store: Store, instance: str, owner: str | None) -> FetchedOrchestration:
    others: list[FetchedOrchestration] = []
    try:
        while True:
            fetched = await fetch(store, owner=owner)
            assert fetched is not None, f"{instance!r} could not be fetched"
            if fetched.item.instance_id == instance:
                return fetched
            others.append(fetched)
    finally:
        for other in others:
            await store.provider.abandon_orchestration_item(other.lock_token, ignore_attempt=True)
