"""``db copy --move`` that is cut off in the middle: what is said meanwhile, and the repetition."""

import asyncio
import signal
import sqlite3
from contextlib import closing, contextmanager

import pytest

from cli import flows
from cli.conftest import Cli
from integration.conditions import until
from patience import HANG_SECONDS
from perdure import Client

TOTAL = 1500


async def fill(store):
    async with Client(store) as client:
        starts = [(f"a-{number}", (number,)) for number in range(TOTAL)]
        await client.start_many(flows.approval, starts)


def count(connection):
    """Each instance waits for its first turn."""
    return connection.execute("SELECT count(*) FROM orchestrator_queue").fetchone()[0]


@contextmanager
def in_the_middle(path):
    """Waits until a part is there, and holds the target's lock so that it stays a part."""

    async def has_begun():
        return count(target) > 0

    with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as target:
        asyncio.run(until(has_begun))
        target.execute("BEGIN IMMEDIATE")
        assert 0 < count(target) < TOTAL
        yield
        target.execute("ROLLBACK")


@pytest.fixture
def cut_off(cli, start_process, tmp_path):
    """A source, a target with a part, and what the command said when it was cut off."""
    asyncio.run(fill(cli.store))
    Cli("other.db")("db", "migrate")

    def cut(number):
        process = start_process("db", "copy", cli.store, "other.db", "--move")
        with in_the_middle(tmp_path / "other.db"):
            process.send_signal(number)
        said = process.communicate(timeout=HANG_SECONDS)[0]
        return process.returncode, said

    return cut


def assert_the_same_command_ends_it(cli):
    there = int(Cli("other.db")("count").out)
    assert 0 < there < TOTAL

    report = cli("db", "copy", cli.store, "other.db", "--move", "-o", "json").json

    assert (report["instances"], report["already_there"]) == (TOTAL, there)
    assert Cli("other.db")("count").out == f"{TOTAL}\n"
    assert "was moved to" in cli("count", code=6).err


def test_an_interrupted_move_leaves_the_source_as_it_was_and_goes_on_when_repeated(cli, cut_off):
    code, said = cut_off(signal.SIGINT)

    assert (code, said.count("\n")) == (130, 1)
    assert "holds only a part" in said
    assert cli("count").out == f"{TOTAL}\n"
    assert_the_same_command_ends_it(cli)


def test_a_killed_move_says_to_repeat_it_and_goes_on_when_repeated(cli, cut_off):
    assert cut_off(signal.SIGKILL)[0] == -signal.SIGKILL

    for args in (["count"], ["db", "copy", cli.store, "another.db"]):
        refused = cli(*args, code=6).err
        assert "repeat 'perdure db copy --move'" in refused
        assert "use that" not in refused
    assert "other.db" in cli("db", "copy", cli.store, "another.db", "--move", code=6).err
    assert_the_same_command_ends_it(cli)
