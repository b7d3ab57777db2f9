"""Ask a running instance, and wait for its reply: ``handle.ask(name, value)``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from perdure.authoring.asking import Ask, ask_instance, mailbox_of, request_id, value_of
from perdure.client.waiting import timed_out
from perdure.errors import InstanceFinished, InvalidValue, NotFound, PerdureError, WaitTimeout
from perdure.ids import new_id

if TYPE_CHECKING:
    from perdure.arguments import Duration
    from perdure.authoring.asking import Reply
    from perdure.client.client import Client
    from perdure.client.instance import Handle


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
        "the request is still in its mailbox, and a late reply is dropped; give the request an id "
        "to ask for its reply again"
    )
    raise await _unanswered(client, question, note) from None


async def _unanswered(client: Client, question: Ask, note: str) -> WaitTimeout:
    """Return the error of a request without a reply. It says what the instance is doing."""
    info = await client.provider.admin.get_instance_info(question.target)
    said = await timed_out(
        client.provider, info, client.clock.now_ms(), f"answered {question.name!r}"
    )
    return WaitTimeout(f"{said}; {note}")
