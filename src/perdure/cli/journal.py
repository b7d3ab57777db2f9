"""The steps of an execution as lines that read like the code, long fan-outs folded into one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Final

from perdure.cli.render import Cell, glyph
from perdure.client.durations import shown_duration
from perdure.client.insights import QUEUE_LIMIT
from perdure.client.steps import BranchView, StepView, branches_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perdure.client.insights import Attempt

_FOLD_FROM: Final = 6
"""That many steps of one name in a row become one line."""
_OPEN_SHOWN: Final = 3
_STYLES: Final = {"done": "green", "failed": "bold red", "open": "cyan", "dropped": "dim"}


@dataclass(frozen=True, slots=True)
class Line:
    """A step, or several that were folded."""

    depth: int
    state: str
    call: str
    took: str
    outcome: str
    is_bad: bool = False

    def cells(self) -> list[str | Cell]:
        style = _STYLES[self.state] if not self.is_bad else _STYLES["failed"]
        sign = "retrying" if self.is_bad and self.state == "open" else self.state
        call = f"{'│ ' * self.depth}{glyph(sign)} {self.call}"
        return [
            Cell(call, "dim" if self.state == "dropped" else ""),
            Cell(self.took, "dim"),
            Cell(self.outcome, style if self.state != "done" else ""),
        ]


@dataclass(frozen=True, slots=True)
class _Queue:
    """Activities that are queued or running."""

    attempts: dict[int, Attempt]
    is_all: bool
    """What is not in it has ended."""


def lines_of(
    steps: Iterable[StepView], attempts: Sequence[Attempt], now_ms: int, *, is_whole: bool = False
) -> list[Line]:
    """In the order of the code; steps that turned out not to be needed are left out."""
    queue = _Queue(
        {attempt.activity_id: attempt for attempt in attempts},
        is_all=len(attempts) < QUEUE_LIMIT,
    )
    shown = [step for step in steps if is_whole or step.state != "dropped"]
    return list(_branch_lines(branches_of(shown), 0, queue, now_ms, is_whole))


def _branch_lines(
    branch: BranchView, depth: int, queue: _Queue, now_ms: int, is_whole: bool
) -> Iterable[Line]:
    for _, group in groupby(branch.items, key=_likeness):
        members = list(group)
        if len(members) >= _FOLD_FROM and not is_whole:
            yield _folded(members, depth, now_ms)
            members = [member for member in members if _is_notable(member)][:_OPEN_SHOWN]
        for member in members:
            if isinstance(member, StepView):
                yield _line(member, depth, queue, now_ms)
            else:
                yield from _branch_lines(member, depth + 1, queue, now_ms, is_whole)


def _likeness(item: StepView | BranchView) -> tuple[str, ...]:
    if isinstance(item, StepView):
        return (item.kind, item.name)
    return ("task", *(name for member in item.items for name in _likeness(member)))


def _is_notable(item: StepView | BranchView) -> bool:
    steps = [item] if isinstance(item, StepView) else item.steps()
    return any(step.state in {"open", "failed"} for step in steps)


def _folded(members: Sequence[StepView | BranchView], depth: int, now_ms: int) -> Line:
    steps = [
        step
        for member in members
        for step in ([member] if isinstance(member, StepView) else member.steps())
    ]
    states = Counter(step.state for step in steps)
    took = sorted((step.ended_ms or now_ms) - step.since_ms for step in steps)
    first = members[0]
    if isinstance(first, StepView):
        what = f"{len(members)} x {first.name or first.kind}"
    else:
        names = dict.fromkeys(step.name or step.kind for step in first.steps())
        what = f"{len(members)} tasks of {', '.join(names)}"
    counted = ", ".join(f"{number} {word}" for word, number in states.most_common())
    spread = " / ".join(map(shown_duration, (took[0], round(median(took)), took[-1])))
    return Line(
        depth=depth,
        state="open" if states["open"] else "failed" if states["failed"] else "done",
        call=what,
        took=shown_duration(took[-1]),
        outcome=f"{counted}; min / median / max {spread}",
        is_bad=bool(states["failed"]),
    )


def _line(step: StepView, depth: int, queue: _Queue, now_ms: int) -> Line:
    call, attempt = step.call, queue.attempts.get(step.event_id)
    if step.child_id is not None:
        call = f"▸ {call} {step.child_id}"
    return Line(
        depth=depth,
        state=step.state,
        call=call,
        took=shown_duration((step.ended_ms or now_ms) - step.since_ms),
        outcome=_outcome(step, queue, now_ms),
        is_bad=step.state == "failed" or (attempt is not None and attempt.last_error is not None),
    )


def _outcome(step: StepView, queue: _Queue, now_ms: int) -> str:
    match step.state:
        case "done":
            again = f" ({step.attempts} attempts)" if step.attempts > 1 else ""
            returned = step.result if step.result not in {None, "null"} else ""
            return f"→ {returned}{again}" if returned else again.strip()
        case "failed":
            again = f" ({step.attempts} attempts)" if step.attempts > 1 else ""
            return f"{step.error}{again}"
        case "dropped":
            return "not needed"
        case "open":
            return _open(step, queue, now_ms)


def _open(step: StepView, queue: _Queue, now_ms: int) -> str:
    attempt = queue.attempts.get(step.event_id)
    if attempt is not None:
        doing = "running" if attempt.is_running else "queued"
        if attempt.next_ms > now_ms:
            doing = f"next in {shown_duration(attempt.next_ms - now_ms)}"
        number = f"attempt {attempt.number} of {attempt.of}, " if attempt.of > 1 else ""
        error = f": {attempt.last_error}" if attempt.last_error else ""
        return f"{number}{doing}{error}"
    if step.due_ms is not None:
        left_ms = step.due_ms - now_ms
        return f"due in {shown_duration(left_ms)}" if left_ms > 0 else "due"
    if step.kind == "activity" and queue.is_all:
        return "ended, not taken up yet"
    return "waiting" if step.kind in {"event", "message"} else "running"
