"""Retries, time limits and routing of activities, and how long ended instances are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, cast

from perdure import limits
from perdure.arguments import (
    Duration,
    check_flag,
    check_number,
    check_real,
    check_tag,
    parse_duration_ms,
    to_milliseconds,
    to_seconds,
)
from perdure.errors import InvalidValue, did_you_mean, shown
from perdure.model import work
from perdure.model.status import Status

Executor: TypeAlias = Literal["thread", "process"]

Keep: TypeAlias = Mapping[str, Duration | str]
"""Times to keep ended instances, by status: ``{"completed": "30d", "failed": "forever"}``."""

_ENDINGS: Final = {
    status.lower(): status
    for status in (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TERMINATED)
}
FOREVER: Final = "forever"

Bounds: TypeAlias = tuple[work.RetryPlan | None, int | None, int | None, int | None]
"""Retry plan, and timeout, heartbeat timeout and deadline in milliseconds."""


def parse_keep(keep: object, what: str) -> dict[Status, int | None]:
    """Return the milliseconds for each status of ``keep``; None stands for forever.

    Raise InvalidValue for an unknown status, and for a value that is no length of time.
    """
    if keep is None:
        return {}
    if not isinstance(keep, Mapping):
        raise InvalidValue(
            f'{what} must be a dict such as {{"completed": "30d", "failed": "90d"}}, not '
            f"{shown(keep)}"
        )
    parsed: dict[Status, int | None] = {}
    for word, length in cast("Mapping[object, object]", keep).items():
        status = _ENDINGS.get(word) if isinstance(word, str) else None
        if status is None:
            known = ", ".join(map(repr, _ENDINGS))
            meant = did_you_mean(str(word), list(_ENDINGS))
            raise InvalidValue(f"{what} has {shown(word)}, which is none of {known}{meant}")
        parsed[status] = _kept_ms(length, f"{what}[{word!r}]")
    return parsed


def _kept_ms(length: object, what: str) -> int | None:
    if length == FOREVER:
        return None
    if not isinstance(length, str):
        return to_milliseconds(length, what)
    try:
        return parse_duration_ms(length)
    except InvalidValue as error:
        raise InvalidValue(f"{what}: {error}, or {FOREVER!r}") from None


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries of a failed activity.

    Times are numbers of seconds, or timedeltas. Each delay is ``multiplier`` times the one before.
    ``increment`` is added once after the second attempt, twice after the third, and so on:
    ``Retry(first_delay=5, multiplier=1, increment=5)`` waits 5, 10, 15 seconds.
    """

    max_attempts: int = 3
    first_delay: Duration = 0.1
    multiplier: float = 2.0
    increment: Duration = 0
    max_delay: Duration = 30.0
    jitter: float = 0.1
    """Share of the delay that is drawn at random, 0 to 1."""
    never: tuple[type[BaseException] | str, ...] = ()
    """Exceptions that are not worth another attempt: classes or class names, with subclasses."""
    deadline: Duration | None = None
    """Bound over all attempts and pauses."""

    def __post_init__(self) -> None:
        check_number(self.max_attempts, "Retry.max_attempts (1 means: no retry)", minimum=1)
        first_delay = to_seconds(self.first_delay, "Retry.first_delay")
        to_seconds(self.increment, "Retry.increment")
        max_delay = to_seconds(self.max_delay, "Retry.max_delay")
        check_real(
            self.multiplier, "Retry.multiplier", minimum=1, maximum=limits.RETRY_MULTIPLIER_MAX
        )
        check_real(self.jitter, "Retry.jitter", minimum=0, maximum=1)
        if max_delay < first_delay:
            raise InvalidValue(
                f"Retry.max_delay ({max_delay:g} s) is below first_delay ({first_delay:g} s): "
                "set max_delay to at least that"
            )
        _check_bound("Retry.deadline", self.deadline)
        never = _listed(self.never)
        for exception in never:
            is_class = isinstance(exception, type) and issubclass(exception, BaseException)
            if not is_class and not (isinstance(exception, str) and exception):
                raise InvalidValue(
                    f"Retry.never takes exception classes or their names, not {exception!r}"
                )
        object.__setattr__(self, "never", never)

    def plan(self) -> work.RetryPlan:
        """Return the policy as a field of the work item."""
        return work.RetryPlan(
            max_attempts=self.max_attempts,
            first_delay_ms=to_milliseconds(self.first_delay, "Retry.first_delay"),
            multiplier=float(self.multiplier),
            increment_ms=to_milliseconds(self.increment, "Retry.increment"),
            max_delay_ms=to_milliseconds(self.max_delay, "Retry.max_delay"),
            jitter=float(self.jitter),
            never=tuple(
                exception if isinstance(exception, str) else exception.__name__
                for exception in self.never
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityOptions:
    """Options of an activity. Times are numbers of seconds, or timedeltas."""

    retry: Retry | None = None
    timeout: Duration | None = None
    """Bound of one attempt."""
    heartbeat_timeout: Duration | None = None
    """Bound between two heartbeats."""
    deadline: Duration | None = None
    """Bound over all attempts, counted from the call."""
    tag: str | None = None
    """Only workers that serve this tag run it."""
    session: str | None = None
    """Activities of one session run on one worker."""
    executor: Executor | None = None
    """A sync activity runs in a ``thread`` (the default) or in a ``process``."""
    transactional: bool = False
    """Its rows and its completion are committed together, in the store's own database."""
    raises: tuple[type[Exception], ...] = ()
    """Exceptions that the orchestration sees as they were raised, instead of ActivityFailed."""

    def __post_init__(self) -> None:
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidValue(
                f"retry must be a Retry(...), such as Retry(max_attempts=3), not {self.retry!r}"
            )
        for name in ("timeout", "heartbeat_timeout", "deadline"):
            _check_bound(name, getattr(self, name))
        check_flag(self.transactional, "transactional")
        if self.executor not in {None, "thread", "process"}:
            raise InvalidValue(f"executor must be 'thread' or 'process', not {self.executor!r}")
        if self.executor == "process":
            self._check_process()
        if self.transactional:
            self._check_transactional()
        object.__setattr__(self, "raises", _listed(self.raises))
        self._check_raises()
        if self.session is not None:
            limits.check_id(self.session, "session")
        if self.tag is not None:
            check_tag(self.tag)

    def _check_raises(self) -> None:
        known: dict[str, object] = {}
        for kind in self.raises:
            is_exception = isinstance(kind, type) and issubclass(kind, Exception)
            if not is_exception or issubclass(kind, StopIteration):
                raise InvalidValue(f"raises takes exception classes, such as OSError, not {kind!r}")
            if known.setdefault(kind.__name__, kind) is not kind:
                raise InvalidValue(
                    f"raises has two classes that are named {kind.__name__!r}; "
                    "they are told apart by name only"
                )

    def _check_process(self) -> None:
        if self.transactional:
            raise InvalidValue(
                "transactional=True does not go with executor='process': "
                "the transaction is in this process"
            )
        if self.heartbeat_timeout is not None:
            raise InvalidValue(
                "heartbeat_timeout does not go with executor='process': a process cannot report; "
                "timeout stops it"
            )

    def _check_transactional(self) -> None:
        for name in ("timeout", "heartbeat_timeout"):
            if getattr(self, name) is not None:
                raise InvalidValue(
                    f"{name} does not go with transactional=True: a function cannot be stopped in "
                    "the middle of the store's transaction; keep it short"
                )

    @classmethod
    def of(cls, given: dict[str, Any]) -> ActivityOptions:
        """Return the options of ``@activity``; raise InvalidValue for an unknown one."""
        known = ["name", *(field.name for field in fields(cls))]
        for name in given:
            if name not in known:
                meant = did_you_mean(name, known) or f"; it has: {', '.join(known)}"
                raise InvalidValue(f"@activity has no option {name!r}{meant}")
        return cls(**given)

    def bounds(self) -> Bounds:
        """Return the fields of the work item. The tighter of the two deadlines counts."""
        plan, last = (
            (None, None) if self.retry is None else (self.retry.plan(), self.retry.deadline)
        )
        timeout, heartbeat, *deadlines = (
            None if time is None else to_milliseconds(time, "a time")
            for time in (self.timeout, self.heartbeat_timeout, self.deadline, last)
        )
        given = (deadline for deadline in deadlines if deadline is not None)
        return plan, timeout, heartbeat, min(given, default=None)


def _listed(value: Any) -> tuple[Any, ...]:
    is_listed = isinstance(value, (tuple, list, set, frozenset))
    return tuple(cast("Iterable[Any]", value)) if is_listed else (value,)


def _check_bound(name: str, value: object) -> None:
    if value is None:
        return
    if to_seconds(value, name) == 0:
        raise InvalidValue(f"{name} must be more than 0 seconds")
