"""``@activity`` and ``@orchestration``, the typed handlers that they make, and their registry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable as IterableABC
from dataclasses import dataclass, replace
from functools import cached_property, partial, update_wrapper
from inspect import getattr_static
from types import MappingProxyType, MethodType, ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from perdure import limits
from perdure.authoring.context import Step, find_recorder
from perdure.authoring.fingerprint import fingerprint
from perdure.authoring.policies import ActivityOptions, Executor, Keep, Retry, parse_keep
from perdure.authoring.signature import HandlerSignature
from perdure.codec import JSON, Codec
from perdure.errors import (
    InvalidValue,
    NotInOrchestration,
    NotRegistered,
    UsageError,
    did_you_mean,
)
from perdure.model.work import JOB_PREFIX, JOB_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from perdure.arguments import Duration
    from perdure.model.status import Status

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

OnParentClose: TypeAlias = Literal["cancel", "abandon"]

VERSION_DEFAULT: Final = "1.0.0"
_VERSION = re.compile(r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})", re.ASCII)


class _Unchanged:
    """Default of an option that is not changed; None is a value that can be set."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final[Any] = _Unchanged()


def parse_version(version: object) -> tuple[int, int, int]:
    """Return the numbers of MAJOR.MINOR.PATCH; raise InvalidValue for another form."""
    matched = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if matched is None:
        raise InvalidValue(f"a version has the form MAJOR.MINOR.PATCH, e.g. '1.0.0': {version!r}")
    major, minor, patch = matched.groups()
    return int(major), int(minor), int(patch)


class _Handler(Generic[P, R]):
    """Base of both kinds of handler: a name, a function, and its arguments as JSON."""

    kind: str

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None,
        stands_for: HandlerSignature | None = None,
    ) -> None:
        if not inspect.isfunction(fn):
            raise UsageError(
                f"@{self.kind} takes a plain function, not {fn!r}{_way_out(self.kind, fn)}"
            )
        self.fn: Callable[P, Any] = fn
        """The plain function; if it is async, it returns a coroutine."""
        self.name: str = limits.check_id(fn.__name__ if name is None else name, "name")
        self.signature = HandlerSignature(fn, f"{self.kind} {self.name!r}", stands_for)
        update_wrapper(cast("Any", self), fn)

    def _rebuild_dict(self) -> None:
        """Make attribute access fast; called when every attribute is set.

        Up to Python 3.12, attributes are slow once ``__dict__`` of an object was read, as
        update_wrapper() does, unless the dict was created separately.
        """
        self.__dict__ = dict(self.__dict__)

    def _copy(self) -> Self:
        """Return a copy to change; cheaper than reading the signature of the function again."""
        copy = object.__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        return copy

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the code, equal in every process: it differs after a deploy changed the code."""
        return fingerprint(self.fn)

    @property
    def place(self) -> str:
        """``file:line`` of the definition."""
        code = cast("Any", self).__wrapped__.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


class Activity(_Handler[P, R]):
    """A unit of real work: runs at least once, may do anything.

    Called inside an orchestration it is scheduled durably; called anywhere else it runs the plain
    function. It may be a method: orchestrations call it on the class, ``Billing.charge(order)``,
    and a runtime runs it on the object that is registered, ``Runtime(store, [Billing(pool)])``.
    """

    kind = "activity"
    has_other_options = False
    """True for a result of ``options()``."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        options: ActivityOptions | None = None,
        stands_for: HandlerSignature | None = None,
    ) -> None:
        super().__init__(fn, name, stands_for)
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise UsageError(f"activity {self.name!r} is a generator: return the values instead")
        self.is_async: bool = inspect.iscoroutinefunction(fn)
        self.settings = options or ActivityOptions()
        if self.is_async and self.settings.executor is not None:
            raise UsageError(
                f"activity {self.name!r} is async and runs on the event loop; "
                f"executor={self.settings.executor!r} is for sync functions"
            )
        self.is_unbound: bool = self.signature.is_method
        """It is a method without its object."""
        needs_worker = self.is_unbound or self.signature.resources
        if self.settings.executor == "process" and needs_worker:
            raise UsageError(
                f"activity {self.name!r} runs in a process, which has neither the objects nor the "
                "resources of the worker: make it a plain function, or use executor='thread'"
            )
        self.bounds = self.settings.bounds()
        self._rebuild_dict()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Step[R]:
        recorder = find_recorder()
        if recorder is None:
            self._check_plain_call(kwargs)
            plain: Any = self.fn(*args, **kwargs)
            return plain  # type: ignore[no-any-return]
        step: Step[R] = recorder.schedule_activity(self, args, kwargs)
        return step

    def _check_plain_call(self, kwargs: dict[str, Any]) -> None:
        if self.is_unbound:
            raise UsageError(
                f"activity {self.name!r} is a method: outside of orchestrations, call it on an "
                "object"
            )
        missing = [name for name in self.signature.resources if name not in kwargs]
        if missing:
            passed = ", ".join(f"{name}=..." for name in missing)
            raise UsageError(
                f"activity {self.name!r} gets {', '.join(missing)} from a runtime: where you call "
                f"it directly, pass {passed}"
            )

    def __get__(
        self: Activity[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Activity[Q, R]:
        """Return the activity of an object, if it is a method; itself for the class."""
        if instance is None or not self.is_unbound:
            return cast("Activity[Q, R]", self)
        copy = self._copy()
        copy.fn = MethodType(self.fn, instance)
        copy.is_unbound = False
        return cast("Activity[Q, R]", copy)

    @cached_property
    def job(self) -> Job[P, R]:
        """The orchestration that runs this activity and nothing else."""
        return Job(self)

    def with_resources(self, available: Sequence[object]) -> Activity[P, R]:
        """Return the activity with those of the resources that its function takes."""
        found = self.signature.find_resources(available)
        if not found:
            return self
        copy = self._copy()
        copy.fn = cast("Callable[P, Any]", partial(cast("Callable[..., Any]", self.fn), **found))
        return copy

    def options(
        self,
        *,
        retry: Retry | None = UNCHANGED,
        timeout: Duration | None = UNCHANGED,
        heartbeat_timeout: Duration | None = UNCHANGED,
        deadline: Duration | None = UNCHANGED,
        tag: str | None = UNCHANGED,
        session: str | None = UNCHANGED,
    ) -> Activity[P, R]:
        """Return the same activity with other options; None removes one."""
        changes: dict[str, Any] = {
            "retry": retry,
            "timeout": timeout,
            "heartbeat_timeout": heartbeat_timeout,
            "deadline": deadline,
            "tag": tag,
            "session": session,
        }
        given = {name: value for name, value in changes.items() if value is not UNCHANGED}
        copy = self._copy()
        copy.has_other_options = True
        copy.settings = replace(self.settings, **given)
        copy.bounds = copy.settings.bounds()
        return copy

    def __repr__(self) -> str:
        return f"<activity {self.name!r} at {self.place}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of an orchestration that is called from another one."""

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
        keep: Keep | None = None,
    ) -> None:
        super().__init__(fn, name)
        if not inspect.iscoroutinefunction(fn):
            raise UsageError(f"orchestration {self.name!r} must be an async def")
        if self.signature.is_method or self.signature.resources:
            raise UsageError(
                f"orchestration {self.name!r} must be a function without self and RESOURCE: only "
                "activities use objects of the worker"
            )
        parse_version(version)
        self.version: str = version
        self.keep = parse_keep(keep, f"keep of orchestration {self.name!r}")
        """Milliseconds for which instances are kept, by the status with which they ended."""
        self.call = CallOptions()
        self._rebuild_dict()

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
        id: str | None = UNCHANGED,  # noqa: A002
        version: str | None = UNCHANGED,
        on_parent_close: OnParentClose = UNCHANGED,
    ) -> Orchestration[P, R]:
        """Return the same orchestration with another id, version or parent-close policy."""
        changes: dict[str, Any] = {
            "id": id,
            "version": version,
            "on_parent_close": on_parent_close,
        }
        given = {name: value for name, value in changes.items() if value is not UNCHANGED}
        copy = self._copy()
        copy.call = replace(self.call, **given)
        return copy

    def __repr__(self) -> str:
        return f"<orchestration {self.name!r} {self.version} at {self.place}>"


class Job(Orchestration[P, R]):
    """The orchestration that runs one activity and nothing else: ``start(activity, ...)``."""

    def __init__(self, activity: Activity[P, R]) -> None:
        async def run(*args: Any, **kwargs: Any) -> Any:
            called: Any = activity
            return await called(*args, **kwargs)

        super().__init__(_any_job, name=limits.check_prefixed(JOB_PREFIX, activity.name, "name"))
        self.fn = cast("Callable[P, Any]", run)
        self.signature = activity.signature
        self._activity = activity
        self._rebuild_dict()

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the activity: its parameters decide if a stored start can be read."""
        return fingerprint(cast("Any", self._activity).__wrapped__)

    @property
    def place(self) -> str:
        return self._activity.place


async def _any_job() -> None:
    """Stand for the function of a job, which has the parameters of its activity."""


class ActivityDecorator(Protocol):
    """The type of ``@activity(...)``: turns a sync or async function into an activity."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Activity[P, R]: ...


class OrchestrationDecorator(Protocol):
    """The type of ``@orchestration(...)``: turns an async function into an orchestration."""

    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Orchestration[P, R]: ...


@overload
def activity(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...
@overload
def activity(fn: Callable[P, R], /) -> Activity[P, R]: ...
@overload
def activity(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    heartbeat_timeout: Duration | None = None,
    deadline: Duration | None = None,
    tag: str | None = None,
    session: str | None = None,
    executor: Executor | None = None,
    transactional: bool = False,
    raises: Iterable[type[Exception]] = (),
) -> ActivityDecorator: ...
def activity(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any
) -> Any:
    """Make a sync or async function an activity: real work, called durably from orchestrations.

    Times are numbers of seconds, or timedeltas. ``timeout`` bounds one attempt, ``deadline`` all
    of them. The orchestration sees the exceptions of ``raises`` as they were raised, others as
    ``ActivityFailed``:

        @activity(retry=Retry(max_attempts=5), timeout=30, raises=[CardDeclined])
        def charge(order: str, cents: int) -> str: ...
    """
    settings = ActivityOptions.of(options)

    def decorate(function: Callable[..., Any]) -> Activity[Any, Any]:
        return Activity(function, name=name, options=settings)

    return decorate if fn is None else decorate(fn)


@overload
def orchestration(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Orchestration[P, R]: ...
@overload
def orchestration(
    *, name: str | None = None, version: str = VERSION_DEFAULT, keep: Keep | None = None
) -> OrchestrationDecorator: ...
def orchestration(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = VERSION_DEFAULT,
    keep: Keep | None = None,
) -> Any:
    """Make an ``async def`` durable: it survives crashes and deploys.

    A running instance stays on the version that it began with. ``keep`` wins over the ``keep``
    of the runtime, and the one of the latest version counts:

        @orchestration(version="1.1.0", keep={"completed": "7d", "failed": "forever"})
        async def checkout(order: str) -> str: ...
    """

    def decorate(function: Callable[..., Any]) -> Orchestration[Any, Any]:
        return Orchestration(function, name=name, version=version, keep=keep)

    return decorate if fn is None else decorate(fn)


# --- the handlers of one runtime

Handler: TypeAlias = Activity[Any, Any] | Orchestration[Any, Any]
"""The type of a handler: ``handlers: list[Handler] = [checkout, charge]``."""


class Registry:
    """The handlers of a runtime, by name and version. There is no process-wide registry."""

    def __init__(
        self,
        handlers: Iterable[object] | Handler | ModuleType,
        built_in: Iterable[Handler] = (),
        pinned_versions: Mapping[str, str] = MappingProxyType({}),
        codec: Codec = JSON,
    ) -> None:
        self._pinned = pinned_versions
        self._activities: dict[str, Activity[Any, Any]] = {}
        self._orchestrations: dict[str, dict[str, Orchestration[Any, Any]]] = {}
        given = _listed(handlers)
        self.modules = [each for each in given if isinstance(each, ModuleType)]
        own = list(definitions_in(given))
        self.own_activities = len({each.name for each in own if isinstance(each, Activity)})
        """Number of activities that are not built in."""
        self.own_orchestrations = len(
            {(each.name, each.version) for each in own if isinstance(each, Orchestration)}
        )
        for handler in own:
            handler.signature.check_annotations(codec)
        for handler in (*own, *built_in):
            if isinstance(handler, Activity):
                self._add_activity(handler)
            else:
                self._add_orchestration(handler)
        for name, versions in self._orchestrations.items():
            oldest_first = sorted(versions, key=parse_version)
            self._orchestrations[name] = {version: versions[version] for version in oldest_first}
        for name, version in pinned_versions.items():
            self.resolve_orchestration(name, version)
        self.activity_names = frozenset(self._activities)
        self.orchestration_keys = frozenset(
            (name, version)
            for name, versions in self._orchestrations.items()
            for version in versions
        )
        """Name and version of every orchestration."""
        longest = limits.ID_CHARACTERS_MAX - len(JOB_PREFIX)
        names = (name for name in self._activities if len(name) <= longest)
        jobs = ((f"{JOB_PREFIX}{name}", JOB_VERSION) for name in names)
        self.startable_keys = self.orchestration_keys.union(jobs)
        """The same, and those of the jobs: an activity can be started as one."""

    def with_resources(self, available: Sequence[object]) -> Self:
        """Return these handlers; their activities have the resources that they take."""
        copy = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(copy, name, value)  # not copy.__dict__: it makes each attribute slower
        copy._activities = {
            name: activity.with_resources(available) for name, activity in self._activities.items()
        }
        return copy

    def incompatible_versions(self) -> Iterator[str]:
        """Yield a warning for each latest version that cannot read arguments of an older one."""
        for name, versions in self._orchestrations.items():
            *older, (latest, orchestration) = versions.items()
            for version, before in older:
                missing = orchestration.signature.missing_from(before.signature)
                if missing is not None:
                    yield (
                        f"orchestration {name!r} {latest} requires {missing!r}, which {version} "
                        f"does not have: what {version} continues as new, and what parents and "
                        "clients start as before, will be Blocked; give it a default"
                    )

    def resolve_orchestration(self, name: str, version: str | None) -> Orchestration[Any, Any]:
        """Return exactly that version; for None or an empty version the pinned or the latest one.

        The version is empty if the instance ended before one was chosen.
        """
        versions = self._orchestrations.get(name)
        if versions is None and name.startswith(JOB_PREFIX):
            return self.resolve_activity(name.removeprefix(JOB_PREFIX)).job
        if versions is None:
            raise NotRegistered(_unknown("orchestration", name, self._orchestrations))
        version = version or self._pinned.get(name)
        if not version:
            return next(reversed(versions.values()))
        found = versions.get(version)
        if found is None:
            known = ", ".join(versions)
            raise NotRegistered(
                f"orchestration {name!r} is not registered in version {version!r}; "
                f"registered versions: {known}"
            )
        return found

    def keeps(self) -> dict[str, dict[Status, int | None]]:
        """Return the ``keep`` of each orchestration that has one, by name: of its last version."""
        latest = (self.resolve_orchestration(name, None) for name in self._orchestrations)
        return {each.name: each.keep for each in latest if each.keep}

    def resolve_activity(self, name: str) -> Activity[Any, Any]:
        found = self._activities.get(name)
        if found is None:
            raise NotRegistered(_unknown("activity", name, self._activities))
        return found

    def _add_activity(self, handler: Activity[Any, Any]) -> None:
        if handler.is_unbound:
            raise UsageError(
                f"activity {handler.name!r} at {handler.place} is a method: register an object of "
                "its class instead, which then runs it"
            )
        known = self._activities.setdefault(handler.name, handler)
        if known.fn != handler.fn:
            raise UsageError(_clash(f"two activities are named {handler.name!r}", known, handler))

    def _add_orchestration(self, handler: Orchestration[Any, Any]) -> None:
        versions = self._orchestrations.setdefault(handler.name, {})
        known = versions.setdefault(handler.version, handler)
        if known.fn is not handler.fn:
            what = f"two orchestrations are named {handler.name!r} in version {handler.version}"
            raise UsageError(_clash(what, known, handler))


def _way_out(kind: str, given: object) -> str:
    match given:
        case str():
            return f"; write @{kind}(name={given!r})"
        case Retry():
            return f"; write @{kind}(retry=...)"
        case _Handler() | staticmethod() | classmethod():
            return "; leave one of the two decorators out"
        case partial():
            return "; write a function that calls it"
        case _:
            return ""


def _listed(handlers: Iterable[object] | Handler | ModuleType) -> list[object]:
    if isinstance(handlers, (Activity, Orchestration, ModuleType)):
        return [handlers]
    if isinstance(handlers, str) or not isinstance(handlers, IterableABC):
        raise InvalidValue(
            f"handlers are a list of functions with @activity or @orchestration, or of modules of "
            f"them; not {handlers!r}"
        )
    return list(handlers)


def definitions_in(handlers: Iterable[object] | Handler | ModuleType) -> Iterator[Handler]:
    """Yield each handler, the handlers that modules define, and the activities of objects."""
    for handler in _listed(handlers):
        if isinstance(handler, (Activity, Orchestration)):
            yield handler
        elif isinstance(handler, ModuleType):
            members: Iterable[Any] = vars(handler).values()
            found: list[Handler] = [v for v in members if isinstance(v, (Activity, Orchestration))]
            if not found:
                raise InvalidValue(f"module {handler.__name__!r} defines no handler")
            yield from found
        else:
            yield from _methods_of(handler)


def _methods_of(handler: object) -> Iterator[Handler]:
    """Yield the activities that are methods of an object."""
    kind = type(handler)
    names = [name for name in dir(kind) if isinstance(getattr_static(kind, name), Activity)]
    if not names:
        made = f"; register an object: {handler.__name__}()" if isinstance(handler, type) else ""
        raise InvalidValue(
            "a handler is a function with @activity or @orchestration, a module of them, or an "
            f"object with activities as methods; not {handler!r}{made}. Schedules go into "
            "schedules=[...], pools and clients into resources=[...]"
        )
    for name in names:
        yield getattr(handler, name)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(each for each in known if not each.startswith("perdure."))  # not built in
    meant = did_you_mean(name, names, most=3)
    listed = ", ".join(map(repr, names[:20])) or "none"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{kind} {name!r} is not registered{meant}; registered: {listed}{more}"


def _clash(what: str, first: Handler, second: Handler) -> str:
    return f"{what}: {first.place} and {second.place}; give one of them another name or version"
