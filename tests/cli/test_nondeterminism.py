"""What ``perdure worker`` warns of: calls that give another value when an instance is replayed."""

import random
import time
import uuid
from datetime import datetime
from uuid import uuid4 as fresh_id

import perdure
from perdure import orchestration, side_effect
from perdure.authoring.definitions import Registry
from perdure.cli.modules import warnings_of


@orchestration
async def careless() -> list[object]:
    def nested() -> float:
        return time.time()

    return [random.choice([1, 2]), datetime.now(), fresh_id(), nested()]  # noqa: DTZ005


@orchestration
async def careful() -> list[object]:
    recorded = side_effect(lambda: uuid.uuid4().hex)
    return [perdure.random(), perdure.now(), perdure.uuid4(), recorded, random.Random(7)]


def test_clocks_and_random_numbers_are_named_with_line_and_cure():
    first, *rest = sorted(warnings_of(Registry([careless, careful])))

    assert first == (
        "orchestration 'careless' calls datetime.now() at test_nondeterminism.py:20, which gives "
        "another value when it is replayed; use perdure's now()"
    )
    assert [text.split()[3] for text in rest] == ["fresh_id()", "random.choice()", "time.time()"]


def test_a_handler_without_source_is_left_alone():
    namespace = {}
    exec("async def made() -> None: ...", namespace)

    assert not list(warnings_of(Registry([orchestration(namespace["made"])])))


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
