"""Requests: a client asks a running instance by a name, and gets the reply that its code gives.

A request is an instance of a built-in orchestration with the id ``ask:ID``. It sends the request to
the mailbox ``ask:NAME`` of the asked instance, waits for the reply and returns it. Both messages
are part of commits, so a request is read once, and its reply counts once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, overload

import msgspec

from perdure.arguments import check_reason
from perdure.authoring.api import current, wait_for_event
from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import orchestration
from perdure.authoring.instances import Instance, send_message_to
from perdure.errors import (
    InstanceFinished,
    InvalidValue,
    NotFound,
    PayloadError,
    RemoteFailure,
    RequestRejected,
)
from perdure.limits import check_prefixed

if TYPE_CHECKING:
    from types import UnionType
    from typing import Self

    from perdure.codec import Codec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ASK: Final = "perdure.ask"
"""Name of the built-in orchestration."""
REPLY: Final = "perdure.reply"
"""Name of the event that brings the reply."""
PREFIX: Final = "ask:"
"""Of the id of a request, and of the mailbox that it goes to."""
_QUICK_SECONDS: Final = 1
"""A request that is answered within this time does not watch for the end of the instance."""


class Ask(msgspec.Struct, frozen=True):
    """The arguments of a request."""

    target: str
    name: str
    value: Any = None


class Sent(msgspec.Struct, Generic[T], frozen=True):
    """The message in the mailbox of the asked instance."""

    id: str
    """Of the instance that waits for the reply."""
    value: T


class Reply(msgspec.Struct, frozen=True):
    """The end of a request."""

    value: Any = None
    rejected: str | None = None
    """The reason of a rejection."""
    missing: str | None = None
    """Set if the asked instance has ended, or was deleted, without a reply."""
    has_ended: bool = True
    """False if it was deleted."""


def request_id(name: object) -> str:
    """Return the id of the instance that is the request; raise InvalidValue for a bad one."""
    return check_prefixed(PREFIX, name, "id of a request")


def mailbox_of(name: object) -> str:
    """Return the mailbox for requests of that name; raise InvalidValue for a bad one."""
    return check_prefixed(PREFIX, name, "name of a request")


@orchestration(name=ASK)
async def ask_instance(ask: Ask) -> Reply:
    """Send the request, and return its reply. Notice if the asked instance ends without one."""
    sent = Sent(current().instance_id, ask.value)
    await send_message_to(ask.target, mailbox_of(ask.name), sent)
    reply = wait_for_event(REPLY, Reply)
    answered, _ = await asyncio.wait([reply], timeout=_QUICK_SECONDS)
    if not answered:
        end = asyncio.create_task(_without_reply(ask.target))
        await asyncio.wait([reply, end], return_when=asyncio.FIRST_COMPLETED)
        # The last turn of the asked instance may have replied: that message came before its end.
        if not reply.done():
            return end.result()
        end.cancel()
    return reply.result()


async def _without_reply(target: str) -> Reply:
    """Wait for the end of the asked instance."""
    try:
        await Instance[msgspec.Raw](target, msgspec.Raw).result()
    except NotFound as error:
        return Reply(missing=str(error), has_ended=False)
    except RemoteFailure as error:
        return Reply(missing=str(error))
    return Reply(missing=f"instance {target!r} has completed")


def value_of(reply: Reply, ask: Ask, type_: Any, codec: Codec) -> Any:
    """Return the value of a reply, checked against the type.

    Raises RequestRejected, InstanceFinished or NotFound for a request without one.
    """
    if reply.rejected is not None:
        raise RequestRejected(reply.rejected)
    if reply.missing is not None:
        kind = InstanceFinished if reply.has_ended else NotFound
        raise kind(f"{ask.target!r} did not answer {ask.name!r}: {reply.missing}")
    where = f"reply of {ask.target!r} to {ask.name!r}"
    return codec.decode(codec.encode(reply.value, where=where), type_, where=where)


# --- inside the asked instance


class Request(Generic[T_co]):
    """A question of a client, or of another instance, that waits for its reply."""

    __slots__ = ("_is_answered", "_sender_id", "id", "name", "value")

    def __init__(self, sender_id: str, name: str, value: T_co) -> None:
        self.id = sender_id.removeprefix(PREFIX)
        """The id of the request: that of ``ask(..., id=...)``, or an automatic one."""
        self._sender_id = sender_id
        self.name = name
        self.value = value
        self._is_answered = False

    def reply(self, value: object = None) -> None:
        """Give the reply. It is sent with the commit of this turn."""
        self._answer(Reply(value=value))

    def reject(self, reason: str) -> None:
        """Let ``ask`` raise RequestRejected with this reason."""
        self._answer(Reply(rejected=check_reason(reason)))

    def _answer(self, reply: Reply) -> None:
        if self._is_answered:
            raise InvalidValue(f"the request {self.id!r} ({self.name}) has its reply already")
        send_reply(self._sender_id, self.name, reply)
        self._is_answered = True

    def __repr__(self) -> str:
        return f"<Request {self.name} {self.id!r}>"


def send_reply(sender_id: str, name: str, reply: Reply) -> None:
    recorder = require_recorder("Request.reply()")
    data = recorder.codec.encode(reply, where=f"reply to {name!r}")
    recorder.send_to("event", sender_id, REPLY, data)


class Requests(Generic[T]):
    """The requests of one name, in the order of their arrival: ``async for`` reads them."""

    __slots__ = ("_name", "_type")

    def __init__(self, name: str, type_: Any) -> None:
        self._name = name
        self._type = type_

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request[T]:
        """Wait for the next request. One that does not fit the type is rejected and left out."""
        recorder, where = require_recorder("requests()"), f"request {self._name!r}"
        typed: Any = cast("Any", Sent)[self._type]
        while True:
            raw = await recorder.wait(mailbox_of(self._name), msgspec.Raw, is_message=True)
            try:
                sender_id = recorder.decode(raw, Sent[Any], where=where).id
            except PayloadError:
                current().logger.warning("a message in %r is no request", mailbox_of(self._name))
                continue
            try:
                sent: Sent[T] = recorder.decode(raw, typed, where=where)
            except PayloadError as error:
                misfit = str(error).rpartition("; got ")[0]  # the sender knows its value
                send_reply(sender_id, self._name, Reply(rejected=misfit))
                continue
            return Request(sender_id, self._name, sent.value)

    def __repr__(self) -> str:
        return f"<Requests {self._name!r}>"


@overload
def requests(name: str) -> Requests[Any]: ...
@overload
def requests(name: str, type: type[T]) -> Requests[T]: ...
@overload
def requests(name: str, type: None) -> Requests[None]: ...
@overload
def requests(name: str, type: UnionType) -> Requests[Any]: ...
def requests(name: str, type: Any = Any) -> Requests[Any]:  # noqa: A002
    """Return the requests of that name, which ``handle.ask(name, value)`` sends.

    A request whose value does not fit the type is rejected: the client that sent it gets the error.

        async for request in requests("add", str):
            items.append(request.value)
            request.reply(len(items))
    """
    recorder = require_recorder("requests()")
    mailbox_of(name)
    recorder.codec.check_type(type, where=f"request {name!r}")
    return Requests(name, type)
