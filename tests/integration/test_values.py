"""Values on their way between code, store and code."""

import asyncio
import dataclasses

import pytest

from patience import HANG_SECONDS
from perdure import (
    activity,
    next_message,
    orchestration,
    set_custom_status,
    start_detached,
    state,
    wait_for_event,
)
from perdure.errors import InvalidValue, PayloadError
from perdure.limits import CUSTOM_STATUS_BYTES_MAX, KV_VALUE_BYTES_MAX, PAYLOAD_BYTES_MAX


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
