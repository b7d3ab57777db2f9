"""Finds values that would not come back equal after writing as JSON and reading by annotation."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeGuard,
    Union,
    cast,
    get_args,
    get_origin,
)
from uuid import UUID

import msgspec
import msgspec.inspect

from perdure.pydantic_models import is_model

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_PLAIN: Final = _SCALARS | {bytes, Decimal, UUID, date, datetime, time, timedelta}
_ROWS: Final = frozenset({list, tuple})
_DATA: Final = _SCALARS | _ROWS | {dict}
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset, dict})
_SHOWN_CHARACTERS: Final = 120


def is_plain(annotation: Any) -> bool:
    """Return True if every value that fits the annotation comes back equal."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None and _is_one_of(annotation, _PLAIN):
        return True
    if origin is Annotated:
        return is_plain(parts[0])
    if origin is Literal:
        return True
    if origin is Union or origin is types.UnionType:
        return all(_is_one_of(part, _SCALARS) for part in parts)
    if origin in _CONTAINERS:
        return all(part is Ellipsis or is_plain(part) for part in parts)
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _is_one_of(annotation: Any, kinds: frozenset[Any]) -> bool:
    return isinstance(annotation, type) and annotation in kinds


def unreadable_classes(annotation: Any) -> list[type]:
    """Return the classes in the annotation that no value can be read as."""
    found: list[type] = []
    waiting: list[Any] = [msgspec.inspect.type_info(annotation)]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        kind = _kind(part)
        if kind is tuple:
            waiting.extend(part)
        elif isinstance(part, (msgspec.inspect.Type, msgspec.inspect.Field)):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, msgspec.inspect.UnionType):
                # An unreadable member of a union is harmless beside a readable one.
                readable = tuple(each for each in part.types if not _is_unreadable(each))
                waiting.append(readable or part.types)
            elif _is_unreadable(part):
                found.append(part.cls)
            else:
                waiting.extend(getattr(part, name) for name in part.__struct_fields__)
    return found


def _is_unreadable(part: Any) -> TypeGuard[msgspec.inspect.CustomType]:
    return (
        isinstance(part, msgspec.inspect.CustomType)
        and part.cls is not object
        and not is_model(part.cls)
    )


def difference(written: Any, read: Any, path: str) -> str | None:
    """Return the first place at which another value would come back, and the way out.

    A tuple may come back as a list, a mapping as a dict, and plain data as the annotated type:
    these lose nothing.
    """
    if _is_equal(written, read):
        return None
    kind, kind_read = _kind(written), _kind(read)
    if kind_read is dict and issubclass(kind, Mapping):
        return _missing_key(written, read, path) or _first(
            difference(written[key], read[key], f"{path}[{key!r}]") for key in written
        )
    if kind in _ROWS and kind_read in _ROWS and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return _first(difference(mine, back, f"{path}[{n}]") for n, (mine, back) in pairs)
    if kind is kind_read:
        return _first(
            difference(getattr(written, name), getattr(read, name), f"{path}.{name}")
            for name in field_names(written) or ()
        )
    if kind in _DATA:
        return None
    return (
        f"{path}: {_shown(written)} would come back as {_shown(read)}; values are read back by "
        f"annotation: annotate {kind.__qualname__}"
    )


def field_names(value: Any) -> tuple[str, ...] | None:
    """Return the field names of a value that is written field by field, or None."""
    kind = cast("Any", type(value))
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    if hasattr(kind, "__attrs_attrs__"):
        return tuple(attribute.name for attribute in kind.__attrs_attrs__)
    return None


def _kind(value: object) -> type[Any]:
    """Return ``type(value)`` without the narrowing that type checkers apply to comparisons."""
    return type(value)


def _is_equal(written: Any, read: Any) -> bool:
    try:
        return bool(written == read)
    except Exception:  # noqa: BLE001 - code of the author compares
        return False


def _missing_key(written: Mapping[Any, Any], read: Mapping[Any, Any], path: str) -> str | None:
    for key in written:
        if key not in read:
            return (
                f"{path}: the key {key!r} would not come back; values are read back by annotation: "
                "annotate a type that has it, or dict[type of the keys, type of the values]"
            )
    return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the repr is code of the author
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
