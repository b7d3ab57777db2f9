-- Three roles: the owner of the schema migrates it; a worker reads and writes; a reader sees how
-- things stand, but no payloads. Grant with: SELECT grant_worker('shop_worker');

CREATE VIEW instance_overview AS
    SELECT instance_id, name, version, parent_instance_id, execution_id, status,
        created_at, updated_at, completed_at
    FROM instances;

CREATE VIEW execution_overview AS
    SELECT x.instance_id, x.execution_id, x.status, x.framework_version, x.started_at,
        x.completed_at, (
            SELECT count(*) FROM history h
            WHERE h.instance_id = x.instance_id AND h.execution_id = x.execution_id
        ) AS event_count
    FROM executions x;

CREATE VIEW message_overview AS
    SELECT instance_id, message_id, kind, visible_at, enqueued_at, attempt_count
    FROM orchestrator_queue;

CREATE VIEW work_overview AS
    SELECT instance_id, execution_id, activity_id, message_id, name, session_id, tag, visible_at,
        enqueued_at, attempt_count, locked_until
    FROM worker_queue;

CREATE FUNCTION grant_worker(p_role text) RETURNS void
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

CREATE FUNCTION grant_reader(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_schema text := current_schema();
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', v_schema, p_role);
    EXECUTE format(
        'GRANT SELECT ON instance_overview, execution_overview, message_overview, work_overview, '
        'dead_letters_overview, migrations TO %I', p_role
    );
END $$;

CREATE VIEW dead_letters_overview AS
    SELECT instance_id, letter_id, reason, dead_since FROM dead_letters;
