"""Instances as administration sees them: one by one, in pages, newest first, or counted."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from perdure.limits import ID_CHARACTERS_MAX
from perdure.model.failures import Block
from perdure.model.status import Status
from perdure.providers import rules
from perdure.providers.records import InstanceInfo, InstanceQuery, InstanceTree, SystemMetrics
from perdure.providers.sqlite import instances, statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from perdure.providers.sqlite.transaction import Snapshot

_Position: TypeAlias = tuple[int, str]
"""(created_at, instance id): the order of the listing."""

_PREFIX_MATCHES_TO_SORT: Final = 2_000
"""Up to so many ids with a prefix are sorted; beyond that the listing is walked and filtered."""

_FIELDS: Final = InstanceInfo.__struct_fields__


def _columns(**others: str) -> str:
    """Return a column for each field of InstanceInfo, and whether the instance is suspended.

    It is the column of ``instances`` with the same name, or another that is given by the field.
    """
    columns = [others.get(field, f"i.{field.removesuffix('_ms')}") for field in _FIELDS]
    return ", ".join([*columns, "l.suspended"])


_STARTED: Final = _columns(
    output="e.output",
    updated_at_ms="coalesce(l.touched_at, i.updated_at)",
    completed_at_ms="e.completed_at",
    block="l.block",
)
_SELECT_STARTED: Final = f"""
SELECT {_STARTED}
FROM instances AS i
LEFT JOIN executions AS e ON e.instance_key = i.instance_key AND e.execution_id = i.execution_id
LEFT JOIN instance_locks AS l ON l.instance_id = i.instance_id
"""  # noqa: S608 - of constants

_PENDING: Final = _columns(
    instance_id="l.instance_id",
    name="NULL",
    status="NULL",
    output="NULL",
    execution_id="(SELECT max(h.execution_id) FROM history AS h"
    " WHERE h.instance_key = l.instance_key)",
    created_at_ms="l.pending_since",
    updated_at_ms="l.pending_since",
    completed_at_ms="NULL",
    custom_status_version="ifnull(i.custom_status_version, 0)",
    block="l.block",
)
_SELECT_PENDING: Final = f"""
SELECT {_PENDING}
FROM instance_locks AS l LEFT JOIN instances AS i ON i.instance_key = l.instance_key
"""  # noqa: S608 - of constants
"""Lists instances whose start is queued, without name and status."""

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
"""Keeps all rows that may contain an ASCII text; rows that are not ASCII are checked later."""

_OTHER_STATUS_COUNTS: Final = """
SELECT status, count(*) FROM instances
WHERE execution_id > 0 AND status < 'Completed' GROUP BY status
UNION ALL
SELECT status, count(*) FROM instances
WHERE execution_id > 0 AND status > 'Completed' GROUP BY status
"""
"""Most instances of a big store have completed: these are counted as what remains of all."""
_COUNT_STARTED: Final = "SELECT count(*) FROM instances AS i "
_COUNT_ALL_STARTED: Final = """
SELECT (SELECT count(*) FROM instances) - (SELECT count(*) FROM instances WHERE execution_id = 0)
"""
"""A table without a condition is counted by its pages."""
_NAMELESS: Final = "i.execution_id > 0 AND i.name IS NULL"
"""Instances that no turn has named and that consumed no start: a queued start names them.

They are rare, and looked at one by one if a query asks for what a start says.
"""
_COUNT_PENDING: Final = """
SELECT l.suspended, l.block IS NOT NULL, count(*) FROM instance_locks AS l
"""


_PENDING_AS: Final = {
    Status.PAUSED: "l.suspended",
    Status.BLOCKED: "(NOT l.suspended AND l.block IS NOT NULL)",
    Status.PENDING: "(NOT l.suspended AND l.block IS NULL)",
}
"""The condition for each status that an instance without a turn can have."""


def get_info(snapshot: Snapshot, instance_id: str) -> InstanceInfo:
    found = find_info(snapshot, instance_id)
    if found is None:
        raise rules.no_instance(instance_id)
    return found


def find_info(snapshot: Snapshot, instance_id: str) -> InstanceInfo | None:
    row = snapshot.row(
        _SELECT_STARTED + "WHERE i.instance_id = ? AND i.execution_id > 0", (instance_id,)
    )
    if row is not None:
        return _info(snapshot, row)
    row = snapshot.row(
        _SELECT_PENDING + "WHERE l.instance_id = ? AND l.pending_since IS NOT NULL", (instance_id,)
    )
    return None if row is None else _info(snapshot, row)


def get_tree(snapshot: Snapshot, root_id: str) -> InstanceTree:
    """Return the ids of an instance and of its descendants. Errors: NotFound."""
    get_info(snapshot, root_id)
    tree = instances.tree_of(snapshot, root_id)
    return InstanceTree(root_id=root_id, instance_ids=tuple(tree))


def list_page(
    snapshot: Snapshot, query: InstanceQuery | None, before: _Position | None, limit: int
) -> list[InstanceInfo]:
    return list(islice(_matching(snapshot, query, before), limit))


def count(snapshot: Snapshot, query: InstanceQuery | None) -> int:
    query = query or InstanceQuery()
    statuses = query.statuses
    is_by_status = query == InstanceQuery(statuses=statuses)
    if is_by_status and (statuses is None or Status.COMPLETED in statuses):
        counts = count_by_status(snapshot)
        return sum(n for status, n in counts.items() if statuses is None or status in statuses)
    if query.text is not None or query.instance_ids is not None:
        return sum(1 for _ in _matching(snapshot, query, None))
    return _count_started(snapshot, query) + _count_pending(snapshot, query)


def count_by_status(snapshot: Snapshot) -> dict[Status, int]:
    counts = {Status(status): number for status, number in snapshot.rows(_OTHER_STATUS_COUNTS)}
    started = snapshot.row(_COUNT_ALL_STARTED)[0]
    completed = started - sum(counts.values())
    if completed:
        counts[Status.COMPLETED] = completed
    pending = _COUNT_PENDING + "WHERE l.pending_since IS NOT NULL GROUP BY 1, 2"
    for suspended, blocked, number in snapshot.rows(pending):
        status = _pending_status(suspended, blocked)
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
    snapshot: Snapshot, query: InstanceQuery | None, before: _Position | None
) -> Iterator[InstanceInfo]:
    """Yield the instances that fit, newest first. SQL narrows them down, Python checks them."""
    query = query or InstanceQuery()
    if query.instance_ids is not None:
        infos: Iterator[InstanceInfo] = _named(snapshot, query.instance_ids, before)
    else:
        infos = heapq.merge(
            *_started_sources(snapshot, query, before),
            _pending_source(snapshot, query, before),
            key=_position_of,
            reverse=True,
        )
    return (info for info in infos if rules.fits_query(info, query))


def _position_of(info: InstanceInfo) -> _Position:
    return info.created_at_ms, info.instance_id


def _named(
    snapshot: Snapshot, instance_ids: tuple[str, ...], before: _Position | None
) -> Iterator[InstanceInfo]:
    found = [find_info(snapshot, instance_id) for instance_id in set(instance_ids)]
    infos = [
        info
        for info in found
        if info is not None and (before is None or _position_of(info) < before)
    ]
    return iter(sorted(infos, key=_position_of, reverse=True))


def _started_sources(
    snapshot: Snapshot, query: InstanceQuery, before: _Position | None
) -> list[Iterator[InstanceInfo]]:
    """Return ordered queries whose union has all instances: one for each status, so that none has
    to be sorted, and one for instances that only a queued start names.
    """
    statuses: Iterable[Status | None] = (None,) if query.statuses is None else query.statuses
    sources: list[Iterator[InstanceInfo]] = []
    for status in statuses:
        if status is not Status.PENDING:
            where = _started_conditions(query)
            if status is not None:
                where.add("i.status = ?", status)
            if query.id_prefix:
                _add_prefix(where, query.id_prefix, sorts=_sorts_prefix(snapshot, query.id_prefix))
            if query.text is not None and query.text.isascii():
                where.add(_MENTIONS, *[query.text.lower()] * 4)
            sources.append(_started_source(snapshot, where, before))
    if _asks_identity(query):
        sources.append(_started_source(snapshot, _Conditions(_NAMELESS), before))
    return sources


def _started_source(
    snapshot: Snapshot, where: _Conditions, before: _Position | None
) -> Iterator[InstanceInfo]:
    if before is not None:
        where.add("(i.created_at, i.instance_id) < (?, ?)", *before)
    for row in snapshot.execute(_SELECT_STARTED + where.sql + _NEWEST_STARTED, where.values):
        yield _info(snapshot, row)


def _pending_source(
    snapshot: Snapshot, query: InstanceQuery, before: _Position | None
) -> Iterator[InstanceInfo]:
    """Yield instances whose start is queued."""
    if not _may_be_pending(query):
        return
    where = _Conditions("l.pending_since IS NOT NULL")
    if before is not None:
        where.add("(l.pending_since, l.instance_id) < (?, ?)", *before)
    if query.statuses is not None:
        shown = [_PENDING_AS[each] for each in sorted(query.statuses & _PENDING_AS.keys())]
        where.add(f"({' OR '.join(shown)})")
    # Without a name in the row there are several starts, and it is judged later.
    _add_identity(
        where, query, "(l.name = ? OR l.name IS NULL)", "(l.version = ? OR l.name IS NULL)"
    )
    for row in snapshot.execute(_SELECT_PENDING + where.sql + _NEWEST_PENDING, where.values):
        yield _info(snapshot, row)


# --- counting


def _count_started(snapshot: Snapshot, query: InstanceQuery) -> int:
    where = _started_conditions(query)
    if query.statuses is not None:
        marks = ", ".join("?" * len(query.statuses))
        where.add(f"i.status IN ({marks})", *query.statuses)
    if query.id_prefix:
        _add_prefix(where, query.id_prefix, sorts=True)
    nameless: Iterable[InstanceInfo] = ()
    if _asks_identity(query) or query.roots_only:
        where.add("i.name IS NOT NULL")
        nameless = _started_source(snapshot, _Conditions(_NAMELESS), None)
    named: int = snapshot.row(_COUNT_STARTED + where.sql, where.values)[0]
    return named + sum(rules.fits_query(info, query) for info in nameless)


def _count_pending(snapshot: Snapshot, query: InstanceQuery) -> int:
    if not _may_be_pending(query):
        return 0
    by_name = InstanceQuery(statuses=query.statuses, name=query.name, version=query.version)
    if query != by_name:
        return sum(rules.fits_query(info, query) for info in _pending_source(snapshot, query, None))
    where = _Conditions("l.pending_since IS NOT NULL AND l.name IS NOT NULL")
    _add_identity(where, query, "l.name = ?", "l.version = ?")
    counted = sum(
        number
        for suspended, blocked, number in snapshot.rows(
            _COUNT_PENDING + where.sql + " GROUP BY 1, 2", where.values
        )
        if query.statuses is None or _pending_status(suspended, blocked) in query.statuses
    )
    rows = snapshot.execute(
        _SELECT_PENDING + "WHERE l.pending_since IS NOT NULL AND l.name IS NULL"
    )
    infos = (_info(snapshot, row) for row in rows)
    return int(counted + sum(rules.fits_query(info, query) for info in infos))


# --- conditions


class _Conditions:
    """A WHERE clause of constant texts, and the values that belong into it."""

    def __init__(self, condition: str) -> None:
        self._conditions = [condition]
        self.values: list[Any] = []

    @property
    def sql(self) -> str:
        return "WHERE " + " AND ".join(self._conditions)

    def add(self, condition: str, *values: Any) -> None:
        self._conditions.append(condition)
        self.values += values


def _started_conditions(query: InstanceQuery) -> _Conditions:
    """Return what the query asks of instances with a turn, except for status, prefix and text."""
    where = _Conditions("i.execution_id > 0")
    _add_identity(where, query, "i.name = ?", "i.version = ?")
    if query.parent_instance_id is not None:
        where.add("i.parent_instance_id = ?", query.parent_instance_id)
    if query.roots_only:
        where.add("i.parent_instance_id IS NULL")
    for condition, bound in (
        ("i.created_at > ?", query.created_after_ms),
        ("i.created_at < ?", query.created_before_ms),
        ("i.completed_at > ?", query.completed_after_ms),
        ("i.completed_at < ?", query.completed_before_ms),
    ):
        if bound is not None:
            where.add(condition, bound)
    return where


def _asks_identity(query: InstanceQuery) -> bool:
    return not (query.name is query.version is query.parent_instance_id is None)


def _add_identity(where: _Conditions, query: InstanceQuery, name: str, version: str) -> None:
    if query.name is not None:
        where.add(name, query.name)
    if query.version is not None:
        where.add(version, query.version)


def _sorts_prefix(snapshot: Snapshot, prefix: str) -> bool:
    """Return True if few enough ids have the prefix to find them by it and to sort them."""
    limit = _PREFIX_MATCHES_TO_SORT + 1
    bounds = (prefix, _after_prefix(prefix), limit)
    return bool(snapshot.row(_COUNT_WITH_PREFIX, bounds)[0] < limit)


def _add_prefix(where: _Conditions, prefix: str, *, sorts: bool) -> None:
    # A unary plus keeps SQLite from using the index of the column.
    column = "i.instance_id" if sorts else "+i.instance_id"
    where.add(f"{column} >= ? AND {column} < ?", prefix, _after_prefix(prefix))


def _may_be_pending(query: InstanceQuery) -> bool:
    has_ended = query.completed_after_ms is not None or query.completed_before_ms is not None
    may_fit = query.statuses is None or not query.statuses.isdisjoint(_PENDING_AS)
    return may_fit and not has_ended


def _after_prefix(prefix: str) -> str:
    """Return the least text that is greater than every text with that prefix."""
    raised = prefix.rstrip("\U0010ffff")  # no character is greater
    if not raised:
        return "\U0010ffff" * (ID_CHARACTERS_MAX + 1)
    last = ord(raised[-1])
    return raised[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)


# --- from rows to records


def _info(snapshot: Snapshot, row: Any) -> InstanceInfo:
    *values, suspended = row
    info: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    block = info["block"]
    if info["name"] is None:
        start = identity(snapshot, info["instance_id"])
        info["name"], info["version"], info["parent_instance_id"] = start
    info["execution_id"] = info["execution_id"] or 1
    if info["status"] is None:
        info["status"] = _pending_status(suspended, block is not None)
    else:
        info["status"] = Status(info["status"])
    info["block"] = decode_block(block)
    return InstanceInfo(**info)


def _pending_status(suspended: object, blocked: object) -> Status:
    return rules.shown_status(None, suspended=bool(suspended), blocked=bool(blocked))


def identity(snapshot: Snapshot, instance_id: str) -> tuple[str, str | None, str | None]:
    """Return name, version and parent from the first queued start of an instance without turns."""
    start = snapshot.row(statements.QUEUED_START, (instance_id,))
    return (rules.UNKNOWN_NAME, None, None) if start is None else start[:3]


def decode_block(text: str | None) -> Block | None:
    return None if text is None else _block_decoder.decode(text)


_block_decoder: Final = msgspec.json.Decoder(Block)
