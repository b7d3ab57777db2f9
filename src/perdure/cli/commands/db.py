"""``perdure db``: the commands that look after a store as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import click
import msgspec

from perdure.authoring.policies import FOREVER
from perdure.cli.command import Group, duration_option, output_option, yes_option
from perdure.cli.details import shown_bytes, shown_queue
from perdure.cli.exits import Exit, writing
from perdure.cli.inputs import is_wanted
from perdure.cli.render import (
    Cell,
    echo,
    glyph,
    print_done,
    print_json,
    print_outcome,
    progress,
    warn,
)
from perdure.cli.session import (
    Migrates,
    current_settings,
    refuse_absent,
    refuse_memory,
    run,
)
from perdure.cli.settings import Settings, is_empty, shown_store
from perdure.client.damage import check_instances, store_damages
from perdure.client.formats import counted, shown_duration, utc_time
from perdure.client.moving import CopyReport, copy_store
from perdure.client.search import parse_search
from perdure.errors import AlreadyExists, NotFound, NotSupported, UsageError
from perdure.providers.directory import FileSystemProvider
from perdure.providers.local_files import draft_beside
from perdure.providers.records import InstanceQuery, KeepRule, PruneOptions
from perdure.providers.rules import place_of_move
from perdure.providers.url import local_path, open_provider

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Sequence
    from pathlib import Path

    from perdure.cli.session import Session
    from perdure.providers.contract import Provider
    from perdure.providers.migrate import Migration

db = Group("db", help="Look after the store as a whole.")


@db.add(
    "info",
    examples=["perdure db info", "perdure db info --store shop.db -o json | jq .instances"],
)
@output_option("table", "json")
async def info(session: Session, output: str) -> None:
    """Show the place, the schema and the size of the store.

    It also shows how long ended instances are kept, and how many roots are due to be deleted. These
    times come from the running workers, or from keep in pyproject.toml [tool.perdure] if no worker
    runs.
    """
    document = await _document(session)
    if output == "json":
        print_json(document)
        return
    echo(Cell(document["location"], "bold"))
    lines = _lines(document)
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        echo("  ", Cell(f"{label:<{width}}  ", "dim"), value)


async def _document(session: Session) -> dict[str, Any]:
    store = await session.admin.get_store_info()
    counts = await session.counts()
    workers = await session.admin.list_workers()
    retentions = session.retentions(workers)
    now_ms = session.now_ms()
    return {
        **msgspec.structs.asdict(store),
        "location": shown_store(store.location),
        "moved_to": None if store.moved_to is None else shown_store(store.moved_to),
        "instances": sum(counts.values()),
        "by_status": counts,
        "queues": await session.admin.get_queue_depths(),
        "workers": len(workers),
        "keep": sorted({_shown_rule(rule) for each in retentions for rule in each.rules}),
        "due": sum([await each.count_due(session.admin, now_ms) for each in retentions]),
    }


def _shown_rule(rule: KeepRule) -> str:
    """Return ``completed 30d``, or ``completed of report 7d`` for one orchestration."""
    kept = FOREVER if rule.kept_ms is None else shown_duration(rule.kept_ms)
    whose = "" if rule.name is None else f" of {rule.name}"
    return f"{rule.status.lower()}{whose} {kept}"


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    queues = document["queues"]
    size = document["size_bytes"]
    lines = [
        ("provider", f"{document['provider']} {document['provider_version']}"),
        ("format", f"{document['format_version']}, schema {document['schema_version']}"),
        ("size", "unknown" if size is None else shown_bytes(size)),
        *((label.replace("_", " "), value) for label, value in document["details"].items()),
        ("instances", str(document["instances"])),
    ]
    lines += [
        (f"  {status.lower()}", str(number)) for status, number in document["by_status"].items()
    ]
    for label, queue in (("turns", queues.orchestrator), ("activities", queues.worker)):
        lines.append((label, shown_queue(queue)))
    lines.append(("dead letters", str(queues.dead_letters)))
    lines.append(("workers", str(document["workers"])))
    if document["keep"]:
        lines.append(("kept", ", ".join(document["keep"])))
        lines.append(("no longer kept", str(document["due"])))
    if document["moved_to"]:
        lines.append(("moved to", document["moved_to"]))
    return lines


@db.add("migrate", examples=["perdure db migrate --store shop.db", "perdure db migrate --dry-run"])
@click.option("--dry-run", is_flag=True, help="Only say which migrations are due.")
@output_option("table", "json")
def migrate(output: str, dry_run: bool) -> None:
    """Bring the store to the schema of this version, or create it.

    Workers do the same when they open it; this is for a deploy that wants it to happen before.
    """
    if dry_run:
        _show_due(current_settings().store(), output)
        return

    async def body(session: Session) -> None:
        store = await session.admin.get_store_info()
        location, version = shown_store(store.location), store.schema_version
        document = {"location": location, "schema_version": version}
        print_outcome(output, document, f"{location} has schema {version}, up to date")

    run(body, creates=True)


def _show_due(url: str, output: str) -> None:
    """Print the due migrations without opening the store, which would apply them."""
    provider = open_provider(url)
    due: Sequence[Migration] = ()
    if isinstance(provider, Migrates):
        due = asyncio.run(provider.migrate(dry_run=True))
    else:  # a directory store, which has no schema
        current_settings().existing_store()
    if output == "json":
        names = [{"number": migration.number, "name": migration.name} for migration in due]
        print_json({"location": shown_store(url), "due": names})
        return
    if not due:
        print_done(f"{shown_store(url)} is up to date")
    for migration in due:
        echo(Cell(f"{migration.number:04}  ", "dim"), migration.name.replace("_", " "))


@db.add("check", examples=["perdure db check", "perdure db check --quick --store shop.db"])
@click.option("--quick", is_flag=True, help="Only the store itself, not every history.")
@output_option("table", "json")
async def check(session: Session, quick: bool, output: str) -> int:
    """Read the whole store and list the damage. Exit code 1 if there is any.

    Nothing is changed. Payloads that a codec has sealed are checked for their form only.
    """
    damages = await store_damages(session.admin)
    checked = 0
    if not quick:
        total = await session.admin.count_instances()
        with progress() as show:
            async for damage in check_instances(session.provider):
                checked += damage is None
                damages += [] if damage is None else [damage]
                show(checked, total)
    if output == "json":
        print_json({"instances_checked": checked, "damages": damages})
    else:
        for damage in damages:
            place = f"{damage.instance_id}: " if damage.instance_id else ""
            echo(Cell(f"{glyph('failed')} ", "red"), f"{place}{damage.message}")
        sign, style = ("failed", "red") if damages else ("completed", "green")
        said = f"{len(damages)} damaged" if damages else "no damage found"
        echo(Cell(f"{glyph(sign)} ", style), f"{counted(checked, 'instance')} read, {said}")
    return Exit.ERROR if damages else Exit.OK


_CHUNK: Final = 500


@db.add(
    "prune",
    examples=[
        "perdure db prune --keep-last 10 --dry-run",
        "perdure db prune --older-than 30d -y",
        "perdure db prune --query name:poller --keep-last 1 -y",
    ],
)
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the last N executions."
)
@duration_option("--older-than", "older_ms", "Only executions that ended longer ago.")
@click.option("--query", metavar="QUERY", default="", help="Only of instances that fit.")
@click.option("--dry-run", is_flag=True, help="Only count the executions.")
@yes_option
@output_option("table", "json")
async def prune(
    session: Session,
    keep_last: int | None,
    older_ms: int | None,
    query: str,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Drop past executions that continue-as-new and retry leave behind.

    The current execution, the state and the custom status always stay. To delete instances that
    have ended, see perdure purge.
    """
    if keep_last is None and older_ms is None:
        raise UsageError("say what may go: --keep-last N, --older-than 30d, or both")
    bound = None if older_ms is None else utc_time(session.now_ms() - older_ms)
    options = PruneOptions(keep_last=keep_last, completed_before=bound)
    selection = parse_search(query, session.now_ms())
    ids = [
        info.instance_id
        async for info in selection.instances(session.admin)
        if info.execution_id > 1
    ]
    number = await _count(session, ids, options)
    if number and not dry_run:
        if not yes and not is_wanted(f"drop {number} past executions"):
            return
        number = 0
        with progress() as show:
            for start in range(0, len(ids), _CHUNK):
                chosen = InstanceQuery(instance_ids=tuple(ids[start : start + _CHUNK]))
                pruned = await session.admin.prune_executions_bulk(chosen, options)
                number += pruned.executions
                show(start, len(ids))
    document = {"dry_run": dry_run, "instances": len(ids), "executions": number}
    words = "would drop" if dry_run else "dropped"
    print_outcome(output, document, f"{words} {number} past executions of {len(ids)} instances")


async def _count(session: Session, ids: list[str], options: PruneOptions) -> int:
    """Return the executions that the store would drop by the same rule."""
    number = 0
    for instance_id in ids:
        executions = await session.admin.list_executions(instance_id)
        candidates = executions[: -max(1, options.keep_last or 1)]
        if options.completed_before_ms is None:
            number += len(candidates)
            continue
        for execution_id in candidates:
            info = await session.admin.get_execution_info(instance_id, execution_id)
            ended_ms = info.completed_at_ms
            number += ended_ms is not None and ended_ms < options.completed_before_ms
    return number


@runtime_checkable
class Vacuums(Protocol):
    """A ProviderAdmin whose store keeps freed space until it is asked to give it back."""

    def vacuum(self, *, incremental: bool | None = None) -> Awaitable[None]:
        """Give the space back, and from now on bit by bit or not. Errors: StoreBusy, StoreFull."""
        ...


@db.add("vacuum", examples=["perdure db vacuum --store shop.db", "perdure db vacuum --incremental"])
@click.option(
    "--incremental/--no-incremental",
    default=None,
    help="From now on, let deletions shrink the file bit by bit, or not.",
)
@output_option("table", "json")
async def vacuum(session: Session, incremental: bool | None, output: str) -> None:
    """Write the SQLite file anew, without its free space.

    It takes as much free space again as the file has, and workers wait meanwhile: choose a quiet
    time. SQLite uses free space in the file again, so it is only for a file that has become much
    too large. Directories and Postgres give space back by themselves.
    """
    if not isinstance(session.admin, Vacuums):
        raise NotSupported(
            "vacuum",
            f"{session.provider.name} stores give space back by themselves: there is nothing to do",
        )
    before = (await session.admin.get_store_info()).size_bytes or 0
    await session.admin.vacuum(incremental=incremental)
    after = (await session.admin.get_store_info()).size_bytes or 0
    document = {"bytes_before": before, "bytes_after": after}
    said = f"{shown_bytes(before)} before, {shown_bytes(after)} now"
    print_outcome(output, document, said)


# --- copies of the whole store


@runtime_checkable
class BacksUp(Protocol):
    """A ProviderAdmin that can copy its store while workers run."""

    def backup(self, path: str | os.PathLike[str]) -> Awaitable[None]:
        """Errors: AlreadyExists."""
        ...


@db.add(
    "backup",
    examples=["perdure db backup monday.db", "perdure db backup monday --store file:./store"],
)
@click.argument("target")
@output_option("table", "json")
async def backup(session: Session, target: str, output: str) -> None:
    """Copy the store, as of now, to the new file or directory TARGET.

    A SQLite store may be in use by workers, a directory store must not. The copy is checked. If the
    store is damaged, nothing is written and the exit code is 1, so that a good backup is not
    replaced by a damaged one.
    """
    directory = session.settings.directory
    path = _backup_path(session.url, target)
    if (directory / path).exists():
        raise AlreadyExists(f"{path!r} exists already; name a new place")
    if isinstance(session.admin, BacksUp):
        await session.admin.backup(path)
    elif session.url.startswith("file:"):
        await _into_directory(session.provider, directory / path)
    else:
        raise NotSupported(
            "backup",
            f"{session.provider.name} stores are backed up with their own tools; perdure db "
            "copy copies one into a file",
        )
    print_outcome(output, {"backup": path}, f"wrote {path}")


def _backup_path(store: str, target: str) -> str:
    """Return the path of TARGET; refuse a URL of another kind of store."""
    path = local_path(target)
    scheme = "file:" if store.startswith("file:") else "sqlite:"
    if path is None or (path != target and not target.startswith(scheme)):
        raise UsageError(
            f"TARGET is a new path for a store of the same kind, not {target!r} (write ./ before "
            "a path with a colon); perdure db copy copies into a store of another kind"
        )
    return path


@db.add(
    "copy",
    store=False,
    examples=[
        "perdure db copy shop.db postgresql://db.example/shop",
        "perdure db copy file:./store shop.db --move",
    ],
)
@click.argument("source")
@click.argument("target")
@click.option("--move", is_flag=True, help="Mark SOURCE as moved: it refuses to be opened.")
@click.option("--replace", is_flag=True, help="Overwrite instances that the target has.")
@output_option("table", "json")
def copy(source: str, target: str, move: bool, replace: bool, output: str) -> None:
    """Copy all of SOURCE into TARGET, with work in flight; verify each.

    No worker may serve SOURCE, and none TARGET until the copy is complete. To continue a copy that
    was interrupted, repeat the same command. Without --move both stores would continue the same
    work: use it when workers are to continue at the new place.
    """
    settings = current_settings()
    settings.other_stores = (source, target)
    _check_places(settings, source, target)
    try:
        report = asyncio.run(_copy(source, target, move, replace))
    except KeyboardInterrupt:
        warn("interrupted: TARGET holds only a part; the same command goes on where it was")
        raise
    document = {"source": shown_store(source), "target": shown_store(target), **asdict(report)}
    there = f", {report.already_there} already there" if report.already_there else ""
    said = (
        f"copied {report.copied} of {counted(report.instances, 'instance')}{there}, each verified"
    )
    print_outcome(output, document, said)
    if output == "table":
        echo(f"  {report.messages} queued messages, {report.work} activities in flight")


def _check_places(settings: Settings, source: str, target: str) -> None:
    for each in (source, target):
        refuse_memory(each)
    origin, destination = settings.place(source), settings.place(target)
    if origin is not None and is_empty(origin):
        raise NotFound(f"there is no store at {shown_store(source)}")
    if source == target or (origin and destination and origin.resolve() == destination.resolve()):
        raise UsageError("SOURCE and TARGET are the same store")


async def _copy(source: str, target: str, move: bool, replace: bool) -> CopyReport:
    origin = open_provider(source, allow_moved=move)
    await refuse_absent(origin, source)
    async with origin:
        return await _into(origin, target, mark_moved=move, replace=replace)


async def _into(origin: Provider, target: str | Provider, **options: Any) -> CopyReport:
    async with open_provider(target) as destination:
        with progress() as show:
            return await copy_store(origin, destination, on_progress=show, **options)


async def _into_directory(origin: Provider, target: Path) -> None:
    """Copy into a draft directory, and rename it when the copy is complete."""
    with writing(target, "backup"), draft_beside(target, is_directory=True) as draft:
        await _into(origin, FileSystemProvider(draft.path))
        draft.put_in_place()


@db.add("unmove", examples=["perdure db unmove --store shop.db", "perdure db unmove -y"])
@yes_option
@output_option("table", "json")
def unmove(yes: bool, output: str) -> None:
    """Take back the mark of db copy --move: the store is used again.

    Use it for a move that was killed and whose target is lost, or for a move by mistake. Work that
    has continued at the new place would be done a second time here.
    """
    url = current_settings().existing_store()
    refuse_memory(url)

    async def body() -> None:
        async with open_provider(url, allow_moved=True) as provider:
            mark = (await provider.admin.get_store_info()).moved_to
            target = None if mark is None else shown_store(place_of_move(mark))
            if target is not None:
                plan = f"use {shown_store(url)} again, which was moved to {target}"
                if not yes and not is_wanted(plan):
                    return
                await provider.admin.mark_moved(None)
        words = "has no mark of a move" if target is None else f"is used again, not {target}"
        document = {"location": shown_store(url), "was_moved_to": target}
        print_outcome(output, document, f"{shown_store(url)} {words}")

    asyncio.run(body())
