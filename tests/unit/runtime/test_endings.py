"""The end of an instance is read from the last event of its history."""

import msgspec
import pytest

from perdure.model import events
from perdure.model.failures import Failure
from perdure.model.status import Status
from perdure.runtime.commit_builder import ending_of

PLACE = {"event_id": 9, "instance_id": "i", "execution_id": 1, "timestamp_ms": 0, "turn": 2}
CONTINUED = Status.CONTINUED_AS_NEW


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (events.OrchestrationCompleted(output=msgspec.Raw(b"5"), **PLACE), Status.COMPLETED),
        (events.OrchestrationFailed(failure=Failure(), **PLACE), Status.FAILED),
        (events.OrchestrationCancelled(reason="enough", **PLACE), Status.CANCELLED),
        (events.OrchestrationTerminated(reason="enough", **PLACE), Status.TERMINATED),
        (events.OrchestrationContinuedAsNew(input=msgspec.Raw(b"[]"), **PLACE), CONTINUED),
    ],
)
def test_the_last_event_says_how_it_ended(last, status):
    ending = ending_of(last)

    assert ending is not None
    assert ending[0] is status


def test_an_execution_whose_last_event_is_no_end_goes_on():
    assert ending_of(events.TimerFired(source_event_id=2, fire_at_ms=0, **PLACE)) is None
