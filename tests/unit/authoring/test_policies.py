"""Retry and activity options: checked when they are written down."""

import math
from datetime import timedelta

import pytest

from perdure import Retry
from perdure.authoring.policies import ActivityOptions
from perdure.errors import InvalidValue


def test_a_retry_policy_travels_as_a_plan():
    plan = Retry(
        max_attempts=5,
        first_delay=0.5,
        multiplier=3,
        max_delay=60,
        jitter=0,
        never=(ValueError, "X"),
    ).plan()

    assert (plan.max_attempts, plan.first_delay_ms, plan.max_delay_ms) == (5, 500, 60_000)
    assert (plan.multiplier, plan.jitter) == (3.0, 0.0)
    assert plan.never == ("ValueError", "X")


def test_the_smallest_retry_policy_is_one_attempt():
    plan = Retry(max_attempts=1, first_delay=0, multiplier=1, max_delay=0, jitter=0).plan()

    assert (plan.max_attempts, plan.first_delay_ms, plan.multiplier) == (1, 0, 1.0)


def test_one_class_or_a_list_is_as_good_as_a_tuple():
    assert Retry(never=ValueError).never == (ValueError,)
    assert Retry(never=[ValueError, "X"]).never == (ValueError, "X")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"first_delay": -1},
        {"first_delay": math.nan},
        {"first_delay": "1"},
        {"max_delay": math.inf},
        {"first_delay": 60},
        {"first_delay": 5, "max_delay": 4},
        {"multiplier": 0.5},
        {"jitter": 1.5},
        {"deadline": 0},
        {"never": (5,)},
        {"never": (int,)},
        {"never": ("",)},
    ],
)
def test_a_retry_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InvalidValue):
        Retry(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry": 3},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": math.inf},
        {"heartbeat_timeout": "1"},
        {"deadline": True},
        {"tag": ""},
        {"tag": "é" * 200},
        {"session": ""},
        {"executor": "gpu"},
        {"executor": "process", "transactional": True},
        {"executor": "process", "heartbeat_timeout": 5},
        {"transactional": True, "timeout": 5},
        {"transactional": True, "heartbeat_timeout": 5},
    ],
)
def test_activity_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidValue):
        ActivityOptions(**wrong)


def test_the_tighter_deadline_counts():
    assert ActivityOptions(deadline=10, retry=Retry(deadline=5)).bounds()[3] == 5000
    assert ActivityOptions(deadline=1, retry=Retry(deadline=5)).bounds()[3] == 1000
    assert ActivityOptions().bounds()[3] is None


def test_a_bound_is_never_rounded_to_nothing():
    assert ActivityOptions(timeout=0.0001).bounds()[1] == 1


def test_a_timedelta_is_as_good_as_seconds():
    retry = Retry(first_delay=timedelta(seconds=1), max_delay=timedelta(minutes=1))
    options = ActivityOptions(timeout=timedelta(milliseconds=1500), deadline=timedelta(hours=1))

    assert retry.plan() == Retry(first_delay=1, max_delay=60).plan()
    assert (options.bounds()[1], options.bounds()[3]) == (1500, 3_600_000)
