"""A stable hash of the code of a handler: equal in every process, independent of line numbers.

It shows that a deploy changed the code, so that an instance which the old code could not continue
is tried again. It is computed from the code in memory, never from files: a deploy may replace the
files while the old code still runs.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections import deque
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, cast, get_args, get_origin

from perdure.own_types import is_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_VISITS_MAX: Final = 5000
_PLAIN: Final = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
_DEPTH_MAX: Final = 8
_MEMBERS_MAX: Final = 1000
_NAME: Final = re.compile(r"[^\W\d]\w*")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(fn: Callable[..., Any]) -> str:
    """Return a hash of the function and of everything that it uses in the modules of the author."""
    import hashlib  # slow to load, and only a runtime needs it

    digest = hashlib.blake2b(digest_size=16)
    for part in _Walk(cast("FunctionType", fn)).parts():
        digest.update(part.encode("utf-8", "backslashreplace"))
        digest.update(b"\0")
    return digest.hexdigest()


class _Walk:
    """Visits functions and classes breadth first, in an order that depends on the code alone."""

    def __init__(self, fn: FunctionType) -> None:
        spec = fn.__globals__.get("__spec__")
        # Code that was made by exec() has no module.
        module = cast("str | None", fn.__module__) or ""
        # A module that is run by python -m has the name __main__ besides its own.
        name: str = module if spec is None else spec.name
        self._packages = {module.partition(".")[0], name.partition(".")[0]}
        self._waiting: deque[Any] = deque([fn])
        self._seen: dict[int, Any] = {}

    def parts(self) -> Iterator[str]:
        while self._waiting and len(self._seen) < _VISITS_MAX:
            value = self._waiting.popleft()
            if id(value) in self._seen or not self._is_authors(value):
                continue
            self._seen[id(value)] = value  # kept alive: the id of a freed object is used again
            if isinstance(value, FunctionType):
                yield from self._function(value)
            else:
                yield from self._class(value)

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield function.__qualname__
        yield from _code_parts(function.__code__)
        names = sorted(set(_names(function.__code__)))
        for name, annotation in _annotations(function).items():
            yield f"{name}: {self._annotation(annotation, function.__globals__)}"
        for default in function.__defaults__ or ():
            yield self._constant(default)
        for name, default in (function.__kwdefaults__ or {}).items():
            yield f"{name}={self._constant(default)}"
        for name, value in _captured(function):
            yield f"{name}={self._variable(value, names)}"
        for name in names:
            if name in function.__globals__:
                yield f"{name}={self._variable(function.__globals__[name], names)}"

    def _class(self, kind: Any) -> Iterator[str]:
        yield f"class {kind.__qualname__}"
        self._waiting.extend(kind.__bases__)
        module = sys.modules.get(kind.__module__)
        scope = {} if module is None else vars(module)
        for name, annotation in _annotations(kind).items():
            yield f"{name}: {self._annotation(annotation, scope)}"
        for name, default in _fields(kind):
            yield f"{name}={self._constant(default)}"
        members = cast("dict[str, Any]", vars(kind))
        for name in sorted(members):
            value = members[name]
            is_special = name.startswith("__") and name.endswith("__")
            for function in _functions_of(value):
                # The code of a generated method follows from the fields.
                if not (is_special and function.__code__.co_filename.startswith("<")):
                    self._waiting.append(function)
            if not is_special:
                yield f"{name}={self._variable(value, [])}"

    def _variable(self, value: Any, names: list[str], depth: int = 0) -> str:
        kind = cast("type[object]", type(value))
        if issubclass(kind, ModuleType):
            return self._module(value, names, depth)
        text = self._constant(value)
        # The members of these may change while the program runs, so only code in them counts.
        return "" if issubclass(kind, (list, dict, set)) else text

    def _module(self, module: ModuleType, names: list[str], depth: int) -> str:
        """Return the members that the code names; others may depend on what was imported so far."""
        if depth > _DEPTH_MAX or not self._is_authors_module(module.__name__):
            return ""
        members = vars(module)
        found = [name for name in names if name in members and not name.startswith("__")]
        return ";".join(f"{n}={self._variable(members[n], names, depth + 1)}" for n in found)

    def _constant(self, value: Any) -> str:
        try:
            return self._value(value, 0)
        except Exception:  # noqa: BLE001  # a proxy that must not be inspected here
            return ""

    def _value(self, value: Any, depth: int) -> str:
        """Return the text of a constant; functions and classes are queued for a visit."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, partial):
            parts = cast("Any", value)
            value = [parts.func, parts.args, parts.keywords]
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._container(cast("Any", value), depth + 1)
        functions = list(_functions_of(value))
        if functions or isinstance(value, type):
            self._waiting.extend(functions or [value])
            return ",".join(function.__qualname__ for function in functions)
        self._waiting.append(type(value))
        return type(value).__qualname__

    def _container(self, value: Any, depth: int) -> str:
        if depth > _DEPTH_MAX or len(value) > _MEMBERS_MAX:
            return f"{len(value)}"
        members: list[Any] = list(value.items() if hasattr(value, "items") else value)
        texts = [self._value(member, depth) for member in members]
        if not hasattr(value, "__getitem__"):
            texts.sort()  # a set
        return f"[{','.join(texts)}]"

    def _annotation(self, annotation: Any, scope: dict[str, Any]) -> str:
        if isinstance(annotation, str):
            for name in _NAME.findall(annotation):
                if isinstance(scope.get(name), type):
                    self._waiting.append(scope[name])
            return annotation
        # The parameters of a Callable are a list.
        kind = cast("Any", type(annotation))
        arguments: Any = annotation if kind is list else get_args(annotation)
        if arguments:
            inner = ",".join(self._annotation(argument, scope) for argument in arguments)
            return f"{self._annotation(get_origin(annotation), scope)}[{inner}]"
        if isinstance(annotation, type):
            self._waiting.append(annotation)
            return annotation.__qualname__
        return _ADDRESS.sub("", repr(annotation))

    def _is_authors(self, value: Any) -> bool:
        return self._is_authors_module(getattr(value, "__module__", None) or "")

    def _is_authors_module(self, name: str) -> bool:
        package = name.partition(".")[0]
        if package in self._packages:
            return True
        if package in sys.stdlib_module_names or package in {"", "perdure"}:
            return False
        file: str | None = getattr(sys.modules.get(name), "__file__", None)
        return file is not None and not _INSTALLED.intersection(re.split(r"[/\\]", file))


_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a callable or descriptor."""
    found: tuple[Any, ...] = (value,)
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        found = (cast("Any", value).__func__,)
    elif isinstance(value, property):
        found = (value.fget, value.fset, value.fdel)
    elif isinstance(value, cached_property):
        found = (cast("Any", value).func,)
    elif not isinstance(value, (FunctionType, type)):
        # A decorated handler or a cached function wraps the function.
        members: Any = getattr(value, "__dict__", None) or {}
        found = (members.get("fn"), members.get("__wrapped__"))
    yield from (function for function in found if isinstance(function, FunctionType))


def _captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not bound yet


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _code_parts(code: CodeType) -> Iterator[str]:
    yield code.co_name
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):
            members = cast("frozenset[object]", constant)
            yield repr(sorted(map(repr, members)))
        else:
            yield repr(constant)


def _annotations(value: Any) -> dict[str, Any]:
    """Return the annotations as written; an empty dict if they cannot be evaluated."""
    try:
        return inspect.get_annotations(value)
    except Exception:  # noqa: BLE001  # evaluated lazily, by code of the author
        return {}


def _fields(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and defaults of the fields, or the members of an enumeration."""
    if issubclass(kind, enum.Enum):
        for name, member in kind.__members__.items():
            yield name, member.value
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            yield field.name, (field.default, field.default_factory)
    else:
        yield from _foreign_fields(cast("Any", kind))


def _foreign_fields(kind: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(kind, "__struct_fields__"):  # msgspec
        yield from zip(
            reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False
        )
    elif hasattr(kind, "__attrs_attrs__"):
        for attribute in kind.__attrs_attrs__:
            yield attribute.name, attribute.default
    elif is_model(kind):
        for name, field in kind.model_fields.items():
            yield name, (field.is_required(), field.default, field.default_factory, field.alias)
