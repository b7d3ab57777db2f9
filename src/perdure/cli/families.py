"""Instances that come without others for which they wait: they would wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import CorruptData, InvalidValue, NotFound
from perdure.model import events, wire, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.items import InstanceSnapshot


class Families:
    """What is in a file, and which children its parents need."""

    def __init__(self) -> None:
        self._here: set[str] = set()
        self._needed: dict[str, str] = {}
        """Parents, by their open children."""

    def add(self, snapshot: InstanceSnapshot) -> None:
        self._here.add(snapshot.instance_id)
        if not has_ended(snapshot):
            for child in _open_children(snapshot):
                self._needed.setdefault(child, snapshot.instance_id)

    async def check(self, admin: ProviderAdmin, file: str) -> None:
        """Errors: InvalidValue if a child is neither in the file nor in the store."""
        for child, parent in self._needed.items():
            if child not in self._here and not await _is_there(admin, child):
                raise InvalidValue(
                    f"{file}: {parent!r} waits for {child!r}, which is neither in the file nor in "
                    "this store: it would wait for ever. An export of the parent by its id has its "
                    "children, too; --partial imports it as it is"
                )


def has_ended(snapshot: InstanceSnapshot) -> bool:
    current = [e for e in snapshot.executions if e.execution_id == snapshot.execution_id]
    return bool(current) and current[0].status.is_final


def _open_children(snapshot: InstanceSnapshot) -> Iterator[str]:
    try:
        history = [
            wire.decode_event(record.data)
            for execution in snapshot.executions
            if execution.execution_id == snapshot.execution_id
            for record in execution.history
        ]
        items = [wire.decode_item(queued.message.body) for queued in snapshot.messages]
    except CorruptData:
        return  # whoever runs it says what is wrong with it
    answered = {event.source_event_id for event in history if isinstance(event, events.Resolving)}
    answered |= {
        item.event_id
        for item in items
        if isinstance(item, work.SubOrchCompleted | work.SubOrchFailed)
        and item.execution_id == snapshot.execution_id
    }
    for event in history:
        if isinstance(event, events.SubOrchestrationScheduled) and event.event_id not in answered:
            yield event.child_instance_id


async def _is_there(admin: ProviderAdmin, instance_id: str) -> bool:
    try:
        await admin.export_instance(instance_id)  # also one that has only got messages
    except NotFound:
        return False
    return True
