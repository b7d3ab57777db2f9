"""``perdure db backup`` and ``perdure db copy``: copy a whole store."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import click

from perdure.cli.command import command, output_option
from perdure.cli.render import Cell, echo, glyph, print_json, warn
from perdure.cli.session import current_settings, refuse_absent, refuse_forgetful, run
from perdure.cli.settings import is_empty, shown_store
from perdure.errors import AlreadyExists, NotFound, NotSupported, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from perdure.cli.session import Session
    from perdure.cli.settings import Settings
    from perdure.client.moving import CopyReport
    from perdure.providers.contract import Provider


@runtime_checkable
class BacksUp(Protocol):
    """A ProviderAdmin that can copy its store while workers run."""

    def backup(self, path: str | os.PathLike[str]) -> Awaitable[None]:
        """Errors: AlreadyExists."""
        ...


@command(
    "backup",
    examples=["perdure db backup monday.db", "perdure db backup monday --store file:./store"],
)
@click.argument("target")
@output_option("table", "json")
def backup(target: str, output: str) -> None:
    """Copy the store, as of now, to the new file or directory TARGET.

    SQLite does so while workers go on; a filesystem store must not be in use. The copy is checked:
    of a damaged store nothing is written, and the exit code is 1, so that no good backup is
    replaced by a damaged one.
    """
    settings = current_settings()
    path = _backup_path(settings.store(), target)
    if (settings.directory / path).exists():
        raise AlreadyExists(f"{path!r} exists already; name a new place for the backup")

    async def body(session: Session) -> None:
        if isinstance(session.admin, BacksUp):
            await session.admin.backup(path)
        elif session.url.startswith("file:"):
            await _into_directory(session.provider, settings.directory / path)
        else:
            raise NotSupported(
                "backup",
                f"{session.provider.name} stores are backed up with their own tools; perdure db "
                "copy copies one into a file",
            )
        if output == "json":
            print_json({"backup": path})
        else:
            echo(Cell(f"{glyph('completed')} ", "green"), f"wrote {path}")

    run(body)


def _backup_path(store: str, target: str) -> str:
    """Return the path of TARGET; refuse a URL of another kind of store."""
    from perdure.providers.url import local_path

    path = local_path(target)
    scheme = "file:" if store.startswith("file:") else "sqlite:"
    if path is None or (path != target and not target.startswith(scheme)):
        raise UsageError(
            f"a backup is a copy of the same kind at a new path, and {target!r} is none (one with "
            "a colon begins with ./); perdure db copy copies into a store of another kind"
        )
    return path


@command(
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
    """Copy every instance, with work in flight, from SOURCE into TARGET, and verify each.

    No worker may serve SOURCE, nor TARGET before all is there. A copy that was interrupted goes on
    where it was when the same command is repeated. Without --move both stores would go on with the
    same work: use it when workers are to go on at the new place.
    """
    settings = current_settings()
    settings.other_stores = (source, target)
    _check(settings, source, target)
    try:
        report = asyncio.run(_copy(source, target, move, replace))
    except KeyboardInterrupt:
        warn("interrupted: TARGET holds only a part; the same command goes on where it was")
        raise
    if output == "json":
        print_json({"source": shown_store(source), "target": shown_store(target), **asdict(report)})
        return
    there = f", {report.already_there} were there already" if report.already_there else ""
    said = f"copied {report.copied} of {report.instances} instances{there}, each verified"
    echo(Cell(f"{glyph('completed')} ", "green"), said)
    echo(f"  {report.messages} queued messages, {report.work} activities in flight")


def _check(settings: Settings, source: str, target: str) -> None:
    for each in (source, target):
        refuse_forgetful(each)
    origin, destination = settings.place(source), settings.place(target)
    if origin is not None and is_empty(origin):
        raise NotFound(f"there is no store at {shown_store(source)}")
    if source == target or (origin and destination and origin.resolve() == destination.resolve()):
        raise UsageError("SOURCE and TARGET are the same store")


async def _copy(source: str, target: str, move: bool, replace: bool) -> CopyReport:
    from perdure.providers.url import open_provider

    origin = open_provider(source, allow_moved=move)
    await refuse_absent(origin, source)
    async with origin:
        return await _into(origin, target, mark_moved=move, replace=replace)


async def _into(origin: Provider, target: str, **options: Any) -> CopyReport:
    from perdure.client.moving import copy_store
    from perdure.providers.url import open_provider

    async with open_provider(target) as destination:
        return await copy_store(origin, destination, on_progress=_progress(), **options)


async def _into_directory(origin: Provider, target: Path) -> None:
    """Copy into a draft directory, and rename it when the copy is complete."""
    from perdure.providers.local_files import sync_directory

    draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        await _into(origin, f"file:{draft}")
        draft.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _progress() -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if done == total or done % 100 == 0:
            sys.stderr.write(f"\r{done} of {total}" + ("\n" if done == total else ""))
            sys.stderr.flush()

    return show
