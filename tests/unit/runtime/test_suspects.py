"""Which activities run at once after workers have died over them."""

from __future__ import annotations

from perdure.runtime.suspects import Suspects


def test_what_was_delivered_a_few_times_runs_freely() -> None:
    suspects = Suspects(max_attempts=10)

    assert all(suspects.admit(f"t{number}", number % 3 + 1) for number in range(100))


def test_what_was_delivered_often_runs_alone() -> None:
    suspects = Suspects(max_attempts=10)

    assert suspects.admit("a", 4)
    assert not suspects.admit("b", 4)
    assert suspects.admit("new", 1)


def test_each_that_ends_makes_room_for_two() -> None:
    suspects = Suspects(max_attempts=10)
    assert suspects.admit("a", 4)
    suspects.ended("new")  # was none of them
    suspects.ended("a")

    assert [suspects.admit(token, 4) for token in "bcd"] == [True, True, False]


def test_with_few_attempts_it_begins_sooner() -> None:
    suspects = Suspects(max_attempts=3)

    assert suspects.admit("a", 2)
    assert not suspects.admit("b", 2)
