-- Adding to the two queues, and the readiness of instances (columns of instance_locks).

-- Returns the route of an instance that no turn has named and whose starts are all queued, with
-- p_new_starts that this statement adds. '' means that the route depends on which start is visible:
-- see route_at. NULL means that the instance is unknown.
CREATE OR REPLACE FUNCTION undecided_route(
    p_id text, p_name text, p_version text, p_is_open boolean, p_new_starts bigint
) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_starts bigint := p_new_starts + (
        SELECT count(*) FROM orchestrator_queue q
        WHERE q.instance_id = p_id AND q.start_name IS NOT NULL
    );
BEGIN
    RETURN CASE
        WHEN v_starts > 1 OR (p_is_open AND v_starts > 0) THEN ''
        WHEN v_starts = 1 THEN route_of(p_name, p_version)
        WHEN p_is_open THEN route_of('unknown', NULL)
    END;
END $$;

-- Adds messages in their order. A start also adds its instance to the list of instances. The caller
-- has locked the rows in instance_locks. Returns the earliest time at which one of these instances
-- is ready, locks and delays ignored.
CREATE OR REPLACE FUNCTION add_messages(p_messages jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ready_at bigint;
BEGIN
    INSERT INTO instances (
        instance_id, name, version, parent_instance_id, status, created_at, updated_at
    )
    SELECT DISTINCT ON (m.instance_id)
        m.instance_id, m.start ->> 'name', m.start ->> 'version',
        m.start ->> 'parent_instance_id', 'Pending', coalesce(m.enqueued_at_ms, p_now),
        coalesce(m.enqueued_at_ms, p_now)
    FROM ROWS FROM (
        jsonb_to_recordset(p_messages) AS (instance_id text, start jsonb, enqueued_at_ms bigint)
    ) WITH ORDINALITY AS m (instance_id, start, enqueued_at_ms, position)
    WHERE m.start IS NOT NULL
    ORDER BY m.instance_id, m.position
    ON CONFLICT (instance_id) DO UPDATE
        SET name = EXCLUDED.name, version = EXCLUDED.version,
            parent_instance_id = EXCLUDED.parent_instance_id
        WHERE instances.name IS NULL;

    WITH added AS (
        INSERT INTO orchestrator_queue (
            instance_id, kind, body, visible_at, given_at, enqueued_at, attempt_count,
            start_name, start_version, start_parent, timer_execution_id, timer_id
        )
        SELECT
            m.instance_id, m.kind, m.body,
            coalesce(m.resolved_at_ms, p_now + m.delay_ms, m.visible_at_ms, p_now),
            m.visible_at_ms, coalesce(m.enqueued_at_ms, p_now), coalesce(m.attempt_count, 0),
            m.start ->> 'name', m.start ->> 'version', m.start ->> 'parent_instance_id',
            (m.timer ->> 'execution_id')::bigint, (m.timer ->> 'timer_id')::bigint
        FROM ROWS FROM (
            jsonb_to_recordset(p_messages) AS (
                instance_id text, kind text, body text, visible_at_ms bigint, delay_ms bigint,
                resolved_at_ms bigint, enqueued_at_ms bigint, attempt_count bigint,
                start jsonb, timer jsonb
            )
        ) WITH ORDINALITY AS m (
            instance_id, kind, body, visible_at_ms, delay_ms, resolved_at_ms, enqueued_at_ms,
            attempt_count, start, timer, position
        )
        ORDER BY m.position
        RETURNING instance_id, message_id, visible_at, enqueued_at, start_name
    ), arrivals AS (
        SELECT
            a.instance_id,
            (array_agg(a.visible_at ORDER BY a.visible_at, a.message_id))[1] AS ready_at,
            (array_agg(a.message_id ORDER BY a.visible_at, a.message_id))[1] AS ready_id,
            min(a.enqueued_at) AS enqueued_at,
            min(a.visible_at) FILTER (WHERE a.start_name IS NOT NULL) AS opens_at,
            count(a.start_name) AS starts
        FROM added a
        GROUP BY a.instance_id
    ), known AS (
        SELECT
            a.*, i.instance_id IS NOT NULL AS is_listed, h.is_open, x.framework_version,
            CASE
                WHEN i.named OR i.started THEN route_of(i.name, i.version)
                ELSE undecided_route(a.instance_id, i.name, i.version, h.is_open, a.starts)
            END AS route
        FROM arrivals a
        LEFT JOIN instances i ON i.instance_id = a.instance_id
        LEFT JOIN executions x
            ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
        CROSS JOIN LATERAL (
            SELECT coalesce(i.execution_id, 0) > 0
                OR EXISTS (SELECT FROM history e WHERE e.instance_id = a.instance_id) AS is_open
        ) h
    ), updated AS (
        INSERT INTO instance_locks AS l (
            instance_id, route, framework_version, opens_at, ready_at, ready_id, orphaned_at
        )
        SELECT
            k.instance_id, k.route, k.framework_version,
            CASE WHEN NOT k.is_open THEN k.opens_at END,
            k.ready_at, k.ready_id,
            CASE WHEN NOT (k.is_open OR k.is_listed) THEN k.enqueued_at END
        FROM known k
        ORDER BY k.instance_id
        ON CONFLICT (instance_id) DO UPDATE SET
            route = coalesce(EXCLUDED.route, l.route),
            opens_at = CASE
                WHEN l.route IS NOT NULL AND l.opens_at IS NULL THEN NULL
                WHEN EXCLUDED.route IS NOT NULL AND EXCLUDED.opens_at IS NULL
                    AND l.opens_at IS NULL THEN NULL
                ELSE least(l.opens_at, EXCLUDED.opens_at)
            END,
            ready_at = CASE
                WHEN (l.ready_at, l.ready_id) <= (EXCLUDED.ready_at, EXCLUDED.ready_id)
                    THEN l.ready_at
                ELSE EXCLUDED.ready_at
            END,
            ready_id = CASE
                WHEN (l.ready_at, l.ready_id) <= (EXCLUDED.ready_at, EXCLUDED.ready_id)
                    THEN l.ready_id
                ELSE EXCLUDED.ready_id
            END,
            wake_at = CASE
                WHEN l.lock_token IS NOT NULL OR l.not_before IS NOT NULL
                    THEN greatest(l.locked_until, l.not_before)
            END,
            orphaned_at = CASE
                WHEN l.route IS NULL AND EXCLUDED.route IS NULL
                    THEN least(l.orphaned_at, EXCLUDED.orphaned_at)
            END
        RETURNING l.ready_at, l.opens_at
    )
    SELECT min(greatest(p.ready_at, p.opens_at)) INTO v_ready_at FROM updated p;
    RETURN v_ready_at;
END $$;

-- Computes readiness again from the queued messages, after some were removed or unlocked. The
-- caller has locked the rows. Returns the earliest time at which one of these instances is ready.
CREATE OR REPLACE FUNCTION update_readiness(p_ids text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ready_at bigint;
BEGIN
    WITH updated AS (
        UPDATE instance_locks l SET
            route = CASE
                WHEN i.named OR i.started THEN route_of(i.name, i.version)
                ELSE undecided_route(o.instance_id, i.name, i.version, h.is_open, 0)
            END,
            framework_version = x.framework_version,
            opens_at = CASE WHEN NOT h.is_open THEN s.visible_at END,
            ready_at = f.visible_at,
            ready_id = f.message_id,
            wake_at = CASE
                WHEN (o.lock_token IS NOT NULL OR o.not_before IS NOT NULL)
                    AND EXISTS (
                        SELECT FROM orchestrator_queue q WHERE q.instance_id = o.instance_id
                    )
                    THEN greatest(o.locked_until, o.not_before)
            END,
            orphaned_at = CASE WHEN NOT h.is_open AND i.instance_id IS NULL THEN (
                SELECT min(q.enqueued_at) FROM orchestrator_queue q
                WHERE q.instance_id = o.instance_id
            ) END
        FROM instance_locks o
        LEFT JOIN instances i ON i.instance_id = o.instance_id
        LEFT JOIN executions x
            ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
        CROSS JOIN LATERAL (
            SELECT coalesce(i.execution_id, 0) > 0
                OR EXISTS (SELECT FROM history e WHERE e.instance_id = o.instance_id) AS is_open
        ) h
        LEFT JOIN LATERAL (
            SELECT q.visible_at, q.message_id
            FROM orchestrator_queue q
            WHERE q.instance_id = o.instance_id
                AND (o.lock_token IS NULL OR q.lock_token IS DISTINCT FROM o.lock_token)
            ORDER BY q.visible_at, q.message_id
            LIMIT 1
        ) f ON true
        LEFT JOIN LATERAL (
            SELECT min(q.visible_at) AS visible_at
            FROM orchestrator_queue q
            WHERE q.instance_id = o.instance_id AND q.start_name IS NOT NULL
        ) s ON true
        WHERE o.instance_id = ANY (p_ids) AND l.instance_id = o.instance_id
        RETURNING l.ready_at, l.opens_at, l.not_before, l.suspended
    )
    SELECT min(greatest(p.ready_at, p.opens_at, p.not_before)) INTO v_ready_at
    FROM updated p WHERE NOT p.suspended;
    RETURN v_ready_at;
END $$;

-- Deletes the rows of ended or unknown instances that have no message, lock, delay, block or pause.
CREATE OR REPLACE FUNCTION delete_idle_locks(p_ids text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM instance_locks l
    WHERE l.instance_id = ANY (p_ids)
        AND l.lock_token IS NULL AND l.ready_at IS NULL AND l.not_before IS NULL
        AND l.block IS NULL AND NOT l.suspended
        AND NOT EXISTS (
            SELECT FROM instances i
            WHERE i.instance_id = l.instance_id AND NOT ends_execution(i.execution_status)
        );
END $$;

-- Adds work items in their order. Returns the earliest time at which one without a lock is ready.
CREATE OR REPLACE FUNCTION add_work(p_items jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_free_at bigint;
BEGIN
    IF jsonb_array_length(p_items) = 1 THEN
        RETURN add_single_work(p_items -> 0, p_now);
    END IF;
    WITH added AS (
        INSERT INTO worker_queue (
            instance_id, execution_id, activity_id, name, route, body, session_id, tag,
            visible_at, given_at, enqueued_at, attempt_count, heartbeat,
            lock_token, locked_at, locked_until, wake_at
        )
        SELECT
            w.identity ->> 'instance_id', (w.identity ->> 'execution_id')::bigint,
            (w.identity ->> 'activity_id')::bigint, w.name, route_of(w.name, w.tag), w.body,
            w.session_id, w.tag, f.visible_at, w.visible_at_ms,
            coalesce(w.enqueued_at_ms, p_now),
            CASE WHEN w.claim IS NULL THEN coalesce(w.attempt_count, 0) ELSE 1 END, w.heartbeat,
            w.claim ->> 'lock_token', CASE WHEN w.claim IS NOT NULL THEN p_now END, f.locked_until,
            nullif(greatest(f.visible_at, f.locked_until, p_now), p_now)
        FROM ROWS FROM (
            jsonb_to_recordset(p_items) AS (
                identity jsonb, name text, body text, session_id text, tag text,
                visible_at_ms bigint, resolved_at_ms bigint, enqueued_at_ms bigint,
                attempt_count bigint, heartbeat text, claim jsonb
            )
        ) WITH ORDINALITY AS w (
            identity, name, body, session_id, tag, visible_at_ms, resolved_at_ms, enqueued_at_ms,
            attempt_count, heartbeat, claim, position
        )
        CROSS JOIN LATERAL (
            SELECT
                coalesce(w.resolved_at_ms, w.visible_at_ms, p_now) AS visible_at,
                p_now + (w.claim ->> 'lock_timeout_ms')::bigint AS locked_until
        ) f
        ORDER BY w.position
        RETURNING visible_at, lock_token
    )
    SELECT min(a.visible_at) INTO v_free_at FROM added a WHERE a.lock_token IS NULL;
    RETURN v_free_at;
END $$;

-- As add_work, for one item.
CREATE OR REPLACE FUNCTION add_single_work(p_item jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_identity jsonb := p_item -> 'identity';
    v_token text := p_item #>> '{claim,lock_token}';
    v_until bigint := p_now + (p_item #>> '{claim,lock_timeout_ms}')::bigint;
    v_visible_at bigint := coalesce(
        (p_item ->> 'resolved_at_ms')::bigint, (p_item ->> 'visible_at_ms')::bigint, p_now
    );
BEGIN
    INSERT INTO worker_queue (
        instance_id, execution_id, activity_id, name, route, body, session_id, tag,
        visible_at, given_at, enqueued_at, attempt_count, heartbeat,
        lock_token, locked_at, locked_until, wake_at
    )
    VALUES (
        v_identity ->> 'instance_id', (v_identity ->> 'execution_id')::bigint,
        (v_identity ->> 'activity_id')::bigint, p_item ->> 'name',
        route_of(p_item ->> 'name', p_item ->> 'tag'), p_item ->> 'body',
        p_item ->> 'session_id', p_item ->> 'tag', v_visible_at,
        (p_item ->> 'visible_at_ms')::bigint,
        coalesce((p_item ->> 'enqueued_at_ms')::bigint, p_now),
        CASE
            WHEN v_token IS NULL THEN coalesce((p_item ->> 'attempt_count')::bigint, 0) ELSE 1
        END,
        p_item ->> 'heartbeat', v_token, CASE WHEN v_token IS NOT NULL THEN p_now END, v_until,
        nullif(greatest(v_visible_at, v_until, p_now), p_now)
    );
    RETURN CASE WHEN v_token IS NULL THEN v_visible_at END;
END $$;
