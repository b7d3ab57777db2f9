"""What orchestration code may call besides handlers and asyncio."""

from __future__ import annotations

import datetime
import uuid
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, get_type_hints, overload

from perdure.authoring.definitions import Orchestration
from perdure.authoring.recorder import require_recorder
from perdure.errors import InvalidValue
from perdure.limits import check_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from types import UnionType

    from perdure.authoring.steps import Step
else:
    Random = object

T = TypeVar("T")
P = ParamSpec("P")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@overload
def wait_for_event(name: str) -> Step[Any]: ...
@overload
def wait_for_event(name: str, type: type[T]) -> Step[T]: ...
@overload
def wait_for_event(name: str, type: None) -> Step[None]: ...
@overload
def wait_for_event(name: str, type: UnionType) -> Step[Any]: ...
def wait_for_event(name: str, type: Any = Any) -> Step[Any]:  # noqa: A002
    """The next event of that name. One that came before the call is kept for it.

    Data that does not fit the type raises PayloadError at the ``await``.
    """
    recorder = require_recorder("wait_for_event()")
    return recorder.wait_for_event(check_id(name, "event name"), type)


@overload
def next_message(queue: str) -> Step[Any]: ...
@overload
def next_message(queue: str, type: type[T]) -> Step[T]: ...
@overload
def next_message(queue: str, type: None) -> Step[None]: ...
@overload
def next_message(queue: str, type: UnionType) -> Step[Any]: ...
def next_message(queue: str, type: Any = Any) -> Step[Any]:  # noqa: A002
    """The next message of that mailbox, first in, first out.

    Data that does not fit the type raises PayloadError at the ``await``.
    """
    recorder = require_recorder("next_message()")
    return recorder.next_message(check_id(queue, "queue name"), type)


def now() -> datetime.datetime:
    """The time of the turn, in UTC: the same on every replay."""
    return _EPOCH + datetime.timedelta(milliseconds=require_recorder("now()").now_ms)


def uuid4() -> uuid.UUID:
    """A random UUID that is the same on every replay."""
    return uuid.UUID(int=require_recorder("uuid4()").rng().getrandbits(128), version=4)


class Randomness(Random):
    """``random()`` gives a number from 0 to below 1; the methods are those of random.Random.

    Drawn from a generator seeded for the branch that asks, so it is the same on every replay.
    """

    def __call__(self) -> float:
        return require_recorder("random()").rng().random()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(require_recorder(f"random.{name}()").rng(), name)


random = Randomness()


@overload
def side_effect(fn: Callable[[], T]) -> T: ...
@overload
def side_effect(fn: Callable[[], Any], type: type[T]) -> T: ...
def side_effect(fn: Callable[[], Any], type: Any = None) -> Any:  # noqa: A002
    """Call the function once, record what it gives, and give the recorded value on every replay.

    For something quick that cannot fail, such as reading a setting. What may fail, or takes time,
    belongs into an activity: an exception here ends the orchestration.
    """
    recorder = require_recorder("side_effect()")
    return recorder.side_effect(fn, _result_type(fn) if type is None else type)


def set_status(value: object) -> None:
    """Show a JSON value to whoever looks at the instance; None takes it away."""
    recorder = require_recorder("set_status()")
    if value is None:
        recorder.set_status(None)
    else:
        recorder.set_status(bytes(recorder.codec.encode(value, where="status")).decode())


def continue_as_new(*args: Any, version: str | None = None, **kwargs: Any) -> NoReturn:
    """End this execution and begin the next one with these arguments and an empty history.

    Never returns. State, status and unread events and messages go along: also those that came to a
    wait whose result the code never took (``done()`` only looks). Without a version the latest one
    takes over; a given version gets its arguments by position.
    """
    require_recorder("continue_as_new()").continue_as_new(args, kwargs, version)


def start_detached(
    orchestration: Orchestration[P, Any],
    *args: Any,
    id: str | None = None,  # noqa: A002
    version: str | None = None,
    delay: float = 0,
    **kwargs: Any,
) -> str:
    """Start an orchestration with a life of its own and return its instance id.

    ``delay`` is in seconds. Nothing comes back: call the orchestration to get its result.
    """
    recorder = require_recorder("start_detached()")
    if not isinstance(orchestration, Orchestration):
        raise InvalidValue(f"start_detached() takes an orchestration, not {orchestration!r}")
    if id is not None:
        orchestration = orchestration.options(id=id)
    if version is not None:
        orchestration = orchestration.options(version=version)
    return recorder.start_detached(orchestration, args, kwargs, delay_seconds=delay)


def patched(name: str) -> bool:
    """Whether this instance takes the new way: guard a change of code that is in flight.

    True for an execution that comes here for the first time, False for one whose history shows
    that it passed here before the change:

        if patched("send-receipt"):
            await send_receipt(order)
    """
    return require_recorder("patched()").is_patched(check_id(name, "patch name"))


def _result_type(fn: Callable[[], Any]) -> Any:
    try:
        return get_type_hints(fn).get("return", Any)
    except Exception:  # noqa: BLE001  # an odd callable or a local name: any JSON value will do
        return Any
