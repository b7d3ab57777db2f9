"""What belongs to what: from an instance, a token, an identity or a session to the rows concerned.

Follows the tables change by change and collects what was touched, for those who schedule and list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from perdure.providers.filesystem.history import History
    from perdure.providers.filesystem.rows import (
        ClaimRow,
        ExecutionRow,
        InstanceRow,
        KvDeltaRow,
        KvStoreRow,
        LockRow,
        MessageRow,
        SessionRow,
        TagRow,
        WorkRow,
    )
    from perdure.providers.filesystem.tables import Tables
    from perdure.providers.records import ActivityIdentity, KvEntry

_Key = TypeVar("_Key", bound="Hashable")
_Member = TypeVar("_Member", bound="Hashable")

NOTHING: frozenset[int] = frozenset()


class Lookups:
    """Secondary indexes over the tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.messages: dict[str, set[int]] = {}
        """By instance."""
        self.starts: dict[str, set[int]] = {}
        """Messages with ``start``, by instance."""
        self.timers: dict[tuple[str, int, int], set[int]] = {}
        """Timer messages by instance, execution and timer id."""
        self.tagged: dict[str, set[int]] = {}
        """Messages by the lock token that they carry."""
        self.locks: dict[str, str] = {}
        """Instance by its lock token."""
        self.work: dict[str, set[int]] = {}
        """Work items by instance."""
        self.identities: dict[ActivityIdentity, set[int]] = {}
        self.claims: dict[str, int] = {}
        """Work item by its lock token."""
        self.session_work: dict[str, set[int]] = {}
        self.owner_sessions: dict[str, set[str]] = {}
        self.executions: dict[str, set[int]] = {}
        self.histories: dict[str, set[int]] = {}
        """Executions that have events, by instance."""
        self.kv_store: dict[str, dict[str, KvEntry]] = {}
        self.kv_delta: dict[str, dict[str, KvEntry | None]] = {}
        self.children: dict[str, set[str]] = {}
        """Of instances that have had a turn, and of queued starts."""
        self._parents: dict[str, str] = {}
        """Under whom each child is listed."""
        self.event_count = 0
        self.on_new_message: Callable[[MessageRow], None] | None = None
        self.touched_instances: set[str] = set()
        self.touched_work: set[int] = set()
        self.touched_sessions: set[str] = set()
        self._listen()

    def messages_of(self, instance_id: str) -> list[int]:
        """In queue order."""
        return sorted(self.messages.get(instance_id, NOTHING))

    def tagged_with(self, lock_token: str) -> list[int]:
        """In queue order."""
        return sorted(self.tagged.get(lock_token, NOTHING))

    def work_of(self, instance_id: str) -> list[int]:
        """In queue order."""
        return sorted(self.work.get(instance_id, NOTHING))

    def first_start(self, instance_id: str) -> MessageRow | None:
        """The queued start that comes first."""
        starts = self.starts.get(instance_id)
        return self._tables.messages.rows[min(starts)] if starts else None

    # --- following the tables

    def _listen(self) -> None:
        tables = self._tables
        tables.messages.on_change = self._message_changed
        tables.tags.on_change = self._tag_changed
        tables.work.on_change = self._work_changed
        tables.claims.on_change = self._claim_changed
        tables.instances.on_change = self._instance_changed
        tables.progress.on_change = self._touch
        tables.holds.on_change = self._touch
        tables.locks.on_change = self._lock_changed
        tables.executions.on_change = self._execution_changed
        tables.kv_store.on_change = self._kv_store_changed
        tables.kv_delta.on_change = self._kv_delta_changed
        tables.sessions.on_change = self._session_changed
        tables.on_history = self._history_changed

    def _touch(self, instance_id: str, _old: object, _new: object) -> None:
        self.touched_instances.add(instance_id)

    def _message_changed(
        self, message_id: int, old: MessageRow | None, new: MessageRow | None
    ) -> None:
        row = new if new is not None else old
        if row is None or (old is not None and new is not None):
            return
        message, is_new = row.message, new is not None
        instance_id = message.instance_id
        self.touched_instances.add(instance_id)
        if is_new and self.on_new_message is not None:
            self.on_new_message(row)
        _update(self.messages, instance_id, message_id, is_member=is_new)
        if message.start is not None:
            _update(self.starts, instance_id, message_id, is_member=is_new)
            self._follow_parent(instance_id)
        if message.timer is not None:
            timer = (instance_id, message.timer.execution_id, message.timer.timer_id)
            _update(self.timers, timer, message_id, is_member=is_new)

    def _tag_changed(self, message_id: int, old: TagRow | None, new: TagRow | None) -> None:
        old_token = old.lock_token if old is not None else None
        new_token = new.lock_token if new is not None else None
        if old_token == new_token:
            return
        if old_token is not None:
            _update(self.tagged, old_token, message_id, is_member=False)
        if new_token is not None:
            _update(self.tagged, new_token, message_id, is_member=True)
        message = self._tables.messages.get(message_id)
        if message is not None:
            self.touched_instances.add(message.message.instance_id)

    def _lock_changed(self, instance_id: str, old: LockRow | None, new: LockRow | None) -> None:
        self.touched_instances.add(instance_id)
        if old is not None:
            self.locks.pop(old.lock_token, None)
        if new is not None:
            self.locks[new.lock_token] = instance_id

    def _work_changed(self, message_id: int, old: WorkRow | None, new: WorkRow | None) -> None:
        row = new if new is not None else old
        if row is None or (old is not None and new is not None):
            return
        is_new = new is not None
        self.touched_work.add(message_id)
        identity, session_id = row.message.identity, row.message.session_id
        _update(self.work, identity.instance_id, message_id, is_member=is_new)
        _update(self.identities, identity, message_id, is_member=is_new)
        if session_id is not None:
            _update(self.session_work, session_id, message_id, is_member=is_new)

    def _claim_changed(self, message_id: int, old: ClaimRow | None, new: ClaimRow | None) -> None:
        self.touched_work.add(message_id)
        if old is not None and old.lock_token is not None:
            self.claims.pop(old.lock_token, None)
        if new is not None and new.lock_token is not None:
            self.claims[new.lock_token] = message_id

    def _session_changed(
        self, session_id: str, old: SessionRow | None, new: SessionRow | None
    ) -> None:
        self.touched_sessions.add(session_id)
        if old is not None:
            _update(self.owner_sessions, old.owner_id, session_id, is_member=False)
        if new is not None:
            _update(self.owner_sessions, new.owner_id, session_id, is_member=True)

    def _instance_changed(
        self, instance_id: str, _old: InstanceRow | None, _new: InstanceRow | None
    ) -> None:
        self.touched_instances.add(instance_id)
        self._follow_parent(instance_id)

    def _follow_parent(self, instance_id: str) -> None:
        old, new = self._parents.get(instance_id), self.parent_of(instance_id)
        if old == new:
            return
        if old is not None:
            del self._parents[instance_id]
            _update(self.children, old, instance_id, is_member=False)
        if new is not None:
            self._parents[instance_id] = new
            _update(self.children, new, instance_id, is_member=True)

    def parent_of(self, instance_id: str) -> str | None:
        """Of an instance that has had a turn, or whose start is queued."""
        row = self._tables.instances.get(instance_id)
        if row is not None and row.name is not None:
            return row.parent_instance_id
        start = row.start if row is not None else None
        if start is None and (first := self.first_start(instance_id)) is not None:
            start = first.message.start
        return start.parent_instance_id if start is not None else None

    def _execution_changed(
        self, key: tuple[str, int], _old: ExecutionRow | None, new: ExecutionRow | None
    ) -> None:
        self.touched_instances.add(key[0])
        _update(self.executions, key[0], key[1], is_member=new is not None)

    def _history_changed(
        self, key: tuple[str, int], old: History | None, new: History | None
    ) -> None:
        self.event_count += (new.count if new else 0) - (old.count if old else 0)
        if (old is None) != (new is None):
            self.touched_instances.add(key[0])
            _update(self.histories, key[0], key[1], is_member=new is not None)

    def _kv_store_changed(
        self, key: tuple[str, str], _old: KvStoreRow | None, new: KvStoreRow | None
    ) -> None:
        if new is not None:
            self.kv_store.setdefault(key[0], {})[key[1]] = new.entry
        else:
            _forget(self.kv_store, *key)

    def _kv_delta_changed(
        self, key: tuple[str, str], _old: KvDeltaRow | None, new: KvDeltaRow | None
    ) -> None:
        if new is not None:
            self.kv_delta.setdefault(key[0], {})[key[1]] = new.entry
        else:
            _forget(self.kv_delta, *key)


def _update(
    index: dict[_Key, set[_Member]], key: _Key, member: _Member, *, is_member: bool
) -> None:
    if is_member:
        members = index.get(key)
        if members is None:
            index[key] = {member}
        else:
            members.add(member)
        return
    members = index.get(key)
    if members is not None:
        members.discard(member)
        if not members:
            del index[key]


def _forget(values: dict[str, dict[str, _Member]], instance_id: str, key: str) -> None:
    of_instance = values.get(instance_id)
    if of_instance is not None:
        of_instance.pop(key, None)
        if not of_instance:
            del values[instance_id]
