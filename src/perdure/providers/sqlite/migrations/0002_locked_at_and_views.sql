-- locked_at is the time at which the current lock was taken; extending the lock does not change it.
-- It is NULL without a lock, and for a lock that was taken before this migration.

ALTER TABLE instance_locks ADD COLUMN locked_at INTEGER;
ALTER TABLE worker_queue ADD COLUMN locked_at INTEGER;

-- The oldest message that is not delivered under the current lock has the same names as in Postgres.
ALTER TABLE instance_locks RENAME COLUMN due_at TO ready_at;
ALTER TABLE instance_locks RENAME COLUMN first_message_id TO ready_id;

-- The status of a paused instance was called Suspended before.
UPDATE instances SET status = 'Paused' WHERE status = 'Suspended';

-- Views for people who read the store with SQL. docs/reference/sql-views.md documents each column.
-- A column x_ms is milliseconds since 1970 in UTC; the column x before it is the same moment as text.
-- The library itself does not read the views.

CREATE VIEW v_instances AS
SELECT
    instance_id,
    name,
    version,
    status,
    execution_id,
    parent_instance_id,
    framework_version,
    output,
    custom_status,
    custom_status_version,
    block,
    strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at,
    created_at AS created_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', updated_at / 1000.0, 'unixepoch') AS updated_at,
    updated_at AS updated_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', completed_at / 1000.0, 'unixepoch') AS completed_at,
    completed_at AS completed_at_ms
FROM (
    SELECT i.instance_id, i.name, i.version, i.status, i.execution_id, i.parent_instance_id,
           i.framework_version, e.output, i.custom_status, i.custom_status_version, l.block,
           i.created_at, coalesce(l.touched_at, i.updated_at) AS updated_at, i.completed_at
    FROM instances AS i
    LEFT JOIN executions AS e
        ON e.instance_key = i.instance_key AND e.execution_id = i.execution_id
    LEFT JOIN instance_locks AS l ON l.instance_id = i.instance_id
    WHERE i.execution_id > 0
    UNION ALL
    -- A start is queued and no turn has run yet.
    SELECT l.instance_id, q.start_name, q.start_version,
           CASE WHEN l.suspended THEN 'Paused' WHEN l.block IS NOT NULL THEN 'Blocked'
                ELSE 'Pending' END,
           1, q.start_parent_id, NULL, NULL, i.custom_status, coalesce(i.custom_status_version, 0),
           l.block, l.pending_since, l.pending_since, NULL
    FROM instance_locks AS l
    LEFT JOIN instances AS i ON i.instance_key = l.instance_key
    LEFT JOIN orchestrator_queue AS q ON q.message_id = (
        SELECT min(s.message_id) FROM orchestrator_queue AS s
        WHERE s.instance_id = l.instance_id AND s.start_name IS NOT NULL
    )
    WHERE l.pending_since IS NOT NULL AND coalesce(i.execution_id, 0) = 0
);

CREATE VIEW v_events AS
SELECT
    i.instance_id,
    h.execution_id,
    h.event_id,
    CASE WHEN json_valid(h.data) THEN json_extract(h.data, '$.type') END AS event_type,
    CASE WHEN json_valid(h.data)
         THEN strftime('%Y-%m-%dT%H:%M:%fZ', json_extract(h.data, '$.timestamp_ms') / 1000.0,
                       'unixepoch') END AS recorded_at,
    CASE WHEN json_valid(h.data) THEN json_extract(h.data, '$.timestamp_ms') END AS recorded_at_ms,
    h.data
FROM history AS h
JOIN instances AS i ON i.instance_key = h.instance_key;

CREATE VIEW v_work AS
SELECT
    message_id,
    instance_id,
    execution_id,
    activity_id,
    name,
    CASE WHEN locked_until > now THEN 'locked' WHEN visible_at > now THEN 'delayed'
         ELSE 'ready' END AS state,
    tag,
    session_id,
    attempt_count,
    heartbeat,
    body,
    strftime('%Y-%m-%dT%H:%M:%fZ', enqueued_at / 1000.0, 'unixepoch') AS enqueued_at,
    enqueued_at AS enqueued_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', visible_at / 1000.0, 'unixepoch') AS visible_at,
    visible_at AS visible_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', locked_at / 1000.0, 'unixepoch') AS locked_at,
    locked_at AS locked_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', locked_until / 1000.0, 'unixepoch') AS locked_until,
    locked_until AS locked_until_ms
FROM worker_queue
CROSS JOIN (SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AS now);

CREATE VIEW v_locks AS
SELECT
    kind,
    instance_id,
    execution_id,
    activity_id,
    name,
    owner,
    kept,
    locked_until > now AS is_live,
    strftime('%Y-%m-%dT%H:%M:%fZ', locked_at / 1000.0, 'unixepoch') AS locked_at,
    locked_at AS locked_at_ms,
    strftime('%Y-%m-%dT%H:%M:%fZ', locked_until / 1000.0, 'unixepoch') AS locked_until,
    locked_until AS locked_until_ms
FROM (
    SELECT 'instance' AS kind, l.instance_id, i.execution_id, NULL AS activity_id, l.name, l.owner,
           l.kept, l.locked_at, l.locked_until
    FROM instance_locks AS l
    LEFT JOIN instances AS i ON i.instance_key = l.instance_key
    WHERE l.lock_token IS NOT NULL
    UNION ALL
    SELECT 'work', w.instance_id, w.execution_id, w.activity_id, w.name, s.owner_id, 0,
           w.locked_at, w.locked_until
    FROM worker_queue AS w
    LEFT JOIN sessions AS s ON s.session_id = w.session_id
    WHERE w.lock_token IS NOT NULL
)
CROSS JOIN (SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AS now);
