"""Exceptions as records that can be stored: bounded in size and always valid Unicode."""

from __future__ import annotations

import traceback

from perdure.limits import ERROR_TEXT_CHARACTERS_MAX
from perdure.model.failures import Category, Failure


def failure_from(error: BaseException, attempts: int) -> Failure:
    return Failure(
        category=Category.TIMEOUT if isinstance(error, TimeoutError) else Category.APPLICATION,
        type_name=type(error).__name__,
        message=_storable(str(error))[:ERROR_TEXT_CHARACTERS_MAX],
        lineage=tuple(kind.__name__ for kind in type(error).__mro__ if kind is not object),
        traceback=_storable("".join(traceback.format_exception(error)))[
            -ERROR_TEXT_CHARACTERS_MAX:
        ],
        attempts=attempts,
    )


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
