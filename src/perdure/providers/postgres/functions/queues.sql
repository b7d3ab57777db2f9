-- Verbs of the two queues: messages from outside and history written by tools; work items and their
-- sessions.

-- Numbers mail that joins a queue, and refuses with 'full' what makes a queue too long: all messages of
-- that call. The caller has locked the rows in instance_locks. Mail for later is not numbered.
CREATE OR REPLACE FUNCTION number_mail(
    p_messages jsonb, OUT numbered jsonb, OUT refused jsonb
)
LANGUAGE plpgsql AS $$
BEGIN
    WITH mail AS (
        SELECT
            m.n, m.instance_id, coalesce(m.call, m.n::text) AS call, m.mail_max, m.mail_bytes_max,
            count(*) OVER (PARTITION BY m.instance_id) AS together,
            row_number() OVER (PARTITION BY m.instance_id ORDER BY m.n) AS number,
            sum(octet_length(m.body)::bigint) OVER (PARTITION BY m.instance_id ORDER BY m.n) AS size
        FROM jsonb_to_recordset(p_messages) AS m (
            n integer, instance_id text, call text, body text, visible_at_ms bigint,
            delay_ms bigint, mail_max bigint, mail_bytes_max bigint
        )
        WHERE m.mail_max IS NOT NULL AND m.visible_at_ms IS NULL AND coalesce(m.delay_ms, 0) = 0
    ), places AS (
        SELECT i.instance_id, l.ready_at IS NOT NULL OR coalesce(l.mail_held, false) AS has_backlog
        FROM (SELECT DISTINCT a.instance_id FROM mail a) i
        LEFT JOIN instance_locks l ON l.instance_id = i.instance_id
    ), joining AS (
        SELECT
            m.n, m.instance_id, m.call, m.mail_max, m.mail_bytes_max,
            coalesce(z.mail_number, 0) + m.number AS number,
            coalesce(z.mail_bytes, 0) + m.size AS size,
            coalesce(z.mail_number, 0) + m.number - coalesce(a.mail_number, 1) + 1 AS waiting,
            coalesce(z.mail_bytes, 0) + m.size - coalesce(a.before, 0) AS waiting_bytes
        FROM mail m
        JOIN places p ON p.instance_id = m.instance_id
        LEFT JOIN LATERAL (
            SELECT q.mail_number, q.mail_bytes - octet_length(q.body) AS before
            FROM orchestrator_queue q
            WHERE p.has_backlog AND q.instance_id = m.instance_id AND q.mail_number IS NOT NULL
            ORDER BY q.mail_number LIMIT 1
        ) a ON true
        LEFT JOIN LATERAL (
            SELECT q.mail_number, q.mail_bytes
            FROM orchestrator_queue q
            WHERE p.has_backlog AND q.instance_id = m.instance_id AND q.mail_number IS NOT NULL
            ORDER BY q.mail_number DESC LIMIT 1
        ) z ON true
        WHERE p.has_backlog OR m.together > 1
    ), full_calls AS (
        SELECT DISTINCT ON (j.call) j.call, jsonb_build_array(
            j.instance_id, j.waiting, j.waiting_bytes, j.mail_max, j.mail_bytes_max
        )::text AS reason
        FROM joining j
        WHERE j.waiting > j.mail_max
            OR (j.waiting_bytes > j.mail_bytes_max AND j.waiting > 1)
        ORDER BY j.call, j.n
    )
    SELECT
        (
            SELECT jsonb_object_agg(j.n, jsonb_build_object(
                'mail_number', j.number, 'mail_bytes', j.size
            ))
            FROM joining j
        ),
        (
            SELECT jsonb_object_agg(m.n, jsonb_build_array('full', f.reason))
            FROM jsonb_to_recordset(p_messages) AS m (n integer, call text)
            JOIN full_calls f ON f.call = coalesce(m.call, m.n::text)
        )
    INTO numbered, refused;
END $$;

-- Adds messages whose condition holds. Refuses with 'missing' or 'ended' if the instance must be
-- alive, with 'present' if it must be absent, with 'full' if too much mail would wait.
CREATE OR REPLACE FUNCTION enqueue_messages(
    p_messages jsonb, p_parts integer,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_fresh text[];
    v_messages jsonb;
    v_mail record;
BEGIN
    PERFORM lock_instance_rows(ids_of(p_messages));
    now_at := now_ms();
    IF p_parts & 1 > 0 THEN  -- SOME_ALIVE
        SELECT jsonb_object_agg(m.n, jsonb_build_array(
            CASE WHEN i.instance_id IS NULL THEN 'missing' ELSE 'ended' END, i.execution_status
        )) INTO refused
        FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text, condition text)
        LEFT JOIN instances i ON i.instance_id = m.instance_id
        WHERE m.condition = 'alive' AND (i.instance_id IS NULL OR has_ended(i));
    END IF;
    IF p_parts & 2 > 0 THEN  -- SOME_ABSENT
        -- Of two concurrent starts of one instance, the second waits here and finds the first.
        WITH fresh AS (
            INSERT INTO instances (
                instance_id, name, version, parent_instance_id, status, created_at, updated_at
            )
            SELECT
                m.instance_id, m.start ->> 'name', m.start ->> 'version',
                m.start ->> 'parent_instance_id', 'Pending', now_at, now_at
            FROM jsonb_to_recordset(p_messages)
                AS m (instance_id text, condition text, start jsonb)
            WHERE m.condition = 'absent'
            ORDER BY m.instance_id
            ON CONFLICT DO NOTHING
            RETURNING instance_id
        )
        SELECT coalesce(array_agg(f.instance_id), '{}') INTO v_fresh FROM fresh f;
        SELECT nullif(
            coalesce(refused, '{}') || coalesce(
                jsonb_object_agg(m.n, jsonb_build_array('present', m.instance_id)), '{}'
            ),
            '{}'
        ) INTO refused
        FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text, condition text)
        LEFT JOIN unnest(v_fresh) AS f (instance_id) ON f.instance_id = m.instance_id
        WHERE m.condition = 'absent' AND f.instance_id IS NULL;
    END IF;
    v_messages := not_refused(p_messages, refused);
    IF p_parts & 4 > 0 AND v_messages IS NOT NULL THEN  -- SOME_MAIL
        v_mail := number_mail(v_messages);
        v_messages := not_refused(v_messages, v_mail.refused);
        refused := nullif(
            coalesce(refused, '{}') || coalesce(v_mail.refused, '{}'), '{}'
        );
        IF v_mail.numbered IS NOT NULL THEN
            SELECT jsonb_agg(
                o.message || coalesce(v_mail.numbered -> (o.message ->> 'n'), '{}')
                ORDER BY o.position
            ) INTO v_messages
            FROM jsonb_array_elements(v_messages) WITH ORDINALITY AS o (message, position);
        END IF;
    END IF;
    IF v_messages IS NOT NULL THEN
        turns_at := add_messages(v_messages, now_at);
    END IF;
END $$;

-- Inserts events as given, for tools. History makes messages of an unknown instance ready.
CREATE OR REPLACE FUNCTION append_history(
    p_appends jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ids_of(p_appends);
BEGIN
    PERFORM lock_instance_rows(v_ids);
    now_at := now_ms();
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT a.instance_id, a.execution_id, e.event_id, e.data
    FROM jsonb_to_recordset(p_appends)
        AS a (instance_id text, execution_id bigint, records jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(a.records) AS e (event_id bigint, data text);
    turns_at := update_readiness(v_ids);
END $$;

-- Removes instances with their trees and starts them anew. Refuses with 'child' an instance whose
-- parent has not ended.
CREATE OR REPLACE FUNCTION replace_instances(
    p_messages jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[];
    v_locked text[] := '{}';
    v_messages jsonb;
BEGIN
    LOOP
        v_ids := trees_of(p_messages);
        -- A turn may have added a child during the wait for a lock.
        EXIT WHEN v_locked @> v_ids;
        PERFORM lock_for_removal(v_ids);
        v_locked := v_ids;
    END LOOP;
    SELECT jsonb_object_agg(m.n, jsonb_build_array('child', p.instance_id)) INTO refused
    FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text)
    JOIN instances c ON c.instance_id = m.instance_id
    JOIN instances p ON p.instance_id = c.parent_instance_id
    WHERE NOT has_ended(p);
    v_messages := not_refused(p_messages, refused);
    now_at := now_ms();
    IF v_messages IS NOT NULL THEN
        PERFORM remove_instances(
            CASE WHEN refused IS NULL THEN v_ids ELSE trees_of(v_messages) END
        );
        turns_at := add_messages(v_messages, now_at);
    END IF;
END $$;

-- --- work items and sessions

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
CREATE OR REPLACE FUNCTION lock_work_rows(p_items jsonb) RETURNS void
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
    p_items jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_items jsonb;
    v_sessions text[];
    v_completions jsonb;
    v_retries jsonb;
BEGIN
    PERFORM lock_instance_rows(ARRAY(
        SELECT t.instance_id
        FROM jsonb_to_recordset(p_items) AS t (instance_id text, completion jsonb)
        WHERE t.completion IS NOT NULL
    ));
    PERFORM lock_work_rows(p_items);
    now_at := now_ms();
    SELECT jsonb_object_agg(
        t.n,
        jsonb_build_array(CASE WHEN w.instance_id IS NULL THEN 'lost' ELSE 'foreign' END, t.token)
    ) INTO refused
    FROM jsonb_to_recordset(p_items) AS t (
        n integer, instance_id text, token text, completion jsonb, retry jsonb
    )
    LEFT JOIN worker_queue w
        ON w.instance_id = t.instance_id AND w.lock_token = t.token AND w.locked_until > now_at
    WHERE w.instance_id IS NULL
        OR t.completion ->> 'instance_id' <> w.instance_id
        OR t.retry -> 'identity' <> jsonb_build_object(
            'instance_id', w.instance_id, 'execution_id', w.execution_id,
            'activity_id', w.activity_id
        );
    v_items := not_refused(p_items, refused);
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
            turns_at := add_messages(v_completions, now_at);
        END IF;
        IF v_retries IS NOT NULL THEN
            work_at := add_work(v_retries, now_at);
        END IF;
        IF v_sessions IS NOT NULL THEN
            PERFORM touch_sessions(v_sessions, now_at);
        END IF;
    END IF;
END $$;

-- Gives items back without an outcome, with a delay.
CREATE OR REPLACE FUNCTION abandon_work(
    p_items jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lock_work_rows(p_items);
    now_at := now_ms();
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO refused
    FROM jsonb_to_recordset(p_items) AS t (n integer, instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM worker_queue w WHERE w.instance_id = t.instance_id AND w.lock_token = t.token
    );
    WITH freed AS (
        UPDATE worker_queue w SET
            lock_token = NULL, locked_at = NULL, locked_until = NULL,
            visible_at = now_at + t.delay_ms,
            wake_at = CASE WHEN t.delay_ms > 0 THEN now_at + t.delay_ms END,
            attempt_count = greatest(w.attempt_count - t.ignore_attempt::integer, 0)
        FROM jsonb_to_recordset(p_items)
            AS t (instance_id text, token text, delay_ms bigint, ignore_attempt boolean)
        WHERE w.instance_id = t.instance_id AND w.lock_token = t.token
        RETURNING w.visible_at
    )
    SELECT min(f.visible_at) INTO work_at FROM freed f;
END $$;

-- Extends live locks. Returns the tokens without a live lock. Does not wait: see renew_turns.
CREATE OR REPLACE FUNCTION renew_work(p_renewals jsonb) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_ids bigint[];
    v_lost text[];
    v_sessions text[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), follow_promotion();
    v_ids := ARRAY(
        SELECT w.message_id
        FROM jsonb_to_recordset(p_renewals) AS r (instance_id text, token text)
        JOIN worker_queue w ON w.instance_id = r.instance_id AND w.lock_token = r.token
        ORDER BY w.message_id
        FOR UPDATE OF w SKIP LOCKED
    );
    v_now := now_ms();
    PERFORM note_time(v_now);
    SELECT array_agg(r.token) INTO v_lost
    FROM jsonb_to_recordset(p_renewals) AS r (instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM worker_queue w
        WHERE w.instance_id = r.instance_id AND w.lock_token = r.token
            AND (w.locked_until > v_now OR NOT w.message_id = ANY (v_ids))
    );
    WITH renewed AS (
        UPDATE worker_queue w SET
            locked_until = v_now + r.extend_for_ms,
            wake_at = greatest(v_now + r.extend_for_ms, w.visible_at),
            heartbeat = coalesce(r.heartbeat, w.heartbeat)
        FROM jsonb_to_recordset(p_renewals)
            AS r (instance_id text, token text, extend_for_ms bigint, heartbeat text)
        WHERE w.instance_id = r.instance_id AND w.message_id = ANY (v_ids)
            AND w.lock_token = r.token AND w.locked_until > v_now
        RETURNING w.session_id
    )
    SELECT array_agg(DISTINCT r.session_id) INTO v_sessions
    FROM renewed r WHERE r.session_id IS NOT NULL;
    IF v_sessions IS NOT NULL THEN
        PERFORM touch_sessions(ARRAY(
            SELECT s.session_id FROM sessions s
            WHERE s.session_id = ANY (v_sessions)
            ORDER BY s.session_id
            FOR UPDATE SKIP LOCKED
        ), v_now);
    END IF;
    RETURN coalesce(v_lost, '{}');
END $$;

CREATE OR REPLACE FUNCTION enqueue_work(
    p_items jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
BEGIN
    now_at := now_ms();
    work_at := add_work(p_items, now_at);
END $$;

-- Extends the live sessions of these owners that are not idle. Returns their number. Waits for a
-- commit only briefly, so that other renewals get their turn meanwhile.
CREATE OR REPLACE FUNCTION renew_sessions(p_owners text[], p_extend_ms bigint, p_idle_ms bigint)
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '1s'
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_renewed bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), follow_promotion();
    PERFORM 1 FROM sessions s WHERE s.owner_id = ANY (p_owners) ORDER BY s.session_id FOR UPDATE;
    v_now := now_ms();
    UPDATE sessions s SET locked_until = v_now + p_extend_ms
    WHERE s.owner_id = ANY (p_owners) AND s.locked_until > v_now
        AND s.last_activity > v_now - p_idle_ms;
    GET DIAGNOSTICS v_renewed = ROW_COUNT;
    RETURN v_renewed;
END $$;

-- Lets every lock of a process that has died end now: of the tokens that begin with p_holder, and of
-- the sessions of its workers. Returns whether there was any.
CREATE OR REPLACE FUNCTION release_holder(p_holder text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_after text := p_holder || '~';
    v_owners text[] := ARRAY(
        SELECT k.worker_id FROM workers k WHERE k.info::jsonb ->> 'holder' = p_holder
    );
    v_now bigint;
    v_released boolean := false;
BEGIN
    -- As a renewal: one that a crash of the server loses is done again, or ends by time.
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM 1 FROM instance_locks l
    WHERE l.lock_token >= p_holder AND l.lock_token < v_after
    ORDER BY l.instance_id FOR UPDATE;
    PERFORM 1 FROM worker_queue w
    WHERE w.lock_token >= p_holder AND w.lock_token < v_after
    ORDER BY w.message_id FOR UPDATE;
    PERFORM 1 FROM sessions s WHERE s.owner_id = ANY (v_owners) ORDER BY s.session_id FOR UPDATE;
    v_now := now_ms();
    UPDATE instance_locks l SET
        locked_until = v_now,
        wake_at = CASE WHEN l.wake_at IS NOT NULL THEN greatest(v_now, l.not_before) END
    WHERE l.lock_token >= p_holder AND l.lock_token < v_after AND l.locked_until > v_now;
    v_released := FOUND;
    UPDATE worker_queue w SET locked_until = v_now, wake_at = greatest(v_now, w.visible_at)
    WHERE w.lock_token >= p_holder AND w.lock_token < v_after AND w.locked_until > v_now;
    v_released := v_released OR FOUND;
    UPDATE sessions s SET locked_until = v_now
    WHERE s.owner_id = ANY (v_owners) AND s.locked_until > v_now;
    v_released := v_released OR FOUND;
    DELETE FROM workers k WHERE k.info::jsonb ->> 'holder' = p_holder;
    RETURN v_released;
END $$;

-- Deletes expired sessions without items. Returns their number.
CREATE OR REPLACE FUNCTION cleanup_sessions() RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_ids text[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), follow_promotion();
    v_now := now_ms();
    v_ids := ARRAY(
        SELECT s.session_id FROM sessions s
        WHERE s.locked_until <= v_now
            AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.session_id = s.session_id)
        ORDER BY s.session_id
        FOR UPDATE SKIP LOCKED
    );
    DELETE FROM sessions s WHERE s.session_id = ANY (v_ids);
    RETURN cardinality(v_ids);
END $$;
