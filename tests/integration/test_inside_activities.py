"""The client, the logger and the retries of an activity."""

import pytest
from msgspec.structs import replace

from perdure import (
    OrchestrationFailed,
    Retry,
    Runtime,
    RuntimeOptions,
    activity,
    activity_client,
    activity_info,
    blocking_activity_client,
    orchestration,
    wait_for_event,
)
from perdure.errors import InvalidValue, UsageError
from perdure.model.failures import Failure
from perdure.model.work import ActivityExecute
from perdure.runtime.attempts import retry_delay_ms
from perdure.testing import Environment


@orchestration
async def double(number: int) -> int:
    return 2 * number


@orchestration
async def waiter() -> str:
    return await wait_for_event("go", str)


@activity
async def ask(number: int) -> int:
    handle = await activity_client().start(double, number, id=f"double-{number}")
    return await handle.result()


@activity
def ask_in_thread(number: int) -> int:
    client = blocking_activity_client()
    handle = client.start(double, number, id=f"double-{number}")
    client.call(client.client.get("w").raise_event, "go", "on")
    return handle.result()


@activity
def confused() -> None:
    activity_client()


@activity
async def confused_too() -> None:
    blocking_activity_client().start(double, 1)


@activity
def chatty() -> None:
    activity_info().logger.info("charged %s", "o-1", extra={"cents": 5})


@orchestration
async def flow() -> int:
    return await ask(2) + await ask_in_thread(20)


@orchestration
async def wrong(name: str) -> None:
    await {"confused": confused, "confused_too": confused_too}[name]()


@orchestration
async def talk() -> None:
    await chatty()


async def test_activities_start_and_message_other_instances():
    handlers = [double, waiter, flow, ask, ask_in_thread]
    async with Runtime("memory:", handlers) as runtime:
        waiting = await runtime.start(waiter, id="w")
        handle = await runtime.start(flow)
        assert await handle.result() == 44
        assert await waiting.result() == "on"


async def test_each_kind_of_activity_has_its_own_client():
    async with Runtime("memory:", [wrong, confused, confused_too, double]) as runtime:
        for name, told in (("confused", "blocking_activity_client"), ("confused_too", "await the")):
            with pytest.raises(OrchestrationFailed, match=told):
                await (await runtime.start(wrong, name)).result()
    for outside in (activity_client, blocking_activity_client):
        with pytest.raises(UsageError, match="works only inside an activity"):
            outside()


async def test_the_logger_of_an_activity_carries_the_ids(caplog):
    caplog.set_level("INFO")
    async with Environment([talk, chatty]) as env:
        await env.start(talk, id="t-1")
        await env.settle()
    (record,) = [each for each in caplog.records if each.name == "perdure.activity.chatty"]
    assert record.getMessage() == "charged o-1"
    assert (record.instance_id, record.execution_id, record.attempt) == ("t-1", 1, 1)
    assert (record.orchestration_name, record.activity_name) == ("talk", "chatty")
    assert (record.activity_id, record.cents) == (2, 5)


def delays(retry):
    item = ActivityExecute(
        instance_id="x", execution_id=1, activity_id=2, name="a", retry=retry.plan()
    )
    attempts = range(1, retry.max_attempts)
    return [retry_delay_ms(replace(item, attempt=n), Failure(), 0) for n in attempts]


def test_delays_grow_linearly_or_exponentially_up_to_their_bound():
    linear = Retry(max_attempts=6, first_delay=5, multiplier=1, increment=5, max_delay=18, jitter=0)
    assert delays(linear) == [5000, 10_000, 15_000, 18_000, 18_000]
    both = Retry(max_attempts=4, first_delay=1, multiplier=3, increment=2, jitter=0)
    assert delays(both) == [1000, 5000, 13_000]
    assert delays(Retry(max_attempts=4, first_delay=1, jitter=0)) == [1000, 2000, 4000]
    with pytest.raises(InvalidValue, match=r"Retry\.increment"):
        Retry(increment=-1)


def test_a_session_cannot_become_idle_between_two_renewals_of_its_activity():
    with pytest.raises(InvalidValue, match=r"session_idle_timeout .* set it to at least 5$"):
        RuntimeOptions(session_idle_timeout=4.9)
    RuntimeOptions(session_idle_timeout=5)
