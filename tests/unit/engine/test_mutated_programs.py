"""Random edits of random programs in flight: reported, or shown to be without effect.

An edit that replays without a complaint must have asked for exactly the steps of history.
"""

import copy
import random

import pytest
from engine_driver import OPENING, Driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import LEAVES, drive, execute, program, random_tree

from perdure import orchestration
from perdure.errors import Nondeterminism
from perdure.model import events


def nodes(tree):
    """Every subtree, with the list that holds it."""
    for index in range(2, len(tree)):
        yield tree, index
        yield from nodes(tree[index])


def mutate(tree, rng):
    """The tree after one edit: another input, another step, one more, one less, or swapped."""
    root = ["seq", 0, copy.deepcopy(tree)]
    parent, index = rng.choice(list(nodes(root)))
    edit = rng.choice(["number", "kind", "add", "drop", "swap"])
    if edit == "number":
        parent[index][1] = 10 - parent[index][1]
    elif edit == "kind":
        parent[index] = [rng.choice(LEAVES), rng.randint(1, 9)]
    elif edit == "add":
        parent[index] = ["seq", 1, [rng.choice(LEAVES), rng.randint(1, 9)], parent[index]]
    elif edit == "drop":
        parent[index] = ["yield", 1]
    elif index + 1 < len(parent):
        parent[index], parent[index + 1] = parent[index + 1], parent[index]
    return root[2]


def edited(tree):
    """The program as if its source had been changed; its recorded argument stays."""

    @orchestration(name="program")
    async def code(_: object) -> list[str]:
        log: list[str] = []
        await execute(tree, log)
        return log

    return code


def replay_edited(run: Driver, tree, end: int) -> bool:
    """Return True if the edit went unnoticed; then everything must be as history says."""
    history = run.history[:end]
    try:
        execution = run.replay(edited(tree), upto=end)
    except Nondeterminism:
        return False
    performed = {wait.op for wait in execution.waits()}
    assert execution.event_count == end
    assert performed <= {e.op for e in history if isinstance(e, OPENING)}
    assert _must_be_open(history) <= performed
    execution.close()
    return True


def _must_be_open(history) -> set[str]:
    if isinstance(history[-1], events.Terminal):
        return set()
    closed = {e.source_event_id for e in history if isinstance(e, events.Resolving)}
    steps = (events.ActivityScheduled, events.TimerCreated, events.SubOrchestrationScheduled)
    return {e.op for e in history if isinstance(e, steps) and e.event_id not in closed}


def turn_ends(history) -> list[int]:
    following = [event.turn for event in history[1:]] + [None]
    return [
        event.event_id
        for event, after in zip(history, following, strict=True)
        if event.turn != after
    ]


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**40))
def test_an_edit_is_reported_or_harmless(seed):
    rng = random.Random(seed)
    tree = random_tree(rng)
    run = drive(tree, rng)
    mutant = mutate(tree, rng)

    for end in turn_ends(run.history):
        replay_edited(run, mutant, end)


def test_most_edits_of_finished_programs_are_noticed():
    noticed = total = 0
    for seed in range(150):
        rng = random.Random(seed)
        tree = random_tree(rng)
        mutant = mutate(tree, rng)
        if mutant == tree:
            continue
        run = drive(tree, rng)
        total += 1
        noticed += not replay_edited(run, mutant, len(run.history))

    # The rest is in branches that were never reached, or cancelled before they began.
    assert noticed / total > 0.6


def test_the_unedited_program_is_accepted_at_every_turn():
    for seed in range(30):
        rng = random.Random(seed)
        run = drive(random_tree(rng), rng)
        for end in turn_ends(run.history):
            run.replay(program, upto=end).close()


@pytest.mark.parametrize("edit_seed", range(5))
def test_edits_are_repeatable(edit_seed):
    tree = random_tree(random.Random(edit_seed))

    assert mutate(tree, random.Random(1)) == mutate(tree, random.Random(1))
