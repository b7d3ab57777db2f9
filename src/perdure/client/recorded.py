"""Replays stored executions with the current code: to check the code, or to read its variables.

Nothing is written and no activity runs. An expression that looks into the code names a variable and
a path into its value; it runs no code.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.authoring.definitions import Orchestration, Registry
from perdure.client.moving import current_execution
from perdure.client.steps import started_of
from perdure.errors import (
    CorruptData,
    InstanceFinished,
    InvalidValue,
    Nondeterminism,
    NotFound,
    NotRegistered,
    PayloadError,
    UsageError,
    did_you_mean,
    shown,
)
from perdure.model import events, wire
from perdure.providers import rules
from perdure.providers.records import KvChange, KvClear, KvClearAll, KvEntry, KvSet
from perdure.providers.sealing import Sealing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from perdure.client.client import Client
    from perdure.codec import Codec
    from perdure.engine.execution import Execution
    from perdure.engine.waits import Scope
    from perdure.providers.contract import Provider
    from perdure.providers.records import InstanceInfo, InstanceSnapshot

Verdict: TypeAlias = Literal["ok", "diverges", "no code", "bad data"]

# --- recorded executions, and their replay


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded data that a replay needs."""

    instance_id: str
    name: str
    version: str
    history: list[events.Event]
    kv: dict[str, str]
    """State that the execution began with."""


async def read_recorded(provider: Provider, info: InstanceInfo) -> Recorded:
    """Return the current execution of an instance. Raises NotFound before its first turn.

    One read of the store gives all of it, so the instance may run at the same time.
    """
    records = await provider.read(info.instance_id)
    history = wire.decode_history(records)
    started = history[0] if history else None
    if isinstance(started, events.OrchestrationStarted) and _lacks_state(started):
        return recorded_in(await provider.admin.export_instance(info.instance_id))
    return recorded_history(info.instance_id, history)


def recorded_in(snapshot: InstanceSnapshot) -> Recorded:
    """Return the current execution of a snapshot."""
    execution = current_execution(snapshot)
    records = () if execution is None else execution.history
    history = wire.decode_history(records)
    return recorded_history(snapshot.instance_id, history, snapshot)


def recorded_history(
    instance_id: str, history: Sequence[events.Event], snapshot: InstanceSnapshot | None = None
) -> Recorded:
    """Return the recorded execution with this history. Raises NotFound if it is empty."""
    if not history:
        raise NotFound(f"{instance_id!r} has no history yet: no turn of it has run")
    started = started_of(history, "replay")
    return Recorded(
        instance_id=instance_id,
        name=started.name,
        version=started.version,
        history=list(history),
        kv={key: entry.value for key, entry in initial_state(started, snapshot).items()},
    )


def initial_state(
    started: events.OrchestrationStarted, snapshot: InstanceSnapshot | None
) -> dict[str, KvEntry]:
    """Return the state that the execution began with.

    History holds it. A history that was written before it did falls back on the snapshot, whose
    ``kv_store`` is right as long as the execution has not ended.
    """
    if _lacks_state(started):
        return {} if snapshot is None else dict(snapshot.kv_store)
    return {
        key: KvEntry(value=value, updated_at_ms=started.timestamp_ms)
        for key, value in (started.initial_state or {}).items()
    }


def _lacks_state(started: events.OrchestrationStarted) -> bool:
    return started.initial_state is None and started.execution_id > 1


class Written(NamedTuple):
    """The state and the custom status after a history."""

    kv_store: dict[str, KvEntry]
    """State that the execution began with."""
    kv_delta: dict[str, KvEntry | None]
    """Changes of the execution; None: cleared."""
    custom_status: str | None
    status_changes: int


def written_by(history: Sequence[events.Event], snapshot: InstanceSnapshot | None) -> Written:
    """Return the state and status that a history wrote, without the turns that a retry undid."""
    started = started_of(history, "read the state")
    kv_store, kv_delta = initial_state(started, snapshot), dict[str, KvEntry | None]()
    custom_status, status_changes = started.initial_custom_status, 0
    changes: list[KvChange] = []
    for event in events.without_undone(history):
        match event:
            case events.CustomStatusUpdated():
                custom_status, status_changes = event.status, status_changes + 1
            case events.KeyValueSet(key=key, value=value, timestamp_ms=now_ms):
                changes.append(KvSet(key=key, value=value, updated_at_ms=now_ms))
            case events.KeyValueCleared(key=key):
                changes.append(KvClear(key=key))
            case events.KeyValuesCleared():
                changes.append(KvClearAll())
            case _:
                pass
    rules.apply_kv_changes(kv_store, kv_delta, changes)
    return Written(kv_store, kv_delta, custom_status, status_changes)


def state_after(history: Sequence[events.Event]) -> tuple[dict[str, str] | None, str | None]:
    """Return the state and the custom status after that history.

    The state is None if an old history does not hold the one that it began with.
    """
    written = written_by(history, None)
    values = rules.merge_kv(written.kv_store, written.kv_delta)
    is_unknown = _lacks_state(started_of(history, "read the state"))
    state = None if is_unknown else {key: entry.value for key, entry in values.items()}
    return state, written.custom_status


def opened(recorded: Recorded, codec: Codec) -> Recorded:
    """Return the execution as the code sees it. In an export file it is sealed."""
    sealing = Sealing(codec, is_opening=True)
    instance_id = recorded.instance_id
    return msgspec.structs.replace(
        recorded,
        history=[sealing.record(event) for event in recorded.history],
        kv={
            key: sealing.json_text(text, instance_id, f"state {key}")
            for key, text in recorded.kv.items()
        },
    )


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay."""

    instance_id: str
    name: str
    version: str
    verdict: Verdict
    event_id: int | None = None
    """The recorded event that the code does not repeat."""
    recorded: str = ""
    performed: str = ""
    site: str = ""
    """``file:line`` in the current code, or of the recorded call."""
    report: str = ""


@contextmanager
def replayed(recorded: Recorded, registry: Registry, codec: Codec) -> Generator[Execution]:
    """Yield the execution as its last turn left it."""
    from perdure.engine.execution import Execution  # commands that only read do not load the engine

    recorded = opened(recorded, codec)
    handler = registry.resolve_orchestration(recorded.name, recorded.version)
    execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
    try:
        yield execution
    finally:
        execution.close()


@asynccontextmanager
async def suspended(
    provider: Provider, instance_id: str, registry: Registry, codec: Codec
) -> AsyncGenerator[Execution]:
    """Yield the execution of an instance that has not ended, as its last turn left it."""
    info = await provider.admin.get_instance_info(instance_id)
    if info.status.is_final:
        raise InstanceFinished(
            f"{instance_id!r} has ended ({info.status}): nothing waits, and its variables are gone;"
            " its result stays"
        )
    with replayed(await read_recorded(provider, info), registry, codec) as execution:
        yield execution


def check_replay(recorded: Recorded, registry: Registry, codec: Codec) -> ReplayResult:
    """Replay one execution and say whether the code repeats it."""
    names = {name: getattr(recorded, name) for name in ("instance_id", "name", "version")}
    try:
        with replayed(recorded, registry, codec):
            return ReplayResult(**names, verdict="ok")
    except Nondeterminism as error:
        at = error.mismatch
        return ReplayResult(
            **names,
            verdict="diverges",
            report=error.report,
            event_id=error.event_id,
            recorded=str(error) if at is None else at.recorded,
            performed="" if at is None else at.performed,
            site="" if at is None else at.site,
        )
    except NotRegistered as error:
        return ReplayResult(**names, verdict="no code", report=str(error))
    except (CorruptData, PayloadError) as error:
        return ReplayResult(**names, verdict="bad data", report=str(error))


# --- the variables of suspended code

_a_tuple_field: Any = inspect.getattr_static(inspect.FullArgSpec, "args")
_FIELDS: Any = (MemberDescriptorType, GetSetDescriptorType, type(_a_tuple_field))
"""Descriptors that only read a field."""
_SEQUENCES: Any = (list, tuple, str, bytes, deque)
_ITEMS: Any = dict[Any, Any].items
_SHOWN_MAX: Final = 20
_EXAMPLES: Final = "items, items[0], order.total, orders['o-1'].lines[-1]"
_Step = tuple[str, Any]


async def peek(
    client: Client, instance_id: str, expression: str, definition: Orchestration[..., Any] | None
) -> Any:
    """Return a copy of the value; the code comes from the runtime, or from the definition."""
    registry = getattr(client, "registry", None)
    if registry is None and definition is not None:
        registry = Registry([definition])
    if registry is None:
        raise UsageError(
            f"peek replays the code of {instance_id!r}, which a client does not have: write "
            f"client.get({instance_id!r}, its_orchestration).peek({expression!r})"
        )
    return await read_variable(client.provider, instance_id, expression, registry, client.codec)


async def read_variable(
    provider: Provider, instance_id: str, expression: str, registry: Registry, codec: Codec
) -> Any:
    """Return a copy of a variable of the suspended code, or of a part of it."""
    name, path = parse_expression(expression)
    async with suspended(provider, instance_id, registry, codec) as execution:
        if execution.is_finished:
            raise NotFound(f"no code of {instance_id!r} is suspended: its next turn is on the way")
        value = follow_path(find_variable(name, execution.scopes(), instance_id), path, name)
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise InvalidValue(
                f"{expression!r} is {shown(value)}, which cannot be copied: {error}; name a part "
                "of it"
            ) from error


def find_variable(name: str, scopes: Sequence[Scope], instance_id: str) -> Any:
    """Return the variable of the outermost function that has it; the orchestration comes first."""
    for scope in scopes:
        if name in scope.variables:
            return scope.variables[name]
    known = sorted({each for scope in scopes for each in scope.variables})
    meant = did_you_mean(name, known)
    listed = ", ".join(known[:_SHOWN_MAX]) or "none"
    more = f" and {len(known) - _SHOWN_MAX} more" if len(known) > _SHOWN_MAX else ""
    raise InvalidValue(
        f"the code of {instance_id!r} has no variable {name!r} now{meant}; it has: {listed}{more}"
    )


# --- expressions


def parse_expression(expression: object) -> tuple[str, list[_Step]]:
    """Return the variable and the attributes and items that follow it.

    Raises InvalidValue for everything else: nothing of the expression is executed.
    """
    problem = InvalidValue(f"{expression!r} names no variable, attribute or item; as {_EXAMPLES}")
    if not isinstance(expression, str):
        raise problem
    try:
        node: ast.expr = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise problem from None
    path: list[_Step] = []
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value=inner, attr=name) if not name.startswith("__"):
                path.append(("attribute", name))
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
                path.append(("item", key))
            case ast.Subscript(
                value=inner,
                slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as key)),
            ):
                path.append(("item", -key))
            case _:
                raise problem
        node = inner
    return node.id, path[::-1]


def follow_path(value: Any, path: Sequence[_Step], so_far: str) -> Any:
    """Return the part of the value, without running code of its class."""
    for kind, key in path:
        value = (_attribute if kind == "attribute" else _item)(value, key, so_far)
        so_far = f"{so_far}.{key}" if kind == "attribute" else f"{so_far}[{key!r}]"
    return value


def _attribute(value: Any, name: str, so_far: str) -> Any:
    try:
        found: Any = inspect.getattr_static(value, name)
    except AttributeError:
        kind = type(value).__name__
        raise InvalidValue(f"{so_far} is of class {kind}, which has no {name!r}") from None
    if isinstance(found, _FIELDS):
        try:
            return getattr(value, name)
        except AttributeError:
            raise InvalidValue(f"{so_far}.{name} has no value yet") from None
    # getattr_static returns what the class holds: a function or a property has __get__.
    if inspect.ismethoddescriptor(found) or inspect.isdatadescriptor(found) or callable(found):
        raise InvalidValue(f"{so_far}.{name} is code, which peek does not run; name a field")
    return found


def _item(value: Any, key: Any, so_far: str) -> Any:
    """Return the item. The methods are those of the builtin class: a subclass may run code."""
    builtin: Any = next((each for each in (dict, *_SEQUENCES) if isinstance(value, each)), None)
    try:
        if builtin is dict:
            return {name: each for name, each in _ITEMS(value) if name == key}[key]
        if builtin is not None:
            return builtin.__getitem__(value, key)
        why = f"is of class {type(value).__name__}"
    except (LookupError, TypeError) as error:
        why = "has no such key" if builtin is dict else str(error)
    raise InvalidValue(f"{so_far}[{key!r}] does not exist: {so_far} {why}")
