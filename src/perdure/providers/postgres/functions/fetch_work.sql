-- Fetching work items, in the same way as turns.

-- Returns every route that has an unlocked item without a session, by one index lookup for each.
CREATE OR REPLACE FUNCTION waiting_work_routes() RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE found (route) AS (
            (
                SELECT w.route FROM worker_queue w
                WHERE w.wake_at IS NULL AND w.session_id IS NULL
                ORDER BY w.route LIMIT 1
            )
            UNION ALL
            SELECT (
                SELECT w.route FROM worker_queue w
                WHERE w.wake_at IS NULL AND w.session_id IS NULL AND w.route > f.route
                ORDER BY w.route LIMIT 1
            )
            FROM found f
            WHERE f.route IS NOT NULL
        )
        SELECT f.route FROM found f WHERE f.route IS NOT NULL
    );
END $$;

-- Returns every session that has an item and that this owner may use.
CREATE OR REPLACE FUNCTION open_sessions(p_owner text, p_only_owned boolean, p_now bigint)
RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE found (session_id) AS (
            (
                SELECT w.session_id FROM worker_queue w
                WHERE w.session_id IS NOT NULL ORDER BY w.session_id LIMIT 1
            )
            UNION ALL
            SELECT (
                SELECT w.session_id FROM worker_queue w
                WHERE w.session_id > f.session_id ORDER BY w.session_id LIMIT 1
            )
            FROM found f
            WHERE f.session_id IS NOT NULL
        )
        SELECT f.session_id
        FROM found f
        LEFT JOIN sessions s ON s.session_id = f.session_id AND s.locked_until > p_now
        WHERE f.session_id IS NOT NULL
            AND CASE WHEN s.session_id IS NULL THEN NOT p_only_owned ELSE s.owner_id = p_owner END
    );
END $$;

-- Returns true if a worker takes items of a route, by name and suffix; NULL: any.
CREATE OR REPLACE FUNCTION fits_route(p_route text, p_names text[], p_suffixes text[])
RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT
        (p_names IS NULL OR split_part(p_route, chr(31), 1) = ANY (p_names))
        AND (
            p_suffixes IS NULL
            OR substr(p_route, strpos(p_route, chr(31)) + 1) = ANY (p_suffixes)
        )
$$;

-- Returns true if an item is neither locked nor delayed. The planner puts the expression in place of the
-- call.
CREATE OR REPLACE FUNCTION is_free(w worker_queue, p_now bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT (w.wake_at IS NULL OR w.wake_at <= p_now) AND w.visible_at <= p_now
$$;

-- Returns items that can be locked, oldest first: unlocked ones, ones whose lock or delay has
-- ended, and those of the given sessions. ROWS 20 makes the planner use index lookups in a big
-- table.
CREATE OR REPLACE FUNCTION work_candidates(
    p_now bigint, p_routes text[], p_names text[], p_suffixes text[], p_sessions text[],
    p_limit integer
) RETURNS TABLE (
    instance_id text, execution_id bigint, activity_id bigint, message_id bigint, session_id text
)
LANGUAGE plpgsql ROWS 20 AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT c.instance_id, c.execution_id, c.activity_id, c.message_id, c.session_id
    FROM (
        SELECT h.*
        FROM unnest(p_routes) AS r (route)
        CROSS JOIN LATERAL (
            SELECT
                w.instance_id, w.execution_id, w.activity_id, w.message_id, w.session_id
            FROM worker_queue w
            WHERE w.route = r.route AND w.wake_at IS NULL AND w.session_id IS NULL
                AND w.visible_at <= p_now
            ORDER BY w.message_id
            LIMIT p_limit
        ) h
        UNION ALL
        SELECT w.instance_id, w.execution_id, w.activity_id, w.message_id, w.session_id
        FROM worker_queue w
        WHERE w.wake_at <= p_now AND w.session_id IS NULL
            AND fits_route(w.route, p_names, p_suffixes)
        UNION ALL
        SELECT h.*
        FROM unnest(p_sessions) AS s (session_id)
        CROSS JOIN LATERAL (
            SELECT
                w.instance_id, w.execution_id, w.activity_id, w.message_id, w.session_id
            FROM worker_queue w
            WHERE w.session_id = s.session_id AND is_free(w, p_now)
                AND fits_route(w.route, p_names, p_suffixes)
            ORDER BY w.message_id
            LIMIT p_limit
        ) h
    ) c
    ORDER BY c.message_id
    LIMIT p_limit;
END $$;

-- Returns when the next item or session may become ready: a hint for how long to wait.
CREATE OR REPLACE FUNCTION next_work_at(
    p_now bigint, p_names text[], p_suffixes text[], p_with_sessions boolean
) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN least(
        (
            SELECT w.wake_at FROM worker_queue w
            WHERE w.wake_at > p_now AND fits_route(w.route, p_names, p_suffixes)
            ORDER BY w.wake_at LIMIT 1
        ),
        (
            SELECT min(s.locked_until) FROM sessions s
            WHERE p_with_sessions AND s.locked_until > p_now
        )
    );
END $$;

-- Locks the session for the owner and returns its oldest unlocked item; NULL if another owner has
-- the session or no item is left in it. Locks the session first, so that two owners never share it.
CREATE OR REPLACE FUNCTION take_from_session(
    p_session text, p_names text[], p_suffixes text[], p_owner text, p_lock_ms bigint,
    p_only_owned boolean, p_now bigint
) RETURNS worker_queue
LANGUAGE plpgsql AS $$
DECLARE
    v_session sessions;
    v_item worker_queue;
BEGIN
    INSERT INTO sessions (session_id, owner_id, locked_until, last_activity)
    VALUES (p_session, p_owner, 0, 0)
    ON CONFLICT DO NOTHING;
    SELECT * INTO v_session FROM sessions WHERE session_id = p_session FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF v_session.locked_until > p_now THEN
        IF v_session.owner_id <> p_owner THEN
            RETURN NULL;
        END IF;
    ELSIF p_only_owned THEN
        DELETE FROM sessions WHERE session_id = p_session AND locked_until = 0;
        RETURN NULL;
    END IF;
    SELECT w.* INTO v_item
    FROM worker_queue w
    WHERE w.session_id = p_session AND is_free(w, p_now)
        AND fits_route(w.route, p_names, p_suffixes)
    ORDER BY w.message_id
    LIMIT 1
    FOR UPDATE;
    IF NOT FOUND THEN
        DELETE FROM sessions WHERE session_id = p_session AND locked_until = 0;
        RETURN NULL;
    END IF;
    UPDATE sessions
    SET owner_id = p_owner, locked_until = p_now + p_lock_ms, last_activity = p_now
    WHERE session_id = p_session;
    UPDATE worker_queue w SET wake_at = p_now + 1
    WHERE w.instance_id = v_item.instance_id AND w.execution_id = v_item.execution_id
        AND w.activity_id = v_item.activity_id AND w.message_id = v_item.message_id;
    RETURN v_item;
END $$;

-- Takes candidates one after the other, some of which belong to sessions; NULLs if other
-- transactions have locked all of them.
CREATE OR REPLACE FUNCTION take_with_sessions(
    p_now bigint, p_routes text[], p_names text[], p_suffixes text[], p_sessions text[],
    p_owner text, p_session_ms bigint, p_only_owned boolean, p_number integer, p_limit integer,
    OUT instances text[], OUT executions bigint[], OUT activities bigint[], OUT messages bigint[]
)
LANGUAGE plpgsql AS $$
DECLARE
    v_candidate record;
    v_item worker_queue;
BEGIN
    FOR v_candidate IN
        SELECT * FROM work_candidates(
            p_now, p_routes, p_names, p_suffixes, p_sessions, p_limit
        )
    LOOP
        EXIT WHEN cardinality(instances) = p_number;
        IF v_candidate.session_id IS NULL THEN
            SELECT w.* INTO v_item
            FROM worker_queue w
            WHERE w.instance_id = v_candidate.instance_id
                AND w.execution_id = v_candidate.execution_id
                AND w.activity_id = v_candidate.activity_id
                AND w.message_id = v_candidate.message_id AND is_free(w, p_now)
            FOR UPDATE SKIP LOCKED;
        ELSE
            v_item := take_from_session(
                v_candidate.session_id, p_names, p_suffixes, p_owner, p_session_ms,
                p_only_owned, p_now
            );
        END IF;
        IF v_item.message_id IS NOT NULL THEN
            instances := instances || v_item.instance_id;
            executions := executions || v_item.execution_id;
            activities := activities || v_item.activity_id;
            messages := messages || v_item.message_id;
        END IF;
    END LOOP;
END $$;

-- Locks up to one item for each token and returns them; if there is none, one row without an item
-- that says when to fetch again. With p_again the tokens were sent before and the answer was lost:
-- the same items are returned again. p_routes: the routes that the worker takes, or NULL to find
-- them by p_names and p_suffixes.
CREATE OR REPLACE FUNCTION fetch_work(
    p_tokens text[], p_again boolean, p_lock_ms bigint, p_routes text[], p_names text[],
    p_suffixes text[], p_owner text, p_session_ms bigint, p_only_owned boolean
) RETURNS TABLE (
    instance_id text, execution_id bigint, activity_id bigint, name text, body text,
    lock_token text, attempt_count bigint, session_id text, tag text, heartbeat text,
    now_at bigint, due_at bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := begin_fetch(p_tokens);
    v_routes text[] := p_routes;
    v_sessions text[] := '{}';
    v_limit integer := cardinality(p_tokens) + 16;
    v_first record;
    v_instances text[];
    v_executions bigint[];
    v_activities bigint[];
    v_messages bigint[];
    v_attempts bigint;
BEGIN
    IF p_again THEN
        RETURN QUERY
        SELECT
            w.instance_id, w.execution_id, w.activity_id, w.name, w.body, w.lock_token,
            w.attempt_count, w.session_id, w.tag, w.heartbeat, v_now, NULL::bigint
        FROM worker_queue w
        WHERE w.lock_token = ANY (p_tokens) AND w.locked_until > v_now
        ORDER BY w.message_id;
        IF FOUND THEN
            RETURN;
        END IF;
        -- The locks have expired, and no client knows these tokens: release them.
        UPDATE worker_queue w SET
            lock_token = NULL, locked_at = NULL, locked_until = NULL, wake_at = NULL,
            attempt_count = w.attempt_count - 1
        WHERE w.lock_token = ANY (p_tokens);
    END IF;
    LOOP
        IF p_routes IS NULL THEN
            v_routes := ARRAY(
                SELECT r.route FROM unnest(waiting_work_routes()) AS r (route)
                WHERE fits_route(r.route, p_names, p_suffixes)
            );
        END IF;
        IF p_owner IS NOT NULL THEN
            v_sessions := open_sessions(p_owner, p_only_owned, v_now);
        END IF;
        IF v_sessions = '{}' THEN
            SELECT
                array_agg(k.instance_id), array_agg(k.execution_id), array_agg(k.activity_id),
                array_agg(k.message_id), max(k.attempt_count)
            INTO v_instances, v_executions, v_activities, v_messages, v_attempts
            FROM (
                SELECT w.instance_id, w.execution_id, w.activity_id, w.message_id, w.attempt_count
                FROM work_candidates(
                    v_now, v_routes, p_names, p_suffixes, v_sessions, v_limit
                ) c
                JOIN worker_queue w
                    ON w.instance_id = c.instance_id AND w.execution_id = c.execution_id
                    AND w.activity_id = c.activity_id AND w.message_id = c.message_id
                WHERE is_free(w, v_now)
                ORDER BY c.message_id
                LIMIT cardinality(p_tokens)
                FOR UPDATE OF w SKIP LOCKED
            ) k;
        ELSE
            SELECT t.instances, t.executions, t.activities, t.messages
            INTO v_instances, v_executions, v_activities, v_messages
            FROM take_with_sessions(
                v_now, v_routes, p_names, p_suffixes, v_sessions, p_owner, p_session_ms,
                p_only_owned, cardinality(p_tokens), v_limit
            ) t;
            SELECT max(w.attempt_count) INTO v_attempts
            FROM unnest(v_instances, v_executions, v_activities, v_messages)
                AS t (instance_id, execution_id, activity_id, message_id)
            JOIN worker_queue w USING (instance_id, execution_id, activity_id, message_id);
        END IF;
        EXIT WHEN v_instances IS NOT NULL;
        SELECT * INTO v_first FROM work_candidates(
            v_now, v_routes, p_names, p_suffixes, v_sessions, 1
        );
        IF NOT FOUND THEN
            now_at := v_now;
            due_at := next_work_at(v_now, p_names, p_suffixes, p_owner IS NOT NULL);
            RETURN NEXT;
            RETURN;
        END IF;
        -- Other transactions have locked all of them. Wait for the first one, then look again.
        PERFORM 1 FROM worker_queue w
        WHERE w.instance_id = v_first.instance_id AND w.execution_id = v_first.execution_id
            AND w.activity_id = v_first.activity_id AND w.message_id = v_first.message_id
        FOR UPDATE;
        v_now := now_ms();
    END LOOP;

    PERFORM wait_if_redelivered(v_attempts + 1);
    RETURN QUERY
    WITH locked AS (
        UPDATE worker_queue w SET
            lock_token = p_tokens[t.position], locked_at = v_now, locked_until = v_now + p_lock_ms,
            wake_at = v_now + p_lock_ms, attempt_count = w.attempt_count + 1
        FROM unnest(v_instances, v_executions, v_activities, v_messages)
            WITH ORDINALITY AS t (instance_id, execution_id, activity_id, message_id, position)
        WHERE w.instance_id = t.instance_id AND w.execution_id = t.execution_id
            AND w.activity_id = t.activity_id AND w.message_id = t.message_id
        RETURNING w.*
    )
    SELECT
        k.instance_id, k.execution_id, k.activity_id, k.name, k.body, k.lock_token,
        k.attempt_count, k.session_id, k.tag, k.heartbeat, v_now, NULL::bigint
    FROM locked k
    ORDER BY k.message_id;
END $$;
