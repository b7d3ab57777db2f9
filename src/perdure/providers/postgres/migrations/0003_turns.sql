-- Committing and giving back turns. Each function takes a batch of operations, each of which stands
-- alone: one that is refused is named in the answer and leaves no trace.

-- Applies turns whose tokens were checked. p_parts says which steps there is something to do for
-- (see turns.py). Returns when the instances written and the work added may first be taken.
CREATE FUNCTION apply_turns(
    p_turns jsonb, p_parts integer, p_now bigint, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ARRAY(
        SELECT t.instance_id FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
    );
    v_starts jsonb;
BEGIN
    IF p_parts & 1 > 0 THEN
        DELETE FROM worker_queue w
        USING jsonb_to_recordset(p_turns) AS t (instance_id text, settled_work text[])
        CROSS JOIN LATERAL unnest(t.settled_work) AS s (token)
        WHERE w.instance_id = t.instance_id AND w.lock_token = s.token;
    END IF;

    IF p_parts & 2 > 0 THEN
        WITH consumed AS (
            DELETE FROM orchestrator_queue q
            USING jsonb_to_recordset(p_turns)
                AS t (instance_id text, token text, consumed bigint[])
            WHERE t.consumed IS NULL
                AND q.instance_id = t.instance_id AND q.lock_token = t.token
            RETURNING q.*
        ), named AS (
            DELETE FROM orchestrator_queue q
            USING jsonb_to_recordset(p_turns)
                AS t (instance_id text, token text, consumed bigint[])
            CROSS JOIN LATERAL unnest(t.consumed) AS c (message_id)
            WHERE q.instance_id = t.instance_id AND q.message_id = c.message_id
                AND q.lock_token = t.token
            RETURNING q.*
        )
        SELECT jsonb_agg(s) INTO v_starts
        FROM (
            SELECT DISTINCT ON (g.instance_id)
                g.instance_id, g.enqueued_at, g.start_name, g.start_version, g.start_parent
            FROM (SELECT * FROM consumed UNION ALL SELECT * FROM named) g
            WHERE g.start_name IS NOT NULL
            ORDER BY g.instance_id, g.message_id
        ) s;
    END IF;

    INSERT INTO instances (instance_id, status, created_at, updated_at)
    SELECT t.instance_id, 'Pending', p_now, p_now
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
    WHERE NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = t.instance_id)
    ON CONFLICT DO NOTHING;

    IF v_starts IS NOT NULL THEN
        UPDATE instances i SET
            started = true, created_at = s.enqueued_at,
            name = CASE WHEN i.named THEN i.name ELSE s.start_name END,
            version = CASE WHEN i.named THEN i.version ELSE s.start_version END,
            parent_instance_id = CASE
                WHEN i.named THEN i.parent_instance_id ELSE s.start_parent
            END
        FROM jsonb_to_recordset(v_starts) AS s (
            instance_id text, enqueued_at bigint, start_name text, start_version text,
            start_parent text
        )
        WHERE i.instance_id = s.instance_id AND NOT i.started;
    END IF;

    IF p_parts & 4 > 0 THEN
        UPDATE executions x SET
            status = coalesce(t.status, x.status),
            output = coalesce(t.output, x.output),
            framework_version = coalesce(t.framework_version, x.framework_version),
            completed_at = CASE
                WHEN t.status IS NULL THEN x.completed_at
                WHEN ends_execution(t.status) THEN p_now
            END
        FROM jsonb_to_recordset(p_turns) AS t (
            instance_id text, execution_id bigint, status text, output text,
            framework_version bigint[]
        )
        WHERE x.instance_id = t.instance_id AND x.execution_id = t.execution_id
            AND (t.status IS NOT NULL OR t.output IS NOT NULL OR t.framework_version IS NOT NULL);
    END IF;

    INSERT INTO executions (
        instance_id, execution_id, status, output, framework_version, started_at, completed_at
    )
    SELECT
        t.instance_id, t.execution_id, coalesce(t.status, 'Running'), t.output,
        t.framework_version, p_now, CASE WHEN ends_execution(t.status) THEN p_now END
    FROM jsonb_to_recordset(p_turns) AS t (
        instance_id text, execution_id bigint, status text, output text, framework_version bigint[]
    )
    WHERE NOT EXISTS (
        SELECT FROM executions x
        WHERE x.instance_id = t.instance_id AND x.execution_id = t.execution_id
    );

    UPDATE instances i SET
        name = coalesce(t.name, o.name),
        version = CASE WHEN t.name IS NULL THEN o.version ELSE t.version END,
        parent_instance_id = CASE
            WHEN t.name IS NULL OR o.named THEN o.parent_instance_id ELSE t.parent_instance_id
        END,
        named = o.named OR t.name IS NOT NULL,
        execution_id = greatest(o.execution_id, t.execution_id),
        execution_status = x.status,
        completed_at = x.completed_at,
        status = shown_status(x.status, coalesce(l.suspended, false), false),
        custom_status = CASE
            WHEN t.custom_status IS NULL THEN o.custom_status ELSE t.custom_status ->> 'value'
        END,
        custom_status_version = o.custom_status_version + (t.custom_status IS NOT NULL)::integer,
        created_at = CASE
            WHEN o.execution_id = 0 AND NOT o.started THEN p_now ELSE o.created_at
        END,
        updated_at = p_now
    FROM jsonb_to_recordset(p_turns) AS t (
        instance_id text, execution_id bigint, name text, version text, parent_instance_id text,
        custom_status jsonb
    )
    JOIN instances o ON o.instance_id = t.instance_id
    JOIN executions x
        ON x.instance_id = o.instance_id
        AND x.execution_id = greatest(o.execution_id, t.execution_id)
    LEFT JOIN instance_locks l ON l.instance_id = o.instance_id
    WHERE i.instance_id = o.instance_id;

    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT t.instance_id, t.execution_id, e.event_id, e.data
    FROM jsonb_to_recordset(p_turns)
        AS t (instance_id text, execution_id bigint, history_delta jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(t.history_delta) AS e (event_id bigint, data text);

    IF p_parts & 8 > 0 THEN
        PERFORM apply_state(p_turns);
    END IF;
    IF p_parts & 16 > 0 THEN
        PERFORM merge_state(p_turns);
    END IF;

    IF p_parts & 32 > 0 THEN
        SELECT add_work(jsonb_agg(w.item ORDER BY t.position, w.position), p_now) INTO work_at
        FROM ROWS FROM (
            jsonb_to_recordset(p_turns) AS (worker_items jsonb)
        ) WITH ORDINALITY AS t (worker_items, position)
        CROSS JOIN LATERAL jsonb_array_elements(t.worker_items)
            WITH ORDINALITY AS w (item, position);
    END IF;

    IF p_parts & 64 > 0 THEN
        DELETE FROM worker_queue w
        USING jsonb_to_recordset(p_turns) AS t (cancelled_activities jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.cancelled_activities)
            AS c (instance_id text, execution_id bigint, activity_id bigint)
        WHERE w.instance_id = c.instance_id AND w.execution_id = c.execution_id
            AND w.activity_id = c.activity_id;
    END IF;

    IF p_parts & 128 > 0 THEN
        SELECT add_messages(jsonb_agg(m.message ORDER BY t.position, m.position), p_now)
        INTO turns_at
        FROM ROWS FROM (
            jsonb_to_recordset(p_turns) AS (orchestrator_items jsonb)
        ) WITH ORDINALITY AS t (orchestrator_items, position)
        CROSS JOIN LATERAL jsonb_array_elements(t.orchestrator_items)
            WITH ORDINALITY AS m (message, position);
    END IF;

    IF p_parts & 256 > 0 THEN
        DELETE FROM orchestrator_queue q
        USING jsonb_to_recordset(p_turns) AS t (instance_id text, cancelled_timers jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.cancelled_timers)
            AS c (execution_id bigint, timer_id bigint)
        WHERE q.instance_id = t.instance_id AND q.timer_execution_id = c.execution_id
            AND q.timer_id = c.timer_id;
    END IF;

    UPDATE instance_locks l SET
        lock_token = CASE WHEN t.keep_lock_ms IS NOT NULL THEN l.lock_token END,
        locked_until = p_now + t.keep_lock_ms,
        owner = CASE WHEN t.keep_lock_ms IS NOT NULL THEN l.owner END,
        kept = t.keep_lock_ms IS NOT NULL,
        not_before = NULL,
        block = NULL
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text, keep_lock_ms bigint)
    WHERE l.instance_id = t.instance_id;
    turns_at := least(turns_at, place_instances(v_ids));
    IF p_parts & 16 > 0 THEN
        PERFORM forget_instances(v_ids);
    END IF;
END $$;

-- Folds changes into the delta of the current execution, where NULL stands for cleared.
CREATE FUNCTION apply_state(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO kv_delta (instance_id, key)
    SELECT s.instance_id, s.key
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text, kv_cleared boolean)
    JOIN kv_store s ON s.instance_id = t.instance_id
    WHERE t.kv_cleared
    ON CONFLICT DO NOTHING;

    UPDATE kv_delta d SET value = NULL, updated_at = NULL
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text, kv_cleared boolean)
    WHERE t.kv_cleared AND d.instance_id = t.instance_id;

    INSERT INTO kv_delta (instance_id, key, value, updated_at)
    SELECT t.instance_id, c.key, c.value, c.updated_at_ms
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text, kv jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(t.kv)
        AS c (key text, value text, updated_at_ms bigint)
    ON CONFLICT (instance_id, key) DO UPDATE
        SET value = EXCLUDED.value, updated_at = EXCLUDED.updated_at;
END $$;

-- At the end of an execution its changes become the state that the next one starts from.
CREATE FUNCTION merge_state(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    WITH delta AS (
        DELETE FROM kv_delta d
        USING jsonb_to_recordset(p_turns) AS t (instance_id text, status text)
        WHERE ends_execution(t.status) AND d.instance_id = t.instance_id
        RETURNING d.*
    ), cleared AS (
        DELETE FROM kv_store s USING delta d
        WHERE d.value IS NULL AND s.instance_id = d.instance_id AND s.key = d.key
    )
    INSERT INTO kv_store (instance_id, key, value, updated_at)
    SELECT d.instance_id, d.key, d.value, d.updated_at FROM delta d WHERE d.value IS NOT NULL
    ON CONFLICT (instance_id, key) DO UPDATE
        SET value = EXCLUDED.value, updated_at = EXCLUDED.updated_at;
END $$;

-- Locks the work items that the turns remove, all at once and in order.
CREATE FUNCTION lock_removed_work(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1
    FROM worker_queue w
    JOIN (
        SELECT s.instance_id, s.execution_id, s.activity_id, s.message_id
        FROM jsonb_to_recordset(p_turns) AS t (instance_id text, settled_work text[])
        CROSS JOIN LATERAL unnest(t.settled_work) AS o (token)
        JOIN worker_queue s ON s.instance_id = t.instance_id AND s.lock_token = o.token
        UNION
        SELECT s.instance_id, s.execution_id, s.activity_id, s.message_id
        FROM jsonb_to_recordset(p_turns) AS t (cancelled_activities jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.cancelled_activities)
            AS c (instance_id text, execution_id bigint, activity_id bigint)
        JOIN worker_queue s
            ON s.instance_id = c.instance_id AND s.execution_id = c.execution_id
            AND s.activity_id = c.activity_id
    ) r USING (instance_id, execution_id, activity_id, message_id)
    ORDER BY w.message_id
    FOR UPDATE OF w;
END $$;

-- Why turns cannot be committed: {n: [code, token]}, NULL if all can. ``lost`` a token that is not
-- live, ``foreign`` a settled item of another instance.
CREATE FUNCTION refused_turns(p_turns jsonb, p_parts integer, p_now bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_refused jsonb;
BEGIN
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO v_refused
    FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM instance_locks l
        WHERE l.instance_id = t.instance_id AND l.lock_token = t.token AND l.locked_until > p_now
    );
    IF p_parts & 1 > 0 THEN
        SELECT coalesce(jsonb_object_agg(t.n, jsonb_build_array(
            CASE WHEN EXISTS (
                SELECT FROM worker_queue w WHERE w.lock_token = s.token AND w.locked_until > p_now
            ) THEN 'foreign' ELSE 'lost' END, s.token
        )), '{}') || coalesce(v_refused, '{}') INTO v_refused
        FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text, settled_work text[])
        CROSS JOIN LATERAL unnest(t.settled_work) AS s (token)
        WHERE NOT EXISTS (
            SELECT FROM worker_queue w
            WHERE w.instance_id = t.instance_id AND w.lock_token = s.token
                AND w.locked_until > p_now
        );
        v_refused := nullif(v_refused, '{}');
    END IF;
    RETURN v_refused;
END $$;

CREATE FUNCTION commit_turns(p_lane text, p_batch bigint, p_turns jsonb, p_parts integer)
RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch);
    v_now bigint;
    v_refused jsonb;
    v_turns jsonb;
    v_turns_at bigint;
    v_work_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    PERFORM lock_instances(ARRAY(
        SELECT t.instance_id FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
        UNION
        SELECT m.instance_id
        FROM jsonb_to_recordset(p_turns) AS t (orchestrator_items jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.orchestrator_items) AS m (instance_id text)
    ));
    IF p_parts & (1 | 64) > 0 THEN
        PERFORM lock_removed_work(p_turns);
    END IF;
    v_now := now_ms();
    v_refused := refused_turns(p_turns, p_parts, v_now);
    v_turns := not_refused(p_turns, v_refused);
    IF v_turns IS NOT NULL THEN
        SELECT a.turns_at, a.work_at INTO v_turns_at, v_work_at
        FROM apply_turns(v_turns, p_parts, v_now) a;
    END IF;
    RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at, 'work_at', v_work_at
    ));
END $$;

-- First turns of instances that do not exist yet; ``present`` if one does.
CREATE FUNCTION start_turns(p_lane text, p_batch bigint, p_turns jsonb, p_parts integer)
RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch);
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
    PERFORM lock_instances(ARRAY(
        SELECT t.instance_id FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
        UNION
        SELECT m.instance_id
        FROM jsonb_to_recordset(p_turns) AS t (orchestrator_items jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.orchestrator_items) AS m (instance_id text)
    ));
    IF p_parts & (1 | 64) > 0 THEN
        PERFORM lock_removed_work(p_turns);
    END IF;
    v_now := now_ms();
    -- Two first turns of one instance meet here: the second waits for the first and finds it.
    WITH fresh AS (
        INSERT INTO instances (
            instance_id, name, version, parent_instance_id, started, status, created_at, updated_at
        )
        SELECT
            t.instance_id, t.start ->> 'name', t.start ->> 'version',
            t.start ->> 'parent_instance_id', true, 'Pending', v_now, v_now
        FROM jsonb_to_recordset(p_turns) AS t (instance_id text, start jsonb)
        ORDER BY t.instance_id
        ON CONFLICT DO NOTHING
        RETURNING instance_id
    )
    SELECT coalesce(array_agg(f.instance_id), '{}') INTO v_fresh FROM fresh f;
    SELECT jsonb_object_agg(t.n, jsonb_build_array('present', t.instance_id)) INTO v_refused
    FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text)
    WHERE NOT t.instance_id = ANY (v_fresh);
    v_turns := not_refused(p_turns, v_refused);
    IF v_turns IS NOT NULL THEN
        INSERT INTO instance_locks AS l (instance_id, lock_token, locked_until, owner)
        SELECT t.instance_id, t.token, v_now + 1, t.owner
        FROM jsonb_to_recordset(v_turns) AS t (instance_id text, token text, owner text)
        ORDER BY t.instance_id
        ON CONFLICT (instance_id) DO UPDATE SET
            lock_token = EXCLUDED.lock_token, locked_until = EXCLUDED.locked_until,
            owner = EXCLUDED.owner;
        -- Settled work that is not held takes the whole batch back; the caller then sends each
        -- operation alone.
        IF refused_turns(v_turns, p_parts, v_now) IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'PD001', MESSAGE = 'a first turn settles lost work';
        END IF;
        SELECT a.turns_at, a.work_at INTO v_turns_at, v_work_at
        FROM apply_turns(v_turns, p_parts, v_now) a;
    END IF;
    RETURN lane_close(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at, 'work_at', v_work_at
    ));
END $$;

CREATE FUNCTION abandon_turns(p_lane text, p_batch bigint, p_turns jsonb, p_parts integer)
RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := lane_answer(p_lane, p_batch);
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
