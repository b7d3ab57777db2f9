"""Every exception that the package raises on purpose, sorted by whose fault it is.

Imports nothing of ours, so that every layer can raise and catch these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PerdureError(Exception):
    """Everything that is raised on purpose; catch this to catch them all."""


class UsageError(PerdureError):
    """The calling program is wrong: the message says what to change."""


class InvalidValue(UsageError, ValueError):
    """A value that was handed in is refused before anything is written."""


class PayloadError(UsageError, TypeError):
    """A value cannot be written as JSON, or JSON does not fit the annotated type."""


class CannotUnwrap(PayloadError):
    """The data is behind a transform that this codec lacks, or that fails on it: another may not.

    The data is intact, so nothing fails by it: an orchestration is Blocked, an activity is left to
    others.
    """


class NotRegistered(UsageError, LookupError):
    """A name or version that no handler of this runtime carries."""


class NotInOrchestration(UsageError, RuntimeError):
    """Something that only exists inside an orchestration was used outside of one."""


class ForbiddenInOrchestration(UsageError, RuntimeError):
    """Real I/O, threads, foreign futures or blocking calls inside an orchestration."""


class NotFound(PerdureError, LookupError):
    """No instance, execution, event or message with that id."""


class AlreadyExists(PerdureError):
    """An instance with that id exists and the caller asked for a fresh one."""


class InstanceFinished(PerdureError):
    """The instance has ended, so it takes no more events, messages or cancellations."""


class InstanceStillRunning(PerdureError):
    """The instance must end first, or the call must be forced."""


class NotARoot(PerdureError):
    """A child is deleted with its root, never alone."""


class TreeChanged(PerdureError):
    """A child exists that the call did not name; read the tree again and repeat."""


class WaitTimeout(PerdureError, TimeoutError):
    """Gave up waiting; the work goes on."""


class RemoteFailure(PerdureError):
    """Base of failures that happened elsewhere and were recorded."""

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
        """What the original exception said."""
        self.type_name = type_name
        """Class name of the original exception, e.g. ``ValueError``."""
        self.traceback = traceback
        """Text of the original traceback."""
        self.lineage = tuple(lineage)
        """Names of the original exception's classes, most derived first."""


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

    def __init__(self, message: str, *, report: str = "") -> None:
        super().__init__(message)
        self.report = report or message


class ProviderError(PerdureError):
    """Storage said no. ``retryable`` tells whether the same call may succeed later."""

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
    """Stored data cannot be read. It is kept as it is."""


class NotSupported(ProviderError):
    """The provider does not declare the capability that the call needs."""


class StoreBusy(ProviderError):
    """Another writer holds the store, or a transient fault; repeat the call."""

    retryable = True


class StoreFull(ProviderError):
    """No space left. Nothing was written; the store goes on when there is space."""

    retryable = True


class StoreUnavailable(ProviderError):
    """The store cannot be reached or opened; the message names it and the way out."""

    retryable = True


class StoreRefused(ProviderError):
    """It would be unsafe to run on this store; the message says why and what to do."""


class StoreClosed(ProviderError):
    """The provider was closed, or was inherited by a forked process."""


class StoreMoved(StoreRefused):
    """The store's content was moved to another store; go on there."""


class InternalError(PerdureError):
    """A bug in perdure itself. Please report it with the message."""
