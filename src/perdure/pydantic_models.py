"""Writes pydantic models as JSON by alias, and refuses models that would not come back equal.

It never imports pydantic: a model can only exist if pydantic is loaded already.
"""

from __future__ import annotations

import reprlib
import sys
from typing import Any, Final, cast

import msgspec

from perdure.errors import PayloadError

_WAY_OUT: Final = (
    "what a model leaves out or masks when it writes JSON (SecretStr, exclude=True, an alias for "
    "one direction only) would be lost: give it a field_serializer, or pass a reference"
)


def is_model(type_: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return (
        pydantic is not None and isinstance(type_, type) and issubclass(type_, pydantic.BaseModel)
    )


def encode_model(value: Any, path: str) -> msgspec.Raw:
    """Return JSON that reads back as an equal model; raise PayloadError with the path if not."""
    problem = ""
    # A model may accept only the names of its fields, although it has aliases.
    for by_alias in (True, False):
        text: str = value.model_dump_json(by_alias=by_alias, round_trip=True, warnings=False)
        try:
            again = decode_model(type(value), msgspec.json.decode(text))
        except msgspec.ValidationError as error:
            problem = problem or f"{path}: {error}"
            continue
        difference = _difference(value, again, path)
        if difference is None:
            return msgspec.Raw(text.encode())
        problem = problem or difference
    raise PayloadError(f"{problem}; {_WAY_OUT}")


def decode_model(type_: Any, value: object) -> Any:
    """Return the model of a JSON value. Read as JSON text, as strict models then accept times."""
    try:
        return type_.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from error


def _difference(then: Any, now: Any, path: str) -> str | None:
    """Return the first difference of two values. Private attributes are not compared."""
    kind = cast("Any", type(then))
    if kind is type(now):
        if is_model(kind):
            return _first_difference(_members(then), _members(now), path, ".{}")
        if kind is dict and then.keys() == now.keys():
            return _first_difference(then, now, path, "[{!r}]")
        if kind in {list, tuple} and len(then) == len(now):
            return _first_difference(_numbered(then), _numbered(now), path, "[{}]")
        if getattr(kind, "__eq__") is object.__eq__:  # noqa: B009
            return None  # it equals only itself, so it cannot be compared
    if _is_equal(then, now):
        return None
    return f"{path}: {reprlib.repr(then)} would come back as {reprlib.repr(now)}"


def _first_difference(
    then: dict[Any, Any], now: dict[Any, Any], path: str, place: str
) -> str | None:
    for key, member in then.items():
        difference = _difference(member, now.get(key), path + place.format(key))
        if difference is not None:
            return difference
    return None


def _members(model: Any) -> dict[str, Any]:
    kind = cast("Any", type(model))
    names: list[str] = list(kind.model_fields)
    return {name: getattr(model, name, None) for name in names} | (model.model_extra or {})


def _numbered(values: list[Any] | tuple[Any, ...]) -> dict[int, Any]:
    return dict(enumerate(values))


def _is_equal(then: Any, now: Any) -> bool:
    try:
        return bool(then == now)
    except Exception:  # noqa: BLE001 - code of the author compares
        return False
