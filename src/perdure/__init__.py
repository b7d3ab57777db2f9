"""Durable async functions for Python.

Write an ordinary ``async def``; it survives crashes, deploys and power cuts, and picks up at the
line where it stopped.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from perdure.version import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from perdure.authoring.api import (
        Saga,
        activity_info,
        continue_as_new,
        current,
        heartbeat,
        is_cancelled,
        last_heartbeat,
        next_message,
        patched,
        saga,
        set_custom_status,
        side_effect,
        start_detached,
        transaction,
        wait_for_event,
    )
    from perdure.authoring.api import now as now
    from perdure.authoring.api import random as random
    from perdure.authoring.api import state as state
    from perdure.authoring.api import uuid4 as uuid4
    from perdure.authoring.communication import (
        Instance,
        Promise,
        Request,
        Requests,
        cancel_instance,
        instance,
        promise,
        raise_event_to,
        requests,
        send_message_to,
    )
    from perdure.authoring.context import Step
    from perdure.authoring.definitions import (
        Activity,
        Handler,
        Orchestration,
        activity,
        orchestration,
    )
    from perdure.authoring.policies import Retry
    from perdure.authoring.signature import RESOURCE
    from perdure.client.blocking import (
        BlockingClient,
        BlockingHandle,
        blocking_activity_client,
    )
    from perdure.client.client import Client, activity_client
    from perdure.client.instance import Handle, InstanceStatus
    from perdure.codec import Codec
    from perdure.errors import (
        ActivityFailed,
        AlreadyExists,
        CompensationFailed,
        InstanceFinished,
        InvalidValue,
        NotFound,
        OrchestrationCancelled,
        OrchestrationFailed,
        OrchestrationTerminated,
        PayloadError,
        PerdureError,
        PromiseRejected,
        QueueFull,
        RequestRejected,
        UsageError,
        WaitTimeout,
    )
    from perdure.model.status import Status
    from perdure.own_types import CodecType
    from perdure.providers.contract import Provider
    from perdure.providers.directory import FileSystemProvider
    from perdure.providers.postgres import PostgresProvider as PostgresProvider
    from perdure.providers.records import InstanceQuery, PruneOptions, TagFilter
    from perdure.providers.sqlite import SqliteProvider
    from perdure.providers.sqlite.memory import InMemoryProvider
    from perdure.runtime.runtime import Runtime
    from perdure.runtime.worker import RuntimeOptions
    from perdure.schedules.spec import Schedule

# The module of each name. Modules are loaded on first use, so that importing the package is quick
# and loads no backend that is not used.
_HOMES = {
    name: f"perdure.{home}"
    for home, names in {
        "authoring.api": "Saga activity_info continue_as_new current heartbeat is_cancelled "
        "last_heartbeat next_message now patched random saga set_custom_status side_effect "
        "start_detached state transaction uuid4 wait_for_event",
        "authoring.communication": "Instance Promise Request Requests cancel_instance instance "
        "promise raise_event_to requests send_message_to",
        "authoring.context": "Step",
        "authoring.definitions": "Activity Handler Orchestration activity orchestration",
        "authoring.policies": "Retry",
        "authoring.signature": "RESOURCE",
        "client.blocking": "BlockingClient BlockingHandle blocking_activity_client",
        "client.client": "Client activity_client",
        "client.instance": "Handle InstanceStatus",
        "codec": "Codec",
        "errors": "ActivityFailed AlreadyExists CompensationFailed InstanceFinished InvalidValue "
        "NotFound OrchestrationCancelled OrchestrationFailed OrchestrationTerminated PayloadError "
        "PerdureError PromiseRejected QueueFull RequestRejected UsageError WaitTimeout",
        "model.status": "Status",
        "own_types": "CodecType",
        "providers.contract": "Provider",
        "providers.directory": "FileSystemProvider",
        "providers.postgres": "PostgresProvider",
        "providers.records": "InstanceQuery PruneOptions TagFilter",
        "providers.sqlite": "SqliteProvider",
        "providers.sqlite.memory": "InMemoryProvider",
        "runtime.runtime": "Runtime",
        "runtime.worker": "RuntimeOptions",
        "schedules.spec": "Schedule",
    }.items()
    for name in names.split()
}

# Some names can be imported but are not listed here. PostgresProvider needs an extra, which
# `import *` must not need. now, random, state and uuid4 would shadow modules and common names.
__all__ = [
    "RESOURCE",
    "Activity",
    "ActivityFailed",
    "AlreadyExists",
    "BlockingClient",
    "BlockingHandle",
    "Client",
    "Codec",
    "CodecType",
    "CompensationFailed",
    "FileSystemProvider",
    "Handle",
    "Handler",
    "InMemoryProvider",
    "Instance",
    "InstanceFinished",
    "InstanceQuery",
    "InstanceStatus",
    "InvalidValue",
    "NotFound",
    "Orchestration",
    "OrchestrationCancelled",
    "OrchestrationFailed",
    "OrchestrationTerminated",
    "PayloadError",
    "PerdureError",
    "Promise",
    "PromiseRejected",
    "Provider",
    "PruneOptions",
    "QueueFull",
    "Request",
    "RequestRejected",
    "Requests",
    "Retry",
    "Runtime",
    "RuntimeOptions",
    "Saga",
    "Schedule",
    "SqliteProvider",
    "Status",
    "Step",
    "TagFilter",
    "UsageError",
    "WaitTimeout",
    "__version__",
    "activity",
    "activity_client",
    "activity_info",
    "blocking_activity_client",
    "cancel_instance",
    "continue_as_new",
    "current",
    "heartbeat",
    "instance",
    "is_cancelled",
    "last_heartbeat",
    "next_message",
    "orchestration",
    "patched",
    "promise",
    "raise_event_to",
    "requests",
    "saga",
    "send_message_to",
    "set_custom_status",
    "side_effect",
    "start_detached",
    "transaction",
    "wait_for_event",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__"} - {"PostgresProvider"})
