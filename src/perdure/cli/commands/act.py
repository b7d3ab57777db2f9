"""``cancel``, ``terminate``, ``pause``, ``resume``, ``retry``, ``purge``, and ``rerun``."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from perdure.arguments import check_reason
from perdure.cli.command import (
    Command,
    combined,
    command,
    id_argument,
    ids_argument,
    module_option,
    output_option,
    query_option,
    yes_option,
)
from perdure.cli.exits import Exit, code_of, line_of
from perdure.cli.inputs import is_wanted, read_arguments
from perdure.cli.render import (
    Cell,
    echo,
    print_done,
    print_ids,
    print_json,
    print_outcome,
    progress,
    warn,
)
from perdure.cli.session import Session, current_settings, run, suggest_commands
from perdure.client import rerun as rerunning
from perdure.client.formats import counted, shown_duration
from perdure.client.search import parse_search
from perdure.errors import (
    InstanceFinished,
    InvalidValue,
    NotARoot,
    NotFound,
    NotRegistered,
    PerdureError,
    UsageError,
)
from perdure.model.status import Status
from perdure.providers.sealing import sealed

if TYPE_CHECKING:
    from perdure.client.rerun import Bounds
    from perdure.codec import Codec
    from perdure.providers.records import InstanceInfo

Apply: TypeAlias = Callable[..., Awaitable[object]]
"""Its result, if any, is said beside the id of the instance."""

_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """An action on instances: its words for people, and the function that performs it."""

    word: str
    done: str
    said: str = ""
    """Replaces ``done`` in messages where ``done`` would promise too much."""

    @property
    def past(self) -> str:
        """The word of messages; ``done`` is the field of the JSON output."""
        return self.said or self.done


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
                f"name instances or a query: perdure {word} ID..., perdure {word} --ids-from FILE, "
                f"or perdure {word} --query 'status:... name:...' --dry-run"
            )
        if self.query is not None and not self.query.strip():
            raise UsageError(
                "the query is empty; to take all, write 'status:open' or 'status:ended'"
            )


# The fields of ``Targets``.
_target_options = combined(
    ids_argument(),
    query_option,
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    yes_option,
    output_option("table", "json"),
)


def action(verb: Verb, *, examples: Sequence[str]) -> Callable[[Apply], Command]:
    """Return the decorator that makes a command of a function for one instance.

    The command takes ids or a query, asks, and calls the function for each instance. The options
    of the function itself are its keyword arguments.
    """

    def decorate(apply: Apply) -> Command:
        @wraps(apply)
        def callback(**given: Any) -> int:
            targets = Targets(**{each.name: given.pop(each.name) for each in fields(Targets)})
            targets.check(verb.word)
            chosen, is_forced = partial(apply, **given), bool(given.get("force"))
            return run(lambda session: _act(session, verb, chosen, targets, is_forced))

        return command(verb.word, examples=examples)(_target_options(callback))

    return decorate


async def _act(
    session: Session, verb: Verb, apply: Apply, targets: Targets, is_forced: bool
) -> int:
    infos: list[InstanceInfo] | None = None
    ids = list(targets.instance_ids)
    if targets.query is not None:
        statuses = frozenset(Status) if is_forced else None
        selection = parse_search(targets.query, session.now_ms()).for_action(verb.word, statuses)
        infos = [info async for info in selection.instances(session.admin)]
        ids = [info.instance_id for info in infos]
    elif targets.dry_run:
        infos = [await session.info(instance_id) for instance_id in ids]
    if infos is not None and not _confirmed(verb, infos, targets, session.now_ms()):
        return Exit.OK
    return await _apply(session, verb, apply, ids, targets)


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
            words = f"would {verb.word}" if targets.dry_run else verb.past
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
    number = counted(len(infos), "instance")
    return f"{words} {number} ({names}), oldest started {oldest} ago"


async def _apply(
    session: Session, verb: Verb, apply: Apply, ids: list[str], targets: Targets
) -> int:
    outcomes: list[tuple[str, object]] = []
    with progress() as show:
        for start in range(0, len(ids), _AT_ONCE):
            chunk = ids[start : start + _AT_ONCE]
            try:
                ends = await asyncio.gather(*(_one(session, apply, i) for i in chunk))
            except asyncio.CancelledError:  # Ctrl-C
                so_far = sum(not isinstance(each, PerdureError) for _, each in outcomes)
                _warn_of_interruption(verb, so_far, chunk, len(ids))
                raise
            outcomes += zip(chunk, ends, strict=True)
            show(len(outcomes), len(ids))
    is_query = targets.query is not None
    # An instance that a query found and that has ended or gone since then is no failure.
    harmless = (InstanceFinished, NotFound) if is_query else ()
    done = {i: note for i, note in outcomes if not isinstance(note, PerdureError)}
    failed = [
        (i, error)
        for i, error in outcomes
        if isinstance(error, PerdureError) and not isinstance(error, harmless)
    ]
    skipped = len(ids) - len(done) - len(failed)
    if targets.output == "json":
        errors = {instance_id: line_of(error) for instance_id, error in failed}
        print_json({verb.done: list(done), "skipped": skipped, "errors": errors})
    else:
        _print_ends(verb, done, skipped, is_query)
    for _, error in failed[:20]:
        warn(line_of(error))
    if len(failed) > 20:
        warn(f"and {len(failed) - 20} more errors; -o json lists them all")
    return code_of(failed[0][1]) if failed else Exit.OK


def _warn_of_interruption(verb: Verb, done: int, chunk: list[str], total: int) -> None:
    """Warn that the calls in progress may or may not have reached the store."""
    unsure = f"the next {len(chunk)}" if len(chunk) > 1 else "the next one"
    warn(
        f"interrupted: {verb.past} {done} of {total} instances, and perhaps {unsure}; "
        "the same command goes on with the rest"
    )


async def _one(session: Session, apply: Apply, instance_id: str) -> object:
    """Return the error, or the result of the action."""
    try:
        return await apply(session, instance_id)
    except NotFound:
        return await session.unknown(instance_id)
    except PerdureError as error:
        return error


def _print_ends(verb: Verb, done: dict[str, object], skipped: int, is_query: bool) -> None:
    if is_query:
        more = f", {skipped} had ended meanwhile" if skipped else ""
        print_done(f"{verb.past} {counted(len(done), 'instance')}{more}")
        return
    for instance_id, note in done.items():
        print_done(f"{verb.past} {instance_id}{'' if note is None else f': {note}'}")


def _checked_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Check the reason before any instance is changed."""
    try:
        return check_reason(value)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None


_REASON: Final = click.option(
    "--reason", default="", callback=_checked_reason, help="Reason, stored with the instance."
)


@action(
    Verb(word="cancel", done="cancelled", said="asked to stop:"),
    examples=[
        "perdure cancel o-1 --reason 'ordered twice'",
        "perdure cancel --query 'status:running name:import_*' --dry-run",
    ],
)
@_REASON
async def cancel(session: Session, instance_id: str, *, reason: str) -> None:
    """Ask instances to stop: CancelledError is raised in their code, which may clean up."""
    await session.client.cancel(instance_id, reason)


@action(
    Verb(word="terminate", done="terminated"),
    examples=[
        "perdure terminate o-1",
        "perdure terminate --query 'status:blocked created:>7d' --dry-run",
    ],
)
@_REASON
async def terminate(session: Session, instance_id: str, *, reason: str) -> None:
    """End instances now, without running any of their code; their children are cancelled."""
    await session.client.terminate(instance_id, reason)


@action(
    Verb(word="pause", done="paused"),
    examples=["perdure pause o-1", "perdure pause --query 'name:import_feed status:open' -y"],
)
async def pause(session: Session, instance_id: str) -> None:
    """Let no further turn of the instances run until they are resumed."""
    await session.client.pause(instance_id)


@action(
    Verb(word="resume", done="resumed"),
    examples=["perdure resume o-1", "perdure resume --query status:paused -y"],
)
async def resume(session: Session, instance_id: str) -> None:
    """Let paused instances go on; a blocked one is tried again."""
    await session.client.resume(instance_id)


@action(
    Verb(word="retry", done="retried"),
    examples=[
        "perdure retry o-1",
        "perdure retry o-1 --leave-out approval",
        "perdure retry --query 'status:blocked name:order' --dry-run",
        "perdure retry --query 'status:failed created:<1d' -y",
    ],
)
@click.option(
    "--leave-out",
    metavar="NAME",
    help="Leave out the last event or message of this name that the code received.",
)
async def retry(session: Session, instance_id: str, *, leave_out: str | None) -> str | None:
    """Let instances go on from where they failed, were blocked, cancelled or terminated.

    Finished steps stay finished. Steps that were open or had failed run again, with the same
    idempotency keys; failed children are retried too. To start an instance over, see perdure rerun.

    The turn that failed is undone, and its events and messages arrive again. If the code failed on
    one of a wrong type, --leave-out NAME retries without it.
    """
    retried = await session.client.admin.retry(instance_id, leave_out=leave_out)
    if retried is None:
        return None
    if not retried.received:
        return str(retried)
    name = shlex.quote(retried.received[-1])
    return f"{retried} (without it, if it does not fit: --leave-out {name})"


@action(
    Verb(word="purge", done="purged"),
    examples=[
        "perdure purge o-1",
        "perdure purge --query 'status:completed completed:>30d' --dry-run",
        "perdure purge --query 'status:ended completed:>90d' -y",
        "perdure list status:failed -o ids | perdure purge --ids-from - -y",
    ],
)
@click.option("--force", is_flag=True, help="Also instances that have not ended.")
async def purge(session: Session, instance_id: str, *, force: bool) -> None:
    """Delete instances that have ended, each with its children and everything about them.

    A query takes roots only: children go with their root. A child whose parent is not in the store
    can be named by its id.
    """
    try:
        await session.admin.delete_instance(instance_id, force=force)
    except NotARoot:
        if not await _is_orphan(session, instance_id):
            raise
        tree = await session.admin.get_instance_tree(instance_id)
        await session.admin.delete_instances_atomic(tree.instance_ids, force=force)


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


@command(
    "rerun",
    examples=[
        "perdure rerun o-1",
        "perdure rerun o-1 --input '[\"o-1\", 900]' --id o-1-cheaper",
        "perdure rerun o-1 --from-event 17",
    ],
)
@id_argument()
@click.option("--id", "new_id", metavar="ID", help="Id of the new instance. Default: a new one.")
@click.option("--input", "input_text", metavar="JSON", help="Other arguments; @file, or -.")
@click.option("--version", metavar="V", help="Version of the orchestration. Default: the latest.")
@click.option(
    "--from-event",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the past up to the end of the turn of event N; see perdure history.",
)
@module_option
@output_option("table", "json", "ids")
def rerun(
    instance_id: str,
    new_id: str | None,
    input_text: str | None,
    version: str | None,
    from_event: int | None,
    modules: tuple[str, ...],
    output: str,
) -> None:
    """Run an instance again as a new instance; the old one stays as it is.

    All its activities run again, with new idempotency keys. perdure retry continues the old one.

    With --from-event, the new instance keeps the history up to that event, and steps that were open
    then run again. Name the code with -m so that these steps keep their retries and time limits,
    and for payloads that a codec of that module encrypts.
    """
    if from_event is not None and (input_text is not None or version is not None):
        raise UsageError("--from-event keeps input and version: the past was made with them")
    given = None if input_text is None else read_arguments(input_text)
    bounds, codec = _load(current_settings().modules(modules), from_event)

    async def body(session: Session) -> None:
        await session.info(instance_id)
        provider = session.provider if codec is None else sealed(session.provider, codec)
        chosen = rerunning.fresh_id(instance_id) if new_id is None else new_id
        if from_event is None:
            own = session.client.codec
            changed = None if given is None else own.encode(given, where="--input")
            copied = await rerunning.rerun(
                provider, instance_id, chosen, input=changed, version=version
            )
        else:
            copied = await rerunning.rerun_from_event(
                provider,
                instance_id,
                chosen,
                from_event,
                clock=session.client.clock,
                bounds=bounds,
            )
        _print_rerun(instance_id, chosen, copied, output)

    run(body)


def _load(modules: tuple[str, ...], from_event: int | None) -> tuple[Bounds | None, Codec | None]:
    """Return the limits of activities and the codec of the modules; None if none is named."""
    if not modules:
        return None, None
    from perdure.cli.modules import load_code, load_codec

    if from_event is None:
        return None, load_codec(modules)
    registry, codec = load_code(modules, "perdure rerun -m")

    def bounds(name: str) -> tuple[Any, ...]:
        try:
            return registry.resolve_activity(name).bounds[:3]
        except NotRegistered:
            return ()

    return bounds, codec


def _print_rerun(old_id: str, new_id: str, copied: rerunning.Copied, output: str) -> None:
    if output == "ids":
        print_ids([new_id])
        return
    kept, again = copied.events_kept, copied.steps_again
    document = {
        "id": new_id,
        "rerun_of": old_id,
        "events_kept": kept,
        "steps_again": again,
    }
    past = f", {kept} events kept" if kept else ""
    if again:
        past += f", {counted(again, 'finished step')} run{'s' if again == 1 else ''} again"
    print_outcome(output, document, f"rerun of {old_id} as ", Cell(new_id, "bold"), past)
    if output == "table":
        suggest_commands(new_id, "watch ID")
