-- The steps of a turn, for many turns at once.

-- Applies turns whose tokens were checked. p_parts is the sum of the steps that are needed; records.py
-- has their numbers and names. Returns the earliest times at which an instance and an added work item are
-- ready.
CREATE OR REPLACE FUNCTION apply_turns(
    p_turns jsonb, p_parts integer, p_now bigint, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_starts jsonb := '[]';
    v_released_at bigint;
BEGIN
    IF p_parts & 2048 > 0 THEN  -- FOLLOWS
        PERFORM check_predecessors(p_turns);
    END IF;
    IF p_parts & 64 > 0 THEN  -- CANCELS_WORK
        PERFORM lock_removed_work(p_turns);
    END IF;
    IF p_parts & 1 > 0 THEN  -- COMPLETES_WORK
        PERFORM remove_completed_work(p_turns, p_now);
    END IF;
    IF p_parts & 2 > 0 THEN  -- CONSUMES
        v_starts := coalesce(remove_consumed_messages(p_turns), '[]');
    END IF;
    -- Most turns belong to an execution that exists.
    IF v_starts <> '[]' OR p_parts & 512 > 0 OR EXISTS (  -- NAMES
        SELECT FROM jsonb_to_recordset(p_turns) AS t (instance_id text, execution_id bigint)
        LEFT JOIN executions x
            ON x.instance_id = t.instance_id AND x.execution_id = t.execution_id
        WHERE x.instance_id IS NULL
    ) THEN
        PERFORM prepare_turns(p_turns, v_starts, p_now);
    END IF;
    IF p_parts & 4 > 0 THEN  -- UPDATES_EXECUTION
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
    PERFORM write_instances(p_turns, p_now);
    PERFORM add_history(p_turns);
    IF p_parts & 8 > 0 THEN  -- CHANGES_STATE
        PERFORM apply_state(p_turns);
    END IF;
    IF p_parts & 16 > 0 THEN  -- ENDS_EXECUTION
        PERFORM merge_state(p_turns);
    END IF;
    IF p_parts & 32 > 0 THEN  -- ADDS_WORK
        work_at := add_work(jsonb_path_query_array(p_turns, '$[*].worker_items[*]'), p_now);
    END IF;
    IF p_parts & 64 > 0 THEN  -- CANCELS_WORK
        DELETE FROM worker_queue w
        USING jsonb_to_recordset(p_turns) AS t (cancelled_activities jsonb)
        CROSS JOIN LATERAL jsonb_to_recordset(t.cancelled_activities)
            AS c (instance_id text, execution_id bigint, activity_id bigint)
        WHERE w.instance_id = c.instance_id AND w.execution_id = c.execution_id
            AND w.activity_id = c.activity_id;
    END IF;
    IF p_parts & 128 > 0 THEN  -- ADDS_MESSAGES
        turns_at := add_messages(
            jsonb_path_query_array(p_turns, '$[*].orchestrator_items[*]'), p_now
        );
    END IF;
    IF p_parts & 256 > 0 THEN  -- CANCELS_TIMERS
        WITH listed AS MATERIALIZED (
            SELECT t.instance_id, c.execution_id, c.timer_id
            FROM jsonb_to_recordset(p_turns) AS t (instance_id text, cancelled_timers jsonb)
            CROSS JOIN LATERAL jsonb_to_recordset(t.cancelled_timers)
                AS c (execution_id bigint, timer_id bigint)
        )
        DELETE FROM orchestrator_queue q USING listed c
        WHERE q.instance_id = c.instance_id AND q.timer_execution_id = c.execution_id
            AND q.timer_id = c.timer_id;
    END IF;
    IF p_parts & 4096 > 0 THEN  -- RETURNS
        UPDATE orchestrator_queue q SET
            lock_token = NULL, attempt_count = greatest(q.attempt_count - 1, 0)
        FROM jsonb_to_recordset(p_turns) AS t (instance_id text, token text, returned bigint[])
        CROSS JOIN LATERAL unnest(t.returned) AS r (message_id)
        WHERE q.instance_id = t.instance_id AND q.message_id = r.message_id
            AND q.lock_token = t.token;
    END IF;
    v_released_at := release_turns(p_turns, p_now);
    turns_at := least(turns_at, v_released_at);
    IF p_parts & 16 > 0 THEN  -- ENDS_EXECUTION
        PERFORM delete_idle_locks(ids_of(p_turns));
    END IF;
END $$;

CREATE OR REPLACE FUNCTION add_history(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT t.instance_id, t.execution_id, e.event_id, e.data
    FROM jsonb_to_recordset(p_turns)
        AS t (instance_id text, execution_id bigint, history_delta jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(t.history_delta) AS e (event_id bigint, data text);
END $$;

-- Refuses a turn that goes on from an event which is not stored: after a failover to a standby that
-- did not have it, the holder of a lock is ahead of the store. Raises, as remove_completed_work does.
CREATE OR REPLACE FUNCTION check_predecessors(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM jsonb_to_recordset(p_turns)
            AS t (instance_id text, execution_id bigint, "after" bigint)
        WHERE t."after" > coalesce((
            SELECT max(e.event_id) FROM history e
            WHERE e.instance_id = t.instance_id AND e.execution_id = t.execution_id
        ), 0)
    ) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'PD004', MESSAGE = 'the event that the turn goes on from is not stored';
    END IF;
END $$;

-- Removes work items that turns have completed. If one is not held, raises, which rolls back the
-- whole batch: the client then sends each turn alone.
CREATE OR REPLACE FUNCTION remove_completed_work(p_turns jsonb, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_completed integer;
    v_removed integer;
BEGIN
    WITH completed AS MATERIALIZED (
        SELECT t.instance_id, o.token
        FROM jsonb_to_recordset(p_turns) AS t (instance_id text, settled_work text[])
        CROSS JOIN LATERAL unnest(t.settled_work) AS o (token)
    ), held AS MATERIALIZED (
        SELECT w.instance_id, w.execution_id, w.activity_id, w.message_id
        FROM completed s
        JOIN worker_queue w ON w.instance_id = s.instance_id AND w.lock_token = s.token
        WHERE w.locked_until > p_now
        ORDER BY w.message_id
        FOR UPDATE OF w
    ), removed AS (
        DELETE FROM worker_queue w USING held h
        WHERE w.instance_id = h.instance_id AND w.execution_id = h.execution_id
            AND w.activity_id = h.activity_id AND w.message_id = h.message_id
        RETURNING w.message_id
    )
    SELECT (SELECT count(*) FROM completed), (SELECT count(*) FROM removed)
    INTO v_completed, v_removed;
    IF v_removed < v_completed THEN
        RAISE EXCEPTION USING
            ERRCODE = CASE WHEN EXISTS (
                SELECT FROM jsonb_to_recordset(p_turns) AS t (instance_id text, settled_work text[])
                CROSS JOIN LATERAL unnest(t.settled_work) AS o (token)
                JOIN worker_queue w ON w.lock_token = o.token
                WHERE w.instance_id <> t.instance_id AND w.locked_until > p_now
            ) THEN 'PD002' ELSE 'PD001' END,
            MESSAGE = 'a work item that the turn completes is not held';
    END IF;
END $$;

-- Refuses a turn that consumes a message which its lock does not carry: it was consumed already, or
-- a crash of the server has lost the mark of the fetch. Raises, as remove_completed_work does.
CREATE OR REPLACE FUNCTION refuse_consuming() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'PD003', MESSAGE = 'a message that the turn consumes does not carry its lock';
END $$;

-- Removes messages that turns have consumed; refuses if one of those that a turn names is not there.
-- Returns the first start message of each instance.
CREATE OR REPLACE FUNCTION remove_consumed_messages(p_turns jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_starts jsonb;
    v_is_complete boolean;
BEGIN
    WITH consumed AS (
        DELETE FROM orchestrator_queue q
        USING jsonb_to_recordset(p_turns) AS t (instance_id text, token text, consumed bigint[])
        WHERE t.consumed IS NULL AND q.instance_id = t.instance_id AND q.lock_token = t.token
        RETURNING q.*
    ), listed AS MATERIALIZED (
        SELECT DISTINCT t.instance_id, t.token, c.message_id
        FROM jsonb_to_recordset(p_turns) AS t (instance_id text, token text, consumed bigint[])
        CROSS JOIN LATERAL unnest(t.consumed) AS c (message_id)
    ), named AS (
        DELETE FROM orchestrator_queue q USING listed c
        WHERE q.instance_id = c.instance_id AND q.message_id = c.message_id
            AND q.lock_token = c.token
        RETURNING q.*
    )
    SELECT jsonb_agg(s), (SELECT count(*) FROM listed) = (SELECT count(*) FROM named)
    INTO v_starts, v_is_complete
    FROM (
        SELECT DISTINCT ON (g.instance_id)
            g.instance_id, g.enqueued_at, g.start_name, g.start_version, g.start_parent
        FROM (SELECT * FROM consumed UNION ALL SELECT * FROM named) g
        WHERE g.start_name IS NOT NULL
        ORDER BY g.instance_id, g.message_id
    ) s;
    IF NOT v_is_complete THEN
        PERFORM refuse_consuming();
    END IF;
    RETURN v_starts;
END $$;

-- Creates the rows that a first turn, or a turn of a new execution, needs.
CREATE OR REPLACE FUNCTION prepare_turns(p_turns jsonb, p_starts jsonb, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO instances (instance_id, status, created_at, updated_at)
    SELECT t.instance_id, 'Pending', p_now, p_now
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
    WHERE NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = t.instance_id)
    ON CONFLICT DO NOTHING;

    UPDATE instances i SET
        started = true, created_at = s.enqueued_at,
        name = CASE WHEN i.named THEN i.name ELSE s.start_name END,
        version = CASE WHEN i.named THEN i.version ELSE s.start_version END,
        parent_instance_id = CASE WHEN i.named THEN i.parent_instance_id ELSE s.start_parent END
    FROM jsonb_to_recordset(p_starts) AS s (
        instance_id text, enqueued_at bigint, start_name text, start_version text,
        start_parent text
    )
    WHERE i.instance_id = s.instance_id AND NOT i.started AND i.execution_id = 0;

    -- An instance that no turn has named yet takes the name of the oldest queued start.
    UPDATE instances i SET
        name = q.start_name, version = q.start_version, parent_instance_id = q.start_parent
    FROM jsonb_to_recordset(p_starts) AS s (instance_id text)
    LEFT JOIN LATERAL (
        SELECT m.start_name, m.start_version, m.start_parent
        FROM orchestrator_queue m
        WHERE m.instance_id = s.instance_id AND m.start_name IS NOT NULL
        ORDER BY m.message_id
        LIMIT 1
    ) q ON true
    WHERE i.instance_id = s.instance_id
        AND NOT i.named AND NOT i.started AND i.execution_id > 0;

    INSERT INTO executions (instance_id, execution_id, status, started_at)
    SELECT t.instance_id, t.execution_id, 'Running', p_now
    FROM jsonb_to_recordset(p_turns) AS t (instance_id text, execution_id bigint)
    WHERE NOT EXISTS (
        SELECT FROM executions x
        WHERE x.instance_id = t.instance_id AND x.execution_id = t.execution_id
    );
END $$;

-- Updates the rows of instances, with the status of their executions.
CREATE OR REPLACE FUNCTION write_instances(p_turns jsonb, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
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
END $$;

-- Locks the work items that turns complete and cancel, all at once and in order.
CREATE OR REPLACE FUNCTION lock_removed_work(p_turns jsonb) RETURNS void
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

-- Keeps or releases the locks, ends delays and blocks, and computes readiness from the remaining
-- messages. Returns the earliest time at which one of the instances is ready.
CREATE OR REPLACE FUNCTION release_turns(p_turns jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ready_at bigint;
BEGIN
    WITH updated AS (
        UPDATE instance_locks l SET
            route = route_of_instance(i.instance_id, i, true, 0),
            framework_version = x.framework_version,
            opens_at = NULL,
            orphaned_at = NULL,
            lock_token = CASE WHEN t.keep_lock_ms IS NOT NULL THEN l.lock_token END,
            locked_at = CASE WHEN t.keep_lock_ms IS NOT NULL THEN l.locked_at END,
            locked_until = p_now + t.keep_lock_ms,
            owner = CASE WHEN t.keep_lock_ms IS NOT NULL THEN l.owner END,
            kept = t.keep_lock_ms IS NOT NULL,
            suspended = l.suspended AND NOT is_final(i.execution_status),
            not_before = NULL,
            block = NULL,
            ready_at = CASE WHEN f.message_id IS NOT NULL THEN
                greatest(f.visible_at, y.yielded_at)
            END,
            ready_id = f.message_id,
            mail_held = y.mail_held AND y.has_messages,
            yielded_at = CASE WHEN t.keep_lock_ms IS NOT NULL OR y.has_messages THEN
                y.yielded_at
            END,
            wake_at = CASE WHEN y.has_messages THEN p_now + t.keep_lock_ms END
        FROM jsonb_to_recordset(p_turns) AS t (
            instance_id text, token text, keep_lock_ms bigint, status text, returned bigint[]
        )
        JOIN instance_locks o ON o.instance_id = t.instance_id
        CROSS JOIN LATERAL (
            SELECT
                t.returned IS NOT NULL AND NOT coalesce(ends_execution(t.status), false)
                    AS mail_held,
                CASE
                    WHEN o.mail_held OR t.returned IS NOT NULL THEN p_now ELSE o.yielded_at
                END AS yielded_at,
                EXISTS (
                    SELECT FROM orchestrator_queue q WHERE q.instance_id = t.instance_id
                ) AS has_messages
        ) y
        JOIN instances i ON i.instance_id = t.instance_id
        JOIN executions x ON x.instance_id = i.instance_id AND x.execution_id = i.execution_id
        LEFT JOIN LATERAL first_message(
            t.instance_id, CASE WHEN t.keep_lock_ms IS NOT NULL THEN t.token END, y.mail_held
        ) f ON true
        WHERE l.instance_id = t.instance_id
        RETURNING l.ready_at, l.suspended
    )
    SELECT min(p.ready_at) INTO v_ready_at FROM updated p WHERE NOT p.suspended;
    RETURN v_ready_at;
END $$;

-- Writes changes of state into kv_delta, where a NULL value means cleared.
CREATE OR REPLACE FUNCTION apply_state(p_turns jsonb) RETURNS void
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

-- Moves the changes of executions that end from kv_delta to kv_store, with which the next one
-- begins.
CREATE OR REPLACE FUNCTION merge_state(p_turns jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
        JOIN kv_delta d ON d.instance_id = t.instance_id
    ) THEN
        RETURN;
    END IF;
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
