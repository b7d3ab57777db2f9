"""What callers hand in, checked by one rule for each kind: every refusal names the value.

Knows no storage and no client, so that every layer can ask here.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final, cast

from perdure.errors import InvalidValue
from perdure.limits import REASON_CHARACTERS_MAX, SECONDS_MAX, TAG_BYTES_MAX, check_id

INTEGER_MAX: Final = 2**63 - 1
"""What every store and JSON reader can hold."""

_SHOWN_CHARACTERS: Final = 200


def check_number(value: object, what: str, *, minimum: int, maximum: int = INTEGER_MAX) -> None:
    """A whole number. Not True, not 1.0."""
    if type(value) is int and minimum <= value <= maximum:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValue(f"{what} must be an integer, not {shown(value)}")
    if value < minimum:
        raise InvalidValue(f"{what} must be at least {minimum}, not {shown(value)}")
    if value > maximum:
        raise InvalidValue(f"{what} must be at most {maximum}, not {shown(value)}")


def check_real(value: object, what: str, *, minimum: float, maximum: float, unit: str = "") -> None:
    """A number, whole or not; not NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or is_nan:
        kind = f"a number of{unit}" if unit else "a number"
        raise InvalidValue(f"{what} must be {kind}, not {shown(value)}")
    if value < minimum:
        raise InvalidValue(f"{what} must be at least {minimum:g}{unit}, not {shown(value)}")
    if value > maximum:
        raise InvalidValue(f"{what} must be at most {maximum:.15g}{unit}, not {shown(value)}")


def check_seconds(value: object, what: str, *, minimum: float = 0) -> None:
    """A length of time."""
    check_real(value, what, minimum=minimum, maximum=SECONDS_MAX, unit=" seconds")


def check_timeout(value: object) -> None:
    """How long to wait, not None. Less than nothing is what was left of a time that is over."""
    try:
        check_seconds(value, "timeout", minimum=-math.inf)
    except InvalidValue as error:
        raise InvalidValue(f"{error}; None waits without a bound") from None


def check_flag(value: object, what: str) -> None:
    if not isinstance(value, bool):
        raise InvalidValue(f"{what} must be True or False, not {shown(value)}")


def check_kind(value: object, kind: type, what: str, written: str) -> None:
    """``written``: how such a value is made."""
    if not isinstance(value, kind):
        raise InvalidValue(f"{what} must be {written}, not {shown(value)}")


def check_methods(value: object, names: tuple[str, ...], what: str) -> None:
    """An object with these methods; not the class of such objects."""
    if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in names):
        listed = " and ".join(f"{name}()" for name in names)
        raise InvalidValue(f"{what} must be an object with {listed}, not {shown(value)}")


def check_string(value: object, what: str) -> str:
    """A text that every store can keep or look for: valid Unicode without NUL."""
    if not isinstance(value, str):
        raise InvalidValue(f"{what} must be a string, not {type(value).__name__}: {shown(value)}")
    if "\0" in value:
        raise InvalidValue(f"{what} holds a NUL character: {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"{what} holds a lone surrogate: {shown(value)}") from None
    return value


def check_members(value: Any, kind: type, what: str, written: str) -> tuple[Any, ...]:
    """The members of a collection; a text is none, although it has characters."""
    is_listed = isinstance(value, (tuple, list, set, frozenset))
    members: tuple[Any, ...] = tuple(cast("Any", value)) if is_listed else ()
    if not is_listed or not all(isinstance(member, kind) for member in members):
        raise InvalidValue(f"{what} must be {written}, not {shown(value)}")
    return members


def check_ids(value: object, what: str) -> None:
    example = value if isinstance(value, str) else "order-1"
    for each in check_members(value, str, what, f"a tuple of ids, such as ({example!r},)"):
        check_id(each, f"each of {what}")


def check_tag(value: object) -> str:
    tag = check_id(value, "tag")
    size = len(tag.encode())
    if size > TAG_BYTES_MAX:
        raise InvalidValue(
            f"tag has {size} bytes, at most {TAG_BYTES_MAX} are allowed: {tag[:40]!r}..."
        )
    return tag


def check_reason(value: object) -> str:
    """Why an instance is cancelled or terminated: it becomes part of the history."""
    reason = check_string(value, "reason")
    if len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidValue(
            f"reason has {len(reason)} characters, at most {REASON_CHARACTERS_MAX} are allowed: "
            f"{reason[:40]!r}...; keep the long text elsewhere and name its place"
        )
    return reason


def check_path(value: Any) -> str:
    """Where a local store lies."""
    path = (
        os.fspath(cast("os.PathLike[str]", value))
        if isinstance(value, (str, os.PathLike))
        else value
    )
    if not isinstance(path, str) or not path:
        raise InvalidValue(
            f"path must name a file or directory, e.g. 'shop.db', not {shown(value)}; for a store "
            "that forgets use InMemoryProvider or 'memory:'"
        )
    return check_string(path, "path")


def shown(value: Any) -> str:
    """For a message: as it is written, but not without end."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
