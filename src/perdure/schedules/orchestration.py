"""The built-in orchestration of a schedule: an endless loop over durable timers and commands.

One instance of it is one schedule. A turn decides about slots and starts their instances in one
commit, so each slot is decided exactly once, also when workers die.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from perdure.authoring.api import (
    continue_as_new,
    current,
    next_message,
    now,
    set_custom_status,
    side_effect,
)
from perdure.authoring.communication import cancel_instance, instance, send_message_to
from perdure.authoring.context import require_recorder
from perdure.authoring.definitions import Orchestration, orchestration
from perdure.errors import NotFound, OrchestrationCancelled, RemoteFailure
from perdure.model.status import Status
from perdure.schedules.slots import latest_slots, next_slot, slot_name
from perdure.schedules.spec import SCHEDULE, Command, Run, ScheduleState, Spec, Wanted

ROUNDS_MAX: Final = 25
"""Rounds of one execution: its history is short, so that a replay takes milliseconds."""
RECENT_MAX: Final = 10
QUEUED_MAX: Final = 100
CAUGHT_UP_MAX: Final = 100
OUTAGE_MS: Final = 1_000
"""A timer that fires this late: no worker ran."""
LATE_MS: Final = 60_000
"""A slot that is decided later than this counts as missed with catch_up="none"."""
DELETED: Final = "Deleted"


@orchestration(name=SCHEDULE)
async def schedule_loop(state: ScheduleState) -> None:
    await _Loop(state).run()


def loop_handlers() -> tuple[Orchestration[..., None], ...]:
    """Return the loop as a handler. Empty without the extra: such a worker takes no slot."""
    return (schedule_loop,) if find_spec("cronsim") is not None else ()


class _Loop:
    """The rounds of one execution.

    Each command takes effect at its time. So while commands may wait that are older than the slots
    that are due, a round obeys the next command; otherwise it decides about the slots.
    """

    def __init__(self, state: ScheduleState) -> None:
        self._state = state
        self._id = current().instance_id
        self._ends = {run.id: asyncio.create_task(_end_of(run.id)) for run in state.running}
        self._command = next_message(SCHEDULE, Command)
        self._has_older_commands = False
        self._mark: Command | None = None
        """Sent to its own mailbox: when it arrives, every command before it has been obeyed."""

    async def run(self) -> None:
        state = self._state
        for _ in range(ROUNDS_MAX):
            due_ms = state.decided_ms if state.next_ms is None else state.next_ms
            if self._has_older_commands or _now_ms() - due_ms > OUTAGE_MS:
                await self._obey_older_command()
                if self._has_older_commands:
                    continue
            else:
                self._decide(_now_ms())
            await self._start_queued()
            self._publish()
            await self._wait()
        continue_as_new(state)

    async def _obey_older_command(self) -> None:
        """Obey the oldest command, and find out if it was the last one."""
        if self._mark is None:
            self._mark = Command(kind="mark", at_ms=_now_ms())
            await send_message_to(self._id, SCHEDULE, self._mark)
        command = await self._command
        self._command = next_message(SCHEDULE, Command)
        await self._obey(command)
        self._has_older_commands = command != self._mark
        if not self._has_older_commands:
            self._mark = None

    def _publish(self) -> None:
        """Compute the next slot, and show the state to clients."""
        state = self._state
        state.next_ms = None
        if state.paused is None:
            state.next_ms = side_effect(partial(next_slot, state.spec, state.decided_ms))
        set_custom_status(state)

    async def _wait(self) -> None:
        """Wait for the next slot, a command, or the end of an instance."""
        next_ms = self._state.next_ms
        timeout = None if next_ms is None else (next_ms - _now_ms()) / 1000
        waits: list[asyncio.Future[Any]] = [self._command, *self._ends.values()]
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._take_ends()
        if self._command.done():
            await self._obey(self._command.result())
            self._command = next_message(SCHEDULE, Command)
            self._has_older_commands = True  # others may have come with it, each with its own time

    # --- slots

    def _decide(self, until_ms: int) -> None:
        """Decide about every slot up to that time."""
        state = self._state
        if until_ms <= state.decided_ms:
            return
        if state.next_ms is not None and state.next_ms > until_ms:
            return  # computed for this spec; a command with an earlier time may still come
        spec, after_ms = state.spec, state.decided_ms
        state.decided_ms = until_ms
        due, older = side_effect(partial(latest_slots, spec, after_ms, until_ms, CAUGHT_UP_MAX))
        state.skipped += older
        if state.paused is not None:
            for slot_ms in due:
                self._skip(slot_ms, "paused")
            return
        late_ms = _now_ms() - LATE_MS
        for slot_ms in due:
            is_latest = slot_ms == due[-1] and (spec.catch_up != "none" or slot_ms >= late_ms)
            if is_latest or spec.catch_up == "all":
                self._want(slot_ms)
            else:
                self._skip(slot_ms, "missed")

    def _want(self, slot_ms: int) -> None:
        """Start the slot, queue it or skip it, as the overlap says."""
        state = self._state
        overlap = state.spec.overlap
        before = next((run.id for run in state.running if not run.is_backfill), None)
        queued = [each for each in state.queued if not each.is_backfill]
        if overlap == "allow" or not (state.running or state.queued):
            self._start(Wanted(slot_ms))
        elif overlap == "skip" and (before is not None or queued):
            self._skip(slot_ms, f"{before or 'another slot'} was running")
        elif overlap == "queue_one" and queued:
            self._skip(slot_ms, "another slot was queued")
        elif len(queued) >= QUEUED_MAX:
            self._skip(slot_ms, f"{QUEUED_MAX} slots were queued")
        else:
            if overlap == "cancel":
                for wanted in queued:
                    self._skip(wanted.slot_ms, "a later slot came")
                queued = []
            # Slots of the present come before those that are filled in.
            filled = [each for each in state.queued if each.is_backfill]
            state.queued = [*queued, Wanted(slot_ms), *filled]

    async def _start_queued(self) -> None:
        """Start the first queued slot when no other one runs. A pause lets only backfills start."""
        state = self._state
        ready = [each for each in state.queued if each.is_backfill or state.paused is None]
        if ready and not state.running:
            state.queued.remove(ready[0])
            self._start(ready[0])
        elif ready and state.spec.overlap == "cancel" and not ready[0].is_backfill:
            for run in state.running:
                if not run.reason:
                    await cancel_instance(run.id, "the next slot of its schedule has come")
            state.running = [
                msgspec.structs.replace(run, reason="cancelled for the next slot")
                for run in state.running
            ]

    def _start(self, wanted: Wanted) -> None:
        state, spec = self._state, self._state.spec
        run = Run(
            slot_ms=wanted.slot_ms,
            id=self._name(wanted),
            is_backfill=wanted.is_backfill,
        )
        if run.id in self._ends:
            return  # it was triggered or filled in before, and runs
        recorder = require_recorder(SCHEDULE)
        recorder.start_named(
            spec.orchestration,
            recorder.codec.encode(spec.args, where=f"arguments of {spec.orchestration}"),
            run.id,
            version=spec.version,
            # The jitter spreads what is due at one moment; this one was asked for now.
            delay_ms=0 if wanted.is_backfill else _jitter_ms(spec, run.id),
            scheduled_for_ms=wanted.slot_ms,
        )
        state.started += 1
        state.running.append(run)
        self._ends[run.id] = asyncio.create_task(_end_of(run.id))

    def _name(self, wanted: Wanted) -> str:
        return f"{self._id}@{slot_name(wanted.slot_ms)}"

    def _skip(self, slot_ms: int, reason: str) -> None:
        self._state.skipped += 1
        self._note(Run(slot_ms=slot_ms, status="Skipped", reason=reason))

    def _note(self, run: Run) -> None:
        self._state.recent = [*self._state.recent, run][-RECENT_MAX:]

    # --- ends and commands

    def _take_ends(self) -> None:
        state = self._state
        for run in list(state.running):
            task = self._ends[run.id]
            if not task.done():
                continue
            del self._ends[run.id]
            state.running.remove(run)
            status, reason = task.result()
            self._note(msgspec.structs.replace(run, status=status, reason=reason))
            if status == Status.COMPLETED:
                state.failures = 0
            elif status in {Status.FAILED, Status.TERMINATED}:
                state.failures += 1
                if state.failures == state.spec.pause_after_failures and state.paused is None:
                    self._decide(_now_ms())
                    state.paused = f"{state.failures} failures in a row; the last was {run.id}"

    async def _obey(self, command: Command) -> None:
        state = self._state
        at_ms = min(command.at_ms, _now_ms())
        self._decide(at_ms)
        state.decided_ms = max(state.decided_ms, at_ms)
        match command.kind:
            case "update":
                state.spec = command.spec or state.spec
                state.is_declared = command.is_declared
                state.next_ms = None
            case "pause":
                state.paused = command.reason
            case "resume":
                state.paused = None
                state.failures = 0
                state.next_ms = None
            case "trigger":
                for slot_ms in command.slots:
                    self._start(Wanted(slot_ms, is_backfill=True))
            case "backfill":
                for slot_ms in command.slots:
                    wanted = Wanted(slot_ms, is_backfill=True)
                    if state.spec.overlap == "allow":
                        self._start(wanted)
                    elif wanted not in state.queued and self._name(wanted) not in self._ends:
                        state.queued.append(wanted)
            case "mark":
                pass


async def _end_of(instance_id: str) -> tuple[str, str]:
    """Wait for the end of a started instance; return its status and the reason of a bad end."""
    try:
        await instance(instance_id).result()
    except OrchestrationCancelled as error:
        return Status.CANCELLED, error.message
    except RemoteFailure as error:
        return Status.FAILED, str(error).partition("\n")[0][:500]
    except NotFound:
        return DELETED, ""
    return Status.COMPLETED, ""


def _jitter_ms(spec: Spec, instance_id: str) -> int:
    """Return the delay of one slot: the same on every worker, spread evenly over the jitter."""
    if not spec.jitter:
        return 0
    return round(spec.jitter * 1000 * (zlib.crc32(instance_id.encode()) / 2**32))


def _now_ms() -> int:
    return round(now().timestamp() * 1000)
