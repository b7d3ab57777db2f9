"""``perdure db info`` and ``perdure db migrate``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.command import command
from perdure.cli.options import output_option
from perdure.cli.render import Cell, echo, glyph, print_json
from perdure.cli.session import Migrates, current_settings, run
from perdure.cli.settings import shown_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.cli.session import Session
    from perdure.providers._shared.migrate import Migration


@command(
    "info",
    short_help="Show where the data lies, in which shape, and how much.",
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
    from perdure.cli.overview import count_statuses

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
    short_help="Bring the store to the schema of this version.",
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
    """The store is not opened: that would migrate it."""
    from perdure.providers.url import open_provider

    provider = open_provider(url)
    due: Sequence[Migration] = ()
    if isinstance(provider, Migrates):
        due = asyncio.run(_due(provider))
    else:  # a directory, whose files have no schema
        current_settings().existing_store()
    if output == "json":
        names = [{"number": migration.number, "name": migration.name} for migration in due]
        print_json({"location": shown_store(url), "due": names})
        return
    if not due:
        echo(Cell(f"{glyph('completed')} ", "green"), f"{shown_store(url)} is up to date")
    for migration in due:
        echo(Cell(f"{migration.number:04}  ", "dim"), migration.name.replace("_", " "))
