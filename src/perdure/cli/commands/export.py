"""``perdure export`` and ``perdure import``: instances as lines of a file, and their reader."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from perdure.cli.command import command, ids_argument, output_option, query_option
from perdure.cli.exits import writing
from perdure.cli.inputs import interruptible, unreadable
from perdure.cli.render import (
    data_stream,
    print_done,
    print_ids,
    print_json,
    progress,
    warn,
)
from perdure.cli.session import Session, run
from perdure.client.damage import damages_in, link_fault, open_children, parent_of
from perdure.client.formats import counted
from perdure.client.moving import (
    EXPORT_END,
    ExportEnd,
    current_execution,
    decode_snapshot,
    export_lines,
    snapshot_hash,
    stored_hash,
    trees_of,
)
from perdure.client.recorded import Recorded, recorded_history, recorded_in
from perdure.client.search import parse_search
from perdure.errors import (
    AlreadyExists,
    CorruptData,
    InstanceStillRunning,
    InvalidValue,
    NotFound,
    TreeChanged,
    UsageError,
)
from perdure.escape import clean_json
from perdure.model import wire, work
from perdure.providers.local_files import draft_beside, sync_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from perdure.providers.records import InstanceInfo, InstanceSnapshot

_PARTIAL_HINT: Final = "--partial takes lines that were picked, or written by an older version"
_LINE_CHARACTERS_MAX: Final = 512 * 1024 * 1024
"""Above the longest valid line; bounds the memory that a hostile file can use."""


@command(
    "export",
    examples=[
        "perdure export o-1 > o-1.jsonl",
        "perdure export --query 'status:failed created:<1d' --file failed.jsonl",
        "perdure export --query 'status:ended completed:>90d' --file 2026-05.jsonl --delete",
    ],
)
@ids_argument()
@query_option
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A new file instead of standard output.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="Only roots that have ended, with all their children; delete them when the file is safe.",
)
def export(
    instance_ids: tuple[str, ...], query: str | None, file: Path | None, delete: bool
) -> None:
    """Write instances as JSON, one a line: history, state, queued messages.

    The last line counts them; a file without it is incomplete and is not imported. An instance
    is written with its children. The file can be imported into any store, and replayed with
    perdure replay. If one of several running instances continues during the export, the export
    is refused: pause them first. With --delete it is the archive of a store: perdure import brings
    instances back.
    """
    if bool(instance_ids) == (query is not None):
        raise UsageError("name instances or a query: perdure export o-1, or --query status:failed")

    if delete and file is None:
        raise UsageError("--delete needs --file: the file is what remains of the instances")

    async def body(session: Session) -> None:
        trees = await _ended_trees(session, instance_ids, query) if delete else []
        members = [each for tree in trees for each in tree]
        chosen = members if delete else await _chosen(session, instance_ids, query)
        if file is None:
            await _write(session, chosen, data_stream())
            return
        with _private_file(file) as target:
            number = await _write(session, chosen, target)
        kept = await _delete_unchanged(session, trees)
        deleted = f", then deleted {counted(len(trees) - len(kept), 'root')} with children"
        print_done(f"wrote {counted(number, 'instance')} to {file}{deleted if delete else ''}")
        if kept:
            warn(f"not deleted, because they changed meanwhile: {', '.join(kept)}")

    run(body)


@contextmanager
def _private_file(path: Path) -> Generator[IO[str]]:
    """Open a new file that only its owner can read; it appears only when it is complete."""
    with writing(path, "export"):
        if path.exists() or path.is_symlink():
            raise FileExistsError
        with draft_beside(path) as draft:
            with draft.path.open("w", encoding="utf-8") as file:
                yield file
                file.flush()
                sync_file(file.fileno())
            draft.put_in_place()


async def _write(session: Session, chosen: list[str], target: IO[str]) -> int:
    number = 0
    with progress() as show:
        async for line in export_lines(session.admin, chosen):
            # Escaping breaks the checksum, so only output to a terminal is escaped.
            target.write((clean_json(line) if target.isatty() else line) + "\n")
            number += 1
            if not target.isatty():
                show(number, len(chosen))
    return number - 1  # the last line counts the others


async def _ended_trees(
    session: Session, instance_ids: tuple[str, ...], query: str | None
) -> list[dict[str, InstanceInfo]]:
    """Return the roots that have ended, each with its children, which have ended too.

    Errors: UsageError for an id that was named and is none.
    """
    roots = list(instance_ids)
    if query is not None:
        found = parse_search(query, session.now_ms()).instances(session.admin)
        roots = [each.instance_id async for each in found if each.parent_instance_id is None]
    trees: list[dict[str, InstanceInfo]] = []
    for root in roots:
        try:
            members = (await session.admin.get_instance_tree(root)).instance_ids
            tree = {each: await session.admin.get_instance_info(each) for each in members}
        except NotFound:
            if query is None:
                raise await session.unknown(root) from None
            continue  # deleted since it was listed
        if tree[root].parent_instance_id is None and all(
            each.status.is_final for each in tree.values()
        ):
            trees.append(tree)
        elif query is None:
            raise UsageError(f"{root!r} is a child or has not ended; leave out --delete")
    return trees


async def _delete_unchanged(session: Session, trees: list[dict[str, InstanceInfo]]) -> list[str]:
    """Delete trees that are as they were written; return the roots of the others."""
    kept: list[str] = []
    for tree in trees:
        try:
            now = {each: await session.admin.get_instance_info(each) for each in tree}
            if now != tree:
                raise TreeChanged("it changed after it was written")
            await session.admin.delete_instances_atomic(list(tree))
        except (InstanceStillRunning, NotFound, TreeChanged):
            kept.append(next(iter(tree)))
    return kept


async def _chosen(session: Session, instance_ids: tuple[str, ...], query: str | None) -> list[str]:
    if query is not None:
        selection = parse_search(query, session.now_ms())
        return [info.instance_id async for info in selection.instances(session.admin)]
    try:
        return await trees_of(session.admin, instance_ids)
    except NotFound:
        for instance_id in instance_ids:
            await session.info(instance_id)  # names similar ids
        raise


@command(
    "import",
    examples=["perdure import o-1.jsonl", "perdure export o-1 | perdure import - --store copy.db"],
)
@click.argument("file")
@click.option("--replace", is_flag=True, help="Overwrite instances that exist and differ.")
@click.option("--keep", is_flag=True, help="Leave alone instances that exist and differ.")
@click.option("--paused", is_flag=True, help="Import them paused: no worker touches them.")
@click.option(
    "--partial", is_flag=True, help="Also a part of an export, and parents without their children."
)
@output_option("table", "json", "ids")
def import_command(
    file: str, replace: bool, keep: bool, paused: bool, partial: bool, output: str
) -> None:
    """Read instances written by perdure export from FILE (- for standard input).

    The instances continue where they were when a worker serves the store. Nothing is imported from
    a file that is damaged, cut, or has a parent but not the children for which it waits.

    An equal instance that exists already is left alone, so an import that was interrupted can be
    repeated; with --keep also while workers continue a part of it.
    """
    if replace and keep:
        raise UsageError("--replace overwrites instances that exist, --keep leaves them: give one")
    done = _Done()

    async def body(session: Session) -> None:
        read = _reader(file, partial=partial)
        total = await _check(session, file, read, partial=partial)
        with progress() as show:
            for snapshot in read():
                await import_one(session, snapshot)
                show(len(done.imported) + len(done.already_there), total)

    async def import_one(session: Session, snapshot: InstanceSnapshot) -> None:
        chosen = snapshot
        if paused and not _has_ended(snapshot):
            chosen = msgspec.structs.replace(snapshot, suspended=True)
        done.begun = snapshot.instance_id
        try:
            await session.admin.import_instance(chosen, replace=replace)
        except AlreadyExists as error:
            found = None if keep else await stored_hash(session.admin, chosen.instance_id)
            if not keep and found != snapshot_hash(chosen):
                number = len(done.imported)
                before = f" ({number} before it were imported)" if number else ""
                raise AlreadyExists(
                    f"{error}{before}; --replace overwrites it, --keep leaves it as it is"
                ) from None
            done.already_there.append(snapshot.instance_id)
        else:
            done.imported.append(snapshot.instance_id)

    try:
        run(body, creates=True)
    except KeyboardInterrupt:
        # The store may or may not have imported this one.
        perhaps = "" if done.begun is None else f", and perhaps {done.begun!r}"
        warn(
            f"interrupted: {len(done.imported)} instances are imported{perhaps}; the others are "
            "not, and the same command goes on where it was"
        )
        raise
    _print_imported(done, output)


@dataclass
class _Done:
    """The progress of an import."""

    imported: list[str] = field(default_factory=list[str])
    already_there: list[str] = field(default_factory=list[str])
    begun: str | None = None
    """The last instance that was given to the store."""


def _reader(file: str, *, partial: bool) -> Callable[[], Iterable[InstanceSnapshot]]:
    """Return a function that reads the file at each call. Standard input is read once and kept."""
    if file != "-":
        return lambda: read_snapshots(file, partial=partial)
    with interruptible():
        kept = list(read_snapshots(file, partial=partial))
    return lambda: kept


async def _check(
    session: Session,
    file: str,
    read: Callable[[], Iterable[InstanceSnapshot]],
    *,
    partial: bool,
) -> int:
    """Read the whole file before anything is written: a damaged file imports nothing.

    Return the number of instances.
    """
    here: set[str] = set()
    parents: dict[str, str] = {}  # the instance that waits, by the id of the child
    links: dict[str, list[tuple[str, work.ParentLink]]] = {}  # by the id of the parent
    with interruptible():
        for snapshot in read():
            here.add(snapshot.instance_id)
            if damages := damages_in(snapshot):
                raise InvalidValue(
                    f"{file}: {snapshot.instance_id!r} is damaged or made up: {damages[0]}"
                )
            if (link := parent_of(snapshot)) is not None:
                links.setdefault(link.instance_id, []).append((snapshot.instance_id, link))
            for child_id in open_children(snapshot):
                parents.setdefault(child_id, snapshot.instance_id)
    for child_id in () if partial else [child for child in parents if child not in here]:
        # An instance that has only messages has a hash too.
        if await stored_hash(session.admin, child_id) is None:
            raise InvalidValue(
                f"{file}: {parents[child_id]!r} waits for {child_id!r}, which is neither in the "
                "file nor in this store: it would wait for ever. An export of the parent by its id "
                "has its children, too; --partial imports it as it is"
            )
    await _check_links(session, file, links, read)
    return len(here)


async def _check_links(
    session: Session,
    file: str,
    links: dict[str, list[tuple[str, work.ParentLink]]],
    read: Callable[[], Iterable[InstanceSnapshot]],
) -> None:
    """Refuse a file with an instance that answers a step of a parent which did not start it."""

    def check(parent: InstanceSnapshot) -> None:
        for child_id, link in links.pop(parent.instance_id, ()):
            if (fault := link_fault(link, child_id, parent)) is not None:
                raise InvalidValue(f"{file}: {fault}")

    if links:
        with interruptible():
            for snapshot in read():
                check(snapshot)
    for parent_id in list(links):
        try:
            check(await session.admin.export_instance(parent_id))
        except NotFound:
            continue  # its children go on without it


def _print_imported(done: _Done, output: str) -> None:
    if output == "json":
        print_json({"imported": done.imported, "already_there": done.already_there})
    elif output == "ids":
        print_ids([*done.imported, *done.already_there])
    elif not done.imported and not done.already_there:
        warn("the file holds no instances")
    else:
        number = len(done.imported)
        there = f", {len(done.already_there)} already there" if done.already_there else ""
        print_done(f"imported {counted(number, 'instance')}{there}")


def _has_ended(snapshot: InstanceSnapshot) -> bool:
    execution = current_execution(snapshot)
    return execution is not None and execution.status.is_final


# --- files: one JSON document in each line


def read_snapshots(file: str, *, partial: bool = False) -> Iterator[InstanceSnapshot]:
    """Yield the instances of a file; an error names the line.

    With ``partial``, the line that ends an export may be missing.
    """
    unended = 0
    is_ended = partial
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            if line.lstrip().startswith(EXPORT_END):
                _check_end(line, unended, partial=partial)
                unended, is_ended = 0, True
            else:
                unended += 1
                yield decode_snapshot(line)
        except InvalidValue as error:
            raise InvalidValue(f"{file}, line {number}: {error}") from None
    if not partial and (unended or not is_ended):
        raise InvalidValue(
            f"{file} is cut: the line that ends an export is missing after {unended} instances. "
            f"Export once more; {_PARTIAL_HINT}"
        )


def _check_end(line: str, found: int, *, partial: bool) -> None:
    try:
        written = msgspec.json.decode(line, type=ExportEnd).perdure_export_end
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"not written by perdure: {error}") from error
    if written != found and not partial:
        raise InvalidValue(
            f"{written} instances were written before this line, and {found} are there; "
            f"{_PARTIAL_HINT}"
        )


def _lines(file: str) -> Iterator[str]:
    if file == "-":
        yield from _bounded(sys.stdin, file)
        return
    try:
        with Path(file).open(encoding="utf-8") as source:
            yield from _bounded(source, file)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from None


def _bounded(source: Any, file: str) -> Iterator[str]:
    while line := source.readline(_LINE_CHARACTERS_MAX):
        if len(line) >= _LINE_CHARACTERS_MAX:
            raise InvalidValue(f"{file} has a line of more than {_LINE_CHARACTERS_MAX} characters")
        yield line


def read_recordings(path: Path) -> list[Recorded]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from None
    if lines and lines[0].lstrip().startswith(('{"perdure_export"', EXPORT_END)):
        snapshots = read_snapshots(str(path), partial=True)
        return [recorded_in(snapshot) for snapshot in snapshots if snapshot.executions]
    try:
        history = [wire.decode_event(line) for line in lines]
    except CorruptData as error:
        raise InvalidValue(f"{path} holds no history: {error.message}") from None
    instance_id = history[0].instance_id if history else str(path)
    return [recorded_history(instance_id, history)]
