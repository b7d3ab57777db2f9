"""Reads of one instance for clients: history, custom status, key-value state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.errors import CorruptData
from perdure.providers import rules
from perdure.providers.records import HistoryRecord, KvEntry
from perdure.providers.sqlite import instances

if TYPE_CHECKING:
    from perdure.providers.sqlite.transaction import Snapshot

_KEY: Final = "SELECT instance_key, execution_id FROM instances WHERE instance_id = ?"

_CUSTOM_STATUS: Final = """
SELECT custom_status, custom_status_version FROM instances
WHERE instance_id = ? AND custom_status_version > ?
"""

_KV_VALUE: Final = """
SELECT iif(d.instance_key IS NULL, s.value, d.value)
FROM instances AS i
LEFT JOIN kv_delta AS d ON d.instance_key = i.instance_key AND d.key = ?2
LEFT JOIN kv_store AS s ON s.instance_key = i.instance_key AND s.key = ?2
WHERE i.instance_id = ?1
"""


def read(snapshot: Snapshot, instance_id: str) -> list[HistoryRecord]:
    """Return the history of the latest execution."""
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return []
    key, current = found
    last = snapshot.row(instances.LAST_HISTORY_EXECUTION, (key,))[0] or 0
    return read_page(snapshot, instance_id, max(current, last), 0, -1)


def read_page(
    snapshot: Snapshot, instance_id: str, execution_id: int, after_event_id: int, limit: int
) -> list[HistoryRecord]:
    """Return the history of one execution after an event; a limit of -1 means all of it."""
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return []
    try:
        return [
            HistoryRecord(event_id=event_id, data=data)
            for event_id, data in snapshot.events(found[0], execution_id, after_event_id, limit)
        ]
    except UnicodeDecodeError as error:
        raise CorruptData(
            "read",
            f"history of execution {execution_id} of {instance_id!r} is not readable: {error}",
        ) from error


def custom_status(
    snapshot: Snapshot, instance_id: str, last_seen_version: int
) -> tuple[str | None, int] | None:
    row: tuple[str | None, int] | None = snapshot.row(
        _CUSTOM_STATUS, (instance_id, last_seen_version)
    )
    return row


def kv_value(snapshot: Snapshot, instance_id: str, key: str) -> str | None:
    row: tuple[str | None] | None = snapshot.row(_KV_VALUE, (instance_id, key))
    return None if row is None else row[0]


def kv_all_values(snapshot: Snapshot, instance_id: str) -> dict[str, KvEntry]:
    found = snapshot.row(_KEY, (instance_id,))
    if found is None:
        return {}
    return rules.merge_kv(kv_store(snapshot, found[0]), kv_delta(snapshot, found[0]))


def kv_store(snapshot: Snapshot, instance_key: int) -> dict[str, KvEntry]:
    return {
        key: KvEntry(value=value, updated_at_ms=updated_at)
        for key, value, updated_at in snapshot.execute(instances.KV_STORE, (instance_key,))
    }


def kv_delta(snapshot: Snapshot, instance_key: int) -> dict[str, KvEntry | None]:
    return {
        key: None if value is None else KvEntry(value=value, updated_at_ms=updated_at)
        for key, value, updated_at in snapshot.execute(instances.KV_DELTA, (instance_key,))
    }


def readable(snapshot: Snapshot, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
    """Return rows whose bodies are damaged, with an escape for each byte that is not text.

    Such a body is not JSON: the runtime that gets it blocks its instance, and the others go on.
    """
    raw = statement.replace("body", "CAST(body AS BLOB)", 1)
    return [
        tuple(
            value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
            for value in row
        )
        for row in snapshot.rows(raw, parameters)
    ]
