"""Give promises their answers, and list those that have none: ``client.resolve(key, value)``."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.arguments import check_reason
from perdure.authoring.promises import (
    ANSWER,
    PROMISE,
    Answer,
    promise_id,
    promise_instance,
    promise_key,
)
from perdure.client.admin import read_instances
from perdure.client.durations import utc_time
from perdure.client.instance import OPEN
from perdure.errors import AlreadyResolved, InstanceFinished, InvalidValue
from perdure.model import events, wire, work
from perdure.model.envelopes import envelope
from perdure.model.status import Status
from perdure.providers.records import EnqueueCondition, InstanceQuery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.client.client import Client
    from perdure.providers.records import InstanceInfo

_TRIES = 5


class PromiseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A promise without an answer."""

    key: str
    since: datetime.datetime
    awaited_by: tuple[str, ...]
    """Ids of the instances that wait for it."""


async def answer(client: Client, key: str, given: Answer[Any]) -> None:
    """Answer a promise with one commit: as a new instance, or as an event to the waiting one.

    Raises AlreadyResolved if it has another answer. The same answer again changes nothing.
    """
    name = promise_id(key)
    signature, codec = promise_instance.signature, client.codec
    start = work.StartOrchestration(
        instance_id=name,
        name=PROMISE,
        input=signature.encode_arguments((given,), {}, codec),
    )
    data = codec.encode(given, where=f"answer of promise {key!r}")
    event = work.ExternalRaised(instance_id=name, name=ANSWER, data=data)
    provider = client.provider
    for _ in range(_TRIES):
        if await provider.enqueue_for_orchestrator(
            envelope(start), condition=EnqueueCondition.ABSENT
        ):
            return
        info = await provider.admin.get_instance_info(name)
        if info.name != PROMISE:
            raise InvalidValue(f"{name!r} is an instance of {info.name!r}, not a promise")
        if not info.status.is_final:
            try:
                await provider.enqueue_for_orchestrator(
                    envelope(event), condition=EnqueueCondition.ALIVE
                )
            except InstanceFinished:
                continue  # another answer was quicker
            return
        _check_same(client, key, given, info)
        return


def _check_same(client: Client, key: str, given: Answer[Any], info: InstanceInfo) -> None:
    """Raise AlreadyResolved unless the promise has this answer."""
    if info.status is not Status.COMPLETED:
        raise AlreadyResolved(f"promise {key!r} was {str(info.status).lower()} by an operator")
    codec, where = client.codec, f"answer of promise {key!r}"
    raw = msgspec.Raw((info.output or "null").encode())
    before: Answer[Any] = codec.decode(raw, Answer[Any], where=where)
    again: Answer[Any] = codec.decode(codec.encode(given, where=where), Answer[Any], where=where)
    if again != before:
        raise AlreadyResolved(
            f"promise {key!r} was {'resolved' if before.rejected is None else 'rejected'} before "
            "with other data; the first answer counts"
        )


async def open_promises(client: Client) -> AsyncIterator[PromiseInfo]:
    """Yield the promises without an answer."""
    query = InstanceQuery(name=PROMISE, statuses=OPEN)
    async for info in read_instances(client.provider.admin, query):
        records = await client.provider.read(info.instance_id)
        history = wire.decode_history(record.data for record in records)
        waiting = [e.watcher.instance_id for e in history if isinstance(e, events.WatcherAdded)]
        yield PromiseInfo(
            key=promise_key(info.instance_id),
            since=utc_time(info.created_at_ms),
            awaited_by=tuple(waiting),
        )


def rejection(reason: str) -> Answer[Any]:
    return Answer(value=None, rejected=check_reason(reason))
