"""The features that a provider declares. Decisions depend on them, never on a provider's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Declared features. The conformance kit checks each one that is declared."""

    durable: bool = True
    """What was committed survives the process."""
    several_handles: bool = True
    """A second handle may be opened on the same store while the first is in use."""
    several_processes: bool = True
    """The second handle may be in another process."""
    long_poll: bool = True
    """A fetch waits for work up to its poll timeout and returns as soon as there is some."""
    hot_path: bool = True
    """``TurnCommit.keep_lock``, ``settled_work``, claimed work items, ``owner`` on fetch, and
    ``start_orchestration_item``."""
    admin: bool = True
    """The provider is also a ``ProviderAdmin``."""
    injected_clock: bool = True
    """Leases and visibility follow the clock that was handed in, not one of the store's own."""
    other_loops: bool = False
    """Verbs may also be awaited on another event loop, in another thread, and get done even while
    the loop that opened the handle is blocked."""
    transactions: bool = False
    """``settle_in_transaction``: user code may write to the store's own database."""
    time_resolution_ms: int = 1
