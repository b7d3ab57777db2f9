"""The record of an attempt that failed."""

from __future__ import annotations

import msgspec

from perdure.engine.failures import describe_exception
from perdure.errors import PerdureError
from perdure.model.failures import Category, Failure


class NotBegun(PerdureError):
    """The worker itself is short of something, so the code was not called. It may be later."""


class RecordedFailure(Exception):
    """An exception that cannot be raised here, because it is of a child process or would end
    this one: its record stands for it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def failure_from(error: BaseException, attempts: int) -> Failure:
    category = Category.TIMEOUT if isinstance(error, TimeoutError) else Category.APPLICATION
    return msgspec.structs.replace(describe_exception(error), category=category, attempts=attempts)
