"""Short tiers of the campaigns: what a killed process and a power cut leave behind."""

from __future__ import annotations

import random

import pytest

from campaigns import filesystem_power_cuts, filesystem_strace
from campaigns.filesystem_kills import kill_at_every_operation, kill_at_random


def test_a_kill_before_an_operation_or_in_a_write_loses_and_doubles_nothing() -> None:
    every = 29

    points = kill_at_every_operation(every=every, offset=random.randrange(every))

    assert points >= 5


def test_a_kill_at_a_random_moment_loses_and_doubles_nothing() -> None:
    assert kill_at_random(10, random.Random()) >= 10


def test_a_kill_at_a_system_call_loses_and_doubles_nothing() -> None:
    if not filesystem_strace.is_available():
        pytest.skip("NOT RUN: strace is not installed, so no system call can be interrupted")

    assert filesystem_strace.kill_at_some_system_calls(10, random.Random()) >= 5


def test_a_power_cut_loses_nothing_that_was_acknowledged() -> None:
    reason = filesystem_power_cuts.why_not()
    if reason is not None:
        pytest.skip(f"NOT RUN: {reason}")

    filesystem_power_cuts.cut_power(3, random.Random())
