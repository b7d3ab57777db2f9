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

from perdure import Runtime, activity
from perdure.codec import JSON, is_plain
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
        (Growing, Growing([1])),
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
        (bytes, bytearray(b"a")),
        (list[datetime.datetime], [WHEN]),
        (dict[str, decimal.Decimal], {"a": decimal.Decimal("1.50")}),
        (uuid.UUID, ID),
    ],
)
def test_what_comes_back_is_taken(annotation, value):
    JSON.encode(value, fits=annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
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


@pytest.mark.parametrize(
    "annotation",
    [
        str,
        int | None,
        float | str,
        list[int],
        tuple[int, ...],
        dict[str, list[bytes]],
        Colour,
        typing.Literal["a", "b"],
        typing.Annotated[int, "a number"],
        typing.Annotated[int, {"unit": "cents"}],
        list[typing.Annotated[int, []]],
        datetime.datetime,
    ],
)
def test_annotations_that_leave_nothing_open_are_plain(annotation):
    assert is_plain(annotation)


@pytest.mark.parametrize(
    "annotation",
    [Any, object, list, dict, list[Any], Payment, Shape | None, str | datetime.datetime, Options],
)
def test_other_annotations_are_not_plain(annotation):
    assert not is_plain(annotation)


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
