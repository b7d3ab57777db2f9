-- Messages from outside, history written by tools, and removal of instances.

-- Tells whether an instance has ended. One that continued as new has not while its next start is
-- queued.
CREATE OR REPLACE FUNCTION has_ended(p_instance instances) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN coalesce(is_final(p_instance.execution_status), false) OR (
        p_instance.execution_status = 'ContinuedAsNew' AND NOT EXISTS (
            SELECT FROM orchestrator_queue q
            WHERE q.instance_id = p_instance.instance_id AND q.start_name IS NOT NULL
        )
    );
END $$;

-- Adds messages whose condition holds. Refuses with 'missing' or 'ended' if the instance must be
-- alive, with 'present' if it must be absent.
CREATE OR REPLACE FUNCTION enqueue_messages(
    p_lane text, p_batch bigint, p_again boolean, p_messages jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_now bigint;
    v_fresh text[];
    v_refused jsonb;
    v_messages jsonb;
    v_turns_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    IF p_parts & 2 = 0 AND jsonb_array_length(p_messages) = 1
        AND p_messages #>> '{0,start}' IS NULL
    THEN
        SELECT s.now_at, s.turns_at INTO v_now, v_turns_at FROM enqueue_single(p_messages -> 0) s;
        IF v_now IS NOT NULL THEN
            RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
                'now', v_now, 'turns_at', v_turns_at
            ));
        END IF;
    END IF;
    PERFORM lock_instances(ARRAY(
        SELECT m.instance_id FROM jsonb_to_recordset(p_messages) AS m (instance_id text)
    ));
    v_now := now_ms();
    IF p_parts & 1 > 0 THEN
        SELECT jsonb_object_agg(m.n, jsonb_build_array(
            CASE WHEN i.instance_id IS NULL THEN 'missing' ELSE 'ended' END, i.execution_status
        )) INTO v_refused
        FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text, condition text)
        LEFT JOIN instances i ON i.instance_id = m.instance_id
        WHERE m.condition = 'alive' AND (i.instance_id IS NULL OR has_ended(i));
    END IF;
    IF p_parts & 2 > 0 THEN
        -- Of two concurrent starts of one instance, the second waits here and finds the first.
        WITH fresh AS (
            INSERT INTO instances (
                instance_id, name, version, parent_instance_id, status, created_at, updated_at
            )
            SELECT
                m.instance_id, m.start ->> 'name', m.start ->> 'version',
                m.start ->> 'parent_instance_id', 'Pending', v_now, v_now
            FROM jsonb_to_recordset(p_messages)
                AS m (instance_id text, condition text, start jsonb)
            WHERE m.condition = 'absent'
            ORDER BY m.instance_id
            ON CONFLICT DO NOTHING
            RETURNING instance_id
        )
        SELECT coalesce(array_agg(f.instance_id), '{}') INTO v_fresh FROM fresh f;
        SELECT nullif(
            coalesce(v_refused, '{}') || coalesce(
                jsonb_object_agg(m.n, jsonb_build_array('present', m.instance_id)), '{}'
            ),
            '{}'
        ) INTO v_refused
        FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text, condition text)
        WHERE m.condition = 'absent' AND NOT m.instance_id = ANY (v_fresh);
    END IF;
    v_messages := not_refused(p_messages, v_refused);
    IF v_messages IS NOT NULL THEN
        v_turns_at := add_messages(v_messages, v_now);
    END IF;
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at
    ));
END $$;

-- Short form of enqueue_messages for one message, not a start, to a running instance. Returns NULLs
-- if the general form is needed.
CREATE OR REPLACE FUNCTION enqueue_single(p_message jsonb, OUT now_at bigint, OUT turns_at bigint)
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

-- Inserts events as given, for tools. History makes messages of an unknown instance ready.
CREATE OR REPLACE FUNCTION append_history(
    p_lane text, p_batch bigint, p_again boolean, p_appends jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_ids text[] := ARRAY(
        SELECT a.instance_id FROM jsonb_to_recordset(p_appends) AS a (instance_id text)
    );
    v_now bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    PERFORM lock_instances(v_ids);
    v_now := now_ms();
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT a.instance_id, a.execution_id, e.event_id, e.data
    FROM jsonb_to_recordset(p_appends)
        AS a (instance_id text, execution_id bigint, records jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(a.records) AS e (event_id bigint, data text);
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'turns_at', update_readiness(v_ids)
    ));
END $$;

-- --- trees and removal

-- Returns the instance and its descendants, parents before their children.
CREATE OR REPLACE FUNCTION tree_of(p_root text) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_tree text[] := ARRAY[p_root];
    v_level text[] := v_tree;
BEGIN
    LOOP
        v_level := ARRAY(
            SELECT i.instance_id
            FROM unnest(v_level) WITH ORDINALITY AS p (instance_id, position)
            JOIN instances i ON i.parent_instance_id = p.instance_id
            WHERE NOT i.instance_id = ANY (v_tree)
            ORDER BY p.position, i.created_at, i.instance_id
        );
        EXIT WHEN v_level = '{}';
        v_tree := v_tree || v_level;
    END LOOP;
    RETURN v_tree;
END $$;

-- Locks instances for removal. No turn of theirs can add a child meanwhile, also if an instance has
-- no row in instance_locks yet.
CREATE OR REPLACE FUNCTION lock_for_removal(p_ids text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lock_instances(p_ids);
    PERFORM 1 FROM instances WHERE instance_id = ANY (p_ids) ORDER BY instance_id FOR UPDATE;
END $$;

-- Removes instances with all their rows. The caller has locked them.
CREATE OR REPLACE FUNCTION remove_instances(
    p_ids text[],
    OUT instances bigint, OUT executions bigint, OUT events bigint, OUT messages bigint
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_sessions text[];
    v_items bigint;
BEGIN
    PERFORM 1 FROM worker_queue w WHERE w.instance_id = ANY (p_ids)
    ORDER BY w.message_id FOR UPDATE;
    WITH gone AS (
        DELETE FROM worker_queue w WHERE w.instance_id = ANY (p_ids) RETURNING w.session_id
    )
    SELECT count(*), array_agg(DISTINCT g.session_id) FILTER (WHERE g.session_id IS NOT NULL)
    INTO v_items, v_sessions
    FROM gone g;
    DELETE FROM orchestrator_queue q WHERE q.instance_id = ANY (p_ids);
    GET DIAGNOSTICS messages = ROW_COUNT;
    messages := messages + v_items;
    DELETE FROM history h WHERE h.instance_id = ANY (p_ids);
    GET DIAGNOSTICS events = ROW_COUNT;
    DELETE FROM executions x WHERE x.instance_id = ANY (p_ids);
    GET DIAGNOSTICS executions = ROW_COUNT;
    DELETE FROM kv_store s WHERE s.instance_id = ANY (p_ids);
    DELETE FROM kv_delta d WHERE d.instance_id = ANY (p_ids);
    DELETE FROM instances i WHERE i.instance_id = ANY (p_ids);
    GET DIAGNOSTICS instances = ROW_COUNT;
    DELETE FROM instance_locks l WHERE l.instance_id = ANY (p_ids);
    IF v_sessions IS NOT NULL THEN
        PERFORM 1 FROM sessions s WHERE s.session_id = ANY (v_sessions)
        ORDER BY s.session_id FOR UPDATE;
        DELETE FROM sessions s
        WHERE s.session_id = ANY (v_sessions)
            AND NOT EXISTS (SELECT FROM worker_queue w WHERE w.session_id = s.session_id);
    END IF;
END $$;

-- Tells whether the store has any row for the id, also only a message or a work item.
CREATE OR REPLACE FUNCTION has_anything(p_id text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM instances WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM history WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM orchestrator_queue WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM worker_queue WHERE instance_id = p_id);
END $$;

-- Returns the instances of the messages that exist, with their trees.
CREATE OR REPLACE FUNCTION trees_of(p_messages jsonb) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.instance_id
        FROM jsonb_to_recordset(p_messages) AS m (instance_id text)
        CROSS JOIN LATERAL unnest(CASE
            -- An instance can name a parent that does not exist yet.
            WHEN has_anything(m.instance_id) THEN tree_of(m.instance_id)
        END) AS t (instance_id)
    );
END $$;

-- Removes instances with their trees and starts them anew. Refuses with 'child' an instance whose
-- parent has not ended.
CREATE OR REPLACE FUNCTION replace_instances(
    p_lane text, p_batch bigint, p_again boolean, p_messages jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_answer text := stored_answer(p_lane, p_batch, p_again);
    v_ids text[];
    v_locked text[] := '{}';
    v_refused jsonb;
    v_messages jsonb;
    v_now bigint;
    v_turns_at bigint;
BEGIN
    IF v_answer IS NOT NULL THEN
        RETURN v_answer;
    END IF;
    LOOP
        v_ids := trees_of(p_messages);
        -- A turn may have added a child during the wait for a lock.
        EXIT WHEN v_locked @> v_ids;
        PERFORM lock_for_removal(v_ids);
        v_locked := v_ids;
    END LOOP;
    SELECT jsonb_object_agg(m.n, jsonb_build_array('child', p.instance_id)) INTO v_refused
    FROM jsonb_to_recordset(p_messages) AS m (n integer, instance_id text)
    JOIN instances c ON c.instance_id = m.instance_id
    JOIN instances p ON p.instance_id = c.parent_instance_id
    WHERE NOT has_ended(p);
    v_messages := not_refused(p_messages, v_refused);
    v_now := now_ms();
    IF v_messages IS NOT NULL THEN
        PERFORM remove_instances(
            CASE WHEN v_refused IS NULL THEN v_ids ELSE trees_of(v_messages) END
        );
        v_turns_at := add_messages(v_messages, v_now);
    END IF;
    RETURN store_answer(p_lane, p_batch, v_now, jsonb_build_object(
        'now', v_now, 'refused', v_refused, 'turns_at', v_turns_at
    ));
END $$;
