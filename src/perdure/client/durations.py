"""Parse and show lengths of time and moments: ``2h30m`` in, ``2h 30m`` out."""

from __future__ import annotations

import datetime
import re
from contextlib import suppress
from typing import Final

from perdure.errors import InvalidValue
from perdure.limits import SECONDS_MAX

_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_PLAIN = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def parse_duration_ms(text: str) -> int:
    """Parse ``500ms``, ``90`` (seconds), ``2h30m``, ``1.5d``, ``2w``."""
    compact = text.replace(" ", "").lower()
    parts = _PART.findall(compact)
    if _PLAIN.fullmatch(compact):
        milliseconds = float(compact) * 1000
    elif parts and "".join(number + unit for number, unit in parts) == compact:
        milliseconds = sum(float(number) * _UNITS_MS[unit] for number, unit in parts)
    else:
        raise InvalidValue(f"{text!r} is no length of time; write e.g. 500ms, 30s, 5m, 2h30m or 7d")
    if milliseconds > SECONDS_MAX * 1000:
        raise InvalidValue(f"{text!r} is longer than {SECONDS_MAX // 86_400} days")
    return round(milliseconds)


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
        large_ms, small_ms = _UNITS_MS[large], _UNITS_MS[small]
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
    unit = next(unit for unit in ("d", "h", "m", "s") if milliseconds >= _UNITS_MS[unit])
    return f"{milliseconds // _UNITS_MS[unit]}{unit}"


def shown_time(milliseconds: int) -> str:
    """Return local date and time, to the second."""
    moment = datetime.datetime.fromtimestamp(milliseconds / 1000).astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def utc_time(milliseconds: int) -> datetime.datetime:
    """Return the moment as a datetime in UTC."""
    return datetime.datetime.fromtimestamp(milliseconds / 1000, tz=datetime.UTC)


def iso_time(milliseconds: int) -> str:
    """Return UTC with milliseconds: ``2026-11-15T18:52:10.123Z``."""
    moment = datetime.datetime.fromtimestamp(milliseconds // 1000, tz=datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03d}Z"
