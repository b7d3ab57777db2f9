"""Replays recorded histories against today's code, in a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.authoring.definitions import Registry
from perdure.codec import JSON
from perdure.engine.execution import Execution
from perdure.errors import UsageError
from perdure.model import events, wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perdure.authoring.definitions import Handler
    from perdure.codec import Codec


def assert_replays(
    history: Sequence[events.Event] | str | os.PathLike[str],
    *handlers: Handler,
    state: Mapping[str, Any] | None = None,
    codec: Codec = JSON,
) -> None:
    """Raise Nondeterminism, with a report, unless the code repeats what the history says.

    ``history`` is a list of events (``await handle.history()``) or a file with one JSON event a
    line. ``state`` is the state at the start of the execution, for a history that does not hold it.
    """
    recorded = _read(Path(history)) if isinstance(history, (str, os.PathLike)) else history
    started = recorded[0] if recorded else None
    if not isinstance(started, events.OrchestrationStarted):
        raise UsageError("a history begins with OrchestrationStarted")
    handler = Registry(handlers, codec=codec).resolve_orchestration(started.name, started.version)
    kv = {key: bytes(codec.encode(value)).decode() for key, value in (state or {}).items()}
    Execution.replay(handler, recorded, kv=kv, codec=codec).close()


def _read(path: Path) -> list[events.Event]:
    return wire.decode_history(line for line in path.read_text().splitlines() if line.strip())
