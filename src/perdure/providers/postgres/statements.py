"""Every statement that the store sends. ``{schema}`` is the quoted schema.

Statements that write call a function of the schema (see ``functions``): one call, one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, LiteralString

from psycopg import sql

if TYPE_CHECKING:
    from perdure.providers.records import InstanceQuery


class Statements:
    """Turns templates into statements for one schema, whose name was checked."""

    def __init__(self, schema: str) -> None:
        self._schema = sql.Identifier(schema)
        self._ready: dict[LiteralString, bytes] = {}

    def __call__(self, template: LiteralString) -> bytes:
        statement = self._ready.get(template)
        if statement is None:
            composed = sql.SQL(template).format(schema=self._schema)
            statement = self._ready[template] = composed.as_bytes(None)
        return statement


# --- batches: (lane, batch number, sent again, operations, parts) to an answer

COMMIT_TURNS: Final = "SELECT {schema}.apply_batch('commit_turns', $1, $2, $3, $4, $5)"
START_TURNS: Final = "SELECT {schema}.apply_batch('start_turns', $1, $2, $3, $4, $5)"
ABANDON_TURNS: Final = "SELECT {schema}.apply_batch('abandon_turns', $1, $2, $3, $4, $5)"
COMPLETE_WORK: Final = "SELECT {schema}.apply_batch('complete_work', $1, $2, $3, $4, $5)"
ABANDON_WORK: Final = "SELECT {schema}.apply_batch('abandon_work', $1, $2, $3, $4, $5)"
ENQUEUE_WORK: Final = "SELECT {schema}.apply_batch('enqueue_work', $1, $2, $3, $4, $5)"
ENQUEUE_MESSAGES: Final = "SELECT {schema}.apply_batch('enqueue_messages', $1, $2, $3, $4, $5)"
REPLACE_INSTANCES: Final = "SELECT {schema}.apply_batch('replace_instances', $1, $2, $3, $4, $5)"
APPEND_HISTORY: Final = "SELECT {schema}.apply_batch('append_history', $1, $2, $3, $4, $5)"

# --- turns and work

FETCH_TURNS: Final = "SELECT * FROM {schema}.fetch_turns($1, $2, $3, $4, $5, $6, $7, $8)"
FETCH_WORK: Final = "SELECT * FROM {schema}.fetch_work($1, $2, $3, $4, $5, $6, $7, $8, $9)"
RENEW_TURNS: Final = "SELECT {schema}.renew_turns($1)"
RENEW_WORK: Final = "SELECT {schema}.renew_work($1)"
FIND_TURNS: Final = """
    SELECT lock_token, instance_id FROM {schema}.instance_locks WHERE lock_token = ANY ($1)
"""
FIND_WORK: Final = """
    SELECT lock_token, instance_id FROM {schema}.worker_queue WHERE lock_token = ANY ($1)
"""
RENEW_SESSIONS: Final = "SELECT {schema}.renew_sessions($1, $2, $3)"
CLEANUP_SESSIONS: Final = "SELECT {schema}.cleanup_sessions()"

# --- reading

READ_HISTORY: Final = """
    SELECT event_id, data FROM {schema}.history
    WHERE instance_id = $1 AND execution_id = $2 AND event_id > $3
    ORDER BY event_id LIMIT $4
"""
READ_LATEST_HISTORY: Final = """
    SELECT event_id, data FROM {schema}.history
    WHERE instance_id = $1 AND execution_id = greatest(
        (SELECT execution_id FROM {schema}.instances WHERE instance_id = $1),
        (SELECT max(execution_id) FROM {schema}.history WHERE instance_id = $1)
    )
    ORDER BY event_id
"""
GET_CUSTOM_STATUS: Final = """
    SELECT custom_status, custom_status_version FROM {schema}.instances
    WHERE instance_id = $1 AND custom_status_version > $2
"""
GET_KV_VALUE: Final = """
    SELECT CASE WHEN d.instance_id IS NULL THEN s.value ELSE d.value END
    FROM (VALUES ($1, $2)) AS k (instance_id, key)
    LEFT JOIN {schema}.kv_delta d ON d.instance_id = k.instance_id AND d.key = k.key
    LEFT JOIN {schema}.kv_store s ON s.instance_id = k.instance_id AND s.key = k.key
"""
GET_KV_VALUES: Final = """
    SELECT coalesce(d.key, s.key),
        CASE WHEN d.key IS NULL THEN s.value ELSE d.value END,
        CASE WHEN d.key IS NULL THEN s.updated_at ELSE d.updated_at END
    FROM (SELECT * FROM {schema}.kv_store WHERE instance_id = $1) s
    FULL JOIN (SELECT * FROM {schema}.kv_delta WHERE instance_id = $1) d USING (key)
    WHERE d.key IS NULL OR d.value IS NOT NULL
    ORDER BY 1
"""
GET_KV_STORE: Final = """
    SELECT key, value, updated_at FROM {schema}.kv_store WHERE instance_id = $1 ORDER BY key
"""

# --- administration

LIST_EXECUTIONS: Final = """
    SELECT execution_id FROM {schema}.executions WHERE instance_id = $1 ORDER BY execution_id
"""
LATEST_EXECUTION_ID: Final = """
    SELECT greatest(
        (SELECT max(execution_id) FROM {schema}.executions WHERE instance_id = $1),
        (SELECT max(execution_id) FROM {schema}.history WHERE instance_id = $1)
    )
"""
GET_EXECUTION: Final = """
    SELECT x.execution_id, x.status, x.output, x.started_at, x.completed_at, (
        SELECT count(*) FROM {schema}.history h
        WHERE h.instance_id = x.instance_id AND h.execution_id = x.execution_id
    ), x.framework_version
    FROM {schema}.executions x WHERE x.instance_id = $1 AND x.execution_id = $2
"""
LIST_CHILDREN: Final = """
    SELECT instance_id FROM {schema}.instances WHERE parent_instance_id = $1
    ORDER BY created_at, instance_id
"""
GET_TREE: Final = """
    SELECT {schema}.tree_of(instance_id) FROM {schema}.instances WHERE instance_id = $1
"""
SUSPEND_INSTANCE: Final = "SELECT {schema}.suspend_instance($1)"
RESUME_INSTANCE: Final = "SELECT {schema}.resume_instance($1)"
LOCK_INSTANCE: Final = "SELECT {schema}.lock_instance($1, $2, $3)"
GET_DEPTHS: Final = """
    WITH clock AS MATERIALIZED (SELECT {schema}.now_ms() AS now), entries AS (
        SELECT 'orchestrator' AS queue, NULL AS name, NULL AS tag, q.visible_at,
            l.instance_id IS NOT NULL AS is_locked
        FROM clock CROSS JOIN {schema}.orchestrator_queue q
        LEFT JOIN {schema}.instance_locks l
            ON l.instance_id = q.instance_id AND l.lock_token = q.lock_token
            AND l.locked_until > clock.now
        UNION ALL
        SELECT 'worker', w.name, w.tag, w.visible_at, coalesce(w.locked_until > clock.now, false)
        FROM clock CROSS JOIN {schema}.worker_queue w
    )
    SELECT e.queue, e.name, e.tag,
        count(*) FILTER (WHERE NOT e.is_locked AND e.visible_at <= clock.now),
        count(*) FILTER (WHERE NOT e.is_locked AND e.visible_at > clock.now),
        count(*) FILTER (WHERE e.is_locked),
        max(clock.now - e.visible_at)
            FILTER (WHERE NOT e.is_locked AND e.visible_at <= clock.now)
    FROM clock CROSS JOIN entries e GROUP BY e.queue, e.name, e.tag
    UNION ALL
    SELECT 'dead_letters', NULL, NULL, count(*), 0, 0, NULL FROM {schema}.dead_letters
"""
LIST_MESSAGES: Final = """
    SELECT coalesce(json_agg(m.entry ORDER BY m.message_id), '[]')::text
    FROM (
        SELECT q.message_id,
            {schema}.queued_message(q, l.instance_id IS NOT NULL) AS entry
        FROM {schema}.orchestrator_queue q
        LEFT JOIN {schema}.instance_locks l
            ON l.instance_id = q.instance_id AND l.lock_token = q.lock_token
            AND l.locked_until > (SELECT {schema}.now_ms())
        WHERE q.instance_id = $1
        ORDER BY q.message_id LIMIT $2
    ) m
"""
LIST_WORK: Final = """
    SELECT coalesce(json_agg(m.entry ORDER BY m.message_id), '[]')::text
    FROM (
        SELECT w.message_id, {schema}.queued_work(
            w, CASE WHEN w.locked_until > (SELECT {schema}.now_ms()) THEN w.locked_until END
        ) AS entry
        FROM {schema}.worker_queue w
        WHERE w.instance_id = $1
        ORDER BY w.message_id LIMIT $2
    ) m
"""
LIST_DEAD_LETTERS: Final = """
    SELECT letter_id, reason, dead_since, message FROM {schema}.dead_letters
    ORDER BY letter_id LIMIT $1
"""
REQUEUE_LETTER: Final = "SELECT {schema}.requeue_letter($1)"
DELETE_LETTER: Final = "DELETE FROM {schema}.dead_letters WHERE letter_id = $1 RETURNING letter_id"
DELETE_INSTANCES: Final = "SELECT {schema}.delete_instances($1, $2, $3, $4)::text"
_LIST_MATCHING: Final[LiteralString] = """
    SELECT i.created_at, i.instance_id FROM {schema}.instances i
    WHERE ($1::text[] IS NULL OR i.instance_id = ANY ($1))
        AND ($2::bigint IS NULL OR i.completed_at < $2)
        AND (i.created_at, i.instance_id) > ($3, $4)
"""
_OLDEST_FIRST: Final[LiteralString] = " ORDER BY i.created_at, i.instance_id LIMIT $5"
LIST_FINISHED_ROOTS: Final[LiteralString] = (
    _LIST_MATCHING + "AND i.parent_instance_id IS NULL AND {schema}.has_ended(i)" + _OLDEST_FIRST
)
LIST_BEGUN: Final[LiteralString] = _LIST_MATCHING + "AND i.execution_id > 0" + _OLDEST_FIRST
PRUNE_INSTANCE: Final = "SELECT {schema}.prune_instance($1, $2, $3)::text"
GET_TOTALS: Final = """
    SELECT (SELECT count(*) FROM {schema}.instances),
        (SELECT count(*) FROM {schema}.executions), (SELECT count(*) FROM {schema}.history)
"""
COUNT_BY_STATUS: Final = "SELECT status, count(*) FROM {schema}.instances GROUP BY status"
REGISTER_WORKER: Final = """
    WITH clock AS MATERIALIZED (
        SELECT {schema}.now_ms() AS now, set_config('synchronous_commit', 'off', true)
    ), lapsed AS (
        DELETE FROM {schema}.workers k USING clock c
        WHERE k.lapses_at < c.now - 86400000 AND k.worker_id <> $1
    ), entry AS (
        INSERT INTO {schema}.workers (worker_id, info, lapses_at)
        SELECT $1, jsonb_set($2::jsonb, '{{seen_at_ms}}', to_jsonb(c.now)),
            c.now + $3
        FROM clock c
        ON CONFLICT (worker_id) DO UPDATE
            SET info = EXCLUDED.info, lapses_at = EXCLUDED.lapses_at
    )
    SELECT info FROM {schema}.workers WHERE info::jsonb -> 'process' ->> 0 = $4
"""
"""Returns the workers of that place as they were before, also the one that is replaced.

Deletes those that lapsed a day ago. As with locks, a crash may lose it."""
REMOVE_WORKER: Final = """
    DELETE FROM {schema}.workers
    WHERE worker_id = $1 AND set_config('synchronous_commit', 'off', true) = 'off'
"""
LIST_WORKERS: Final = """
    SELECT info FROM {schema}.workers WHERE lapses_at > (SELECT {schema}.now_ms())
    ORDER BY worker_id
"""
RELEASE_HOLDER: Final = "SELECT {schema}.release_holder($1)"
EXPORT_INSTANCE: Final = "SELECT {schema}.export_instance($1)"
IMPORT_INSTANCE: Final = "SELECT {schema}.import_instance($1::jsonb, $2)"
MARK_MOVED: Final = "SELECT {schema}.mark_moved($1)"
GET_STORE: Final = """
    SELECT s.format_version, s.moved_to, (SELECT max(number) FROM {schema}.migrations),
        {schema}.now_ms()
    FROM {schema}.store s
"""
WITHOUT_READINESS: Final = """
    SELECT DISTINCT q.instance_id FROM {schema}.orchestrator_queue AS q WHERE NOT EXISTS
        (SELECT 1 FROM {schema}.instance_locks AS l WHERE l.instance_id = q.instance_id) LIMIT 20
"""
GET_SIZE: Final = """
    SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relnamespace = $1::regnamespace AND relkind = 'r'
"""
REMOVE_LANES: Final = """
    DELETE FROM {schema}.lanes
    WHERE (lane = ANY ($1) OR used_at < (SELECT {schema}.now_ms()) - $2)
        AND set_config('synchronous_commit', 'off', true) = 'off'
"""

# --- instances that match a query: fixed pieces of SQL, chosen by the fields of the query

INSTANCE_COLUMNS: Final[dict[str, LiteralString]] = {
    "instance_id": "i.instance_id",
    "name": "coalesce(i.name, 'unknown')",
    "version": "i.version",
    "execution_id": """coalesce(nullif(i.execution_id, 0), (
            SELECT max(h.execution_id) FROM {schema}.history h WHERE h.instance_id = i.instance_id
        ), 1)""",
    "status": "i.status",
    "output": "x.output",
    "created_at_ms": "i.created_at",
    "updated_at_ms": "i.updated_at",
    "completed_at_ms": "i.completed_at",
    "parent_instance_id": "i.parent_instance_id",
    "custom_status": "i.custom_status",
    "custom_status_version": "i.custom_status_version",
    "block": "l.block::json",
}
"""The columns of a listing, by the field of ``InstanceInfo``."""
_SELECT: Final[LiteralString] = ", ".join(INSTANCE_COLUMNS.values())
_COLUMNS: Final[LiteralString] = f"""
    SELECT {_SELECT}
    FROM {{schema}}.instances i
    LEFT JOIN {{schema}}.executions x
        ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
    LEFT JOIN {{schema}}.instance_locks l ON l.instance_id = i.instance_id
"""  # noqa: S608 - of constants
_COUNT: Final[LiteralString] = "SELECT count(*) FROM {schema}.instances i"
_ORDER: Final[LiteralString] = " ORDER BY i.created_at DESC, i.instance_id DESC LIMIT ?"

GET_INFO: Final[LiteralString] = _COLUMNS + " WHERE i.instance_id = $1"
"""Reads one instance. The server plans a statement for several ids again at each call."""
GET_INFOS: Final[LiteralString] = _COLUMNS + " WHERE i.instance_id = ANY ($1)"

# By field of the query; each ? stands for its value.
_CONDITIONS: Final[dict[str, LiteralString]] = {
    "statuses": "i.status = ANY (?)",
    "name": "coalesce(i.name, 'unknown') = ?",
    "version": "i.version = ?",
    "instance_ids": "i.instance_id = ANY (?)",
    "id_prefix": "starts_with(i.instance_id, ?) AND i.instance_id >= ?",
    "parent_instance_id": "i.parent_instance_id = ?",
    "created_after_ms": "i.created_at > ?",
    "created_before_ms": "i.created_at < ?",
    "completed_after_ms": "i.completed_at > ?",
    "completed_before_ms": "i.completed_at < ?",
}
_ROOTS: Final[LiteralString] = "i.parent_instance_id IS NULL"
_PAGE: Final[LiteralString] = "(i.created_at, i.instance_id) < (?, ?)"

# Python compares the text without regard to case. The server leaves out rows that cannot match: for
# plain ASCII lower() is enough, any other text is left to Python.
_TEXT: Final[LiteralString] = """EXISTS (
    SELECT FROM unnest(ARRAY[i.instance_id, i.name, i.custom_status, (
        SELECT o.output FROM {schema}.executions o
        WHERE o.instance_id = i.instance_id AND o.execution_id = i.execution_id
    )]) AS t (text)
    WHERE octet_length(t.text) <> char_length(t.text)
        OR strpos(lower(t.text COLLATE "C"), ?) > 0
)"""


_PLACES: Final[tuple[LiteralString, ...]] = (
    *("$1", "$2", "$3", "$4", "$5", "$6", "$7", "$8"),
    *("$9", "$10", "$11", "$12", "$13", "$14", "$15", "$16"),
)


def select_page(
    query: InstanceQuery | None, before: tuple[int, str] | None, limit: int
) -> tuple[LiteralString, list[Any]]:
    """Select a page, newest first. With ``text`` the caller still has to check each row."""
    conditions, parameters = _conditions(query)
    if before is not None:
        conditions.append(_PAGE)
        parameters += before
    return _numbered(_COLUMNS + _where(conditions) + _ORDER), [*parameters, limit]


def select_count(query: InstanceQuery | None) -> tuple[LiteralString, list[Any]]:
    """Count matching instances; only for queries without ``text``."""
    conditions, parameters = _conditions(query)
    return _numbered(_COUNT + _where(conditions)), parameters


def _conditions(query: InstanceQuery | None) -> tuple[list[LiteralString], list[Any]]:
    conditions: list[LiteralString] = []
    parameters: list[Any] = []
    if query is None:
        return conditions, parameters
    for field, condition in _CONDITIONS.items():
        value = getattr(query, field)
        if value is not None:
            conditions.append(condition)
            parameters += [value] * condition.count("?")
    if query.roots_only:
        conditions.append(_ROOTS)
    if query.text is not None:
        conditions.append(_TEXT)
        folded = query.text.casefold()
        parameters.append(folded if folded.isascii() else "\x7f")
    return conditions, parameters


def _where(conditions: list[LiteralString]) -> LiteralString:
    return " WHERE " + " AND ".join(conditions) if conditions else ""


def _numbered(statement: LiteralString) -> LiteralString:
    """Return the statement with a number in place of each ?."""
    for place in _PLACES:
        statement = statement.replace("?", place, 1)
    return statement
