"""Handlers as objects: names, versions, arguments as JSON, plain calls outside."""

import asyncio
import dataclasses
import enum
import subprocess
import sys
import textwrap
import threading
from decimal import Decimal
from typing import Any, NoReturn

import pytest

from perdure import Retry, activity, orchestration
from perdure.authoring.definitions import parse_version
from perdure.codec import JSON
from perdure.errors import InvalidValue, NotInOrchestration, PayloadError, UsageError


@dataclasses.dataclass
class Order:
    id: str
    cents: int = 0


class Size(enum.Enum):
    SMALL = "s"


class Count(enum.IntEnum):
    ONE = 1


@activity
def charge(order: Order, size: Size = Size.SMALL, *, tip: Decimal | None = None) -> Order:
    """Take the money."""
    return dataclasses.replace(order, cents=order.cents + int(tip or 0))


@activity
async def ship(order: str) -> str:
    return f"shipped {order}"


@orchestration(version="1.2.3")
async def checkout(order: str) -> str:
    return await ship(order)


def test_a_handler_keeps_the_name_and_the_words_of_its_function():
    assert charge.name == "charge"
    assert charge.__name__ == "charge"
    assert charge.__doc__ == "Take the money."
    assert checkout.version == "1.2.3"
    assert (charge.is_async, ship.is_async) == (False, True)


def test_called_outside_an_activity_is_its_plain_function():
    assert charge(Order("a", 5), tip=Decimal(2)) == Order("a", 7)
    assert asyncio.run(ship("a")) == "shipped a"


def test_an_activity_called_from_an_activity_runs_inline():
    @activity
    async def outer() -> str:
        return await ship("inner")

    assert asyncio.run(outer()) == "shipped inner"


def test_called_outside_an_orchestration_says_how_to_start_it():
    with pytest.raises(NotInOrchestration, match=r"runtime.start\(checkout, ...\)"):
        checkout("a")


def test_arguments_are_an_array_in_the_order_of_the_parameters():
    raw = charge.signature.encode_arguments((Order("a", 5),), {"tip": Decimal("1.50")}, JSON)

    assert bytes(raw) == b'[{"id":"a","cents":5},"s","1.50"]'
    args, kwargs = charge.signature.decode_arguments(raw, JSON)
    assert args == (Order("a", 5), Size.SMALL)
    assert kwargs == {"tip": Decimal("1.50")}


def test_arguments_left_out_at_the_end_are_not_written():
    raw = charge.signature.encode_arguments((), {"order": Order("a")}, JSON)

    assert bytes(raw) == b'[{"id":"a","cents":0}]'
    assert charge.signature.decode_arguments(raw, JSON) == ((Order("a"), Size.SMALL), {"tip": None})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "activity 'ship': missing a required argument: 'order'"),
        (("a", "b"), {}, "activity 'ship': too many positional arguments"),
        (("a",), {"x": 1}, "activity 'ship': got an unexpected keyword argument 'x'"),
        (("a",), {"order": 1}, "activity 'ship': multiple values for argument 'order'"),
    ],
)
def test_wrong_arguments_are_told_at_the_call(args, kwargs, message):
    with pytest.raises(TypeError) as caught:
        ship.signature.encode_arguments(args, kwargs, JSON)

    assert str(caught.value) == f"{message}; its parameters are (order)"


def test_an_argument_that_is_no_json_is_told_with_its_place():
    with pytest.raises(PayloadError, match=r"arguments \(order\) of activity 'ship'\[0\]"):
        ship.signature.encode_arguments((object(),), {}, JSON)


@pytest.mark.parametrize("text", [b"[]", b'["a","b"]', b"[5]", b"{}", b"[", b"null"])
def test_recorded_arguments_that_do_not_fit_are_told(text):
    with pytest.raises(PayloadError, match=r"arguments \(order\) of activity 'ship'"):
        ship.signature.decode_arguments(text, JSON)


def test_a_required_keyword_after_defaults_is_written_with_the_defaults():
    @activity
    def odd(a: int = 1, *, b: int) -> int:
        return a + b

    raw = odd.signature.encode_arguments((), {"b": 2}, JSON)

    assert bytes(raw) == b"[1,2]"
    assert odd.signature.decode_arguments(raw, JSON) == ((1,), {"b": 2})
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'b'"):
        odd.signature.encode_arguments((1,), {}, JSON)


@pytest.mark.parametrize("default", [[], [[1]], {"a": []}, {1}, bytearray(b"x"), Order("a")])
def test_every_call_gets_its_own_copy_of_a_mutable_default(default):
    @activity
    def collect(given: Any = default) -> None: ...

    first, _ = collect.signature.decode_arguments(b"[]", JSON)
    second, _ = collect.signature.decode_arguments(b"[]", JSON)

    assert first[0] == second[0] == default
    assert first[0] is not default
    assert first[0] is not second[0]


@pytest.mark.parametrize("default", [object(), Size.SMALL, str, threading.Lock(), "text", (1, 2)])
def test_a_default_that_is_known_by_its_identity_stays_itself(default):
    @activity
    def collect(given: Any = default) -> None: ...

    assert collect.signature.decode_arguments(b"[]", JSON)[0][0] is default


def test_results_are_read_by_the_return_annotation():
    raw = charge.signature.encode_result(Order("a", 3), JSON)

    assert charge.signature.decode_result(raw, JSON) == Order("a", 3)
    with pytest.raises(PayloadError, match="result of activity 'charge'"):
        charge.signature.decode_result(b"[1]", JSON)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (int, [1, 2**70, Count.ONE], [None, "1", 1.5, True]),
        (float, [1.5, 1], ["1", None]),
        (str, ["a"], [1, None]),
        (bool, [True], [1, None]),
        (None, [None], [0, ""]),
        (int | None, [1, None], ["a"]),
        (list[int], [[1], (1, 2), []], [["a"], None, {"a": 1}]),
        (Order, [Order("a"), {"id": "b"}], [Order(5), None, {"cents": 1}]),  # type: ignore[arg-type]
        (Size, [Size.SMALL, "s"], ["large"]),
        (Any, [None, 1, [{"a": (1, 2)}]], [[Order("a")]]),
        (object, [None, 1, [{"a": (1, 2)}]], [[Order("a")]]),
        (NoReturn, [None, 1], []),
        (dict[str, object], [{"a": [None, {"b": 1}]}], [[]]),
    ],
)
def test_a_result_that_does_not_fit_its_annotation_is_refused_when_written(
    annotation, right, wrong
):
    def fn(): ...

    fn.__annotations__["return"] = annotation
    signature = activity(fn).signature

    for value in right:
        signature.decode_result(signature.encode_result(value, JSON), JSON)
    for value in wrong:
        with pytest.raises(PayloadError, match=r"^result of activity 'fn'"):
            signature.encode_result(value, JSON)


def test_without_annotations_any_json_goes():
    @activity
    def loose(value):
        return value

    @activity
    def open_minded(value: object) -> object:
        return value

    assert open_minded.signature.decode_arguments(b"[[1]]", JSON) == (([1],), {})
    assert open_minded.signature.decode_result(b"[1]", JSON) == [1]
    assert loose.signature.decode_arguments(b'[{"a":[1]}]', JSON) == (({"a": [1]},), {})
    assert loose.signature.decode_result(b'{"a":1}', JSON) == {"a": 1}


def test_an_annotation_that_cannot_be_resolved_is_named():
    @activity
    def vague(value: "Missing") -> None: ...  # noqa: F821

    with pytest.raises(UsageError, match=r"an annotation of activity 'vague'.*Missing"):
        vague.signature.decode_arguments(b"[1]", JSON)


def test_handlers_with_variable_parameters_are_refused():
    with pytest.raises(UsageError, match=r"takes \*rest"):

        @activity
        def variable(*rest: int) -> None: ...

    with pytest.raises(UsageError, match=r"takes \*\*rest"):

        @activity
        def named(**rest: int) -> None: ...


@pytest.mark.parametrize("thing", [5, print, int, "text", object()])
def test_only_plain_functions_become_handlers(thing):
    with pytest.raises(UsageError, match="takes a plain function"):
        activity(thing)


def test_generators_and_sync_orchestrations_are_refused():
    with pytest.raises(UsageError, match="must be an async def"):

        @orchestration
        def plain() -> None: ...

    with pytest.raises(UsageError, match="must be an async def"):

        @orchestration
        async def numbers():
            yield 1

    with pytest.raises(UsageError, match="is a generator"):

        @activity
        def values():
            yield 1


@pytest.mark.parametrize(
    "version", ["1", "1.0", "1.0.0.0", "v1.0.0", "1.0.x", "01.0.0", "", 1, None]
)
def test_a_version_has_three_numbers(version):
    with pytest.raises(InvalidValue, match=r"MAJOR.MINOR.PATCH"):
        orchestration(version=version)(checkout.fn)


def test_versions_compare_as_numbers():
    assert parse_version("1.10.0") > parse_version("1.9.9")


@pytest.mark.parametrize("name", ["", " ", "x" * 256, "a\nb"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(InvalidValue):
        activity(name=name)(ship.fn)


def test_options_make_a_copy_and_none_takes_one_away():
    bounded = charge.options(timeout=5, retry=Retry(max_attempts=2), tag="gpu")
    freed = bounded.options(retry=None)

    assert charge.settings.timeout is None
    assert (bounded.settings.timeout, bounded.settings.tag) == (5, "gpu")
    assert (freed.settings.timeout, freed.settings.retry) == (5, None)
    assert freed.bounds == (None, 5000, None, None)
    assert bounded.bounds[0].max_attempts == 2
    assert bounded.fn is charge.fn


def test_orchestration_options_are_checked():
    bound = checkout.options(id="x", version="2.0.0", on_parent_close="abandon")

    assert (bound.call.id, bound.call.version, bound.version) == ("x", "2.0.0", "1.2.3")
    for wrong in ({"id": ""}, {"version": "2"}, {"on_parent_close": "forget"}):
        with pytest.raises(InvalidValue):
            checkout.options(**wrong)


def test_an_async_activity_takes_no_executor():
    with pytest.raises(UsageError, match="runs on the event loop"):
        activity(executor="thread")(ship.fn)


# --- fingerprints

SOURCE = """
from perdure import activity, orchestration

FEE = {fee}
SIZES = ("a", "b")

def helper(x):
    return x in {{"a", "b", "c"}}

@activity
def step(n: int) -> int:
    return n

@orchestration
async def code() -> int:
    return [await step(FEE) for _ in SIZES if helper("a")] and {result}

print(code.fingerprint)
"""


def fingerprint_of(tmp_path, hash_seed="0", padding="", **values) -> str:
    path = tmp_path / "module.py"
    path.write_text(padding + textwrap.dedent(SOURCE).format(**{"fee": 1, "result": 2} | values))
    answer = subprocess.run(
        [sys.executable, str(path)],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()


def test_a_fingerprint_is_the_same_in_every_process_and_blind_to_line_numbers(tmp_path):
    first = fingerprint_of(tmp_path)

    assert fingerprint_of(tmp_path, hash_seed="77", padding="# moved\n\n\n") == first


def test_a_fingerprint_changes_with_the_code_its_helpers_and_its_constants(tmp_path):
    first = fingerprint_of(tmp_path)

    assert fingerprint_of(tmp_path, fee=2) != first
    assert fingerprint_of(tmp_path, result=3) != first
