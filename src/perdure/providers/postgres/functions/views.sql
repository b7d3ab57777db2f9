-- Views, and the three roles: the owner of the schema migrates it; a worker reads and writes; a
-- reader sees status and progress, but no payloads. Grant with: SELECT grant_worker('shop_worker');

-- --- for people who read the store with SQL: docs/reference/sql-views.md documents each column

CREATE OR REPLACE VIEW v_instances AS
SELECT
    i.instance_id,
    i.name,
    i.version,
    i.status,
    coalesce(nullif(i.execution_id, 0), 1) AS execution_id,
    i.parent_instance_id,
    array_to_string(x.framework_version, '.') AS framework_version,
    x.output,
    i.custom_status,
    i.custom_status_version,
    l.block,
    time_of(i.created_at) AS created_at,
    i.created_at AS created_at_ms,
    time_of(i.updated_at) AS updated_at,
    i.updated_at AS updated_at_ms,
    time_of(i.completed_at) AS completed_at,
    i.completed_at AS completed_at_ms
FROM instances i
LEFT JOIN executions x ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
LEFT JOIN instance_locks l ON l.instance_id = i.instance_id;

CREATE OR REPLACE VIEW v_events AS
SELECT
    h.instance_id,
    h.execution_id,
    h.event_id,
    json_field(h.data, 'type') AS event_type,
    time_of(json_field(h.data, 'timestamp_ms')::bigint) AS recorded_at,
    json_field(h.data, 'timestamp_ms')::bigint AS recorded_at_ms,
    h.data
FROM history h;

CREATE OR REPLACE VIEW v_work AS
SELECT
    w.message_id,
    w.instance_id,
    w.execution_id,
    w.activity_id,
    w.name,
    CASE
        WHEN w.locked_until > c.now THEN 'locked'
        WHEN w.visible_at > c.now THEN 'delayed'
        ELSE 'ready'
    END AS state,
    w.tag,
    w.session_id,
    w.attempt_count,
    w.heartbeat,
    w.body,
    time_of(w.enqueued_at) AS enqueued_at,
    w.enqueued_at AS enqueued_at_ms,
    time_of(w.visible_at) AS visible_at,
    w.visible_at AS visible_at_ms,
    time_of(w.locked_at) AS locked_at,
    w.locked_at AS locked_at_ms,
    time_of(w.locked_until) AS locked_until,
    w.locked_until AS locked_until_ms
FROM worker_queue w
CROSS JOIN (SELECT now_ms() AS now) c;

CREATE OR REPLACE VIEW v_locks AS
SELECT
    k.kind,
    k.instance_id,
    k.execution_id,
    k.activity_id,
    k.name,
    k.owner,
    k.kept,
    k.locked_until > c.now AS is_live,
    time_of(k.locked_at) AS locked_at,
    k.locked_at AS locked_at_ms,
    time_of(k.locked_until) AS locked_until,
    k.locked_until AS locked_until_ms
FROM (
    SELECT
        'instance' AS kind, l.instance_id, nullif(i.execution_id, 0) AS execution_id,
        NULL::bigint AS activity_id, i.name, l.owner, l.kept, l.locked_at, l.locked_until
    FROM instance_locks l
    LEFT JOIN instances i ON i.instance_id = l.instance_id
    WHERE l.lock_token IS NOT NULL
    UNION ALL
    SELECT
        'work', w.instance_id, w.execution_id, w.activity_id, w.name, s.owner_id, false,
        w.locked_at, w.locked_until
    FROM worker_queue w
    LEFT JOIN sessions s ON s.session_id = w.session_id
    WHERE w.lock_token IS NOT NULL
) k
CROSS JOIN (SELECT now_ms() AS now) c;

-- --- for readers: no payloads

CREATE OR REPLACE VIEW instance_overview AS
    SELECT instance_id, name, version, parent_instance_id, execution_id, status,
        created_at, updated_at, completed_at
    FROM instances;

CREATE OR REPLACE VIEW execution_overview AS
    SELECT x.instance_id, x.execution_id, x.status, x.framework_version, x.started_at,
        x.completed_at, (
            SELECT count(*) FROM history h
            WHERE h.instance_id = x.instance_id AND h.execution_id = x.execution_id
        ) AS event_count
    FROM executions x;

CREATE OR REPLACE VIEW message_overview AS
    SELECT instance_id, message_id, kind, visible_at, enqueued_at, attempt_count
    FROM orchestrator_queue;

CREATE OR REPLACE VIEW work_overview AS
    SELECT instance_id, execution_id, activity_id, message_id, name, session_id, tag, visible_at,
        enqueued_at, attempt_count, locked_until
    FROM worker_queue;

CREATE OR REPLACE VIEW dead_letters_overview AS
    SELECT instance_id, letter_id, reason, dead_since FROM dead_letters;

CREATE OR REPLACE FUNCTION grant_worker(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_schema text := current_schema();
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', v_schema, p_role);
    EXECUTE format(
        'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO %I', v_schema, p_role
    );
    EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON migrations FROM %I', p_role);
    EXECUTE format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA %I TO %I', v_schema, p_role);
    EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA %I TO %I', v_schema, p_role);
END $$;

CREATE OR REPLACE FUNCTION grant_reader(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_schema text := current_schema();
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', v_schema, p_role);
    EXECUTE format(
        'GRANT SELECT ON instance_overview, execution_overview, message_overview, work_overview, '
        'dead_letters_overview, v_locks, migrations TO %I', p_role
    );
END $$;
