"""The endpoints that write: instances, one or many; schedules, promises, dead letters."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from perdure.client.formats import iso_moment, parse_moment
from perdure.client.json_documents import StartedDocument, started_document
from perdure.client.rerun import fresh_id, rerun, rerun_from_event
from perdure.client.retry import retry
from perdure.dashboard.endpoints import Given, post
from perdure.dashboard.security import Scope
from perdure.dashboard.service import Service
from perdure.dashboard.views import selection
from perdure.errors import NotFound, PerdureError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Action = Literal["cancel", "terminate", "pause", "resume", "retry", "delete"]

_AT_ONCE: Final = 32
_TYPED_ABOVE: Final = 100
"""Above this many instances, the number must be typed as confirmation."""
_BULK_MAX: Final = 10_000


class Target(Given):
    id: str


class TargetWithReason(Target):
    reason: str = ""


class Done(msgspec.Struct):
    """The action was taken."""

    id: str
    said: str
    slots: list[str] = []
    """The slots of a backfill that have no instance."""


class Sent(Target):
    name: str
    value: Any = None
    mailbox: bool = False
    """A message for ``next_message`` instead of an event for ``wait_for_event``."""


class Rerun(Target):
    new_id: str | None = None
    input: list[Any] | None = None
    version: str | None = None
    from_event: int | None = None


class Start(Given):
    name: str
    arguments: list[Any] = []  # noqa: RUF012 - msgspec copies it
    id: str | None = None
    version: str | None = None


class Bulk(Given):
    """An action for all instances that fit a query, or for the given ids."""

    action: Action
    q: str | None = None
    ids: list[str] = []  # noqa: RUF012 - msgspec copies it
    reason: str = ""
    dry_run: bool = True
    confirm: int | None = None
    """The number of instances, as the dry run said it; needed above 100."""


class BulkDone(msgspec.Struct, kw_only=True):
    count: int
    done: list[str] = []
    """The ids on which the action was taken; in a dry run, those on which it would be."""
    errors: dict[str, str] = {}


@post("/run/cancel")
async def cancel(service: Service, given: TargetWithReason) -> Done:
    """Ask an instance to stop: its code gets CancelledError and may clean up."""
    return await _one(service, "cancel", given.id, given.reason)


@post("/run/terminate", Scope.ADMIN)
async def terminate(service: Service, given: TargetWithReason) -> Done:
    """End an instance now, without running its code."""
    return await _one(service, "terminate", given.id, given.reason)


@post("/run/pause")
async def pause(service: Service, given: Target) -> Done:
    """Let no further turn of an instance run until it is resumed."""
    return await _one(service, "pause", given.id)


@post("/run/resume")
async def resume(service: Service, given: Target) -> Done:
    """Let a paused instance go on; a blocked one is tried again."""
    return await _one(service, "resume", given.id)


@post("/run/retry")
async def retry_run(service: Service, given: Target) -> Done:
    """Let an instance go on from where it failed or was blocked."""
    return await _one(service, "retry", given.id)


@post("/run/delete", Scope.ADMIN)
async def delete(service: Service, given: Target) -> Done:
    """Delete an ended instance with its children."""
    return await _one(service, "delete", given.id)


@post("/run/send")
async def send(service: Service, given: Sent) -> Done:
    """Send an event or a message to an instance."""
    await service.info(given.id)
    value = given.value
    if given.mailbox:
        await service.client.send_message(given.id, given.name, value)
        return Done(given.id, f"sent a message to mailbox {given.name!r}")
    await service.client.raise_event(given.id, given.name, value)
    return Done(given.id, f"sent event {given.name!r}")


@post("/run/rerun")
async def rerun_run(service: Service, given: Rerun) -> Done:
    """Run an instance again under another id, from its beginning or from an event."""
    await service.info(given.id)
    new_id = given.new_id or fresh_id(given.id)
    if given.from_event is not None:
        if given.input is not None or given.version is not None:
            raise UsageError("from_event keeps input and version: leave them out")
        copied = await rerun_from_event(
            service.provider, given.id, new_id, given.from_event, clock=service.client.clock
        )
        return Done(new_id, f"kept {copied.events_kept} events")
    encoded = None
    if given.input is not None:
        encoded = service.client.codec.encode(tuple(given.input), where="input")
    copied = await rerun(service.provider, given.id, new_id, input=encoded, version=given.version)
    return Done(new_id, f"{copied.steps_again} finished steps run again")


@post("/start")
async def start(service: Service, given: Start) -> StartedDocument:
    """Start an instance of an orchestration."""
    target: Any = given.name
    if service.registry is not None and any(
        name == given.name for name, _ in service.registry.orchestration_keys
    ):
        target = service.registry.resolve_orchestration(given.name, given.version)
    is_known = False
    if given.id is not None:
        with suppress(NotFound):
            await service.info(given.id)
            is_known = True
    handle = await service.client.start(
        target, *given.arguments, id=given.id, version=given.version, if_exists="get"
    )
    document = started_document(await service.info(handle.id), created=not is_known)
    service.shown(document)
    return document


@post("/bulk", Scope.ADMIN)
async def bulk(service: Service, given: Bulk) -> BulkDone:
    """Count the instances that an action would reach, or take it for all of them."""
    ids = list(given.ids)
    if (given.q is None) == (not ids):
        raise UsageError("give ids, or a query q, not both")
    if given.q is not None:
        ids = await _matching(service, given.action, given.q)
    if given.dry_run:
        return BulkDone(count=len(ids), done=ids)
    if len(ids) > _TYPED_ABOVE and given.confirm != len(ids):
        raise UsageError(
            f"{given.action} would reach {len(ids)} instances; confirm with this number"
        )
    result = BulkDone(count=len(ids))
    for first in range(0, len(ids), _AT_ONCE):
        chunk = ids[first : first + _AT_ONCE]
        outcomes = await asyncio.gather(
            *(_one(service, given.action, each, given.reason) for each in chunk),
            return_exceptions=True,
        )
        for each, outcome in zip(chunk, outcomes, strict=True):
            if isinstance(outcome, PerdureError):
                result.errors[each] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                result.done.append(each)
    return result


async def _matching(service: Service, action: Action, query: str) -> list[str]:
    if not query.strip():
        raise UsageError("the query is empty; to take all, write status:open or status:ended")
    command = "purge" if action == "delete" else action
    found: list[str] = []
    async for info in selection(service, query).for_action(command).instances(service.admin):
        found.append(info.instance_id)
        if len(found) > _BULK_MAX:
            raise UsageError(
                f"the query fits more than {_BULK_MAX:,} instances; narrow it, or use the command "
                f"perdure {command} --query"
            )
    return found


async def _one(service: Service, action: Action, instance_id: str, reason: str = "") -> Done:
    client = service.client
    await service.info(instance_id)
    simple: dict[str, Callable[[], Awaitable[Any]]] = {
        "cancel": lambda: client.cancel(instance_id, reason),
        "terminate": lambda: client.terminate(instance_id, reason),
        "pause": lambda: client.pause(instance_id),
        "resume": lambda: client.resume(instance_id),
        "retry": lambda: retry(service.provider, instance_id, client.clock),
        "delete": lambda: service.admin.delete_instance(instance_id, force=False),
    }
    said = await simple[action]()
    words = {"cancel": "asked to stop", "delete": "deleted", "retry": str(said or "goes on")}
    return Done(instance_id, words.get(action, f"{action}d"))


class Letter(Given):
    letter: int


@post("/letter/requeue")
async def requeue_letter(service: Service, given: Letter) -> Done:
    """Put a dead letter back into the queue."""
    await service.admin.requeue_dead_letter(given.letter)
    return Done(str(given.letter), "back in the queue")


@post("/letter/delete", Scope.ADMIN)
async def delete_letter(service: Service, given: Letter) -> Done:
    """Delete a dead letter."""
    await service.admin.delete_dead_letter(given.letter)
    return Done(str(given.letter), "deleted")


# --- schedules and promises


class Backfill(Target):
    """A time in the past, as a date or as an age such as ``7d``."""

    start: str
    end: str = "0s"
    dry_run: bool = True


class Resolved(Given):
    key: str
    value: Any = None


class Rejected(Given):
    key: str
    reason: str = ""


@post("/schedule/pause")
async def pause_schedule(service: Service, given: TargetWithReason) -> Done:
    """Start no more instances of a schedule until it is resumed."""
    await service.client.schedules.pause(given.id, given.reason)
    return Done(given.id, "paused; slots of the meantime are skipped")


@post("/schedule/resume")
async def resume_schedule(service: Service, given: Target) -> Done:
    """Let a paused schedule go on with its next slot."""
    await service.client.schedules.resume(given.id)
    return Done(given.id, "goes on with its next slot")


@post("/schedule/trigger")
async def trigger_schedule(service: Service, given: Target) -> Done:
    """Start an instance of a schedule now, also of a paused one."""
    handle = await service.client.schedules.trigger(given.id)
    return Done(given.id, f"started {handle.id}")


@post("/schedule/backfill")
async def backfill_schedule(service: Service, given: Backfill) -> Done:
    """Name the slots of a past time that have no instance, or start them."""
    now_ms = service.now_ms()
    start, end = parse_moment(given.start, now_ms), parse_moment(given.end, now_ms)
    if start >= end:
        raise UsageError(
            f"a backfill from {given.start} to {given.end} has no time: give from < to"
        )
    missing = await service.client.schedules.backfill(given.id, start, end, dry_run=given.dry_run)
    said = f"{len(missing)} slots {'without an instance' if given.dry_run else 'started'}"
    return Done(given.id, said, [iso_moment(slot) for slot in missing])


@post("/schedule/remove", Scope.ADMIN)
async def remove_schedule(service: Service, given: Target) -> Done:
    """Delete a schedule. The instances that it has started stay."""
    await service.client.schedules.remove(given.id)
    return Done(given.id, "removed; a worker whose code declares it creates it again")


@post("/promise/resolve")
async def resolve_promise(service: Service, given: Resolved) -> Done:
    """Give a promise its value. The first answer counts."""
    await service.client.resolve(given.key, given.value)
    return Done(given.key, "resolved")


@post("/promise/reject")
async def reject_promise(service: Service, given: Rejected) -> Done:
    """Reject a promise: the code that awaits it gets PromiseRejected."""
    await service.client.reject(given.key, given.reason)
    return Done(given.key, "rejected")
