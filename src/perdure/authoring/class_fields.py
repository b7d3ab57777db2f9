"""Annotations and defaults as the several kinds of record classes keep them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import TYPE_CHECKING, Any, cast

from perdure.pydantic_models import is_model

if TYPE_CHECKING:
    from collections.abc import Iterator


def annotations_of(value: Any) -> dict[str, Any]:
    """Own annotations, as they were written; empty where they cannot be had."""
    try:
        return inspect.get_annotations(value)
    except Exception:  # noqa: BLE001  # evaluated late, by code of the author's
        return {}


def fields_of(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Names and defaults of the fields, or the members of an enumeration."""
    if issubclass(kind, enum.Enum):
        for name, member in kind.__members__.items():
            yield name, member.value
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            yield field.name, (field.default, field.default_factory)
    else:
        yield from _foreign_fields(cast("Any", kind))


def _foreign_fields(kind: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(kind, "__struct_fields__"):  # msgspec
        yield from zip(
            reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False
        )
    elif hasattr(kind, "__attrs_attrs__"):
        for attribute in kind.__attrs_attrs__:
            yield attribute.name, attribute.default
    elif is_model(kind):
        for name, field in kind.model_fields.items():
            yield name, (field.is_required(), field.default, field.default_factory, field.alias)
