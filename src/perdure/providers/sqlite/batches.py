"""The plain operations of one batch, written table by table instead of one after the other.

What is right is defined by the verbs one by one. Here is the same for runs of operations about
which nothing is special: they concern different instances, and a look beforehand has shown that
each will be accepted. The first operation of which that is not so ends the run.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.providers.items import EnqueueCondition
from perdure.providers.sqlite import (
    commits,
    orchestrator_queue,
    queries,
    turns,
    work_queries,
    worker_queue,
)
from perdure.providers.sqlite.many_rows import as_list, rows_at_once
from perdure.providers.sqlite.tokens import as_stored, is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.model.status import Status
    from perdure.providers.items import OrchestratorMessage, TurnCommit, WorkerMessage
    from perdure.providers.sqlite.entries import Entry, Outcome
    from perdure.providers.sqlite.transaction import Transaction

RUN_MIN = 2
"""Fewer plain operations than this are not worth a look."""
LOOKS_MAX: Final = 8
"""After so many runs that ended early, the rest of the operations is run one by one."""


class NotAsSeen(Exception):
    """A statement did not do what the look had promised: roll back, and run them one by one."""


class _Kind(NamedTuple):
    """How one verb is run for many callers at once."""

    may_be_plain: Callable[..., bool]
    """Says by the arguments alone whether it is worth a look."""
    run: Callable[[Transaction, Sequence[Any]], Sequence[Any]]
    """Takes the arguments of a run; answers for as many as were plain, from the first on."""


def run(
    tx: Transaction, entries: Iterable[Entry], run_one: Callable[[Entry], Outcome]
) -> list[Outcome]:
    """Run operations, in their order or as good as that.

    Errors: whatever says that the look was wrong; then nothing of it may be committed.
    """
    outcomes: list[Outcome] = []
    for kind, group in groupby(entries, _kind_of):
        rest = list(group)
        looks = LOOKS_MAX
        while kind is not None and looks and len(rest) >= RUN_MIN:
            looks -= 1
            answers = kind.run(tx, [entry.args for entry in rest])
            done, rest = rest[: len(answers)], rest[len(answers) :]
            outcomes += [(entry, each, None) for entry, each in zip(done, answers, strict=True)]
            if rest:
                outcomes.append(run_one(rest.pop(0)))
        outcomes += [run_one(entry) for entry in rest]
    return outcomes


def _kind_of(entry: Entry) -> _Kind | None:
    kind = _KINDS.get(entry.operation)
    return kind if kind is not None and kind.may_be_plain(*entry.args) else None


# --- what turns add


class _Additions:
    """The rows that a run of turns adds, whatever else it changes."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, str]] = []
        self._work: list[WorkerMessage] = []
        self._messages: list[OrchestratorMessage] = []

    def add(self, key: int, commit: TurnCommit) -> None:
        execution_id = commit.execution_id
        self._events += [
            (key, execution_id, record.event_id, record.data) for record in commit.history_delta
        ]
        self._work += commit.worker_items
        self._messages += commit.orchestrator_items

    def write(self, tx: Transaction) -> None:
        queries.INSERT_EVENT.execute(tx, self._events)
        worker_queue.insert_many(tx, self._work)
        orchestrator_queue.insert_all(tx, self._messages)


# --- first turns


def _may_be_plain_start(_start: OrchestratorMessage, commit: TurnCommit, *_: str) -> bool:
    return not (
        commit.settled_work
        or commit.kv_changes
        or commit.cancelled_activities
        or commit.cancelled_timers
    )


def _run_starts(tx: Transaction, starts: Sequence[Any]) -> list[bool]:
    """First turns of instances of which there is nothing yet."""
    ids = as_list([start.instance_id for start, *_ in starts])
    known = {row[0] for row in rows_at_once(tx, queries.KNOWN_OF, (ids,))}
    first_key = tx.row(queries.NEXT_INSTANCE_KEY)[0]
    instances: list[tuple[Any, ...]] = []
    executions: list[tuple[Any, ...]] = []
    locks: list[tuple[Any, ...]] = []
    additions = _Additions()
    for key, (start, commit, token, owner) in enumerate(starts, first_key):
        instance_id, routing = start.instance_id, start.start
        if instance_id in known:
            break
        known.add(instance_id)
        known.update(message.instance_id for message in commit.orchestrator_items)
        named = (routing.name, routing.version, routing.parent_instance_id, tx.now)
        execution = commits.next_execution(tx.now, None, commit)
        instance = commits.next_instance(tx.now, None, named, commit, execution, suspended=False)
        instances.append((key, instance_id, *instance))
        executions.append((key, commit.execution_id, *execution, tx.now))
        additions.add(key, commit)
        if commit.keep_lock_ms is not None:
            until = tx.now + commit.keep_lock_ms
            _, name, version, *_ = instance
            locks.append(
                commits.kept_lock_row(instance_id, key, name, version, until, token, owner)
            )
    queries.INSERT_INSTANCE.execute(tx, instances)
    queries.PUT_EXECUTION.execute(tx, executions)
    queries.INSERT_KEPT_LOCK.execute(tx, locks)
    additions.write(tx)
    tx.changed_instances += [row[1] for row in instances]
    return [True] * len(instances)


# --- turns under a kept lock


def _may_be_plain_ack(lock_token: object, commit: TurnCommit) -> bool:
    """Whether the turn goes on or ends, and changes nothing else than what it adds and uses up."""
    metadata = commit.metadata
    if commit.keep_lock_ms is None:
        fits = metadata.status is not None and metadata.status.is_final
    else:
        fits = commits.is_plain(commit)
    return (
        fits
        and commit.consumed is not None
        and metadata.name is None
        and metadata.framework_version is None
        and commit.custom_status is None
        and not (commit.kv_changes or commit.cancelled_activities or commit.cancelled_timers)
        and isinstance(lock_token, str)
        and is_text(lock_token)
    )


def _run_acks(tx: Transaction, acks: Sequence[tuple[str, TurnCommit]]) -> list[None]:
    consumed = [message_id for _, commit in acks for message_id in commit.consumed or ()]
    carried: dict[int, str] = dict(
        rows_at_once(tx, queries.CARRIED_OF, (as_list(consumed),)) if consumed else ()
    )
    settled = [token for _, commit in acks for token in commit.settled_work]
    held = worker_queue.find_held(tx, settled) if settled else {}
    tokens = [as_stored(token) for token, _ in acks]
    locks = {
        row[0]: _Lock(*row)
        for row in rows_at_once(
            tx, queries.PLAIN_LOCKS, (as_list(tokens), tx.now, len(consumed) + 1)
        )
    }
    turns_of_run = _Acks(tx.now, held, carried)
    for token, (_, commit) in zip(tokens, acks, strict=True):
        # A token that comes again is not plain: what its first turn did is not seen here.
        lock = locks.pop(token, None)
        if lock is None or not turns_of_run.take(lock, commit):
            break
    return [None] * turns_of_run.write(tx)


class _Lock(NamedTuple):
    """As ``queries.PLAIN_LOCKS``."""

    token: str
    instance_id: str
    key: int
    locked_until: int
    execution_id: int
    messages: int
    has_new_state: bool


class _Acks:
    """Gathers what a run of turns does, table by table."""

    def __init__(self, now: int, held: dict[str, tuple[int, str]], carried: dict[int, str]) -> None:
        self._now = now
        self._held = held
        self._carried = carried
        self._instances: list[str] = []
        self._settled: list[int] = []
        self._consumed: set[int] = set()
        self._kept: dict[int, list[_Lock]] = {}
        self._ended: dict[Status, list[_Lock]] = {}
        self._ends: list[tuple[Any, ...]] = []
        self._additions = _Additions()

    def take(self, lock: _Lock, commit: TurnCommit) -> bool:
        """Take in a turn; False, and nothing is taken, if it is not plain."""
        work = [self._held.pop(token, (0, "")) for token in commit.settled_work]
        consumed = set(commit.consumed or ())
        if (
            lock.execution_id != commit.execution_id
            or any(instance_id != lock.instance_id for _, instance_id in work)
            or any(self._carried.get(message_id) != lock.token for message_id in consumed)
        ):
            return False
        status = commit.metadata.status
        if commit.keep_lock_ms is not None:
            locked_until = self._now + commit.keep_lock_ms
            if locked_until < lock.locked_until:
                return False
            self._kept.setdefault(locked_until, []).append(lock)
        else:
            assert status is not None
            if lock.messages != len(consumed) or lock.has_new_state:
                return False
            self._ended.setdefault(status, []).append(lock)
            self._ends.append((lock.key, lock.execution_id, status, commit.metadata.output))
        self._instances.append(lock.instance_id)
        self._settled += [message_id for message_id, _ in work]
        self._consumed |= consumed
        self._additions.add(lock.key, commit)
        return True

    def write(self, tx: Transaction) -> int:
        """How many turns have been written."""
        tx.changed_instances += self._instances
        _change(tx, work_queries.DELETE_WORK_ITEMS, self._settled)
        _change(tx, queries.DELETE_MESSAGES, self._consumed)
        for locked_until, locks in self._kept.items():
            ids = [lock.instance_id for lock in locks]
            _change(tx, queries.EXTEND_KEPT_LOCKS, ids, locked_until, tx.now)
        for status, locks in self._ended.items():
            _change(tx, queries.END_INSTANCES, [lock.key for lock in locks], status, tx.now)
            _change(tx, queries.DELETE_LOCKS, [lock.instance_id for lock in locks])
        if queries.END_EXECUTIONS.execute(tx, self._ends, (tx.now,)) != len(self._ends):
            raise NotAsSeen
        self._additions.write(tx)
        return len(self._instances)


def _change(tx: Transaction, sql: str, keys: Sequence[Any] | set[int], *more: Any) -> None:
    """Change the rows of these keys, each of which must be there."""
    if keys and tx.change(sql, (as_list(keys), *more)) != len(keys):
        raise NotAsSeen


# --- starts for the queue


def _may_be_plain_enqueue(
    message: OrchestratorMessage, delay_ms: int | None, condition: EnqueueCondition | None
) -> bool:
    is_if_absent = condition is EnqueueCondition.ABSENT
    return is_if_absent and delay_ms is None and message.start is not None


def _run_enqueues(tx: Transaction, enqueues: Sequence[Any]) -> list[bool]:
    messages = [message for message, *_ in enqueues]
    return orchestrator_queue.enqueue_many(tx, messages, None, EnqueueCondition.ABSENT)


_KINDS: Final[dict[Callable[..., Any], _Kind]] = {
    commits.start_instance: _Kind(_may_be_plain_start, _run_starts),
    turns.ack: _Kind(_may_be_plain_ack, _run_acks),
    orchestrator_queue.enqueue: _Kind(_may_be_plain_enqueue, _run_enqueues),
}
