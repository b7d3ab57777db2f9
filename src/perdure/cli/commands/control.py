"""``cancel``, ``terminate``, ``pause``, ``resume``, ``retry``, ``purge``: by id, or by query."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import click

from perdure.arguments import check_reason
from perdure.cli.command import command, complete_ids, output_option
from perdure.cli.exits import Exit, code_of, line_of
from perdure.cli.inputs import is_wanted
from perdure.cli.render import Cell, echo, glyph, print_json, warn
from perdure.cli.session import Session, run
from perdure.client.durations import shown_duration
from perdure.client.instance import ENDED, OPEN
from perdure.client.search import parse_search
from perdure.errors import (
    InstanceFinished,
    InvalidValue,
    NotARoot,
    NotFound,
    PerdureError,
    UsageError,
)
from perdure.model.status import Status

if TYPE_CHECKING:
    from perdure.providers.records import InstanceInfo

F = TypeVar("F", bound="Callable[..., Any]")
Apply: TypeAlias = Callable[[Session, str], Awaitable[None]]

_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """An action on instances: its words for people, and the function that performs it."""

    word: str
    done: str
    said: str = ""
    """Replaces ``done`` in messages where ``done`` would promise too much."""
    statuses: frozenset[Status]
    """Limits what a query selects; an id given by name is always tried."""
    apply: Apply
    roots_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The instances that the command line selects."""

    instance_ids: tuple[str, ...]
    query: str | None
    dry_run: bool
    yes: bool
    output: str

    def check(self, word: str) -> None:
        if bool(self.instance_ids) == (self.query is not None):
            raise UsageError(
                f"name instances or a query: perdure {word} ID..., or "
                f"perdure {word} --query 'status:... name:...' --dry-run"
            )
        if self.query is not None and not self.query.strip():
            raise UsageError(
                "the query is empty; to take all, write 'status:open' or 'status:ended'"
            )


def target_options(function: F) -> F:
    """Add the arguments ids, --query, --dry-run, -y and -o, the fields of ``Targets``."""
    for option in (
        output_option("table", "json"),
        click.option("-y", "--yes", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Only say what would be done."),
        click.option("--query", metavar="QUERY", help="All that fit; see perdure list --help."),
        click.argument("instance_ids", metavar="[ID]...", nargs=-1, shell_complete=complete_ids),
    ):
        function = option(function)
    return function


def act(verb: Verb, **given: Any) -> int:
    targets = Targets(**given)
    targets.check(verb.word)

    async def body(session: Session) -> int:
        if targets.query is None:
            infos = (
                None
                if not targets.dry_run
                else [await session.info(i) for i in targets.instance_ids]
            )
            ids = list(targets.instance_ids)
        else:
            infos = await _matching(session, verb, targets.query)
            ids = [info.instance_id for info in infos]
        if infos is not None and not _confirmed(verb, infos, targets, session.now_ms()):
            return Exit.OK
        return await _apply(session, verb, ids, targets)

    return run(body)


async def _matching(session: Session, verb: Verb, query: str) -> list[InstanceInfo]:
    selection = parse_search(query, session.now_ms())
    asked = selection.query.statuses
    statuses = verb.statuses if asked is None else asked & verb.statuses
    if not statuses:
        shown = ", ".join(sorted(verb.statuses))
        raise InvalidValue(f"the query fits nothing that can be {verb.done}: that is only {shown}")
    query_changes: dict[str, Any] = {"statuses": statuses}
    if verb.roots_only:
        query_changes["roots_only"] = True
    narrowed = selection.with_query(**query_changes)
    return [info async for info in narrowed.instances(session.admin)]


def _confirmed(verb: Verb, infos: list[InstanceInfo], targets: Targets, now_ms: int) -> bool:
    """Print what would be done and ask; return True if the action should run."""
    if targets.dry_run or not infos:
        if targets.output == "json":
            print_json(
                {
                    "dry_run": targets.dry_run,
                    "count": len(infos),
                    verb.done: [],
                    "ids": [i.instance_id for i in infos],
                }
            )
        else:
            words = f"would {verb.word}" if targets.dry_run else verb.said or verb.done
            echo(_summary(words, infos, now_ms))
            if infos:
                echo(Cell("run again with -y instead of --dry-run to do it", "dim"))
        return False
    return targets.yes or is_wanted(_summary(verb.word, infos, now_ms))


def _summary(words: str, infos: list[InstanceInfo], now_ms: int) -> str:
    if not infos:
        return f"{words} 0 instances"
    names = ", ".join(
        f"{name} {count}" for name, count in Counter(i.name for i in infos).most_common(5)
    )
    oldest = shown_duration(now_ms - min(info.created_at_ms for info in infos))
    plural = "s" if len(infos) > 1 else ""
    return f"{words} {len(infos)} instance{plural} ({names}), oldest started {oldest} ago"


async def _apply(session: Session, verb: Verb, ids: list[str], targets: Targets) -> int:
    outcomes: list[tuple[str, PerdureError | None]] = []
    for start in range(0, len(ids), _AT_ONCE):
        chunk = ids[start : start + _AT_ONCE]
        try:
            ends = await asyncio.gather(*(_one(session, verb, i) for i in chunk))
        except asyncio.CancelledError:  # Ctrl-C
            _warn_of_interruption(verb, sum(e is None for _, e in outcomes), chunk, len(ids))
            raise
        outcomes += zip(chunk, ends, strict=True)
    is_query = targets.query is not None
    # An instance that a query found and that has ended or gone since then is no failure.
    harmless = (InstanceFinished, NotFound) if is_query else ()
    done = [i for i, error in outcomes if error is None]
    failed = [
        (i, error) for i, error in outcomes if error is not None and not isinstance(error, harmless)
    ]
    if targets.output == "json":
        errors = {instance_id: line_of(error) for instance_id, error in failed}
        print_json(
            {verb.done: done, "skipped": len(ids) - len(done) - len(failed), "errors": errors}
        )
    else:
        _print_done(verb, done, len(ids) - len(done) - len(failed), is_query)
    for _, error in failed[:20]:
        warn(line_of(error))
    if len(failed) > 20:
        warn(f"and {len(failed) - 20} more errors; -o json lists them all")
    return code_of(failed[0][1]) if failed else Exit.OK


def _warn_of_interruption(verb: Verb, done: int, chunk: list[str], total: int) -> None:
    """Warn that the calls in progress may or may not have reached the store."""
    unsure = f"the next {len(chunk)}" if len(chunk) > 1 else "the next one"
    warn(
        f"interrupted: {verb.said or verb.done} {done} of {total} instances, and perhaps {unsure}; "
        "the same command goes on with the rest"
    )


async def _one(session: Session, verb: Verb, instance_id: str) -> PerdureError | None:
    try:
        await verb.apply(session, instance_id)
    except NotFound:
        return await session.unknown(instance_id)
    except PerdureError as error:
        return error
    return None


def _print_done(verb: Verb, done: list[str], skipped: int, is_query: bool) -> None:
    sign = Cell(f"{glyph('completed')} ", "green")
    said = verb.said or verb.done
    if not is_query:
        for instance_id in done:
            echo(sign, f"{said} {instance_id}")
        return
    more = f", {skipped} had ended meanwhile" if skipped else ""
    echo(sign, f"{said} {len(done)} instance{'' if len(done) == 1 else 's'}{more}")


def _checked_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Check the reason before any instance is changed."""
    try:
        return check_reason(value)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None


_REASON: Final = click.option(
    "--reason", default="", callback=_checked_reason, help="Kept with the instance."
)


@command(
    "cancel",
    examples=[
        "perdure cancel o-1 --reason 'ordered twice'",
        "perdure cancel --query 'status:running name:import_*' --dry-run",
    ],
)
@target_options
@_REASON
def cancel(reason: str, **targets: Any) -> int:
    """Ask instances to stop: CancelledError is raised in their code, which may clean up."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.cancel(instance_id, reason)

    verb = Verb(word="cancel", done="cancelled", said="asked to stop:", statuses=OPEN, apply=apply)
    return act(verb, **targets)


@command(
    "terminate",
    examples=[
        "perdure terminate o-1",
        "perdure terminate --query 'status:blocked created:>7d' --dry-run",
    ],
)
@target_options
@_REASON
def terminate(reason: str, **targets: Any) -> int:
    """End instances now, without running any of their code; their children are cancelled."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.terminate(instance_id, reason)

    verb = Verb(word="terminate", done="terminated", statuses=OPEN, apply=apply)
    return act(verb, **targets)


@command(
    "pause",
    examples=["perdure pause o-1", "perdure pause --query 'name:import_feed status:open' -y"],
)
@target_options
def pause(**targets: Any) -> int:
    """Let no further turn of the instances run until they are resumed."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.pause(instance_id)

    statuses = OPEN - {Status.PAUSED}
    return act(Verb(word="pause", done="paused", statuses=statuses, apply=apply), **targets)


@command(
    "resume",
    examples=["perdure resume o-1", "perdure resume --query status:paused -y"],
)
@target_options
def resume(**targets: Any) -> int:
    """Let paused instances go on; a blocked one is tried again."""

    async def apply(session: Session, instance_id: str) -> None:
        await session.client.resume(instance_id)

    statuses = frozenset({Status.PAUSED, Status.BLOCKED})
    return act(Verb(word="resume", done="resumed", statuses=statuses, apply=apply), **targets)


@command(
    "retry",
    examples=[
        "perdure retry o-1",
        "perdure retry --query 'status:blocked name:order' --dry-run",
        "perdure retry --query 'status:failed created:<1d' -y",
    ],
)
@target_options
def retry(**targets: Any) -> int:
    """Let instances try again: a blocked one goes on where it stands; a failed, cancelled or
    terminated one starts over under its id with the same input, as its next execution.

    To go on from a later step instead, see perdure rerun --from-event.
    """

    async def apply(session: Session, instance_id: str) -> None:
        from perdure.client.rerun import retry as retry_instance

        await retry_instance(session.provider, session.admin, instance_id)

    statuses = frozenset({Status.BLOCKED, Status.FAILED})
    return act(Verb(word="retry", done="retried", statuses=statuses, apply=apply), **targets)


@command(
    "purge",
    examples=[
        "perdure purge o-1",
        "perdure purge --query 'status:completed completed:>30d' --dry-run",
        "perdure purge --query 'status:ended completed:>90d' -y",
    ],
)
@target_options
@click.option("--force", is_flag=True, help="Also instances that have not ended.")
def purge(force: bool, **targets: Any) -> int:
    """Delete instances that have ended, each with its children and everything about them.

    A query takes roots only: children go with their root. A child whose parent is not in the store
    can be named by its id.
    """

    async def apply(session: Session, instance_id: str) -> None:
        try:
            await session.admin.delete_instance(instance_id, force=force)
        except NotARoot:
            if not await _is_orphan(session, instance_id):
                raise
            tree = await session.admin.get_instance_tree(instance_id)
            await session.admin.delete_instances_atomic(tree.instance_ids, force=force)

    statuses = ENDED | OPEN if force else ENDED
    verb = Verb(word="purge", done="purged", statuses=statuses, apply=apply, roots_only=True)
    return act(verb, **targets)


async def _is_orphan(session: Session, instance_id: str) -> bool:
    """Return True for a child whose parent is not stored, so no root deletes it."""
    parent_id = await session.admin.get_parent_id(instance_id)
    if parent_id is None:
        return False
    try:
        await session.admin.get_instance_info(parent_id)
    except NotFound:
        return True
    return False
