"""Activities that may have killed a worker run alone."""

from __future__ import annotations

from perdure.runtime.attempts import CrashIsolation


def test_what_was_delivered_a_few_times_runs_freely() -> None:
    isolation = CrashIsolation(max_attempts=10)

    assert all(isolation.may_run(f"t{number}", number % 3 + 1) for number in range(100))


def test_what_was_delivered_often_runs_alone() -> None:
    isolation = CrashIsolation(max_attempts=10)

    assert isolation.may_run("a", 4)
    assert not isolation.may_run("b", 4)
    assert isolation.may_run("new", 1)


def test_each_that_ends_makes_room_for_two() -> None:
    isolation = CrashIsolation(max_attempts=10)
    assert isolation.may_run("a", 4)
    isolation.ended("new")  # was none of them
    isolation.ended("a")

    assert [isolation.may_run(token, 4) for token in "bcd"] == [True, True, False]


def test_with_few_attempts_it_begins_sooner() -> None:
    isolation = CrashIsolation(max_attempts=3)

    assert isolation.may_run("a", 2)
    assert not isolation.may_run("b", 2)
