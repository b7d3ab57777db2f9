"""The steps of the state machine, drawn without knowing any store.

A plan names things by small numbers and durations by ticks, so that the same plan can be carried
out on two stores with their own tokens, positions and clocks. Few names, so that they meet often.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from hypothesis import strategies as st

from perdure.model.failures import Block, BlockReason
from perdure.model.status import Status
from perdure.providers.records import (
    CustomStatusChange,
    EnqueueCondition,
    KvChange,
    KvClear,
    KvClearAll,
    KvSet,
    OrchestrationFilter,
    TagFilter,
    Version,
    VersionRange,
)

if TYPE_CHECKING:
    from collections.abc import Callable

INSTANCES: Final = ("a", "b", "c")
OWNERS: Final = ("w1", "w2")
SESSIONS: Final = ("s1", "s2")
TAGS: Final = ("gpu", "cpu")
ACTIVITIES: Final = ("act", "other")
NAMES: Final = ("Shop", "Mail")
VERSIONS: Final = ("1.0.0", "2.0.0")
KEYS: Final = ("k1", "k2")

instances = st.sampled_from(INSTANCES)
owners = st.sampled_from(OWNERS)
optional_owners = st.sampled_from(("w1", None, "w1", None, "w2"))
LOST: Final = 9
"""A pick from here on means something that is lost already."""
picks = st.sampled_from((0, 0, 0, 0, 1, 1, 2, LOST))
"""Which of the things at hand, counted from the latest."""
lock_ticks = st.sampled_from((1, 2, 5))
delay_ticks = st.sampled_from((None, None, None, 0, 1, 3))
# Forward only: a store follows a clock that went back with its next commit, the model at once.
jump_ticks = st.sampled_from((1, 61, 1, 2, 5))
conditions = st.sampled_from((None,) * 6 + tuple(EnqueueCondition))
blocks = st.sampled_from(
    (None, None, Block(reason=BlockReason.POISON, message="too often", since_ms=7))
)
tag_filters = st.sampled_from(
    (
        TagFilter.any(),
        TagFilter.any(),
        TagFilter.any(),
        None,
        TagFilter.only("gpu"),
        TagFilter.default_and("gpu", "cpu"),
        TagFilter.none(),
    )
)
activity_names = st.sampled_from((None,) * 5 + (frozenset({"act"}), frozenset[str]()))


def _framework(*ranges: tuple[Version, Version]) -> tuple[VersionRange, ...]:
    return tuple(VersionRange(minimum=low, maximum=high) for low, high in ranges)


filters = st.sampled_from(
    (
        None,
        None,
        None,
        OrchestrationFilter(framework_versions=_framework(((1, 0, 0), (1, 9, 9)))),
        OrchestrationFilter(
            framework_versions=_framework(((0, 0, 0), (0, 9, 9)), ((2, 0, 0), (2, 0, 0)))
        ),
        OrchestrationFilter(framework_versions=()),
        OrchestrationFilter(handlers=frozenset({("Shop", "1.0.0")})),
        OrchestrationFilter(handlers=frozenset({("Shop", "2.0.0"), ("Mail", "1.0.0")})),
        OrchestrationFilter(
            handlers=frozenset({("Mail", "1.0.0"), ("Shop", "1.0.0")}),
            framework_versions=_framework(((1, 0, 0), (2, 9, 9))),
        ),
    )
)


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """A message for the orchestrator queue."""

    instance_id: str
    kind: str
    """``start``, ``timer``, ``event``, or ``large``: an event of which few fit into a batch."""
    number: int
    name: str
    version: str | None
    parent: str | None
    delay: int | None
    """As the message's own time."""


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """A work item of one of the first activities of the current execution."""

    activity_id: int
    name: str
    tag: str | None
    session: str | None
    delay: int | None
    claim: int | None


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """A turn."""

    events: int
    repeats: bool
    """The first new event has the id of an old one."""
    skips: bool
    """The turn goes on from an event that is not there."""
    next_execution: bool
    named: tuple[str, str | None] | None
    parent: str | None
    framework: Version | None
    status: Status | None
    output: str | None
    custom_status: CustomStatusChange | None
    kv: tuple[KvChange, ...]
    work: tuple[WorkPlan, ...]
    messages: tuple[MessagePlan, ...]
    cancelled_activities: tuple[int, ...]
    cancelled_timers: tuple[int, ...]
    consumed: int | None
    """Bits: which messages of the batch."""
    returns: bool
    """The others are returned, if the lock is not kept."""
    keep: int | None
    settled: tuple[int, ...]


# --- pools
#
# A plan has many parts, and drawing each of them from Hypothesis costs more than the steps that it
# is for. So plans are made once, always the same ones, and drawn as wholes; sorted by size, because
# a failing sequence is made simpler by taking earlier ones.

_random = random.Random(1)
_Plan = TypeVar("_Plan")


def _pool(make: Callable[[], _Plan], size: int) -> tuple[_Plan, ...]:
    made = {repr(plan): plan for plan in (make() for _ in range(size))}
    return tuple(made[key] for key in sorted(made, key=lambda key: (len(key), key)))


def _one_of(*choices: _Plan) -> _Plan:
    return _random.choice(choices)


def _some(make: Callable[[], _Plan], size_max: int) -> tuple[_Plan, ...]:
    return tuple(make() for _ in range(_random.randint(0, size_max)))


def _message(*kinds: str) -> MessagePlan:
    return MessagePlan(
        instance_id=_one_of(*INSTANCES),
        kind=_one_of(*kinds),
        number=_random.randint(1, 3),
        name=_one_of(*NAMES),
        version=_one_of(*VERSIONS, None),
        parent=_one_of(None, None, "a", "b"),
        delay=_one_of(None, None, None, 0, 1, 3),
    )


def _any_message() -> MessagePlan:
    return _message("start", "timer", "event", "large")


def _work() -> WorkPlan:
    return WorkPlan(
        activity_id=_random.randint(1, 3),
        name=_one_of(*ACTIVITIES),
        tag=_one_of(None, None, *TAGS),
        session=_one_of(None, None, *SESSIONS),
        delay=_one_of(None, None, None, 0, 1, 3),
        claim=None,
    )


def _work_of_a_turn() -> WorkPlan:
    claim = _one_of(None, 1, 2, 5)
    plan = _work()
    return plan if claim is None else replace(plan, session=None, delay=None, claim=claim)


def _kv_change() -> KvChange:
    key = _one_of(*KEYS)
    value = KvSet(key=key, value=_one_of("", "1", "2"), updated_at_ms=1)
    changes: list[KvChange] = [value, value, KvClear(key=key), KvClearAll()]
    return _one_of(*changes)


def _commit() -> CommitPlan:
    return CommitPlan(
        events=_one_of(0, 1, 1, 1, 2),
        repeats=_random.random() < 0.1,
        skips=_random.random() < 0.05,
        next_execution=_random.random() < 0.2,
        named=_one_of(None, (_one_of(*NAMES), _one_of(None, *VERSIONS))),
        parent=_one_of(None, None, "a", "b"),
        framework=_one_of(None, None, (1, 0, 0), (2, 0, 0)),
        status=_one_of(*(None,) * 8, *_STATUSES),
        output=_one_of(None, '"out"'),
        custom_status=_one_of(
            None, None, CustomStatusChange(value='"busy"'), CustomStatusChange(value=None)
        ),
        kv=_some(_kv_change, 2),
        work=_some(_work_of_a_turn, 2),
        messages=_some(_any_message, 2),
        cancelled_activities=_some(lambda: _random.randint(1, 3), 1),
        cancelled_timers=_some(lambda: _random.randint(1, 3), 1),
        consumed=_one_of(None, None, None, 0, 1, 2, 5),
        returns=_random.random() < 0.3,
        keep=_one_of(None, 5, None, 5, 1),
        settled=_one_of((), (), (), (), (), (0,), (1,)),
    )


def _first_commit() -> CommitPlan:
    plan = _commit()
    return replace(
        plan,
        events=max(1, plan.events),
        repeats=False,
        skips=False,
        next_execution=False,
        named=plan.named or (NAMES[0], VERSIONS[0]),
    )


_STATUSES: Final = (
    Status.RUNNING,
    Status.CONTINUED_AS_NEW,
    Status.CONTINUED_AS_NEW,
    Status.COMPLETED,
    Status.FAILED,
)

message_plans: Final = st.sampled_from(_pool(_any_message, 400))
start_plans: Final = st.sampled_from(_pool(lambda: _message("start"), 200))
work_plans: Final = st.sampled_from(_pool(_work, 200))
commit_plans: Final = st.sampled_from(_pool(_commit, 3_000))
first_commit_plans: Final = st.sampled_from(_pool(_first_commit, 500))
