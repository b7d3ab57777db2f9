"""Instances on a screen: as rows of a table, counted by status, and everything about one."""

from __future__ import annotations

import shlex
from collections import Counter
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias

from perdure.cli.render import (
    Cell,
    Column,
    echo,
    echo_wrapped,
    glyph,
    is_terminal,
    print_facts,
    print_steps,
    status_style,
    suggest,
)
from perdure.cli.session import store_option
from perdure.client.formats import counted, shown_age, shown_duration, shown_time
from perdure.client.insights import QUEUE_LIMIT, Attempt, Insight, InstanceDetails, next_commands
from perdure.client.instance import block_of, failure_of
from perdure.client.steps import BranchView, State, StepView, branches_of, payload_text, shortened
from perdure.codec import shown_text
from perdure.escape import clean_block
from perdure.limits import HISTORY_EVENTS_WARN
from perdure.model.failures import BlockReason, own_frames
from perdure.model.status import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perdure.providers.records import InstanceInfo, QueueDepth


def shown_status(info: InstanceInfo) -> str:
    """Return the status of the instance, between two executions as well."""
    return info.status.of_instance.value


COLUMNS = (
    Column("STATUS"),
    Column("NAME"),
    Column("VERSION", width_min=100),
    Column("ID"),
    Column("STARTED", is_right=True, width_min=70),
    Column("TOOK", is_right=True, width_min=100),
    Column("NOW", is_flexible=True),
)


def row_of(info: InstanceInfo, insight: Insight, now_ms: int) -> list[str | Cell]:
    style = status_style(info.status)
    word = "retrying" if insight.doing == "retrying" else shown_status(info).lower()
    ended_ms = info.completed_at_ms if info.status.is_final else None
    took_ms = (ended_ms or now_ms) - info.created_at_ms
    return [
        Cell(f"{glyph(word)} {word}", style),
        info.name,
        info.version or "",
        Cell(info.instance_id, "bold"),
        f"{shown_age(now_ms - info.created_at_ms)} ago",
        shown_duration(took_ms),
        Cell(_now(info, insight), "" if not insight.error else "red"),
    ]


def shown_queue(depth: QueueDepth) -> str:
    return f"{depth.visible} ready, {depth.locked} locked, {depth.delayed} later"


def shown_bytes(size: int) -> str:
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def named(info: InstanceInfo) -> str:
    return f"{info.name}@{info.version}" if info.version else info.name


def _now(info: InstanceInfo, insight: Insight) -> str:
    if info.status is Status.COMPLETED:
        returned = info.output if info.output not in {None, "null"} else ""
        return f"{glyph('returned')} {shortened(returned)}" if returned else ""
    if info.status is Status.FAILED:
        return insight.error or ""
    said = insight.explanation
    is_own = info.name.startswith("perdure.")  # its status is for perdure schedule, not for people
    if info.custom_status is not None and info.status.of_instance is Status.RUNNING and not is_own:
        return f"{said} · {shown_text(info.custom_status)}"
    return said


# --- one instance

Row: TypeAlias = list[Cell]

_TEXT_MAX: Final = 500
_UNREAD_SHOWN: Final = 5
_ADVICE: Final = {
    BlockReason.UNDECODABLE: "What is stored stays as it is: let the annotation or the type in the "
    "code fit it, and deploy. A worker with other code tries again by itself.",
    BlockReason.POISON: "A worker with other code tries again by itself; with the same code, "
    "after retry.",
}


def print_details(
    details: InstanceDetails,
    now_ms: int,
    *,
    is_whole: bool = False,
    deleted_ms: int | None = None,
) -> None:
    info, insight = details.info, details.insight
    status = "Retrying" if insight.doing == "retrying" else shown_status(info)
    echo(
        Cell(f"{named(info)}  ", "bold"),
        Cell(f"{info.instance_id}  ", "bold"),
        Cell(f"{glyph(status)} {status.upper()}", status_style(info.status)),
    )
    echo_wrapped(Cell(insight.sentence, "red" if insight.error else ""))
    print_facts([*_facts(details, now_ms), *_kept(deleted_ms, now_ms)])
    if details.last.left_out:
        echo("  ", Cell(f"(the first {details.last.left_out} events are left out)", "dim"))
    if details.last.steps:
        echo("")
        print_steps(lines_of(details, now_ms, is_whole=is_whole))
    _print_trouble(details)
    if is_terminal():
        echo("")
        suggest(*(f"perdure {each}" for each in next_commands(details, store_option())))


def _facts(details: InstanceDetails, now_ms: int) -> list[tuple[str, str]]:
    info = details.info
    ago = shown_duration(now_ms - info.created_at_ms)
    facts = [("started", f"{shown_time(info.created_at_ms)} ({ago} ago)")]
    if details.last.input is not None:
        facts.append(("input", payload_text(details.last.input, _TEXT_MAX)))
    if info.status is Status.COMPLETED:
        facts.append(("output", shortened(info.output or "null", _TEXT_MAX)))
    if info.custom_status is not None:
        facts.append(("status", shortened(info.custom_status, _TEXT_MAX)))
    if info.parent_instance_id is not None:
        facts.append(("parent", info.parent_instance_id))
    event_count, stats = details.last.event_count, details.stats
    if event_count and stats is not None:
        long = "; long: continue_as_new() starts a fresh one"
        warning = long if event_count >= HISTORY_EVENTS_WARN else ""
        size = shown_bytes(stats.history_bytes)
        words = f"{event_count} events, {size}, execution {info.execution_id}{warning}"
        facts.append(("history", words))
    if stats is not None and stats.state_keys:
        keys = counted(stats.state_keys, "key")
        facts.append(("state", f"{keys}, {shown_bytes(stats.state_bytes)}"))
    waiting = sum(queued.visible_at_ms <= now_ms for queued in details.queues.messages)
    if waiting and not info.status.is_final:
        facts.append(("queued", f"{counted(waiting, 'message')} for it"))
    if details.unread:
        shown = ", ".join(
            f"{each.kind} {each.name!r}" + (f" x {each.count}" if each.count > 1 else "")
            for each in details.unread[:_UNREAD_SHOWN]
        )
        more = len(details.unread) - _UNREAD_SHOWN
        facts.append(("unread", f"{shown} and {more} more" if more > 0 else shown))
    return facts


def _kept(deleted_ms: int | None, now_ms: int) -> list[tuple[str, str]]:
    """Say until when the instance is kept; nothing if it stays."""
    if deleted_ms is None:
        return []
    rest_ms = deleted_ms - now_ms
    rest = f"{shown_duration(rest_ms)} more" if rest_ms > 0 else "due to be deleted"
    return [("kept", f"until {shown_time(deleted_ms)} ({rest})")]


def _print_trouble(details: InstanceDetails) -> None:
    if details.last.problem is not None:
        echo("")
        echo("  ", Cell(details.last.problem, "red"))
    block, failure = block_of(details.info), failure_of(details.info)
    if block is not None and details.info.status is Status.BLOCKED:
        if block.detail:
            _print_block(str(block.detail))
        else:
            echo("")
            echo_wrapped(Cell(block.message, "dim"))
        if block.reason in _ADVICE:
            echo("")
            echo_wrapped(Cell(_ADVICE[block.reason], "dim"))
        if block.message.startswith("arguments (") and not details.last.event_count:
            again = ["perdure", "start", details.info.name, "--id", details.info.instance_id]
            echo_wrapped(
                Cell(
                    f"To start it with other arguments: {shlex.join(again)} --if-exists replace "
                    "--input JSON. An array is the list of all arguments: a single argument that "
                    'is a list is written [["a", "b"]].',
                    "dim",
                )
            )
    elif failure is not None and failure.traceback:
        _print_block(own_frames(failure.traceback))


def _print_block(text: str) -> None:
    echo("")
    for line in clean_block(text.rstrip()).splitlines():
        echo("  ", Cell(line, "dim"))


_FOLD_FROM: Final = 6
"""This many consecutive steps of one name are shown as one line."""
_OPEN_SHOWN: Final = 3
_STYLES: Final = {"done": "", "failed": "bold red", "open": "cyan", "dropped": "dim"}


def lines_of(details: InstanceDetails, now_ms: int, *, is_whole: bool = False) -> list[Row]:
    """Return the lines of the steps in the order of the code: call, duration, outcome.

    Steps that were not needed are left out. Many similar steps in a row are one line.
    """
    steps = [step for step in details.last.steps if is_whole or step.state != "dropped"]
    lines = _Lines(details.queues.attempts, now_ms, is_whole=is_whole)
    return list(lines.of_branch(branches_of(steps), 0))


class _Lines:
    """Makes the lines of steps, with the attempts of queued and running activities."""

    def __init__(self, attempts: Sequence[Attempt], now_ms: int, *, is_whole: bool) -> None:
        self._attempts = {attempt.activity_id: attempt for attempt in attempts}
        self._has_all_attempts = len(attempts) < QUEUE_LIMIT
        self._now_ms = now_ms
        self._is_whole = is_whole

    def of_branch(self, branch: BranchView, depth: int) -> Iterator[Row]:
        for _, group in groupby(branch.items, key=_likeness):
            members = list(group)
            if len(members) >= _FOLD_FROM and not self._is_whole:
                yield self._folded(members, depth)
                members = [member for member in members if _is_notable(member)][:_OPEN_SHOWN]
            for member in members:
                if isinstance(member, StepView):
                    yield self._line(member, depth)
                else:
                    yield from self.of_branch(member, depth + 1)

    def _folded(self, members: Sequence[StepView | BranchView], depth: int) -> Row:
        steps = [step for member in members for step in _steps_in(member)]
        states = Counter(step.state for step in steps)
        took = sorted(map(self._took_ms, steps))
        first = members[0]
        if isinstance(first, StepView):
            what = f"{len(members)} x {first.name or first.kind}"
        else:
            names = dict.fromkeys(step.name or step.kind for step in first.steps())
            what = f"{len(members)} tasks of {', '.join(names)}"
        totals = ", ".join(f"{number} {word}" for word, number in states.most_common())
        spread = " / ".join(map(shown_duration, (took[0], round(median(took)), took[-1])))
        return _row(
            depth,
            "open" if states["open"] else "failed" if states["failed"] else "done",
            what,
            took[-1],
            f"{totals}; min / median / max {spread}",
            is_bad=bool(states["failed"]),
        )

    def _line(self, step: StepView, depth: int) -> Row:
        call, attempt = step.call, self._attempts.get(step.event_id)
        if step.child_id is not None:
            call = f"▸ {call} {step.child_id}"
        has_failed = attempt is not None and attempt.last_error is not None
        return _row(
            depth,
            step.state,
            call,
            self._took_ms(step),
            self._outcome(step),
            is_bad=step.state == "failed" or has_failed,
        )

    def _took_ms(self, step: StepView) -> int:
        return (step.ended_ms or self._now_ms) - step.since_ms

    def _outcome(self, step: StepView) -> str:
        again = f" ({step.attempts} attempts)" if step.attempts > 1 else ""
        match step.state:
            case "done":
                returned = step.result if step.result not in {None, "null"} else ""
                return f"{glyph('returned')} {returned}{again}" if returned else again.strip()
            case "failed":
                return f"{step.error}{again}"
            case "dropped":
                return "not needed"
            case "open":
                return self._progress(step)

    def _progress(self, step: StepView) -> str:
        attempt = self._attempts.get(step.event_id)
        if attempt is not None and step.kind != "instance":
            doing = "running" if attempt.is_running else "queued"
            if attempt.next_ms > self._now_ms:
                doing = f"next in {shown_duration(attempt.next_ms - self._now_ms)}"
            number = f"attempt {attempt.number} of {attempt.of}, " if attempt.of > 1 else ""
            error = f": {attempt.last_error}" if attempt.last_error else ""
            return f"{number}{doing}{error}"
        if step.due_ms is not None:
            left_ms = step.due_ms - self._now_ms
            return f"due in {shown_duration(left_ms)}" if left_ms > 0 else "due"
        if step.kind == "activity" and self._has_all_attempts:
            return "ended, not taken up yet"
        return "waiting" if step.kind in {"event", "message", "instance"} else "running"


def _row(depth: int, state: State, call: str, took_ms: int, outcome: str, *, is_bad: bool) -> Row:
    sign = "retrying" if is_bad and state == "open" else state
    return [
        Cell(f"{'│ ' * depth}{glyph(sign)} {call}", "dim" if state == "dropped" else ""),
        Cell(shown_duration(took_ms), "dim"),
        Cell(outcome, _STYLES["failed" if is_bad else state]),
    ]


def _likeness(item: StepView | BranchView) -> tuple[str, ...]:
    if isinstance(item, StepView):
        return (item.kind, item.name)
    return ("task", *(name for member in item.items for name in _likeness(member)))


def _is_notable(item: StepView | BranchView) -> bool:
    return any(step.state in {"open", "failed"} for step in _steps_in(item))


def _steps_in(item: StepView | BranchView) -> list[StepView]:
    return [item] if isinstance(item, StepView) else item.steps()
