"""Exchanges of an orchestration with others: instances by their id, requests, promises.

A request is an instance of a built-in orchestration with the id ``ask:ID``. It sends the request to
the mailbox ``ask:NAME`` of the asked instance, waits for the reply and returns it. Both messages
are part of commits, so a request is read once, and its reply counts once.

A promise is an instance of a built-in orchestration with the id ``promise:KEY``. It waits for one
answer and returns it. Waiting for the promise is waiting for that instance.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, overload

import msgspec

from perdure.arguments import check_reason
from perdure.authoring.api import current, wait_for_event
from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import Activity, orchestration
from perdure.authoring.signature import HandlerSignature
from perdure.codec import Codec, require_open
from perdure.errors import (
    InstanceFinished,
    InvalidValue,
    NotFound,
    PayloadError,
    PromiseRejected,
    RemoteFailure,
    RequestRejected,
)
from perdure.limits import check_id, check_prefixed
from perdure.model.failures import Failure, ended_error
from perdure.model.status import Status
from perdure.model.work import INSTANCE_RESULT, INSTANCE_STATE, MISSING, InstanceEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import UnionType
    from typing import Self


R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _PlainSignature(HandlerSignature):
    """Writes and reads the result of a built-in activity: values of other instances, as JSON."""

    def __init__(self, fn: Callable[..., Any], label: str, result: Any) -> None:
        super().__init__(fn, label)
        self._result = result

    def encode_result(self, value: object, codec: Codec) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(value))

    def decode_result(self, raw: msgspec.Raw, codec: Codec) -> Any:
        return codec.decode(raw, self._result, self._result_label)


def _built_in(fn: Callable[..., Any], name: str, result: Any) -> Activity[..., Any]:
    activity: Activity[..., Any] = Activity(fn, name=name)
    activity.signature = _PlainSignature(fn, f"activity {name!r}", result)
    return activity


def instance_result(look: Callable[..., Any]) -> Activity[..., Any]:
    """Return the built-in activity for ``instance(id).result()``, which runs this function."""
    return _built_in(look, INSTANCE_RESULT, InstanceEnd)


def instance_state(read: Callable[..., Any]) -> Activity[..., Any]:
    """Return the built-in activity for ``instance(id).state()``, which runs this function."""
    return _built_in(read, INSTANCE_STATE, str | None)


async def _look(id: str) -> Any:  # noqa: A002
    """Never runs: orchestrations call it by name, and each runtime registers its own."""
    raise NotImplementedError(id)


async def _read(id: str, key: str) -> Any:  # noqa: A002
    """Never runs: orchestrations call it by name, and each runtime registers its own."""
    raise NotImplementedError(id, key)


_instance_result: Final = instance_result(_look)
_instance_state: Final = instance_state(_read)


class Instance(Generic[R_co]):
    """Another instance by its id, as an orchestration sees it."""

    __slots__ = ("_type", "id")

    def __init__(self, instance_id: str, type_: Any) -> None:
        self.id = instance_id
        self._type = type_

    async def result(self) -> R_co:
        """Wait for its end and return its result, checked against the type.

        An instance that has ended answers at once. Raises OrchestrationFailed,
        OrchestrationCancelled or OrchestrationTerminated as it ended, and NotFound if no instance
        has the id, or has it any more.
        """
        recorder = require_recorder("instance().result()")
        if self.id == recorder.instance_id:
            raise InvalidValue(f"{self.id!r} waits for its own end, which never comes")
        end: InstanceEnd = await _instance_result(self.id)
        if end.status == Status.COMPLETED:
            value: R_co = recorder.decode(end.output, self._type, where=f"result of {self.id!r}")
            return value
        if end.status == MISSING:
            raise NotFound(f"no instance has the id {self.id!r}: it never existed or was deleted")
        failure = msgspec.json.decode(end.output, type=Failure)
        require_open(failure.message, f"the failure of {self.id!r}")
        raise ended_error(end.status, failure, f"instance {self.id!r}")

    @overload
    async def state(self, key: str) -> Any: ...
    @overload
    async def state(self, key: str, type: type[T]) -> T | None: ...
    async def state(self, key: str, type: Any = Any) -> Any:  # noqa: A002
        """Read a key of its ``state`` now, checked against the type; None if it has no such key.

        The value is recorded: replay sees the same one. It may have changed since.
        """
        recorder = require_recorder("instance().state()")
        text: str | None = await _instance_state(self.id, check_id(key, "state key"))
        if text is None:
            return None
        where = f"state[{key!r}] of {self.id!r}"
        return recorder.decode(msgspec.Raw(text.encode()), type, where=where)

    @overload
    async def ask(self, name: str, value: object = None) -> Any: ...
    @overload
    async def ask(self, name: str, value: object, type: type[T]) -> T: ...
    async def ask(self, name: str, value: object = None, type: Any = Any) -> Any:  # noqa: A002
        """Ask it, and return the reply of its ``requests(name)``, checked against the type.

        Raises RequestRejected, and InstanceFinished or NotFound if no reply can come any more.
        """
        recorder = require_recorder("instance().ask()")
        if self.id == recorder.instance_id:
            raise InvalidValue(f"{self.id!r} asks itself, and cannot answer while it waits")
        codec, where = recorder.codec, f"request {name!r}"
        ask = Ask(self.id, name, codec.decode(codec.encode(value, where=where), where=where))
        return value_of(await ask_instance(ask), ask, type, codec)

    def __repr__(self) -> str:
        return f"<Instance {self.id!r}>"


@overload
def instance(id: str, type: type[T]) -> Instance[T]: ...
@overload
def instance(id: str, type: None) -> Instance[None]: ...
@overload
def instance(id: str, type: UnionType = ...) -> Instance[Any]: ...
def instance(id: str, type: Any = Any) -> Instance[Any]:  # noqa: A002
    """Return another instance by its id, to wait for its result or to read its state.

    total = await instance("order-7", int).result()
    """
    require_recorder("instance()")
    return Instance(check_id(id, "id"), type)


async def raise_event_to(id: str, name: str, value: object = None) -> None:  # noqa: A002
    """Send an event to another instance, exactly once, with the commit of this turn.

    An instance that does not exist yet gets it if it is started within a minute. After that the
    event is a dead letter. An instance that has ended does not read it.
    """
    _send("raise_event_to()", "event", id, check_id(name, "event name"), value)


async def send_message_to(id: str, queue: str, value: object = None) -> None:  # noqa: A002
    """Put a message into a mailbox of another instance, as ``raise_event_to`` sends an event."""
    _send("send_message_to()", "message", id, check_id(queue, "queue name"), value)


async def cancel_instance(id: str, reason: str = "") -> None:  # noqa: A002
    """Request the cancellation of another instance, with the commit of this turn.

    It changes nothing if that instance has ended.
    """
    recorder = require_recorder("cancel_instance()")
    # The reason is for operators: it is written as it is, without the codec.
    text = msgspec.Raw(msgspec.json.encode(check_reason(reason)))
    recorder.send_to("cancel", check_id(id, "id"), "", text)


def _send(what: str, kind: str, instance_id: str, name: str, value: object) -> None:
    recorder = require_recorder(what)
    data = recorder.codec.encode(value, where=f"{kind} {name}")
    recorder.send_to(kind, check_id(instance_id, "id"), name, data)


# --- requests

ASK: Final = "perdure.ask"
"""Name of the built-in orchestration."""
REPLY: Final = "perdure.reply"
"""Name of the event that brings the reply."""
ASK_PREFIX: Final = "ask:"
"""Prefix of the id of a request, and of the mailbox that it goes to."""
_CONTINUED: Final = "the instance has read the request and continued as new without a reply"
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
    """Id of the instance that waits for the reply."""
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
    return check_prefixed(ASK_PREFIX, name, "id of a request")


def mailbox_of(name: object) -> str:
    """Return the mailbox for requests of that name; raise InvalidValue for a bad one."""
    return check_prefixed(ASK_PREFIX, name, "name of a request")


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


class Request(Generic[T_co]):
    """A question of a client, or of another instance, that waits for its reply."""

    __slots__ = ("_is_answered", "_sender_id", "id", "name", "value")

    def __init__(self, sender_id: str, name: str, value: T_co) -> None:
        self.id = sender_id.removeprefix(ASK_PREFIX)
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
        require_recorder("Request.reply()").unanswered.pop(self._sender_id, None)

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
            request = Request(sender_id, self._name, sent.value)
            recorder.unanswered[sender_id] = partial(
                send_reply, sender_id, self._name, Reply(rejected=_CONTINUED)
            )
            return request

    def __repr__(self) -> str:
        return f"<Requests {self._name!r}>"


@overload
def requests(name: str, type: type[T]) -> Requests[T]: ...
@overload
def requests(name: str, type: None) -> Requests[None]: ...
@overload
def requests(name: str, type: UnionType = ...) -> Requests[Any]: ...
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


# --- promises

PROMISE: Final = "perdure.promise"
"""Name of the built-in orchestration."""
ANSWER: Final = "perdure.answer"
"""Name of the event that answers a promise."""
_PROMISE_PREFIX: Final = "promise:"


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """The value of a promise, or the reason of its rejection."""

    value: T
    rejected: str | None = None


def promise_id(key: object) -> str:
    """Return the id of the instance that is the promise; raise InvalidValue for a bad key."""
    return check_prefixed(_PROMISE_PREFIX, key, "key of a promise")


def is_promise(instance_id: str) -> bool:
    return instance_id.startswith(_PROMISE_PREFIX)


def promise_key(instance_id: str) -> str:
    return instance_id.removeprefix(_PROMISE_PREFIX)


@orchestration(name=PROMISE)
async def promise_instance(answer: Answer[Any] | None = None) -> Answer[Any]:
    """Return the answer. An early answer comes with the start."""
    return await wait_for_event(ANSWER, Answer[Any]) if answer is None else answer


class Promise(Generic[R_co]):
    """A value that a client gives later, or has given already: ``await`` it."""

    __slots__ = ("_type", "key")

    def __init__(self, key: str, type_: Any) -> None:
        self.key = key
        self._type = type_

    def __await__(self) -> Generator[Any, Any, R_co]:
        return self._wait().__await__()

    async def _wait(self) -> R_co:
        raw = await Instance[msgspec.Raw](promise_id(self.key), msgspec.Raw).result()
        recorder, where = require_recorder("promise()"), f"promise {self.key!r}"
        answer: Answer[msgspec.Raw] = recorder.decode(raw, Answer[msgspec.Raw], where=where)
        if answer.rejected is not None:
            raise PromiseRejected(answer.rejected)
        value: R_co = recorder.decode(answer.value, self._type, where=where)
        return value

    def __repr__(self) -> str:
        return f"<Promise {self.key!r}>"


@overload
def promise(key: str, type: type[T]) -> Promise[T]: ...
@overload
def promise(key: str, type: None) -> Promise[None]: ...
@overload
def promise(key: str, type: UnionType = ...) -> Promise[Any]: ...
def promise(key: str, type: Any = Any) -> Promise[Any]:  # noqa: A002
    """Return the promise with that key, a text of your choice. ``await`` returns its value.

    ``client.resolve(key, value)`` gives the value, before or after this call. The first answer
    counts. Several instances may await one promise. A value that does not fit the type raises
    PayloadError at the ``await``; ``client.reject(key, reason)`` raises PromiseRejected there.
    """
    recorder = require_recorder("promise()")
    name = promise_id(key)
    # Without effect if the promise exists: it was answered early, or another instance awaits it.
    recorder.start_named(PROMISE, recorder.codec.encode((), where="promise()"), name)
    return Promise(key, type)
