"""The plain operations of one batch, written table by table instead of one after the other.

What is right is defined by the verbs one by one. Here is the same for runs of operations about
which nothing is special: they concern different instances, and a look beforehand has shown that
each will be accepted. The first operation of which that is not so ends the run.
"""

from __future__ import annotations

from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.providers.items import (
    Delivery,
    EnqueueCondition,
    FetchedOrchestration,
    OrchestrationItem,
)
from perdure.providers.sqlite import (
    commits,
    locks,
    orchestrator_queue,
    queries,
    turns,
    work_queries,
    worker_queue,
)
from perdure.providers.sqlite.many_rows import as_list, as_object, rows_at_once
from perdure.providers.sqlite.nothing import Nothing
from perdure.providers.sqlite.tokens import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from perdure.model.status import Status
    from perdure.providers.items import (
        OrchestrationFilter,
        OrchestratorMessage,
        TurnCommit,
        WorkerMessage,
    )
    from perdure.providers.sqlite.entries import Entry, Outcome
    from perdure.providers.sqlite.many_rows import ManyRows
    from perdure.providers.sqlite.transaction import Transaction

RUN_MIN = 2
"""Fewer plain operations than this are not worth a look."""
LOOKS_MAX: Final = 8
"""After so many runs that ended early, the rest of the operations is run one by one."""
_READY_MAX: Final = 1_000
"""So many instances are looked for at once."""


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

    def __init__(self, now: int, first_key: int) -> None:
        self._now = now
        self._keys = count(first_key)
        self._instances: list[tuple[Any, ...]] = []
        self._executions: list[tuple[Any, ...]] = []
        self._events: list[tuple[int, int, int, str]] = []
        self._work: list[WorkerMessage] = []
        self._messages: list[OrchestratorMessage] = []

    def begin(
        self, instance_id: str, named: tuple[Any, ...], commit: TurnCommit
    ) -> tuple[int, str, str | None]:
        """Add an instance, and what its first turn adds; its key, name and version."""
        key, now = next(self._keys), self._now
        execution = commits.next_execution(now, commits.NEW_EXECUTION, commit)
        instance = commits.next_instance(now, None, named, commit, execution, suspended=False)
        self._instances.append((key, instance_id, *instance))
        self._executions.append((key, commit.execution_id, *execution, now))
        self.add(key, commit)
        _, name, version, *_ = instance
        return key, name, version

    def add(self, key: int, commit: TurnCommit) -> None:
        execution_id = commit.execution_id
        self._events += [
            (key, execution_id, record.event_id, record.data) for record in commit.history_delta
        ]
        self._work += commit.worker_items
        self._messages += commit.orchestrator_items

    def write(self, tx: Transaction) -> None:
        """Comes last: whoever adds a message looks at the locks."""
        queries.INSERT_INSTANCE.execute(tx, self._instances)
        queries.PUT_EXECUTION.execute(tx, self._executions)
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
    additions = _Additions(tx.now, tx.row(queries.NEXT_INSTANCE_KEY)[0])
    begun: list[str] = []
    kept: list[tuple[Any, ...]] = []
    for start, commit, token, owner in starts:
        instance_id, routing = start.instance_id, start.start
        if instance_id in known:
            break
        known.add(instance_id)
        known.update(message.instance_id for message in commit.orchestrator_items)
        named = (routing.name, routing.version, routing.parent_instance_id, tx.now)
        key, name, version = additions.begin(instance_id, named, commit)
        begun.append(instance_id)
        if commit.keep_lock_ms is not None:
            until = tx.now + commit.keep_lock_ms
            kept.append(commits.kept_lock_row(instance_id, key, name, version, until, token, owner))
    queries.INSERT_KEPT_LOCK.execute(tx, kept)
    additions.write(tx)
    tx.changed_instances += begun
    return [True] * len(begun)


# --- turns under a lock


def _may_be_plain_ack(lock_token: object, commit: TurnCommit) -> bool:
    """Whether the turn is a first one, or goes on or ends without changing anything else."""
    metadata = commit.metadata
    if metadata.name is not None:
        fits = commit.execution_id == 1
    elif commit.keep_lock_ms is not None:
        fits = commits.is_plain(commit)
    else:
        fits = (
            metadata.status is not None
            and metadata.status.is_final
            and metadata.framework_version is None
            and commit.custom_status is None
        )
    return (
        fits
        and commit.consumed is not None
        and not (commit.kv_changes or commit.cancelled_activities or commit.cancelled_timers)
        and isinstance(lock_token, str)
        and is_text(lock_token)
    )


def _run_acks(tx: Transaction, acks: Sequence[tuple[str, TurnCommit]]) -> list[None]:
    consumed = [message_id for _, commit in acks for message_id in commit.consumed or ()]
    carried: dict[int, str] = dict(
        rows_at_once(tx, queries.CARRIED_OF, (as_list(consumed),)) if consumed else ()
    )
    tokens = [token for token, _ in acks]
    plain_locks = {
        row[0]: _Lock(*row)
        for row in rows_at_once(
            tx, queries.PLAIN_LOCKS, (as_list(tokens), tx.now, len(consumed) + 1)
        )
    }
    begins = any(commit.metadata.name is not None for _, commit in acks)
    first_key = tx.row(queries.NEXT_INSTANCE_KEY)[0] if begins else 0
    turns_of_run = _Acks(_Additions(tx.now, first_key), tx.now, carried)
    for token, (_, commit) in zip(tokens, acks, strict=True):
        # A token that comes again is not plain: what its first turn did is not seen here.
        lock = plain_locks.pop(token, None)
        if lock is None or not turns_of_run.take(lock, commit):
            break
    return [None] * turns_of_run.write(tx)


class _Lock(NamedTuple):
    """As ``queries.PLAIN_LOCKS``."""

    token: str
    instance_id: str
    key: int | None
    """None: its first turn is to come."""
    locked_until: int
    execution_id: int | None
    messages: int
    has_new_state: bool
    pending_since: int


class _Acks:
    """Gathers what a run of turns does, table by table."""

    def __init__(self, additions: _Additions, now: int, carried: dict[int, str]) -> None:
        self._additions = additions
        self._now = now
        self._carried = carried
        self._instances: list[str] = []
        self._settled: list[tuple[str, str]] = []
        self._consumed: set[int] = set()
        self._begun: list[tuple[Any, ...]] = []
        self._kept: dict[int, list[str]] = {}
        self._ended: dict[Status, list[int]] = {}
        self._ends: list[tuple[Any, ...]] = []
        self._released: list[str] = []

    def take(self, lock: _Lock, commit: TurnCommit) -> bool:
        """Take in a turn; False, and nothing is taken, if it is not plain."""
        consumed = set(commit.consumed or ())
        is_first, lease_ms = lock.key is None, commit.keep_lock_ms
        if (
            is_first != (commit.metadata.name is not None)
            or lock.execution_id not in {None, commit.execution_id}
            or any(self._carried.get(message_id) != lock.token for message_id in consumed)
            or ((is_first or lease_ms is None) and lock.messages != len(consumed))
            or (lease_ms is None and lock.has_new_state)
            or (lease_ms is not None and self._now + lease_ms < lock.locked_until)
        ):
            return False
        if lock.key is None:
            self._begin(lock, commit)
        else:
            self._go_on(lock, lock.key, commit)
        if lease_ms is None:
            self._released.append(lock.instance_id)
        self._instances.append(lock.instance_id)
        instance_id = lock.instance_id
        self._settled += [(token, instance_id) for token in commit.settled_work]
        self._consumed |= consumed
        return True

    def _begin(self, lock: _Lock, commit: TurnCommit) -> None:
        # The turn itself says what it is; only the time comes from the start.
        named = (None, None, None, lock.pending_since)
        row = self._additions.begin(lock.instance_id, named, commit)
        if commit.keep_lock_ms is not None:
            self._begun.append((lock.instance_id, *row, self._now + commit.keep_lock_ms))

    def _go_on(self, lock: _Lock, key: int, commit: TurnCommit) -> None:
        self._additions.add(key, commit)
        if commit.keep_lock_ms is not None:
            until = self._now + commit.keep_lock_ms
            self._kept.setdefault(until, []).append(lock.instance_id)
        else:
            status = commit.metadata.status
            assert status is not None
            self._ended.setdefault(status, []).append(key)
            self._ends.append((key, commit.execution_id, status, commit.metadata.output))

    def write(self, tx: Transaction) -> int:
        """How many turns have been written."""
        tx.changed_instances += self._instances
        self._settle(tx)
        _change(tx, queries.DELETE_MESSAGES, self._consumed)
        for locked_until, ids in self._kept.items():
            _change(tx, queries.EXTEND_KEPT_LOCKS, ids, locked_until, tx.now)
        for status, keys in self._ended.items():
            _change(tx, queries.END_INSTANCES, keys, status, tx.now)
        _change_rows(tx, queries.END_EXECUTIONS, self._ends, tx.now)
        _change_rows(tx, queries.KEEP_LOCKS, self._begun)
        _change(tx, queries.DELETE_LOCKS, self._released)
        self._additions.write(tx)
        return len(self._instances)

    def _settle(self, tx: Transaction) -> None:
        """Remove the work of these turns; that a lock on it is lost is too rare for a look."""
        given = (as_object(dict(self._settled)), tx.now)
        if self._settled and tx.change(work_queries.SETTLE_WORK_ITEMS, given) != len(self._settled):
            raise NotAsSeen


def _change(tx: Transaction, sql: str, keys: Sequence[Any] | set[int], *more: Any) -> None:
    """Change the rows of these keys, each of which must be there."""
    if keys and tx.change(sql, (as_list(keys), *more)) != len(keys):
        raise NotAsSeen


def _change_rows(tx: Transaction, rows: ManyRows, values: Sequence[Any], *more: Any) -> None:
    """As ``_change``, with values for each of the rows."""
    if rows.execute(tx, values, more) != len(values):
        raise NotAsSeen


# --- fetching


class _Ready(NamedTuple):
    """As ``queries.READY``."""

    instance_id: str
    key: int | None
    name: str | None
    version: str | None
    due_at: int
    message_id: int
    framework_version: str | None
    parent_instance_id: str | None
    attempts: int
    body: str | None
    """None: it is more than a start."""


def _may_be_plain_fetch(*_: object) -> bool:
    return True


def _run_fetches(
    tx: Transaction, fetches: Sequence[tuple[int, OrchestrationFilter | None, str | None]]
) -> Sequence[FetchedOrchestration | Nothing]:
    """For as many as want the same; not while a kept lock could be continued."""
    lock_timeout_ms, wanted, owner = fetches[0]
    alike = sum(1 for _ in takewhile(fetches[0].__eq__, fetches))
    limit = min(alike, _READY_MAX)
    locks.wake(tx)
    if owner is not None and tx.row(queries.FIND_KEPT, (tx.now, owner)) is not None:
        return []
    ready = [_Ready(*row) for row in rows_at_once(tx, queries.READY, (tx.now, limit))]
    ready.sort(key=lambda each: each[4:6])
    fitting = [each for each in ready if wanted is None or turns.fits(tx, each[:7], wanted)]
    starts = [each for each in fitting if each.body is not None]
    taken = iter(_take_starts(tx, starts, lock_timeout_ms, owner))
    answers: list[FetchedOrchestration | Nothing] = [
        _take_one(tx, each, lock_timeout_ms, owner) if each.body is None else next(taken)
        for each in fitting
    ]
    if len(ready) == limit:
        return answers
    return answers + [Nothing(locks.next_due(tx, owner))] * (alike - len(answers))


def _take_one(
    tx: Transaction, ready: _Ready, lock_timeout_ms: int, owner: str | None
) -> FetchedOrchestration:
    fetched = turns.lock_batch(tx, ready.instance_id, ready.key, lock_timeout_ms, owner)
    if fetched is None:
        raise NotAsSeen
    return fetched


def _take_starts(
    tx: Transaction, starts: Sequence[_Ready], lock_timeout_ms: int, owner: str | None
) -> list[FetchedOrchestration]:
    tokens = tx.new_lock_tokens(len(starts))
    until = tx.now + lock_timeout_ms
    taken = list(zip(starts, tokens, strict=True))
    _change_rows(tx, queries.TAG_MESSAGES, [(start.message_id, token) for start, token in taken])
    _change_rows(
        tx,
        queries.TAKE_LOCKS,
        [(start.instance_id, token) for start, token in taken],
        until,
        until,
        owner,
        tx.now,
    )
    return [_fetched(start, token) for start, token in taken]


def _fetched(start: _Ready, token: str) -> FetchedOrchestration:
    assert start.name is not None
    assert start.body is not None
    delivery = Delivery(message_id=start.message_id, body=start.body, attempt_count=start.attempts)
    item = OrchestrationItem(
        instance_id=start.instance_id,
        name=start.name,
        version=start.version,
        execution_id=1,
        history=(),
        messages=(delivery,),
        kv_snapshot={},
        parent_instance_id=start.parent_instance_id,
    )
    return FetchedOrchestration(item=item, lock_token=token, attempt_count=start.attempts)


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
    turns.fetch: _Kind(_may_be_plain_fetch, _run_fetches),
    turns.ack: _Kind(_may_be_plain_ack, _run_acks),
    orchestrator_queue.enqueue: _Kind(_may_be_plain_enqueue, _run_enqueues),
}
