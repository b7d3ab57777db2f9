"""The arguments and the result of a handler as JSON: one array in parameter order.

Trailing arguments that the caller left out are not written, so that a new parameter with a default
can be added to a handler whose calls are already recorded.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from itertools import takewhile
from operator import is_
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Never, NoReturn, get_origin, get_type_hints

import msgspec

from perdure.codec import EXACT, Codec, Compared, difference, is_exact
from perdure.errors import PayloadError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


_Parameter = inspect.Parameter
# A function that never returns has no result that must fit.
_ANYTHING: tuple[Any, ...] = (object, NoReturn, Never)
_IMMUTABLE = (str, int, float, bool, bytes, type(None))
_REFUSED = {_Parameter.VAR_POSITIONAL: "*", _Parameter.VAR_KEYWORD: "**"}


class _Resource:
    """The class of ``RESOURCE``."""

    def __repr__(self) -> str:
        return "RESOURCE"


RESOURCE: Final[Any] = _Resource()
"""The default of a parameter that an activity gets from its runtime instead of its caller.

The runtime passes the one of its resources that fits the annotation of the parameter.
"""


class _Types(msgspec.Struct, frozen=True):
    """The annotations of a function, resolved."""

    arguments: list[Any]
    record: type[msgspec.Struct]
    """Type of the whole array: typed by position, with the defaults of the function."""
    result: Any
    exact: list[type]
    """The first parameters, as far as arguments of exactly these classes come back equal."""
    resources: dict[str, Any]
    """The annotations of the parameters that the runtime passes."""


class HandlerSignature:
    """Binds, writes and reads the arguments and the result of one function.

    ``self`` of a method and the parameters that the runtime passes are no part of them. A function
    that stands in for another one has the types and defaults of that where it names none, and all
    of its parameters where it names no parameters: ``*args``.
    """

    def __init__(
        self, fn: Callable[..., Any], label: str, stands_for: HandlerSignature | None = None
    ) -> None:
        self._fn = fn
        self._label = label
        self._stands_for = stands_for
        self._types: _Types | None = None
        given = inspect.signature(fn)
        if stands_for is not None:
            given = stands_for.complete(given)
        self.resources = tuple(p.name for p in given.parameters.values() if p.default is RESOURCE)
        """The names of the parameters that the runtime passes."""
        own = [p for p in given.parameters.values() if p.name not in self.resources]
        self.is_method = bool(own) and own[0].name == "self"
        self._parameters = tuple(own[1:] if self.is_method else own)
        self._signature = given.replace(parameters=self._parameters)
        self._check_parameters(list(given.parameters))
        positional = [p for p in self._parameters if p.kind is not _Parameter.KEYWORD_ONLY]
        self._positional_max = len(positional)
        self._keywords = self._parameters[len(positional) :]
        # A required keyword-only parameter can never be met by position alone.
        all_optional = all(p.default is not p.empty for p in self._keywords)
        required = sum(p.default is p.empty for p in positional)
        self._positional_min = required if all_optional else len(positional) + 1
        self._arguments_label = f"arguments ({', '.join(self._signature.parameters)}) of {label}"
        self._result_label = f"result of {label}"

    def _check_parameters(self, order: list[str]) -> None:
        for parameter in self._parameters:
            if parameter.kind in _REFUSED:
                raise UsageError(
                    f"{self._label} takes {_REFUSED[parameter.kind]}{parameter.name}: name every "
                    "parameter, so that a recorded call can be read back by its position"
                )
            is_positional = parameter.kind is not _Parameter.KEYWORD_ONLY
            if is_positional and any(
                n in self.resources for n in order[: order.index(parameter.name)]
            ):
                raise UsageError(
                    f"{self._label} has {parameter.name!r} after a resource: callers do not pass "
                    "resources, so put them last, or after a *"
                )

    def encode_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec
    ) -> msgspec.Raw:
        return codec.encode(self._bind(args, kwargs), self._arguments_label, Compared)

    def decode_arguments(
        self, raw: msgspec.Raw, codec: Codec
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        types = self._types or self._resolve()
        record = codec.decode(raw, types.record, self._arguments_label)
        values = msgspec.structs.astuple(record)
        if not self._keywords:
            return values, {}
        named = {
            parameter.name: value
            for parameter, value in zip(self._keywords, values[self._positional_max :], strict=True)
        }
        return values[: self._positional_max], named

    def check_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: msgspec.Raw, codec: Codec
    ) -> None:
        """Raise PayloadError for arguments that do not fit or would not come back equal."""
        types = self._types or self._resolve()
        record = codec.decode(raw, types.record, self._arguments_label)
        read = msgspec.structs.astuple(record)
        given = self._bind(args, kwargs)
        for parameter, mine, back in zip(self._parameters, given, read, strict=False):
            problem = difference(mine, back, f"argument {parameter.name!r} of {self._label}")
            if problem is not None:
                raise PayloadError(problem)

    def are_exact(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the classes of the arguments say already that they come back equal."""
        exact = (self._types or self._resolve()).exact
        return not kwargs and len(args) <= len(exact) and all(map(is_, map(type, args), exact))

    def encode_result(self, value: object, codec: Codec) -> msgspec.Raw:
        """Return the value as JSON; raise PayloadError if it does not fit or come back equal."""
        kind, expected = type(value), (self._types or self._resolve()).result
        is_exact = kind in EXACT and kind is expected
        return codec.encode(value, self._result_label, Compared if is_exact else expected)

    def decode_result(self, raw: msgspec.Raw, codec: Codec) -> Any:
        types = self._types or self._resolve()
        return codec.decode(raw, types.result, self._result_label)

    def missing_from(self, older: HandlerSignature) -> str | None:
        """Return a parameter without default that calls of the older signature do not write."""
        added = self._parameters[len(older._parameters) :]
        return next((p.name for p in added if p.default is p.empty), None)

    def complete(self, own: inspect.Signature) -> inspect.Signature:
        """Return the signature with the defaults of this one, or with its parameters."""
        parameters = list(own.parameters.values())
        if any(parameter.kind in _REFUSED for parameter in parameters):
            return self._signature
        for position, theirs in enumerate(self._parameters[: len(parameters)]):
            if parameters[position].default is _Parameter.empty:
                parameters[position] = parameters[position].replace(default=theirs.default)
        return own.replace(parameters=parameters)

    def hints_for(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the types of this signature for parameters of these names, by position."""
        types = self._types or self._resolve()
        return dict(zip(names, types.arguments, strict=False)) | {"return": types.result}

    def check_annotations(self, codec: Codec) -> None:
        """Resolve every annotation; raise UsageError for one that no value can be read as."""
        types = self._types or self._resolve()
        for parameter, annotation in zip(self._parameters, types.arguments, strict=True):
            try:
                codec.check_type(annotation, where=f"argument {parameter.name!r} of {self._label}")
            except PayloadError as error:
                shown = f"{parameter.name}: {getattr(annotation, '__name__', '...')} = RESOURCE"
                error.add_note(f"a pool or client of the worker is not an argument: write {shown}")
                raise
        codec.check_type(types.result, where=self._result_label)
        for name, annotation in types.resources.items():
            if not isinstance(annotation, type) or annotation is object:
                raise UsageError(
                    f"the resource {name!r} of {self._label} needs a class as its annotation, "
                    f"which finds it among the resources of the runtime; not {annotation!r}"
                )

    def find_resources(self, available: Sequence[object]) -> dict[str, object]:
        """Return the resource of each parameter that needs one, chosen by its annotation."""
        found: dict[str, object] = {}
        for name, kind in (self._types or self._resolve()).resources.items():
            fitting = [each for each in available if isinstance(each, kind)]
            if len(fitting) != 1:
                kinds = ", ".join(map(_kind_of, available)) or "none"
                raise UsageError(
                    f"{self._label} needs {kind.__qualname__} for {name!r}, and {len(fitting)} of "
                    f"the resources are one; given: {kinds}; pass one with Runtime(..., "
                    "resources=[...]), or yield it from lifespan(runtime) in a module of handlers. "
                    "To have two of a kind, give each a class of its own"
                )
            found[name] = fitting[0]
        return found

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs and self._positional_min <= len(args) <= self._positional_max:
            return args  # the most common form of a call
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            known = ", ".join(self._signature.parameters)
            raise TypeError(f"{self._label}: {error}; its parameters are ({known})") from None
        last = max((i for i, p in enumerate(self._parameters) if p.name in given), default=-1)
        return tuple(given.get(p.name, p.default) for p in self._parameters[: last + 1])

    def _resolve(self) -> _Types:
        """Resolve the annotations; called on first use, as they may name later definitions.

        Kept in an ordinary attribute: on 3.11 a cached_property slows down all other attributes.
        """
        hints = self._hints()
        if self._stands_for is not None:
            own = {name: hint for name, hint in hints.items() if hint is not Any}
            hints = self._stands_for.hints_for(p.name for p in self._parameters) | own
        arguments = [_readable(hints.get(p.name, Any)) for p in self._parameters]
        self._types = _Types(
            arguments=arguments,
            record=self._record(arguments),
            result=_readable(hints.get("return", Any)),
            exact=list(takewhile(is_exact, arguments)),
            resources={name: _class_of(hints.get(name)) for name in self.resources},
        )
        return self._types

    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._fn, include_extras=True)
        except Exception as error:
            raise UsageError(
                f"an annotation of {self._label} cannot be resolved: {error}; values are read back "
                "by annotation, so every name in it must exist in the module at run time"
            ) from error

    def _record(self, annotations: list[Any]) -> type[msgspec.Struct]:
        """Return the array-like record type of the arguments."""
        fields: list[tuple[str, Any, Any]] = []
        must_be_written = False
        given = zip(self._parameters, annotations, strict=True)
        for position, (parameter, annotation) in reversed(list(enumerate(given))):
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


def _class_of(annotation: Any) -> Any:
    """Return ``Pool`` of ``Annotated[Pool, ...]`` and of ``Pool[Row]``."""
    if get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    origin = get_origin(annotation)
    return annotation if origin is None or origin is UnionType else origin


def _kind_of(resource: object) -> str:
    if isinstance(resource, type):
        return f"the class {resource.__qualname__}"
    return type(resource).__qualname__


def _readable(annotation: Any) -> Any:
    return Any if annotation in _ANYTHING else annotation


def _fresh(value: Any) -> Callable[[], Any]:
    """Return a factory for a default: it copies, so that calls do not share a mutable value."""
    if isinstance(value, _IMMUTABLE):
        return lambda: value
    try:
        is_value = bool(copy.deepcopy(value) == value)
    except Exception:  # noqa: BLE001  # it cannot be copied or compared
        is_value = False
    # A value that equals only itself may be a sentinel, which is compared by identity: no copy.
    return partial(copy.deepcopy, value) if is_value else lambda: value
