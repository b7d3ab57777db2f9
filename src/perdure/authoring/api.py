"""The functions that orchestrations can call beside handlers and asyncio, and activities."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sys
import traceback
import uuid
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast, get_type_hints, overload

import msgspec

from perdure.arguments import moment_of, to_seconds
from perdure.authoring.context import IdLogger, require_recorder, require_scope
from perdure.authoring.definitions import Activity, Orchestration
from perdure.errors import CompensationFailed, InvalidValue, UsageError, shown
from perdure.limits import check_id

if TYPE_CHECKING:
    import datetime
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from random import Random
    from types import TracebackType, UnionType
    from typing import Self

    from perdure.arguments import Duration
    from perdure.authoring.context import ActivityInfo, Recorder, Step
    from perdure.model.work import ParentLink
else:
    Random = object

T = TypeVar("T")
D = TypeVar("D")
P = ParamSpec("P")

_VALUES = (bool, int, float, str, bytes, list, dict, tuple, set)


# --- steps and values of orchestrations


@overload
def wait_for_event(name: str, type: type[T]) -> Step[T]: ...
@overload
def wait_for_event(name: str, type: None) -> Step[None]: ...
@overload
def wait_for_event(name: str, type: UnionType = ...) -> Step[Any]: ...
def wait_for_event(name: str, type: Any = Any, **unknown: object) -> Step[Any]:  # noqa: A002
    """Wait for the next event of that name. An event that arrived before the call is kept for it.

    Data that does not fit the type raises PayloadError at the ``await``.
    """
    recorder = require_recorder("wait_for_event()")
    _check_wait("wait_for_event", type, unknown)
    return recorder.wait(check_id(name, "event name"), type, is_message=False)


@overload
def next_message(queue: str, type: type[T]) -> Step[T]: ...
@overload
def next_message(queue: str, type: None) -> Step[None]: ...
@overload
def next_message(queue: str, type: UnionType = ...) -> Step[Any]: ...
def next_message(queue: str, type: Any = Any, **unknown: object) -> Step[Any]:  # noqa: A002
    """Wait for the next message of that mailbox, first in, first out.

    Data that does not fit the type raises PayloadError at the ``await``.
    """
    recorder = require_recorder("next_message()")
    _check_wait("next_message", type, unknown)
    return recorder.wait(check_id(queue, "queue name"), type, is_message=True)


def _check_wait(called: str, type: object, unknown: Mapping[str, object]) -> None:  # noqa: A002
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise UsageError(
            f"{called}() has no option {names}; a time limit is written around it: "
            "async with asyncio.timeout(60)"
        )
    if isinstance(type, str):
        raise UsageError(f"the second argument is a type, such as bool, not the text {type!r}")


def now() -> datetime.datetime:
    """Return the time of the turn, in UTC: the same on every replay."""
    return moment_of(require_recorder("now()").now_ms)


def uuid4() -> uuid.UUID:
    """Return a random UUID that is the same on every replay."""
    return uuid.UUID(int=require_recorder("uuid4()").rng().getrandbits(128), version=4)


class Randomness(Random):
    """``random()`` returns a number from 0 to below 1; the methods are those of random.Random.

    Each branch has a seeded generator, so the numbers are the same on every replay.
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
    """Call the function once, record its result, and return the recorded result on every replay.

    For something quick that cannot fail, such as reading a setting. Work that can fail or takes
    time belongs into an activity: an exception here ends the orchestration.
    """
    recorder = require_recorder("side_effect()")
    if not callable(fn) or isinstance(fn, Activity) or inspect.iscoroutinefunction(fn):
        raise UsageError(
            "side_effect() takes a plain function without parameters, such as "
            f"lambda: os.environ['HOME'], not {fn!r}; async work belongs into an activity"
        )
    return recorder.side_effect(fn, _result_type(fn) if type is None else type)


def set_custom_status(value: object) -> None:
    """Publish a JSON value as the custom status of the instance; None removes it."""
    recorder = require_recorder("set_custom_status()")
    if value is None:
        recorder.set_custom_status(None)
    else:
        recorder.set_custom_status(bytes(recorder.codec.encode(value, where="status")).decode())


def continue_as_new(*args: Any, version: str | None = None, **kwargs: Any) -> NoReturn:
    """End this execution and begin the next one with these arguments and an empty history.

    Never returns. State, status and unread events and messages go along. An event or message is
    unread if the code never read it from its wait; ``done()`` does not read it. Without a version
    the latest one is used; a given version gets its arguments by position.
    """
    require_recorder("continue_as_new()").continue_as_new(args, kwargs, version)


def start_detached(
    orchestration: Orchestration[P, Any],
    *args: Any,
    id: str | None = None,  # noqa: A002
    version: str | None = None,
    delay: Duration = 0,
    **kwargs: Any,
) -> str:
    """Start an independent orchestration and return its instance id.

    ``delay`` is a number of seconds, or a timedelta. No result comes back: to get one, call the
    orchestration.
    """
    recorder = require_recorder("start_detached()")
    if not isinstance(orchestration, Orchestration):
        raise InvalidValue(f"start_detached() takes an orchestration, not {orchestration!r}")
    if id is not None:
        orchestration = orchestration.options(id=id)
    if version is not None:
        orchestration = orchestration.options(version=version)
    return recorder.start_detached(
        orchestration, args, kwargs, delay_seconds=to_seconds(delay, "delay", minimum=-math.inf)
    )


def patched(name: str) -> bool:
    """Return True if this instance runs the new code: guards a change of code in flight.

    True for an execution that comes here for the first time. False for an execution whose history
    shows that it passed here before the change:

        if patched("send-receipt"):
            await send_receipt(order)
    """
    return require_recorder("patched()").is_patched(check_id(name, "patch name"))


def _result_type(fn: Callable[[], Any]) -> Any:
    try:
        return get_type_hints(fn).get("return", Any)
    except Exception:  # noqa: BLE001  # no annotation can be read: any JSON value fits
        return Any


# --- the running orchestration


class Current:
    """The running orchestration, as its own code sees it."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def instance_id(self) -> str:
        return self._recorder.instance_id

    @property
    def execution_id(self) -> int:
        return self._recorder.execution_id

    @property
    def name(self) -> str:
        return self._recorder.name

    @property
    def version(self) -> str:
        return self._recorder.version

    @property
    def turn(self) -> int:
        return self._recorder.turn

    @property
    def is_replaying(self) -> bool:
        """True while the code repeats its history. No step may depend on it."""
        return self._recorder.is_replaying

    @property
    def parent(self) -> ParentLink | None:
        """The orchestration that started this one as its child, or None."""
        return self._recorder.parent

    @property
    def scheduled_for(self) -> datetime.datetime | None:
        """The time for which a schedule, or ``start(at=...)``, has started it, in UTC.

        The instance may begin later: no worker was free, or the schedule has a jitter.
        """
        due_ms = self._recorder.scheduled_for_ms
        return None if due_ms is None else moment_of(due_ms)

    @property
    def status(self) -> Any:
        """The last value of ``set_custom_status``, also from the execution before."""
        text = self._recorder.custom_status
        if text is None:
            return None
        return self._recorder.decode(msgspec.Raw(text.encode()), where="custom status")

    @property
    def logger(self) -> ReplayLogger:
        """A logger that is silent while replaying, with the ids in ``extra``."""
        return ReplayLogger(self._recorder)


class ReplayLogger(IdLogger):
    """The logger ``perdure.orchestration.<name>``, off while replaying."""

    def __init__(self, recorder: Recorder) -> None:
        fields = {
            "instance_id": recorder.instance_id,
            "execution_id": recorder.execution_id,
            "orchestration_name": recorder.name,
            "orchestration_version": recorder.version,
        }
        super().__init__(logging.getLogger(f"perdure.orchestration.{recorder.name}"), fields)
        self._recorder = recorder

    # The name is that of the standard library.
    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return not self._recorder.is_replaying and self.logger.isEnabledFor(level)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log; print the exception of a broken filter or handler to stderr instead of raising it.

        The code would see the exception live but not on replay, and go another way.
        """
        try:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            super().log(level, msg, *args, **kwargs)
        except Exception:  # noqa: BLE001
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)


def current() -> Current:
    """Return the orchestration that is running here."""
    return Current(require_recorder("current()"))


# --- state of orchestrations


class State:
    """A mapping of strings to JSON values that survives restarts and continue-as-new.

    Reading returns a new copy: write a changed value back. The log warns of a copy that is changed
    and dropped. Keys are sorted.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker finds these by itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f'state has no attribute {name!r}; write state["{name}"]')

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f'state has no attribute {name!r}; write state["{name}"] = ...')

    def __getitem__(self, key: str) -> Any:
        return require_recorder("state").state_read(key, Any)

    def __setitem__(self, key: str, value: object) -> None:
        recorder = require_recorder("state")
        raw = recorder.codec.encode(value, where=f"state[{key!r}]")
        recorder.state_set(key, bytes(raw).decode())

    def __delitem__(self, key: str) -> None:
        recorder = require_recorder("state")
        if key not in recorder.state_values():
            raise KeyError(key)
        recorder.state_delete(key)

    def __contains__(self, key: object) -> bool:
        return key in require_recorder("state").state_values()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(require_recorder("state").state_values())

    @overload
    def get(self, key: str) -> Any | None: ...
    @overload
    def get(self, key: str, type: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, type: type[T], default: D) -> T | D: ...
    @overload
    def get(self, key: str, *, default: D) -> Any | D: ...
    def get(self, key: str, type: Any = Any, default: Any = None) -> Any:  # noqa: A002
        """Return the value, checked against the type, or the default."""
        if isinstance(type, _VALUES):
            raise UsageError(
                f"state.get({key!r}, {type!r}): the second argument is a type; write "
                f"state.get({key!r}, default={type!r})"
            )
        recorder = require_recorder("state")
        return recorder.state_read(key, type) if key in recorder.state_values() else default

    def set(self, key: str, value: object) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""
        if key in self:
            del self[key]

    def clear(self) -> None:
        require_recorder("state").state_clear()

    def keys(self) -> list[str]:
        return sorted(require_recorder("state").state_values())

    def items(self) -> list[tuple[str, Any]]:
        return [(key, self[key]) for key in self.keys()]

    def __repr__(self) -> str:
        return "<state of the running orchestration>"


state = State()
"""The state of the orchestration that is running."""


# --- activities


def activity_info() -> ActivityInfo:
    """Return ids and attempt of the activity that is running here."""
    return require_scope("activity_info()").info


def heartbeat(details: object = None) -> None:
    """Report that the activity is alive. The next attempt can read the details."""
    require_scope("heartbeat()").heartbeat(details)


@overload
def last_heartbeat() -> Any: ...
@overload
def last_heartbeat(type: type[T]) -> T | None: ...
def last_heartbeat(type: Any = Any) -> Any:  # noqa: A002
    """Return the details of the last heartbeat of an earlier attempt, or None."""
    return require_scope("last_heartbeat()").last_heartbeat(type)


def is_cancelled() -> bool:
    """Return True if the activity was cancelled. A long sync activity should check it regularly."""
    return require_scope("is_cancelled()").is_cancelled()


def transaction() -> Any:
    """Return the connection of the store, in an activity declared with ``transactional=True``.

    Rows written through it are committed together with the completion: exactly once.
    On SQLite it is an ``apsw.Connection``.
    """
    return require_scope("transaction()").connection()


# --- sagas: undo in reverse order what was done


class Saga:
    """The compensations of one ``async with saga() as undo`` block."""

    __slots__ = ("_is_open", "_undo")

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., Awaitable[Any]], tuple[Any, ...], dict[str, Any]]] = []
        self._is_open = False

    def __call__(
        self, compensation: Callable[P, Awaitable[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Register a compensation: a call of an activity, an orchestration or an async function.

        The arguments are checked now.
        """
        recorder = require_recorder("saga()")
        called: Any = compensation
        if not self._is_open:
            raise UsageError("undo() works inside of its async with saga() block")
        if isinstance(called, (Activity, Orchestration)):
            signature = cast("Activity[..., Any]", called).signature
            payload = signature.encode_arguments(args, kwargs, recorder.codec)
            signature.check_arguments(args, kwargs, payload, recorder.codec)
        elif inspect.iscoroutinefunction(called):
            inspect.signature(compensation).bind(*args, **kwargs)
        else:
            raise UsageError(
                "undo() takes an activity, an orchestration or an async function, and its "
                f"arguments: undo(release, item); not {shown(compensation)}"
            )
        self._undo.append((compensation, args, kwargs))

    async def __aenter__(self) -> Self:
        require_recorder("saga()")
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        # Other exceptions do not end the instance: continue_as_new() raises one, and the code of an
        # instance that leaves the memory of a worker is closed by one.
        if not isinstance(error, (Exception, asyncio.CancelledError)) or not self._undo:
            return
        recorder = require_recorder("saga()")
        cancelled: asyncio.CancelledError | None = None
        failed: list[str] = []
        first: Exception | None = None
        count = len(self._undo)
        before = recorder.begin_compensation()
        try:
            while self._undo:
                compensation, args, kwargs = self._undo.pop()
                step: asyncio.Future[Any] = asyncio.ensure_future(compensation(*args, **kwargs))
                cancelled = await _wait_for(step) or cancelled
                problem = None if step.cancelled() else step.exception()
                if isinstance(problem, Exception):
                    first = first or problem
                    failed.append(f"{_name(compensation)}: {type(problem).__name__}: {problem}")
        finally:
            recorder.end_compensation(before)
        if failed:
            raise CompensationFailed(
                f"{len(failed)} of {count} compensations failed, after {type(error).__name__}: "
                f"{error}; {'; '.join(failed)}"
            ) from first
        if cancelled is not None:
            raise cancelled


async def _wait_for(step: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of a compensation; return a cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not step.done():
        try:
            await asyncio.wait([step])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _name(compensation: Any) -> str:
    return str(getattr(compensation, "name", None) or compensation.__name__)


def saga() -> Saga:
    """Return a block that undoes its steps in reverse order, if it ends with an error.

    After an exception or a cancellation, the compensations that were registered until then run.
    Then it is raised again. If a compensation fails, the others still run, and CompensationFailed
    names those that failed.

        async with saga() as undo:
            await reserve(item)
            undo(release, item)
            await charge(order)
    """
    require_recorder("saga()")
    return Saga()
