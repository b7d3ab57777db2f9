"""Check every instance of a store for damage: undecodable data, gaps and missing ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import NotFound, PerdureError
from perdure.limits import PAGE_ITEMS_MAX
from perdure.model import events, wire
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo

_QUEUE_LIMIT = 100_000
_ENDS: dict[Status, type[events.Terminal]] = {
    Status.COMPLETED: events.OrchestrationCompleted,
    Status.FAILED: events.OrchestrationFailed,
    Status.CANCELLED: events.OrchestrationCancelled,
    Status.TERMINATED: events.OrchestrationTerminated,
}


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    message: str


async def check_instances(provider: Provider, admin: ProviderAdmin) -> AsyncIterator[Damage | None]:
    """Yield the damages of each instance, then one None for the instance."""
    cursor: str | None = None
    while True:
        page = await admin.list_instances(None, cursor=cursor, limit=PAGE_ITEMS_MAX)
        for info in page.instances:
            try:
                messages = await _damages(provider, admin, info)
            except NotFound:
                continue  # deleted since the page was read
            for message in messages:
                yield Damage(instance_id=info.instance_id, message=message)
            yield None
        if (cursor := page.next_cursor) is None:
            return


async def _damages(provider: Provider, admin: ProviderAdmin, info: InstanceInfo) -> list[str]:
    found: list[str] = []
    missing: list[str] = []
    executions = await admin.list_executions(info.instance_id)
    for execution_id in executions:
        try:
            records = await provider.read_with_execution(info.instance_id, execution_id)
            history = wire.decode_history(record.data for record in records)
        except PerdureError as error:
            found.append(f"execution {execution_id}: {error}")
            continue
        found += [f"execution {execution_id}: {text}" for text in _gaps(info.instance_id, history)]
        missing += _missing_end(info, execution_id, history)
    has_start = False
    for queued in await admin.list_messages(info.instance_id, limit=_QUEUE_LIMIT):
        has_start |= queued.message.start is not None
        try:
            wire.decode_item(queued.message.body)
        except PerdureError as error:
            found.append(f"message {queued.message_id}: {error}")
    for item in await admin.list_work(info.instance_id, limit=_QUEUE_LIMIT):
        try:
            wire.decode_activity(item.message.body)
        except PerdureError as error:
            found.append(f"work item {item.message_id}: {error}")
    if info.execution_id not in executions and (executions or not has_start):
        missing.append(f"execution {info.execution_id}, its current one, is missing")
    # The reads are not one snapshot. An instance that ran meanwhile has no missing data.
    if missing and await admin.get_instance_info(info.instance_id) == info:
        found += missing
    return found


def _missing_end(info: InstanceInfo, execution_id: int, history: list[events.Event]) -> list[str]:
    """Report an execution whose status is final and whose history has no end event."""
    if not history or execution_id > info.execution_id:
        return []
    expected: type[events.Envelope] | tuple[type[events.Envelope], ...] = events.TERMINAL_KINDS
    status = Status.CONTINUED_AS_NEW
    if execution_id == info.execution_id:
        status = info.status
        expected = _ENDS.get(status, expected)
    if not status.ends_execution or isinstance(history[-1], expected):
        return []
    return [f"execution {execution_id}: {status}, but it ends with {type(history[-1]).__name__}"]


def _gaps(instance_id: str, history: list[events.Event]) -> list[str]:
    """Report faults in a history that would block its instance."""
    if not history:
        return ["no events"]
    found: list[str] = []
    if not isinstance(history[0], events.OrchestrationStarted):
        found.append(f"begins with {type(history[0]).__name__}")
    for place, event in enumerate(history, 1):
        if event.event_id != place:
            found.append(f"event {event.event_id} stands at place {place}")
            break
    found += [
        f"event {event.event_id} belongs to {event.instance_id!r}"
        for event in history
        if event.instance_id != instance_id
    ][:1]
    return found
