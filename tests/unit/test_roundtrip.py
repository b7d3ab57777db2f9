"""Values that would not come back as they went in are refused where they are written."""

import collections
import dataclasses
import datetime
import decimal
import enum
import typing
import uuid
from typing import Any, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure import Runtime, activity
from perdure.authoring.signature import HandlerSignature
from perdure.codec import JSON
from perdure.errors import PayloadError


@dataclasses.dataclass
class Payment:
    cents: int


@dataclasses.dataclass
class Refund(Payment):
    why: str = ""


@dataclasses.dataclass(eq=False)
class Box:
    content: Any


class Shape(msgspec.Struct):
    sides: int


class Square(Shape):
    length: int = 1


@attrs.define
class Point:
    x: int


@attrs.define
class Point3(Point):
    z: int = 0


class Model(pydantic.BaseModel):
    a: int


class Bigger(Model):
    b: int = 0


class Pair(NamedTuple):
    left: int
    right: int


class Options(TypedDict, total=False):
    size: int


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Growing:
    numbers: list[int]

    def __post_init__(self) -> None:
        self.numbers = [*self.numbers, 0]


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int


@dataclasses.dataclass(frozen=True)
class Wider(Frozen):
    b: int


@dataclasses.dataclass(frozen=True, eq=False)
class Unequal:
    a: int


class NeverEqual(Payment):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None


WHEN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ID = uuid.UUID(int=1)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Payment, Payment(1)),
        (NeverEqual, NeverEqual(1)),
        (Box, Box({"a": (1, 2)})),
        (list[Payment], [Payment(1), Payment(2)]),
        (Payment, {"cents": 1}),
        (Shape | None, Shape(4)),
        (Point, Point(1)),
        (Model, Model(a=1)),
        (Pair, Pair(1, 2)),
        (Options, {}),
        (Options, {"size": 1}),
        (Colour, Colour.RED),
        (int, Level.LOW),
        (Any, Level.LOW),
        (Any, (1, [2.5, None, {"a": True}])),
        (Any, collections.OrderedDict(a=1)),
        (dict[int, str], {1: "a"}),
        (typing.Sequence[int], (1, 2)),
        (typing.Mapping[str, int], collections.Counter("aab")),
        (set[int], {1, 2}),
        (set[int], [3, 2, 1]),
        (bytes, bytearray(b"a")),
        (list[datetime.datetime], [WHEN]),
        (dict[str, decimal.Decimal], {"a": decimal.Decimal("1.50")}),
        (uuid.UUID, ID),
        (set[Unequal], {Unequal(1)}),
        (decimal.Decimal, decimal.Decimal("NaN")),
        (decimal.Decimal, decimal.Decimal("sNaN")),
        (float, 2**53),
    ],
)
def test_what_comes_back_is_taken(annotation, value):
    JSON.encode(value, fits=annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        (Growing, Growing([1]), r"it\.numbers: \[1, 0\]"),
        (Payment, Refund(5, "broken"), "it: Refund"),
        (list[Payment], [Payment(1), Refund(2)], r"it\[1\]: Refund"),
        (dict[str, Payment], {"a": Refund(2)}, r"it\['a'\]: Refund"),
        (Box, Box([Payment(1)]), r"it\.content\[0\]: Payment"),
        (Shape, Square(4, 2), "it: Square"),
        (Point, Point3(1, 2), "it: Point3"),
        (Model, Bigger(a=1, b=2), "it: Bigger"),
        (Options, {"size": 1, "weight": 2}, "it: the key 'weight'"),
        (Any, Payment(1), "it: Payment"),
        (Any, {"a": Payment(1)}, r"it\['a'\]: Payment"),
        (Any, {1: 2}, "it: the key 1"),
        (dict, {1: 2}, "it: the key 1"),
        (Any, b"ab", "it: b'ab'"),
        (Any, {1, 2}, "it: {1, 2}"),
        (Any, Pair(1, 2), "it: Pair"),
        (Any, decimal.Decimal("1.5"), "it: Decimal"),
        (Any, WHEN, "it: datetime"),
        (Any, ID, "it: UUID"),
        (Any, Colour.RED, "it: <Colour.RED"),
        (str, Colour.RED, "it: <Colour.RED"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(annotation, value, place):
    with pytest.raises(PayloadError, match=f"^{place}.* would (not )?come back"):
        JSON.encode(value, where="it", fits=annotation)


def test_long_values_are_shown_shortened():
    with pytest.raises(PayloadError) as caught:
        JSON.encode(Refund(1, "x" * 10_000), fits=Payment)

    assert len(str(caught.value)) < 400


OFFSETS = st.integers(-86_399, 86_399).map(
    lambda seconds: datetime.timezone(datetime.timedelta(seconds=seconds))
)
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers() | st.sampled_from([2**53 + 1, 2**64 - 1, 10**4300])),
    (float, st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)),
    (float | None, st.none() | st.just(2**64 - 1)),
    (str, st.text(max_size=5)),
    (bytes, st.binary(max_size=5)),
    (decimal.Decimal, st.decimals(allow_nan=False) | st.integers()),
    (uuid.UUID, st.uuids()),
    (datetime.date, st.dates()),
    (datetime.time, st.times(timezones=OFFSETS)),
    (datetime.timedelta, st.timedeltas()),
    (datetime.datetime, st.datetimes(timezones=OFFSETS | st.just(datetime.UTC))),
]
VALUES = st.sampled_from(SCALARS).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))
KEYS = st.integers(0, 3) | st.sampled_from(["0", "1", "2", "x"])


@st.composite
def typed_values(draw: Any) -> tuple[Any, Any]:
    """An annotation and a value, alone or inside of a container."""
    annotation, value = draw(VALUES)
    match draw(st.integers(0, 4)):
        case 0:
            return list[annotation], [value]
        case 1:
            return dict[str, annotation], {"a": value}
        case 2:
            return dict[int | str, annotation], dict.fromkeys(draw(st.sets(KEYS)), value)
        case 3:
            return set[annotation], {value}
        case _:
            return annotation, value


@given(typed_values())
@settings(max_examples=400, deadline=None)
def test_a_value_is_refused_or_comes_back_equal(pair):
    annotation, value = pair

    async def echo(it):
        return it

    echo.__annotations__ = {"it": annotation, "return": annotation}
    signature = HandlerSignature(echo, "activity 'echo'")
    if not is_refused(lambda: signature.encode_result(value, JSON)):
        raw = signature.encode_result(value, JSON)
        assert signature.decode_result(raw, JSON) == value
    if not is_refused(lambda: signature.encode_arguments((value,), {}, JSON)):
        raw = signature.encode_arguments((value,), {}, JSON)
        is_checked = not signature.are_exact((value,), {})
        if not (
            is_checked and is_refused(lambda: signature.check_arguments((value,), {}, raw, JSON))
        ):
            assert signature.decode_arguments(raw, JSON)[0] == (value,)
    if not is_refused(lambda: JSON.encode(value)) and "float" not in str(annotation):
        try:  # the reader names the type
            back = JSON.decode(JSON.encode(value), annotation)
        except PayloadError:
            return
        assert len(back) == len(value) if isinstance(value, dict) else back == value


def is_refused(call: Any) -> bool:
    try:
        call()
    except PayloadError:
        return True
    return False


AMSTERDAM_1930 = datetime.datetime(
    1930, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(minutes=19, seconds=32))
)


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        (datetime.datetime, AMSTERDAM_1930, r"it: datetime.* astimezone\(UTC\)"),
        (datetime.time, AMSTERDAM_1930.timetz(), r"it: datetime.time.* astimezone\(UTC\)"),
        (list[datetime.datetime], [AMSTERDAM_1930], r"it\[0\]: datetime.* astimezone"),
        (float, 2**64 - 1, "it: 18446744073709551615 would come back as 1.8.*annotate int"),
        (dict[int | str, int], {1: 1, "1": 2}, "it: the key 1 would not come back"),
        (frozenset[Frozen], frozenset({Wider(1, 2)}), "it: frozenset.* would come back as"),
    ],
)
def test_a_value_that_json_changes_is_refused_with_a_way_out(annotation, value, place):
    with pytest.raises(PayloadError, match=f"^{place}"):
        JSON.encode(value, where="it", fits=annotation)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"at": [AMSTERDAM_1930]}, r"it\['at'\]\[0\]: datetime.* astimezone"),
        ({AMSTERDAM_1930: 1}, r"it key .*: datetime.* astimezone"),
        (Box(AMSTERDAM_1930), r"it\.content: datetime.* astimezone"),
        ({"a": {1: 2, "1": 3}}, r"it\['a'\]: the keys 1 and '1' are the same name in JSON"),
        ({ID: 2, str(ID): 3}, "it: the keys UUID.* are the same name in JSON"),
    ],
)
def test_a_value_that_no_type_reads_back_is_refused_if_no_type_is_known(value, place):
    with pytest.raises(PayloadError, match=f"^{place}"):
        JSON.encode(value, where="it")


def test_keys_of_one_class_are_taken_if_no_type_is_known():
    assert JSON.decode(JSON.encode({1: 2, 3: 4}), dict[int, int]) == {1: 2, 3: 4}


class Raising:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@dataclasses.dataclass
class Hostile:
    number: int

    def __getattribute__(self, name: str) -> Any:
        if name == "number":
            raise RuntimeError("not to be read")
        return super().__getattribute__(name)


LONG = "x" * 10_000_000


REFUSED = {
    "integer": 10**5000,
    "integer in a list": [10**5000],
    "integer as a key": {10**5000: 1},
    "repr that raises": {"a": Raising()},
    "text": LONG + "\ud800",
    "key": {LONG: float("nan")},
    "path": {LONG: {LONG: {LONG: object()}}},
    "list": [LONG, object],
    "attribute that raises": Hostile(1),
    "tuple as a key": {(LONG,): 1},
    "integer in a field": Box(10**5000),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("annotation", [None, Any, int, Box])
def test_every_refusal_is_a_payload_error_of_bounded_length(case, annotation):
    value = REFUSED[case]

    with pytest.raises(PayloadError) as caught:
        JSON.encode(value, fits=annotation)

    assert len(str(caught.value)) < 2_000


def test_a_number_of_too_many_digits_is_named_with_a_way_out():
    with pytest.raises(PayloadError, match=r"^it\[0\]: <int of 16610 bits>: .* pass its hex\(\)"):
        JSON.encode([10**5000], where="it")


class Widget:
    pass


@dataclasses.dataclass
class Holder:
    widgets: list[Widget]


@dataclasses.dataclass
class Tree:
    children: list["Tree"]
    model: Model | None = None


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (Widget, "Widget"),
        (list[Widget], "Widget"),
        (Holder, "Widget"),
        (collections.Counter, "Counter"),
        (collections.defaultdict[str, int], "defaultdict"),
        (complex, "complex"),
        (typing.Iterable[int], "Iterable"),
    ],
)
def test_a_class_that_nothing_can_be_read_as_is_refused_in_an_annotation(annotation, name):
    def fn(it): ...

    fn.__annotations__["it"] = annotation
    with pytest.raises(PayloadError, match=rf"argument 'it' of activity 'fn'.*{name}"):
        Runtime("memory:", [activity(fn)])


@dataclasses.dataclass
class Optional:
    widget: Widget | None = None


@pytest.mark.parametrize(
    "annotation", [Optional, Tree, Any, object, Model, typing.Mapping[str, Payment]]
)
def test_other_annotations_are_taken(annotation):
    JSON.check_type(annotation, where="it")
