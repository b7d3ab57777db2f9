"""Every exception that the package raises on purpose, grouped by cause.

The module imports no other module of the package, so every layer can raise and catch these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN_CHARACTERS: Final = 200


def shown(value: Any) -> str:
    """Return the repr of a value for a message, cut to a bounded length."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - code of the author; an integer of thousands of digits
        if isinstance(value, int):
            return f"<int of {value.bit_length()} bits>"
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return the end of a message that names the most similar words, or an empty text."""
    import difflib  # only for a mistake

    near = difflib.get_close_matches(word, known, n=most)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


class PerdureError(Exception):
    """Base of every exception that the package raises on purpose."""


class UsageError(PerdureError):
    """The calling program is wrong: the message says what to change."""


class InvalidValue(UsageError, ValueError):
    """An argument is refused before anything is written."""


class PayloadError(UsageError, TypeError):
    """A value cannot be written as JSON, or JSON does not fit the annotated type."""


class LimitReached(PerdureError):
    """A turn would exceed a limit of the system. Its instance is Blocked with this reason."""


class CannotUnwrap(PayloadError):
    """The codec lacks the transform that wrapped the data, or the transform fails on it.

    The data is intact and another codec may read it. So nothing fails: an orchestration is Blocked,
    and an activity is left to other workers.
    """


class NotRegistered(UsageError, LookupError):
    """No handler of this runtime has that name or version."""


class NotInOrchestration(UsageError, RuntimeError):
    """A function that works only inside an orchestration was called outside of one."""


class ForbiddenInOrchestration(UsageError, RuntimeError):
    """Real I/O, threads, foreign futures or blocking calls inside an orchestration."""


class NotFound(PerdureError, LookupError):
    """No instance, execution, event or message has that id."""


class AlreadyResolved(PerdureError):
    """The promise has got another answer before."""


class PromiseRejected(PerdureError):
    """The promise was rejected. The message is the reason."""


class RequestRejected(PerdureError):
    """The asked instance has rejected the request. The message is the reason."""


class CompensationFailed(PerdureError):
    """A saga could not undo all that was done. The message names what failed."""


class AlreadyExists(PerdureError):
    """An instance with that id exists and the caller asked for a fresh one."""


class InstanceFinished(PerdureError):
    """The instance has ended, so it accepts no more events, messages or cancellations."""


class QueueFull(PerdureError):
    """The mailbox of the instance is full: it has to read some events and messages first."""


class InstanceStillRunning(PerdureError):
    """The instance must end first, or the call must be forced."""


class NotARoot(PerdureError):
    """A child is deleted with its root, never alone."""


class TreeChanged(PerdureError):
    """A child exists that the call did not name; read the tree again and repeat."""


class WaitTimeout(PerdureError, TimeoutError):
    """The timeout of a wait has passed; the work goes on."""


class RemoteFailure(PerdureError):
    """Base of recorded failures of activities and orchestrations."""

    def __init__(
        self,
        text: str,
        *,
        message: str | None = None,
        type_name: str = "",
        traceback: str = "",
        lineage: Iterable[str] = (),
    ) -> None:
        super().__init__(text)
        self.message = text if message is None else message
        """Message of the original exception."""
        self.type_name = type_name
        """Class name of the original exception, e.g. ``ValueError``."""
        self.traceback = traceback
        """Text of the original traceback."""
        self.lineage = tuple(lineage)
        """Names of the original exception's classes, most derived first."""
        self.origin = text
        """The first failure, if this one came through several orchestrations."""
        self.levels = 0
        """The number of orchestrations that it came through, above the first."""

    def is_(self, *kinds: type[BaseException]) -> bool:
        """Return True if the original exception was one of these classes, or of a subclass.

        Classes are compared by name, because the exception may come from another process.
        """
        return any(kind.__name__ in self.lineage for kind in kinds)


class ActivityFailed(RemoteFailure):
    """An activity raised; carries the remote type, message and traceback."""


class OrchestrationFailed(RemoteFailure):
    """An orchestration raised; carries the remote type, message and traceback."""


class OrchestrationCancelled(RemoteFailure):
    """An orchestration ended because it was cancelled."""


class OrchestrationTerminated(RemoteFailure):
    """An orchestration was ended from outside, without running its code."""


class Nondeterminism(PerdureError):
    """Code and history disagree; ``report`` says where and what to do."""

    def __init__(self, message: str, *, mismatch: Any = None, event_id: int | None = None) -> None:
        super().__init__(message)
        self.mismatch = mismatch
        """The ``perdure.model.failures.Mismatch``; None if the history contradicts itself."""
        self.event_id = event_id
        """The recorded event that the code does not repeat, or that does not fit the history."""

    @property
    def report(self) -> str:
        """The mismatch with both sides, a diff and the ways out."""
        return str(self) if self.mismatch is None else str(self.mismatch)


class ProviderError(PerdureError):
    """A store refused or failed. ``retryable``: the same call may succeed later."""

    retryable: bool = False

    def __init__(self, operation: str, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(f"{operation}: {message}")
        self.operation = operation
        self.message = message
        if retryable is not None:
            self.retryable = retryable


class LockLost(ProviderError):
    """The lock token is unknown, expired, already used, or was taken over. Nothing was written."""


class DuplicateEvent(ProviderError):
    """History already has an event with that id. Nothing was written."""


class CorruptData(ProviderError):
    """Stored data cannot be read. It is kept unchanged."""


class NotSupported(ProviderError):
    """The provider does not declare the capability that the call needs."""


class StoreBusy(ProviderError):
    """Another writer holds the store, or a transient fault occurred; repeat the call."""

    retryable = True


class StoreFull(ProviderError):
    """No space is left. Nothing was written; the store works again when there is space."""

    retryable = True


class StoreUnavailable(ProviderError):
    """The store cannot be reached or opened; the message names it and the way out."""

    retryable = True


class StoreRefused(ProviderError):
    """Running on this store would be unsafe; the message says why and what to do."""


class StoreClosed(ProviderError):
    """The provider was closed, or was inherited by a forked process."""


class StoreMoved(StoreRefused):
    """The content of the store was moved to another store; use that one."""


class InternalError(PerdureError):
    """A bug in perdure itself. Please report it with the message."""
