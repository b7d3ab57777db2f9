"""The shared content of an in-memory store, and the small steps that keep its indexes in order."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from model import rules
from model.agenda import Agenda
from model.state import Instance, Message, SortedKeys
from model.work_queue import WorkQueue
from perdure.clock import SystemClock
from perdure.limits import ORPHAN_GRACE_MS
from perdure.providers.records import DeadLetter, DeleteResult
from perdure.providers.waiting import ChangeHub, Signal

if TYPE_CHECKING:
    from model.state import WorkItem
    from perdure.clock import Clock
    from perdure.providers.records import OrchestratorMessage, WorkerInfo, WorkerMessage


class ModelStore:
    """The state that the handles of one store share. It lives as long as it is referred to.

    Steps run on one event loop and never await, so each verb is atomic as long as it checks
    everything before it changes anything.
    """

    def __init__(
        self, clock: Clock | None = None, *, orphan_grace_ms: int = ORPHAN_GRACE_MS
    ) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        self.orphan_grace_ms = orphan_grace_ms
        self.turn_signal = Signal(self.clock)
        self.work_signal = Signal(self.clock)
        self.changes = ChangeHub(self.clock)
        ids = count(1)
        self.next_id = ids.__next__
        self.instances: dict[str, Instance] = {}
        self.agenda = Agenda()
        self.work = WorkQueue(self.work_signal, self.next_id)
        self.locks: dict[str, Instance] = {}
        self.listing: SortedKeys[tuple[int, str]] = SortedKeys()
        self._listed: dict[str, tuple[tuple[int, str], str | None]] = {}
        self._children: dict[str, set[str]] = {}
        self._orphans: SortedKeys[tuple[int, int, str]] = SortedKeys()
        """(time of death, message id, instance id) of messages that had no instance on arrival."""
        self.dead_letters: dict[int, DeadLetter] = {}
        self.workers: dict[str, tuple[int, WorkerInfo]] = {}
        """With the time at which each lapses."""
        self.moved_to: str | None = None
        self.latest_ms = 0

    def follow_clock(self) -> None:
        """Move times to a clock that was set back: what was sent for now is visible, locks and
        delays last as long as they would have.
        """
        now_ms, latest_ms = self.clock.now_ms(), self.latest_ms
        self.latest_ms = now_ms
        if now_ms >= latest_ms:
            return

        def back(time_ms: int) -> int:
            return time_ms if time_ms <= now_ms else max(now_ms, time_ms - latest_ms + now_ms)

        for instance in list(self.instances.values()):
            carried = instance.lock.carried if instance.lock is not None else {}
            instance.free = SortedKeys()
            for entry in instance.messages.values():
                if now_ms < entry.visible_at_ms <= entry.enqueued_at_ms:
                    entry.visible_at_ms = now_ms
                entry.enqueued_at_ms = min(entry.enqueued_at_ms, now_ms)
                if entry.message_id not in carried:
                    instance.free.add(entry.key)
            instance.yielded_at_ms = min(instance.yielded_at_ms, now_ms)
            if instance.not_before_ms is not None:
                instance.not_before_ms = back(instance.not_before_ms)
            if instance.lock is not None:
                instance.lock.locked_until_ms = back(instance.lock.locked_until_ms)
            self.settle(instance, now_ms)
        self._orphans = SortedKeys()
        for instance in self.instances.values():
            if instance.opens_at_ms is None:
                for entry in instance.messages.values():
                    self._orphans.add(self._death_of(entry))
        self.work.follow_clock(now_ms, back)

    def _death_of(self, entry: Message) -> tuple[int, int, str]:
        """Return when a message dies for which there is no instance, with its ids."""
        dies_at_ms = max(entry.visible_at_ms, entry.enqueued_at_ms + self.orphan_grace_ms)
        return dies_at_ms, entry.message_id, entry.message.instance_id

    def instance(self, instance_id: str) -> Instance:
        """Return the record of that id; an empty one if there is none."""
        found = self.instances.get(instance_id)
        if found is None:
            found = self.instances[instance_id] = Instance(instance_id)
        return found

    def settle(self, instance: Instance, now_ms: int) -> None:
        """Bring every index up to date after a change of the instance."""
        if instance.lock is None and not instance.messages:
            instance.mail_held = False
            instance.yielded_at_ms = 0
        self._relist(instance)
        if instance.is_empty:
            self.agenda.remove(instance)
            self.instances.pop(instance.instance_id, None)
        elif self.agenda.place(instance, now_ms):
            self.turn_signal.notify()
        self.changes.notify((instance.instance_id,))

    # --- messages

    def add_message(
        self, message: OrchestratorMessage, now_ms: int, delay_ms: int | None = None
    ) -> None:
        visible_at_ms = rules.visible_at(message.visible_at_ms, now_ms, delay_ms)
        self.insert_message(Message(self.next_id(), message, visible_at_ms, now_ms), now_ms)

    def insert_message(self, entry: Message, now_ms: int) -> None:
        instance = self.instance(entry.message.instance_id)
        instance.messages[entry.message_id] = entry
        instance.free.add(entry.key)
        if entry.message.start is not None:
            instance.starts[entry.message_id] = entry
        if entry.message.timer is not None:
            instance.timers.setdefault(entry.message.timer, set()).add(entry.message_id)
        if instance.opens_at_ms is None:
            self._orphans.add(self._death_of(entry))
        self.settle(instance, now_ms)

    def remove_message(self, instance: Instance, message_id: int) -> None:
        """The caller settles the instance afterwards."""
        entry = instance.messages.pop(message_id)
        if instance.lock is not None and message_id in instance.lock.carried:
            del instance.lock.carried[message_id]
        else:
            instance.free.remove(entry.key)
        instance.starts.pop(message_id, None)
        if entry.message.timer is not None:
            same_timer = instance.timers[entry.message.timer]
            same_timer.discard(message_id)
            if not same_timer:
                del instance.timers[entry.message.timer]

    def bury_orphans(self, now_ms: int) -> None:
        """Turn messages that waited too long for a start into dead letters."""
        while (first := self._orphans.first()) is not None and first[0] <= now_ms:
            self._orphans.remove(first)
            _, message_id, instance_id = first
            instance = self.instances.get(instance_id)
            is_orphan = instance is not None and instance.opens_at_ms is None
            if instance is not None and is_orphan and message_id in instance.messages:
                letter = DeadLetter(
                    letter_id=self.next_id(),
                    reason=rules.ORPHAN_REASON,
                    dead_since_ms=now_ms,
                    message=instance.messages[message_id].message,
                )
                self.dead_letters[letter.letter_id] = letter
                self.remove_message(instance, message_id)
                self.settle(instance, now_ms)

    # --- locks

    def release(self, instance: Instance) -> None:
        """Drop the lock of any owner; the messages that it carried are free again."""
        instance.mail_held = False
        instance.yielded_at_ms = 0
        if instance.lock is None:
            return
        del self.locks[instance.lock.token]
        for entry in instance.lock.carried.values():
            instance.free.add(entry.key)
        instance.lock = None

    # --- work items

    def add_work(self, message: WorkerMessage, now_ms: int) -> None:
        self.insert_work(self.work.add(message, now_ms))

    def insert_work(self, item: WorkItem) -> None:
        self.instance(item.identity.instance_id).work[item.message_id] = item

    def remove_work(self, item: WorkItem) -> None:
        self.work.remove(item)
        instance = self.instances[item.identity.instance_id]
        del instance.work[item.message_id]
        if instance.is_empty:
            del self.instances[instance.instance_id]

    # --- trees and deletion

    def children_of(self, instance_id: str) -> list[Instance]:
        """Oldest first."""
        children = [self.instances[child] for child in self._children.get(instance_id, ())]
        return sorted(children, key=lambda child: child.created_key)

    def tree_of(self, instance: Instance) -> list[Instance]:
        """The instance and its descendants, parents first."""
        tree = [instance]
        seen = {instance.instance_id}
        for member in tree:
            for child in self.children_of(member.instance_id):
                if child.instance_id not in seen:
                    seen.add(child.instance_id)
                    tree.append(child)
        return tree

    def delete(self, instance: Instance) -> DeleteResult:
        """Remove all that belongs to the instance."""
        deleted = DeleteResult(
            instances=int(instance.exists),
            executions=len(instance.executions),
            events=sum(len(history) for history in instance.histories.values()),
            messages=len(instance.messages) + len(instance.work),
        )
        self.release(instance)
        sessions = {item.message.session_id for item in instance.work.values()}
        for item in instance.work.values():
            self.work.remove(item)
        for session_id in sessions:
            if session_id is not None and not self.work.has_items(session_id):
                self.work.sessions.pop(session_id, None)
        self.agenda.remove(instance)
        self._unlist(instance.instance_id)
        self.instances.pop(instance.instance_id, None)
        self.changes.notify((instance.instance_id,))
        return deleted

    def _relist(self, instance: Instance) -> None:
        instance_id = instance.instance_id
        parent = instance.who().parent_instance_id
        entry = (instance.created_key, parent) if instance.exists else None
        if self._listed.get(instance_id) == entry:
            return
        self._unlist(instance_id)
        if entry is not None:
            self._listed[instance_id] = entry
            self.listing.add(entry[0])
            if parent is not None:
                self._children.setdefault(parent, set()).add(instance_id)

    def _unlist(self, instance_id: str) -> None:
        created_key, parent = self._listed.pop(instance_id, (None, None))
        if created_key is not None:
            self.listing.remove(created_key)
        if parent is not None:
            self._children[parent].discard(instance_id)
            if not self._children[parent]:
                del self._children[parent]
