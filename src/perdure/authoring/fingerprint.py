"""A stable hash of what a handler's code does: the same in every process, blind to line numbers.

Tells whether a deploy changed the code, so that an instance that the old code could not continue is
worth another try.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FUNCTIONS_MAX = 500
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def fingerprint(fn: Callable[..., Any]) -> str:
    """Hash of the function, of the functions and constants of its package that it names."""
    import hashlib  # slow to load, and only a runtime asks

    digest = hashlib.blake2b(digest_size=16)
    for function in _reachable(fn):
        digest.update(function.__qualname__.encode())
        for part in _code_parts(function.__code__):
            digest.update(part.encode("utf-8", "backslashreplace"))
            digest.update(b"\0")
        for name, value in _globals_used(function):
            if isinstance(value, _PLAIN):
                digest.update(f"{name}={value!r}\0".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _reachable(fn: Callable[..., Any]) -> Iterator[FunctionType]:
    package = fn.__module__.partition(".")[0]
    waiting: list[Any] = [fn]
    seen: set[int] = set()
    while waiting and len(seen) < _FUNCTIONS_MAX:
        function = waiting.pop(0)
        # A decorated handler stands for the function that it wraps.
        function = getattr(function, "fn", function)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        if function.__module__.partition(".")[0] != package:
            continue
        seen.add(id(function))
        yield function
        waiting.extend(value for _, value in _globals_used(function))


def _globals_used(function: FunctionType) -> list[tuple[str, Any]]:
    names = sorted(set(_names(function.__code__)))
    return [(n, function.__globals__[n]) for n in names if n in function.__globals__]


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
