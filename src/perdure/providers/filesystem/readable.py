"""Times, ranges of ids and versions as people write them; each comes back exactly."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from perdure.providers.filesystem.history import IdRanges
    from perdure.providers.records import Version

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - all are UTC, and aware ones are slower
_MILLISECOND: Final = timedelta(milliseconds=1)
_END_OF_CALENDAR_MS: Final = 253_402_300_799_999

Time: TypeAlias = str | int
"""``2026-05-04T03:02:01.000Z``, or the milliseconds where the calendar ends."""


def time_text(time_ms: int) -> Time:
    if not 0 <= time_ms <= _END_OF_CALENDAR_MS:
        return time_ms
    return (_EPOCH + time_ms * _MILLISECOND).isoformat(timespec="milliseconds") + "Z"


def time_ms(text: Time) -> int:
    """Raises ValueError."""
    if isinstance(text, int):
        return text
    return (datetime.fromisoformat(text[:-1]) - _EPOCH) // _MILLISECOND


def optional_time_text(time_ms: int | None) -> Time | None:
    return None if time_ms is None else time_text(time_ms)


def optional_time_ms(text: Time | None) -> int | None:
    """Raises ValueError."""
    return None if text is None else time_ms(text)


def ranges_text(ranges: IdRanges) -> str:
    """``1-3, 5``"""
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


@lru_cache(maxsize=4096)  # a store has many instances, and few different ranges
def ranges(text: str) -> IdRanges:
    """Raises ValueError."""
    if not text:
        return ()
    parts = [part.partition("-") for part in text.split(", ")]
    return tuple((int(first), int(last or first)) for first, _, last in parts)


def version_text(version: Version | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def version(text: str | None) -> Version | None:
    """Raises ValueError."""
    if text is None:
        return None
    major, minor, patch = map(int, text.split("."))
    return major, minor, patch
