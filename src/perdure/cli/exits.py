"""Exit codes, and the one line that an error becomes."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from perdure import errors

if TYPE_CHECKING:
    from collections.abc import Sequence


class Exit(IntEnum):
    """The same for every command."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    FAILED = 4
    """The instance did not end well."""
    TIMED_OUT = 5
    REFUSED = 6
    """The state is not what the command needs, or the store refuses."""
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """Whoever read the output went away; as for any Unix tool."""


_CODES: Sequence[tuple[tuple[type[BaseException], ...], Exit]] = (
    ((errors.NotFound,), Exit.NOT_FOUND),
    ((errors.RemoteFailure,), Exit.FAILED),
    ((errors.WaitTimeout,), Exit.TIMED_OUT),
    (
        (
            errors.AlreadyExists,
            errors.InstanceFinished,
            errors.InstanceStillRunning,
            errors.NotARoot,
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
    """What went wrong and what to do, for an error that we or the system raised."""
    if isinstance(error, errors.ProviderError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        where = f" {error.filename!r}:" if error.filename else ""
        text = f"{where} {error.strerror}".strip()
    else:
        text = str(error)
    return text or type(error).__name__


def is_expected(error: BaseException) -> bool:
    """Whether the line says enough; anything else is a defect of ours."""
    return isinstance(error, (errors.PerdureError, OSError)) and not isinstance(
        error, errors.InternalError
    )
