"""The pure rules of the contract."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from perdure.client.formats import utc_time
from perdure.errors import InvalidValue, LockLost
from perdure.model.status import Status
from perdure.providers import rules, validation
from perdure.providers.records import (
    ActivityIdentity,
    Claim,
    CustomStatusChange,
    ExecutionMetadata,
    HistoryRecord,
    InstanceInfo,
    InstanceQuery,
    KvClear,
    KvClearAll,
    KvEntry,
    KvSet,
    OrchestrationFilter,
    OrchestratorMessage,
    PruneOptions,
    StartRouting,
    TimerIdentity,
    TurnCommit,
    VersionRange,
    WorkerMessage,
)

IDENTITY = ActivityIdentity(instance_id="a", execution_id=1, activity_id=2)
WORK = WorkerMessage(identity=IDENTITY, name="act", body="{}")
MESSAGE = OrchestratorMessage(instance_id="a", kind="k", body="{}")


def test_a_lock_is_dead_at_the_moment_it_ends_and_a_message_visible_at_its_time():
    assert rules.is_live(101, 100)
    assert not rules.is_live(100, 100)
    assert rules.is_visible(100, 100)
    assert not rules.is_visible(101, 100)


def test_a_delay_wins_over_the_time_of_a_message():
    assert rules.visible_at(5, 100, 10) == 110
    assert rules.visible_at(5, 100) == 5
    assert rules.visible_at(None, 100) == 100


def test_a_lost_lock_is_permanent_and_names_the_operation():
    error = rules.lock_lost("ack_work_item", "t")

    assert isinstance(error, LockLost)
    assert (error.operation, error.retryable) == ("ack_work_item", False)


@pytest.mark.parametrize(
    ("status", "start_queued", "ended"),
    [
        (Status.COMPLETED, True, True),
        (Status.TERMINATED, False, True),
        (Status.RUNNING, False, False),
        (Status.CONTINUED_AS_NEW, True, False),
        (Status.CONTINUED_AS_NEW, False, True),
    ],
)
def test_a_continued_execution_has_ended_unless_its_next_start_is_queued(
    status, start_queued, ended
):
    assert rules.has_ended(status, start_queued=start_queued) is ended


@pytest.mark.parametrize(
    ("execution", "suspended", "blocked", "shown"),
    [
        (None, False, False, Status.PENDING),
        (None, True, True, Status.PAUSED),
        (Status.RUNNING, False, True, Status.BLOCKED),
        (Status.CONTINUED_AS_NEW, True, False, Status.PAUSED),
        (Status.CONTINUED_AS_NEW, False, False, Status.CONTINUED_AS_NEW),
        (Status.FAILED, True, True, Status.FAILED),
    ],
)
def test_holds_are_shown_until_the_instance_has_ended(execution, suspended, blocked, shown):
    assert rules.shown_status(execution, suspended=suspended, blocked=blocked) is shown


def test_every_range_of_a_framework_filter_counts():
    ranges = (
        VersionRange(minimum=(1, 0, 0), maximum=(1, 9, 9)),
        VersionRange(minimum=(3, 0, 0), maximum=(3, 0, 0)),
    )
    filter_ = OrchestrationFilter(framework_versions=ranges)

    fits = [version for version in range(5) if rules.fits_framework(filter_, (version, 0, 0))]

    assert fits == [1, 3]
    assert rules.fits_framework(filter_, None)


def test_an_empty_framework_filter_lets_nothing_through():
    assert not rules.fits_framework(OrchestrationFilter(framework_versions=()), None)
    assert rules.fits_framework(None, (9, 9, 9))


def test_an_instance_without_a_version_fits_by_its_name():
    filter_ = OrchestrationFilter(handlers=frozenset({("a", "1")}))

    assert rules.fits_handlers(filter_, "a", "1")
    assert rules.fits_handlers(filter_, "a", None)
    assert not rules.fits_handlers(filter_, "a", "2")
    assert not rules.fits_handlers(filter_, "b", None)


def info(**fields):
    defaults = {
        "instance_id": "Order-1",
        "name": "checkout",
        "version": "1",
        "execution_id": 1,
        "status": Status.RUNNING,
        "output": None,
        "created_at_ms": 100,
        "updated_at_ms": 100,
        "completed_at_ms": None,
        "parent_instance_id": None,
        "custom_status": None,
        "custom_status_version": 0,
    }
    return InstanceInfo(**(defaults | fields))


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ({}, True),
        ({"statuses": frozenset({Status.RUNNING})}, True),
        ({"statuses": frozenset()}, False),
        ({"text": "ORDER"}, True),
        ({"text": "nothing"}, False),
        ({"created_after": utc_time(99), "created_before": utc_time(101)}, True),
        ({"created_after": utc_time(100)}, False),
        ({"completed_before": utc_time(1000)}, False),
        ({"roots_only": True}, True),
        ({"parent_instance_id": "p"}, False),
        ({"instance_ids": ()}, False),
        ({"instance_ids": ("Order-1", "x")}, True),
        ({"id_prefix": "Order"}, True),
        ({"id_prefix": "order"}, False),
        ({"name": "checkout", "version": "1"}, True),
        ({"name": "checkout", "version": "2"}, False),
        ({"name": "other"}, False),
        ({"created_before": utc_time(100)}, False),
        ({"completed_after": utc_time(1)}, False),
    ],
)
def test_all_conditions_of_a_query_must_fit(query, fits):
    assert rules.fits_query(info(), InstanceQuery(**query)) is fits


def test_state_changes_fold_in_their_order():
    store = {"old": KvEntry(value="1", updated_at_ms=1)}
    delta = {}
    changes = [
        KvSet(key="a", value="x", updated_at_ms=2),
        KvClearAll(),
        KvSet(key="b", value="y", updated_at_ms=3),
        KvClear(key="never"),
    ]

    rules.apply_kv_changes(store, delta, changes)

    new = KvEntry(value="y", updated_at_ms=3)
    assert delta == {"a": None, "old": None, "b": new, "never": None}
    assert rules.merge_kv(store, delta) == {"b": new}


def test_pruning_spares_the_current_the_running_and_the_last():
    executions = {
        1: (Status.CONTINUED_AS_NEW, 10),
        2: (Status.RUNNING, None),
        3: (Status.CONTINUED_AS_NEW, 30),
        4: (Status.RUNNING, None),
    }

    assert rules.executions_to_prune(executions, 4, PruneOptions()) == [1, 3]
    assert rules.executions_to_prune(executions, 4, PruneOptions(keep_last=2)) == [1]
    assert (
        rules.executions_to_prune(executions, 4, PruneOptions(completed_before=utc_time(10))) == []
    )


@pytest.mark.parametrize("instance_id", ["a", "ordé/…", '"', "x" * 255])
def test_a_cursor_comes_back_as_it_went(instance_id):
    assert rules.decode_cursor(rules.encode_cursor(-5, instance_id)) == (-5, instance_id)


@pytest.mark.parametrize("cursor", ["", "x", "!!", "bnVsbA==", "WzEsMl0=", "é", "WyIxIiwiYSJd"])
def test_a_bad_cursor_is_refused(cursor):
    with pytest.raises(InvalidValue):
        rules.decode_cursor(cursor)


def test_a_cursor_with_a_foreign_character_is_refused():
    cursor = rules.encode_cursor(5, "x")

    with pytest.raises(InvalidValue):
        rules.decode_cursor(f"{cursor[:3]}!{cursor[3:]}")


@pytest.mark.parametrize(
    "fields",
    [
        {"execution_id": 0},
        {"execution_id": 2**63},
        {"history_delta": (HistoryRecord(event_id=0, data="{}"),)},
        {"history_delta": (HistoryRecord(event_id=1, data="\ud800"),)},
        {"history_delta": (HistoryRecord(event_id=1, data="\0"),)},
        {"history_delta": (HistoryRecord(event_id=1, data="x" * (validation.BODY_BYTES_MAX + 1)),)},
        {"metadata": ExecutionMetadata(version="1")},
        {"metadata": ExecutionMetadata(status=Status.BLOCKED)},
        {"metadata": ExecutionMetadata(name="", version="1")},
        {"metadata": ExecutionMetadata(framework_version=(1, -1, 0))},
        {"kv_changes": (KvSet(key="k", value="x" * 16_385, updated_at_ms=1),)},
        {"kv_changes": (KvClear(key="\udfff"),)},
        {"custom_status": CustomStatusChange(value="x" * 262_145)},
        {"worker_items": (WORK,), "keep_lock_ms": 100},
        {"orchestrator_items": (MESSAGE,), "keep_lock_ms": 100},
        {"custom_status": CustomStatusChange(value=None), "keep_lock_ms": 100},
        {"keep_lock_ms": 0},
        {"settled_work": ("t", "t")},
        {"orchestrator_items": (OrchestratorMessage(instance_id=" ", kind="k", body=""),)},
        {
            "cancelled_activities": (
                ActivityIdentity(instance_id="a", execution_id=1, activity_id=0),
            )
        },
    ],
)
def test_a_commit_with_one_bad_part_is_refused(fields):
    with pytest.raises(InvalidValue):
        validation.check_commit(TurnCommit(**({"execution_id": 1} | fields)))


def test_a_good_commit_passes():
    start = StartRouting(name="n", version=None, parent_instance_id="p")
    timer = TimerIdentity(execution_id=1, timer_id=2)
    child = OrchestratorMessage(instance_id="c", kind="k", body="{}", start=start)
    wake = OrchestratorMessage(instance_id="a", kind="k", body="{}", visible_at_ms=-5, timer=timer)

    validation.check_commit(
        TurnCommit(
            execution_id=1,
            history_delta=(HistoryRecord(event_id=1, data="{}"),),
            worker_items=(WORK,),
            orchestrator_items=(MESSAGE, child, wake),
            metadata=ExecutionMetadata(status=Status.RUNNING, name="a", version="1"),
            kv_changes=(KvClearAll(), KvSet(key="", value="", updated_at_ms=0)),
            keep_lock_ms=1,
        )
    )


def test_a_session_item_cannot_be_claimed():
    claim = Claim(lock_token="t", lock_timeout_ms=1)

    with pytest.raises(InvalidValue):
        validation.check_work(
            WorkerMessage(identity=IDENTITY, name="a", body="", session_id="s", claim=claim)
        )


def test_what_follows_from_a_work_item_belongs_to_it():
    other = ActivityIdentity(instance_id="b", execution_id=1, activity_id=2)
    elsewhere = OrchestratorMessage(instance_id="b", kind="k", body="")

    with pytest.raises(InvalidValue, match="goes to 'b'"):
        validation.check_settlement(IDENTITY, elsewhere, None)
    with pytest.raises(InvalidValue, match="the retry is for"):
        validation.check_settlement(
            IDENTITY, None, WorkerMessage(identity=other, name="a", body="")
        )
    with pytest.raises(InvalidValue, match="not both"):
        validation.check_follow_up(MESSAGE, WORK)


@pytest.mark.parametrize("value", [True, "1", 1.0, None, 0, 11])
def test_a_number_is_an_integer_within_its_bounds(value):
    with pytest.raises(InvalidValue):
        validation.check_number(value, "limit", minimum=1, maximum=10)


def test_a_time_bound_between_two_milliseconds_parts_them():
    between = utc_time(100) + timedelta(microseconds=500)

    after = InstanceQuery(created_after=between, completed_after=between)
    before = InstanceQuery(created_before=between, completed_before=between)

    assert (after.created_after_ms, after.completed_after_ms) == (100, 100)
    assert (before.created_before_ms, before.completed_before_ms) == (101, 101)
    assert PruneOptions(completed_before=between).completed_before_ms == 101
    assert InstanceQuery(created_before=utc_time(100)).created_before_ms == 100
    assert InstanceQuery().created_after_ms is InstanceQuery().completed_before_ms is None


def test_a_time_bound_may_be_of_any_time_zone():
    noon = datetime(1970, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))

    assert InstanceQuery(created_after=noon).created_after_ms == 10 * 3_600_000


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (rules.no_instance("a"), "there is no instance 'a'"),
        (rules.none_exists({"b", "a"}), "none of these instances exists: ['a', 'b']"),
        (rules.no_execution("a"), "'a' has no execution"),
        (rules.no_execution("a", 2), "there is no execution 2 of 'a'"),
        (rules.no_dead_letter(7), "there is no dead letter 7"),
        (rules.already_exists("a"), "'a' is already in this store"),
        (rules.instance_finished("a"), "'a' has ended"),
        (rules.instance_finished("a", "Failed"), "'a' has ended: Failed"),
        (rules.still_running("a"), "'a' is still running; wait"),
        (rules.still_running("a", "Paused"), "'a' is still running (Paused); wait"),
        (rules.would_orphan("c", "p"), "the child 'c' of 'p' would be orphaned"),
        (rules.not_a_root("c", "p"), "'c' is a sub-orchestration of 'p'"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_names_what_it_is_about(error, text):
    assert str(error).startswith(text)


def test_roots_only_leaves_children_out():
    child = info(parent_instance_id="p")

    assert not rules.fits_query(child, InstanceQuery(roots_only=True))
    assert rules.fits_query(child, InstanceQuery(parent_instance_id="p"))


def claimed(token):
    identity = ActivityIdentity(instance_id="a", execution_id=1, activity_id=1)
    claim = Claim(lock_token=token, lock_timeout_ms=1)
    return WorkerMessage(identity=identity, name="w", body="{}", claim=claim)


@pytest.mark.parametrize(
    ("claims", "settled", "text"),
    [
        (("t", "t"), ("s",), "claims of a commit name one lock token twice"),
        (("t",), ("s", "s"), "settled_work of a commit name one lock token twice"),
        (("t",), ("s", "t"), "claims an item with a lock token that it settles"),
    ],
)
def test_a_commit_names_each_lock_token_once(claims, settled, text):
    commit = TurnCommit(
        execution_id=1, worker_items=tuple(map(claimed, claims)), settled_work=settled
    )

    with pytest.raises(InvalidValue, match=text):
        validation.check_commit(commit)
