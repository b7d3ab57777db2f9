"""Activities that write to the store's own database: their rows and completion are one commit."""

import asyncio

import apsw
import pytest

from patience import HANG_SECONDS
from perdure import (
    ActivityFailed,
    OrchestrationFailed,
    Retry,
    Runtime,
    SqliteProvider,
    activity,
    orchestration,
    transaction,
)
from perdure.errors import StoreBusy, UsageError

failures: list[int] = []


@activity(transactional=True, retry=Retry(max_attempts=3, first_delay=0))
def record_sale(article: str, cents: int) -> int:
    connection = transaction()
    connection.execute("CREATE TABLE IF NOT EXISTS sales (article TEXT, cents INTEGER)")
    connection.execute("INSERT INTO sales VALUES (?, ?)", (article, cents))
    if len(failures) < 2:
        failures.append(1)
        raise ConnectionError("after the insert")
    (count,) = connection.execute("SELECT count(*) FROM sales").fetchone()
    return count


@orchestration
async def sell(article: str) -> int:
    return await record_sale(article, 100)


async def test_rows_and_completion_are_committed_together(tmp_path):
    failures.clear()
    path = tmp_path / "s.db"
    async with Runtime(SqliteProvider(path), [sell, record_sale]) as runtime:
        assert await (await runtime.start(sell, "lamp")).result(HANG_SECONDS) == 1
    rows = apsw.Connection(str(path)).execute("SELECT * FROM sales").fetchall()
    assert rows == [("lamp", 100)]


async def test_a_failed_transaction_leaves_nothing(tmp_path):
    @activity(transactional=True)
    def half() -> None:
        transaction().execute("CREATE TABLE half (x)")
        raise ValueError("no")

    @orchestration
    async def flow() -> None:
        await half()

    path = tmp_path / "s.db"
    async with Runtime(SqliteProvider(path), [flow, half]) as runtime:
        with pytest.raises(OrchestrationFailed, match="no"):
            await (await runtime.start(flow)).result(HANG_SECONDS)
    tables = apsw.Connection(str(path)).execute("SELECT name FROM sqlite_master").fetchall()
    assert ("half",) not in tables


def _leaves():
    raise SystemExit(3)


def _interrupts():
    raise KeyboardInterrupt


def _cancels():
    raise asyncio.CancelledError("by itself")


def _meets_another_full_file():
    connection = apsw.Connection(":memory:")
    connection.execute("PRAGMA max_page_count = 1")
    connection.execute("CREATE TABLE big (x)")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda: transaction().close(), r"must not call close\(\)"),
        (lambda: transaction().close(True), r"must not call close\(\)"),
        (lambda: transaction().set_progress_handler(lambda: True, 1), "set_progress_handler"),
        (lambda: transaction().setwalhook(None), "setwalhook"),
        (lambda: transaction().execute("COMMIT"), "neither commit nor roll back"),
        (lambda: transaction().execute("ROLLBACK"), "neither commit nor roll back"),
        (_leaves, "SystemExit"),
        (_interrupts, "KeyboardInterrupt"),
        (_cancels, "CancelledError"),
        (_meets_another_full_file, "FullError"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_a_transactional_activity_cannot_harm_the_store(tmp_path, harm, said):
    failures[:] = [1, 1]

    @activity(transactional=True)
    def harmful() -> None:
        harm()

    @orchestration
    async def flow() -> None:
        await harmful()

    handlers = [flow, harmful, sell, record_sale]
    async with Runtime(SqliteProvider(tmp_path / "s.db"), handlers) as runtime:
        with pytest.raises(OrchestrationFailed, match=said):
            await (await runtime.start(flow)).result(HANG_SECONDS)
        assert await (await runtime.start(sell, "lamp")).result(HANG_SECONDS) == 1


def _reads_dictionaries(connection):
    connection.row_trace = lambda cursor, row: dict(zip(cursor.description, row, strict=True))


def _denies_removing(connection):
    connection.authorizer = lambda operation, *_: (
        apsw.SQLITE_DENY if operation == apsw.SQLITE_DELETE else apsw.SQLITE_OK
    )


def _has_cursors_of_its_own(connection):
    connection.cursor_factory = lambda _: None


def _traces(connection):
    connection.set_exec_trace(lambda *_: False)


@pytest.mark.parametrize(
    "change", [_reads_dictionaries, _denies_removing, _has_cursors_of_its_own, _traces]
)
async def test_what_it_sets_on_the_connection_ends_with_it(tmp_path, change):
    failures[:] = [1, 1]

    @activity(transactional=True)
    def changes() -> None:
        change(transaction())

    @orchestration
    async def flow() -> None:
        await changes()

    handlers = [flow, changes, sell, record_sale]
    async with Runtime(SqliteProvider(tmp_path / "s.db"), handlers) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) is None
        assert await (await runtime.start(sell, "lamp")).result(HANG_SECONDS) == 1


async def test_an_error_of_its_own_sql_is_recorded_as_it_is(tmp_path):
    @activity(transactional=True)
    def twice() -> None:
        transaction().execute("CREATE TABLE once (x UNIQUE)")
        transaction().execute("INSERT INTO once VALUES (1), (1)")

    @orchestration
    async def flow() -> list[str]:
        try:
            await twice()
        except ActivityFailed as error:
            return [str(error.type_name), *error.lineage]
        return []

    async with Runtime(SqliteProvider(tmp_path / "s.db"), [flow, twice]) as runtime:
        names = await (await runtime.start(flow)).result(HANG_SECONDS)

    assert names[0].endswith("ConstraintError")
    assert any(name.endswith("Error") for name in names[1:])


async def test_a_full_store_fails_no_transaction(tmp_path):
    calls = []

    @activity(transactional=True)
    def fills() -> int:
        calls.append(1)
        connection = transaction()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        room = 1 if len(calls) == 1 else 1_000_000
        connection.execute(f"PRAGMA max_page_count = {pages + room}")
        connection.execute("CREATE TABLE big (x)")
        connection.execute("INSERT INTO big VALUES (zeroblob(100_000))")
        return len(calls)

    @orchestration
    async def flow() -> int:
        return await fills()

    async with Runtime(SqliteProvider(tmp_path / "s.db"), [flow, fills]) as runtime:
        assert await (await runtime.start(flow)).result(HANG_SECONDS) == 2


async def test_a_store_that_is_out_fails_no_transaction(tmp_path):
    refused = []

    class Busy(SqliteProvider):
        def settle_in_transaction(self, lock_token, settle):
            if not refused:
                refused.append(lock_token)
                raise StoreBusy("settle_in_transaction", "another process holds the database")
            return super().settle_in_transaction(lock_token, settle)

    failures[:] = [1, 1]
    async with Runtime(Busy(tmp_path / "s.db"), [sell, record_sale]) as runtime:
        assert await (await runtime.start(sell, "lamp")).result(HANG_SECONDS) == 1

    assert refused


async def test_an_error_of_a_store_that_the_code_raises_is_its_own(tmp_path):
    @activity(transactional=True)
    def asks() -> None:
        raise StoreBusy("fetch", "some other store")

    @orchestration
    async def flow() -> None:
        await asks()

    async with Runtime(SqliteProvider(tmp_path / "s.db"), [flow, asks]) as runtime:
        with pytest.raises(OrchestrationFailed, match="some other store"):
            await (await runtime.start(flow)).result(HANG_SECONDS)


async def test_a_store_without_transactions_says_so_at_once():
    with pytest.raises(UsageError, match="SQLite can"):
        Runtime("memory:", [sell, record_sale])


async def test_a_plain_activity_has_no_transaction(tmp_path):
    @activity
    def plain() -> None:
        transaction()

    @orchestration
    async def flow() -> None:
        await plain()

    async with Runtime(SqliteProvider(tmp_path / "s.db"), [flow, plain]) as runtime:
        with pytest.raises(OrchestrationFailed, match="transactional=True"):
            await (await runtime.start(flow)).result(HANG_SECONDS)
