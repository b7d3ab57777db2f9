"""The provider over a directory, and its administration: the engine on a ``DirectoryDatabase``."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Final

from perdure.arguments import Duration, check_path, to_milliseconds
from perdure.errors import StoreClosed
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, ORPHAN_GRACE_SECONDS
from perdure.providers.directory.documents import LAYOUT_VERSION
from perdure.providers.directory.fileops import FileOps
from perdure.providers.directory.store import DirectoryDatabase
from perdure.providers.records import Capabilities, StoreInfo
from perdure.providers.sqlite.admin import EngineAdmin
from perdure.providers.sqlite.database import System
from perdure.providers.sqlite.provider import VERSION, EngineProvider
from perdure.providers.sqlite.store import Store
from perdure.providers.sqlite.transaction import Verb

if TYPE_CHECKING:
    from typing import Self

    from perdure.clock import Clock
    from perdure.providers.sqlite.transaction import Snapshot

_NO_OPERATION: Final = Verb("checkpoint", lambda *_: None)
_CAPABILITIES: Final = Capabilities(
    several_handles=False, several_processes=False, other_loops=True
)


class FileSystemProvider(EngineProvider):
    """Keeps everything in a directory of readable files; one process at a time.

    Every commit is one fsynced record in a journal; the files follow from it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        orphan_grace: Duration = ORPHAN_GRACE_SECONDS,
        mail_max: int = MAIL_MAX,
        mail_bytes_max: int = MAIL_BYTES_MAX,
        archive: Duration | None = None,
        allow_moved: bool = False,
        file_ops: FileOps | None = None,
    ) -> None:
        """``archive``: compress the history of an execution that ended that long ago."""
        self._path = os.path.abspath(check_path(path))  # noqa: PTH100 - resolving would hide a symbolic link
        self._database = DirectoryDatabase(
            self._path,
            file_ops if file_ops is not None else FileOps(),
            System(clock),
            orphan_grace_ms=to_milliseconds(orphan_grace, "orphan_grace"),
            archive_after_ms=None if archive is None else to_milliseconds(archive, "archive"),
        )
        self._is_temporary = False
        self._process_id = 0
        store = Store(self._database)
        super().__init__(
            store,
            FileSystemAdmin(store, self._database),
            allow_moved=allow_moved,
            mail_max=mail_max,
            mail_bytes_max=mail_bytes_max,
        )

    @classmethod
    def new_temp(cls, *, clock: Clock | None = None) -> Self:
        """Return a provider over a new directory that is removed when the provider is closed."""
        provider = cls(tempfile.mkdtemp(prefix="perdure-"), clock=clock)
        provider._is_temporary = True
        return provider

    @property
    def name(self) -> str:
        return "filesystem"

    @property
    def path(self) -> str:
        return self._path

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def open(self) -> None:
        await super().open()
        self._process_id = os.getpid()

    async def close(self) -> None:
        await super().close()
        if self._is_temporary:
            shutil.rmtree(self._path, ignore_errors=True)

    async def checkpoint(self) -> None:
        """Bring the readable files up to date, and archive, now instead of after a moment."""
        self._require_open("checkpoint")
        request = self._database.request_checkpoint()
        # The writer looks for requests after each operation, outside of any transaction.
        await self._store.write(_NO_OPERATION)
        await asyncio.wrap_future(request)

    def _require_open(self, operation: str) -> None:
        try:
            super()._require_open(operation)
        except StoreClosed as error:
            if self._process_id not in {0, os.getpid()}:
                raise StoreClosed(
                    operation,
                    f"{self._path} was opened by process {self._process_id}, before the fork; open "
                    "the store after forking",
                ) from error
            raise

    def _require_sound(self, operation: str, instance_id: str) -> None:
        self._database.damage.check(operation, instance_id)


class FileSystemAdmin(EngineAdmin):
    """See ``ProviderAdmin``; open as long as the handle that it belongs to."""

    def __init__(self, store: Store, database: DirectoryDatabase) -> None:
        super().__init__(store)
        self._database = database

    def _require_sound(self, operation: str, instance_id: str) -> None:
        self._database.damage.check(operation, instance_id)

    def describe(self, snapshot: Snapshot, format_version: int, moved_to: str | None) -> StoreInfo:
        database = self._database
        return StoreInfo(
            provider="filesystem",
            provider_version=VERSION,
            location=database.path,
            format_version=format_version,
            schema_version=LAYOUT_VERSION,
            size_bytes=database.root.size_bytes("."),
            moved_to=moved_to,
            details=database.details(),
        )
