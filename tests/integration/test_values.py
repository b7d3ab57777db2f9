"""Values on their way between code, store and code."""

import asyncio
import dataclasses

import pytest

from patience import HANG_SECONDS
from perdure import (
    activity,
    continue_as_new,
    next_message,
    orchestration,
    set_custom_status,
    start_detached,
    state,
    wait_for_event,
)
from perdure.errors import InvalidValue, OrchestrationFailed, PayloadError, UsageError
from perdure.limits import CUSTOM_STATUS_BYTES_MAX, KV_VALUE_BYTES_MAX, PAYLOAD_BYTES_MAX
from perdure.testing import Environment


@dataclasses.dataclass
class Payment:
    cents: int


@dataclasses.dataclass
class Refund(Payment):
    why: str = ""


@activity
async def kind_of(payment: Payment) -> str:
    return type(payment).__name__


@activity
async def returning() -> Payment:
    return Refund(1)


@orchestration
async def paying(payment: Payment) -> list[str]:
    told = [await kind_of(payment)]
    for step in (lambda: kind_of(Refund(1)), returning, lambda: paying(Refund(1))):
        try:
            told.append(await step())
        except Exception as error:
            told.append(str(error))
    return told


async def test_what_would_lose_fields_is_refused_at_the_call(make_runtime):
    async with make_runtime([paying, kind_of, returning]) as runtime:
        with pytest.raises(PayloadError, match="argument 'payment' of orchestration 'paying'"):
            await runtime.start(paying, Refund(1))
        told = await (await runtime.start(paying, Payment(1))).result(HANG_SECONDS)

    assert told[0] == "Payment"
    assert "argument 'payment' of activity 'kind_of': Refund(" in told[1]
    assert "result of activity 'returning': Refund(" in told[2]
    assert "argument 'payment' of orchestration 'paying': Refund(" in told[3]


@activity
async def large_number() -> int:
    return 10**5000


@orchestration
async def returning_large_number() -> int:
    return 10**5000


@orchestration
async def awaiting_large_number() -> int:
    return await large_number()


@orchestration
async def carrying_large_number(number: int = 0) -> int:
    continue_as_new(10**5000)


@orchestration
async def raising_large_text() -> None:
    await wait_for_event("go", int)
    raise ValueError("x" * 10_000_000)


@pytest.mark.parametrize(
    "code", [returning_large_number, awaiting_large_number, carrying_large_number]
)
async def test_a_value_without_json_fails_the_instance_and_blocks_nothing(make_runtime, code):
    async with make_runtime([code, large_number]) as runtime:
        with pytest.raises(OrchestrationFailed, match="int of 16610 bits"):
            await (await runtime.start(code)).result(HANG_SECONDS)


async def test_error_texts_are_bounded(make_runtime):
    huge = "x" * 10_000_000
    async with make_runtime([raising_large_text]) as runtime:
        handle = await runtime.start(raising_large_text)
        for refused in (
            lambda: handle.raise_event("go", huge),
            lambda: handle.raise_event("go", {huge: object()}),
            lambda: handle.raise_event(huge),
            lambda: handle.raise_event(["go", huge]),
            lambda: handle.send_message(huge + "\0"),
            lambda: handle.cancel(huge),
            lambda: runtime.start(raising_large_text, id=huge),
            lambda: runtime.start(raising_large_text, huge),
            lambda: runtime.start(huge),
            lambda: runtime.state(handle.id, huge + "\0"),
        ):
            with pytest.raises((UsageError, TypeError)) as caught:
                await refused()
            assert len(str(caught.value)) < 2_000
        await handle.raise_event("go", 1)
        with pytest.raises(OrchestrationFailed) as failed:
            await handle.result(HANG_SECONDS)

    assert len(str(failed.value)) < 20_000


LONGEST = "ä" * 255
ODD = "\0\x1f\u2028\U0001f600"
"""Fine in a payload, not in a name."""


@activity(name=LONGEST)
async def echo(text: str) -> str:
    return text


@activity
async def fail(text: str) -> None:
    raise ValueError(text)


@orchestration(name=LONGEST)
async def child(text: str) -> str:
    return text


@orchestration
async def at_the_edge(text: str) -> int:
    set_custom_status("s" * (CUSTOM_STATUS_BYTES_MAX - 2))
    state[LONGEST] = "v" * (KV_VALUE_BYTES_MAX - 2)
    start_detached(child.options(id="d" + LONGEST[1:]), text)
    told = await asyncio.gather(
        echo(text),
        echo.options(session=LONGEST)(ODD),
        child.options(id="c" + LONGEST[1:])(text),
        fail(text),
        wait_for_event(LONGEST, str),
        next_message(LONGEST, str),
        return_exceptions=True,
    )
    for wrong in (
        lambda: echo.options(tag=ODD),
        lambda: echo.options(session="\ud800"),
        lambda: child.options(id="x" + LONGEST),
        lambda: echo(text + text),
        lambda: echo("\ud800"),
        lambda: wait_for_event(ODD, str),
        lambda: state.set("k", "\ud800"),
        lambda: set_custom_status("\ud800"),
    ):
        try:
            wrong()
        except (InvalidValue, PayloadError):
            told.append("refused")
    return told.count("refused") * 100 + len([each for each in told if isinstance(each, str)])


async def test_commits_are_valid_for_every_request_of_the_code(make_runtime):
    text = "x" * (PAYLOAD_BYTES_MAX // 2 + 10)
    async with make_runtime([at_the_edge, child, echo, fail]) as runtime:
        handle = await runtime.start(at_the_edge, text, id=LONGEST)
        await handle.raise_event(LONGEST, ODD)
        await handle.send_message(LONGEST, ODD)
        assert await handle.result(HANG_SECONDS) == 813


@activity
async def give_back(what: str) -> str:
    return f"gave back {what}"


@orchestration
async def approved() -> str:
    try:
        cents = await wait_for_event("approve", int)
    except PayloadError as error:
        return f"{await give_back('the money')}: {error}"
    return f"{cents} {await next_message('names', str)}"


@pytest.mark.parametrize("send", ["raise_event", "send_message"])
async def test_a_value_of_another_type_is_refused_to_a_sender_in_the_same_process(send):
    async with Environment([approved, give_back]) as env:
        handle = await env.start(approved, id="a-1")
        if send == "send_message":
            await handle.raise_event("approve", 5)
            await env.settle()
        name, wrong = ("approve", "yes") if send == "raise_event" else ("names", 7)
        with pytest.raises(PayloadError, match=r"'a-1', which waits.*test_values.py:\d+: Expected"):
            await getattr(handle, send)(name, wrong)

        if send == "raise_event":
            await handle.raise_event("approve", 5)
        await handle.send_message("names", "Ada")
        assert await handle.result() == "5 Ada"


async def test_a_value_of_another_type_is_an_error_at_the_await_and_compensation_runs():
    async with Environment([approved, give_back], always_replay=True) as env:
        handle = await env.start(approved)
        await handle.raise_event("approve", "yes")
        told = await handle.result()

    assert told.startswith("gave back the money: event 'approve': Expected `int`, got `str`")


@dataclasses.dataclass
class Booking:
    room: str

    def __post_init__(self) -> None:
        if self.room not in {"blue", "red"}:
            raise LookupError(f"there is no room {self.room}")


@orchestration
async def booked() -> str:
    try:
        return (await wait_for_event("room", Booking)).room
    except PayloadError as error:
        return f"{await give_back('the money')}: {error}"


async def test_an_event_that_the_class_of_the_author_refuses_is_an_error_at_the_await():
    async with Environment([booked, give_back], always_replay=True) as env:
        handle = await env.start(booked)
        await handle.raise_event("room", {"room": "green"})
        told = await handle.result()

    assert told.startswith(
        "gave back the money: event 'room': LookupError('there is no room green')"
    )


async def test_a_message_behind_another_one_is_not_judged_by_the_wait_of_the_first():
    @orchestration
    async def two() -> str:
        first = await wait_for_event("x", int)
        return f"{first} {await wait_for_event('x', str)}"

    async with Environment([two]) as env:
        handle = await env.start(two)
        await handle.raise_event("x", 1)
        await handle.raise_event("x", "b")
        assert await handle.result() == "1 b"
