"""The names that an author of orchestrations and activities uses."""

from perdure.authoring.api import (
    Current,
    activity_info,
    continue_as_new,
    current,
    heartbeat,
    is_cancelled,
    last_heartbeat,
    next_message,
    now,
    patched,
    random,
    set_custom_status,
    side_effect,
    start_detached,
    state,
    transaction,
    uuid4,
    wait_for_event,
)
from perdure.authoring.asking import Request, Requests, requests
from perdure.authoring.compensations import Saga, saga
from perdure.authoring.context import ActivityInfo, Step
from perdure.authoring.definitions import (
    Activity,
    Handler,
    Orchestration,
    Registry,
    activity,
    orchestration,
)
from perdure.authoring.instances import (
    Instance,
    cancel_instance,
    instance,
    raise_event_to,
    send_message_to,
)
from perdure.authoring.policies import ActivityOptions, Retry
from perdure.authoring.promises import Promise, promise
from perdure.authoring.signature import RESOURCE

__all__ = [
    "RESOURCE",
    "Activity",
    "ActivityInfo",
    "ActivityOptions",
    "Current",
    "Handler",
    "Instance",
    "Orchestration",
    "Promise",
    "Registry",
    "Request",
    "Requests",
    "Retry",
    "Saga",
    "Step",
    "activity",
    "activity_info",
    "cancel_instance",
    "continue_as_new",
    "current",
    "heartbeat",
    "instance",
    "is_cancelled",
    "last_heartbeat",
    "next_message",
    "now",
    "orchestration",
    "patched",
    "promise",
    "raise_event_to",
    "random",
    "requests",
    "saga",
    "send_message_to",
    "set_custom_status",
    "side_effect",
    "start_detached",
    "state",
    "transaction",
    "uuid4",
    "wait_for_event",
]
