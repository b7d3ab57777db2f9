"""What an author of orchestrations and activities touches."""

from perdure.authoring.activity_context import (
    ActivityInfo,
    activity_info,
    heartbeat,
    is_cancelled,
    last_heartbeat,
    transaction,
)
from perdure.authoring.current import Current, current
from perdure.authoring.decorators import activity, orchestration
from perdure.authoring.definitions import Activity, Orchestration
from perdure.authoring.face import (
    continue_as_new,
    next_message,
    now,
    patched,
    random,
    set_status,
    side_effect,
    start_detached,
    uuid4,
    wait_for_event,
)
from perdure.authoring.policies import ActivityOptions, Retry
from perdure.authoring.registry import Registry
from perdure.authoring.state import state
from perdure.authoring.steps import Step

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
    "set_status",
    "side_effect",
    "start_detached",
    "state",
    "transaction",
    "uuid4",
    "wait_for_event",
]
