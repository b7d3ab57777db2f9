"""Values on their way between code, store and code."""

import dataclasses

import pytest

from perdure import activity, orchestration
from perdure.errors import PayloadError


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
        told = await (await runtime.start(paying, Payment(1))).result(10)

    assert told[0] == "Payment"
    assert "argument 'payment' of activity 'kind_of': Refund(" in told[1]
    assert "result of activity 'returning': Refund(" in told[2]
    assert "argument 'payment' of orchestration 'paying': Refund(" in told[3]
