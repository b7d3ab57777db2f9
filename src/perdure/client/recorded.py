"""An execution as it is recorded: history and the state it began with, enough to replay it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.errors import CorruptData, NotFound
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.contract import Provider
    from perdure.providers.items import InstanceInfo, InstanceSnapshot


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay starts from."""

    instance_id: str
    name: str
    version: str
    history: list[events.Event]
    kv: dict[str, str]
    """State at the end of the previous execution."""


async def read_recorded(provider: Provider, admin: ProviderAdmin, info: InstanceInfo) -> Recorded:
    """The current execution of an instance. Errors: NotFound before its first turn."""
    kv: dict[str, str] = {}
    if info.execution_id > 1:
        # Only a whole snapshot holds the state before this execution; the first one has none.
        snapshot = await admin.export_instance(info.instance_id)
        kv = {key: entry.value for key, entry in snapshot.kv_store.items()}
    records = await provider.read_with_execution(info.instance_id, info.execution_id)
    history = wire.decode_history(record.data for record in records)
    return recorded_history(info.instance_id, history, kv)


def recorded_in(snapshot: InstanceSnapshot) -> Recorded:
    """The current execution in a snapshot."""
    records = next(
        (e.history for e in snapshot.executions if e.execution_id == snapshot.execution_id), ()
    )
    history = wire.decode_history(record.data for record in records)
    kv = {key: entry.value for key, entry in snapshot.kv_store.items()}
    return recorded_history(snapshot.instance_id, history, kv)


def recorded_history(
    instance_id: str, history: Sequence[events.Event], kv: Mapping[str, str]
) -> Recorded:
    """A history that was read elsewhere."""
    if not history:
        raise NotFound(f"{instance_id!r} has no history yet: no turn of it has run")
    started = history[0]
    if not isinstance(started, events.OrchestrationStarted):
        raise CorruptData("replay", f"the history begins with {type(started).__name__}")
    return Recorded(
        instance_id=instance_id,
        name=started.name,
        version=started.version,
        history=list(history),
        kv=dict(kv),
    )
