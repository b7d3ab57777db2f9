"""Orchestrations and activities as an author defines and calls them: typed objects, no registry."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from functools import cached_property, update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
)

from perdure import limits
from perdure.authoring.fingerprint import fingerprint
from perdure.authoring.policies import ActivityOptions
from perdure.authoring.recorder import find_recorder
from perdure.authoring.signature import HandlerSignature
from perdure.errors import InvalidValue, NotInOrchestration, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.authoring.policies import Retry
    from perdure.authoring.steps import Step
    from perdure.model import work

P = ParamSpec("P")
R = TypeVar("R")

OnParentClose: TypeAlias = Literal["cancel", "abandon"]

VERSION_DEFAULT: Final = "1.0.0"
_VERSION = re.compile(r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})", re.ASCII)


class _Kept:
    """Stands for "as it was" where None is a value of its own."""

    def __repr__(self) -> str:
        return "KEPT"


KEPT: Final[Any] = _Kept()


def parse_version(version: object) -> tuple[int, int, int]:
    """The numbers of MAJOR.MINOR.PATCH, or InvalidValue."""
    matched = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if matched is None:
        raise InvalidValue(f"a version has the form MAJOR.MINOR.PATCH, e.g. '1.0.0': {version!r}")
    major, minor, patch = matched.groups()
    return int(major), int(minor), int(patch)


class _Handler(Generic[P, R]):
    """What both kinds of handler share: a name, a function, and its arguments as JSON."""

    kind: str

    def __init__(self, fn: Callable[..., Any], name: str | None) -> None:
        if not inspect.isfunction(fn):
            raise UsageError(f"@{self.kind} takes a plain function, not {fn!r}")
        if next(iter(inspect.signature(fn).parameters), "") == "self":
            raise UsageError(f"@{self.kind} takes a plain function, not the method {fn!r}")
        self.fn: Callable[P, Any] = fn
        """The plain function: what it returns is the value, or a coroutine if it is async."""
        self.name: str = limits.check_id(fn.__name__ if name is None else name, "name")
        self.signature = HandlerSignature(fn, f"{self.kind} {self.name!r}")
        update_wrapper(cast("Any", self), fn)

    def _settle(self) -> None:
        """Called when every attribute is there: makes them quick to find.

        Up to 3.12 they are slow once somebody has asked an object for its ``__dict__``, as wrapping
        a function does, unless that dict was made apart.
        """
        self.__dict__ = dict(self.__dict__)

    def _twin(self) -> Self:
        """A copy to change; cheaper than reading the function's signature again."""
        twin = object.__new__(type(self))
        twin.__dict__ = dict(self.__dict__)
        return twin

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the code, stable over processes: tells whether a deploy changed it."""
        return fingerprint(self.fn)

    @property
    def place(self) -> str:
        """``file:line`` of the definition."""
        code = self.fn.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


class Activity(_Handler[P, R]):
    """A unit of real work: runs at least once, may do anything.

    Called inside an orchestration it is scheduled durably; called anywhere else it runs the plain
    function.
    """

    kind = "activity"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        options: ActivityOptions | None = None,
    ) -> None:
        super().__init__(fn, name)
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise UsageError(f"activity {self.name!r} is a generator: return the values instead")
        self.is_async: bool = inspect.iscoroutinefunction(fn)
        self.settings = options or ActivityOptions()
        if self.is_async and self.settings.executor is not None:
            raise UsageError(
                f"activity {self.name!r} is async and runs on the event loop; "
                f"executor={self.settings.executor!r} is for sync functions"
            )
        self.bounds = _bounds(self.settings)
        """What travels with the work item: retry plan, timeout, heartbeat and deadline in ms."""
        self._settle()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Step[R]:
        recorder = find_recorder()
        if recorder is None:
            plain: Any = self.fn(*args, **kwargs)
            return plain  # type: ignore[no-any-return]
        step: Step[R] = recorder.schedule_activity(self, args, kwargs)
        return step

    def options(
        self,
        *,
        retry: Retry | None = KEPT,
        timeout: float | None = KEPT,
        heartbeat_timeout: float | None = KEPT,
        deadline: float | None = KEPT,
        tag: str | None = KEPT,
        session: str | None = KEPT,
    ) -> Activity[P, R]:
        """The same activity with other options; None takes one away."""
        changes = {
            "retry": retry,
            "timeout": timeout,
            "heartbeat_timeout": heartbeat_timeout,
            "deadline": deadline,
            "tag": tag,
            "session": session,
        }
        given = {name: value for name, value in changes.items() if value is not KEPT}
        twin = self._twin()
        twin.settings = self.settings.changed(**given)
        twin.bounds = _bounds(twin.settings)
        return twin

    def __repr__(self) -> str:
        return f"<activity {self.name!r} at {self.place}>"


def _bounds(
    settings: ActivityOptions,
) -> tuple[work.RetryPlan | None, int | None, int | None, int | None]:
    plan = None if settings.retry is None else settings.retry.plan()
    return plan, settings.timeout_ms, settings.heartbeat_ms, settings.deadline_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How an orchestration is started from another one."""

    id: str | None = None
    version: str | None = None
    on_parent_close: OnParentClose = "cancel"

    def __post_init__(self) -> None:
        if self.id is not None:
            limits.check_id(self.id, "id")
        if self.version is not None:
            parse_version(self.version)
        if self.on_parent_close not in {"cancel", "abandon"}:
            raise InvalidValue(
                f"on_parent_close must be 'cancel' or 'abandon', not {self.on_parent_close!r}"
            )


class Orchestration(_Handler[P, R]):
    """A durable async function. Called inside another orchestration it runs as its child."""

    kind = "orchestration"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        version: str = VERSION_DEFAULT,
    ) -> None:
        super().__init__(fn, name)
        if not inspect.iscoroutinefunction(fn):
            raise UsageError(f"orchestration {self.name!r} must be an async def")
        parse_version(version)
        self.version: str = version
        self.call = CallOptions()
        self._settle()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Step[R]:
        recorder = find_recorder()
        if recorder is None:
            raise NotInOrchestration(
                f"orchestration {self.name!r} was called outside of an orchestration; "
                f"start it with runtime.start({self.fn.__name__}, ...)"
            )
        step: Step[R] = recorder.schedule_child(self, args, kwargs)
        return step

    def options(
        self,
        *,
        id: str | None = KEPT,  # noqa: A002
        version: str | None = KEPT,
        on_parent_close: OnParentClose = KEPT,
    ) -> Orchestration[P, R]:
        """The same orchestration, called under another id, version or parent-close policy."""
        changes: dict[str, Any] = {
            "id": id,
            "version": version,
            "on_parent_close": on_parent_close,
        }
        given = {name: value for name, value in changes.items() if value is not KEPT}
        twin = self._twin()
        twin.call = replace(self.call, **given)
        return twin

    def __repr__(self) -> str:
        return f"<orchestration {self.name!r} {self.version} at {self.place}>"
