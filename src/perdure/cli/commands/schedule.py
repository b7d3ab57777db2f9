"""``perdure schedule``: look at schedules, pause them, trigger them, fill in missed slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from perdure.cli.command import Group, id_argument, output_option, yes_option
from perdure.cli.inputs import is_wanted
from perdure.cli.render import (
    Cell,
    Column,
    echo,
    glyph,
    note,
    print_done,
    print_facts,
    print_json,
    print_records,
    warn,
)
from perdure.client.formats import counted, iso_moment, parse_moment, shown_duration, shown_time
from perdure.client.steps import shortened

if TYPE_CHECKING:
    from datetime import datetime

    from perdure.cli.session import Session
    from perdure.client.schedules import ScheduleInfo
    from perdure.schedules.spec import Run

_ID = id_argument("schedule_id", metavar="SCHEDULE")

schedule = Group("schedule", help="Look at schedules; pause, trigger, backfill or remove them.")


@schedule.add(
    "list",
    examples=["perdure schedule list", "perdure schedule list -o json | jq '.[].next'"],
)
@output_option("table", "json", "ids")
async def list_schedules(session: Session, output: str) -> None:
    """List the schedules of the store, with their next slots."""
    print_records(
        output,
        await session.client.schedules.list(),
        id_of=lambda info: info.id,
        columns={
            Column("SCHEDULE"): lambda info: Cell(info.id, "bold"),
            Column("ORCHESTRATION"): lambda info: info.spec.orchestration,
            Column("RHYTHM"): lambda info: info.rhythm,
            Column("NEXT"): lambda info: _when(info.next_at, session.now_ms()),
            Column("STARTED", is_right=True): lambda info: str(info.started),
            Column("NOTE", is_flexible=True): _note,
        },
        if_none="none; declare them in Runtime(schedules=[...]) or at the top of a worker's module",
    )


@schedule.add(
    "show", examples=["perdure schedule show report", "perdure schedule show report -o json"]
)
@_ID
@output_option("table", "json")
async def show(session: Session, schedule_id: str, output: str) -> None:
    """Show a schedule with its settings and its last slots."""
    info = await session.client.schedules.describe(schedule_id)
    if output == "json":
        print_json(info)
        return
    spec, now_ms = info.spec, session.now_ms()
    echo(Cell(f"{info.id}  ", "bold"), _note(info) or "active")
    arguments = ", ".join(msgspec.json.encode(value).decode() for value in spec.args)
    facts = [
        ("starts", f"{spec.orchestration}({shortened(arguments)})"),
        ("rhythm", info.rhythm),
        ("next", _when(info.next_at, now_ms)),
        ("overlap", spec.overlap),
        ("catch up", spec.catch_up),
        ("slots", f"{info.started} started, {info.skipped} skipped"),
    ]
    if spec.jitter:
        facts.append(("jitter", shown_duration(round(spec.jitter * 1000))))
    if spec.pause_after_failures is not None:
        failed = f"{info.failures} in a row so far"
        facts.append(("pauses after", f"{spec.pause_after_failures} failures; {failed}"))
    if info.queued:
        facts.append(("queued", counted(len(info.queued), "slot")))
    print_facts(facts)
    for each in (*info.recent, *info.running):
        _print_run(each)


@schedule.add(
    "next",
    examples=["perdure schedule next report", "perdure schedule next report -n 10 -o json"],
)
@_ID
@click.option(
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=5,
    help="Number of slots. Default: 5.",
)
@output_option("table", "json")
async def next_slots(session: Session, schedule_id: str, count: int, output: str) -> None:
    """Print the coming slots of a schedule."""
    coming = await session.client.schedules.next(schedule_id, count)
    if output == "json":
        print_json([iso_moment(slot) for slot in coming])
        return
    for slot in coming:
        echo(f"{iso_moment(slot)}  ", Cell(_when(slot, session.now_ms()), "dim"))


@schedule.add(
    "pause",
    examples=["perdure schedule pause report", "perdure schedule pause report --reason 'moving'"],
)
@_ID
@click.option("--reason", default="", help="Reason, shown until it is resumed.")
async def pause(session: Session, schedule_id: str, reason: str) -> None:
    """Start no more instances until resume. Slots during the pause are skipped."""
    await session.client.schedules.pause(schedule_id, reason)
    print_done(f"paused {schedule_id}")
    await _warn_without_worker(session)


@schedule.add("resume", examples=["perdure schedule resume report"])
@_ID
async def resume(session: Session, schedule_id: str) -> None:
    """Let a paused schedule go on with its next slot."""
    await session.client.schedules.resume(schedule_id)
    print_done(f"resumed {schedule_id}")
    await _warn_without_worker(session)


@schedule.add("trigger", examples=["perdure schedule trigger report"])
@_ID
async def trigger(session: Session, schedule_id: str) -> None:
    """Start an instance now, also of a paused schedule; print its id."""
    handle = await session.client.schedules.trigger(schedule_id)
    echo(handle.id)
    await _warn_without_worker(session)


@schedule.add(
    "backfill",
    examples=[
        "perdure schedule backfill report --from 2026-11-01 --to 2026-11-08 --dry-run",
        "perdure schedule backfill report --from 7d --to 1h -y",
    ],
)
@_ID
@click.option("--from", "begin", metavar="TIME", required=True, help="A date, or an age: 7d.")
@click.option("--to", "end", metavar="TIME", default="0s", help="Default: now.")
@click.option("--dry-run", is_flag=True, help="Print the slots and start none.")
@yes_option
async def backfill(
    session: Session, schedule_id: str, begin: str, end: str, dry_run: bool, yes: bool
) -> None:
    """Start the slots of a past time that have no instance yet."""
    now_ms = session.now_ms()
    moments = parse_moment(begin, now_ms), parse_moment(end, now_ms)
    schedules = session.client.schedules
    missing = await schedules.backfill(schedule_id, *moments, dry_run=True)
    if dry_run:
        for slot in missing:
            echo(iso_moment(slot))
    count = counted(len(missing), "slot")
    if not missing or dry_run:
        note(f"{count} without an instance")
    elif yes or is_wanted(f"start {count} of {schedule_id}"):
        await schedules.backfill(schedule_id, *moments)
        print_done(f"started {count}")
        await _warn_without_worker(session)


@schedule.add("remove", examples=["perdure schedule remove report -y"])
@_ID
@yes_option
async def remove(session: Session, schedule_id: str, yes: bool) -> None:
    """Delete a schedule. The instances that it has started stay."""
    info = await session.client.schedules.describe(schedule_id)
    if not yes and not is_wanted(f"remove the schedule {schedule_id}"):
        return
    await session.client.schedules.remove(schedule_id)
    print_done(f"removed {schedule_id}")
    if info.is_declared and not info.has_vanished:
        warn("a worker whose code declares it creates it again when it starts")


async def _warn_without_worker(session: Session) -> None:
    if not await session.admin.list_workers():
        warn("no worker is running: it takes effect when one runs")


def _note(info: ScheduleInfo) -> str:
    notes: list[str] = []
    if info.status.is_final or info.status == "Blocked":
        notes.append(f"{info.status}: perdure show {info.id}")
    if info.paused is not None:
        notes.append(f"paused: {info.paused}" if info.paused else "paused")
    if info.has_vanished:
        notes.append("vanished: no running worker declares it")
    return "; ".join(notes)


def _print_run(run: Run) -> None:
    state = {"Running": "open", "Completed": "done", "Skipped": "dropped"}.get(run.status, "failed")
    what = run.id or shown_time(run.slot_ms)
    reason = f": {shortened(run.reason)}" if run.reason else ""
    style = "dim" if state == "dropped" else "red" if state == "failed" else ""
    echo("  ", f"{glyph(state)} {what}  ", Cell(f"{run.status.lower()}{reason}", style))


def _when(moment: datetime | None, now_ms: int) -> str:
    if moment is None:
        return "-"
    left_ms = round(moment.timestamp() * 1000) - now_ms
    return f"in {shown_duration(left_ms)}" if left_ms > 0 else "due"
