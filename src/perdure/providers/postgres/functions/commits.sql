-- Committing, abandoning and renewing turns. Each function takes a batch of operations that are
-- independent of each other: a refused one is named in the answer and writes nothing.

-- Locks the rows of the instances that the turns belong to or send messages to, in order. Returns
-- the turns without a live lock: {n: [code, token]}; NULL if there are none.
CREATE OR REPLACE FUNCTION lock_turns(p_turns jsonb, p_parts integer) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ids_of(p_turns);
    v_refused jsonb;
BEGIN
    IF p_parts & 128 > 0 THEN  -- ADDS_MESSAGES
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

-- Commits turns under their locks. Refuses a turn with 'lost' if its token has no live lock.
CREATE OR REPLACE FUNCTION commit_turns(
    p_turns jsonb, p_parts integer,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_turns jsonb;
BEGIN
    IF p_parts & 1024 = 0 AND jsonb_array_length(p_turns) = 1 THEN  -- UNCOMMON
        SELECT s.now_at, s.turns_at, s.work_at INTO now_at, turns_at, work_at
        FROM commit_single(p_turns -> 0, p_parts) s;
        IF now_at IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    refused := lock_turns(p_turns, p_parts);
    v_turns := not_refused(p_turns, refused);
    now_at := now_ms();
    IF v_turns IS NOT NULL THEN
        SELECT a.turns_at, a.work_at INTO turns_at, work_at
        FROM apply_turns(v_turns, p_parts, now_at) a;
    END IF;
END $$;

-- Commits first turns of new instances. Refuses a turn with 'present' if its instance exists.
CREATE OR REPLACE FUNCTION start_turns(
    p_turns jsonb, p_parts integer,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_is_plain boolean;
    v_fresh text[];
    v_turns jsonb;
BEGIN
    v_is_plain := p_parts & 1024 = 0 AND NOT EXISTS (  -- UNCOMMON
        SELECT FROM jsonb_to_recordset(p_turns) AS t (instance_id text)
        JOIN instance_locks l ON l.instance_id = t.instance_id
    );
    IF NOT v_is_plain THEN
        PERFORM lock_turns(p_turns, p_parts);
    END IF;
    now_at := now_ms();
    -- Of two concurrent first turns of one instance, the second waits here and finds the first.
    WITH fresh AS (
        INSERT INTO instances (
            instance_id, name, version, parent_instance_id, named, started,
            execution_id, execution_status, status, created_at, updated_at
        )
        SELECT
            t.instance_id, t.name, t.version, t.parent_instance_id, true, true,
            CASE WHEN v_is_plain THEN t.execution_id ELSE 0 END,
            CASE WHEN v_is_plain THEN 'Running' END,
            CASE WHEN v_is_plain THEN 'Running' ELSE 'Pending' END, now_at, now_at
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
        SELECT jsonb_object_agg(t.n, jsonb_build_array('present', t.instance_id)) INTO refused
        FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text)
        WHERE NOT t.instance_id = ANY (v_fresh);
    END IF;
    v_turns := not_refused(p_turns, refused);
    IF v_turns IS NULL THEN
        RETURN;
    ELSIF v_is_plain THEN
        work_at := write_first_turns(v_turns, now_at);
    ELSE
        INSERT INTO instance_locks AS l (instance_id, lock_token, locked_at, locked_until, owner)
        SELECT t.instance_id, t.token, now_at, now_at + 1, t.owner
        FROM jsonb_to_recordset(v_turns) AS t (instance_id text, token text, owner text)
        ORDER BY t.instance_id
        ON CONFLICT (instance_id) DO UPDATE SET
            lock_token = EXCLUDED.lock_token, locked_at = EXCLUDED.locked_at,
            locked_until = EXCLUDED.locked_until, owner = EXCLUDED.owner;
        SELECT a.turns_at, a.work_at INTO turns_at, work_at
        FROM apply_turns(v_turns, p_parts, now_at) a;
    END IF;
END $$;

-- Writes first turns that keep their locks and add only history and work, for instances without a
-- row in instance_locks. Returns the earliest time at which an added work item is ready.
CREATE OR REPLACE FUNCTION write_first_turns(p_turns jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_placed integer;
BEGIN
    INSERT INTO instance_locks (
        instance_id, route, framework_version, lock_token, locked_at, locked_until, owner, kept
    )
    SELECT
        t.instance_id, route_of(t.name, t.version), t.framework_version, t.token,
        p_now, p_now + t.keep_lock_ms, t.owner, true
    FROM jsonb_to_recordset(p_turns) AS t (
        instance_id text, name text, version text, framework_version bigint[], token text,
        keep_lock_ms bigint, owner text
    )
    ORDER BY t.instance_id
    ON CONFLICT (instance_id) DO NOTHING;
    GET DIAGNOSTICS v_placed = ROW_COUNT;
    IF v_placed < jsonb_array_length(p_turns) THEN
        -- Another transaction has added a message for an instance meanwhile. The client repeats the
        -- batch, and then the message is visible.
        RAISE EXCEPTION USING
            ERRCODE = 'serialization_failure', MESSAGE = 'a message overtook a first turn';
    END IF;
    INSERT INTO executions (instance_id, execution_id, status, framework_version, started_at)
    SELECT t.instance_id, t.execution_id, 'Running', t.framework_version, p_now
    FROM jsonb_to_recordset(p_turns)
        AS t (instance_id text, execution_id bigint, framework_version bigint[]);
    PERFORM add_history(p_turns);
    RETURN add_work(jsonb_path_query_array(p_turns, '$[*].worker_items[*]'), p_now);
END $$;

-- Gives turns back without an outcome, with a delay or a block.
CREATE OR REPLACE FUNCTION abandon_turns(
    p_turns jsonb,
    OUT now_at bigint, OUT refused jsonb, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ids_of(p_turns);
    v_turns jsonb;
BEGIN
    PERFORM lock_instance_rows(v_ids);
    now_at := now_ms();
    SELECT jsonb_object_agg(t.n, jsonb_build_array('lost', t.token)) INTO refused
    FROM jsonb_to_recordset(p_turns) AS t (n integer, instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM instance_locks l
        WHERE l.instance_id = t.instance_id AND l.lock_token = t.token
    );
    v_turns := not_refused(p_turns, refused);
    IF v_turns IS NOT NULL THEN
        UPDATE orchestrator_queue q SET
            lock_token = NULL,
            attempt_count = greatest(q.attempt_count - t.ignore_attempt::integer, 0)
        FROM jsonb_to_recordset(v_turns)
            AS t (instance_id text, token text, ignore_attempt boolean)
        WHERE q.instance_id = t.instance_id AND q.lock_token = t.token;
        UPDATE instance_locks l SET
            lock_token = NULL, locked_at = NULL, locked_until = NULL, owner = NULL, kept = false,
            mail_held = false, yielded_at = NULL,
            not_before = coalesce(now_at + t.delay_ms, l.not_before),
            block = coalesce(t.block, l.block)
        FROM jsonb_to_recordset(v_turns)
            AS t (instance_id text, token text, delay_ms bigint, block text)
        WHERE l.instance_id = t.instance_id AND l.lock_token = t.token;
        UPDATE instances i SET
            status = shown_status(i.execution_status, l.suspended, l.block IS NOT NULL)
        FROM jsonb_to_recordset(v_turns) AS t (instance_id text, block text)
        JOIN instance_locks l ON l.instance_id = t.instance_id
        WHERE t.block IS NOT NULL AND i.instance_id = t.instance_id;
        turns_at := update_readiness(v_ids);
        PERFORM delete_idle_locks(v_ids);
    END IF;
END $$;

-- Extends live locks. Returns the tokens without a live lock. Does not wait for a row that another
-- transaction has locked: that is a commit under the same token, or the lock is about to be lost. A
-- commit that hangs, because a synchronous standby is away, must not let the other locks expire.
CREATE OR REPLACE FUNCTION renew_turns(p_renewals jsonb) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
    v_ids text[];
    v_lost text[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), follow_promotion();
    v_ids := ARRAY(
        SELECT l.instance_id FROM instance_locks l
        WHERE l.instance_id = ANY (ids_of(p_renewals))
        ORDER BY l.instance_id
        FOR UPDATE SKIP LOCKED
    );
    v_now := now_ms();
    PERFORM note_time(v_now);
    SELECT array_agg(r.token) INTO v_lost
    FROM jsonb_to_recordset(p_renewals) AS r (instance_id text, token text)
    WHERE NOT EXISTS (
        SELECT FROM instance_locks l
        WHERE l.instance_id = r.instance_id AND l.lock_token = r.token
            AND (l.locked_until > v_now OR NOT l.instance_id = ANY (v_ids))
    );
    UPDATE instance_locks l SET
        locked_until = v_now + r.extend_for_ms,
        wake_at = CASE
            WHEN l.wake_at IS NOT NULL THEN greatest(v_now + r.extend_for_ms, l.not_before)
        END
    FROM jsonb_to_recordset(p_renewals)
        AS r (instance_id text, token text, extend_for_ms bigint)
    WHERE l.instance_id = r.instance_id AND l.instance_id = ANY (v_ids)
        AND l.lock_token = r.token AND l.locked_until > v_now;
    RETURN coalesce(v_lost, '{}');
END $$;

-- --- the short form for a batch of one plain turn, the most frequent batch under little load

-- Commits a turn of a running execution that adds history and work, completes at most one work
-- item, and either keeps its lock or ends the instance. Has the same effects as the general form,
-- with fewer and smaller statements. Returns NULLs if it cannot do all of it; the general form then
-- repeats what it has written.
CREATE OR REPLACE FUNCTION commit_single(
    p_turn jsonb, p_parts integer, OUT now_at bigint, OUT turns_at bigint, OUT work_at bigint
)
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_turn ->> 'instance_id';
    v_execution bigint := (p_turn ->> 'execution_id')::bigint;
    v_after bigint := (p_turn ->> 'after')::bigint;
    v_status text := p_turn ->> 'status';
    v_now bigint := now_ms();
    v_until bigint;
    v_removed integer;
BEGIN
    -- A turn that ends the instance holds the lock until all is written, however long that takes.
    v_until := v_now + coalesce((p_turn ->> 'keep_lock_ms')::bigint, 3600000);
    UPDATE instance_locks l SET
        locked_until = v_until, kept = true,
        wake_at = CASE WHEN l.wake_at IS NOT NULL THEN v_until END
    WHERE l.instance_id = v_id AND l.lock_token = p_turn ->> 'token'
        AND l.locked_until > now_ms() AND l.not_before IS NULL AND l.block IS NULL
        AND NOT l.mail_held
        AND (v_after IS NULL OR EXISTS (
            SELECT FROM history e
            WHERE e.instance_id = v_id AND e.execution_id = v_execution AND e.event_id = v_after
        ));
    IF NOT FOUND THEN
        RETURN;  -- the general form says why
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
    IF p_parts & 1 > 0 THEN  -- COMPLETES_WORK
        DELETE FROM worker_queue w
        WHERE w.instance_id = v_id AND w.lock_token = p_turn #>> '{settled_work,0}'
            AND w.locked_until > now_ms();
        IF NOT FOUND THEN
            RETURN;  -- the general form finds the same and raises
        END IF;
    END IF;
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT v_id, v_execution, (e.record ->> 'event_id')::bigint, e.record ->> 'data'
    FROM jsonb_array_elements(p_turn -> 'history_delta') AS e (record);
    IF p_parts & 32 > 0 THEN  -- ADDS_WORK
        work_at := add_work(p_turn -> 'worker_items', v_now);
    END IF;
    IF p_parts & 2 > 0 THEN  -- CONSUMES
        DELETE FROM orchestrator_queue q
        WHERE q.instance_id = v_id AND q.lock_token = p_turn ->> 'token'
            AND (p_turn -> 'consumed' @> to_jsonb(q.message_id));
        GET DIAGNOSTICS v_removed = ROW_COUNT;
        IF v_removed < jsonb_array_length(p_turn -> 'consumed') AND v_removed < (
            SELECT count(DISTINCT c.id) FROM jsonb_array_elements(p_turn -> 'consumed') AS c (id)
        ) THEN
            PERFORM refuse_consuming();
        END IF;
    END IF;
    IF v_status IS NOT NULL THEN
        turns_at := end_single(p_turn, v_now);
    ELSIF p_parts & 2 > 0 THEN  -- CONSUMES
        turns_at := update_single_readiness(p_turn, v_now);
    END IF;
    now_at := v_now;
END $$;

-- Ends the state and the lock of an ended instance. Returns when the instance is ready, if a
-- message is left.
CREATE OR REPLACE FUNCTION end_single(p_turn jsonb, p_now bigint) RETURNS bigint
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
        PERFORM delete_idle_locks(ARRAY[v_id]);
    END IF;
    RETURN v_turns_at;
END $$;

-- Computes the readiness of an instance that keeps its lock from its remaining messages.
CREATE OR REPLACE FUNCTION update_single_readiness(p_turn jsonb, p_now bigint) RETURNS bigint
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
