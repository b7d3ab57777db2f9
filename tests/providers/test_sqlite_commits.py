"""Group commit: what shares a transaction, what fails alone, and what a caller may rely on."""

from __future__ import annotations

import asyncio
import threading

import apsw
import pytest

from commit_points import ObservedProvider
from integration.conditions import until
from patience import HANG_SECONDS
from perdure.conformance.factories import (
    LOCK_MS,
    activity,
    completion,
    event,
    raised,
    start,
    started,
)
from perdure.errors import DuplicateEvent, InternalError, LockLost, NotFound, UsageError
from perdure.providers.records import EnqueueCondition, ExecutionMetadata, TurnCommit
from perdure.providers.sqlite import SqliteProvider
from perdure.providers.sqlite.transaction import Verb
from perdure.providers.sqlite.writer import BATCH_OPERATIONS_MAX

NAMED = ExecutionMetadata(name="TestOrch", version="1.0.0")


class Counted(ObservedProvider):
    """Notes the points that its commits reach."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.points = []

    def reached(self, point):
        self.points.append(point)

    @property
    def commits(self):
        return self.points.count("after commit")


def run(path, function, **options):
    async def main():
        async with Counted(path, **options) as provider:
            return await function(provider)

    return asyncio.run(main())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


async def outcomes(*calls):
    return await asyncio.gather(*calls, return_exceptions=True)


def test_operations_that_arrive_together_share_commits(path):
    async def enqueue_many_at_once(provider):
        await asyncio.gather(
            *(provider.enqueue_for_orchestrator(start(f"i-{number}")) for number in range(500))
        )
        return provider.commits

    assert run(path, enqueue_many_at_once) < 50


def test_thousands_that_arrive_together_are_answered_part_by_part(path):
    async def scenario(provider):
        messages = [raised(f"i-{n}", "e") for n in range(4 * BATCH_OPERATIONS_MAX)]
        provider.points.clear()
        sent = [asyncio.ensure_future(provider.enqueue_for_orchestrator(each)) for each in messages]
        await sent[0]

        assert not all(each.done() for each in sent)
        await asyncio.gather(*sent)
        assert provider.commits >= 2

    run(path, scenario)


def test_an_operation_that_fails_does_not_harm_those_beside_it(path):
    async def mix(provider):
        await provider.enqueue_for_orchestrator(start("x"))
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
        first = TurnCommit(
            execution_id=1,
            history_delta=(started("x"),),
            metadata=NAMED,
            keep_lock_ms=LOCK_MS,
        )
        await provider.ack_orchestration_item(fetched.lock_token, first)
        again = TurnCommit(
            execution_id=1,
            history_delta=(event("x", 2), started("x")),
            worker_items=(activity("x"),),
        )
        found = await outcomes(
            provider.enqueue_for_orchestrator(start("a")),
            provider.ack_orchestration_item("unknown token", first),
            provider.ack_orchestration_item(fetched.lock_token, again),
            provider.enqueue_for_orchestrator(raised("y"), None, EnqueueCondition.ALIVE),
            provider.enqueue_for_orchestrator(start("b")),
        )
        history = await provider.read("x")
        page = await provider.admin.list_instances()
        return found, history, sorted(info.instance_id for info in page.instances)

    found, history, instances = run(path, mix)

    assert [type(each) for each in found] == [bool, LockLost, DuplicateEvent, NotFound, bool]
    assert [record.event_id for record in history] == [1]
    assert instances == ["a", "b", "x"]


def test_a_bug_in_one_operation_does_not_stop_the_writer(path):
    def broken(tx):
        tx.execute("DELETE FROM instance_locks")
        raise ZeroDivisionError

    async def mix(provider):
        await provider.enqueue_for_orchestrator(start("kept"))
        found = await outcomes(
            provider.enqueue_for_orchestrator(start("a")),
            provider._store.write(Verb("broken", broken)),
            provider.enqueue_for_orchestrator(start("b")),
        )
        return found, (await provider.admin.get_system_metrics()).total_instances

    found, instances = run(path, mix)

    assert [type(each) for each in found] == [bool, InternalError, bool]
    assert "ZeroDivisionError" in str(found[1])
    assert instances == 3


def test_an_answer_comes_after_its_commit(path):
    seen = []

    class Watchful(ObservedProvider):
        def reached(self, point):
            seen.append((point, [call.done() for call in calls]))

    calls = []

    async def enqueue():
        async with Watchful(path) as provider:
            calls.append(provider.enqueue_for_orchestrator(start("one")))
            await calls[0]

    asyncio.run(enqueue())

    assert seen[:3] == [("begun", [False]), ("before commit", [False]), ("after commit", [False])]


def test_a_fetch_that_finds_nothing_writes_nothing(path):
    async def fetch(provider):
        await provider.enqueue_for_orchestrator(start("later"), 60_000)
        wal = path.with_name("store.db-wal")
        before = wal.stat().st_mtime_ns, wal.stat().st_size
        for _ in range(20):
            assert await provider.fetch_orchestration_item(LOCK_MS, 0) is None
            assert await provider.fetch_work_item(LOCK_MS, 0) is None
        return before == (wal.stat().st_mtime_ns, wal.stat().st_size)

    assert run(path, fetch)


def test_a_cancelled_fetch_leaves_no_lock(path):
    async def cancel(provider):
        await provider.enqueue_for_orchestrator(start("x"))
        await provider.enqueue_for_worker(activity("x"))
        for fetch in (provider.fetch_orchestration_item, provider.fetch_work_item):
            fetching = asyncio.ensure_future(fetch(LOCK_MS, 0))
            await asyncio.sleep(0)  # it has been accepted
            fetching.cancel()
            # Behind the cancelled one in the same queue, so that it has been answered by now.
            await provider.cleanup_orphaned_sessions()
        turn = await provider.fetch_orchestration_item(LOCK_MS, 1_000)
        work = await provider.fetch_work_item(LOCK_MS, 1_000)
        return turn.attempt_count, work.attempt_count

    assert run(path, cancel) == (1, 1)


def test_a_cancelled_fetch_gives_late_messages_back_to_a_kept_lock(path):
    async def cancel(provider):
        first = TurnCommit(
            execution_id=1, history_delta=(started("x"),), metadata=NAMED, keep_lock_ms=LOCK_MS
        )
        await provider.start_orchestration_item(start("x"), first, "token", "me")
        await provider.enqueue_for_orchestrator(raised("x"))
        provider.fetch_orchestration_item(LOCK_MS, 0, None, "me").cancel()
        await provider.cleanup_orphaned_sessions()
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 1_000, None, "me")
        await provider.renew_orchestration_item_lock("token", LOCK_MS)
        return fetched.continues, fetched.lock_token, fetched.attempt_count

    assert run(path, cancel) == (True, "token", 1)


def test_closing_finishes_what_was_accepted_and_wakes_who_waits(path):
    async def close(provider):
        waiting = asyncio.ensure_future(provider.fetch_work_item(LOCK_MS, 60_000))
        await until(lambda: provider._store.signals.work.has_waiters)
        accepted = [provider.enqueue_for_orchestrator(start(f"i-{each}")) for each in range(100)]
        await provider.close()
        return await waiting, await asyncio.gather(*accepted)

    waited, accepted = run(path, close)

    assert waited is None
    assert accepted == [True] * 100


def test_another_loop_in_another_thread_gets_its_answers(path):
    async def renew_elsewhere(provider):
        await provider.enqueue_for_orchestrator(start("x"))
        fetched = await provider.fetch_orchestration_item(LOCK_MS, 0)
        answers = []

        async def renew():
            answers.append(
                await provider.renew_orchestration_item_locks([fetched.lock_token, "no"], 1)
            )

        thread = threading.Thread(target=lambda: asyncio.run(renew()))
        thread.start()
        # This loop is blocked until the other one has its answer.
        thread.join(HANG_SECONDS)
        return answers

    assert run(path, renew_elsewhere) == [frozenset({"no"})]


# --- transactional activities


async def with_table(provider):
    await provider._store.write(
        Verb(
            "create",
            lambda tx: tx.execute("CREATE TABLE receipts (id TEXT PRIMARY KEY)") and None,
        )
    )
    await provider.enqueue_for_worker(activity("x"))
    return (await provider.fetch_work_item(LOCK_MS, 0)).lock_token


async def receipts(provider):
    return await provider._store.write(
        Verb("count", lambda tx: tx.row("SELECT count(*) FROM receipts", ())[0])
    )


def test_rows_and_completion_of_an_activity_are_committed_together(path):
    def charge(connection):
        connection.execute("INSERT INTO receipts VALUES ('r-1')")
        return completion("x")

    async def settle(provider):
        token = await with_table(provider)
        await provider.settle_in_transaction(token, charge)
        with pytest.raises(LockLost):
            await provider.settle_in_transaction(token, charge)
        messages = await provider.admin.list_messages("x")
        return await receipts(provider), len(messages)

    assert run(path, settle) == (1, 1)


def test_an_activity_that_raises_leaves_no_rows(path):
    def charge(connection):
        connection.execute("INSERT INTO receipts VALUES ('r-1')")
        raise ValueError("declined")

    async def settle(provider):
        token = await with_table(provider)
        found = await outcomes(
            provider.enqueue_for_orchestrator(start("before")),
            provider.settle_in_transaction(token, charge),
            provider.enqueue_for_orchestrator(start("after")),
        )
        await provider.renew_work_item_lock(token, LOCK_MS)
        return found, await receipts(provider)

    found, rows = run(path, settle)

    assert isinstance(found[1], ValueError)
    assert (found[0], found[2], rows) == (True, True, 0)


@pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK"])
def test_an_activity_must_not_end_the_transaction(path, sql):
    def charge(connection):
        connection.execute("INSERT INTO receipts VALUES ('r-1')")
        connection.execute(sql)
        return completion("x")

    async def settle(provider):
        token = await with_table(provider)
        with pytest.raises(UsageError, match="neither commit nor roll back"):
            await provider.settle_in_transaction(token, charge)
        await provider.enqueue_for_orchestrator(start("goes on"))
        return len(await provider.admin.list_messages("x"))

    assert run(path, settle) == 0


def test_all_statements_of_a_read_see_one_state_of_the_store(tmp_path):
    path = tmp_path / "store.db"

    def look_twice(snapshot):
        first = snapshot.row("SELECT created_at FROM store_info")
        other = apsw.Connection(str(path))
        other.execute("UPDATE store_info SET created_at = created_at + 1")
        other.close()
        return first, snapshot.row("SELECT created_at FROM store_info")

    async def scenario():
        async with SqliteProvider(path) as provider:
            return await provider._store.read(Verb("look_twice", look_twice))

    first, second = asyncio.run(scenario())
    assert first == second
