"""Reading the state of another instance, and the version that begins when none is named."""

import pytest

from integration.conditions import until
from patience import HANG_SECONDS
from perdure import (
    Runtime,
    RuntimeOptions,
    activity,
    continue_as_new,
    instance,
    orchestration,
    state,
    wait_for_event,
)
from perdure.errors import InvalidValue, NotRegistered
from perdure.model.events import WatcherAdded
from perdure.testing import Environment, assert_replays


@orchestration
async def account() -> int:
    state["balance"] = 100
    state["owner"] = {"name": "Ada"}
    await wait_for_event("spend")
    state["balance"] = 40
    await wait_for_event("close")
    return 0


@orchestration
async def auditor(account_id: str) -> list[object]:
    other = instance(account_id)
    first = await other.state("balance", int)
    await wait_for_event("again")
    second = await other.state("balance", int)
    owner = await other.state("owner")
    return [first, second, owner, await other.state("nothing"), await instance("x").state("y")]


async def test_the_state_of_another_instance_is_read_and_recorded(make_environment):
    async with make_environment([account, auditor]) as env:
        spent = await env.start(account, id="a-1")
        audit = await env.start(auditor, "a-1")
        await env.settle()
        await spent.raise_event("spend")
        await env.settle()
        await audit.raise_event("again")

        assert await audit.result() == [100, 40, {"name": "Ada"}, None, None]
        assert_replays(await audit.history(), auditor)


async def test_a_value_of_another_type_is_an_error_at_the_await(make_environment):
    @orchestration
    async def wrong(account_id: str) -> str:
        try:
            return str(await instance(account_id).state("owner", int))
        except TypeError as error:
            return str(error)

    async with make_environment([account, wrong]) as env:
        await env.start(account, id="a-1")
        told = await env.run(wrong, "a-1")

    assert told.startswith("state['owner'] of 'a-1': Expected `int`, got `object`")


# --- versions


@activity
async def note(text: str) -> str:
    return text


@orchestration(name="flow", version="1.0.0")
async def first(again: bool) -> str:
    if again:
        continue_as_new(False)
    return await note("1.0.0")


@orchestration(name="flow", version="2.0.0")
async def second(again: bool) -> str:
    if again:
        continue_as_new(False)
    return await note("2.0.0")


@orchestration
async def parent() -> str:
    return await second(False)


HANDLERS = [first, second, parent, note]


def environment(**pinned):
    return Environment(HANDLERS, options=RuntimeOptions(pinned_versions=pinned))


async def test_without_a_pin_the_latest_version_begins():
    async with environment() as env:
        assert await env.run(second, False) == "2.0.0"


async def test_a_pinned_version_begins_when_the_caller_names_none():
    async with environment(flow="1.0.0") as env:
        assert await env.run(second, False) == "1.0.0"
        assert await env.run(second, True) == "1.0.0"
        assert await env.run(parent) == "1.0.0"
        assert await env.run(second, False, version="2.0.0") == "2.0.0"


def test_a_pin_to_what_is_not_registered_is_refused():
    with pytest.raises(NotRegistered, match=r"'flow' is not registered in version '3\.0\.0'"):
        environment(flow="3.0.0")
    with pytest.raises(NotRegistered, match="'flo' is not registered; did you mean 'flow'"):
        environment(flo="1.0.0")
    with pytest.raises(InvalidValue, match="pinned_versions must be a dict of names and versions"):
        RuntimeOptions(pinned_versions=["flow"])


async def test_a_worker_that_takes_an_instance_over_tells_those_that_wait_for_its_end(tmp_path):
    @orchestration
    async def heir(account_id: str) -> int:
        return await instance(account_id, int).result()

    # A later look comes after an hour: only the notice can be the answer.
    options = RuntimeOptions(poll_interval=3600)
    handlers = [account, heir]
    async with Runtime(tmp_path / "s.db", handlers, options=options) as first:
        await first.start(account, id="a-1")
        await first.start(heir, "a-1", id="h-1")

        async def is_watched():
            return any(type(event) is WatcherAdded for event in await first.history("a-1"))

        await until(is_watched)
    async with Runtime(tmp_path / "s.db", handlers, options=options) as second:
        await second.raise_event("a-1", "spend")
        await second.raise_event("a-1", "close")
        assert await second.get("h-1", heir).result(HANG_SECONDS) == 0


async def test_those_that_wait_are_told_of_the_end_of_a_later_execution():
    @orchestration
    async def renewed(again: bool) -> int:
        await wait_for_event("go")
        return continue_as_new(False) if again else 7

    @orchestration
    async def heir() -> int:
        return await instance("a-1", int).result()

    # A later look comes after an hour: only the notice can be the answer.
    options = RuntimeOptions(poll_interval=3600)
    async with Runtime("memory:", [renewed, heir], options=options) as runtime:
        watched = await runtime.start(renewed, True, id="a-1")
        waiting = await runtime.start(heir)

        async def is_watched():
            return any(type(event) is WatcherAdded for event in await watched.history())

        async def has_continued():
            return (await watched.describe()).execution_id == 2

        await until(is_watched)
        await watched.raise_event("go")
        await until(has_continued)
        await watched.raise_event("go")

        assert await waiting.result(HANG_SECONDS) == 7
