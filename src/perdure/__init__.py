"""Durable async functions for Python.

Write an ordinary ``async def``; it survives crashes, deploys and power cuts, and picks up at the
line where it stopped.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from perdure.version import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from perdure.authoring import (
        Activity,
        Orchestration,
        Retry,
        Step,
        activity,
        activity_info,
        continue_as_new,
        heartbeat,
        is_cancelled,
        last_heartbeat,
        next_message,
        orchestration,
        patched,
        set_custom_status,
        side_effect,
        start_detached,
        transaction,
        wait_for_event,
    )
    from perdure.authoring import now as now
    from perdure.authoring import random as random
    from perdure.authoring import uuid4 as uuid4
    from perdure.authoring.api import current
    from perdure.authoring.registry import Handler
    from perdure.authoring.state import state as state
    from perdure.client.blocking import BlockingClient
    from perdure.client.client import Client
    from perdure.client.handle import Handle
    from perdure.client.view import InstanceStatus
    from perdure.codec import Codec
    from perdure.errors import (
        ActivityFailed,
        OrchestrationCancelled,
        OrchestrationFailed,
        OrchestrationTerminated,
        PerdureError,
    )
    from perdure.model.status import Status
    from perdure.providers.contract import Provider
    from perdure.providers.directory import FileSystemProvider
    from perdure.providers.postgres import PostgresProvider as PostgresProvider
    from perdure.providers.records import InstanceQuery, PruneOptions, TagFilter
    from perdure.providers.sqlite import SqliteProvider
    from perdure.providers.sqlite.memory import InMemoryProvider
    from perdure.runtime.options import RuntimeOptions
    from perdure.runtime.runtime import Runtime

# The module of each name. Modules are loaded on first use, so that importing the package is quick
# and loads no backend that is not used.
_HOMES = {
    "perdure.authoring": (
        "Activity",
        "Orchestration",
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
    ),
    "perdure.authoring.registry": ("Handler",),
    "perdure.client.blocking": ("BlockingClient",),
    "perdure.client.client": ("Client",),
    "perdure.client.handle": ("Handle",),
    "perdure.client.view": ("InstanceStatus",),
    "perdure.codec": ("Codec",),
    "perdure.errors": (
        "ActivityFailed",
        "OrchestrationCancelled",
        "OrchestrationFailed",
        "OrchestrationTerminated",
        "PerdureError",
    ),
    "perdure.model.status": ("Status",),
    "perdure.providers.contract": ("Provider",),
    "perdure.providers.directory": ("FileSystemProvider",),
    "perdure.providers.records": ("InstanceQuery", "PruneOptions", "TagFilter"),
    "perdure.providers.sqlite.memory": ("InMemoryProvider",),
    "perdure.providers.postgres": ("PostgresProvider",),
    "perdure.providers.sqlite": ("SqliteProvider",),
    "perdure.runtime.options": ("RuntimeOptions",),
    "perdure.runtime.runtime": ("Runtime",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

# Some names can be imported but are not listed here. PostgresProvider needs an extra, which
# `import *` must not need. now, random, state and uuid4 would shadow modules and common names.
__all__ = [
    "Activity",
    "ActivityFailed",
    "BlockingClient",
    "Client",
    "Codec",
    "FileSystemProvider",
    "Handle",
    "Handler",
    "InMemoryProvider",
    "InstanceQuery",
    "InstanceStatus",
    "Orchestration",
    "OrchestrationCancelled",
    "OrchestrationFailed",
    "OrchestrationTerminated",
    "PerdureError",
    "Provider",
    "PruneOptions",
    "Retry",
    "Runtime",
    "RuntimeOptions",
    "SqliteProvider",
    "Status",
    "Step",
    "TagFilter",
    "__version__",
    "activity",
    "activity_info",
    "continue_as_new",
    "current",
    "heartbeat",
    "is_cancelled",
    "last_heartbeat",
    "next_message",
    "orchestration",
    "patched",
    "set_custom_status",
    "side_effect",
    "start_detached",
    "transaction",
    "wait_for_event",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "now", "random", "state", "uuid4"])
