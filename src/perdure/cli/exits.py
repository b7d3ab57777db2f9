"""Exit codes, and the one-line message for an error."""

from __future__ import annotations

from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

from perdure import errors

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path


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


@contextmanager
def writing(path: Path, command: str) -> Generator[None]:
    """Let an error of the system name the path that the user has named, not a draft beside it."""
    try:
        yield
    except FileExistsError:
        raise errors.AlreadyExists(f"{str(path)!r} exists already; name a new place") from None
    except OSError as error:
        why = f"cannot write {str(path)!r}: {error.strerror}; name a place that can be written"
        raise errors.StoreUnavailable(command, why) from error


def is_expected(error: BaseException) -> bool:
    """Return False for an error that is a defect of Perdure."""
    return isinstance(error, (errors.PerdureError, OSError)) and not isinstance(
        error, errors.InternalError
    )
