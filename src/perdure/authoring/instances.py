"""Other instances, from inside an orchestration: wait for one, read its state, message it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

import msgspec

from perdure.arguments import check_reason
from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import Activity
from perdure.authoring.signature import HandlerSignature
from perdure.codec import require_open
from perdure.errors import InvalidValue, NotFound
from perdure.limits import check_id
from perdure.model.failures import Failure, ended_error
from perdure.model.status import Status
from perdure.model.work import INSTANCE_RESULT, INSTANCE_STATE, MISSING, InstanceEnd

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import UnionType

    from perdure.codec import Codec

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


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
    """Return the built-in activity that looks for the end of an instance with this function."""
    return _built_in(look, INSTANCE_RESULT, InstanceEnd)


def instance_state(read: Callable[..., Any]) -> Activity[..., Any]:
    """Return the built-in activity that reads the state of an instance with this function."""
    return _built_in(read, INSTANCE_STATE, str | None)


async def _look(id: str) -> Any:  # noqa: A002
    """Stand for the function that each runtime has under the same name."""
    raise NotImplementedError(id)


async def _read(id: str, key: str) -> Any:  # noqa: A002
    """Stand for the function that each runtime has under the same name."""
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
        from perdure.authoring.asking import Ask, ask_instance, value_of

        recorder = require_recorder("instance().ask()")
        if self.id == recorder.instance_id:
            raise InvalidValue(f"{self.id!r} asks itself, and cannot answer while it waits")
        codec, where = recorder.codec, f"request {name!r}"
        ask = Ask(self.id, name, codec.decode(codec.encode(value, where=where), where=where))
        return value_of(await ask_instance(ask), ask, type, codec)

    def __repr__(self) -> str:
        return f"<Instance {self.id!r}>"


@overload
def instance(id: str) -> Instance[Any]: ...
@overload
def instance(id: str, type: type[T]) -> Instance[T]: ...
@overload
def instance(id: str, type: None) -> Instance[None]: ...
@overload
def instance(id: str, type: UnionType) -> Instance[Any]: ...
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
