"""Ask an instance and wait for its reply; give promises their answers, and list the open ones.

They are ``handle.ask(name, value)``, ``client.resolve(key, value)`` and ``client.promises()``.
"""

from __future__ import annotations

import datetime
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.arguments import Duration, check_reason
from perdure.authoring.communication import (
    ANSWER,
    PROMISE,
    Answer,
    Ask,
    ask_instance,
    mailbox_of,
    promise_id,
    promise_instance,
    promise_key,
    request_id,
    value_of,
)
from perdure.client.admin import read_instances
from perdure.client.endings import timed_out
from perdure.client.formats import utc_time
from perdure.client.instance import OPEN, Handle
from perdure.errors import (
    AlreadyResolved,
    InstanceFinished,
    InvalidValue,
    NotFound,
    PerdureError,
    WaitTimeout,
)
from perdure.ids import new_id
from perdure.model import events, wire, work
from perdure.model.status import Status
from perdure.model.wire import envelope
from perdure.providers.records import EnqueueCondition, InstanceInfo, InstanceQuery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perdure.authoring.communication import Reply
    from perdure.client.client import Client


async def ask(
    client: Client,
    instance_id: str,
    name: str,
    value: object,
    type_: Any,
    *,
    timeout: Duration | None,  # noqa: ASYNC109
    given_id: str | None,
) -> Any:
    """Start the request, which is an instance, and return its reply.

    A request without an id of its own is deleted when its reply was read, and cancelled when it
    was not: no second call can find it.
    """
    where = f"request {mailbox_of(name)!r}"
    plain = client.codec.decode(client.codec.encode(value, where=where), where=where)
    question = Ask(instance_id, name, plain)
    sender_id = request_id(new_id() if given_id is None else given_id)
    if given_id is None or not await _exists(client, sender_id):
        info = await client.provider.admin.get_instance_info(instance_id)
        if info.status.is_final:
            raise InstanceFinished(
                f"{instance_id!r} has ended ({info.status}): it cannot answer {name!r}"
            )
    handle = await client.start(ask_instance, question, id=sender_id, if_changed="fail")
    try:
        reply = await handle.result(timeout)
    except WaitTimeout:
        if given_id is not None:
            note = f"the request stays; ask again with id={given_id!r} for its reply"
            raise await _unanswered(client, question, note) from None
        reply = await _withdraw(client, handle, question)
    if given_id is None:
        with suppress(PerdureError):  # the reply counts, also if the store is away now
            await client.provider.admin.delete_instance(sender_id)
    return value_of(reply, question, type_, client.codec)


async def _exists(client: Client, sender_id: str) -> bool:
    try:
        info = await client.provider.admin.get_instance_info(sender_id)
    except NotFound:
        return False
    if info.name != ask_instance.name:
        raise InvalidValue(f"{sender_id!r} is an instance of {info.name!r}, not a request")
    return True


async def _withdraw(client: Client, handle: Handle[Reply], question: Ask) -> Reply:
    """Cancel a request that got no reply in time. Return a reply that came at the last moment."""
    try:
        await client.cancel(handle.id, "no reply in time")
    except InstanceFinished:
        return await handle.result()
    note = (
        "the code may still read the request, and a late reply is dropped; answer each request "
        "with reply() or reject(), and give it an id to ask for its reply again"
    )
    raise await _unanswered(client, question, note) from None


async def _unanswered(client: Client, question: Ask, note: str) -> WaitTimeout:
    """Return the error of a request without a reply. It says what the instance is doing."""
    info = await client.provider.admin.get_instance_info(question.target)
    said = await timed_out(
        client.provider, info, client.clock.now_ms(), f"answered {question.name!r}"
    )
    return WaitTimeout(f"{said}; {note}")


# --- promises

_TRIES = 5


class PromiseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A promise without an answer. The API and ``-o json`` give it as JSON."""

    key: str
    since: datetime.datetime
    awaited_by: tuple[str, ...]
    """Ids of the instances that wait for it."""


async def resolve(client: Client, key: str, value: object) -> None:
    await _answer(client, key, Answer(value=value))


async def reject(client: Client, key: str, reason: str) -> None:
    await _answer(client, key, Answer(value=None, rejected=check_reason(reason)))


async def _answer(client: Client, key: str, given: Answer[Any]) -> None:
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
        history = wire.decode_history(records)
        waiting = [e.watcher.instance_id for e in history if isinstance(e, events.WatcherAdded)]
        yield PromiseInfo(
            key=promise_key(info.instance_id),
            since=utc_time(info.created_at_ms),
            awaited_by=tuple(waiting),
        )
