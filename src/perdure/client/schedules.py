"""Create, look at and control the schedules of a store: ``client.schedules``."""

from __future__ import annotations

import datetime
from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from perdure.arguments import (
    check_moment,
    check_number,
    check_reason,
    moment_of,
    whole_milliseconds,
)
from perdure.client.admin import read_by_ids, read_instances
from perdure.client.formats import record_from
from perdure.client.rerun import read_start
from perdure.errors import AlreadyExists, CannotUnwrap, InstanceFinished, InvalidValue, NotFound
from perdure.model.status import Status
from perdure.providers.records import InstanceInfo, InstanceQuery
from perdure.schedules.orchestration import schedule_loop
from perdure.schedules.slots import slot_name, slots_after
from perdure.schedules.spec import SCHEDULE, Command, Run, Schedule, ScheduleState, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.authoring.definitions import Orchestration
    from perdure.client.client import Client
    from perdure.client.instance import Handle
    from perdure.schedules.spec import ScheduleOptions

BACKFILL_MAX: Final = 1_000


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule at one moment. The API and ``-o json`` give it as JSON."""

    id: str
    spec: Spec
    rhythm: str
    """The cron line with its zone, or the interval."""
    status: Status
    """Status of the instance that is the schedule: Running, unless an operator or an error stopped
    it."""
    next_at: datetime.datetime | None = msgspec.field(name="next")
    """The next slot; None if it is paused or has ended."""
    paused: str | None
    """The reason of the pause; an empty text if none was given."""
    is_declared: bool
    """A runtime has declared it in ``schedules=``; else a client has created it."""
    has_vanished: bool
    """It was declared, and workers run, but the code of none of them declares it any more."""
    failures: int
    """Failed instances in a row."""
    started: int
    skipped: int
    running: tuple[Run, ...]
    queued: tuple[datetime.datetime, ...]
    recent: tuple[Run, ...]
    """The last slots that ended or were skipped, oldest first."""


class Schedules:
    """The schedules of a store."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # --- looking

    async def list(self) -> list[ScheduleInfo]:
        """Return every schedule, sorted by id."""
        declared = await self._declared()
        instances = read_instances(self._client.provider.admin, InstanceQuery(name=SCHEDULE))
        found = [self._view(info, await self._state(info), declared) async for info in instances]
        return sorted(found, key=lambda each: each.id)

    async def describe(self, id: str) -> ScheduleInfo:  # noqa: A002
        """Return one schedule. Raises NotFound if no schedule has the id."""
        info = await self._info(id)
        return self._view(info, await self._state(info), await self._declared())

    async def next(self, id: str, count: int = 5) -> Sequence[datetime.datetime]:  # noqa: A002
        """Return the coming slots, in UTC. Those of a paused schedule begin when it is resumed."""
        check_number(count, "count", minimum=1, maximum=BACKFILL_MAX)
        state = await self._state(await self._info(id))
        after_ms = max(state.decided_ms, self._client.clock.now_ms())
        return [moment_of(slot) for slot in islice(slots_after(state.spec, after_ms), count)]

    # --- changing

    async def create(
        self,
        id: str,  # noqa: A002
        orchestration: Orchestration[..., Any] | str,
        *args: Any,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Create a schedule, with the arguments of ``Schedule``. Errors: AlreadyExists.

        Slots count from now on.
        """
        schedule = Schedule(id, orchestration, *args, codec=self._client.codec, **options)
        state = ScheduleState(spec=schedule.spec, decided_ms=self._client.clock.now_ms())
        try:
            await self._client.start(schedule_loop, state, id=id, if_exists="fail")
        except AlreadyExists:
            await self._info(id)
            raise AlreadyExists(
                f"there is a schedule {id!r} already; change it with schedules.update()"
            ) from None

    async def update(self, schedule: Schedule) -> None:
        """Change a schedule. Its slots up to now are those of the old one, later ones of the new.

        A slot that both have is started once.
        """
        await self._send(schedule.id, kind="update", spec=schedule.spec)

    async def pause(self, id: str, reason: str = "") -> None:  # noqa: A002
        """Start no more instances until ``resume``. Slots of the meantime are skipped."""
        await self._send(id, kind="pause", reason=check_reason(reason))

    async def resume(self, id: str) -> None:  # noqa: A002
        """Go on with the next slot."""
        await self._send(id, kind="resume")

    async def trigger(self, id: str) -> Handle[Any]:  # noqa: A002
        """Start an instance now, also of a paused schedule and beside a running instance."""
        slot_ms = self._client.clock.now_ms()
        slot_ms += slot_ms % 1000 == 0  # no slot of the schedule has milliseconds
        await self._send(id, kind="trigger", slots=[slot_ms])
        return self._client.get(f"{id}@{slot_name(slot_ms)}")

    async def backfill(
        self,
        id: str,  # noqa: A002
        start: datetime.datetime,
        end: datetime.datetime,
        *,
        dry_run: bool = False,
    ) -> Sequence[datetime.datetime]:
        """Start the slots from ``start`` to ``end`` that have no instance yet; return them.

        They run one after the other, behind the slots of the present; all at once with
        ``overlap="allow"``.
        """
        check_moment(start, "start")
        check_moment(end, "end")
        first_ms = whole_milliseconds(start, round_up=True)
        last_ms = whole_milliseconds(end, round_up=False)
        state = await self._state(await self._info(id))
        if last_ms > self._client.clock.now_ms():
            raise InvalidValue(f"a backfill ends in the past, not at {end}")
        coming = takewhile(lambda slot: slot <= last_ms, slots_after(state.spec, first_ms - 1))
        slots = list(islice(coming, BACKFILL_MAX + 1))
        if len(slots) > BACKFILL_MAX:
            raise InvalidValue(
                f"{id!r} has more than {BACKFILL_MAX} slots from {start} to {end}: fill in a "
                "shorter time, then the next one"
            )
        names = {slot: f"{id}@{slot_name(slot)}" for slot in slots}
        instances = read_by_ids(self._client.provider.admin, list(names.values()))
        known = {info.instance_id async for info in instances}
        missing = [slot for slot in slots if names[slot] not in known]
        if missing and not dry_run:
            await self._send(id, kind="backfill", slots=missing)
        return [moment_of(slot) for slot in missing]

    async def remove(self, id: str) -> None:  # noqa: A002
        """Delete a schedule. The instances that it has started stay and go on.

        A runtime that declares it creates it again when it starts.
        """
        info = await self._info(id)
        if not info.status.is_final:
            with suppress(InstanceFinished):
                await self._client.terminate(id, "the schedule was removed")
        await self._client.admin.delete(id)

    async def declare(self, schedule: Schedule) -> None:
        """Create the schedule of a runtime, or change it if it is another one than before."""
        client, id_ = self._client, schedule.id
        state = ScheduleState(
            spec=schedule.spec, decided_ms=client.clock.now_ms(), is_declared=True
        )
        try:
            await client.start(schedule_loop, state, id=id_, if_exists="fail")
        except AlreadyExists:
            info = await self._info(id_)
            known = await self._state(info)
            if info.status.is_final:
                # After an error it goes on where it stood; an operator who ended it meant that.
                if info.status is Status.FAILED:
                    state.decided_ms = known.decided_ms
                await client.start(schedule_loop, state, id=id_, if_exists="replace")
            elif known.spec != schedule.spec or not known.is_declared:
                await self._send(id_, kind="update", spec=schedule.spec, is_declared=True)

    # --- internal

    async def _send(self, id: str, **fields: Any) -> None:  # noqa: A002
        await self._info(id)
        command = Command(at_ms=self._client.clock.now_ms(), **fields)
        await self._client.send_message(id, SCHEDULE, command)

    async def _info(self, id: str) -> InstanceInfo:  # noqa: A002
        try:
            info = await self._client.provider.admin.get_instance_info(id)
        except NotFound:
            raise NotFound(
                f"there is no schedule {id!r}; 'perdure schedule list' shows all"
            ) from None
        if info.name != SCHEDULE:
            raise InvalidValue(
                f"{id!r} is an instance of {info.name!r}, not a schedule; choose another id"
            )
        return info

    async def _state(self, info: InstanceInfo) -> ScheduleState:
        """Return the last published state, or the first one if no worker has taken it up."""
        client = self._client
        where = f"state of schedule {info.instance_id!r}"
        state: ScheduleState
        try:
            if info.custom_status is not None:
                raw = msgspec.Raw(info.custom_status.encode())
                state = client.codec.decode(raw, ScheduleState, where=where)
            else:
                start = await read_start(client.provider, info.instance_id, info.execution_id)
                (state,), _ = schedule_loop.signature.decode_arguments(start.input, client.codec)
        except CannotUnwrap as error:
            raise InvalidValue(
                f"{where} is wrapped by a codec that this client lacks: {error}"
            ) from None
        return state

    async def _declared(self) -> frozenset[str] | None:
        """Return the ids that running workers declare; None if no worker runs."""
        workers = await self._client.provider.admin.list_workers()
        if not workers:
            return None
        return frozenset(name for worker in workers for name in worker.schedules)

    def _view(
        self, info: InstanceInfo, state: ScheduleState, declared: frozenset[str] | None
    ) -> ScheduleInfo:
        status = info.status.of_instance
        is_off = state.paused is not None or status.is_final
        next_ms = None if is_off else state.next_ms
        if next_ms is None and not is_off:
            next_ms = next(slots_after(state.spec, state.decided_ms), None)
        return record_from(
            ScheduleInfo,
            state,
            id=info.instance_id,
            rhythm=state.spec.rhythm,
            status=status,
            next_at=None if next_ms is None else moment_of(next_ms),
            has_vanished=(
                state.is_declared and declared is not None and info.instance_id not in declared
            ),
            running=tuple(state.running),
            queued=tuple(moment_of(wanted.slot_ms) for wanted in state.queued),
            recent=tuple(state.recent),
        )
