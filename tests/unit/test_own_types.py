"""Classes of the author: written and read by the codec's own types, and refused if not equal."""

import asyncio
import fractions
import sys
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest

from perdure import Codec, CodecType, Runtime, activity, orchestration, state, wait_for_event
from perdure.errors import PayloadError, UsageError
from perdure.own_types import is_model
from perdure.testing import Environment, assert_replays


class Money:
    def __init__(self, cents: int, currency: str = "EUR") -> None:
        self.cents = cents
        self.currency = currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.cents)

    def __str__(self) -> str:
        return f"{self.cents} {self.currency}"

    @classmethod
    def parse(cls, text: str) -> "Money":
        cents, currency = text.split()
        return cls(int(cents), currency)


class Opaque:
    """Has no ``__eq__``: two values are equal only if they are the same object."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


@dataclass
class Order:
    name: str
    prices: list[Money]


MONEY = CodecType(Money, stored_as=str, encode=str, decode=Money.parse)
CODEC = Codec(types=[MONEY])


def there_and_back(value, type_, codec=CODEC):
    return codec.decode(codec.encode(value, fits=type_), type_)


def test_a_value_comes_back_equal_alone_and_inside_of_others():
    assert bytes(CODEC.encode(Money(5), fits=Money)) == b'"5 EUR"'
    assert there_and_back(Money(5), Money) == Money(5)
    assert there_and_back([Money(5), None], list[Money | None]) == [Money(5), None]
    assert there_and_back({"a": (Money(1),)}, dict[str, tuple[Money, ...]]) == {"a": (Money(1),)}
    order = Order("o-1", [Money(1), Money(2, "USD")])
    assert there_and_back(order, Order) == order
    assert there_and_back({Money(1)}, set[Money]) == {Money(1)}


def test_a_stored_form_can_hold_types_of_its_own():
    pair = CodecType(
        Opaque,
        stored_as=list[fractions.Fraction],
        encode=lambda value: [fractions.Fraction(each) for each in value.values],
        decode=lambda stored: Opaque([float(each) for each in stored]),
    )
    fraction = CodecType(fractions.Fraction, stored_as=str, encode=str, decode=fractions.Fraction)
    codec = Codec(types=[pair, fraction])
    assert there_and_back(Opaque([0.5]), Opaque, codec).values == [0.5]


def test_a_value_without_a_type_is_refused_with_the_way_out():
    with pytest.raises(PayloadError, match=r"CodecType"):
        Codec().encode(Money(5))
    with pytest.raises(PayloadError, match=r"nothing can be read back as Money.*CodecType"):
        Codec().check_type(Order, where="argument")
    CODEC.check_type(Order, where="argument")


def test_a_value_for_which_the_reader_has_another_annotation_is_refused():
    with pytest.raises(PayloadError, match="annotate Money"):
        CODEC.encode(Money(5), fits=str)


def test_an_instance_of_a_subclass_is_refused():
    class Loan(Money):
        pass

    with pytest.raises(PayloadError, match="Loan"):
        CODEC.encode(Loan(5), fits=Money)


def test_a_value_that_would_not_come_back_equal_is_refused_with_its_path():
    careless = CodecType(Money, stored_as=int, encode=lambda value: value.cents, decode=Money)
    codec = Codec(types=[careless])
    codec.encode(Money(5), fits=Money)
    with pytest.raises(PayloadError, match=r"value\.prices\[1\]: .*would come back as.*CodecType"):
        codec.encode(Order("o", [Money(1), Money(2, "USD")]), fits=Order)


def test_an_object_that_cannot_be_compared_is_compared_as_it_is_written():
    sound = CodecType(
        Opaque, stored_as=list[float], encode=lambda value: value.values, decode=Opaque
    )
    assert there_and_back(Opaque([1.5]), Opaque, Codec(types=[sound])).values == [1.5]
    lossy = CodecType(
        Opaque,
        stored_as=list[float],
        encode=lambda value: value.values,
        decode=lambda stored: Opaque(stored[:1]),
    )
    with pytest.raises(PayloadError, match="written in another way"):
        Codec(types=[lossy]).encode(Opaque([1.5, 2.5]), fits=Opaque)


def test_a_value_that_does_not_equal_itself_is_compared_as_it_is_written():
    codec = Codec(
        types=[CodecType(Reading, stored_as=str, encode=lambda r: str(r.value), decode=Reading.of)]
    )
    assert Reading(float("nan")) != Reading(float("nan"))
    assert str(there_and_back(Reading(float("nan")), Reading, codec).value) == "nan"


class Reading:
    """Equal if the numbers are equal, so one that holds NaN does not equal itself."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and self.value == other.value

    __hash__ = None

    @classmethod
    def of(cls, text: str) -> "Reading":
        return cls(float(text))


T = TypeVar("T")


class Box(Generic[T]):
    def __init__(self, content: str) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


def test_a_generic_class_is_read_with_any_parameter():
    box = CodecType(Box, stored_as=str, encode=lambda box: box.content, decode=Box)
    codec = Codec(types=[box])
    assert there_and_back(Box("lamp"), Box[int], codec) == Box("lamp")
    assert there_and_back([Box("lamp")], list[Box[str]], codec) == [Box("lamp")]


def test_no_class_is_a_model_before_pydantic_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)
    assert not is_model(Money)


def test_equal_values_that_are_written_differently_are_refused():
    class Level:
        def __init__(self, value: float) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Level)

        __hash__ = None

    drifting = CodecType(
        Level,
        stored_as=float,
        encode=lambda level: level.value,
        decode=lambda stored: Level(stored / 2),
    )
    with pytest.raises(PayloadError, match="written in another way"):
        Codec(types=[drifting]).encode(Level(1), fits=Level)


@pytest.mark.parametrize(
    ("encode", "decode", "words"),
    [
        (lambda _: 1 / 0, Money.parse, "encode of CodecType.Money. failed.*division"),
        (lambda _: object(), Money.parse, "encode of CodecType.Money. failed"),
        (lambda _: 7, Money.parse, "Expected `str`, got `int`"),
        (lambda _: float("nan"), Money.parse, "Expected `str`, got `null`"),
        (str, lambda _: {}["cents"], "decode of CodecType.Money. failed.*cents"),
        (str, lambda text: text, "would come back as '5 EUR'"),
    ],
)
def test_a_type_that_fails_is_refused_where_the_value_is_written(encode, decode, words):
    codec = Codec(types=[CodecType(Money, stored_as=str, encode=encode, decode=decode)])
    with pytest.raises(PayloadError, match=words):
        codec.encode([Money(5)], fits=list[Money])


def test_stored_data_that_does_not_fit_is_a_payload_error():
    with pytest.raises(PayloadError, match=r"decode of CodecType.Money. failed for 'x'"):
        CODEC.decode(Codec().encode("x"), Money)
    with pytest.raises(PayloadError, match="Expected `str`, got `int`"):
        CODEC.decode(Codec().encode(3), Money)


def test_a_form_that_is_nested_too_deeply_is_refused():
    def nested(_value):
        form = "x"
        for _ in range(120):
            form = [form]
        return form

    deep = CodecType(Opaque, stored_as=list, encode=nested, decode=lambda _: Opaque([]))
    with pytest.raises(PayloadError, match="nested deeper"):
        Codec(types=[deep]).encode(Opaque([]), fits=Opaque)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CodecType("Money", stored_as=str, encode=str, decode=str), "takes a class"),
        (lambda: CodecType(Money, stored_as=str, encode="str", decode=str), "encode must be"),
        (lambda: CodecType(Order, stored_as=str, encode=str, decode=str), "JSON already"),
        (lambda: CodecType(int, stored_as=str, encode=str, decode=int), "JSON already"),
        (lambda: Codec(types=[MONEY, MONEY]), "two CodecType.Money."),
        (lambda: Codec(types=[Money]), "types takes CodecType"),
        (lambda: Codec(types=MONEY), "types takes a list of CodecType"),
    ],
)
def test_a_type_that_could_not_work_is_refused_when_it_is_made(make, words):
    with pytest.raises(UsageError, match=words):
        make()


@activity
async def double(price: Money) -> Money:
    return Money(price.cents * 2, price.currency)


@orchestration
async def bill(price: Money) -> Order:
    extra = await wait_for_event("extra", Money)
    state["last"] = extra
    return Order("o-1", [await double(price), await double(state.get("last", Money))])


def test_an_orchestration_passes_own_types_everywhere_and_replays():
    async def run():
        async with Environment([bill, double], codec=CODEC, always_replay=True) as env:
            handle = await env.start(bill, Money(5))
            await handle.raise_event("extra", Money(7, "USD"))
            order = await handle.result()
            assert_replays(await handle.history(), bill, codec=CODEC)
            return order

    assert asyncio.run(run()) == Order("o-1", [Money(10), Money(14, "USD")])


def test_a_runtime_without_the_type_refuses_the_handler():
    with pytest.raises(PayloadError, match=r"nothing can be read back as Money.*CodecType"):
        Runtime("memory:", [bill, double])


@activity(executor="process")
def heavy(price: Money) -> int:
    return price.cents


def test_a_process_does_not_have_the_codec():
    with pytest.raises(UsageError, match=r"heavy.*does not have the codec.*executor='thread'"):
        Runtime("memory:", [heavy], codec=CODEC)
