"""Histories that were written once: today's engine reads them, and still writes the same."""

import json

import pytest
from engine_driver import Driver
from golden_programs import HISTORIES, SCENARIOS, dump

from perdure.codec import JSON
from perdure.engine.execution import Execution
from perdure.model import wire

NAMES = sorted(path.stem for path in HISTORIES.glob("*.json"))


def recorded(name: str) -> list[dict]:
    return json.loads((HISTORIES / f"{name}.json").read_text())


def without_places(history: list[dict]) -> list[dict]:
    """Leave out places in the code, and the field that was added since."""
    left_out = {"site", "initial_state"}
    return [
        {key: value for key, value in event.items() if key not in left_out} for event in history
    ]


def turn_ends(history: list[dict]) -> list[int]:
    following = [*history[1:], {"turn": None}]
    return [
        index
        for index, (event, after) in enumerate(zip(history, following, strict=True), 1)
        if event["turn"] != after["turn"]
    ]


def test_every_scenario_has_its_history():
    assert sorted(SCENARIOS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_history_replays_from_every_turn_on(name):
    fresh = SCENARIOS[name]()
    history = recorded(name)

    for end in turn_ends(history):
        events = [wire.decode_event(json.dumps(event)) for event in history[:end]]
        execution = Execution.replay(fresh.handler, events, kv=fresh.kv, codec=JSON)
        assert execution.event_count == end
        assert execution.is_finished == (history[end - 1]["type"] in ENDS)
        execution.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_scenario_is_still_written_in_the_same_way(name):
    fresh: Driver = SCENARIOS[name]()

    assert without_places(dump(fresh)) == without_places(recorded(name))


ENDS = {
    "OrchestrationCompleted",
    "OrchestrationFailed",
    "OrchestrationCancelled",
    "OrchestrationContinuedAsNew",
}
