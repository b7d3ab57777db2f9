-- Control, deletion and moving. Each answers with a code: NULL for done, else what stood against it.

CREATE FUNCTION suspend_instance(p_id text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_instance instances;
BEGIN
    PERFORM lock_instances(ARRAY[p_id]);
    SELECT * INTO v_instance FROM instances WHERE instance_id = p_id;
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF has_ended(v_instance) THEN
        RETURN 'ended';
    END IF;
    INSERT INTO instance_locks AS l (instance_id, suspended) VALUES (p_id, true)
    ON CONFLICT (instance_id) DO UPDATE SET
        suspended = true, lock_token = NULL, locked_until = NULL, owner = NULL, kept = false
    WHERE NOT l.suspended;
    UPDATE instances SET status = shown_status(execution_status, true, false)
    WHERE instance_id = p_id;
    PERFORM place_instances(ARRAY[p_id]);
    RETURN NULL;
END $$;

CREATE FUNCTION resume_instance(p_id text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_instance instances;
BEGIN
    PERFORM lock_instances(ARRAY[p_id]);
    SELECT * INTO v_instance FROM instances WHERE instance_id = p_id;
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF has_ended(v_instance) THEN
        RETURN 'ended';
    END IF;
    UPDATE instance_locks SET suspended = false, block = NULL, not_before = NULL
    WHERE instance_id = p_id;
    UPDATE orchestrator_queue SET attempt_count = 0
    WHERE instance_id = p_id AND attempt_count > 0;
    UPDATE instances SET status = shown_status(execution_status, false, false)
    WHERE instance_id = p_id;
    PERFORM place_instances(ARRAY[p_id]);
    RETURN NULL;
END $$;

-- Takes the lock for an operator, whoever holds it.
CREATE FUNCTION lock_instance(p_id text, p_token text, p_lock_ms bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
BEGIN
    INSERT INTO instance_locks (instance_id) VALUES (p_id) ON CONFLICT DO NOTHING;
    PERFORM lock_instances(ARRAY[p_id]);
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_id) THEN
        PERFORM forget_instances(ARRAY[p_id]);
        RETURN 'missing';
    END IF;
    UPDATE instance_locks SET
        lock_token = p_token, locked_until = now_ms() + p_lock_ms, owner = NULL, kept = false
    WHERE instance_id = p_id;
    PERFORM place_instances(ARRAY[p_id]);
    RETURN NULL;
END $$;

-- --- deletion

-- {instances, executions, events, messages}, or {refused, instance_id, status}.
CREATE FUNCTION delete_instances(p_ids text[], p_force boolean) RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_refused jsonb;
BEGIN
    PERFORM lock_for_removal(p_ids);
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = ANY (p_ids)) THEN
        RETURN '{"refused": "missing"}';
    END IF;
    SELECT jsonb_build_object(
        'refused', 'running', 'instance_id', i.instance_id, 'status', i.status
    ) INTO v_refused
    FROM instances i
    WHERE i.instance_id = ANY (p_ids) AND NOT p_force AND NOT has_ended(i)
    LIMIT 1;
    IF v_refused IS NULL THEN
        SELECT jsonb_build_object(
            'refused', 'tree', 'instance_id', i.parent_instance_id, 'status', i.instance_id
        ) INTO v_refused
        FROM instances i
        WHERE i.parent_instance_id = ANY (p_ids) AND NOT i.instance_id = ANY (p_ids)
        LIMIT 1;
    END IF;
    IF v_refused IS NOT NULL THEN
        RETURN v_refused;
    END IF;
    RETURN (SELECT to_jsonb(r) FROM remove_instances(p_ids) r);
END $$;

-- {instances_processed, executions, events}; NULL for an unknown instance.
CREATE FUNCTION prune_instance(p_id text, p_keep_last bigint, p_before bigint) RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_current bigint;
    v_doomed bigint[];
    v_events bigint;
BEGIN
    PERFORM lock_instances(ARRAY[p_id]);
    SELECT execution_id INTO v_current FROM instances WHERE instance_id = p_id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_doomed := ARRAY(
        SELECT x.execution_id
        FROM (
            SELECT e.*, row_number() OVER (ORDER BY e.execution_id DESC) AS age
            FROM executions e WHERE e.instance_id = p_id
        ) x
        WHERE x.age > greatest(p_keep_last, 1) AND x.execution_id <> v_current
            AND ends_execution(x.status)
            AND (p_before IS NULL OR x.completed_at < p_before)
    );
    DELETE FROM history WHERE instance_id = p_id AND execution_id = ANY (v_doomed);
    GET DIAGNOSTICS v_events = ROW_COUNT;
    DELETE FROM executions WHERE instance_id = p_id AND execution_id = ANY (v_doomed);
    RETURN jsonb_build_object(
        'instances_processed', 1, 'executions', cardinality(v_doomed), 'events', v_events
    );
END $$;

-- --- dead letters

CREATE FUNCTION requeue_letter(p_letter bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_message jsonb;
BEGIN
    DELETE FROM dead_letters WHERE letter_id = p_letter RETURNING message::jsonb INTO v_message;
    IF NOT FOUND THEN
        RETURN 'missing';
    END IF;
    PERFORM lock_instances(ARRAY[v_message ->> 'instance_id']);
    PERFORM add_messages(jsonb_build_array(v_message), now_ms());
    RETURN NULL;
END $$;
