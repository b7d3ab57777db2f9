"""Which instances fit a query: fixed pieces of SQL, put together by what the query asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, LiteralString

if TYPE_CHECKING:
    from perdure.providers.items import InstanceQuery

_COLUMNS: Final[LiteralString] = """
    SELECT i.instance_id, coalesce(i.name, 'unknown'), i.version,
        coalesce(nullif(i.execution_id, 0), (
            SELECT max(h.execution_id) FROM {schema}.history h WHERE h.instance_id = i.instance_id
        ), 1),
        i.status, x.output, i.created_at, i.updated_at, i.completed_at, i.parent_instance_id,
        i.custom_status, i.custom_status_version, l.block
    FROM {schema}.instances i
    LEFT JOIN {schema}.executions x
        ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
    LEFT JOIN {schema}.instance_locks l ON l.instance_id = i.instance_id
"""
_COUNT: Final[LiteralString] = "SELECT count(*) FROM {schema}.instances i"
_ORDER: Final[LiteralString] = " ORDER BY i.created_at DESC, i.instance_id DESC LIMIT %(limit)s"

INFO: Final[LiteralString] = _COLUMNS + " WHERE i.instance_id = %s"

# By the field of the query that asks for it; each binds the parameter of the same name.
_CONDITIONS: Final[dict[str, LiteralString]] = {
    "statuses": "i.status = ANY (%(statuses)s)",
    "name": "coalesce(i.name, 'unknown') = %(name)s",
    "version": "i.version = %(version)s",
    "instance_ids": "i.instance_id = ANY (%(instance_ids)s)",
    "id_prefix": "starts_with(i.instance_id, %(id_prefix)s) AND i.instance_id >= %(id_prefix)s",
    "parent_instance_id": "i.parent_instance_id = %(parent_instance_id)s",
    "created_after_ms": "i.created_at > %(created_after_ms)s",
    "created_before_ms": "i.created_at < %(created_before_ms)s",
    "completed_after_ms": "i.completed_at > %(completed_after_ms)s",
    "completed_before_ms": "i.completed_at < %(completed_before_ms)s",
}
_ROOTS: Final[LiteralString] = "i.parent_instance_id IS NULL"
_PAGE: Final[LiteralString] = "(i.created_at, i.instance_id) < (%(before_ms)s, %(before_id)s)"

# What people type is compared by Python's rules for case. The server leaves out only what cannot
# fit: a text of plain ASCII is found by lower(), any other one may turn into anything.
_TEXT: Final[LiteralString] = """EXISTS (
    SELECT FROM unnest(ARRAY[i.instance_id, i.name, i.custom_status, (
        SELECT o.output FROM {schema}.executions o
        WHERE o.instance_id = i.instance_id AND o.execution_id = i.execution_id
    )]) AS t (text)
    WHERE octet_length(t.text) <> char_length(t.text)
        OR strpos(lower(t.text COLLATE "C"), %(text)s) > 0
)"""


def select_page(
    query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
) -> tuple[LiteralString, dict[str, Any]]:
    """Newest first. With ``text`` the rows still have to be looked at one by one."""
    conditions, parameters = _conditions(query)
    if before is not None:
        conditions.append(_PAGE)
        parameters["before_ms"], parameters["before_id"] = before
    parameters["limit"] = limit
    return _COLUMNS + _where(conditions) + _ORDER, parameters


def select_count(query: InstanceQuery | None) -> tuple[LiteralString, dict[str, Any]]:
    """Only for queries without ``text``."""
    conditions, parameters = _conditions(query)
    return _COUNT + _where(conditions), parameters


def _conditions(query: InstanceQuery | None) -> tuple[list[LiteralString], dict[str, Any]]:
    conditions: list[LiteralString] = []
    parameters: dict[str, Any] = {}
    if query is None:
        return conditions, parameters
    for field, condition in _CONDITIONS.items():
        value = getattr(query, field)
        if value is not None:
            conditions.append(condition)
            parameters[field] = value
    if query.statuses is not None:
        parameters["statuses"] = [str(status) for status in query.statuses]
    if query.instance_ids is not None:
        parameters["instance_ids"] = list(query.instance_ids)
    if query.roots_only:
        conditions.append(_ROOTS)
    if query.text is not None:
        conditions.append(_TEXT)
        folded = query.text.casefold()
        parameters["text"] = folded if folded.isascii() else "\x7f"
    return conditions, parameters


def _where(conditions: list[LiteralString]) -> LiteralString:
    return " WHERE " + " AND ".join(conditions) if conditions else ""
