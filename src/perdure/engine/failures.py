"""Exceptions to recorded failures and back."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, cast

from perdure import errors
from perdure.limits import ERROR_TEXT_CHARACTERS_MAX
from perdure.model.failures import Category, Failure

if TYPE_CHECKING:
    from collections.abc import Iterator


def describe_exception(error: BaseException) -> Failure:
    """What is stored of an exception: text that is valid Unicode and of bounded length."""
    return Failure(
        category=Category.APPLICATION,
        type_name=type(error).__name__,
        message=_clean(_message(error)),
        lineage=tuple(kind.__name__ for kind in type(error).__mro__ if kind is not object),
        traceback=_clean(_traceback(error)),
    )


def activity_error(failure: Failure, name: str) -> errors.ActivityFailed:
    """What the code sees when an activity has failed for good."""
    error = errors.ActivityFailed(
        f"activity {name!r}: {failure}",
        message=failure.message,
        type_name=failure.type_name,
        traceback=failure.traceback,
        lineage=failure.lineage,
    )
    error.add_note(_note("activity", name, failure))
    return error


def child_error(failure: Failure, name: str) -> errors.RemoteFailure:
    """What the code sees when a child orchestration did not complete."""
    kinds: dict[Category, type[errors.RemoteFailure]] = {
        Category.CANCELLED: errors.OrchestrationCancelled,
        Category.TERMINATED: errors.OrchestrationTerminated,
    }
    error = kinds.get(failure.category, errors.OrchestrationFailed)(
        f"orchestration {name!r}: {failure}",
        message=failure.message,
        type_name=failure.type_name,
        traceback=failure.traceback,
        lineage=failure.lineage,
    )
    error.add_note(_note("orchestration", name, failure))
    return error


def _note(kind: str, name: str, failure: Failure) -> str:
    head = f"{kind} {name!r} failed with {failure}"
    return f"{head}\n{failure.traceback}" if failure.traceback else head


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001
        return f"(its message cannot be read: {type(second).__name__})"
    leaves = list(_leaves(error))
    if leaves != [error]:
        named = "; ".join(f"{type(leaf).__name__}: {_message(leaf)}" for leaf in leaves)
        return f"{text}: {named}"
    return text


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside of groups, or the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
        yield from _leaves(member)


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as second:  # noqa: BLE001
        return f"(its traceback cannot be written: {type(second).__name__})"


def _clean(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= ERROR_TEXT_CHARACTERS_MAX:
        return text
    half = ERROR_TEXT_CHARACTERS_MAX // 2 - 20
    return f"{text[:half]}\n... (shortened) ...\n{text[-half:]}"
