"""Forms of values: lengths of time and moments as texts, and a record in the form of another."""

from __future__ import annotations

import datetime
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from perdure.arguments import UNITS_MS, moment_of, parse_duration_ms
from perdure.errors import InvalidValue
from perdure.limits import TIME_MS_MAX

S = TypeVar("S", bound=msgspec.Struct)

_ABSENT: Any = object()


def record_from(kind: type[S], source: object, **given: Any) -> S:
    """Return a record of the kind. Fields that are not given have the values of the source."""
    names = [name for name in kind.__struct_fields__ if name not in given]
    found = {name: getattr(source, name, _ABSENT) for name in names}
    return kind(**{name: value for name, value in found.items() if value is not _ABSENT}, **given)


def parse_moment(text: str, now_ms: int) -> datetime.datetime:
    """Parse ``2h`` (that long ago), ``2026-11-15`` or ``2026-11-15T18:52`` (local time)."""
    with suppress(ValueError, OverflowError):  # of another form, or local time before the year 1
        moment = datetime.datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.astimezone()
    try:
        return utc_time(now_ms - parse_duration_ms(text))
    except InvalidValue:
        raise InvalidValue(
            f"{text!r} is no moment; write an age (2h, 7d) or a date (2026-11-15, "
            "2026-11-15T18:52, 2026-11-15T18:52Z)"
        ) from None


def counted(number: int, noun: str) -> str:
    """Return ``1 instance``, ``2 instances``, ``2 activities``."""
    has_ies = noun.endswith("y") and noun[-2] not in "aeiou"
    plural = f"{noun[:-1]}ies" if has_ies else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shown_duration(milliseconds: int) -> str:
    """Return at most two units: ``212ms``, ``3.2s``, ``2m 04s``, ``3d 02h``."""
    if milliseconds < 0:
        return "0s"
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        seconds = milliseconds / 1000
        return f"{seconds:.0f}s" if seconds >= 10 or milliseconds % 1000 == 0 else f"{seconds:.1f}s"
    for large, small in (("m", "s"), ("h", "m"), ("d", "h")):
        large_ms, small_ms = UNITS_MS[large], UNITS_MS[small]
        count, rest = milliseconds // large_ms, milliseconds % large_ms // small_ms
        if large == "d" or milliseconds < large_ms * (24 if large == "h" else 60):
            return (
                f"{count}{large} {rest:02d}{small}" if rest and count < 100 else f"{count}{large}"
            )
    raise AssertionError("days take everything")


def shown_age(milliseconds: int) -> str:
    """Return the largest unit only: ``50s``, ``2m``, ``3d``."""
    if milliseconds < 1_000:
        return "0s"
    unit = next(unit for unit in ("d", "h", "m", "s") if milliseconds >= UNITS_MS[unit])
    return f"{milliseconds // UNITS_MS[unit]}{unit}"


def shown_time(milliseconds: int) -> str:
    """Return local date and time, to the second."""
    return utc_time(milliseconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def utc_time(milliseconds: int) -> datetime.datetime:
    """Return the moment as a datetime in UTC; the nearest one for a time that no calendar has."""
    return moment_of(min(max(milliseconds, 0), TIME_MS_MAX))


def iso_moment(moment: datetime.datetime) -> str:
    """Return a moment in UTC as ``2026-11-15T18:52:10Z``."""
    return moment.isoformat().replace("+00:00", "Z")


def iso_time(milliseconds: int) -> str:
    """Return UTC with milliseconds: ``2026-11-15T18:52:10.123Z``."""
    return f"{utc_time(milliseconds // 1000 * 1000):%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z"
