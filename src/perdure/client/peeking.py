"""Look into the code of an instance: replay its history and read a local variable.

Nothing is written and no activity runs. An expression names a variable and a path into its value;
it runs no code.
"""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
from collections import deque
from contextlib import contextmanager
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, Final

from perdure.authoring.definitions import Registry
from perdure.client.checks import opened, read_recorded
from perdure.engine.execution import Execution
from perdure.errors import InstanceFinished, InvalidValue, NotFound, UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from perdure.authoring import Orchestration
    from perdure.client.checks import Recorded
    from perdure.client.client import Client
    from perdure.codec import Codec
    from perdure.engine.waits import Scope
    from perdure.providers.contract import Provider

_a_tuple_field: Any = inspect.getattr_static(inspect.FullArgSpec, "args")
_FIELDS: Any = (MemberDescriptorType, GetSetDescriptorType, type(_a_tuple_field))
"""Descriptors that only read a field."""
_SEQUENCES: Any = (list, tuple, str, bytes, deque)
_ITEMS: Any = dict[Any, Any].items
_SHOWN_MAX: Final = 20
_EXAMPLES: Final = "items, items[0], order.total, orders['o-1'].lines[-1]"
_Step = tuple[str, Any]


@contextmanager
def replayed(recorded: Recorded, registry: Registry, codec: Codec) -> Generator[Execution]:
    """Yield the execution as its last turn left it."""
    recorded = opened(recorded, codec)
    handler = registry.resolve_orchestration(recorded.name, recorded.version)
    execution = Execution.replay(handler, recorded.history, kv=recorded.kv, codec=codec)
    try:
        yield execution
    finally:
        execution.close()


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
    name, path = parse(expression)
    info = await provider.admin.get_instance_info(instance_id)
    if info.status.is_final:
        raise InstanceFinished(
            f"{instance_id!r} has ended ({info.status}): its variables are gone; its result stays"
        )
    recorded = await read_recorded(provider, info)
    with replayed(recorded, registry, codec) as execution:
        if execution.is_finished:
            raise NotFound(f"no code of {instance_id!r} is suspended: its next turn is on the way")
        value = follow(find(name, execution.scopes(), instance_id), path, name)
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise InvalidValue(
                f"{expression!r} is {shown(value)}, which cannot be copied: {error}; name a part "
                "of it"
            ) from error


def find(name: str, scopes: Sequence[Scope], instance_id: str) -> Any:
    """Return the variable of the outermost function that has it; the orchestration comes first."""
    for scope in scopes:
        if name in scope.variables:
            return scope.variables[name]
    known = sorted({each for scope in scopes for each in scope.variables})
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(known[:_SHOWN_MAX]) or "none"
    more = f" and {len(known) - _SHOWN_MAX} more" if len(known) > _SHOWN_MAX else ""
    raise InvalidValue(
        f"the code of {instance_id!r} has no variable {name!r} now{meant}; it has: {listed}{more}"
    )


# --- expressions


def parse(expression: object) -> tuple[str, list[_Step]]:
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


def follow(value: Any, path: Sequence[_Step], so_far: str) -> Any:
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
