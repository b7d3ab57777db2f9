"""Committing turns: one planner for one turn or for many turns of one transaction.

A commit has three phases:

1. Read what the turns need: their locks, or whether the ids of new instances are taken.
2. Decide, in Python, which rows each turn adds, changes and removes. ``_Plan`` gathers the rows by
   table; turns that create or rename an instance read its row here.
3. Write the rows of all turns, table by table, so that statements are few.

A turn changes more or less of its instance, see ``_Plan.add_turn``:

- a plain turn goes on: it changes only the time of the last turn, which is written to the readiness
  row if the lock is kept, and the rows of the instance stay as they are;
- a turn that ends the execution changes its status, output and end;
- every other turn rewrites the row of the instance: first turns, and turns that set a custom
  status, pin a version or begin another execution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import apsw

from perdure.errors import DuplicateEvent, InvalidValue, PerdureError
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import KvClear, KvSet
from perdure.providers.sqlite import (
    instances,
    messages,
    readiness,
    statements,
    work,
    work_statements,
)
from perdure.providers.sqlite.batch import PreconditionChanged
from perdure.providers.sqlite.instances import (
    NEW_EXECUTION,
    ExecutionRow,
    InstanceRow,
    Start,
    execution_after,
    instance_after,
)
from perdure.providers.sqlite.many_rows import as_list, as_object, rows_at_once
from perdure.providers.sqlite.statements import Existence, HeldLock
from perdure.providers.sqlite.transaction import is_text
from perdure.providers.sqlite.verb import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.providers.records import (
        HistoryRecord,
        OrchestratorMessage,
        TurnCommit,
        WorkerMessage,
    )
    from perdure.providers.sqlite.transaction import Transaction

_ACK: Final = "ack_orchestration_item"
_START: Final = "start_orchestration_item"


class _Named(NamedTuple):
    """An instance as its readiness row shows it after a turn."""

    instance_id: str
    instance_key: int
    name: str | None
    version: str | None


# --- verbs


def ack(tx: Transaction, lock_token: str, commit: TurnCommit) -> None:
    """Commit a turn. Errors: LockLost, DuplicateEvent, InvalidValue."""
    row = tx.held(statements.LOCK_HELD, lock_token)
    if row is None or (lock := HeldLock._make(row)).locked_until <= tx.now:
        raise rules.lock_lost(_ACK, lock_token)
    plan = _Plan(tx, _ACK)
    plan.add_turn(lock, lock_token, commit)
    plan.write()


def ack_many(tx: Transaction, turns: Sequence[tuple[str, TurnCommit]]) -> list[PerdureError | None]:
    """Commit turns, up to the first whose token was used before: it must see what that turn did.

    A turn whose lock is lost has LockLost as its answer.
    """
    tokens = [token for token, _ in turns if isinstance(token, str) and is_text(token)]
    locks = {
        token: HeldLock._make(row)
        for token, *row in rows_at_once(tx, statements.LOCKS_HELD, (as_list(tokens),))
    }
    plan = _Plan(tx, _ACK)
    used: set[str] = set()
    answers: list[PerdureError | None] = []
    for token, commit in turns:
        if token in used:
            break
        used.add(token)
        lock = locks.get(token)
        if lock is None or lock.locked_until <= tx.now:
            answers.append(rules.lock_lost(_ACK, token))
        else:
            answers.append(None)
            plan.add_turn(lock, token, commit)
    plan.write()
    return answers


def start_instance(
    tx: Transaction, start: OrchestratorMessage, commit: TurnCommit, token: str, owner: str
) -> bool:
    """Create an instance by its first turn; messages that came early stay free.

    Returns False if the id is taken. Errors: LockLost, InvalidValue.
    """
    existence = Existence._make(tx.row(statements.EXISTENCE_OF, (start.instance_id,)))
    if existence.is_taken:
        return False
    plan = _Plan(tx, _START)
    plan.add_start(start, existence, commit, token, owner)
    plan.write()
    return True


def start_many(
    tx: Transaction, starts: Sequence[tuple[OrchestratorMessage, TurnCommit, str, str]]
) -> list[bool]:
    """Create instances, up to the first whose id a turn before has sent a message to."""
    ids = as_list([start.instance_id for start, *_ in starts])
    known = {
        instance_id: Existence._make(row)
        for instance_id, *row in rows_at_once(tx, statements.EXISTENCE_OF_MANY, (ids,))
    }
    plan = _Plan(tx, _START)
    sent_to: set[str] = set()
    answers: list[bool] = []
    for start, commit, token, owner in starts:
        instance_id = start.instance_id
        if instance_id in sent_to:
            break
        existence = known.get(instance_id, statements.ABSENT)
        answers.append(not existence.is_taken)
        if not existence.is_taken:
            known[instance_id] = statements.TAKEN
            plan.add_start(start, existence, commit, token, owner)
            if commit.orchestrator_items:
                sent_to.update(message.instance_id for message in commit.orchestrator_items)
    plan.write()
    return answers


def append(
    tx: Transaction, instance_id: str, execution_id: int, records: Sequence[HistoryRecord]
) -> None:
    """Add events as given, without a turn; for tools. Errors: DuplicateEvent."""
    found = tx.row(instances.INSTANCE_BY_ID, (instance_id,))
    if found is not None:
        key = found[0]
    elif records:
        values = (None, instance_id, *instances.NO_INSTANCE)
        instances.INSERT_INSTANCE.execute(tx, [values])
        key = tx.connection.last_insert_rowid()
    else:
        return
    events = [(key, execution_id, record.event_id, record.data) for record in records]
    try:
        instances.INSERT_EVENT.execute(tx, events)
    except apsw.ConstraintError as error:
        raise _duplicate_event("append_with_execution", instance_id, events) from error
    if found is None and tx.row(statements.PLACE, (instance_id,)) is not None:
        readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


ACK_TURN: Final = Verb(_ACK, ack, run_many=ack_many)
START_INSTANCE: Final = Verb(_START, start_instance, run_many=start_many)
APPEND_EVENTS: Final = Verb("append_with_execution", append)


# --- the plan


class _Plan:
    """The rows that turns add, change and remove, gathered by table."""

    def __init__(self, tx: Transaction, operation: str) -> None:
        self._tx = tx
        self._operation = operation
        self._next_key = 0
        self._instance_ids: list[str] = []
        # What the turns consume.
        self._settled: list[tuple[str, str]] = []
        self._consumed: list[tuple[int, str]] = []
        self._carried: list[tuple[str, int, str]] = []
        # Instances, executions, history and state.
        self._new_instances: list[tuple[Any, ...]] = []
        self._changed_instances: list[tuple[Any, ...]] = []
        self._executions: list[tuple[Any, ...]] = []
        self._touched: list[int] = []
        self._ended: dict[Status, list[int]] = {}
        self._ends: list[tuple[Any, ...]] = []
        self._events: list[tuple[int, int, int, str]] = []
        self._state: list[tuple[int, TurnCommit]] = []
        self._merged: list[int] = []
        # What the turns send and cancel.
        self._work: list[WorkerMessage] = []
        self._messages: list[OrchestratorMessage] = []
        self._cancelling: list[tuple[str, TurnCommit]] = []
        # Readiness rows.
        self._extended: dict[int, list[str]] = {}
        self._kept: list[tuple[Any, ...]] = []
        self._released: list[_Named] = []
        self._suspended: list[_Named] = []
        self._new_locks: list[tuple[Any, ...]] = []
        self._early: list[str] = []
        self._holds: list[tuple[Any, ...]] = []
        self._rescheduled: list[tuple[str, str]] = []
        self._refreshed: list[str] = []

    # --- deciding

    def add_turn(self, lock: HeldLock, token: str, commit: TurnCommit) -> None:
        """Add a turn under a live lock."""
        self._add_contents(lock.instance_id, commit)
        if commit.consumed:
            self._consumed += [(message_id, token) for message_id in commit.consumed]
        elif commit.consumed is None and lock.carried_until is not None:
            self._carried.append((lock.instance_id, lock.carried_until, token))
        key = lock.instance_key
        status = commit.metadata.status
        if key is None or lock.running != commit.execution_id or _rewrites_instance(commit):
            self._rewrite(lock, token, commit)
            return
        self._add_events(key, commit)
        if status is not None and status is not Status.RUNNING:
            self._ended.setdefault(status, []).append(key)
            self._ends.append((key, commit.execution_id, status, commit.metadata.output))
        elif self._extend(lock, token, commit):
            return
        else:
            self._touched.append(key)
        self._hold(_Named(lock.instance_id, key, lock.name, lock.version), lock, token, commit)

    def add_start(
        self,
        start: OrchestratorMessage,
        existence: Existence,
        commit: TurnCommit,
        token: str,
        owner: str,
    ) -> None:
        """Add the first turn of an instance whose id is not taken."""
        now, instance_id, routing = self._tx.now, start.instance_id, start.start
        assert routing is not None
        self._add_contents(instance_id, commit)
        first = Start(routing.name, routing.version, routing.parent_instance_id, now)
        key, instance, _ = self._write_instance(
            instance_id, existence.instance_key, first, commit, is_suspended=False
        )
        if existence.has_row:
            # Of a message that came early: what held it back ends with the first turn.
            self._early.append(instance_id)
        if commit.keep_lock_ms is not None:
            locked_until = now + commit.keep_lock_ms
            self._new_locks.append(
                (instance_id, key, instance.name, instance.version, readiness.WAITING,
                 locked_until, token, now, locked_until, owner, 1)
            )  # fmt: skip
        if existence.has_row or commit.cancelled_timers:
            self._refreshed.append(instance_id)

    def _add_contents(self, instance_id: str, commit: TurnCommit) -> None:
        """Add what does not depend on the state of the instance."""
        self._instance_ids.append(instance_id)
        if commit.settled_work:
            self._settled += [(token, instance_id) for token in commit.settled_work]
        self._work += commit.worker_items
        self._messages += commit.orchestrator_items
        if commit.cancelled_activities or commit.cancelled_timers:
            self._cancelling.append((instance_id, commit))

    def _add_events(self, key: int, commit: TurnCommit) -> None:
        execution_id = commit.execution_id
        self._events += [
            (key, execution_id, record.event_id, record.data) for record in commit.history_delta
        ]
        if commit.kv_changes:
            self._state.append((key, commit))
        status = commit.metadata.status
        if status is not None and status.ends_execution:
            self._merged.append(key)

    def _extend(self, lock: HeldLock, token: str, commit: TurnCommit) -> bool:
        """Keep a lock that is kept already, which changes two columns of the readiness row."""
        keep_lock_ms, now = commit.keep_lock_ms, self._tx.now
        if (
            keep_lock_ms is None
            or not lock.kept
            or now + keep_lock_ms < lock.locked_until
            or lock.not_before is not None
            or lock.block is not None
        ):
            return False
        # wake_at stays: early is allowed, and its index is not written.
        self._extended.setdefault(now + keep_lock_ms, []).append(lock.instance_id)
        if commit.cancelled_timers:
            self._rescheduled.append((lock.instance_id, token))
        return True

    def _hold(self, named: _Named, lock: HeldLock, token: str, commit: TurnCommit) -> None:
        """Keep the lock, or release it."""
        if commit.keep_lock_ms is None:
            self._released.append(named)
            return
        locked_until = self._tx.now + commit.keep_lock_ms
        self._kept.append((*named, locked_until))
        if commit.cancelled_timers:
            self._rescheduled.append((lock.instance_id, token))
        # Messages that came late can be handed to the keeper from now on. Waiters poll at the old
        # expiry; wake them if the lock now expires earlier.
        if lock.ready_at is not None or locked_until < lock.locked_until:
            self._tx.turns_changed = True

    def _rewrite(self, lock: HeldLock, token: str, commit: TurnCommit) -> None:
        """Add a turn that changes more of its instance than status and time."""
        is_suspended = bool(lock.suspended)
        start = _carried_start(self._tx, lock, token, commit)
        key, instance, latest = self._write_instance(
            lock.instance_id, lock.instance_key, start, commit, is_suspended=is_suspended
        )
        named = _Named(lock.instance_id, key, instance.name, instance.version)
        if is_suspended and Status(latest.status).is_final:
            self._holds.append((0, lock.not_before, lock.block, lock.instance_id))
        elif is_suspended and commit.keep_lock_ms is None:
            self._suspended.append(named)
            return
        self._hold(named, lock, token, commit)

    def _write_instance(
        self,
        instance_id: str,
        key: int | None,
        start: Start | None,
        commit: TurnCommit,
        *,
        is_suspended: bool,
    ) -> tuple[int, InstanceRow, ExecutionRow]:
        """Add the rows of the instance and of the execution after the turn.

        Returns the key, the row and the row of the latest execution.
        """
        now = self._tx.now
        if key is None:
            key = self._new_key()
            execution = latest = execution_after(now, NEW_EXECUTION, commit)
            instance = instance_after(now, None, start, commit, latest, is_suspended=is_suspended)
            self._new_instances.append((key, instance_id, *instance))
        else:
            row = self._tx.row(instances.INSTANCE_ROW, (key, commit.execution_id))
            before = InstanceRow._make(row[: len(InstanceRow._fields)])
            old_execution = ExecutionRow._make(row[len(InstanceRow._fields) :])
            execution = latest = execution_after(now, old_execution, commit)
            if before.execution_id > commit.execution_id:
                row = self._tx.row(instances.EXECUTION, (key, before.execution_id))
                latest = ExecutionRow._make(row)
            instance = instance_after(now, before, start, commit, latest, is_suspended=is_suspended)
            self._changed_instances.append((*instance, key))
        self._executions.append((key, commit.execution_id, *execution, now))
        self._add_events(key, commit)
        return key, instance, latest

    def _new_key(self) -> int:
        if not self._next_key:
            self._next_key = self._tx.row(instances.NEXT_INSTANCE_KEY)[0]
        self._next_key += 1
        return self._next_key - 1

    # --- writing

    def write(self) -> None:
        """Write the rows of all turns.

        Messages are inserted after the instances and the new locks and before the other locks:
        inserting a message reads the readiness row of its instance, and a lock is released with a
        look at the messages that are left.
        """
        tx = self._tx
        tx.changed_instances += self._instance_ids
        if self._settled:
            self._settle_work()
        if self._consumed:
            statements.DELETE_CONSUMED.execute(tx, self._consumed)
        for each in self._carried:
            tx.change(statements.DELETE_CARRIED, each)
        self._write_instances()
        if self._events:
            self._write_events()
        if self._state or self._merged:
            self._write_state()
        if self._work:
            work.insert_many(tx, self._work)
        for _, commit in self._cancelling:
            for identity in commit.cancelled_activities:
                values = (identity.instance_id, identity.execution_id, identity.activity_id)
                tx.change(work_statements.DELETE_CANCELLED_WORK, values)
        for instance_id in self._early:
            statements.DELETE_LOCKS.execute(tx, [instance_id])
        if self._new_locks:
            self._write_new_locks()
        if self._messages:
            messages.insert_all(tx, self._messages)
        for instance_id, commit in self._cancelling:
            for timer in commit.cancelled_timers:
                values = (instance_id, timer.execution_id, timer.timer_id)
                tx.change(statements.DELETE_TIMER, values)
        self._write_locks()

    def _settle_work(self) -> None:
        """Remove the work items that the turns settle; each must be held, for its own instance."""
        tx, settled = self._tx, self._settled
        if len(settled) == 1:
            token, instance_id = settled[0]
            values = (token, tx.now, instance_id)
            if is_text(token) and tx.change(work_statements.SETTLE_WORK, values) == 1:
                return
        elif self._is_for_many:
            given = as_object({token: owner for token, owner in settled if is_text(token)})
            if tx.change(work_statements.SETTLE_WORK_ITEMS, (given, tx.now)) != len(settled):
                raise PreconditionChanged
            return
        held = work.find_held(tx, [token for token, _ in settled])
        for token, instance_id in settled:
            if token not in held:
                raise rules.lock_lost(self._operation, token)
            message_id, owner_id = held[token]
            if owner_id != instance_id:
                raise InvalidValue(
                    f"the settled work item {message_id} is one of {owner_id!r}, not of "
                    f"{instance_id!r}"
                )
        ids = [message_id for message_id, _ in held.values()]
        tx.change(work_statements.DELETE_WORK_ITEMS, (as_list(ids),))

    @property
    def _is_for_many(self) -> bool:
        return len(self._instance_ids) > 1

    def _write_instances(self) -> None:
        tx = self._tx
        if self._new_instances:
            instances.INSERT_INSTANCE.execute(tx, self._new_instances)
        for each in self._changed_instances:
            tx.change(instances.UPDATE_INSTANCE, each)
        if self._executions:
            instances.PUT_EXECUTION.execute(tx, self._executions)
        if self._touched:
            instances.TOUCH_INSTANCES.execute(tx, self._touched, tx.now)
        if self._ended:
            for status, keys in self._ended.items():
                instances.END_INSTANCES.execute(tx, keys, status, tx.now)
            instances.END_EXECUTIONS.execute(tx, self._ends, (tx.now, tx.now))

    def _write_events(self) -> None:
        try:
            instances.INSERT_EVENT.execute(self._tx, self._events)
        except apsw.ConstraintError as error:
            if self._is_for_many:
                raise PreconditionChanged from error
            instance_id = self._instance_ids[0]
            raise _duplicate_event(self._operation, instance_id, self._events) from error

    def _write_state(self) -> None:
        """Write the changes of the current execution; an execution that ends makes them last."""
        tx = self._tx
        for key, commit in self._state:
            for change in commit.kv_changes:
                match change:
                    case KvSet():
                        values = (key, change.key, change.value, change.updated_at_ms)
                        tx.change(instances.PUT_KV_DELTA, values)
                    case KvClear():
                        tx.change(instances.PUT_KV_DELTA, (key, change.key, None, None))
                    case _:
                        tx.change(instances.CLEAR_ALL_IN_DELTA, (key,))
        if len(self._merged) == 1:
            (key,) = self._merged
            changed = self._merged if tx.row(instances.HAS_KV_DELTA, (key,)) is not None else []
        else:
            changed = rows_at_once(tx, instances.HAVE_KV_DELTA, (as_list(self._merged),))
        for key in changed:
            tx.change(instances.MERGE_KV, (key,))
            tx.change(instances.DROP_CLEARED_KV, (key,))
            tx.change(instances.EMPTY_KV_DELTA, (key,))

    def _write_new_locks(self) -> None:
        try:
            statements.INSERT_KEPT_LOCK.execute(self._tx, self._new_locks)
        except apsw.ConstraintError as error:
            if self._is_for_many:
                raise PreconditionChanged from error
            token = self._new_locks[0][6]
            raise InvalidValue(f"the lock token {token!r} is in use") from error

    def _write_locks(self) -> None:
        tx = self._tx
        for holds in self._holds:
            tx.change(statements.SET_HOLDS, holds)
        for locked_until, ids in self._extended.items():
            statements.EXTEND_KEPT_LOCKS.execute(tx, ids, locked_until, tx.now)
        if self._kept:
            statements.KEEP_LOCKS.execute(tx, self._kept)
        for instance_id, token in self._rescheduled:
            first = tx.row(statements.FIRST_FREE_MESSAGE, (instance_id, token)) or (None, None)
            tx.change(statements.SET_READY_MESSAGE, (*first, instance_id))
        if self._released:
            ids = [named.instance_id for named in self._released]
            if statements.DELETE_LAST_LOCKS.execute(tx, ids) != len(ids):
                # Those that are gone already are not touched again.
                self._release(self._released, readiness.READY)
        if self._suspended:
            self._release(self._suspended, readiness.SUSPENDED)
        for instance_id in self._refreshed:
            readiness.refresh(tx, instance_id)

    def _release(self, released: Sequence[_Named], state: int) -> None:
        """Release locks of instances that have messages left, or that are suspended."""
        tx = self._tx
        for instance_id, key, name, version in released:
            first = tx.row(statements.FIRST_MESSAGE, (instance_id,)) or (None, None)
            values = (state, *first, key, name, version, instance_id)
            tx.change(statements.RELEASE_LOCK, values)
        tx.turns_changed = True


# --- rows after a turn


def _rewrites_instance(commit: TurnCommit) -> bool:
    """Return whether a turn of the running execution changes more than status, output and time."""
    metadata = commit.metadata
    return (
        metadata.name is not None
        or commit.custom_status is not None
        or metadata.framework_version is not None
        or (metadata.output is not None and metadata.status in {None, Status.RUNNING})
    )


def _carried_start(tx: Transaction, lock: HeldLock, token: str, commit: TurnCommit) -> Start | None:
    """Return the first start that this turn consumes, if it is the first turn."""
    if lock.instance_key is not None and lock.pending_since is None:
        return None
    if commit.metadata.name is not None and lock.name is not None and lock.start_id is not None:
        # The only start there is, and the turn itself says the rest.
        if commit.consumed is None or lock.start_id in commit.consumed:
            assert lock.pending_since is not None
            return Start(lock.name, lock.version, None, lock.pending_since)
        return None
    carried = (lock.instance_id, lock.carried_until, token)
    for message_id, *start in tx.rows(statements.CARRIED_STARTS, carried):
        if commit.consumed is None or message_id in commit.consumed:
            return Start._make(start)
    return None


def _duplicate_event(
    operation: str, instance_id: str, events: Sequence[tuple[int, int, int, str]]
) -> DuplicateEvent:
    execution_id = events[0][1]
    ids = ", ".join(str(event_id) for _, _, event_id, _ in events[:20])
    text = f"execution {execution_id} of {instance_id!r} already has one of the events {ids}"
    return DuplicateEvent(operation, text)
