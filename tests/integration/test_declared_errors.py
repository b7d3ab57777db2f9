"""Exceptions of activities in orchestrations: as they were raised if declared, else by name."""

import pytest

from patience import HANG_SECONDS
from perdure import ActivityFailed, activity, orchestration
from perdure.errors import InvalidValue, OrchestrationFailed


class PaymentError(Exception):
    pass


class CardDeclined(PaymentError):
    def __init__(self, code: int, *, bank: str) -> None:
        super().__init__(f"declined with {code}")
        self.code = code
        self.bank = bank


class Odd(Exception):
    """Needs two arguments and keeps one."""

    def __new__(cls, one: int, two: int) -> "Odd":  # noqa: PYI034
        return super().__new__(cls, one, two)

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def fail(how: str) -> str:
    match how:
        case "own":
            raise CardDeclined(5, bank="north")
        case "builtin":
            raise FileNotFoundError(2, "gone", "a.txt")
        case "undeclared":
            raise KeyError("k")
        case "no json":
            raise PaymentError(object())
        case "not made again":
            raise Odd(1, 2)
    return how


DECLARED = (CardDeclined, OSError, PaymentError, Odd)
in_task = activity(name="in_task", raises=DECLARED)(fail)
by_base = activity(name="by_base", raises=[PaymentError])(fail)


@orchestration
async def flow(name: str, how: str) -> list[object]:
    called = {"in_task": in_task, "by_base": by_base}[name]
    try:
        await called(how)
    except CardDeclined as error:
        return ["own", str(error), error.code, error.bank]
    except OSError as error:
        return ["builtin", error.errno, error.filename]
    except PaymentError as error:
        return ["base", str(error)]
    except ActivityFailed as error:
        return [error.type_name, *error.__notes__[1:]]
    return []


async def outcome(make_runtime, name, how):
    async with make_runtime([flow, in_task, by_base]) as runtime:
        return await (await runtime.start(flow, name, how)).result(HANG_SECONDS)


async def test_a_declared_error_arrives_with_its_arguments_and_attributes(make_runtime):
    declined = ["own", "declined with 5", 5, "north"]
    assert await outcome(make_runtime, "in_task", "own") == declined


async def test_a_declared_builtin_is_made_again_from_its_arguments(make_runtime):
    assert await outcome(make_runtime, "in_task", "builtin") == ["builtin", 2, None]


async def test_a_subclass_arrives_as_the_nearest_declared_class(make_runtime):
    assert await outcome(make_runtime, "by_base", "own") == ["base", "declined with 5"]


async def test_an_undeclared_error_arrives_as_activity_failed(make_runtime):
    assert await outcome(make_runtime, "in_task", "undeclared") == ["KeyError"]


@pytest.mark.parametrize(
    ("how", "said"),
    [("no json", "JSON cannot hold it"), ("not made again", "cannot be made again")],
)
async def test_an_error_that_cannot_be_made_again_says_why(make_runtime, how, said):
    _, note = await outcome(make_runtime, "in_task", how)
    assert said in note


async def test_the_original_class_is_asked_for_by_is_(make_runtime):
    @orchestration
    async def asks() -> list[bool]:
        plain = activity(name="in_task")(fail)
        try:
            await plain("own")
        except ActivityFailed as error:
            return [
                error.is_(CardDeclined),
                error.is_(PaymentError),
                error.is_(OSError, ValueError),
            ]
        return []

    @orchestration
    async def fails() -> None:
        raise CardDeclined(5, bank="north")

    async with make_runtime([asks, fails, in_task]) as runtime:
        assert await (await runtime.start(asks)).result(HANG_SECONDS) == [True, True, False]
        with pytest.raises(OrchestrationFailed) as raised:
            await (await runtime.start(fails)).result(HANG_SECONDS)
        assert raised.value.is_(PaymentError)


@pytest.mark.parametrize("wrong", [[5], ["OSError"], [StopIteration], [BaseException]])
def test_only_exception_classes_can_be_declared(wrong):
    with pytest.raises(InvalidValue, match="raises takes exception classes"):
        activity(raises=wrong)(fail)
