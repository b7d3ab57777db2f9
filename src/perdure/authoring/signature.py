"""A handler's parameters and result as JSON: one array in parameter order.

Trailing arguments that the caller left out are not written, so that a new parameter with a default
can be added to a handler whose calls are already recorded.
"""

from __future__ import annotations

import copy
import inspect
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Never, NoReturn, get_type_hints

import msgspec

from perdure.codec import JSON
from perdure.errors import PayloadError, UsageError
from perdure.fidelity import difference, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perdure.codec import Codec

_Parameter = inspect.Parameter
# What never returns, a loop without end, has no result that would have to fit.
_ANYTHING: tuple[Any, ...] = (object, NoReturn, Never)
# A value that is exactly of such a type fits its annotation, whatever it holds.
_EXACT = frozenset({str, int, float, bool, type(None)})
_IMMUTABLE = (str, int, float, bool, bytes, type(None))
_REFUSED = {_Parameter.VAR_POSITIONAL: "*", _Parameter.VAR_KEYWORD: "**"}


class HandlerSignature:
    """Binds, writes and reads the arguments and the result of one function."""

    def __init__(self, fn: Callable[..., Any], label: str) -> None:
        self._fn = fn
        self._label = label
        self._signature = inspect.signature(fn)
        self._parameters = tuple(self._signature.parameters.values())
        for parameter in self._parameters:
            if parameter.kind in _REFUSED:
                raise UsageError(
                    f"{label} takes {_REFUSED[parameter.kind]}{parameter.name}: name every "
                    "parameter, so that a recorded call can be read back by its position"
                )
        positional = [p for p in self._parameters if p.kind is not _Parameter.KEYWORD_ONLY]
        self._positional_max = len(positional)
        # A required keyword-only parameter can never be met by position alone.
        all_optional = all(p.default is not p.empty for p in self._parameters[len(positional) :])
        required = sum(p.default is p.empty for p in positional)
        self._positional_min = required if all_optional else len(positional) + 1

    def encode_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec
    ) -> msgspec.Raw:
        if kwargs or not self._positional_min <= len(args) <= self._positional_max:
            args = self._bind(args, kwargs)
        return codec.encode(args, where=self._arguments_label)

    def decode_arguments(
        self, raw: msgspec.Raw, codec: Codec
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        record = codec.decode(raw, self._record, where=self._arguments_label)
        values = msgspec.structs.astuple(record)
        keywords = self._parameters[self._positional_max :]
        if not keywords:
            return values, {}
        named = {
            parameter.name: value
            for parameter, value in zip(keywords, values[self._positional_max :], strict=True)
        }
        return values[: self._positional_max], named

    def check_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: msgspec.Raw, codec: Codec
    ) -> None:
        """PayloadError if they do not fit the annotations, or would not come back as they are."""
        record = codec.decode(raw, self._record, where=self._arguments_label)
        read = msgspec.structs.astuple(record)
        given = self._bind(args, kwargs)
        for parameter, mine, back in zip(self._parameters, given, read, strict=False):
            problem = difference(mine, back, f"argument {parameter.name!r} of {self._label}")
            if problem is not None:
                raise PayloadError(problem)

    @cached_property
    def is_plain(self) -> bool:
        """Whether arguments that fit surely come back as they are."""
        return all(is_plain(self._type_of(parameter.name)) for parameter in self._parameters)

    def encode_result(self, value: object, codec: Codec) -> msgspec.Raw:
        """JSON of a value that fits the annotation and comes back as it is, or PayloadError."""
        kind, expected = type(value), self._result_type
        is_exact = kind in _EXACT and (kind is expected or expected is Any)
        return codec.encode(value, where=self._result_label, fits=None if is_exact else expected)

    def decode_result(self, raw: msgspec.Raw, codec: Codec) -> Any:
        return codec.decode(raw, self._result_type, where=self._result_label)

    def missing_from(self, older: HandlerSignature) -> str | None:
        """A parameter that has no default here, and that no call of the other one writes."""
        added = self._parameters[len(older._parameters) :]
        return next((p.name for p in added if p.default is p.empty), None)

    def check_annotations(self) -> None:
        """Resolve every annotation, or raise UsageError that says which one can never be read."""
        for parameter in self._parameters:
            annotation = self._type_of(parameter.name)
            JSON.check_type(annotation, where=f"argument {parameter.name!r} of {self._label}")
        JSON.check_type(self._result_type, where=self._result_label)
        _ = self._record

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._label}: {error}") from None
        last = max((i for i, p in enumerate(self._parameters) if p.name in given), default=-1)
        return tuple(given.get(p.name, p.default) for p in self._parameters[: last + 1])

    @cached_property
    def _arguments_label(self) -> str:
        names = ", ".join(self._signature.parameters)
        return f"arguments ({names}) of {self._label}"

    @cached_property
    def _result_label(self) -> str:
        return f"result of {self._label}"

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._fn, include_extras=True)
        except Exception as error:
            raise UsageError(
                f"an annotation of {self._label} cannot be resolved: {error}; values are read back "
                "by annotation, so every name in it must exist in the module at run time"
            ) from error

    def _type_of(self, name: str) -> Any:
        annotation = self._hints.get(name, Any)
        return Any if annotation in _ANYTHING else annotation

    @cached_property
    def _result_type(self) -> Any:
        return self._type_of("return")

    @cached_property
    def _record(self) -> type[msgspec.Struct]:
        """An array-like record: typed by position, with the function's own defaults."""
        fields: list[tuple[str, Any, Any]] = []
        must_be_written = False
        for position, parameter in reversed(list(enumerate(self._parameters))):
            annotation = self._type_of(parameter.name)
            must_be_written = must_be_written or parameter.default is parameter.empty
            default = (
                msgspec.NODEFAULT
                if must_be_written
                else msgspec.field(default_factory=_fresh(parameter.default))
            )
            fields.append((f"p{position}", annotation, default))
        return msgspec.defstruct(
            "Arguments", fields[::-1], array_like=True, forbid_unknown_fields=True
        )


def _fresh(value: Any) -> Callable[[], Any]:
    """Gives the default of one call: a copy, as no call may see what another one did to it."""
    if isinstance(value, _IMMUTABLE):
        return lambda: value
    try:
        is_value = bool(copy.deepcopy(value) == value)
    except Exception:  # noqa: BLE001  # a handle of some kind
        is_value = False
    # What equals only itself is compared by identity: a sentinel must stay what it is.
    return partial(copy.deepcopy, value) if is_value else lambda: value
