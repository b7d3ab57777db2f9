"""Writes values of classes that JSON does not know: paths, pydantic models, classes of the author.

Each is read back at once as a check: a value that would not come back equal is refused.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable as IterableABC
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, get_origin

import msgspec
import msgspec.inspect

from perdure.errors import PayloadError, UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_T = TypeVar("_T")
_S = TypeVar("_S")


class CodecType(Generic[_T]):
    """Says how a codec writes values of a class of your own, and how it reads them.

    ``encode`` returns a value of the type ``stored_as``, which JSON can hold. ``decode`` gets such
    a value back:

        Codec(types=[CodecType(Money, stored_as=str, encode=str, decode=Money.parse)])

    Equal values must be encoded equally, in every process: a replay compares what was written.
    """

    def __init__(
        self,
        cls: type[_T],
        *,
        stored_as: type[_S],
        encode: Callable[[_T], _S],
        decode: Callable[[_S], _T],
    ) -> None:
        if not isinstance(cast("object", cls), type):
            raise UsageError(f"CodecType() takes a class, not {shown(cls)}")
        for name, function in (("encode", encode), ("decode", decode)):
            if not callable(function):
                raise UsageError(
                    f"CodecType({cls.__qualname__}): {name} must be a function, not "
                    f"{shown(function)}"
                )
        if not _is_foreign(cls) or is_model(cls) or issubclass(cls, PurePath):
            raise UsageError(
                f"CodecType({cls.__qualname__}): values of this class are written as JSON already, "
                "so encode would not be called; leave it out, or give the values a class of its own"
            )
        self.cls = cls
        self._stored_as = stored_as
        self._encode = encode
        self._decode = decode

    def write(self, value: _T, path: str, types: OwnTypes) -> bytes:
        """Return the value as JSON; raise PayloadError if it would not come back equal."""
        data = self._written(value, path, types)
        again = self.read(msgspec.json.decode(data), types)
        is_comparable = type(value).__eq__ is not object.__eq__ and is_equal(value, value)
        if type(again) is not self.cls or (is_comparable and not is_equal(value, again)):
            raise PayloadError(
                f"{path}: {shown(value)} would come back as {shown(again)}; correct encode or "
                f"decode of CodecType({self.cls.__qualname__})"
            )
        if self._written(again, path, types) != data:
            raise PayloadError(
                f"{path}: {shown(value)} is written in another way when it has come back, so that "
                f"a replay would not know it; let encode of CodecType({self.cls.__qualname__}) "
                "write equal values equally"
            )
        return data

    def _written(self, value: _T, path: str, types: OwnTypes) -> bytes:
        try:
            return msgspec.json.encode(self._encode(value), enc_hook=types.encode)
        except Exception as error:
            raise PayloadError(
                f"{path}: encode of CodecType({self.cls.__qualname__}) failed for {shown(value)}: "
                f"{shown(error)}"
            ) from error

    def read(self, value: object, types: OwnTypes) -> _T:
        """Return the value of JSON data; raise ValidationError if it does not fit."""
        try:
            stored = msgspec.convert(value, self._stored_as, dec_hook=types.decode)
            return self._decode(stored)
        except Exception as error:
            raise msgspec.ValidationError(
                f"decode of CodecType({self.cls.__qualname__}) failed for {shown(value)}: "
                f"{shown(error)}"
            ) from error


class OwnTypes:
    """The classes that one codec can write although JSON does not know them."""

    def __init__(self, types: Iterable[CodecType[Any]] = ()) -> None:
        self._types: dict[type, CodecType[Any]] = {}
        if not isinstance(cast("object", types), IterableABC):
            raise UsageError(f"types takes a list of CodecType(...) objects, not {shown(types)}")
        for each in types:
            if not isinstance(cast("object", each), CodecType):
                raise UsageError(f"types takes CodecType(...) objects, not {shown(each)}")
            if each.cls in self._types:
                raise UsageError(f"there are two CodecType({each.cls.__qualname__}) in one codec")
            self._types[each.cls] = each

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(f"{each.__module__}.{each.__qualname__}" for each in self._types))

    def reads(self, type_: Any) -> bool:
        cls = get_origin(type_) or type_
        return cls is object or cls in self._types or is_model(cls) or issubclass(cls, PurePath)

    def write(self, value: Any, path: str) -> bytes | None:
        """Return JSON of a model or of an author's own class; None for other values."""
        own = self._types.get(cast("Any", type(value)))
        if own is not None:
            return own.write(value, path, self)
        return encode_model(value, path) if is_model(type(value)) else None

    def encode(self, value: Any) -> Any:
        """Return what msgspec writes for a value that it does not know."""
        if isinstance(value, PurePath):
            return str(value)
        data = self.write(value, type(value).__qualname__)
        if data is None:
            raise TypeError(
                f"{type(value).__qualname__} cannot be written as JSON; use a dataclass or "
                "plain values instead, or give the codec a CodecType for it"
            )
        return msgspec.Raw(data)

    def decode(self, type_: Any, value: Any) -> Any:
        """Return the value of a type that msgspec does not know."""
        if type_ is object:
            return value
        cls = get_origin(type_) or type_
        own = self._types.get(cls)
        if own is not None:
            return own.read(value, self)
        if is_model(cls):
            return decode_model(type_, value)
        if issubclass(cls, PurePath) and isinstance(value, str):
            return cls(value)
        raise msgspec.ValidationError(f"values of type {type_!r} cannot be read from JSON")


def _is_foreign(cls: type) -> bool:
    try:
        return isinstance(msgspec.inspect.type_info(cls), msgspec.inspect.CustomType)
    except Exception:  # noqa: BLE001 - an annotation of the class cannot be resolved
        return False


def attributes_of(value: Any) -> list[Any]:
    """Return the values of the attributes that an object has in its dict and its slots."""
    found = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += [getattr(value, name) for name in names if hasattr(value, name)]
    return found


def is_equal(written: Any, read: Any) -> bool:
    """Return the result of ``==``; False if the code of the author raises."""
    try:
        return bool(written == read)
    except Exception:  # noqa: BLE001 - code of the author compares
        return False


# --- pydantic models: written by alias, and refused if they would not come back equal

_MODEL_WAY_OUT: Final = (
    "what a model leaves out or masks when it writes JSON (SecretStr, exclude=True, an alias for "
    "one direction only) would be lost: give it a field_serializer, or pass a reference"
)


def is_model(type_: Any) -> bool:
    """Return True for a pydantic model. A model can only exist if pydantic is loaded already."""
    pydantic = sys.modules.get("pydantic")
    return (
        pydantic is not None and isinstance(type_, type) and issubclass(type_, pydantic.BaseModel)
    )


def encode_model(value: Any, path: str) -> bytes:
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
        difference = _model_difference(value, again, path)
        if difference is None:
            return text.encode()
        problem = problem or difference
    raise PayloadError(f"{problem}; {_MODEL_WAY_OUT}")


def decode_model(type_: Any, value: object) -> Any:
    """Return the model of a JSON value. Read as JSON text, as strict models then accept times."""
    try:
        return type_.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from error


def _model_difference(then: Any, now: Any, path: str) -> str | None:
    """Return the first difference of two values. Private attributes are not compared."""
    kind = cast("Any", type(then))
    if kind is type(now):
        if is_model(kind):
            return _first_member_difference(_members(then), _members(now), path, ".{}")
        if kind is dict and then.keys() == now.keys():
            return _first_member_difference(then, now, path, "[{!r}]")
        if kind in {list, tuple} and len(then) == len(now):
            return _first_member_difference(_numbered(then), _numbered(now), path, "[{}]")
        if getattr(kind, "__eq__") is object.__eq__:  # noqa: B009
            return None  # it equals only itself, so it cannot be compared
    if is_equal(then, now):
        return None
    return f"{path}: {reprlib.repr(then)} would come back as {reprlib.repr(now)}"


def _first_member_difference(
    then: dict[Any, Any], now: dict[Any, Any], path: str, place: str
) -> str | None:
    for key, member in then.items():
        difference = _model_difference(member, now.get(key), path + place.format(key))
        if difference is not None:
            return difference
    return None


def _members(model: Any) -> dict[str, Any]:
    kind = cast("Any", type(model))
    names: list[str] = list(kind.model_fields)
    return {name: getattr(model, name, None) for name in names} | (model.model_extra or {})


def _numbered(values: list[Any] | tuple[Any, ...]) -> dict[int, Any]:
    return dict(enumerate(values))
