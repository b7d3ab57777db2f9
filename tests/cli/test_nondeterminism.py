"""Mistakes found by reading the source: calls that give another value on replay, no await."""

import asyncio
import os
import random
import time
import uuid
from datetime import datetime
from uuid import uuid4 as fresh_id

import pytest
from click.testing import CliRunner

import perdure
from perdure import Runtime, activity, orchestration, side_effect
from perdure.authoring.definitions import Registry
from perdure.authoring.lint import findings_in
from perdure.cli.commands import workers as worker
from perdure.cli.main import root
from perdure.errors import ForbiddenInOrchestration
from perdure.testing import Environment


@orchestration
async def careless() -> list[object]:
    def nested() -> float:
        return time.time()

    return [random.choice([1, 2]), datetime.now(), fresh_id(), nested()]  # noqa: DTZ005


@activity
async def charge(cents: int) -> None: ...


def helper() -> str:
    return os.environ["HOME"]


@orchestration
async def forgetful() -> str:
    charge(1)
    charge.options(tag="x")(2)
    for cents in set(map(int, "34")):
        await charge(cents)
    await asyncio.gather(*(charge(each) for each in sorted({5, 6})))
    return helper()


@orchestration
async def careful() -> list[object]:
    recorded = side_effect(lambda: uuid.uuid4().hex)
    return [perdure.random(), perdure.now(), perdure.uuid4(), recorded, random.Random(7)]


def test_clocks_and_random_numbers_are_named_with_line_and_cure():
    first, *rest = sorted(map(str, findings_in(Registry([careless, careful]))))

    assert first == (
        "orchestration 'careless' calls datetime.now() at test_nondeterminism.py:29, which gives "
        "another value when it is replayed; use perdure's now()"
    )
    assert [text.split()[3] for text in rest] == ["fresh_id()", "random.choice()", "time.time()"]


def test_steps_without_await_sets_and_the_environment_are_named():
    found = list(findings_in(Registry([forgetful, charge])))

    first = forgetful.fn.__code__.co_firstlineno
    assert [each.line - first for each in found[:3]] == [2, 3, 4]
    assert "calls charge() at test_nondeterminism.py:" in str(found[0])
    assert "without await: its result and its errors are lost" in str(found[0])
    assert "in the order of a set" in str(found[2])
    assert "reads os.environ at test_nondeterminism.py:" in str(found[3])
    assert len(found) == 4


class Notes:
    names: set[str]


def ping(depth: int) -> object:
    return pong(depth - 1) if depth else os.environ


def pong(depth: int) -> object:
    return ping(depth - 1)


@orchestration
async def odd() -> None:
    notes = Notes()
    notes.names = {"a", "b"}
    first, second = set("ab")
    for name in set("ab"):
        await asyncio.sleep(len(name))
    ping(len(first + second))


def test_odd_code_is_read_to_its_end_and_each_line_is_named_once():
    found = list(findings_in(Registry([odd])))

    assert [each.text.split()[0] for each in found] == ["takes", "reads"]


@orchestration
async def orderly() -> int:
    total, names = 0, ["a", "b"]
    for number in set(map(int, "12")):
        total += number
    doubled = [2 * number for number in set(map(int, "12"))]
    for name in names:
        await asyncio.sleep(len(name))
    return total + sum(doubled)


def test_a_set_without_steps_and_steps_without_a_set_are_left_alone():
    assert not list(findings_in(Registry([orderly])))


def test_a_handler_without_source_is_left_alone():
    namespace = {}
    exec("async def made() -> None: ...", namespace)

    assert not list(findings_in(Registry([orchestration(namespace["made"])])))


@orchestration
async def allowed() -> float:
    return time.time()  # perdure: allow


@orchestration
async def independent(n: int) -> None: ...


@orchestration
async def starts_a_child_that_outlives_it() -> None:
    independent.options(on_parent_close="abandon")(1)


def test_a_line_with_the_comment_is_left_out():
    assert not list(findings_in(Registry([allowed, starts_a_child_that_outlives_it])))


def test_a_runtime_warns_of_each_line(caplog):
    Runtime("memory:", [careless, careful])

    assert len(caplog.messages) == 4
    assert all("test_nondeterminism.py:" in message for message in caplog.messages)


@pytest.mark.parametrize("handler", [careless, forgetful])
def test_a_test_environment_refuses_them_with_the_line(handler):
    with pytest.raises(ForbiddenInOrchestration) as refused:
        Environment([handler, charge])

    assert "test_nondeterminism.py:" in str(refused.value)
    assert "# perdure: allow" in str(refused.value)
    Environment([allowed])


def test_dev_replays_every_turn(monkeypatch):
    started = []
    monkeypatch.setattr(worker, "_supervise", lambda arguments, _: started.append(arguments))
    CliRunner().invoke(root, ["dev", "flows.py", "--store", "memory:"], catch_exceptions=False)

    assert "--always-replay" in started[0]
    assert worker._options(
        tags=(), only_tags=False, drain_ms=None, lock_ms=None, always_replay=True
    ).always_replay


def test_a_worker_says_it_when_it_starts(sqlite_cli, tmp_path, caplog):
    (tmp_path / "by_the_clock.py").write_text(
        "import time\n"
        "from perdure import orchestration\n"
        "@orchestration\n"
        "async def flow() -> float:\n"
        "    return time.time()\n"
    )

    sqlite_cli("worker", "by_the_clock.py", "--store", "nowhere/x.db", code=1)

    (said,) = caplog.messages
    assert said.startswith("orchestration 'flow' calls time.time() at by_the_clock.py:5")
