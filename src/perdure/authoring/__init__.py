"""The names that an author of orchestrations and activities uses."""

from perdure.authoring.activity_context import (
    ActivityInfo,
    activity_info,
    heartbeat,
    is_cancelled,
    last_heartbeat,
    transaction,
)
from perdure.authoring.api import (
    Current,
    continue_as_new,
    current,
    next_message,
    now,
    patched,
    random,
    set_custom_status,
    side_effect,
    start_detached,
    uuid4,
    wait_for_event,
)
from perdure.authoring.definitions import Activity, Orchestration, activity, orchestration
from perdure.authoring.policies import ActivityOptions, Retry
from perdure.authoring.recorder import Step
from perdure.authoring.registry import Registry
from perdure.authoring.state import state

__all__ = [
    "Activity",
    "ActivityInfo",
    "ActivityOptions",
    "Current",
    "Orchestration",
    "Registry",
    "Retry",
    "Step",
    "activity",
    "activity_info",
    "continue_as_new",
    "current",
    "heartbeat",
    "is_cancelled",
    "last_heartbeat",
    "next_message",
    "now",
    "orchestration",
    "patched",
    "random",
    "set_custom_status",
    "side_effect",
    "start_detached",
    "state",
    "transaction",
    "uuid4",
    "wait_for_event",
]
