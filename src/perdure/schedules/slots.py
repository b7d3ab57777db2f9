"""Computes the slots of a schedule from a cron line or an interval, in a time zone.

Slots are whole seconds, in milliseconds since 1970. The orchestration of a schedule records what
these functions return, so that other time zone data changes no history.
"""

from __future__ import annotations

import datetime
import zoneinfo
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from perdure.errors import InvalidValue, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.schedules.spec import Spec

_COUNTED_MAX: Final = 20_000
"""After this many slots of a long outage, only those of its last day are computed."""
_DAY_MS: Final = 86_400_000
_UTC: Final = datetime.UTC


def slot_name(slot_ms: int) -> str:
    """Return the time of a slot as a part of an instance id, such as ``2026-11-17T01:30Z``."""
    moment = datetime.datetime.fromtimestamp(slot_ms / 1000, _UTC)
    precision = "minutes" if slot_ms % 60_000 == 0 else "seconds"
    if slot_ms % 1000:
        precision = "milliseconds"
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def check_slots(spec: Spec) -> None:
    """Raise InvalidValue unless the spec has a next slot, and UsageError without the extra."""
    if (spec.cron is None) == (spec.every is None):
        raise InvalidValue("a schedule has either cron='30 2 * * *' or every=3600 (seconds)")
    _zone(spec.zone)
    now_ms = round(datetime.datetime.now(_UTC).timestamp() * 1000)
    if next_slot(spec, now_ms) is None:
        raise InvalidValue(f"cron {spec.cron!r} never fires: no such day in the next 50 years")


def next_slot(spec: Spec, after_ms: int) -> int | None:
    """Return the first slot after that time; None if there is none."""
    return next(slots_after(spec, after_ms), None)


def latest_slots(spec: Spec, after_ms: int, until_ms: int, limit: int) -> tuple[list[int], int]:
    """Return the last slots in (after, until], oldest first, and how many older ones there are.

    The number is a lower bound for an outage of more than 20,000 slots.
    """
    kept: deque[int] = deque(maxlen=limit)
    count = 0
    for slot in slots_after(spec, after_ms):
        if slot > until_ms:
            break
        if count >= _COUNTED_MAX and slot < until_ms - _DAY_MS:
            later, older = latest_slots(spec, until_ms - _DAY_MS, until_ms, limit)
            return later, older + count
        kept.append(slot)
        count += 1
    return list(kept), count - len(kept)


def slots_after(spec: Spec, after_ms: int) -> Iterator[int]:
    """Yield the slots after that time, in order.

    An interval counts from 1970, so its slots do not depend on when the schedule was made. A cron
    line with fixed minutes and hours fires once where the clock is set: in a gap at the next valid
    minute, in a repeated hour the first time. A line with ``*`` goes by the time that passes.
    """
    if spec.every is not None:
        step_ms = spec.every * 1000
        slot = after_ms // step_ms * step_ms
        while True:
            slot += step_ms
            yield slot
    yield from _cron_slots(spec.cron or "", _zone(spec.zone), after_ms)


def _cron_slots(cron: str, zone: datetime.tzinfo, after_ms: int) -> Iterator[int]:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise UsageError("schedules need cronsim: pip install 'perdure[schedules]'") from None
    begin = datetime.datetime.fromtimestamp(after_ms / 1000, zone)
    try:
        moments = CronSim(cron, begin)
    except CronSimError as error:
        day, month = cron.split()[2:4] if "day-of-month" in str(error) else ("", "")
        with suppress(CronSimError):
            CronSim(f"0 0 {day} * *", begin)
            raise InvalidValue(
                f"cron {cron!r} never fires: there is no day {day} in month {month}"
            ) from None
        raise InvalidValue(
            f"cron {cron!r}: {error}; write five fields, such as '30 2 * * mon-fri'"
        ) from None
    last_ms = after_ms
    for moment in moments:
        slot = round(moment.timestamp() * 1000)
        if slot > last_ms:  # not a second time in a repeated hour, nor for two slots in one gap
            last_ms = slot
            yield slot


def _zone(name: str) -> datetime.tzinfo:
    if name == "UTC":
        return _UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidValue(
            f"there is no time zone {name!r}; write a name such as 'Europe/Berlin' or 'UTC'"
        ) from None
