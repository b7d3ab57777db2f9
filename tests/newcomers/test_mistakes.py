"""Mistakes of newcomers: each gets an answer that names the author's line and the way out.

The mistakes are in the text files beside this module:

- ``=== title``, then the program: handlers and ``async def main(runtime)``, or all of a program
  with ``def run``;
- ``---``, then lines, each of which must be printed, perhaps inside of a longer line. ``{line}`` is
  the line of the program that ends in ``# here``;
- ``--- silent``, then lines that must not be printed.

A line of the log that says where an orchestration or activity failed must name the program.

A program runs as its author would run it: ``python shop.py``. A server process has imported the
package before, so that a program starts in milliseconds.
"""

import multiprocessing
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

import pytest

from patience import HANG_SECONDS

HEAD = """\
import asyncio
from dataclasses import dataclass
from datetime import timedelta
from perdure import *
from perdure import errors, now, state, uuid4

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

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["perdure.runtime.runtime", "perdure.providers.sqlite.memory"])


def mistakes():
    for file in sorted(Path(__file__).parent.glob("*.txt")):
        for block in re.split(r"^=== ", file.read_text(), flags=re.MULTILINE)[1:]:
            title, _, text = block.partition("\n")
            program, words = text.split("\n---\n")
            words, _, silent = words.partition("--- silent\n")
            yield pytest.param(program, words, silent, id=f"{file.stem}: {title}")


MISTAKES = list(mistakes())


def test_there_are_more_than_a_hundred():
    assert len(MISTAKES) > 100


@pytest.mark.parametrize(("program", "words", "silent"), MISTAKES)
def test_a_mistake_is_answered(program, words, silent, tmp_path):
    source = HEAD + program + ("\n" if "def run(" in program else TAIL)
    (tmp_path / "shop.py").write_text(source)
    process = _context.Process(target=run, args=(str(tmp_path),))
    process.start()
    process.join(HANG_SECONDS)
    if process.is_alive():
        process.kill()

    printed = (tmp_path / "printed").read_text()
    marked = [n for n, text in enumerate(source.splitlines(), 1) if text.endswith("# here")]
    for expected in words.splitlines():
        assert expected.replace("{line}", str(marked[0] if marked else "")) in printed, printed
    for unexpected in silent.splitlines():
        assert unexpected not in printed, printed
    for place in re.findall(r"failed at (\S+:\d+):", printed):
        assert Path(place).name.startswith("shop.py:"), printed


def run(folder: str) -> None:
    os.chdir(folder)
    with Path("printed").open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.path.insert(0, folder)
    try:
        runpy.run_path("shop.py", run_name="__main__")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
