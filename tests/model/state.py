"""The content of the in-memory store: plain mutable records, and lists that stay sorted."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from model import rules
from perdure.providers.records import StartRouting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.model.failures import Block
    from perdure.model.status import Status
    from perdure.providers.records import (
        ActivityIdentity,
        KvEntry,
        OrchestratorMessage,
        TimerIdentity,
        Version,
        WorkerMessage,
    )

_Key = TypeVar("_Key", bound="tuple[Any, ...]")


class SortedKeys(Generic[_Key]):
    """Unique tuples in order. Looking is O(log n); changing moves pointers, which is fast enough
    for a store that fits into memory and keeps the rest of it simple.
    """

    def __init__(self) -> None:
        self._keys: list[_Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._keys)

    def __contains__(self, key: _Key) -> bool:
        index = bisect_left(self._keys, key)
        return index < len(self._keys) and self._keys[index] == key

    def add(self, key: _Key) -> None:
        insort(self._keys, key)

    def remove(self, key: _Key) -> None:
        index = bisect_left(self._keys, key)
        assert self._keys[index] == key
        del self._keys[index]

    def first(self) -> _Key | None:
        return self._keys[0] if self._keys else None

    def first_from(self, key: tuple[Any, ...]) -> _Key | None:
        """The smallest that is not below the one given, which may be the beginning of a key."""
        index = bisect_left(self._keys, key)
        return self._keys[index] if index < len(self._keys) else None

    def descending_before(self, key: tuple[Any, ...] | None) -> Iterator[_Key]:
        """From the greatest key below the one given (None: from the end) downwards."""
        index = len(self._keys) if key is None else bisect_left(self._keys, key)
        return (self._keys[position] for position in range(index - 1, -1, -1))


@dataclass(slots=True)
class Message:
    """A message in the orchestrator queue."""

    message_id: int
    message: OrchestratorMessage
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return (self.visible_at_ms, self.message_id)

    @property
    def size(self) -> int:
        return len(self.message.body.encode())

    @property
    def is_mail(self) -> bool:
        return rules.is_mail(self.message.kind)


@dataclass(slots=True)
class WorkItem:
    """A message in the worker queue."""

    message_id: int
    message: WorkerMessage
    visible_at_ms: int
    enqueued_at_ms: int
    attempt_count: int = 0
    lock_token: str | None = None
    locked_until_ms: int = 0
    heartbeat: str | None = None

    @property
    def identity(self) -> ActivityIdentity:
        return self.message.identity

    @property
    def free_at_ms(self) -> int:
        """From then on it can be taken."""
        return max(self.visible_at_ms, self.locked_until_ms)


@dataclass(slots=True)
class Session:
    owner_id: str
    locked_until_ms: int
    last_activity_ms: int


@dataclass(slots=True)
class Lock:
    """An instance lock and the messages tagged with its token."""

    token: str
    locked_until_ms: int
    owner: str | None
    kept: bool = False
    """A turn was committed under it and the lock was kept."""
    carried: dict[int, Message] = field(default_factory=dict[int, Message])


@dataclass(slots=True)
class Execution:
    status: Status
    started_at_ms: int
    output: str | None = None
    completed_at_ms: int | None = None
    framework_version: Version | None = None


@dataclass(slots=True)
class Instance:
    """Everything under one instance id, also while only messages or history exist."""

    instance_id: str
    name: str | None = None
    version: str | None = None
    parent_instance_id: str | None = None
    start: StartRouting | None = None
    """Of the first start that was consumed: says who this is until a turn names it."""
    created_at_ms: int = 0
    updated_at_ms: int = 0
    execution_id: int = 0
    """The current one; 0 until a turn was committed."""
    executions: dict[int, Execution] = field(default_factory=dict[int, Execution])
    histories: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    custom_status: str | None = None
    custom_status_version: int = 0
    kv_store: dict[str, KvEntry] = field(default_factory=dict[str, "KvEntry"])
    kv_delta: dict[str, KvEntry | None] = field(default_factory=dict[str, "KvEntry | None"])
    suspended: bool = False
    block: Block | None = None
    not_before_ms: int | None = None
    mail_held: bool = False
    """Mail does not make it ready: its lock carries a batch, or its last turn wanted no more."""
    yielded_at_ms: int = 0
    """The time at which a turn left messages behind; others that were ready by then come first."""

    lock: Lock | None = None
    messages: dict[int, Message] = field(default_factory=dict[int, Message])
    free: SortedKeys[tuple[int, int]] = field(default_factory=SortedKeys[tuple[int, int]])
    """Keys of the messages that the lock does not carry."""
    starts: dict[int, Message] = field(default_factory=dict[int, Message])
    timers: dict[TimerIdentity, set[int]] = field(default_factory=dict["TimerIdentity", set[int]])
    work: dict[int, WorkItem] = field(default_factory=dict[int, WorkItem])

    def free_mail_sizes(self) -> list[int]:
        """Return the bytes of each mail that no lock carries and that was not sent for later."""
        return [
            entry.size
            for entry in self.messages.values()
            if entry.is_mail
            and entry.key in self.free
            and entry.visible_at_ms <= entry.enqueued_at_ms
        ]

    # --- who it is

    @property
    def has_turns(self) -> bool:
        return self.execution_id > 0

    @property
    def exists(self) -> bool:
        """For administration: a queued start is enough."""
        return self.has_turns or bool(self.starts)

    @property
    def is_known(self) -> bool:
        """For a fetch: there is something to go on with."""
        return self.has_turns or bool(self.histories)

    def who(self, visible_ms: int | None = None) -> StartRouting:
        """Name, version and parent: as a turn named it, else from the start that says so.

        With a time, only starts that are visible by then count.
        """
        if self.name is not None:
            return StartRouting(
                name=self.name, version=self.version, parent_instance_id=self.parent_instance_id
            )
        if self.start is not None:
            return self.start
        for _, entry in sorted(self.starts.items()):
            is_in_batch = visible_ms is None or rules.is_visible(entry.visible_at_ms, visible_ms)
            if is_in_batch and entry.message.start is not None:
                return entry.message.start
        return StartRouting(name=rules.UNKNOWN_NAME)

    @property
    def shown_execution_id(self) -> int:
        if self.has_turns:
            return self.execution_id
        return max(self.histories, default=1)

    @property
    def created_key(self) -> tuple[int, str]:
        """Place in the listing."""
        created_at_ms = self.created_at_ms
        if not self.has_turns and self.starts:
            created_at_ms = self.starts[min(self.starts)].enqueued_at_ms
        return (created_at_ms, self.instance_id)

    # --- where it stands

    @property
    def current(self) -> Execution | None:
        return self.executions.get(self.execution_id)

    @property
    def status(self) -> Status:
        return rules.shown_status(
            self.current.status if self.current is not None else None,
            suspended=self.suspended,
            blocked=self.block is not None,
        )

    @property
    def has_ended(self) -> bool:
        return self.current is not None and rules.has_ended(
            self.current.status, start_queued=bool(self.starts)
        )

    def locked(self, now_ms: int) -> bool:
        return self.lock is not None and rules.is_live(self.lock.locked_until_ms, now_ms)

    def carries(self, message_id: int, now_ms: int) -> bool:
        """Return True if a live lock covers the message."""
        return self.lock is not None and message_id in self.lock.carried and self.locked(now_ms)

    @property
    def oldest_key(self) -> tuple[int, int] | None:
        """The number of all its messages, also of those that a lock carries."""
        if self.lock is None:
            return self.free_key
        keys = [message.key for message in self.lock.carried.values()]
        if (free := self.free.first()) is not None:
            keys.append(free)
        return min(keys, default=None)

    @property
    def free_key(self) -> tuple[int, int] | None:
        """Place of the first message that its lock does not carry and that makes it ready."""
        for visible_at_ms, message_id in self.free:
            if not self.mail_held or not self.messages[message_id].is_mail:
                return max(visible_at_ms, self.yielded_at_ms), message_id
        return None

    @property
    def opens_at_ms(self) -> int | None:
        """The time when a batch can begin: at once if known, else with its first visible start."""
        if self.is_known:
            return 0
        return min((start.visible_at_ms for start in self.starts.values()), default=None)

    @property
    def is_empty(self) -> bool:
        """Nothing is left that anybody could ask for."""
        return not (self.exists or self.is_known or self.messages or self.work)
