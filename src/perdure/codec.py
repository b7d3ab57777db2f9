"""Encodes user values as JSON and decodes them by the annotation of the receiving function.

The data holds no type names, and there is no fallback serialiser. A value that would not come back
equal is refused when it is written, with the path to it. A transform may wrap the bytes, for
example to compress or to encrypt them.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec

from perdure.arguments import check_methods, check_number, check_string
from perdure.errors import CannotUnwrap, PayloadError
from perdure.limits import JSON_DEPTH_MAX, PAYLOAD_BYTES_MAX
from perdure.pydantic_models import decode_model, encode_model, is_model
from perdure.roundtrip import difference, field_names, unreadable_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPED: Final = b'{"$perdure":'
"""The first bytes of a wrapped payload. ``data >= _WRAPPED`` is a quick first test for them."""


class PayloadTransform(Protocol):
    """Wraps the bytes of every payload, for example to compress or to encrypt them."""

    name: str
    """Stored with the data, so that the transform that wrapped a payload unwraps it."""

    def wrap(self, data: bytes) -> bytes: ...

    def unwrap(self, data: bytes) -> bytes: ...


class _Wrapped(msgspec.Struct, rename={"transform": "$perdure"}):
    transform: str
    data: str


class Codec:
    """Encodes values as JSON and decodes them by type; the last transform is applied last."""

    def __init__(
        self, *transforms: PayloadTransform, payload_bytes_max: int = PAYLOAD_BYTES_MAX
    ) -> None:
        for transform in transforms:
            check_methods(transform, ("wrap", "unwrap"), "a transform")
            check_string(getattr(transform, "name", None), "the name of a transform")
        # Stores accept no larger payload, so a codec can only lower the limit.
        check_number(payload_bytes_max, "payload_bytes_max", minimum=1, maximum=PAYLOAD_BYTES_MAX)
        self._transforms = transforms
        self._by_name = {transform.name: transform for transform in transforms}
        self._bytes_max = payload_bytes_max
        self._encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

    @property
    def transform_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_name))

    def encode(self, value: object, where: str = "value", fits: Any = None) -> msgspec.Raw:
        """Return the value as JSON; raise PayloadError with the path of a part that has no JSON.

        ``fits`` is the type that it will be read as, None if that is not known. With a type, a
        value that would not come back equal is refused too.
        """
        try:
            data = self._encoder.encode(value)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise self._refusal(value, where, error) from error
        # msgspec writes NaN and infinities as null, so the slow check runs only if a null was
        # written. partition() is used as "in" on bytes takes three times as long.
        if data.partition(b"null")[1] or (len(data) > JSON_DEPTH_MAX and _may_be_too_deep(data)):
            problem = next(_problems(value, where, 0), None)
            if problem is not None:
                raise PayloadError(problem)
        if data >= _WRAPPED and data.startswith(_WRAPPED):
            raise PayloadError(f'{where}: the key "$perdure" is reserved')
        if fits is not None:
            problem = difference(value, self._read(data, fits, where), where)
            if problem is not None:
                raise PayloadError(problem)
        if self._transforms:
            data = self._wrap(data)
        if len(data) > self._bytes_max:
            raise PayloadError(
                f"{where} takes {len(data)} bytes, at most {self._bytes_max} are allowed; "
                "store it elsewhere and pass a reference"
            )
        return msgspec.Raw(data)

    def decode(self, raw: msgspec.Raw, type: Any = Any, where: str = "value") -> Any:  # noqa: A002
        """Return the value, checked against the type; raise PayloadError if it does not fit."""
        data = bytes(raw)
        if data >= _WRAPPED:
            while data.startswith(_WRAPPED):
                data = self._unwrap(data, where)
        return self._read(data, type, where)

    def _read(self, data: bytes, type_: Any, where: str) -> Any:
        try:
            decoder = self._decoders[type_]
        except (KeyError, TypeError):
            decoder = self._make_decoder(type_, where)
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise PayloadError(f"{where}: {error}; got {_shortened(data)}") from error
        except RecursionError as error:
            raise PayloadError(f"{where} is nested too deeply: {_shortened(data)}") from error

    def check_type(self, type: Any, *, where: str) -> None:  # noqa: A002
        """Raise PayloadError for a type that no value can be read back as."""
        self._make_decoder(type, where)
        unreadable = unreadable_classes(type)
        if unreadable:
            names = ", ".join(each.__qualname__ for each in unreadable)
            raise PayloadError(
                f"{where}: nothing can be read back as {names}; use builtins, a dataclass, "
                "an attrs or msgspec class, or a pydantic model"
            )

    def _make_decoder(self, type_: Any, where: str) -> msgspec.json.Decoder[Any]:
        try:
            decoder = msgspec.json.Decoder(type_, dec_hook=_decode_foreign)
        except TypeError as error:
            # The message of msgspec ends with the whole type, which is named before it here.
            why = str(error).partition(" - type ")[0]
            raise PayloadError(
                f"{where}: values cannot be read back as {_spelled(type_)}: {why}; {_WAY_OUT}"
            ) from error
        with contextlib.suppress(TypeError):  # an unhashable annotation is not cached
            self._decoders[type_] = decoder
        return decoder

    def _wrap(self, data: bytes) -> bytes:
        for transform in self._transforms:
            text = base64.b64encode(transform.wrap(data)).decode()
            data = self._encoder.encode(_Wrapped(transform.name, text))
        return data

    def _unwrap(self, data: bytes, where: str) -> bytes:
        wrapped = msgspec.json.decode(data, type=_Wrapped)
        transform = self._by_name.get(wrapped.transform)
        if transform is None:
            raise CannotUnwrap(
                f"{where} was written with the transform {wrapped.transform!r}, which this codec "
                f"does not have; it has: {list(self.transform_names) or 'none'}"
            )
        try:
            return transform.unwrap(base64.b64decode(wrapped.data))
        except Exception as error:
            raise CannotUnwrap(
                f"{where}: the transform {transform.name!r} cannot unwrap what it has wrapped: "
                f"{error!r}; is it another key?"
            ) from error

    @staticmethod
    def _refusal(value: object, where: str, error: Exception) -> PayloadError:
        problem = next(_problems(value, where, 0), None)
        return PayloadError(problem or f"{where}: {error}")


_WAY_OUT: Final = (
    "JSON holds no type names, so the members of a union must look different; annotate one class "
    "that holds either, or msgspec.Struct classes with tag=True, which may share a union"
)


def _spelled(type_: Any) -> str:
    return type_.__name__ if type(type_) is type else str(type_)


def _encode_foreign(value: Any) -> Any:
    if is_model(type(value)):
        return encode_model(value, type(value).__qualname__)
    raise TypeError(f"{type(value).__qualname__} cannot be written as JSON")


def _decode_foreign(type_: Any, value: Any) -> Any:
    if type_ is object:
        return value
    if is_model(type_):
        return decode_model(type_, value)
    raise msgspec.ValidationError(f"values of type {type_!r} cannot be read from JSON")


def _problems(value: Any, path: str, depth: int) -> Iterator[str]:
    """Yield each part of the value that has no JSON, with its path. Slow: for errors only."""
    if depth > JSON_DEPTH_MAX:
        yield f"{path[:80]}... is nested deeper than {JSON_DEPTH_MAX} levels"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{path}: {value!r} has no JSON form; use None or a string"
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{path}: {value!r} is not valid Unicode (lone surrogate)"
    elif isinstance(value, Mapping):
        for key, member in cast("Any", value).items():
            yield from _problems(key, f"{path} key {key!r}", depth + 1)
            yield from _problems(member, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple, AbstractSet)):
        for index, member in enumerate(cast("Iterable[Any]", value)):
            yield from _problems(member, f"{path}[{index}]", depth + 1)
    elif is_model(type(value)):
        try:
            written: Any = msgspec.json.decode(encode_model(value, path))
        except (ValueError, TypeError) as error:
            yield str(error) if isinstance(error, PayloadError) else f"{path}: {error}"
        else:
            yield from _problems(written, path, depth)
    elif (names := field_names(value)) is not None:
        for name in names:
            yield from _problems(getattr(value, name), f"{path}.{name}", depth + 1)
    elif hasattr(value, "__await__"):
        yield f"{path}: {value!r} was not awaited; write await before the call"
    else:
        try:
            msgspec.json.encode(value, enc_hook=_encode_foreign)
        except (TypeError, ValueError, OverflowError) as error:
            yield f"{path}: {value!r}: {error}"


def _may_be_too_deep(data: bytes) -> bool:
    return data.count(b"[") + data.count(b"{") > JSON_DEPTH_MAX


def _shortened(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if len(text) <= 200 else text[:200] + "..."


JSON: Final = Codec()
"""The codec without transforms."""
