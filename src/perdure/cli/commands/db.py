"""``perdure db``: the commands that look after a store as a whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import click

from perdure.cli.command import (
    LazyGroup,
    command,
    duration_option,
    output_option,
    store_option,
    traceback_option,
)
from perdure.cli.exits import Exit
from perdure.cli.inputs import is_wanted
from perdure.cli.render import Cell, echo, glyph, print_json
from perdure.cli.session import Migrates, current_settings, run
from perdure.cli.settings import shown_store
from perdure.errors import CorruptData, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from perdure.cli.session import Session
    from perdure.client.checks import Damage
    from perdure.providers.migrate import Migration
    from perdure.providers.records import PruneOptions

_HERE = "perdure.cli.commands"

db = LazyGroup(
    "db",
    help="Look after the store as a whole.",
    params=[store_option(), traceback_option()],
    no_args_is_help=True,
    sections={
        "Commands": {
            "info": (
                f"{_HERE}.db:info",
                "Show where the data lies, in which shape, and how much.",
            ),
            "migrate": (
                f"{_HERE}.db:migrate",
                "Bring the store to the schema of this version.",
            ),
            "check": (f"{_HERE}.db:check", "Read everything and say what is damaged."),
            "backup": (f"{_HERE}.db_copy:backup", "Copy the store, as of now, to a new place."),
            "copy": (f"{_HERE}.db_copy:copy", "Copy everything into another store of any kind."),
            "prune": (f"{_HERE}.db:prune", "Drop past executions of instances."),
        }
    },
)


@command(
    "info",
    examples=["perdure db info", "perdure db info --store shop.db -o json | jq .instances"],
)
@output_option("table", "json")
def info(output: str) -> None:
    """Show where the data lies, in which shape, and how much there is."""

    async def body(session: Session) -> None:
        document = await _document(session)
        if output == "json":
            print_json(document)
            return
        echo(Cell(document["location"], "bold"))
        lines = _lines(document)
        width = max(len(label) for label, _ in lines)
        for label, value in lines:
            echo("  ", Cell(f"{label:<{width}}  ", "dim"), value)

    run(body)


async def _document(session: Session) -> dict[str, Any]:
    from perdure.cli.commands.watch import count_statuses

    store = await session.admin.get_store_info()
    counts = await count_statuses(session)
    return {
        "location": shown_store(store.location),
        "provider": store.provider,
        "provider_version": store.provider_version,
        "format_version": store.format_version,
        "schema_version": store.schema_version,
        "size_bytes": store.size_bytes,
        "moved_to": None if store.moved_to is None else shown_store(store.moved_to),
        "details": store.details,
        "instances": sum(counts.values()),
        "by_status": counts,
        "queues": await session.admin.get_queue_depths(),
        "workers": len(await session.admin.list_workers()),
    }


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
        lines.append(
            (label, f"{queue.visible} ready, {queue.locked} locked, {queue.delayed} later")
        )
    lines.append(("dead letters", str(queues.dead_letters)))
    lines.append(("workers", str(document["workers"])))
    if document["moved_to"]:
        lines.append(("moved to", document["moved_to"]))
    return lines


def shown_bytes(size: int) -> str:
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


@command(
    "migrate",
    examples=["perdure db migrate --store shop.db", "perdure db migrate --dry-run"],
)
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
        if output == "json":
            print_json(
                {"location": shown_store(store.location), "schema_version": store.schema_version}
            )
        else:
            sign = Cell(f"{glyph('completed')} ", "green")
            echo(
                sign, f"{shown_store(store.location)} has schema {store.schema_version}, up to date"
            )

    run(body, creates=True)


async def _due(provider: Migrates) -> Sequence[Migration]:
    return await provider.migrate(dry_run=True)


def _show_due(url: str, output: str) -> None:
    """Print the due migrations without opening the store, which would apply them."""
    from perdure.providers.url import open_provider

    provider = open_provider(url)
    due: Sequence[Migration] = ()
    if isinstance(provider, Migrates):
        due = asyncio.run(_due(provider))
    else:  # a directory store, which has no schema
        current_settings().existing_store()
    if output == "json":
        names = [{"number": migration.number, "name": migration.name} for migration in due]
        print_json({"location": shown_store(url), "due": names})
        return
    if not due:
        echo(Cell(f"{glyph('completed')} ", "green"), f"{shown_store(url)} is up to date")
    for migration in due:
        echo(Cell(f"{migration.number:04}  ", "dim"), migration.name.replace("_", " "))


@runtime_checkable
class ChecksItself(Protocol):
    """A ProviderAdmin that can check its storage below the level of instances."""

    def integrity_check(self) -> Awaitable[None]:
        """Errors: CorruptData."""
        ...


@command(
    "check",
    examples=["perdure db check", "perdure db check --quick --store shop.db"],
)
@click.option("--quick", is_flag=True, help="Only the store itself, not every history.")
@output_option("table", "json")
def check(quick: bool, output: str) -> int:
    """Read the whole store and say what is damaged. Nothing is changed; exit code 1 if so."""

    async def body(session: Session) -> int:
        from perdure.client.checks import check_instances

        damages = await quick_check(session)
        checked = 0
        if not quick:
            async for damage in check_instances(session.provider, session.admin):
                checked += damage is None
                damages += [] if damage is None else [damage]
        if output == "json":
            print_json({"instances_checked": checked, "damages": damages})
        else:
            for damage in damages:
                place = f"{damage.instance_id}: " if damage.instance_id else ""
                echo(Cell(f"{glyph('failed')} ", "red"), f"{place}{damage.message}")
            sign, style = ("failed", "red") if damages else ("completed", "green")
            said = f"{len(damages)} damaged" if damages else "no damage found"
            echo(Cell(f"{glyph(sign)} ", style), f"{checked} instances read, {said}")
        return Exit.ERROR if damages else Exit.OK

    return run(body)


async def quick_check(session: Session) -> list[Damage]:
    """Return the damage that the store itself finds, without reading every history."""
    from perdure.client.checks import Damage

    aside = (await session.admin.get_store_info()).damages
    damages = [Damage(instance_id="", message=f"{path}: {why}") for path, why in aside.items()]
    if isinstance(session.admin, ChecksItself):
        try:
            await session.admin.integrity_check()
        except CorruptData as error:
            damages.append(Damage(instance_id="", message=error.message))
    return damages


_CHUNK: Final = 500


@command(
    "prune",
    examples=[
        "perdure db prune --keep-last 10 --dry-run",
        "perdure db prune --older-than 30d -y",
        "perdure db prune --query name:poller --keep-last 1 -y",
    ],
)
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the last N.")
@duration_option("--older-than", "older_ms", "Only those that ended before.")
@click.option("--query", metavar="QUERY", default="", help="Only of instances that fit.")
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option("table", "json")
def prune(
    keep_last: int | None,
    older_ms: int | None,
    query: str,
    dry_run: bool,
    yes: bool,
    output: str,
) -> int:
    """Drop past executions that continue-as-new and retry leave behind.

    The current execution, the state and the custom status always stay. To delete instances that
    have ended, see perdure purge.
    """
    if keep_last is None and older_ms is None:
        raise UsageError("say what may go: --keep-last N, --older-than 30d, or both")

    async def body(session: Session) -> int:
        from perdure.client.search import parse_search
        from perdure.providers.records import DeleteFilter, PruneOptions

        bound_ms = None if older_ms is None else session.now_ms() - older_ms
        options = PruneOptions(keep_last=keep_last, completed_before_ms=bound_ms)
        selection = parse_search(query, session.now_ms())
        ids = [
            info.instance_id
            async for info in selection.instances(session.admin)
            if info.execution_id > 1
        ]
        number = await _count(session, ids, options)
        if dry_run or not number:
            _print(
                {"dry_run": dry_run, "instances": len(ids), "executions": number},
                output,
                "would drop" if dry_run else "dropped",
            )
            return Exit.OK
        if not yes and not is_wanted(f"drop {number} past executions"):
            return Exit.OK
        executions = 0
        for start in range(0, len(ids), _CHUNK):
            chosen = DeleteFilter(instance_ids=tuple(ids[start : start + _CHUNK]), limit=_CHUNK)
            executions += (await session.admin.prune_executions_bulk(chosen, options)).executions
        _print(
            {"dry_run": False, "instances": len(ids), "executions": executions}, output, "dropped"
        )
        return Exit.OK

    return run(body)


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


def _print(document: dict[str, Any], output: str, words: str) -> None:
    if output == "json":
        print_json(document)
        return
    said = f"{words} {document['executions']} past executions of {document['instances']} instances"
    echo(Cell(f"{glyph('completed')} ", "green"), said)
