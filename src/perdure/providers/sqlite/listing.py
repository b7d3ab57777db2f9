"""Instances as administration sees them: one by one, in pages, newest first, or counted."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.errors import NotFound
from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers._shared import rules
from perdure.providers.items import InstanceInfo, InstancePage, InstanceQuery, SystemMetrics
from perdure.providers.sqlite import queries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.providers.sqlite.transaction import Snapshot

_Place: TypeAlias = tuple[int, str]
"""(created_at, instance id): the order of the listing."""

_PREFIX_MATCHES_TO_SORT: Final = 2_000
"""Up to so many ids with a prefix are sorted; beyond that the listing is walked and filtered."""

_SELECT_STARTED: Final = """
SELECT i.created_at, i.instance_id, i.name, i.version, i.parent_instance_id, i.execution_id,
       i.status, e.output, i.updated_at, e.completed_at, i.custom_status,
       i.custom_status_version, l.block
FROM instances AS i
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = i.execution_id
LEFT JOIN instance_locks AS l ON l.instance_id = i.instance_id
"""

_SELECT_PENDING: Final = """
SELECT l.pending_since, l.instance_id, l.instance_key, l.suspended, l.block,
       i.custom_status, i.custom_status_version
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
"""

_NEWEST_STARTED: Final = " ORDER BY i.created_at DESC, i.instance_id DESC"
_NEWEST_PENDING: Final = " ORDER BY l.pending_since DESC, l.instance_id DESC"

_COUNT_WITH_PREFIX: Final = """
SELECT count(*) FROM (
    SELECT 1 FROM instances WHERE instance_id >= ? AND instance_id < ? LIMIT ?
)
"""

_MENTIONS: Final = """(
    instr(lower(i.instance_id), ?) OR octet_length(i.instance_id) <> length(i.instance_id)
    OR instr(lower(i.name), ?) OR octet_length(i.name) <> length(i.name) OR i.name IS NULL
    OR instr(lower(e.output), ?) OR octet_length(e.output) <> length(e.output)
    OR instr(lower(i.custom_status), ?)
    OR octet_length(i.custom_status) <> length(i.custom_status)
)"""
"""Keeps all that may mention an ASCII text in any case; whatever is not ASCII is judged later."""

_STATUS_COUNTS: Final = """
SELECT status, count(*) FROM instances WHERE execution_id > 0 GROUP BY status
"""
_PENDING_COUNTS: Final = """
SELECT suspended, block IS NOT NULL, count(*) FROM instance_locks
WHERE pending_since IS NOT NULL GROUP BY 1, 2
"""


def get_info(snapshot: Snapshot, instance_id: str) -> InstanceInfo:
    found = find_info(snapshot, instance_id)
    if found is None:
        raise NotFound(f"there is no instance {instance_id!r}")
    return found


def find_info(snapshot: Snapshot, instance_id: str) -> InstanceInfo | None:
    row = snapshot.row(
        _SELECT_STARTED + "WHERE i.instance_id = ? AND i.execution_id > 0", (instance_id,)
    )
    if row is not None:
        return _started_info(snapshot, row)
    row = snapshot.row(
        _SELECT_PENDING + "WHERE l.instance_id = ? AND l.pending_since IS NOT NULL", (instance_id,)
    )
    return None if row is None else _pending_info(snapshot, row)


def list_page(
    snapshot: Snapshot, query: InstanceQuery | None, before: _Place | None, limit: int
) -> InstancePage:
    page = list(islice(_matching(snapshot, query, before), limit + 1))
    next_cursor: str | None = None
    if len(page) > limit:
        page.pop()
        next_cursor = rules.encode_cursor(page[-1].created_at_ms, page[-1].instance_id)
    return InstancePage(instances=tuple(page), next_cursor=next_cursor)


def count(snapshot: Snapshot, query: InstanceQuery | None) -> int:
    query = query or InstanceQuery()
    if msgspec.structs.replace(query, statuses=None) == InstanceQuery():
        counts = count_by_status(snapshot)
        wanted = counts if query.statuses is None else query.statuses
        return sum(counts.get(status, 0) for status in wanted)
    return sum(1 for _ in _matching(snapshot, query, None))


def count_by_status(snapshot: Snapshot) -> dict[Status, int]:
    counts = {Status(status): number for status, number in snapshot.rows(_STATUS_COUNTS)}
    for suspended, blocked, number in snapshot.rows(_PENDING_COUNTS):
        status = rules.shown_status(None, suspended=bool(suspended), blocked=bool(blocked))
        counts[status] = counts.get(status, 0) + number
    return counts


def system_metrics(snapshot: Snapshot) -> SystemMetrics:
    by_status = count_by_status(snapshot)
    return SystemMetrics(
        total_instances=sum(by_status.values()),
        total_executions=snapshot.row("SELECT count(*) FROM executions")[0],
        total_events=snapshot.row("SELECT count(*) FROM history")[0],
        by_status=by_status,
    )


# --- walking


def _matching(
    snapshot: Snapshot, query: InstanceQuery | None, before: _Place | None
) -> Iterator[InstanceInfo]:
    """Everything that fits, newest first: what SQL has let through is checked exactly."""
    query = query or InstanceQuery()
    if query.instance_ids is not None:
        infos: Iterator[InstanceInfo] = _named(snapshot, query.instance_ids, before)
    else:
        infos = heapq.merge(
            *_started_sources(snapshot, query, before),
            _pending_source(snapshot, query, before),
            key=_place_of,
            reverse=True,
        )
    return (info for info in infos if rules.fits_query(info, query))


def _place_of(info: InstanceInfo) -> _Place:
    return info.created_at_ms, info.instance_id


def _named(
    snapshot: Snapshot, instance_ids: tuple[str, ...], before: _Place | None
) -> Iterator[InstanceInfo]:
    found = [find_info(snapshot, instance_id) for instance_id in set(instance_ids)]
    infos = [
        info for info in found if info is not None and (before is None or _place_of(info) < before)
    ]
    return iter(sorted(infos, key=_place_of, reverse=True))


def _started_sources(
    snapshot: Snapshot, query: InstanceQuery, before: _Place | None
) -> list[Iterator[InstanceInfo]]:
    """One ordered walk for each status that is asked for, so that none has to be sorted."""
    if query.statuses is None:
        return [_started_source(snapshot, query, None, before)]
    return [
        _started_source(snapshot, query, status, before)
        for status in query.statuses
        if status is not Status.PENDING
    ]


def _started_source(
    snapshot: Snapshot, query: InstanceQuery, status: Status | None, before: _Place | None
) -> Iterator[InstanceInfo]:
    conditions, values = ["i.execution_id > 0"], list[Any]()

    def require(condition: str, *bindings: Any) -> None:
        conditions.append(condition)
        values.extend(bindings)

    if before is not None:
        require("(i.created_at, i.instance_id) < (?, ?)", *before)
    if status is not None:
        require("i.status = ?", status)
    if query.name is not None:
        require(
            "(i.name = ? OR i.name IS NULL)" if status is not None else "i.name = ?", query.name
        )
    if query.version is not None:
        require("(i.version = ? OR i.name IS NULL)", query.version)
    if query.parent_instance_id is not None:
        require("i.parent_instance_id = ?", query.parent_instance_id)
    if query.roots_only:
        require("i.parent_instance_id IS NULL")
    for condition, bound in (
        ("i.created_at > ?", query.created_after_ms),
        ("i.created_at < ?", query.created_before_ms),
        ("i.completed_at > ?", query.completed_after_ms),
        ("i.completed_at < ?", query.completed_before_ms),
    ):
        if bound is not None:
            require(condition, bound)
    if query.id_prefix:
        start, end = query.id_prefix, _after_prefix(query.id_prefix)
        limit = _PREFIX_MATCHES_TO_SORT + 1
        few = snapshot.row(_COUNT_WITH_PREFIX, (start, end, limit))[0] < limit
        # A unary plus keeps SQLite from using the index of the column.
        column = "i.instance_id" if few else "+i.instance_id"
        require(f"{column} >= ? AND {column} < ?", start, end)
    if query.text is not None and query.text.isascii():
        require(_MENTIONS, *[query.text.lower()] * 4)
    sql = _SELECT_STARTED + "WHERE " + " AND ".join(conditions) + _NEWEST_STARTED
    for row in snapshot.execute(sql, values):
        yield _started_info(snapshot, row)


def _pending_source(
    snapshot: Snapshot, query: InstanceQuery, before: _Place | None
) -> Iterator[InstanceInfo]:
    """Instances whose start is queued: few, so that only their place is left to SQL."""
    shown = {Status.PENDING, Status.SUSPENDED, Status.BLOCKED}
    if query.statuses is not None and not query.statuses & shown:
        return
    sql, values = _SELECT_PENDING + "WHERE l.pending_since IS NOT NULL", list[Any]()
    if before is not None:
        sql += " AND (l.pending_since, l.instance_id) < (?, ?)"
        values += before
    for row in snapshot.execute(sql + _NEWEST_PENDING, values):
        yield _pending_info(snapshot, row)


def _after_prefix(prefix: str) -> str:
    """The least text that is greater than every text with that prefix."""
    last = ord(prefix[-1])
    if last == 0x10FFFF:
        return prefix + "\U0010ffff"
    return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)


# --- from rows to records


def _started_info(snapshot: Snapshot, row: Any) -> InstanceInfo:
    created_at, instance_id, name, version, parent, execution_id, status, *rest = row
    output, updated_at, completed_at, custom_status, custom_version, block = rest
    if name is None:
        name, version, parent = who(snapshot, instance_id)
    return InstanceInfo(
        instance_id=instance_id,
        name=name,
        version=version,
        execution_id=execution_id,
        status=Status(status),
        output=output,
        created_at_ms=created_at,
        updated_at_ms=updated_at,
        completed_at_ms=completed_at,
        parent_instance_id=parent,
        custom_status=custom_status,
        custom_status_version=custom_version,
        block=decode_block(block),
    )


def _pending_info(snapshot: Snapshot, row: Any) -> InstanceInfo:
    created_at, instance_id, key, suspended, block, custom_status, custom_version = row
    name, version, parent = who(snapshot, instance_id)
    execution_id = 1
    if key is not None:
        execution_id = snapshot.row(queries.LAST_HISTORY_EXECUTION, (key,))[0]
    return InstanceInfo(
        instance_id=instance_id,
        name=name,
        version=version,
        execution_id=execution_id,
        status=rules.shown_status(None, suspended=bool(suspended), blocked=block is not None),
        output=None,
        created_at_ms=created_at,
        updated_at_ms=created_at,
        completed_at_ms=None,
        parent_instance_id=parent,
        custom_status=custom_status,
        custom_status_version=custom_version or 0,
        block=decode_block(block),
    )


def who(snapshot: Snapshot, instance_id: str) -> tuple[str, str | None, str | None]:
    """Name, version and parent of an instance that no turn has named: its first queued start."""
    start = snapshot.row(queries.QUEUED_START, (instance_id,))
    return (rules.UNKNOWN_NAME, None, None) if start is None else start[:3]


def decode_block(text: str | None) -> Block | None:
    return None if text is None else _block_decoder.decode(text)


_block_decoder: Final = msgspec.json.Decoder(Block)
