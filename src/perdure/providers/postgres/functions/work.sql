-- Completing, abandoning and renewing work items, and their sessions.

-- Updates the last activity of live sessions.
CREATE OR REPLACE FUNCTION touch_sessions(p_sessions text[], p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM sessions s WHERE s.session_id = ANY (p_sessions)
    ORDER BY s.session_id FOR UPDATE;
    UPDATE sessions s SET last_activity = p_now
    WHERE s.session_id = ANY (p_sessions) AND s.locked_until > p_now;
END $$;

-- Locks the rows of the work items with these tokens, in order.
CREATE OR REPLACE FUNCTION lock_work(p_items jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1
    FROM jsonb_to_recordset(p_items) AS t (instance_id text, token text)
    JOIN worker_queue w ON w.instance_id = t.instance_id AND w.lock_token = t.token
    ORDER BY w.message_id
    FOR UPDATE OF w;
END $$;

-- Removes items and adds their completions and retries. Refuses with 'lost' a token without a live
-- lock, with 'foreign' a completion or retry that belongs to another item.
CREATE OR REPLACE FUNCTION complete_work(
    p_lane text, p_batch bigint, p_again boolean, p_items jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_now bigint;
    v_refused jsonb;
    v_items jsonb;
    v_sessions text[];
    v_completions jsonb;
    v_retries jsonb;
    v_turns_at bigint;
    v_work_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    PERFORM lock_instances(ARRAY(
        SELECT t.instance_id
        FROM jsonb_to_recordset(p_items) AS t (instance_id text, completion jsonb)
        WHERE t.completion IS NOT NULL
    ));
    PERFORM lock_work(p_items);
    v_now := now_ms();
    SELECT jsonb_object_agg(
        t.n,
        jsonb_build_array(CASE WHEN w.instance_id IS NULL THEN 'lost' ELSE 'foreign' END, t.token)
    ) INTO v_refused
    FROM jsonb_to_recordset(p_items) AS t (
        n integer, instance_id text, token text, completion jsonb, retry jsonb
    )
    LEFT JOIN worker_queue w
        ON w.instance_id = t.instance_id AND w.lock_token = t.token AND w.locked_until > v_now
    WHERE w.instance_id IS NULL
        OR t.completion ->> 'instance_id' <> w.instance_id
        OR t.retry -> 'identity' <> jsonb_build_object(
            'instance_id', w.instance_id, 'execution_id', w.execution_id,
            'activity_id', w.activity_id
        );
    v_items := not_refused(p_items, v_refused);
    IF v_items IS NOT NULL THEN
        WITH completed AS (
            DELETE FROM worker_queue w
            USING jsonb_to_recordset(v_items) AS t (instance_id text, token text)
            WHERE w.instance_id = t.instance_id AND w.lock_token = t.token
            RETURNING w.session_id
        )
        SELECT array_agg(DISTINCT s.session_id) INTO v_sessions
        FROM completed s WHERE s.session_id IS NOT NULL;
        SELECT
            jsonb_agg(t.completion || '{"delay_ms": 0}' ORDER BY t.n)
                FILTER (WHERE t.completion IS NOT NULL),
            jsonb_agg(t.retry ORDER BY t.n) FILTER (WHERE t.retry IS NOT NULL)
        INTO v_completions, v_retries
        FROM jsonb_to_recordset(v_items) AS t (n integer, completion jsonb, retry jsonb);
        IF v_completions IS NOT NULL THEN
            v_turns_at := add_messages(v_completions, v_now);
        END IF;
        IF v_retries IS NOT NULL THEN
            v_work_at := add_work(v_retries, v_now);
        END IF;
        IF v_sessions IS NOT NULL THEN
            PERFORM touch_sessions(v_sessions, v_now);
        END IF;
    END IF;
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at, 'work_at', v_work_at
    ));
END $$;

-- Gives items back without an outcome, with a delay.
CREATE OR REPLACE FUNCTION abandon_work(
    p_lane text, p_batch bigint, p_again boolean, p_items jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_now bigint;
    v_refused jsonb;
    v_work_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    PERFORM lock_work(p_items);
    v_now := now_ms();
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO v_refused
    FROM jsonb_to_recordset(p_items) AS t (n integer, instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM worker_queue w WHERE w.instance_id = t.instance_id AND w.lock_token = t.token
    );
    WITH freed AS (
        UPDATE worker_queue w SET
            lock_token = NULL, locked_at = NULL, locked_until = NULL,
            visible_at = v_now + t.delay_ms,
            wake_at = CASE WHEN t.delay_ms > 0 THEN v_now + t.delay_ms END,
            attempt_count = greatest(w.attempt_count - t.ignore_attempt::integer, 0)
        FROM jsonb_to_recordset(p_items)
            AS t (instance_id text, token text, delay_ms bigint, ignore_attempt boolean)
        WHERE w.instance_id = t.instance_id AND w.lock_token = t.token
        RETURNING w.visible_at
    )
    SELECT min(f.visible_at) INTO v_work_at FROM freed f;
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'work_at', v_work_at
    ));
END $$;

-- Extends live locks. Returns the tokens without a live lock.
CREATE OR REPLACE FUNCTION renew_work(p_renewals jsonb) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_lost text[];
    v_sessions text[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM lock_work(p_renewals);
    v_now := now_ms();
    SELECT array_agg(r.token) INTO v_lost
    FROM jsonb_to_recordset(p_renewals) AS r (instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM worker_queue w
        WHERE w.instance_id = r.instance_id AND w.lock_token = r.token AND w.locked_until > v_now
    );
    WITH renewed AS (
        UPDATE worker_queue w SET
            locked_until = v_now + r.extend_for_ms,
            wake_at = greatest(v_now + r.extend_for_ms, w.visible_at),
            heartbeat = coalesce(r.heartbeat, w.heartbeat)
        FROM jsonb_to_recordset(p_renewals)
            AS r (instance_id text, token text, extend_for_ms bigint, heartbeat text)
        WHERE w.instance_id = r.instance_id AND w.lock_token = r.token AND w.locked_until > v_now
        RETURNING w.session_id
    )
    SELECT array_agg(DISTINCT r.session_id) INTO v_sessions
    FROM renewed r WHERE r.session_id IS NOT NULL;
    IF v_sessions IS NOT NULL THEN
        PERFORM touch_sessions(v_sessions, v_now);
    END IF;
    RETURN coalesce(v_lost, '{}');
END $$;

CREATE OR REPLACE FUNCTION enqueue_work(
    p_lane text, p_batch bigint, p_again boolean, p_items jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_now bigint := now_ms();
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'work_at', add_work(p_items, v_now)
    ));
END $$;

-- Extends the live sessions of these owners that are not idle. Returns their number.
CREATE OR REPLACE FUNCTION renew_sessions(p_owners text[], p_extend_ms bigint, p_idle_ms bigint)
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_renewed bigint;
BEGIN
    PERFORM 1 FROM sessions s WHERE s.owner_id = ANY (p_owners) ORDER BY s.session_id FOR UPDATE;
    v_now := now_ms();
    UPDATE sessions s SET locked_until = v_now + p_extend_ms
    WHERE s.owner_id = ANY (p_owners) AND s.locked_until > v_now
        AND s.last_activity > v_now - p_idle_ms;
    GET DIAGNOSTICS v_renewed = ROW_COUNT;
    RETURN v_renewed;
END $$;

-- Deletes expired sessions without items. Returns their number.
CREATE OR REPLACE FUNCTION cleanup_sessions() RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint := now_ms();
    v_ids text[] := ARRAY(
        SELECT s.session_id FROM sessions s
        WHERE s.locked_until <= v_now
            AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.session_id = s.session_id)
        ORDER BY s.session_id
        FOR UPDATE SKIP LOCKED
    );
BEGIN
    DELETE FROM sessions s WHERE s.session_id = ANY (v_ids);
    RETURN cardinality(v_ids);
END $$;
