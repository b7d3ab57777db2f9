"""Activities that write to the store's own database: their rows and completion are one commit."""

import apsw
import pytest

from perdure import (
    OrchestrationFailed,
    Retry,
    Runtime,
    SqliteProvider,
    activity,
    orchestration,
    transaction,
)
from perdure.errors import UsageError

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
        assert await (await runtime.start(sell, "lamp")).result(10) == 1
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
            await (await runtime.start(flow)).result(10)
    tables = apsw.Connection(str(path)).execute("SELECT name FROM sqlite_master").fetchall()
    assert ("half",) not in tables


def _leaves():
    raise SystemExit(3)


def _interrupts():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda: transaction().close(), "must not close"),
        (lambda: transaction().close(True), "must not close"),
        (lambda: transaction().execute("COMMIT"), "neither commit nor roll back"),
        (lambda: transaction().execute("ROLLBACK"), "neither commit nor roll back"),
        (_leaves, "SystemExit"),
        (_interrupts, "KeyboardInterrupt"),
    ],
    ids=["close", "force", "commit", "rollback", "exit", "interrupt"],
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
            await (await runtime.start(flow)).result(10)
        assert await (await runtime.start(sell, "lamp")).result(10) == 1


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
            await (await runtime.start(flow)).result(10)
