"""Encodes user values as JSON and decodes them by the annotation of the receiving function.

The data holds no type names, and there is no fallback serialiser. A value that would not come back
equal is refused when it is written, with the path to it. A transform may seal what is stored, for
example to compress or to encrypt it: ``providers/sealing.py`` calls it on the way into a store.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    Protocol,
    TypeGuard,
    cast,
)
from uuid import UUID

import msgspec
import msgspec.inspect

from perdure.arguments import check_methods, check_number, check_string
from perdure.errors import CannotUnwrap, PayloadError, shown
from perdure.limits import JSON_DEPTH_MAX, PAYLOAD_BYTES_MAX
from perdure.own_types import CodecType, OwnTypes, attributes_of, is_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_SEALED: Final = b'{"$perdure":'
"""The first bytes of a sealed payload. ``data >= _SEALED`` is a quick first test for them."""
_SEALED_TEXT: Final = _SEALED.decode()
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_kind: Final = cast("Callable[[object], type[Any]]", type)
"""``type``, without the narrowing that type checkers apply to comparisons with it."""
EXACT: Final = _SCALARS | {bytes, Decimal, UUID, date, timedelta}
"""A value of exactly such a class comes back equal if it is annotated with it."""
_ROWS: Final = frozenset({list, tuple})
_TEXTS: Final = frozenset({str, bytes, bytearray, memoryview})
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
_COLLECTIONS: Final = frozenset({list, tuple, set, frozenset})
_DECIMAL_SIZE: Final = sys.getsizeof(Decimal(0))
_COMPRESSED: Final = 32
_DATA: Final = _SCALARS | _ROWS | {dict}
_MINUTE: Final = timedelta(minutes=1)
_PATH_CHARACTERS: Final = 500
_EXCERPT: Final = 80
"""Characters of a payload that an error shows: errors are stored and logged."""


class Compared:
    """Given as ``fits`` to ``Codec.encode``: the caller compares the value with its copy."""


class PayloadContext(NamedTuple):
    """The place for which a payload is sealed. In another place it cannot be opened."""

    instance_id: str
    field: str
    """Such as ``input``, ``result of 1/4`` (execution and step), ``state total``."""


class PayloadTransform(Protocol):
    """Changes the bytes of every payload, for example to compress or to encrypt them."""

    name: str
    """Stored with the data, so that the transform that wrapped a payload unwraps it."""

    def wrap(self, data: bytes, context: PayloadContext, /) -> bytes: ...

    def unwrap(self, data: bytes, context: PayloadContext, /) -> bytes: ...


class _Sealed(msgspec.Struct, rename={"transform": "$perdure"}, omit_defaults=True):
    transform: str
    data: str
    why: str = ""
    """Why it could not be opened. In memory only: it is not stored."""


_SOMEWHERE: Final = PayloadContext("", "")


class Codec:
    """Encodes values as JSON and decodes them by type; the last transform is applied last.

    ``types`` says how values of your own classes are written.
    """

    def __init__(
        self,
        *transforms: PayloadTransform,
        types: Iterable[CodecType[Any]] = (),
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    ) -> None:
        for transform in transforms:
            check_methods(transform, ("wrap", "unwrap"), "a transform")
            check_string(getattr(transform, "name", None), "the name of a transform")
        # Stores accept no larger payload, so a codec can only lower the limit.
        check_number(payload_bytes_max, "payload_bytes_max", minimum=1, maximum=PAYLOAD_BYTES_MAX)
        self._transforms = transforms
        self._by_name = {transform.name: transform for transform in transforms}
        self._bytes_max = payload_bytes_max
        # A transform may compress a payload until it is small enough.
        self._text_max = payload_bytes_max * (_COMPRESSED if transforms else 1)
        self._own_types = OwnTypes(types)
        self._encoder = msgspec.json.Encoder(enc_hook=self._own_types.encode)
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

    @property
    def transform_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_name))

    @property
    def _known(self) -> str:
        return ", ".join(self.transform_names) or "none"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the transforms and of the author's own types."""
        return self.transform_names + self._own_types.names

    def encode(self, value: object, where: str = "value", fits: Any = None) -> msgspec.Raw:
        """Return the value as JSON; raise PayloadError with the path of a part that has no JSON.

        ``fits`` is the type that it will be read as, None if that is not known. With a type, a
        value that would not come back equal is refused too; without one, a value that would come
        back equal as no type.
        """
        # msgspec crashes the process when its buffer cannot grow, so text is measured before.
        size = len(value) if type(value) is str else self._least_size(value)
        if size > self._text_max:
            raise PayloadError(
                f"{where} has more than {self._text_max} characters or bytes; store it elsewhere "
                "and pass a reference"
            )
        try:
            data = self._encoder.encode(value)
        except Exception as error:
            raise self._refusal(value, where, error) from error
        # msgspec writes NaN and infinities as null, so the slow check runs only if a null was
        # written. partition() is used as "in" on bytes takes three times as long.
        if data.partition(b"null")[1] or (len(data) > JSON_DEPTH_MAX and _may_be_too_deep(data)):
            _raise_first_problem(value, where, self._own_types)
        if data >= _SEALED and data.startswith(_SEALED):
            raise PayloadError(f'{where}: the key "$perdure" is reserved')
        if fits is not Compared:
            self._check_return(value, data, fits, where)
        size = self.stored_size(data, self._bytes_max) if self._transforms else len(data)
        if size > self._bytes_max:
            raise PayloadError(
                f"{where} takes {size} bytes, at most {self._bytes_max} are allowed; "
                "store it elsewhere and pass a reference"
            )
        return msgspec.Raw(data)

    def _least_size(self, value: Any) -> int:
        """Return a lower bound for the size of the JSON; no part beyond the limit is read.

        Each part of a value takes one byte at least, and a text as many as it has characters.
        """
        size = 0
        rows: list[Any] = [value if type(value) in _ROWS else (value,)]
        while rows and size <= self._text_max:
            row = rows.pop()
            size += len(row)
            for each in row if size <= self._text_max else ():
                kind = _kind(each)
                if kind in _NUMBERS:
                    continue
                if kind in _TEXTS:
                    size += len(each)
                elif kind in _COLLECTIONS:
                    rows.append(each)
                elif kind is dict:
                    rows += (each, each.values())
                elif kind is Decimal:
                    size += sys.getsizeof(each) - _DECIMAL_SIZE
                else:
                    parts = self._parts_to_measure(each)
                    size -= len(parts) - 1  # a field with its default may be left out
                    rows.append(parts)
        return size

    def _parts_to_measure(self, value: Any) -> Sequence[Any]:
        """Return what is written of a value of another class."""
        try:
            if isinstance(value, (list, tuple, set, frozenset)):
                return (list(cast("Iterable[Any]", value)),)
            if isinstance(value, dict):
                return ({**cast("Any", value)},)
            if isinstance(value, str):
                return (str.__str__(value),)
            if isinstance(value, (bytes, bytearray)):
                return (bytes(value),)
            if isinstance(value, Enum):
                return (value.value,)
            if isinstance(value, PurePath):
                return value.parts
            if (names := field_names(value)) is not None:
                return [getattr(value, name) for name in names]
            return attributes_of(value) if self._own_types.reads(_kind(value)) else ()
        except Exception:  # noqa: BLE001 - code of the author
            return ()

    def _check_return(self, value: object, data: bytes, fits: Any, where: str) -> None:
        """Raise PayloadError for a value that would not come back equal."""
        if (fits is None or fits is Any) and _is_json(value):
            return
        if fits is None:
            _raise_first_problem(value, where, self._own_types)
            return
        problem = difference(value, self._read(data, fits, where), where)
        if problem is not None:
            raise PayloadError(problem)

    def decode(self, raw: msgspec.Raw, type: Any = Any, where: str = "value") -> Any:  # noqa: A002
        """Return the value, checked against the type; raise PayloadError if it does not fit."""
        data = bytes(raw)
        if data >= _SEALED and data.startswith(_SEALED):
            raise self._locked(data, where)
        return self._read(data, type, where)

    # --- sealing: the bytes of a payload as they are stored

    def seal(self, data: bytes, context: PayloadContext) -> bytes:
        """Return the payload as it is stored in that place. One that is sealed already stays so."""
        if data.startswith(_SEALED):
            sealed = msgspec.json.decode(data, type=_Sealed)
            return msgspec.json.encode(msgspec.structs.replace(sealed, why=""))
        for transform in self._transforms:
            text = base64.b64encode(transform.wrap(data, context)).decode()
            data = msgspec.json.encode(_Sealed(transform.name, text))
        return data

    def open(self, data: bytes, context: PayloadContext) -> bytes:
        """Return the payload of that place as JSON; sealed, and with the reason, if it cannot."""
        inner = data
        try:
            while inner.startswith(_SEALED):
                inner = self._unwrap(msgspec.json.decode(inner, type=_Sealed), context)
        except CannotUnwrap as error:
            sealed = msgspec.json.decode(data, type=_Sealed)
            return msgspec.json.encode(msgspec.structs.replace(sealed, why=str(error)))
        except msgspec.MsgspecError:
            return data
        return inner

    def stored_size(self, data: bytes, limit: int) -> int:
        """Return the number of bytes that the payload takes in a store, exact near the limit."""
        if not self._transforms or len(data) << len(self._transforms) <= limit:
            return len(data)
        return len(self.seal(data, _SOMEWHERE))

    def _read(self, data: bytes, type_: Any, where: str) -> Any:
        try:
            decoder = self._decoders[type_]
        except (KeyError, TypeError):
            decoder = self._make_decoder(type_, where)
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            # The cause is an error in code of the author; msgspec's own says nothing more.
            raise PayloadError(f"{where}: {error}; got {_shortened(data)}") from error.__cause__
        except RecursionError as error:
            raise PayloadError(f"{where} is nested too deeply: {_shortened(data)}") from error
        except MemoryError:  # no fault of the value
            raise
        except Exception as error:  # of the author's code, or of a member that no set can hold
            raise PayloadError(f"{where}: {shown(error)}; got {_shortened(data)}") from error

    def check_type(self, type: Any, *, where: str) -> None:  # noqa: A002
        """Raise PayloadError for a type that no value can be read back as."""
        if is_exact(type):
            return
        self._make_decoder(type, where)
        parts = list(_parts_of(type, self._own_types))
        unreadable = [part.cls for part in parts if _is_unreadable(part, self._own_types)]
        if unreadable:
            names = ", ".join(each.__qualname__ for each in unreadable)
            raise PayloadError(
                f"{where}: nothing can be read back as {names}; use builtins, a dataclass, "
                "an attrs or msgspec class, a pydantic model, or a codec with a CodecType for it"
            )
        unhashable = _unhashable_members(parts)
        if unhashable:
            raise PayloadError(
                f"{where}: a set cannot hold members of type {unhashable[0]}, nor a dict such "
                "keys, because they can change; use a list, or tuples of texts and numbers"
            )

    def _make_decoder(self, type_: Any, where: str) -> msgspec.json.Decoder[Any]:
        try:
            decoder = msgspec.json.Decoder(type_, dec_hook=self._own_types.decode)
        except TypeError as error:
            # The message of msgspec ends with the whole type, which is named before it here.
            why = str(error).partition(" - type ")[0]
            raise PayloadError(
                f"{where}: values cannot be read back as {_spelled(type_)}: {why}; {_WAY_OUT}"
            ) from error
        with contextlib.suppress(TypeError):  # an unhashable annotation is not cached
            self._decoders[type_] = decoder
        return decoder

    def _unwrap(self, sealed: _Sealed, context: PayloadContext) -> bytes:
        transform = self._by_name.get(sealed.transform)
        if transform is None:
            raise CannotUnwrap(f"this codec has no such transform; it has: {self._known}")
        try:
            return transform.unwrap(base64.b64decode(sealed.data), context)
        except Exception as error:
            raise CannotUnwrap(
                f"{error!r}; was it written with another key, or for another instance or field?"
            ) from error

    def _locked(self, data: bytes, where: str) -> PayloadError:
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
        except msgspec.MsgspecError as error:
            return PayloadError(f"{where}: {error}; got {_shortened(data)}")
        why = sealed.why or f"this codec has no such transform; it has: {self._known}"
        return CannotUnwrap(
            f"{where} was written with the transform {sealed.transform!r}, and cannot be read "
            f"here: {why}"
        )

    def _refusal(self, value: object, where: str, error: Exception) -> PayloadError:
        problem = _first_problem(value, where, self._own_types)
        return PayloadError(problem or f"{where}: {shown(error)}")


_WAY_OUT: Final = (
    "JSON holds no type names, so the members of a union must look different; annotate one class "
    "that holds either, or msgspec.Struct classes with tag=True, which may share a union"
)


def is_exact(annotation: Any) -> bool:
    """Return True for one of the classes whose own values come back equal."""
    return isinstance(annotation, type) and annotation in EXACT


def _spelled(type_: Any) -> str:
    return type_.__name__ if type(type_) is type else str(type_)


def _is_json(value: Any) -> bool:
    """Return True for JSON data of the builtin classes, which loses nothing."""
    kind = _kind(value)
    if kind in _SCALARS:
        return True
    if kind in _ROWS:
        return all(map(_is_json, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    return False


_NO_TYPES: Final = OwnTypes()


def _first_problem(value: object, where: str, types: OwnTypes = _NO_TYPES) -> str | None:
    try:
        return next(_problems(value, where, 0, types), None)
    except Exception as error:  # noqa: BLE001 - code of the author, e.g. a property
        return f"{where}: {shown(error)}"


def _raise_first_problem(value: object, where: str, types: OwnTypes) -> None:
    problem = _first_problem(value, where, types)
    if problem is not None:
        raise PayloadError(problem)


def _problems(value: Any, path: str, depth: int, types: OwnTypes = _NO_TYPES) -> Iterator[str]:
    """Yield each part of the value that has no JSON, or one that comes back equal as no type.

    Each text begins with the path of the part. Slow: for values that are not plain JSON data.
    """
    if len(path) > _PATH_CHARACTERS:
        path = f"{path[:_PATH_CHARACTERS]}..."
    if depth > JSON_DEPTH_MAX:
        yield f"{path[:80]}... is nested deeper than {JSON_DEPTH_MAX} levels"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{path}: {value!r} has no JSON form; use None or a string"
    elif isinstance(value, (datetime, time)):
        if (value.utcoffset() or timedelta()) % _MINUTE:
            yield (
                f"{path}: {shown(value)} has an offset from UTC with seconds, which JSON would "
                "round; convert it with astimezone(UTC)"
            )
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{path}: {shown(value)} is not valid Unicode (lone surrogate)"
    elif isinstance(value, Mapping):
        for key, member in cast("Any", value).items():
            yield from _problems(key, f"{path} key {shown(key)}", depth + 1, types)
            yield from _problems(member, f"{path}[{shown(key)}]", depth + 1, types)
        yield from _equal_names(cast("Any", value), path, types)
    elif isinstance(value, (list, tuple, AbstractSet)):
        for index, member in enumerate(cast("Iterable[Any]", value)):
            yield from _problems(member, f"{path}[{index}]", depth + 1, types)
    elif (names := field_names(value)) is not None:
        for name in names:
            yield from _problems(getattr(value, name), f"{path}.{name}", depth + 1, types)
    elif hasattr(value, "__await__"):
        yield f"{path}: {shown(value)} was not awaited; write await before the call"
    else:
        try:
            own = types.write(value, path)
            if own is None:
                msgspec.json.encode(value, enc_hook=types.encode)
            else:
                yield from _problems(msgspec.json.decode(own), path, depth)
        except PayloadError as error:
            yield str(error)
        except (TypeError, ValueError, OverflowError) as error:
            why = (
                "Python writes no number of so many digits; pass its hex()"
                if isinstance(value, int)
                else error
            )
            yield f"{path}: {shown(value)}: {why}"


def _equal_names(value: Mapping[Any, Any], path: str, types: OwnTypes) -> Iterator[str]:
    """Yield the first two keys that JSON writes as the same name, such as 1 and "1"."""
    written: dict[bytes, Any] = {}
    for key in value:
        name = msgspec.json.encode({key: None}, enc_hook=types.encode)
        if name in written:
            yield (
                f"{path}: the keys {shown(written[name])} and {shown(key)} are the same name in "
                "JSON, so one would not come back; use keys of one class"
            )
            return
        written[name] = key


def check_stored(raw: msgspec.Raw, where: str) -> None:
    """Raise PayloadError for a payload that no codec writes, of any type and any transform."""
    data = bytes(raw)
    try:
        value = msgspec.json.decode(data)
        if data.startswith(_SEALED):
            base64.b64decode(msgspec.json.decode(data, type=_Sealed).data, validate=True)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{where}: {error}; got {_shortened(data)}") from error
    if _may_be_too_deep(data):
        problem = next(_problems(value, where, -1), None)  # -1: the arguments of a call are a list
        if problem is not None:
            raise PayloadError(problem)


def is_sealed(data: str | bytes) -> bool:
    """Return True for a payload, or a text of an error or a reason, that a transform has sealed."""
    return data.startswith(_SEALED_TEXT) if isinstance(data, str) else data.startswith(_SEALED)


def require_open(data: str | bytes, what: str) -> None:
    """Raise CannotUnwrap for a sealed payload that is to be copied to another instance.

    It was sealed for its place. Only a process that can open it can seal it for another one.
    """
    if is_sealed(data):
        sealed = msgspec.json.decode(data, type=_Sealed)
        why = sealed.why or "this process does not have it"
        raise CannotUnwrap(
            f"{what} was written with the transform {sealed.transform!r}, and goes to another "
            f"instance, so it has to be read here: {why}; use a codec with it (commands take it "
            "from -m MODULE)"
        )


def shown_text(text: str) -> str:
    """Return the text of an error or a reason; a note, if it is sealed and cannot be opened."""
    if not is_sealed(text):
        return text
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
    except msgspec.MsgspecError:
        return text
    return f"(sealed with {sealed.transform!r}, not readable here)"


def _may_be_too_deep(data: bytes) -> bool:
    return data.count(b"[") + data.count(b"{") > JSON_DEPTH_MAX


def _shortened(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


# --- values that would not come back equal


def _unhashable_members(parts: Iterable[Any]) -> list[str]:
    """Return the kinds of members of sets and of keys of dicts that can change, as ``list``."""
    found: list[str] = []
    for part in parts:
        waiting: list[object] = [getattr(part, name) for name in _HASHED.get(_kind(part), ())]
        while waiting:
            member = waiting.pop()
            if (kind := _UNHASHABLE.get(_kind(member))) is not None:
                found.append(kind)
            elif isinstance(member, msgspec.inspect.TupleType):
                waiting.extend(member.item_types)
            elif isinstance(member, msgspec.inspect.VarTupleType):
                waiting.append(member.item_type)
    return found


_HASHED: Final[dict[type, tuple[str, ...]]] = {
    msgspec.inspect.SetType: ("item_type",),
    msgspec.inspect.FrozenSetType: ("item_type",),
    msgspec.inspect.DictType: ("key_type",),
}
"""The parts of a collection that must have a hash."""

_UNHASHABLE: Final[dict[type, str]] = {
    msgspec.inspect.ListType: "list",
    msgspec.inspect.DictType: "dict",
    msgspec.inspect.SetType: "set",
    msgspec.inspect.ByteArrayType: "bytearray",
}


def _parts_of(annotation: Any, types: OwnTypes) -> Iterator[Any]:
    """Yield the types in an annotation; of a union, unreadable members only if all are."""
    waiting: list[Any] = [msgspec.inspect.type_info(annotation)]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if _kind(part) is tuple:
            waiting.extend(part)
        elif isinstance(part, (msgspec.inspect.Type, msgspec.inspect.Field)):
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if isinstance(part, msgspec.inspect.UnionType):
                readable = tuple(each for each in part.types if not _is_unreadable(each, types))
                waiting.append(readable or part.types)
            elif not _is_unreadable(part, types):
                waiting.extend(getattr(part, name) for name in part.__struct_fields__)


def _is_unreadable(part: Any, types: OwnTypes) -> TypeGuard[msgspec.inspect.CustomType]:
    return isinstance(part, msgspec.inspect.CustomType) and not types.reads(part.cls)


def difference(written: Any, read: Any, path: str) -> str | None:
    """Return the first place at which another value would come back, and the way out.

    A tuple may come back as a list, a mapping as a dict, and plain data as the annotated type:
    these lose nothing.
    """
    if is_equal(written, read):
        return None
    kind, kind_read = _kind(written), _kind(read)
    if kind_read is dict and issubclass(kind, Mapping):
        return _missing_key(written, read, path) or _first(
            difference(written[key], read[key], f"{path}[{shown(key)}]") for key in written
        )
    if kind in _ROWS and kind_read in _ROWS and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return _first(difference(mine, back, f"{path}[{n}]") for n, (mine, back) in pairs)
    if kind is kind_read:
        names = field_names(written)
        if names is not None:
            return _first(
                difference(getattr(written, name), getattr(read, name), f"{path}.{name}")
                for name in names
            )
        if not _is_comparable(written):
            return None
        return _first_problem(written, path) or _other_value(written, read, path)
    if kind is int and kind_read is float:
        return f"{_other_value(written, read, path)}; annotate int"
    if kind in _DATA:
        return None
    return (
        f"{_other_value(written, read, path)}; values are read back by annotation: "
        f"annotate {kind.__qualname__}"
    )


def _is_comparable(value: Any) -> bool:
    """Return False for a value that no other one equals, such as NaN, or a set of such values."""
    if not is_equal(value, value):
        return False
    members = cast("Iterable[Any]", value) if isinstance(value, AbstractSet) else (value,)
    return all(getattr(_kind(each), "__eq__") is not object.__eq__ for each in members)  # noqa: B009


def _other_value(written: Any, read: Any, path: str) -> str:
    return f"{path}: {shown(written)} would come back as {shown(read)}"


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


def _missing_key(written: Mapping[Any, Any], read: Mapping[Any, Any], path: str) -> str | None:
    for key in written:
        if key not in read:
            return (
                f"{path}: the key {shown(key)} would not come back; values are read back by "
                "annotation: annotate a type that has it, or dict[type of the keys, type of the "
                "values]"
            )
    return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


JSON: Final = Codec()
"""The codec without transforms."""
