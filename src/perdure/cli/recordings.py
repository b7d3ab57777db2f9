"""Recorded executions in files: exported instances, or one history as a JSON event a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli.archives import is_export, read_snapshots
from perdure.client.recorded import Recorded, recorded_history, recorded_in
from perdure.errors import CorruptData, InvalidValue
from perdure.model import wire

if TYPE_CHECKING:
    from pathlib import Path


def read_recordings(path: Path) -> list[Recorded]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from None
    if lines and is_export(lines[0]):
        snapshots = read_snapshots(str(path), partial=True)
        return [recorded_in(snapshot) for snapshot in snapshots if snapshot.executions]
    try:
        history = wire.decode_history(lines)
    except CorruptData as error:
        raise InvalidValue(f"{path} holds no history: {error.message}") from None
    instance_id = history[0].instance_id if history else str(path)
    return [recorded_history(instance_id, history, {})]
