"""A copy of the whole file while work goes on: it gets its name only if it was found sound."""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import apsw

from perdure.errors import AlreadyExists, CorruptData
from perdure.providers.sqlite.connection import translate
from perdure.providers.sqlite.guards import create_draft, put_in_place
from perdure.providers.sqlite.verb import Verb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from perdure.providers.sqlite.store import Store
    from perdure.providers.sqlite.transaction import Snapshot

_FINDINGS_MAX: Final = 3
_STEPS_BETWEEN_LOOKS: Final = 100_000


async def back_up(store: Store, target: Path) -> None:
    """Errors: AlreadyExists, CorruptData; then there is nothing at the target."""
    draft = create_draft(target)
    is_over = threading.Event()
    try:
        await store.search(Verb("backup", _copy), draft, target)
        # The copy is read, and no snapshot is held meanwhile: workers go on undisturbed.
        await store.database.system.run_in_thread(
            _verify, draft, store.database.label, is_over.is_set
        )
        put_in_place(draft, target)
    except FileExistsError as error:
        raise there_already(target) from error
    finally:
        is_over.set()
        draft.unlink(missing_ok=True)


def there_already(target: Path) -> AlreadyExists:
    return AlreadyExists(f"{str(target)!r} exists; name a new file for the backup")


def _copy(snapshot: Snapshot, draft: Path, target: Path) -> None:
    try:
        copy = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            with copy.backup("main", snapshot.connection, "main") as backup:
                backup.step()
        finally:
            copy.close()
    except apsw.Error as error:
        raise translate("backup", error, repr(str(target))) from error


def _verify(draft: Path, source: str, is_over: Callable[[], bool]) -> None:
    """Immutable: SQLite puts no other files beside it. Errors: CorruptData."""
    name = f"file:{quote(str(draft))}?immutable=1"
    try:
        copy = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        try:
            copy.set_progress_handler(is_over, _STEPS_BETWEEN_LOOKS)
            rows: list[Any] = copy.execute(f"PRAGMA integrity_check({_FINDINGS_MAX})").fetchall()
            found = [" ".join(str(row[0]).split()) for row in rows]
        finally:
            copy.close()
    except apsw.Error as error:
        refusal = translate("backup", error, repr(str(draft)))
        if not isinstance(refusal, CorruptData):
            raise refusal from error
        found = [str(error)]
    if found != ["ok"]:
        raise CorruptData(
            "backup",
            f"{source} is damaged: {'; '.join(found)}. No backup was written, lest it take "
            "the place of a good one. Keep the file, and restore an earlier backup; 'perdure db "
            "check' says what is damaged",
        )
