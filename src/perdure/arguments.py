"""Checks of arguments, one for each kind of value; every error names the value.

The module imports no store and no client, so every layer can use it.
"""

from __future__ import annotations

import math
import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias, cast

from perdure.errors import InvalidValue, shown
from perdure.limits import REASON_CHARACTERS_MAX, SECONDS_MAX, TAG_BYTES_MAX, check_id

INTEGER_MAX: Final = 2**63 - 1
"""The largest integer that every store and JSON reader can hold."""

Duration: TypeAlias = float | timedelta
"""A length of time in the public API: a number of seconds, or a timedelta."""

UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_PLAIN = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def check_number(value: object, what: str, *, minimum: int, maximum: int = INTEGER_MAX) -> None:
    """Raise InvalidValue unless the value is an int in the range; True and 1.0 are none."""
    if type(value) is int and minimum <= value <= maximum:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValue(f"{what} must be an integer, not {shown(value)}")
    if value < minimum:
        raise InvalidValue(f"{what} must be at least {minimum}, not {shown(value)}")
    if value > maximum:
        raise InvalidValue(f"{what} must be at most {maximum}, not {shown(value)}")


def check_real(value: object, what: str, *, minimum: float, maximum: float, unit: str = "") -> None:
    """Raise InvalidValue unless the value is an int or float in the range; NaN is not."""
    is_nan = isinstance(value, float) and math.isnan(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or is_nan:
        kind = "a number of seconds or a timedelta" if unit == " seconds" else "a number"
        raise InvalidValue(f"{what} must be {kind}, not {shown(value)}")
    if value < minimum:
        raise InvalidValue(f"{what} must be at least {minimum:g}{unit}, not {shown(value)}")
    if value > maximum:
        raise InvalidValue(f"{what} must be at most {maximum:.15g}{unit}, not {shown(value)}")


def in_seconds(value: Duration) -> float:
    """Return a checked length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def in_milliseconds(value: Duration) -> int:
    """Return a checked length of time in milliseconds."""
    return round(in_seconds(value) * 1000)


def to_seconds(value: Any, what: str, *, minimum: float = 0) -> float:
    """Return a length of time in seconds, or raise InvalidValue that names it."""
    length = in_seconds(value)
    check_real(length, what, minimum=minimum, maximum=SECONDS_MAX, unit=" seconds")
    return float(length)


def to_milliseconds(value: Any, what: str) -> int:
    """Return a length of time in milliseconds; one above 0 gives at least 1."""
    length = to_seconds(value, what)
    return max(1, round(length * 1000)) if length > 0 else round(length * 1000)


def parse_duration_ms(text: str) -> int:
    """Parse ``500ms``, ``90`` (seconds), ``2h30m``, ``1.5d``, ``2w``."""
    compact = text.replace(" ", "").lower()
    parts = _PART.findall(compact)
    if _PLAIN.fullmatch(compact):
        milliseconds = float(compact) * 1000
    elif parts and "".join(number + unit for number, unit in parts) == compact:
        milliseconds = sum(float(number) * UNITS_MS[unit] for number, unit in parts)
    else:
        raise InvalidValue(f"{text!r} is no length of time; write e.g. 500ms, 30s, 5m, 2h30m or 7d")
    if milliseconds > SECONDS_MAX * 1000:
        raise InvalidValue(f"{text!r} is longer than {SECONDS_MAX // 86_400} days")
    return round(milliseconds)


def check_moment(value: object, what: str) -> None:
    """Raise InvalidValue unless the value is a datetime with a time zone."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidValue(
            f"{what} must be a datetime with a time zone, such as datetime.now(UTC), not "
            f"{shown(value)}"
        )


def whole_milliseconds(moment: datetime, *, round_up: bool) -> int:
    """Return a checked moment in milliseconds since 1970."""
    since = moment - _EPOCH
    return -(-since // _MILLISECOND) if round_up else since // _MILLISECOND


def moment_of(milliseconds: int) -> datetime:
    """Return the moment, in UTC, that is this many milliseconds after the start of 1970."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


def timeout_seconds(value: object) -> float:
    """Return a timeout in seconds. It may be negative: the rest of a time that is over."""
    try:
        return to_seconds(value, "timeout", minimum=-math.inf)
    except InvalidValue as error:
        raise InvalidValue(f"{error}; None waits without a bound") from None


def check_flag(value: object, what: str) -> None:
    if not isinstance(value, bool):
        raise InvalidValue(f"{what} must be True or False, not {shown(value)}")


def check_kind(value: object, kind: type, what: str, written: str) -> None:
    """Raise InvalidValue for another class. ``written`` shows how such a value is made."""
    if not isinstance(value, kind):
        raise InvalidValue(f"{what} must be {written}, not {shown(value)}")


def check_methods(value: object, names: tuple[str, ...], what: str) -> None:
    """Raise InvalidValue unless the value is an object, not a class, with these methods."""
    if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in names):
        listed = " and ".join(f"{name}()" for name in names)
        raise InvalidValue(f"{what} must be an object with {listed}, not {shown(value)}")


def check_string(value: object, what: str) -> str:
    """Return the text; raise InvalidValue unless it is valid Unicode without NUL.

    Every store can keep such a text and search for it.
    """
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
    """Return the members of a collection. A string is not accepted as a collection."""
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
    """Return the reason of a cancellation or termination, which is stored in the history."""
    reason = check_string(value, "reason")
    if len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidValue(
            f"reason has {len(reason)} characters, at most {REASON_CHARACTERS_MAX} are allowed: "
            f"{reason[:40]!r}...; keep the long text elsewhere and name its place"
        )
    return reason


def check_path(value: Any) -> str:
    """Return the path of a local store as a string."""
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
