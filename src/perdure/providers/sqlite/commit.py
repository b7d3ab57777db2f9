"""Committing turns: one planner for one turn or for many turns of one transaction.

A commit has three phases:

1. Read what the turns need: their locks, or whether the ids of new instances are taken.
2. Decide, in Python, which rows each turn adds, changes and removes. ``_Plan`` gathers the rows by
   the step that writes them; turns that create or rename an instance read its row here.
3. Write the rows of all turns, step by step in the order of ``_STEPS``, so that statements are few.

A turn changes more or less of its instance, see ``_Plan.add_turn``:

- a plain turn goes on: it changes only the time of the last turn, which is written to the readiness
  row if the lock is kept, and the rows of the instance stay as they are;
- a turn that ends the execution changes its status, output and end;
- every other turn rewrites the row of the instance: first turns, and turns that set a custom
  status, pin a version or begin another execution.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import apsw

from perdure.errors import DuplicateEvent, InvalidValue, LockLost, PerdureError
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.sqlite import instances, messages, readiness, statements, work
from perdure.providers.sqlite.connection import is_refused_change
from perdure.providers.sqlite.instances import (
    NEW_EXECUTION,
    ExecutionRow,
    InstanceRow,
    Start,
    event_rows,
    execution_after,
    instance_after,
)
from perdure.providers.sqlite.readiness import Released
from perdure.providers.sqlite.statements import Existence, HeldLock
from perdure.providers.sqlite.transaction import (
    ForKeys,
    ManyRows,
    PreconditionChanged,
    Verb,
    as_list,
    as_object,
    is_text,
    rows_at_once,
)
from perdure.providers.validation import check_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.providers.records import (
        HistoryRecord,
        KvChange,
        OrchestratorMessage,
        TurnCommit,
        WorkerMessage,
    )
    from perdure.providers.sqlite.instances import EventRow
    from perdure.providers.sqlite.transaction import Transaction

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_ACK: Final = "ack_orchestration_item"
_START: Final = "start_orchestration_item"


# --- verbs


def ack(tx: Transaction, lock_token: str, commit: TurnCommit) -> None:
    """Commit a turn. Errors: LockLost, DuplicateEvent, InvalidValue."""
    row = tx.held(statements.LOCK_HELD, lock_token)
    if row is None or (lock := HeldLock._make(row)).locked_until <= tx.now:
        raise rules.lock_lost(_ACK, lock_token)
    plan = _Plan(tx, _ACK)
    if not plan.add_turn(lock, lock_token, commit):
        raise _event_missing(_ACK, lock_token, commit)
    plan.write()


def ack_many(tx: Transaction, turns: Sequence[tuple[str, TurnCommit]]) -> list[PerdureError | None]:
    """Commit turns, up to the first whose token was used before: it must see what that turn did.

    A turn whose lock is lost, or that is ahead of the store, has LockLost as its answer.
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
        elif plan.add_turn(lock, token, commit):
            answers.append(None)
        else:
            answers.append(_event_missing(_ACK, token, commit))
    plan.write()
    return answers


def start_instance(
    tx: Transaction, start: OrchestratorMessage, commit: TurnCommit, token: str, owner: str
) -> bool:
    """Create an instance by its first turn; messages that came early stay free.

    Returns False if the id is taken. Errors: LockLost, InvalidValue.
    """
    existence = instances.find_existence(tx, start.instance_id)
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
    known = instances.find_existences(tx, [start.instance_id for start, *_ in starts])
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
        key = instances.next_key(tx)
        instances.INSERT_INSTANCE.execute(tx, [(key, instance_id, *instances.NO_INSTANCE)])
    else:
        return
    events = instances.event_rows(tx, key, execution_id, records)
    try:
        instances.INSERT_EVENT.execute(tx, events)
    except apsw.ConstraintError as error:
        if is_refused_change(error):
            raise
        raise _duplicate_event("append_with_execution", instance_id, events) from error
    if found is None and tx.row(statements.READINESS, (instance_id,)) is not None:
        readiness.refresh(tx, instance_id)
    tx.changed_instances.append(instance_id)


ACK_TURN: Final = Verb(_ACK, ack, run_many=ack_many)
START_INSTANCE: Final = Verb(_START, start_instance, run_many=start_many)
APPEND_EVENTS: Final = Verb("append_with_execution", append)


# --- the plan

_Step: TypeAlias = "str | ManyRows | ForKeys | Callable[[_Plan, list[Any]], None]"
"""Writes rows of one kind: a statement for one row or for many, or a function."""


class _Plan:
    """The rows that turns add, change and remove, by the step that writes them."""

    def __init__(self, tx: Transaction, operation: str) -> None:
        self.tx = tx
        self.operation = operation
        self.instance_ids: list[str] = []
        self._rows: defaultdict[_Step, list[Any]] = defaultdict(list)
        self._next_key = 0

    @property
    def is_for_many(self) -> bool:
        return len(self.instance_ids) > 1

    # --- deciding

    def _has_event(self, key: int | None, execution_id: int, event_id: int) -> bool:
        """Return True if a history has the event with that id."""
        if event_id == 0:
            return True
        last = self.tx.row(instances.LAST_EVENT, (key, execution_id))[0]
        return last is not None and event_id <= last

    def add_turn(self, lock: HeldLock, token: str, commit: TurnCommit) -> bool:
        """Add a turn under a live lock; False, and nothing is added, if it is ahead of the store.

        That is a turn that goes on from an event which is not stored.
        """
        key, execution_id = lock.instance_key, commit.execution_id
        is_running, needed = lock.running == execution_id, rules.predecessor(commit)
        if is_running:
            if needed > (lock.last_event or 0):
                return False
        elif not self._has_event(key, execution_id, needed):
            return False
        rows = self._add_contents(lock.instance_id, commit)
        if commit.consumed:
            rows[_consume] += [(each, token) for each in commit.consumed]
        elif commit.consumed is None and lock.carried_until is not None:
            carried = (lock.instance_id, lock.carried_until, token)
            rows[statements.DELETE_CARRIED].append(carried)
        if commit.returned:
            rows[statements.UNTAG_MESSAGE] += [(each, token) for each in commit.returned]
        if key is None or not is_running or _rewrites_instance(commit):
            self._rewrite(lock, token, commit)
            return True
        status = self._add_events(key, commit)
        if status is not None and status is not Status.RUNNING:
            output = commit.metadata.output
            rows[_end_executions].append((key, execution_id, status, output))
        elif self._extend(lock, token, commit):
            return True
        else:
            rows[instances.TOUCH_INSTANCE].append((self.tx.now, key))
        self._hold(self._released(lock, key, lock.name, lock.version, commit), lock, token, commit)
        return True

    def add_start(
        self,
        start: OrchestratorMessage,
        existence: Existence,
        commit: TurnCommit,
        token: str,
        owner: str,
    ) -> None:
        """Add the first turn of an instance whose id is not taken."""
        now, instance_id, routing = self.tx.now, start.instance_id, start.start
        assert routing is not None
        if not self._has_event(
            existence.instance_key, commit.execution_id, rules.predecessor(commit)
        ):
            raise _event_missing(_START, token, commit)
        rows = self._add_contents(instance_id, commit)
        first = Start(routing.name, routing.version, routing.parent_instance_id, now)
        key, instance, _ = self._write_instance(
            instance_id, existence.instance_key, first, commit, is_suspended=False
        )
        if existence.has_row:
            # Of a message that came early: what held it back ends with the first turn.
            rows[statements.DELETE_LOCKS].append(instance_id)
        if commit.keep_lock_ms is not None:
            locked_until = now + commit.keep_lock_ms
            rows[_insert_locks].append(
                (instance_id, key, instance.name, instance.version, readiness.WAITING,
                 locked_until, token, now, locked_until, owner, 1)
            )  # fmt: skip
        if existence.has_row or commit.cancelled_timers:
            rows[_refresh].append(instance_id)

    def _add_contents(self, instance_id: str, commit: TurnCommit) -> defaultdict[_Step, list[Any]]:
        """Add what does not depend on the state of the instance, and return the rows."""
        rows = self._rows
        self.instance_ids.append(instance_id)
        if commit.settled_work:
            rows[_settle_work] += [(token, instance_id) for token in commit.settled_work]
        if commit.worker_items:
            check_items(commit, instance_id)
            rows[_send_work] += commit.worker_items
        if commit.orchestrator_items:
            rows[_send_messages] += commit.orchestrator_items
        if commit.cancelled_activities:
            check_items(commit, instance_id)
            rows[work.DELETE_CANCELLED_WORK] += [
                (each.instance_id, each.execution_id, each.activity_id)
                for each in commit.cancelled_activities
            ]
        if commit.cancelled_timers:
            rows[statements.DELETE_TIMER] += [
                (instance_id, timer.execution_id, timer.timer_id)
                for timer in commit.cancelled_timers
            ]
        return rows

    def _add_events(self, key: int, commit: TurnCommit) -> Status | None:
        """Add history and state, and return the status that the turn sets."""
        if commit.history_delta:
            events = event_rows(self.tx, key, commit.execution_id, commit.history_delta)
            self._rows[_insert_events] += events
        if commit.kv_changes:
            self._rows[_change_state].append((key, commit.kv_changes))
        status = commit.metadata.status
        if status is not None and status.ends_execution:
            self._rows[_merge_state].append(key)
        return status

    def _extend(self, lock: HeldLock, token: str, commit: TurnCommit) -> bool:
        """Keep a lock that is kept already, which changes two columns of the readiness row."""
        if commit.keep_lock_ms is None or not lock.kept:
            return False
        locked_until = self.tx.now + commit.keep_lock_ms
        if locked_until < lock.locked_until:
            return False
        # wake_at stays: early is allowed, and its index is not written.
        self._rows[_extend_locks].append((locked_until, lock.instance_id))
        if commit.cancelled_timers or lock.mail_held:
            self._rows[_reschedule].append((lock.instance_id, token, self._yielded_at(lock)))
        return True

    def _yielded_at(self, lock: HeldLock) -> int | None:
        """Return the time of a turn that left messages behind: what was ready then comes first."""
        return self.tx.now if lock.mail_held else lock.yielded_at

    def _released(
        self, lock: HeldLock, key: int, name: str | None, version: str | None, commit: TurnCommit
    ) -> Released:
        status = commit.metadata.status
        mail_held = bool(commit.returned) and (status is None or not status.ends_execution)
        yielded_at = self.tx.now if commit.returned else self._yielded_at(lock)
        return Released(lock.instance_id, key, name, version, mail_held, yielded_at)

    def _hold(self, released: Released, lock: HeldLock, token: str, commit: TurnCommit) -> None:
        """Keep the lock, or release it."""
        if commit.keep_lock_ms is None:
            self._rows[_release_locks].append(released)
            return
        locked_until = self.tx.now + commit.keep_lock_ms
        self._rows[statements.KEEP_LOCKS].append((*released[:4], locked_until))
        if commit.cancelled_timers or lock.mail_held:
            self._rows[_reschedule].append((lock.instance_id, token, self._yielded_at(lock)))
        # Messages that came late can be handed to the keeper from now on. Waiters poll at the old
        # expiry; wake them if the lock now expires earlier.
        if lock.ready_at is not None or locked_until < lock.locked_until:
            self.tx.turns_changed = True

    def _rewrite(self, lock: HeldLock, token: str, commit: TurnCommit) -> None:
        """Add a turn that changes more of its instance than status and time."""
        is_suspended = bool(lock.suspended)
        start = _carried_start(self.tx, lock, token, commit)
        key, instance, latest = self._write_instance(
            lock.instance_id, lock.instance_key, start, commit, is_suspended=is_suspended
        )
        released = self._released(lock, key, instance.name, instance.version, commit)
        if is_suspended and Status(latest.status).is_final:
            holds = (0, lock.not_before, lock.block, lock.instance_id)
            self._rows[statements.SET_HOLDS].append(holds)
        elif is_suspended and commit.keep_lock_ms is None:
            self._rows[_release_suspended].append(released)
            return
        self._hold(released, lock, token, commit)

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
        tx, now = self.tx, self.tx.now
        if key is None:
            key = self._new_key()
            execution = latest = execution_after(now, NEW_EXECUTION, commit)
            instance = instance_after(now, None, start, commit, latest, is_suspended=is_suspended)
            self._rows[instances.INSERT_INSTANCE].append((key, instance_id, *instance))
        else:
            row = tx.row(instances.INSTANCE_ROW, (key, commit.execution_id))
            before = InstanceRow._make(row[: len(InstanceRow._fields)])
            old_execution = ExecutionRow._make(row[len(InstanceRow._fields) :])
            execution = latest = execution_after(now, old_execution, commit)
            if before.execution_id > commit.execution_id:
                latest = ExecutionRow._make(tx.row(instances.EXECUTION, (key, before.execution_id)))
            instance = instance_after(now, before, start, commit, latest, is_suspended=is_suspended)
            self._rows[instances.UPDATE_INSTANCE].append((*instance, key))
        self._rows[instances.PUT_EXECUTION].append((key, commit.execution_id, *execution, now))
        self._add_events(key, commit)
        return key, instance, latest

    def _new_key(self) -> int:
        if not self._next_key:
            self._next_key = instances.next_key(self.tx)
        self._next_key += 1
        return self._next_key - 1

    # --- writing

    def write(self) -> None:
        """Write the rows of all turns."""
        rows = self._rows
        self.tx.changed_instances += self.instance_ids
        for step in sorted(rows, key=_ORDER.__getitem__):
            _WRITERS[step](self, rows[step])


# --- steps


def _grouped(pairs: list[tuple[_Value, _Key]]) -> Iterable[tuple[_Value, list[_Key]]]:
    """Return each value with the keys that it is to be written for."""
    if len(pairs) == 1:
        value, key = pairs[0]
        return ((value, [key]),)
    groups: defaultdict[_Value, list[_Key]] = defaultdict(list)
    for value, key in pairs:
        groups[value].append(key)
    return groups.items()


def _settle_work(plan: _Plan, settled: list[tuple[str, str]]) -> None:
    """Remove the work items that the turns settle; each must be held, for its own instance."""
    tx = plan.tx
    if len(settled) == 1:
        token, instance_id = settled[0]
        values = (token, tx.now, instance_id)
        if is_text(token) and tx.change(work.SETTLE_WORK, values) == 1:
            return
    elif plan.is_for_many:
        given = as_object({token: owner for token, owner in settled if is_text(token)})
        if tx.change(work.SETTLE_WORK_ITEMS, (given, tx.now)) != len(settled):
            raise PreconditionChanged
        return
    held = work.find_held(tx, [token for token, _ in settled])
    for token, instance_id in settled:
        if token not in held:
            raise rules.lock_lost(plan.operation, token)
        message_id, owner_id = held[token]
        if owner_id != instance_id:
            raise InvalidValue(
                f"the settled work item {message_id} is one of {owner_id!r}, not of {instance_id!r}"
            )
    work.DELETE_WORK.execute(tx, [message_id for message_id, _ in held.values()])


def _consume(plan: _Plan, consumed: list[tuple[int, str]]) -> None:
    """Remove the messages that the turns consume; each must carry the token of its turn."""
    removed = statements.DELETE_CONSUMED.count(plan.tx, consumed)
    # A message that is named twice is removed once.
    if removed != len(consumed) and removed != len(set(consumed)):
        if plan.is_for_many:
            raise PreconditionChanged
        raise rules.message_lost(plan.operation, consumed[0][1])


def _end_executions(plan: _Plan, ends: list[tuple[int, int, Status, str | None]]) -> None:
    tx = plan.tx
    for status, keys in _grouped([(status, key) for key, _, status, _ in ends]):
        instances.END_INSTANCES.execute(tx, keys, status, tx.now)
    instances.END_EXECUTIONS.execute(tx, ends, (tx.now, tx.now))


def _insert_events(plan: _Plan, events: list[EventRow]) -> None:
    try:
        instances.INSERT_EVENT.execute(plan.tx, events)
    except apsw.ConstraintError as error:
        if plan.is_for_many:
            raise PreconditionChanged from error
        if is_refused_change(error):
            raise
        raise _duplicate_event(plan.operation, plan.instance_ids[0], events) from error


def _change_state(plan: _Plan, changes: list[tuple[int, Sequence[KvChange]]]) -> None:
    for key, each in changes:
        instances.change_state(plan.tx, key, each)


def _merge_state(plan: _Plan, keys: list[int]) -> None:
    instances.merge_state(plan.tx, keys)


def _send_work(plan: _Plan, items: list[WorkerMessage]) -> None:
    work.insert_many(plan.tx, items)


def _send_messages(plan: _Plan, sent: list[OrchestratorMessage]) -> None:
    messages.insert_all(plan.tx, sent)


def _insert_locks(plan: _Plan, locks: list[tuple[Any, ...]]) -> None:
    try:
        statements.INSERT_KEPT_LOCK.execute(plan.tx, locks)
    except apsw.ConstraintError as error:
        if plan.is_for_many:
            raise PreconditionChanged from error
        if is_refused_change(error):
            raise
        raise InvalidValue(f"the lock token {locks[0][6]!r} is in use") from error


def _extend_locks(plan: _Plan, extended: list[tuple[int, str]]) -> None:
    # Turns of one worker keep their locks for the same time.
    for locked_until, ids in _grouped(extended):
        statements.EXTEND_KEPT_LOCKS.execute(plan.tx, ids, locked_until, plan.tx.now)


def _reschedule(plan: _Plan, kept: list[tuple[str, str, int | None]]) -> None:
    """Find the next message of instances that cancelled a timer, or left messages behind."""
    for instance_id, token, yielded_at in kept:
        readiness.reschedule(plan.tx, instance_id, token, yielded_at)


def _release_locks(plan: _Plan, released: list[Released]) -> None:
    ids = [each.instance_id for each in released]
    statements.DELETE_LAST_LOCKS.execute(plan.tx, ids)
    if plan.tx.connection.changes() != len(ids):
        # Those that are gone already are not touched again.
        readiness.release(plan.tx, released, readiness.READY)


def _release_suspended(plan: _Plan, released: list[Released]) -> None:
    readiness.release(plan.tx, released, readiness.SUSPENDED)


def _refresh(plan: _Plan, instance_ids: list[str]) -> None:
    for instance_id in instance_ids:
        readiness.refresh(plan.tx, instance_id)


_STEPS: Final[tuple[_Step, ...]] = (
    # What the turns consume.
    _settle_work,
    _consume,
    statements.DELETE_CARRIED,
    statements.UNTAG_MESSAGE,
    # Instances, executions, history and state.
    instances.INSERT_INSTANCE,
    instances.UPDATE_INSTANCE,
    instances.PUT_EXECUTION,
    instances.TOUCH_INSTANCE,
    _end_executions,
    _insert_events,
    _change_state,
    _merge_state,
    # What the turns send and cancel. Inserting a message reads the readiness row of its instance,
    # so new locks come first.
    _send_work,
    work.DELETE_CANCELLED_WORK,
    statements.DELETE_LOCKS,
    _insert_locks,
    _send_messages,
    statements.DELETE_TIMER,
    # The other locks: releasing one looks at the messages that are left.
    statements.SET_HOLDS,
    _extend_locks,
    statements.KEEP_LOCKS,
    _reschedule,
    _release_locks,
    _release_suspended,
    _refresh,
)


def _writer_of(step: _Step) -> Callable[[_Plan, list[Any]], object]:
    if isinstance(step, str):
        return lambda plan, rows: plan.tx.execute_many(step, rows)
    if isinstance(step, ManyRows | ForKeys):
        return lambda plan, rows: step.execute(plan.tx, rows)
    return step


_ORDER: Final[dict[_Step, int]] = {step: number for number, step in enumerate(_STEPS)}
_WRITERS: Final[dict[_Step, Callable[[_Plan, list[Any]], object]]] = {
    step: _writer_of(step) for step in _STEPS
}


# --- turns


def _rewrites_instance(commit: TurnCommit) -> bool:
    """Return True if a turn of the running execution changes more than status, output and time."""
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


def _event_missing(operation: str, token: str, commit: TurnCommit) -> LockLost:
    needed = rules.predecessor(commit)
    return rules.event_missing(operation, token, needed, commit.execution_id)


def _duplicate_event(
    operation: str, instance_id: str, events: Sequence[EventRow]
) -> DuplicateEvent:
    execution_id = events[0][1]
    ids = ", ".join(str(event_id) for _, _, event_id, *_ in events[:20])
    text = f"execution {execution_id} of {instance_id!r} already has one of the events {ids}"
    return DuplicateEvent(operation, text)
