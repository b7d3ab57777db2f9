"""Everything about one instance, read at once and printed on one screen."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from perdure.cli.documents import shown_status
from perdure.cli.escape import clean_block
from perdure.cli.journal import lines_of
from perdure.cli.render import (
    Cell,
    echo,
    echo_wrapped,
    glyph,
    is_terminal,
    print_facts,
    print_steps,
    status_style,
)
from perdure.cli.rows import named
from perdure.cli.session import suggest_commands
from perdure.cli.tracebacks import own_frames
from perdure.client.durations import shown_duration, shown_time
from perdure.client.insights import Insight, Surroundings, explain, read_surroundings
from perdure.client.steps import StepView, shortened, steps_of
from perdure.client.view import failure_of
from perdure.errors import CorruptData, NotFound
from perdure.limits import HISTORY_EVENTS_WARN
from perdure.model import events, wire
from perdure.model.failures import BlockReason
from perdure.model.status import Status

if TYPE_CHECKING:
    import msgspec

    from perdure.cli.session import Session
    from perdure.providers.administration import ProviderAdmin
    from perdure.providers.items import InstanceInfo

_EVENTS_READ: Final = 5_000
"""Of a longer history only the end is shown."""
_TEXT_MAX: Final = 500
_ADVICE: Final = {
    BlockReason.UNDECODABLE: "What is stored stays as it is: let the annotation or the type in the "
    "code fit it, and deploy. A worker with other code tries again by itself.",
    BlockReason.POISON: "A worker with other code tries again by itself; with the same code, "
    "after retry.",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is shown of one instance."""

    info: InstanceInfo
    insight: Insight
    around: Surroundings
    steps: list[StepView]
    input: msgspec.Raw | None
    event_count: int
    left_out: int
    problem: str | None


async def read_picture(session: Session, instance_id: str) -> Picture:
    info = await session.info(instance_id)
    admin = session.admin
    workers = await admin.list_workers()
    around = await read_surroundings(admin, instance_id, workers)
    event_count, left_out, problem = await _count_events(admin, info), 0, None
    history: list[events.Event] = []
    started: msgspec.Raw | None = None
    if event_count:
        left_out = max(0, event_count - _EVENTS_READ)
        read = session.provider.read_with_execution
        try:
            records = await read(instance_id, info.execution_id, after_event_id=left_out)
            first = await read(instance_id, info.execution_id, limit=1)
            history = wire.decode_history(record.data for record in records)
            beginning = wire.decode_event(first[0].data) if first else None
        except CorruptData as error:
            history, problem = [], f"the history cannot be read: {error.message}"
        else:
            if isinstance(beginning, events.OrchestrationStarted):
                started = beginning.input
    steps = steps_of(history)
    return Picture(
        info=info,
        insight=explain(info, steps, around, session.now_ms()),
        around=around,
        steps=steps,
        input=started,
        event_count=event_count,
        left_out=left_out,
        problem=problem,
    )


async def _count_events(admin: ProviderAdmin, info: InstanceInfo) -> int:
    try:
        return (await admin.get_execution_info(info.instance_id, info.execution_id)).event_count
    except NotFound:  # it has not begun
        return 0


def print_picture(picture: Picture, now_ms: int, *, is_whole: bool = False) -> None:
    info, insight = picture.info, picture.insight
    status = "Retrying" if insight.doing == "retrying" else shown_status(info)
    echo(
        Cell(f"{named(info)}  ", "bold"),
        Cell(f"{info.instance_id}  ", "bold"),
        Cell(f"{glyph(status)} {status.upper()}", status_style(info.status)),
    )
    echo_wrapped(Cell(insight.sentence, "red" if insight.error else ""))
    print_facts(_facts(picture, now_ms))
    if picture.left_out:
        echo("  ", Cell(f"(the first {picture.left_out} events are left out)", "dim"))
    if picture.steps:
        echo("")
        print_steps(lines_of(picture.steps, picture.around.attempts, now_ms, is_whole=is_whole))
    _print_trouble(picture)
    if is_terminal():
        echo("")
        suggest_commands(*_next_commands(picture))


def _facts(picture: Picture, now_ms: int) -> list[tuple[str, str]]:
    info = picture.info
    ago = shown_duration(now_ms - info.created_at_ms)
    facts = [("started", f"{shown_time(info.created_at_ms)} ({ago} ago)")]
    if picture.input is not None:
        facts.append(("input", shortened(bytes(picture.input).decode(), _TEXT_MAX)))
    if info.status is Status.COMPLETED:
        facts.append(("output", shortened(info.output or "null", _TEXT_MAX)))
    if info.custom_status is not None:
        facts.append(("status", shortened(info.custom_status, _TEXT_MAX)))
    if info.parent_instance_id is not None:
        facts.append(("parent", info.parent_instance_id))
    if picture.event_count:
        long = "; long: continue_as_new() starts a fresh one"
        warning = long if picture.event_count >= HISTORY_EVENTS_WARN else ""
        counted = f"{picture.event_count} events, execution {info.execution_id}{warning}"
        facts.append(("history", counted))
    waiting = sum(queued.visible_at_ms <= now_ms for queued in picture.around.messages)
    if waiting and not info.status.is_final:
        facts.append(("queued", f"{waiting} message{'s' if waiting > 1 else ''} for it"))
    return facts


def _print_trouble(picture: Picture) -> None:
    if picture.problem is not None:
        echo("")
        echo("  ", Cell(picture.problem, "red"))
    block, failure = picture.info.block, failure_of(picture.info)
    if block is not None and picture.info.status is Status.BLOCKED:
        if block.detail:
            _print_block(block.detail)
        else:
            echo("")
            echo_wrapped(Cell(block.message, "dim"))
        if block.reason in _ADVICE:
            echo("")
            echo_wrapped(Cell(_ADVICE[block.reason], "dim"))
    elif failure is not None and failure.traceback:
        _print_block(own_frames(failure.traceback))


def _print_block(text: str) -> None:
    echo("")
    for line in clean_block(text.rstrip()).splitlines():
        echo("  ", Cell(line, "dim"))


def _next_commands(picture: Picture) -> list[str]:
    info = picture.info
    shown = shlex.quote(info.instance_id)
    match info.status:
        case Status.PENDING:
            return ["worker MODULE", f"watch {shown}", f"cancel {shown}"]
        case Status.SUSPENDED:
            return [f"resume {shown}", f"history {shown}"]
        case Status.BLOCKED if not picture.event_count:  # its start is what cannot be taken
            return [f"retry {shown}", f"rerun {shown} --input JSON", f"terminate {shown}"]
        case Status.BLOCKED:
            return [f"retry {shown}", f"replay MODULE {shown}"]
        case Status.FAILED | Status.CANCELLED | Status.TERMINATED:
            rerun = f"rerun {shown} --from-event N"
            return [f"retry {shown}", rerun, f"history {shown} --failed"]
        case Status.COMPLETED:
            return [f"history {shown}", f"rerun {shown}"]
        case _:
            awaited = [s.name for s in picture.steps if s.state == "open" and s.kind == "event"]
            sends = [f"send {shown} {awaited[0]} --data JSON"] if awaited else []
            return [*sends, f"watch {shown}", f"stack {shown} -m MODULE"]
