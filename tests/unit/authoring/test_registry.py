"""Looking up handlers: exact versions, the latest one, near matches, clashes."""

import dataclasses
import types
from datetime import datetime
from decimal import Decimal
from types import FunctionType
from typing import Annotated, Any, Literal, Never, NoReturn, Self

import pydantic
import pytest

from perdure import activity, orchestration
from perdure.authoring.definitions import Registry
from perdure.errors import InvalidValue, NotRegistered, UsageError


@activity
def charge(order: str) -> str:
    return order


@orchestration
async def checkout() -> None: ...


@orchestration(name="checkout", version="1.10.0")
async def checkout_newer() -> None: ...


@orchestration(name="checkout", version="1.9.0")
async def checkout_between() -> None: ...


def test_the_latest_version_is_the_highest_by_number():
    registry = Registry([checkout, checkout_newer, checkout_between])

    assert registry.resolve_orchestration("checkout", None) is checkout_newer
    assert registry.resolve_orchestration("checkout", "1.0.0") is checkout


def test_a_module_brings_all_its_handlers():
    module = types.ModuleType("shop")
    module.charge, module.checkout, module.other = charge, checkout, 5

    registry = Registry([module])

    assert registry.activity_names == {"charge"}
    assert registry.orchestration_keys == {("checkout", "1.0.0")}


def test_a_single_handler_or_module_needs_no_list():
    assert Registry(charge).activity_names == {"charge"}


def test_an_unknown_name_lists_what_is_near_and_what_is_there():
    registry = Registry([charge, checkout])

    with pytest.raises(NotRegistered) as caught:
        registry.resolve_activity("chrage")
    assert str(caught.value) == (
        "activity 'chrage' is not registered; did you mean 'charge'?; registered: 'charge'"
    )
    with pytest.raises(NotRegistered, match="orchestration 'x' is not registered; registered:"):
        registry.resolve_orchestration("x", None)


def test_an_unknown_version_lists_the_known_ones():
    registry = Registry([checkout, checkout_newer, checkout_between])

    with pytest.raises(NotRegistered, match=r"registered versions: 1.0.0, 1.9.0, 1.10.0"):
        registry.resolve_orchestration("checkout", "3.0.0")


def test_two_handlers_of_one_name_and_version_are_refused_with_both_places():
    @activity(name="charge")
    def other(order: str) -> str:
        return order

    with pytest.raises(UsageError) as caught:
        Registry([charge, other])

    assert str(caught.value).count("test_registry.py:") == 2


def test_two_orchestrations_of_one_name_and_version_are_refused():
    @orchestration(name="checkout")
    async def other() -> None: ...

    with pytest.raises(
        UsageError, match=r"two orchestrations are named 'checkout' in version 1.0.0"
    ):
        Registry([checkout, other])


def test_the_same_handler_twice_or_with_options_is_one_handler():
    assert Registry([charge, charge.options(timeout=5)]).activity_names == {"charge"}


def test_an_annotation_that_cannot_be_resolved_is_told_at_once():
    @activity
    def vague(value: "Missing") -> None: ...  # noqa: F821

    with pytest.raises(UsageError, match="Missing"):
        Registry([vague])


@pytest.mark.parametrize("wrong", [print, 5, "module.name", types.ModuleType("empty")])
def test_what_is_no_handler_is_refused(wrong):
    with pytest.raises(InvalidValue):
        Registry([wrong])


@dataclasses.dataclass
class Ok:
    value: int


@dataclasses.dataclass
class Err:
    why: str


class Model(pydantic.BaseModel):
    name: str


class OtherModel(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    "annotation",
    [Ok | Err, Model | OtherModel, Model | int, Decimal | str, datetime | str, bytes | str,
     list[Ok | Err], dict[str, Ok | Err | None], Self],
)  # fmt: skip
def test_an_annotation_that_can_never_be_read_is_refused_with_its_place_and_a_way_out(annotation):
    async def call(a: int, b: int = 0) -> None: ...

    def variant(**changed: object) -> Any:
        fn = FunctionType(call.__code__, globals(), "call", call.__defaults__)
        fn.__annotations__ = {"a": int, "b": int, "return": None, **changed}
        return fn

    with pytest.raises(UsageError, match=r"^result of activity 'call': .*tag=True"):
        Registry([activity(variant(**{"return": annotation}))])
    with pytest.raises(UsageError, match=r"^argument 'b' of orchestration 'call': .*tag=True"):
        Registry([orchestration(variant(b=annotation))])


@pytest.mark.parametrize(
    "annotation",
    [NoReturn, Never, object, Any, Ok | None, list[Model], Model | None, int | str | None,
     Literal["a", "b"], dict[str, list[Ok]], Annotated[int, "any"]],
)  # fmt: skip
def test_annotations_that_can_be_read_are_taken(annotation):
    async def call() -> None: ...

    call.__annotations__["return"] = annotation

    assert Registry([activity(call), orchestration(call)]).activity_names == {"call"}


def test_a_version_that_cannot_take_over_from_an_older_one_is_told():
    @orchestration(name="loop")
    async def first(n: int) -> None: ...

    @orchestration(name="loop", version="2.0.0")
    async def second(n: int, region: str = "eu") -> None: ...

    @orchestration(name="loop", version="3.0.0")
    async def third(n: int, region: str, *, size: int) -> None: ...

    assert list(Registry([first, second, checkout, checkout_newer]).incompatible_versions()) == []
    told = list(Registry([third, second, first]).incompatible_versions())
    assert [text[:62] for text in told] == [
        "orchestration 'loop' 3.0.0 requires 'region', which 1.0.0 does",
        "orchestration 'loop' 3.0.0 requires 'size', which 2.0.0 does n",
    ]
