"""The first turn of an instance kills its process: what is stored, and what counts."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from patience import HANG_SECONDS
from perdure import Client, Status
from perdure.errors import NotFound

PROGRAM = textwrap.dedent(
    """
    import asyncio, os, sys
    from perdure import Runtime, RuntimeOptions, orchestration

    @orchestration
    async def deadly() -> None:
        os._exit(9)

    async def main() -> None:
        options = RuntimeOptions(max_attempts=2)
        async with Runtime("store.db", [deadly], options=options) as runtime:
            if sys.argv[1] == "start":
                await runtime.start(deadly, id="d")
            while (await runtime.get("d").describe()).status.value != "Blocked":
                await asyncio.sleep(0.01)

    asyncio.run(main())
    """
)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def run_program(way):
        command = [sys.executable, "program.py", way]
        return subprocess.run(command, cwd=tmp_path, timeout=HANG_SECONDS, check=False).returncode

    return run_program


async def test_a_start_by_a_runtime_is_stored_with_its_first_turn_or_not_at_all(run, tmp_path):
    for _ in range(3):
        assert await asyncio.to_thread(run, "start") == 9
    async with Client(tmp_path / "store.db") as client:
        with pytest.raises(NotFound):
            await client.get("d").describe()


async def test_deaths_after_a_start_by_a_client_are_counted_until_it_is_blocked(run, tmp_path):
    async with Client(tmp_path / "store.db") as client:
        await client.start("deadly", id="d")
        codes = [await asyncio.to_thread(run, "work") for _ in range(3)]
        info = await client.get("d").describe()
    assert codes == [9, 9, 0]
    assert info.status is Status.BLOCKED
    assert info.block.reason == "poison"
