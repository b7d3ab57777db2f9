"""Values that the payload codec takes, gives back and refuses."""

import builtins
import dataclasses
import datetime
import decimal
import enum
import random
import subprocess
import sys
import textwrap
import uuid
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic
import pytest

from perdure.codec import JSON, Codec, PayloadContext
from perdure.errors import CannotUnwrap, PayloadError


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Named:
    colour: Colour


@dataclasses.dataclass
class Line:
    price: decimal.Decimal
    when: datetime.datetime
    tags: frozenset[str] = frozenset()


class Order(pydantic.BaseModel):
    number: int
    lines: list[str] = []


@attrs.define
class Point:
    x: int
    y: float


class Pair(NamedTuple):
    left: int
    right: str


class Shape(TypedDict):
    sides: int


class Node(msgspec.Struct):
    value: Any
    children: list["Node"] = []


NOW = datetime.datetime(2026, 11, 15, 12, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (None, None),
        (True, bool),
        (2**80, int),
        (0.1, float),
        ("é\u0000\U0001f600", str),
        (b"\x00\xff", bytes),
        ((1, "a"), tuple[int, str]),
        ({1, 2}, set[int]),
        ({1: "a"}, dict[int, str]),
        (Colour.RED, Colour),
        (decimal.Decimal("1.10"), decimal.Decimal),
        (uuid.UUID(int=7), uuid.UUID),
        (NOW, datetime.datetime),
        (datetime.timedelta(seconds=3), datetime.timedelta),
        (Line(decimal.Decimal(1), NOW, frozenset({"a"})), Line),
        (Order(number=3, lines=["x"]), Order),
        ([Order(number=3)], list[Order]),
        (Point(1, 2.0), Point),
        (Pair(1, "b"), Pair),
        ({"sides": 4}, Shape),
        (Node(1, [Node("x")]), Node),
        ([1, None, {"a": []}], Any),
    ],
)
def test_a_value_comes_back_as_it_went_in(value, type_):
    assert JSON.decode(JSON.encode(value), type_) == value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"items": [1, {"price": float("nan")}]}, "order['items'][1]['price']"),
        ([float("inf")], "order[0]"),
        (["fine", "\ud800"], "order[1]"),
        (Line(decimal.Decimal(1), object()), "order.when"),  # type: ignore[arg-type]
        (Node(1, [Node(object())]), "order.children[0].value"),
        (lambda: 1, "order"),
    ],
)
def test_what_would_not_come_back_is_refused_with_its_path(value, place):
    with pytest.raises(PayloadError) as refused:
        JSON.encode(value, where="order")

    assert str(refused.value).startswith(place + ":")


def test_nesting_is_bounded():
    value: list[Any] = []
    for _ in range(150):
        value = [value]

    with pytest.raises(PayloadError, match="deeper than 100"):
        JSON.encode(value)


def test_size_is_bounded_and_the_way_out_is_named():
    with pytest.raises(PayloadError, match="pass a reference"):
        JSON.encode("x" * 2_000_000)


def test_json_that_does_not_fit_the_annotation_names_the_place():
    with pytest.raises(PayloadError, match=r"result: Expected `int`, got `str` - at `\$\[1\]`"):
        JSON.decode(msgspec.Raw(b'[1,"x"]'), list[int], where="result")


def test_a_pydantic_model_that_does_not_validate_is_a_payload_error():
    with pytest.raises(PayloadError, match="number"):
        JSON.decode(msgspec.Raw(b'{"number":"x"}'), Order)


class Squeeze:
    name = "zlib"

    def wrap(self, data: bytes, context: PayloadContext) -> bytes:
        return zlib.compress(data)

    def unwrap(self, data: bytes, context: PayloadContext) -> bytes:
        return zlib.decompress(data)


class Bound:
    """Opens a payload only in the place for which it was sealed."""

    name = "bound"

    def wrap(self, data: bytes, context: PayloadContext) -> bytes:
        return f"{context.instance_id}|{context.field}|".encode() + data

    def unwrap(self, data: bytes, context: PayloadContext) -> bytes:
        head, field, rest = data.split(b"|", 2)
        if (head.decode(), field.decode()) != tuple(context):
            raise ValueError("it belongs elsewhere")
        return rest


HERE = PayloadContext("x", "input")


def test_a_transform_seals_the_bytes_and_is_named_in_what_is_stored():
    codec = Codec(Squeeze())
    data = bytes(codec.encode(["a"] * 100))
    sealed = codec.seal(data, HERE)

    assert sealed.startswith(b'{"$perdure":"zlib"')
    assert codec.open(sealed, HERE) == data == b'["a"' + b',"a"' * 99 + b"]"


def test_the_last_transform_is_applied_last_and_undone_first():
    codec = Codec(Squeeze(), Bound())
    sealed = codec.seal(b"[1]", HERE)

    assert sealed.startswith(b'{"$perdure":"bound"')
    assert codec.open(sealed, HERE) == b"[1]"


@pytest.mark.parametrize("place", [PayloadContext("y", "input"), PayloadContext("x", "output")])
def test_a_payload_in_another_place_is_not_opened_and_says_why(place):
    codec = Codec(Bound())
    sealed = codec.seal(b"1", HERE)

    left = codec.open(sealed, place)

    with pytest.raises(CannotUnwrap, match=r"result was written with .*'bound'.*belongs"):
        codec.decode(msgspec.Raw(left), where="result")
    assert codec.seal(left, place) == sealed, "what is written back is what was stored"


def test_a_payload_that_is_damaged_stays_as_it_is():
    assert Codec(Squeeze()).open(b'{"$perdure":1}', HERE) == b'{"$perdure":1}'
    with pytest.raises(PayloadError, match=r"\$perdure"):
        JSON.decode(msgspec.Raw(b'{"$perdure":1}'))


@pytest.mark.parametrize(("transform", "size"), [(Bound(), 700), (Squeeze(), 30_000)])
def test_the_limit_of_a_payload_is_that_of_what_is_stored(transform, size):
    codec = Codec(transform, payload_bytes_max=1024)

    stored = codec.seal(bytes(codec.encode("x" * size)), PayloadContext("", ""))

    assert len(stored) <= 1024
    with pytest.raises(PayloadError, match="at most 1024 are allowed"):
        codec.encode(random.Random(1).randbytes(800).hex())


def test_a_value_that_was_not_awaited_says_so():
    async def price():
        return 1

    forgotten = price()
    with pytest.raises(PayloadError, match=r"result\[0\]: .* was not awaited; write await"):
        JSON.encode([forgotten], where="result")
    forgotten.close()


def test_a_payload_of_an_unknown_transform_is_refused_by_name():
    sealed = Codec(Squeeze()).seal(b"1", HERE)

    with pytest.raises(CannotUnwrap, match=r"'zlib'.* no such transform; it has: none"):
        JSON.decode(msgspec.Raw(sealed))


def test_a_value_that_looks_like_a_wrapped_payload_is_refused():
    with pytest.raises(PayloadError, match="reserved"):
        JSON.encode({"$perdure": "zlib", "data": ""})


# --- pydantic models


class Aliased(pydantic.BaseModel):
    user_id: int = pydantic.Field(alias="userId")


class NamedOnly(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    user_id: int = pydantic.Field(validation_alias="id", serialization_alias="ID")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    when: datetime.datetime
    price: decimal.Decimal
    key: uuid.UUID


class Computed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    width: int

    @pydantic.computed_field
    @property
    def area(self) -> int:
        return self.width**2


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")


class Caching(pydantic.BaseModel):
    url: pydantic.AnyUrl
    note: str | None = None
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)


class Exposed(pydantic.BaseModel):
    pw: pydantic.SecretStr
    note: str | None = None

    @pydantic.field_serializer("pw", when_used="json")
    def expose(self, pw: pydantic.SecretStr) -> str:
        return pw.get_secret_value()


class Base(pydantic.BaseModel):
    name: str


class Derived(Base):
    more: int


class Login(pydantic.BaseModel):
    pw: pydantic.SecretStr


class Hiding(pydantic.BaseModel):
    seen: int
    hidden: int = pydantic.Field(default=0, exclude=True)


class Holder(pydantic.BaseModel):
    members: list[Base] = []
    by_name: dict[str, Any] = {}


class OneWay(pydantic.BaseModel):
    user_id: int = pydantic.Field(validation_alias="id", serialization_alias="ID")


Root = pydantic.RootModel[list[int]]


def caching() -> Caching:
    value = Caching(url="https://example.org/a")
    value._seen.append(1)
    return value


@pytest.mark.parametrize(
    "value",
    [
        Aliased(userId=1),
        NamedOnly(user_id=1),
        Strict(when=NOW, price=decimal.Decimal("1.50"), key=uuid.UUID(int=1)),
        Computed(width=3),
        Open(anything=[1, None], other="x"),
        Exposed(pw="secret"),
        Hiding(seen=1),
        Holder(members=[Base(name="a")], by_name={"a": None}),
        Root([1, 2]),
        Derived(name="a", more=2**70),
    ],
)
def test_a_model_comes_back_as_it_went_in_wherever_it_stands(value):
    kind = type(value)

    assert JSON.decode(JSON.encode(value), kind) == value
    assert JSON.decode(JSON.encode({"a": [value, None]}), dict[str, list[kind | None]]) == {
        "a": [value, None]
    }


def test_the_private_attributes_of_a_model_are_no_data():
    assert JSON.decode(JSON.encode([caching(), None]), list[Caching | None])[0].url == caching().url


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Login(pw="secret"), "it.pw: "),
        (Hiding(seen=1, hidden=2), "it.hidden: 2 would come back as 0"),
        (Holder(members=[Base(name="a"), Derived(name="b", more=1)]), "it.members[1]: "),
        (Holder(by_name={"{}": (1, 2)}), "it.by_name['{}']: (1, 2) would come back as [1, 2]"),
        (OneWay(id=1), "it: "),
        (Base.model_construct(name=5), "it: "),
        (Holder(by_name={"x": float("nan")}), "it.by_name['x']: nan would come back as None"),
    ],
)
def test_a_model_that_would_lose_data_is_refused_with_the_path_and_a_way_out(value, path):
    with pytest.raises(PayloadError) as caught:
        JSON.encode(value, where="it")
    with pytest.raises(PayloadError) as nested:
        JSON.encode({"a": [None, value]}, where="it")

    assert str(caught.value).startswith(path)
    assert "field_serializer" in str(caught.value)
    assert str(nested.value).startswith(path.replace("it", "it['a'][1]", 1))


def test_object_inside_of_a_type_stands_for_any_json_value():
    value = {"a": [None, 1, {"b": "c"}]}

    assert JSON.decode(JSON.encode(value), dict[str, list[object]]) == value
    assert JSON.decode(JSON.encode(value), object) == value


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Path("/srv/a b"), Path),
        (PurePosixPath("x/y"), PurePosixPath),
        ([Path("a"), None], list[Path | None]),
        ({"a": Path()}, dict[str, Path]),
    ],
)
def test_a_path_comes_back(value, type_):
    JSON.check_type(type_, where="x")
    assert JSON.decode(JSON.encode(value, fits=type_), type_) == value


def test_a_path_for_text_and_a_number_for_a_path_are_refused():
    with pytest.raises(PayloadError, match="would come back as"):
        JSON.encode(Path("a"), fits=str)
    with pytest.raises(PayloadError):
        JSON.decode(msgspec.Raw(b"5"), Path)


@pytest.mark.parametrize(
    "type_",
    [
        set[list[str]],
        frozenset[dict[str, int]],
        dict[str, set[set[int]]],
        set[list[int]] | None,
        set[bytearray],
        set[tuple[str, list[str]]],
        set[tuple[tuple[list[str], ...], ...]],
        dict[list[int], int],
        list[dict[tuple[list[int], ...], int]],
    ],
)
def test_a_set_of_members_that_can_change_is_refused_where_it_is_declared(type_):
    with pytest.raises(PayloadError, match="a set cannot hold members of type"):
        JSON.check_type(type_, where="argument 'x'")


@pytest.mark.parametrize(
    "type_",
    [set[str], set[tuple[int, ...]], frozenset[int], list[set[int]], dict[tuple[int, str], int]],
)
def test_a_set_of_members_that_cannot_change_is_taken(type_):
    JSON.check_type(type_, where="argument 'x'")


@dataclasses.dataclass
class Raising:
    error: str

    def __post_init__(self) -> None:
        raise getattr(builtins, self.error)("of the author's code")


@dataclasses.dataclass(frozen=True)
class RaisingHash:
    def __hash__(self) -> int:
        raise RuntimeError("of the author's code")


ERRORS = ["ArithmeticError", "KeyError", "OSError", "RuntimeError", "TypeError", "ValueError"]


@pytest.mark.parametrize(
    ("data", "type_", "cause"),
    [
        *((f'{{"error":"{each}"}}', Raising, getattr(builtins, each)) for each in ERRORS),
        ("[{}]", set[RaisingHash], RuntimeError),
        ("[[1]]", set, TypeError),
        ('[{"a":1}]', set[Any], TypeError),
        ("[[1]]", set[int | list[int]], TypeError),
        ("[[[1]]]", frozenset[tuple[Any, ...]], TypeError),
    ],
)
def test_a_value_that_cannot_be_made_is_a_payload_error_with_its_cause(data, type_, cause):
    with pytest.raises(PayloadError, match=r"^it: .*; got ") as caught:
        JSON.decode(msgspec.Raw(data.encode()), type_, where="it")

    assert isinstance(caught.value.__cause__, cause)


def test_a_lack_of_memory_is_no_fault_of_the_value():
    with pytest.raises(MemoryError):
        JSON.decode(msgspec.Raw(b'{"error":"MemoryError"}'), Raising)


GIANTS = {
    "text": "TEXT",
    "bytes": "TEXT.encode()",
    "member of a list": "[TEXT]",
    "member of a tuple": "{'a': (TEXT,)}",
    "behind many members": "[[1] * 30_000, [1] * 30_000, TEXT]",
    "many numbers": "[1] * 30_000_000",
    "many names": "{str(number): 0 for number in range(3_000_000)}",
    "name": "{TEXT: 1}",
    "set": "[{TEXT}]",
    "frozenset": "frozenset([TEXT])",
    "subclass of list": "MyList([TEXT])",
    "subclass of dict": "MyDict(a=TEXT)",
    "named tuple": "Pair(1, TEXT)",
    "dataclass": "Holder(TEXT)",
    "dataclass with slots": "[Slots(Slots(TEXT))]",
    "attrs class": "Attrs(TEXT)",
    "struct": "Record(TEXT)",
    "enum": "Large.TEXT",
    "path": "PurePath(TEXT)",
    "decimal": "Decimal('1' * (50 * 2**20))",
    "own type": "Own(TEXT)",
}


@pytest.mark.parametrize("shape", GIANTS)
def test_a_giant_value_is_refused_before_it_is_encoded(shape):
    """Msgspec ends the process if it cannot get the memory: so it must not be asked."""
    program = textwrap.dedent(
        f"""
        import collections, dataclasses, enum, resource
        from decimal import Decimal
        from pathlib import PurePath
        import attrs, msgspec
        from perdure import CodecType
        from perdure.codec import Codec
        from perdure.errors import PayloadError

        Holder = dataclasses.make_dataclass("Holder", ["value"])
        Slots = dataclasses.make_dataclass("Slots", ["value"], slots=True)
        Attrs = attrs.make_class("Attrs", ["value"])
        Record = msgspec.defstruct("Record", ["value"])
        Pair = collections.namedtuple("Pair", "first second")
        class MyList(list): pass
        class MyDict(dict): pass
        class Own:
            def __init__(self, value): self.value = value

        TEXT = "x" * (150 * 2**20)
        Large = enum.Enum("Large", [("TEXT", TEXT)])
        own = CodecType(Own, stored_as=str, encode=lambda own: own.value, decode=Own)
        codec = Codec(types=[own])
        value = {GIANTS[shape]}
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        try:
            codec.encode(value, "it")
        except PayloadError as error:
            print(error)
        """
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    # Python 3.13 copies a giant path to split it, for which there is no memory here.
    refusals = ("it has more than 1048576 characters or bytes; store it", "it: MemoryError()")
    assert answer.stdout.startswith(refusals[: 1 + (shape == "path")])


class Sparse(msgspec.Struct, omit_defaults=True):
    a: int = 0
    b: int = 0
    c: int = 0


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        ([1] * 20, list[int]),
        ([""] * 13, list[str]),
        ([Sparse()] * 13, list[Sparse]),
        ({"a": [], "b": {}, "c": None}, dict[str, Any]),
        ([Named(Colour.RED)], list[Named]),
        ([decimal.Decimal("1.5")] * 6, list[decimal.Decimal]),
        ({1, 2, 3}, set[int]),
        (PurePosixPath("a/b/c/d/e/f"), PurePosixPath),
    ],
)
def test_a_value_is_refused_only_if_its_json_is_too_long(value, type_):
    size = len(bytes(JSON.encode(value, fits=type_)))
    Codec(payload_bytes_max=size).encode(value, fits=type_)
    with pytest.raises(PayloadError):
        Codec(payload_bytes_max=size - 1).encode(value, fits=type_)


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Colour.RED, Colour),
        ([Colour.RED], list[Colour]),
        ({"a": Colour.RED}, dict[str, Colour]),
        (Named(Colour.RED), Named),
    ],
)
def test_an_enum_is_as_large_as_its_value(value, type_):
    """Its attributes lead to its class, and from there to the code of the whole program."""
    Codec(payload_bytes_max=20).encode(value, fits=type_)
