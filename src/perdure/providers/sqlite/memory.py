"""The store in memory: the engine on a database that lives in this process and is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.arguments import Duration, to_milliseconds
from perdure.errors import UsageError
from perdure.limits import MAIL_BYTES_MAX, MAIL_MAX, ORPHAN_GRACE_SECONDS
from perdure.providers.records import Capabilities, StoreInfo
from perdure.providers.sqlite.admin import EngineAdmin
from perdure.providers.sqlite.database import Database, System
from perdure.providers.sqlite.provider import VERSION, EngineProvider
from perdure.providers.sqlite.store import Signals, Store

if TYPE_CHECKING:
    from perdure.clock import Clock
    from perdure.providers.sqlite.transaction import Snapshot

_CAPABILITIES: Final = Capabilities(durable=False, several_processes=False, other_loops=True)


class MemoryStore:
    """The content that handles share. It lives as long as there is a reference to it."""

    def __init__(
        self, clock: Clock | None = None, *, orphan_grace: Duration = ORPHAN_GRACE_SECONDS
    ) -> None:
        grace_ms = to_milliseconds(orphan_grace, "orphan_grace")
        self.database = _SharedDatabase("the memory store", System(clock), orphan_grace_ms=grace_ms)
        self.clock = self.database.system.clock
        self.signals = Signals(self.clock)


class _SharedDatabase(Database):
    def close(self) -> None:
        """Keep the connection: another handle may use it, now or later."""


class InMemoryProvider(EngineProvider):
    """Keeps everything in this process and forgets it with the last reference to its store.

    Handles that are given the same ``MemoryStore`` see the same content. They must be used on one
    event loop; only locks can be renewed from another thread.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        store: MemoryStore | None = None,
        orphan_grace: Duration = ORPHAN_GRACE_SECONDS,
        mail_max: int = MAIL_MAX,
        mail_bytes_max: int = MAIL_BYTES_MAX,
        allow_moved: bool = False,
    ) -> None:
        if store is not None and clock is not None:
            raise UsageError("give the clock to the MemoryStore: a store has one clock")
        shared = store or MemoryStore(clock, orphan_grace=orphan_grace)
        handle = Store(shared.database, on_loop=True, signals=shared.signals)
        super().__init__(
            handle,
            _MemoryAdmin(handle),
            allow_moved=allow_moved,
            mail_max=mail_max,
            mail_bytes_max=mail_bytes_max,
        )

    @property
    def name(self) -> str:
        return "memory"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES


class _MemoryAdmin(EngineAdmin):
    def describe(self, snapshot: Snapshot, format_version: int, moved_to: str | None) -> StoreInfo:
        return StoreInfo(
            provider="memory",
            provider_version=VERSION,
            location="memory:",
            format_version=format_version,
            schema_version=1,
            size_bytes=None,
            moved_to=moved_to,
            details={"durability": "none: the content is gone with the process"},
        )
