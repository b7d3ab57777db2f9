"""``perdure promises`` and ``resolve``."""

import asyncio

from integration.conditions import until
from perdure import Runtime, orchestration, promise


@orchestration
async def asks(key: str) -> bool:
    return await promise(key, bool)


def test_promises_are_listed_and_resolved(cli):
    async def work(is_done):
        async with Runtime(cli.store, [asks]) as runtime:
            await runtime.start(asks, "approval:o-1", id="o-1")
            await until(lambda: is_done(runtime))

    async def is_awaited(runtime):
        return [each.awaited_by async for each in runtime.promises()] == [("o-1",)]

    async def has_ended(runtime):
        return (await runtime.describe("o-1")).status.is_final

    asyncio.run(work(is_awaited))
    (found,) = cli("promises", "-o", "json").json
    assert (found["key"], found["awaited_by"]) == ("approval:o-1", ["o-1"])
    assert "approval:o-1" in cli("promises").out
    assert "approval" in cli("show", "o-1").out
    assert cli("resolve", "approval:o-1", "--data", "true").err == ""
    asyncio.run(work(has_ended))
    assert cli("result", "o-1").json is True
    assert cli("promises", "-o", "ids").lines == []
    cli("resolve", "approval:o-1", "--data", "true")
    refused = cli("resolve", "approval:o-1", "--data", "false", code=None)
    assert (refused.code, "other data" in refused.err) == (6, True)


def test_a_promise_is_rejected_early(cli):
    cli.run()
    said = cli("resolve", "k", "--reject", "no")
    assert "rejected k" in said.out
    assert "no instance has awaited it yet; the answer is kept for one that does" in said.err
    assert "not both" in cli("resolve", "k", "--data", "1", "--reject", "no", code=2).err
    assert "not JSON" in cli("resolve", "k", "--data", "{", code=2).err
