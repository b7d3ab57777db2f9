"""The store in a directory: the engine's tables in memory, a journal before each commit, files.

The tables are filled from the files and the journal when the store is opened. Each commit writes
its changed rows into the journal and flushes it; only then is it committed in memory and answered.
Checkpoints bring the files up to date, in the thread of the writer, when it is idle or when the
journal has become long or old.
"""

# apsw's own stubs leave the type of a buffer open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from perdure.arguments import Duration, check_path, to_milliseconds
from perdure.errors import ProviderError, StoreClosed, StoreRefused
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, ORPHAN_GRACE_SECONDS
from perdure.logs import get_logger
from perdure.providers.directory import layout
from perdure.providers.directory.checkpoint import Checkpoint, Files
from perdure.providers.directory.documents import LAYOUT_VERSION
from perdure.providers.directory.fileops import FileOps
from perdure.providers.directory.journal import Journal, JournalHook
from perdure.providers.directory.layout import DamagedFiles
from perdure.providers.directory.loading import Loader
from perdure.providers.directory.root import FileBatch, Root, SyncFailed, refusal
from perdure.providers.records import DAMAGED, Capabilities, StoreInfo
from perdure.providers.sqlite.admin import EngineAdmin
from perdure.providers.sqlite.database import Database, System
from perdure.providers.sqlite.provider import VERSION, EngineProvider
from perdure.providers.sqlite.store import Store
from perdure.providers.sqlite.transaction import Snapshot, Transaction, Verb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from perdure.clock import Clock

_log = get_logger("perdure.directory")

_LOCK_ATTEMPTS: Final = 10
_LOCK_WAIT_SECONDS: Final = 0.03
"""A program that is just being started may hold a copy of the lock until it runs; not for long."""
IDLE_SECONDS: Final = 0.25
"""A checkpoint begins after this many seconds without a commit."""
AGE_SECONDS: Final = 30.0
"""A busy store gets a checkpoint after this time at the latest: the later, the fewer files are
written several times.
"""
_JOURNAL_BYTES_DUE: Final = 16 << 20
_JOURNAL_BYTES_MAX: Final = 256 << 20
"""Beyond this, commits wait for the files to catch up."""
_RETRY_SECONDS: Final = 2.0
"""Pause after a checkpoint that failed."""


class DirectoryTransaction(Transaction):
    """Reads the texts of events that are not in memory from their files."""

    __slots__ = ()

    @property
    def first_key(self) -> int:  # type: ignore[override]
        assert isinstance(self._hook, JournalHook)
        return self._hook.files.first_key

    def events(
        self, instance_key: int, execution_id: int, after_event_id: int = 0, limit: int = -1
    ) -> list[tuple[int, str]]:
        rows = super().events(instance_key, execution_id, after_event_id, limit)
        assert isinstance(self._hook, JournalHook)
        return self._hook.histories.complete((instance_key, execution_id), rows)


class DirectoryDatabase(Database):
    """Tables in memory that follow from a directory."""

    transaction_type = DirectoryTransaction

    def __init__(
        self,
        path: str,
        file_ops: FileOps,
        system: System,
        *,
        orphan_grace_ms: int,
        archive_after_ms: int | None,
    ) -> None:
        self._journal_hook = JournalHook(self.enforce_moved_mark)
        super().__init__(path, system, orphan_grace_ms=orphan_grace_ms, hook=self._journal_hook)
        self.path = path
        self._file_ops = file_ops
        self._archive_after_ms = archive_after_ms
        self._archived_before_ms = -1
        self.root = Root(path, file_ops)
        self.damage = DamagedFiles(path)
        self._running: Iterator[None] | None = None
        """The checkpoint that is under way."""
        self._requests: deque[Future[None]] = deque()
        """Futures of the callers that wait for a checkpoint."""
        self._dirty_since: float | None = None
        self._retry_at = 0.0
        self.checkpoint_error: ProviderError | None = None
        """The error of the last checkpoint, if it failed."""

    # --- opening and closing

    def open(self, *, allow_moved: bool) -> None:
        self.root = Root(self.path, self._file_ops)
        try:
            self.root.open()
            self._lock_root()
            super().open(allow_moved=True)
            self._load(allow_moved=allow_moved)
        except OSError as error:
            self._abandon()
            raise refusal("open", error) from error
        except SyncFailed as error:
            self._abandon()
            raise StoreRefused("open", f"{self.path}: {error}; check the disk") from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        super().close()
        self.root.close()

    def _lock_root(self) -> None:
        for _ in range(_LOCK_ATTEMPTS):
            if self.root.try_lock(self.system.clock.now_ms()):
                return
            self.system.pause(_LOCK_WAIT_SECONDS)
        holder = self.root.holder()
        process = (
            f"process {holder.pid} on host {holder.host!r} since {holder.since}"
            if holder is not None
            else "another process"
        )
        raise StoreRefused(
            "open",
            f"{self.path} is in use by {process}; a directory serves one process at a time: stop "
            "that one, or use SQLite for several",
        )

    def _load(self, *, allow_moved: bool) -> None:
        connection, root, hook = self.ready().connection, self.root, self._journal_hook
        files = self._files = Files(root, connection)
        self.damage = files.damage
        journal = Journal(root)
        hook.attach(files, journal, 0)
        loader = Loader(files, self.system.clock.now_ms())
        loader.load()
        self.rebuild_readiness()
        if not allow_moved:
            self.check_not_moved(connection)
        self.enforce_moved_mark()
        hook.attach(files, journal, loader.last_sequence)
        journal.start_segment(loader.last_sequence + 1)
        files.changes.watch(is_watching=True)
        self._archived_before_ms = -1
        self._running, self.checkpoint_error, self._retry_at = None, None, 0.0
        self._note_dirty()
        if loader.old is not None:
            for _ in self._checkpoint():
                pass
            root.replace(layout.README_FILE, layout.README.encode())
            FileBatch(root, files=1).remove(loader.old.paths)

    def close(self) -> None:
        hook = self._journal_hook
        is_whole = hook.failure is None
        try:
            if is_whole:
                self._files.is_closing = True
                self.write_files()
        except Exception as error:  # noqa: BLE001 - the root must be released
            # Nothing is lost: the journal has it, and the next start writes the files.
            self._report(error)
            is_whole = False
        for request in self._requests:
            request.cancel()
        if is_whole:
            hook.journal.finish()
        hook.journal.close()
        super().close()
        self.root.close()

    # --- around each commit

    def _require_durable(self, operation: str) -> None:
        """Raise StoreClosed if a flush has failed: nothing is written any more."""
        if self._journal_hook.failure is not None:
            raise StoreClosed(operation, self._journal_hook.failure)

    def ready(self) -> Transaction:
        hook = self._journal_hook
        self._require_durable("commit")
        if hook.journal_bytes > _JOURNAL_BYTES_MAX:
            self.write_files()
        return super().ready()

    def check_before_reply(self) -> None:
        self._journal_hook.committed()
        if self._dirty_since is None:
            self._note_dirty()

    def _note_dirty(self) -> None:
        if self._files.dirty or self._files.stale:
            self._dirty_since = self.system.monotonic()

    # --- checkpoints

    def idle_seconds(self) -> float | None:
        if self._running is not None:
            return 0.0
        return None if self._dirty_since is None else IDLE_SECONDS

    def use_idle_time(self, idle_seconds: float) -> bool:
        if self._dirty_since is not None and idle_seconds >= IDLE_SECONDS * 0.9:
            self._go_on()
        return False

    def is_upkeep_due(self, *, is_waited_for: bool) -> bool:
        if self._requests or self._running is not None:
            return True
        since = self._dirty_since
        return since is not None and (
            self._journal_hook.journal_bytes > _JOURNAL_BYTES_DUE
            or self.system.monotonic() - since > AGE_SECONDS
        )

    def keep_up(self) -> None:
        if self._requests:
            self._serve_requests()
        else:
            self._go_on()

    def request_checkpoint(self) -> Future[None]:
        """Ask the writer for a whole checkpoint, which it makes after the next operation."""
        request: Future[None] = Future()
        self._requests.append(request)
        return request

    def _serve_requests(self) -> None:
        # One by one: the event loop may add a request meanwhile.
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        failure: Exception | None = None
        try:
            self.write_files()
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait
            failure = error
        for request in requests:
            if not request.set_running_or_notify_cancel():
                continue
            if failure is None:
                request.set_result(None)
            else:
                request.set_exception(failure)

    def _go_on(self) -> None:
        """Run a slice of the checkpoint that is under way, or begin one."""
        if self._running is None:
            if self._journal_hook.failure is not None or self.system.monotonic() < self._retry_at:
                return
            self._running = self._checkpoint()
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - the writer must outlive it
            self._report(error)

    def _advance(self) -> bool:
        """Return True if the checkpoint has ended. Errors: ProviderError."""
        assert self._running is not None
        try:
            next(self._running)
        except StopIteration:
            self._running = None
            self.checkpoint_error = None
            return True
        except OSError as error:
            self.checkpoint_error = refusal("checkpoint", error)
            self._put_off()
            raise self.checkpoint_error from error
        except SyncFailed as error:
            self._running = None
            raise self._journal_hook.fail(error) from error
        except BaseException:
            self._put_off()
            raise
        return False

    def _put_off(self) -> None:
        self._running = None
        self._note_dirty()
        self._retry_at = self.system.monotonic() + _RETRY_SECONDS

    def _report(self, error: Exception) -> None:
        _log.warning(
            "the readable files in %s could not be brought up to date: %s; nothing is lost, the "
            "journal holds it, and they will be",
            self.path,
            error,
        )

    def _checkpoint(self) -> Iterator[None]:
        files, hook = self._files, self._journal_hook
        window: tuple[int, int] | None = None
        if self._archive_after_ms is not None:
            before_ms = self.system.clock.now_ms() - self._archive_after_ms
            window = (self._archived_before_ms, before_ms)
        first_sequence = hook.sequence + 1
        hook.journal.start_segment(first_sequence)
        written_bytes = hook.journal_bytes
        self._dirty_since = None
        yield from Checkpoint(files, first_sequence, window).run(hook.journal.drop_segments)
        hook.journal_bytes -= written_bytes
        if window is not None:
            self._archived_before_ms = window[1]
        if self._dirty_since is None:
            self._note_dirty()

    def write_files(self) -> None:
        """Bring the readable files up to date now, and archive. Errors: ProviderError."""
        self._require_durable("checkpoint")
        if self._running is not None:
            while not self._advance():
                pass
        is_due = self._files.dirty or self._files.stale or self._archive_after_ms is not None
        if is_due:
            self._running = self._checkpoint()
            while not self._advance():
                pass

    # --- for people

    def details(self) -> dict[str, str]:
        hook = self._journal_hook
        details = {
            "durability": "full: every commit is synced before it is answered",
            "journal_sequence": str(hook.sequence),
            "journal_bytes": str(hook.journal_bytes),
        }
        if self.checkpoint_error is not None:
            details["checkpoint_error"] = str(self.checkpoint_error)
        for path, reason in sorted(self.damage.reasons.items()):
            details[f"{DAMAGED}{path}"] = reason
        return details


# --- the provider

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
            file_ops or FileOps(),
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
