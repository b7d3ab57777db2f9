"""The record of an attempt that failed."""

from __future__ import annotations

import msgspec

from perdure.engine.failures import describe_exception
from perdure.model.failures import Category, Failure


def failure_from(error: BaseException, attempts: int) -> Failure:
    category = Category.TIMEOUT if isinstance(error, TimeoutError) else Category.APPLICATION
    return msgspec.structs.replace(describe_exception(error), category=category, attempts=attempts)
