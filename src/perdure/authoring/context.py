"""The orchestration or activity that is running: how user code reaches the engine and the runtime.

The engine notes which thread runs which orchestration, and the runtime sets one context variable
around every attempt of an activity, in the thread or process in which the function runs. So no
context object is passed around. Authoring knows only these protocols, not who implements them.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from perdure.errors import NotInOrchestration, UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Mapping, MutableMapping
    from contextvars import Token

    import msgspec

    from perdure.authoring.definitions import Activity, Orchestration
    from perdure.codec import Codec
    from perdure.model.work import ParentLink

    LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    LoggerAdapter = logging.LoggerAdapter

R = TypeVar("R")


class IdLogger(LoggerAdapter):
    """A logger that adds the ids of the running code to each record, as fields."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


# --- orchestrations


class Recorder(Protocol):
    """Answers every call of an orchestration at once; the steps that it returns resolve later."""

    @property
    def instance_id(self) -> str: ...
    @property
    def execution_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def parent(self) -> ParentLink | None: ...
    @property
    def turn(self) -> int: ...
    @property
    def scheduled_for_ms(self) -> int | None: ...
    @property
    def is_replaying(self) -> bool: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def now_ms(self) -> int:
        """The time of the turn: the same on every replay."""
        ...

    @property
    def custom_status(self) -> str | None:
        """The JSON text of the last custom status that was set."""
        ...

    def decode(self, raw: msgspec.Raw, type_: Any = ..., *, where: str) -> Any: ...

    def schedule_activity(
        self, activity: Activity[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]: ...

    def schedule_child(
        self, child: Orchestration[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Step[Any]: ...

    def start_detached(
        self,
        orchestration: Orchestration[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        delay_seconds: float,
    ) -> str: ...

    def start_named(
        self, name: str, payload: msgspec.Raw, instance_id: str, **fields: Any
    ) -> object:
        """Start an independent orchestration whose code may be elsewhere.

        ``fields`` are those of ``OrchestrationChained``.
        """
        ...

    def send_to(self, kind: str, target_id: str, name: str, data: msgspec.Raw) -> None: ...

    @property
    def unanswered(self) -> dict[str, Callable[[], None]]:
        """Rejects each request that was read and has no reply, when the code continues as new."""
        ...

    def wait(self, name: str, type_: Any, *, is_message: bool) -> Step[Any]:
        """Wait for the next event of that name, or for the next message of that mailbox."""
        ...

    def rng(self) -> random.Random:
        """Return the seeded generator of the calling branch."""
        ...

    def side_effect(self, fn: Callable[[], Any], type_: Any) -> Any: ...

    def is_patched(self, name: str) -> bool: ...

    def continue_as_new(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], version: str | None
    ) -> NoReturn: ...

    def begin_compensation(self) -> bool:
        """Mark the steps of the calling branch as compensations; return the mark before.

        No clean-up is cut off until ``end_compensation``.
        """
        ...

    def end_compensation(self, before: bool) -> None: ...

    def set_custom_status(self, text: str | None) -> None: ...

    def state_values(self) -> Mapping[str, str]:
        """Return the state of the instance: JSON text by key."""
        ...

    def state_read(self, key: str, type_: Any) -> Any:
        """Return the value of a key that exists."""
        ...

    def state_set(self, key: str, text: str) -> None: ...

    def state_delete(self, key: str) -> None: ...

    def state_clear(self) -> None: ...


running: dict[int, Recorder] = {}
"""The recorder of each thread that runs orchestration code now. Maintained by the engine."""


def find_recorder() -> Recorder | None:
    """Return the recorder of the orchestration that runs in this thread, or None."""
    return running.get(get_ident())


def require_recorder(what: str) -> Recorder:
    """Return the recorder of this thread; raise NotInOrchestration if it runs none."""
    recorder = find_recorder()
    if recorder is None:
        raise NotInOrchestration(f"{what} works only inside an orchestration")
    return recorder


class StepOwner(Protocol):
    """Resolves a step, and is told when the code cancels it."""

    def step_cancelled(self, step: Step[Any]) -> None: ...


if TYPE_CHECKING:

    class Step(asyncio.Future[R], Coroutine[Any, Any, R]):
        """One durable operation: an activity, a child, a wait.

        Type checkers see a future and a coroutine at once, so that ``create_task`` takes it too.
        """

        _owner: StepOwner
        _identity: int
        event_id: int
        """The event that opened it; 0 if none did."""

        def send(self, value: Any, /) -> Any: ...

        def throw(self, *exception: Any) -> Any: ...

        def close(self) -> None: ...

        # Outside of orchestrations an activity returns the plain value, which is compared:
        # assert price_of("lamp") == 400.
        def __eq__(self, other: object) -> bool: ...

        def __hash__(self) -> int: ...

else:

    class Step(asyncio.Future):
        """One durable operation: an activity, a child, a wait. asyncio takes it everywhere."""

        # Not a collections.abc.Coroutine at run time: asyncio.wait() refuses those. The
        # create_task() of the durable loop accepts a step directly.
        # The loop sets these: a constructor in Python takes longer than the future itself.
        __slots__ = ("_identity", "_owner", "event_id", "was_awaited")

        def __hash__(self) -> int:
            # By place in the program, not by address: sets of steps keep their order on replay.
            return self._identity

        def cancel(self, msg: Any = None) -> bool:
            cancelled = super().cancel(msg)
            if cancelled:
                self._owner.step_cancelled(self)
            return cancelled

        def remove_done_callback(self, fn: Any, /) -> int:
            # asyncio.wait() and shield() stop waiting: the code may drop the step after that.
            self.was_awaited = True
            return super().remove_done_callback(fn)


# --- activities


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityInfo:
    """Ids and settings of the attempt that is running."""

    instance_id: str
    execution_id: int
    orchestration_name: str
    orchestration_version: str
    activity_name: str
    activity_id: int
    attempt: int
    """Counted from 1, with failed attempts and attempts whose worker died: 1 means that no earlier
    attempt has begun."""
    session: str | None = None
    tag: str | None = None
    worker_id: str = ""
    seed: str = ""
    """Seed of the execution: differs if the instance is replaced, or deleted and started again."""

    @property
    def logger(self) -> IdLogger:
        """The logger ``perdure.activity.<name>``; its records have the ids as fields."""
        fields = {name: getattr(self, name) for name in _LOGGED}
        return IdLogger(logging.getLogger(f"perdure.activity.{self.activity_name}"), fields)

    @property
    def idempotency_key(self) -> str:
        """A key for other systems: equal in all attempts of this call, different in other calls."""
        call = f"{self.instance_id}/{self.execution_id}/{self.activity_id}"
        return f"{call}/{self.seed}" if self.seed else call


_LOGGED: Final = (
    "instance_id",
    "execution_id",
    "orchestration_name",
    "orchestration_version",
    "activity_name",
    "activity_id",
    "attempt",
)


class ActivityScope(Protocol):
    """Provided by the runtime around an attempt. Every method may be called from any thread."""

    @property
    def info(self) -> ActivityInfo: ...

    def heartbeat(self, details: object) -> None:
        """Report that the activity is alive; the next attempt can read the details."""
        ...

    def last_heartbeat(self, type_: Any) -> Any:
        """Return the details of the last heartbeat of an earlier attempt, or None."""
        ...

    def is_cancelled(self) -> bool: ...

    def connection(self) -> Any:
        """Return the connection of the store, in the transaction that completes the activity."""
        ...

    def client(self) -> tuple[Any, asyncio.AbstractEventLoop, Thread]:
        """Return the client of the runtime, its event loop, and the thread of that loop."""
        ...


_scope: ContextVar[ActivityScope] = ContextVar("perdure_activity")


def enter_scope(scope: ActivityScope) -> Token[ActivityScope]:
    """Make this the attempt of the current context. Called by the runtime."""
    return _scope.set(scope)


def leave_scope(token: Token[ActivityScope]) -> None:
    _scope.reset(token)


def require_scope(what: str) -> ActivityScope:
    """Return the attempt of the current context; raise UsageError if there is none."""
    scope = _scope.get(None)
    if scope is None:
        if find_recorder() is not None:
            raise UsageError(f"{what} works only inside an activity, and this is an orchestration")
        raise UsageError(
            f"{what} works only inside an activity that a runtime started; in a thread that the "
            "activity starts, it works with contextvars.copy_context().run(...) or "
            "asyncio.to_thread(...)"
        )
    return scope
