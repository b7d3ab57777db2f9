-- Committing, giving back and keeping turns. Each function takes a batch of operations, each of which
-- stands alone: one that is refused is named in the answer and leaves no trace.

-- Locks the rows of the instances that turns are of and send to, in order. Returns the turns whose
-- tokens are not live: {n: [code, token]}; NULL if all are.
CREATE FUNCTION lock_turns(p_turns jsonb, p_parts integer) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ARRAY(
        SELECT t.instance_id FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
    );
    v_refused jsonb;
BEGIN
    IF p_parts & 128 > 0 THEN
        v_ids := v_ids || ARRAY(
            SELECT DISTINCT m.instance_id
            FROM jsonb_to_recordset(p_turns) AS t (orchestrator_items jsonb)
            CROSS JOIN LATERAL jsonb_to_recordset(t.orchestrator_items) AS m (instance_id text)
        );
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT l.instance_id, l.lock_token, l.locked_until
        FROM instance_locks l
        WHERE l.instance_id = ANY (v_ids)
        ORDER BY l.instance_id
        FOR UPDATE
    )
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO v_refused
    FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text, token text)
    LEFT JOIN locked k ON k.instance_id = t.instance_id AND k.lock_token = t.token
    WHERE k.locked_until IS NULL OR k.locked_until <= now_ms();
    RETURN v_refused;
END $$;

CREATE FUNCTION commit_turns(
    p_lane text, p_batch bigint, p_again boolean, p_turns jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch, p_again);
    v_now bigint;
    v_refused jsonb;
    v_turns jsonb;
    v_turns_at bigint;
    v_work_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    IF p_parts & 1024 = 0 AND jsonb_array_length(p_turns) = 1 THEN
        SELECT s.now_at, s.turns_at, s.work_at INTO v_now, v_turns_at, v_work_at
        FROM commit_single(p_turns -> 0, p_parts) s;
        IF v_now IS NOT NULL THEN
            RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
                'now', v_now, 'turns_at', v_turns_at, 'work_at', v_work_at
            ));
        END IF;
    END IF;
    v_refused := lock_turns(p_turns, p_parts);
    v_turns := not_refused(p_turns, v_refused);
    v_now := now_ms();
    IF v_turns IS NOT NULL THEN
        SELECT a.turns_at, a.work_at INTO v_turns_at, v_work_at
        FROM apply_turns(v_turns, p_parts, v_now) a;
    END IF;
    RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at, 'work_at', v_work_at
    ));
END $$;

-- A message for an instance has come in at the very moment of its first turn. Sent again, it is seen.
CREATE FUNCTION refuse_overtaken() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'serialization_failure', MESSAGE = 'a message overtook a first turn';
END $$;

-- First turns that keep their locks, change nothing else and add nothing but history and work, of
-- instances that nothing is known of. Returns when the first work item added is free.
CREATE FUNCTION write_first_turns(p_turns jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_placed integer;
BEGIN
    INSERT INTO instance_locks (
        instance_id, route, framework_version, lock_token, locked_until, owner, kept
    )
    SELECT
        t.instance_id, route_of(t.name, t.version), t.framework_version, t.token,
        p_now + t.keep_lock_ms, t.owner, true
    FROM jsonb_to_recordset(p_turns) AS t (
        instance_id text, name text, version text, framework_version bigint[], token text,
        keep_lock_ms bigint, owner text
    )
    ORDER BY t.instance_id
    ON CONFLICT (instance_id) DO NOTHING;
    GET DIAGNOSTICS v_placed = ROW_COUNT;
    IF v_placed < jsonb_array_length(p_turns) THEN
        PERFORM refuse_overtaken();
    END IF;
    INSERT INTO executions (instance_id, execution_id, status, framework_version, started_at)
    SELECT t.instance_id, t.execution_id, 'Running', t.framework_version, p_now
    FROM jsonb_to_recordset(p_turns)
        AS t (instance_id text, execution_id bigint, framework_version bigint[]);
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT t.instance_id, t.execution_id, e.event_id, e.data
    FROM jsonb_to_recordset(p_turns)
        AS t (instance_id text, execution_id bigint, history_delta jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(t.history_delta) AS e (event_id bigint, data text);
    RETURN add_work(jsonb_path_query_array(p_turns, '$[*].worker_items[*]'), p_now);
END $$;

-- First turns of instances that do not exist yet; ``present`` if one does.
CREATE FUNCTION start_turns(
    p_lane text, p_batch bigint, p_again boolean, p_turns jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch, p_again);
    v_is_plain boolean;
    v_is_new boolean;
    v_now bigint;
    v_fresh text[];
    v_refused jsonb;
    v_turns jsonb;
    v_turns_at bigint;
    v_work_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    IF p_parts & 1024 = 0 AND jsonb_array_length(p_turns) = 1 THEN
        SELECT s.is_new, s.now_at, s.work_at INTO v_is_new, v_now, v_work_at
        FROM start_single(p_turns -> 0) s;
        IF v_is_new IS NOT NULL THEN
            RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
                'now', v_now, 'work_at', v_work_at, 'refused',
                CASE WHEN NOT v_is_new THEN jsonb_build_object(
                    0, jsonb_build_array('present', p_turns #>> '{0,instance_id}')
                ) END
            ));
        END IF;
    END IF;
    PERFORM lock_turns(p_turns, p_parts);
    v_is_plain := p_parts & 1024 = 0 AND NOT EXISTS (
        SELECT FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
        JOIN instance_locks l ON l.instance_id = t.instance_id
    );
    v_now := now_ms();
    -- Two first turns of one instance meet here: the second waits for the first and finds it.
    WITH fresh AS (
        INSERT INTO instances (
            instance_id, name, version, parent_instance_id, named, started,
            execution_id, execution_status, status, created_at, updated_at
        )
        SELECT
            t.instance_id, t.name, t.version, t.parent_instance_id, true, true,
            CASE WHEN v_is_plain THEN t.execution_id ELSE 0 END,
            CASE WHEN v_is_plain THEN 'Running' END,
            CASE WHEN v_is_plain THEN 'Running' ELSE 'Pending' END, v_now, v_now
        FROM jsonb_to_recordset(p_turns) AS t (
            instance_id text, name text, version text, parent_instance_id text,
            execution_id bigint
        )
        ORDER BY t.instance_id
        ON CONFLICT DO NOTHING
        RETURNING instance_id
    )
    SELECT coalesce(array_agg(f.instance_id), '{}') INTO v_fresh FROM fresh f;
    IF cardinality(v_fresh) < jsonb_array_length(p_turns) THEN
        SELECT jsonb_object_agg(t.n, jsonb_build_array('present', t.instance_id)) INTO v_refused
        FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text)
        WHERE NOT t.instance_id = ANY (v_fresh);
    END IF;
    v_turns := not_refused(p_turns, v_refused);
    IF v_turns IS NOT NULL AND v_is_plain THEN
        v_work_at := write_first_turns(v_turns, v_now);
    ELSIF v_turns IS NOT NULL THEN
        INSERT INTO instance_locks AS l (instance_id, lock_token, locked_until, owner)
        SELECT t.instance_id, t.token, v_now + 1, t.owner
        FROM jsonb_to_recordset(v_turns) AS t (instance_id text, token text, owner text)
        ORDER BY t.instance_id
        ON CONFLICT (instance_id) DO UPDATE SET
            lock_token = EXCLUDED.lock_token, locked_until = EXCLUDED.locked_until,
            owner = EXCLUDED.owner;
        SELECT a.turns_at, a.work_at INTO v_turns_at, v_work_at
        FROM apply_turns(v_turns, p_parts, v_now) a;
    END IF;
    RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at, 'work_at', v_work_at
    ));
END $$;

CREATE FUNCTION abandon_turns(
    p_lane text, p_batch bigint, p_again boolean, p_turns jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch, p_again);
    v_ids text[] := ARRAY(
        SELECT t.instance_id FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
    );
    v_now bigint;
    v_refused jsonb;
    v_turns jsonb;
    v_turns_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    PERFORM lock_instances(v_ids);
    v_now := now_ms();
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO v_refused
    FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM instance_locks l
        WHERE l.instance_id = t.instance_id AND l.lock_token = t.token
    );
    v_turns := not_refused(p_turns, v_refused);
    IF v_turns IS NOT NULL THEN
        UPDATE orchestrator_queue q SET
            lock_token = NULL,
            attempt_count = greatest(q.attempt_count - t.ignore_attempt::integer, 0)
        FROM jsonb_to_recordset(v_turns)
            AS t (instance_id text, token text, ignore_attempt boolean)
        WHERE q.instance_id = t.instance_id AND q.lock_token = t.token;
        UPDATE instance_locks l SET
            lock_token = NULL, locked_until = NULL, owner = NULL, kept = false,
            not_before = coalesce(v_now + t.delay_ms, l.not_before),
            block = coalesce(t.block, l.block)
        FROM jsonb_to_recordset(v_turns)
            AS t (instance_id text, token text, delay_ms bigint, block text)
        WHERE l.instance_id = t.instance_id AND l.lock_token = t.token;
        UPDATE instances i SET
            status = shown_status(i.execution_status, l.suspended, l.block IS NOT NULL)
        FROM jsonb_to_recordset(v_turns) AS t (instance_id text, block text)
        JOIN instance_locks l ON l.instance_id = t.instance_id
        WHERE t.block IS NOT NULL AND i.instance_id = t.instance_id;
        v_turns_at := place_instances(v_ids);
        PERFORM forget_instances(v_ids);
    END IF;
    RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at
    ));
END $$;

-- Lets live locks live on. Returns the tokens that are not live.
CREATE FUNCTION renew_turns(p_renewals jsonb) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_lost text[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM lock_instances(ARRAY(
        SELECT r.instance_id FROM jsonb_to_recordset(p_renewals) AS r (instance_id text)
    ));
    v_now := now_ms();
    SELECT array_agg(r.token) INTO v_lost
    FROM jsonb_to_recordset(p_renewals) AS r (instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM instance_locks l
        WHERE l.instance_id = r.instance_id AND l.lock_token = r.token AND l.locked_until > v_now
    );
    UPDATE instance_locks l SET
        locked_until = v_now + r.extend_for_ms,
        wake_at = CASE
            WHEN l.wake_at IS NOT NULL THEN greatest(v_now + r.extend_for_ms, l.not_before)
        END
    FROM jsonb_to_recordset(p_renewals)
        AS r (instance_id text, token text, extend_for_ms bigint)
    WHERE l.instance_id = r.instance_id AND l.lock_token = r.token AND l.locked_until > v_now;
    RETURN coalesce(v_lost, '{}');
END $$;
