"""The endpoints of schedules and promises."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.client.documents import (
    PromiseDocument,
    ScheduleDocument,
    promise_document,
    schedule_document,
)
from perdure.client.formats import filled, iso_moment, parse_moment
from perdure.dashboard.endpoints import Given, get, post
from perdure.dashboard.security import Scope
from perdure.dashboard.service import Service
from perdure.errors import UsageError

_COMING = 5


class ScheduleGiven(Given):
    id: str


class Paused(ScheduleGiven):
    reason: str = ""


class Backfill(ScheduleGiven):
    """A time in the past, as a date or as an age such as ``7d``."""

    start: str
    end: str = "0s"
    dry_run: bool = True


class ShownSchedule(ScheduleDocument, kw_only=True):
    """A schedule for the page."""

    coming: list[str]
    """The next slots; those of a paused schedule begin when it is resumed."""


class Schedules(msgspec.Struct):
    schedules: list[ShownSchedule]


class ScheduleDone(msgspec.Struct):
    id: str
    said: str
    slots: list[str] = []
    """Of a backfill: the slots without an instance."""


class Promises(msgspec.Struct):
    promises: list[PromiseDocument]


class Resolved(Given):
    key: str
    value: Any = None


class Rejected(Given):
    key: str
    reason: str = ""


@get("/schedules")
async def schedules(service: Service) -> Schedules:
    """List the schedules of the store, with their next and last slots."""
    found: list[ShownSchedule] = []
    for info in await service.client.schedules.list():
        document = schedule_document(info)
        coming: list[str] = []
        if not info.status.is_final:
            slots = await service.client.schedules.next(info.id, _COMING)
            coming = [iso_moment(slot) for slot in slots]
        args = service.payload("input", document.spec.args)
        spec = msgspec.structs.replace(document.spec, args=args)
        found.append(filled(ShownSchedule, document, spec=spec, coming=coming))
    return Schedules(found)


@post("/schedule/pause")
async def pause_schedule(service: Service, given: Paused) -> ScheduleDone:
    """Start no more instances of a schedule until it is resumed."""
    await service.client.schedules.pause(given.id, given.reason)
    return ScheduleDone(given.id, "paused; slots of the meantime are skipped")


@post("/schedule/resume")
async def resume_schedule(service: Service, given: ScheduleGiven) -> ScheduleDone:
    """Let a paused schedule go on with its next slot."""
    await service.client.schedules.resume(given.id)
    return ScheduleDone(given.id, "goes on with its next slot")


@post("/schedule/trigger")
async def trigger_schedule(service: Service, given: ScheduleGiven) -> ScheduleDone:
    """Start an instance of a schedule now, also of a paused one."""
    handle = await service.client.schedules.trigger(given.id)
    return ScheduleDone(given.id, f"started {handle.id}")


@post("/schedule/backfill")
async def backfill_schedule(service: Service, given: Backfill) -> ScheduleDone:
    """Name the slots of a past time that have no instance, or start them."""
    now_ms = service.now_ms()
    start, end = parse_moment(given.start, now_ms), parse_moment(given.end, now_ms)
    if start >= end:
        raise UsageError(
            f"a backfill from {given.start} to {given.end} has no time: give from < to"
        )
    missing = await service.client.schedules.backfill(given.id, start, end, dry_run=given.dry_run)
    said = f"{len(missing)} slots {'without an instance' if given.dry_run else 'started'}"
    return ScheduleDone(given.id, said, [iso_moment(slot) for slot in missing])


@post("/schedule/remove", Scope.ADMIN)
async def remove_schedule(service: Service, given: ScheduleGiven) -> ScheduleDone:
    """Delete a schedule. The instances that it has started stay."""
    await service.client.schedules.remove(given.id)
    return ScheduleDone(given.id, "removed; a worker whose code declares it creates it again")


@get("/promises")
async def promises(service: Service) -> Promises:
    """List the promises without an answer, and the instances that await them."""
    return Promises([promise_document(each) async for each in service.client.promises()])


@post("/promise/resolve")
async def resolve_promise(service: Service, given: Resolved) -> ScheduleDone:
    """Give a promise its value. The first answer counts."""
    await service.client.resolve(given.key, given.value)
    return ScheduleDone(given.key, "resolved")


@post("/promise/reject")
async def reject_promise(service: Service, given: Rejected) -> ScheduleDone:
    """Reject a promise: the code that awaits it gets PromiseRejected."""
    await service.client.reject(given.key, given.reason)
    return ScheduleDone(given.key, "rejected")
