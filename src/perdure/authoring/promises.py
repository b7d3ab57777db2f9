"""Promises: values that an orchestration awaits by a key, and that a client gives by the same key.

A promise is an instance of a built-in orchestration with the id ``promise:KEY``. It waits for one
answer and returns it. Waiting for the promise is waiting for that instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

import msgspec

from perdure.authoring.api import wait_for_event
from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import orchestration
from perdure.authoring.instances import Instance
from perdure.errors import PromiseRejected
from perdure.limits import check_prefixed

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import UnionType

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

PROMISE: Final = "perdure.promise"
"""Name of the built-in orchestration."""
ANSWER: Final = "perdure.answer"
"""Name of the event that answers a promise."""
_PREFIX: Final = "promise:"


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """The value of a promise, or the reason of its rejection."""

    value: T
    rejected: str | None = None


def promise_id(key: object) -> str:
    """Return the id of the instance that is the promise; raise InvalidValue for a bad key."""
    return check_prefixed(_PREFIX, key, "key of a promise")


def is_promise(instance_id: str) -> bool:
    return instance_id.startswith(_PREFIX)


def promise_key(instance_id: str) -> str:
    return instance_id.removeprefix(_PREFIX)


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
        rejected = recorder.decode(raw, Answer[Any], where=where).rejected
        if rejected is not None:
            raise PromiseRejected(rejected)
        answer: Any = Answer
        value: R_co = recorder.decode(raw, answer[self._type], where=where).value
        return value

    def __repr__(self) -> str:
        return f"<Promise {self.key!r}>"


@overload
def promise(key: str) -> Promise[Any]: ...
@overload
def promise(key: str, type: type[T]) -> Promise[T]: ...
@overload
def promise(key: str, type: None) -> Promise[None]: ...
@overload
def promise(key: str, type: UnionType) -> Promise[Any]: ...
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
