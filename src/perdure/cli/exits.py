"""Exit codes, and the one-line message for an error."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from perdure import errors

if TYPE_CHECKING:
    from collections.abc import Sequence


class Exit(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    FAILED = 4
    """The instance did not end well."""
    TIMED_OUT = 5
    REFUSED = 6
    """The instance is in the wrong state, or the store refuses."""
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """The reader of the output closed the pipe; the code is that of other Unix tools."""


_CODES: Sequence[tuple[tuple[type[BaseException], ...], Exit]] = (
    ((errors.NotFound,), Exit.NOT_FOUND),
    ((errors.RemoteFailure,), Exit.FAILED),
    ((errors.WaitTimeout,), Exit.TIMED_OUT),
    (
        (
            errors.AlreadyExists,
            errors.AlreadyResolved,
            errors.InstanceFinished,
            errors.InstanceStillRunning,
            errors.NotARoot,
            errors.QueueFull,
            errors.RequestRejected,
            errors.TreeChanged,
            errors.StoreBusy,
            errors.StoreRefused,
            errors.LockLost,
        ),
        Exit.REFUSED,
    ),
    ((errors.UsageError,), Exit.USAGE),
)


def code_of(error: BaseException) -> Exit:
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return Exit.ERROR


def line_of(error: BaseException) -> str:
    """Return the message of an error that Perdure or the system raised."""
    if isinstance(error, errors.ProviderError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        where = f" {error.filename!r}:" if error.filename else ""
        text = f"{where} {error.strerror}".strip()
    else:
        text = str(error)
    return text or type(error).__name__


def is_expected(error: BaseException) -> bool:
    """Return False for an error that is a defect of Perdure."""
    return isinstance(error, (errors.PerdureError, OSError)) and not isinstance(
        error, errors.InternalError
    )
