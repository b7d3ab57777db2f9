"""Mistakes of newcomers: each program gets an answer that names its line and the way out.

A row is a program and the words that it must print. ``{line}`` stands for the line of the program
that ends in ``# here``. The program runs as its author would run it: ``python shop.py``.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from textwrap import dedent

import pytest

from patience import HANG_SECONDS


@dataclass(frozen=True, kw_only=True)
class Mistake:
    title: str
    program: str
    """The handlers and ``async def main(runtime)``."""
    words: tuple[str, ...]
    silent: tuple[str, ...] = ()
    """Words that must not be printed."""


HEAD = """\
import asyncio
from dataclasses import dataclass
from perdure import *
from perdure import errors, state

class CardDeclined(Exception):
    pass

@activity
async def charge(cents: int) -> str:
    return f"paid {cents}"

"""
TAIL = """

async def run():
    handlers = [each for each in globals().values() if isinstance(each, (Activity, Orchestration))]
    async with Runtime("memory:", handlers) as runtime:
        await main(runtime)

if __name__ == "__main__":
    asyncio.run(run())
"""

MISTAKES = [
    Mistake(
        title="an activity raises and no code catches it",
        program="""
            @activity
            async def buy(cents: int) -> str:
                raise CardDeclined("no money")  # here

            @orchestration
            async def flow() -> str:
                return await buy(3)

            async def main(runtime):
                await (await runtime.start(flow, id="o-1")).result()
        """,
        words=(
            "activity 'buy' of instance 'o-1' failed at ",
            "shop.py:{line}, attempt 1: CardDeclined: no money",
            "orchestration 'flow', instance 'o-1', failed at ",
            "OrchestrationFailed: flow 'o-1': ActivityFailed: activity 'buy': CardDeclined: no",
            'shop.py", line {line}, in buy',
            "return await buy(3)",
        ),
    ),
    Mistake(
        title="an orchestration has a bug",
        program="""
            @orchestration
            async def flow() -> int:
                return {}["missing"]  # here

            async def main(runtime):
                await (await runtime.start(flow, id="o-1")).result()
        """,
        words=("OrchestrationFailed: flow 'o-1': KeyError", 'shop.py", line {line}, in flow'),
    ),
    Mistake(
        title="an exception of an activity is caught by its class",
        program="""
            @activity(raises=[CardDeclined])
            async def buy(cents: int) -> str:
                raise CardDeclined("no money", cents)

            @orchestration
            async def flow() -> str:
                try:
                    return await buy(3)
                except CardDeclined as error:
                    return f"caught {error.args}"

            async def main(runtime):
                print(await (await runtime.start(flow, id="o-1")).result())
        """,
        words=("caught ('no money', 3)",),
    ),
    Mistake(
        title="a child fails",
        program="""
            @orchestration
            async def child() -> int:
                raise CardDeclined("no money")  # here

            @orchestration
            async def flow() -> int:
                return await child()

            async def main(runtime):
                await (await runtime.start(flow, id="o-1")).result()
        """,
        words=("orchestration 'child' failed here:", 'shop.py", line {line}, in child'),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[each.title for each in MISTAKES])
def test_a_mistake_of_a_newcomer_is_answered(mistake, tmp_path):
    program = HEAD + dedent(mistake.program).strip() + TAIL
    (tmp_path / "shop.py").write_text(program)
    marked = [n for n, text in enumerate(program.splitlines(), 1) if text.endswith("# here")]

    done = subprocess.run(
        [sys.executable, "shop.py"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    printed = done.stdout + done.stderr
    for words in mistake.words:
        expected = words.replace("{line}", str(marked[0])) if marked else words
        assert expected in printed, printed
    for words in mistake.silent:
        assert words not in printed, printed
