-- Batches of one plain operation, of which there are most when little is going on: the same effects
-- as the general way with fewer and smaller statements. Each function either does all of it, or
-- returns NULL for the general way to do it, having written nothing that this does not write again.

-- A turn of a running execution that adds to its history and its work, settles at most one work item,
-- and either keeps its lock or ends the execution for good.
CREATE FUNCTION commit_single(
    p_turn jsonb, p_parts integer, OUT now_at bigint, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_turn ->> 'instance_id';
    v_execution bigint := (p_turn ->> 'execution_id')::bigint;
    v_status text := p_turn ->> 'status';
    v_now bigint := now_ms();
    v_until bigint;
BEGIN
    -- One that ends keeps its lock until all of it is written, however long the server takes.
    v_until := v_now + coalesce((p_turn ->> 'keep_lock_ms')::bigint, 3600000);
    UPDATE instance_locks l SET
        locked_until = v_until, kept = true,
        wake_at = CASE WHEN l.wake_at IS NOT NULL THEN v_until END
    WHERE l.instance_id = v_id AND l.lock_token = p_turn ->> 'token'
        AND l.locked_until > now_ms() AND l.not_before IS NULL AND l.block IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_status IS NULL THEN
        UPDATE instances i SET updated_at = v_now
        WHERE i.instance_id = v_id AND i.execution_id = v_execution AND i.status = 'Running'
            AND i.named;
    ELSE
        UPDATE executions x SET
            status = v_status, output = coalesce(p_turn ->> 'output', x.output),
            completed_at = v_now
        FROM instances i
        WHERE i.instance_id = v_id AND i.execution_id = v_execution AND i.status = 'Running'
            AND i.named
            AND x.instance_id = v_id AND x.execution_id = v_execution;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        UPDATE instances i SET
            execution_status = v_status, status = v_status, completed_at = v_now,
            updated_at = v_now
        WHERE i.instance_id = v_id;
    END IF;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF p_parts & 1 > 0 THEN
        DELETE FROM worker_queue w
        WHERE w.instance_id = v_id AND w.lock_token = p_turn #>> '{settled_work,0}'
            AND w.locked_until > now_ms();
        IF NOT FOUND THEN
            RETURN;  -- the general way finds the same and takes all of it back
        END IF;
    END IF;
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT v_id, v_execution, (e.record ->> 'event_id')::bigint, e.record ->> 'data'
    FROM jsonb_array_elements(p_turn -> 'history_delta') AS e (record);
    IF p_parts & 32 > 0 THEN
        work_at := add_work(p_turn -> 'worker_items', v_now);
    END IF;
    IF p_parts & 2 > 0 THEN
        DELETE FROM orchestrator_queue q
        WHERE q.instance_id = v_id AND q.lock_token = p_turn ->> 'token'
            AND (p_turn -> 'consumed' @> to_jsonb(q.message_id));
    END IF;
    IF v_status IS NOT NULL THEN
        turns_at := end_single(p_turn, v_now);
    ELSIF p_parts & 2 > 0 THEN
        turns_at := place_single(p_turn, v_now);
    END IF;
    now_at := v_now;
END $$;

-- What is left to do at the end of an execution. Returns when the instance may be handed out again.
CREATE FUNCTION end_single(p_turn jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_turn ->> 'instance_id';
    v_turns_at bigint;
BEGIN
    IF EXISTS (SELECT FROM kv_delta d WHERE d.instance_id = v_id) THEN
        PERFORM merge_state(jsonb_build_array(p_turn));
    END IF;
    DELETE FROM instance_locks l
    WHERE l.instance_id = v_id
        AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = v_id);
    IF NOT FOUND THEN
        v_turns_at := release_turns(jsonb_build_array(p_turn), p_now);
        PERFORM forget_instances(ARRAY[v_id]);
    END IF;
    RETURN v_turns_at;
END $$;

-- Places an instance that keeps its lock by what is left in its queue.
CREATE FUNCTION place_single(p_turn jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_turn ->> 'instance_id';
BEGIN
    UPDATE instance_locks l SET ready_at = NULL, ready_id = NULL, wake_at = NULL
    WHERE l.instance_id = v_id
        AND NOT EXISTS (SELECT FROM orchestrator_queue q WHERE q.instance_id = v_id);
    IF FOUND THEN
        RETURN NULL;
    END IF;
    RETURN release_turns(jsonb_build_array(p_turn), p_now);
END $$;

-- A first turn that keeps its lock and adds nothing but history and work, of an instance that nothing
-- is known of. is_new is NULL if there is more to it, false if the instance exists.
CREATE FUNCTION start_single(
    p_turn jsonb, OUT is_new boolean, OUT now_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_turn ->> 'instance_id';
    v_execution bigint := (p_turn ->> 'execution_id')::bigint;
    v_name text := p_turn ->> 'name';
    v_version text := p_turn ->> 'version';
    v_pinned bigint[];
BEGIN
    IF EXISTS (SELECT FROM instance_locks l WHERE l.instance_id = v_id) THEN
        RETURN;
    END IF;
    now_at := now_ms();
    -- Two first turns of one instance meet here: the second waits for the first and finds it.
    INSERT INTO instances (
        instance_id, name, version, parent_instance_id, named, started,
        execution_id, execution_status, status, created_at, updated_at
    )
    VALUES (
        v_id, v_name, v_version, p_turn ->> 'parent_instance_id', true, true,
        v_execution, 'Running', 'Running', now_at, now_at
    )
    ON CONFLICT DO NOTHING;
    is_new := FOUND;
    IF NOT is_new THEN
        RETURN;
    END IF;
    IF p_turn ? 'framework_version' THEN
        v_pinned := ARRAY[
            (p_turn #>> '{framework_version,0}')::bigint,
            (p_turn #>> '{framework_version,1}')::bigint,
            (p_turn #>> '{framework_version,2}')::bigint
        ];
    END IF;
    INSERT INTO instance_locks (
        instance_id, route, framework_version, lock_token, locked_until, owner, kept
    )
    VALUES (
        v_id, route_of(v_name, v_version), v_pinned, p_turn ->> 'token',
        now_at + (p_turn ->> 'keep_lock_ms')::bigint, p_turn ->> 'owner', true
    )
    ON CONFLICT (instance_id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM refuse_overtaken();
    END IF;
    INSERT INTO executions (instance_id, execution_id, status, framework_version, started_at)
    VALUES (v_id, v_execution, 'Running', v_pinned, now_at);
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT v_id, v_execution, (e.record ->> 'event_id')::bigint, e.record ->> 'data'
    FROM jsonb_array_elements(p_turn -> 'history_delta') AS e (record);
    IF p_turn ? 'worker_items' THEN
        work_at := add_work(p_turn -> 'worker_items', now_at);
    END IF;
END $$;

-- A message, not a start, for an instance that has begun; with a condition, that it is alive.
CREATE FUNCTION enqueue_single(p_message jsonb, OUT now_at bigint, OUT turns_at bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_message ->> 'instance_id';
    v_now bigint;
    v_message_id bigint;
    v_visible_at bigint;
BEGIN
    PERFORM 1 FROM instance_locks l
    WHERE l.instance_id = v_id AND l.opens_at IS NULL AND l.route <> route_of('unknown', NULL)
    FOR UPDATE;
    IF NOT FOUND OR NOT EXISTS (
        SELECT FROM instances i WHERE i.instance_id = v_id AND i.execution_status = 'Running'
    ) THEN
        RETURN;
    END IF;
    v_now := now_ms();
    INSERT INTO orchestrator_queue (
        instance_id, kind, body, visible_at, given_at, enqueued_at, timer_execution_id, timer_id
    )
    VALUES (
        v_id, p_message ->> 'kind', p_message ->> 'body',
        coalesce(
            v_now + (p_message ->> 'delay_ms')::bigint, (p_message ->> 'visible_at_ms')::bigint,
            v_now
        ),
        (p_message ->> 'visible_at_ms')::bigint, v_now,
        (p_message #>> '{timer,execution_id}')::bigint, (p_message #>> '{timer,timer_id}')::bigint
    )
    RETURNING message_id, visible_at INTO v_message_id, v_visible_at;
    UPDATE instance_locks l SET
        ready_at = CASE
            WHEN (l.ready_at, l.ready_id) <= (v_visible_at, v_message_id) THEN l.ready_at
            ELSE v_visible_at
        END,
        ready_id = CASE
            WHEN (l.ready_at, l.ready_id) <= (v_visible_at, v_message_id) THEN l.ready_id
            ELSE v_message_id
        END,
        wake_at = CASE
            WHEN l.lock_token IS NOT NULL OR l.not_before IS NOT NULL
                THEN greatest(l.locked_until, l.not_before)
        END
    WHERE l.instance_id = v_id
    RETURNING l.ready_at INTO turns_at;
    now_at := v_now;
END $$;
