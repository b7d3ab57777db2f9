-- Control, deletion and moving. Unless documented otherwise, NULL means done and a text is the
-- reason of a refusal.

-- Returns true if an instance has ended. One that continued as new has not while its next start is
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

-- Locks the row of an instance that has not ended.
CREATE OR REPLACE FUNCTION lock_unfinished(p_id text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    v_instance instances;
BEGIN
    PERFORM lock_instance_rows(ARRAY[p_id]);
    SELECT * INTO v_instance FROM instances WHERE instance_id = p_id;
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF has_ended(v_instance) THEN
        RETURN 'ended';
    END IF;
    RETURN NULL;
END $$;

-- Pauses an instance and takes its lock away.
CREATE OR REPLACE FUNCTION suspend_instance(p_id text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_refused text := lock_unfinished(p_id);
BEGIN
    IF v_refused IS NOT NULL THEN
        RETURN v_refused;
    END IF;
    INSERT INTO instance_locks AS l (instance_id, suspended) VALUES (p_id, true)
    ON CONFLICT (instance_id) DO UPDATE SET
        suspended = true, lock_token = NULL, locked_at = NULL, locked_until = NULL, owner = NULL,
        kept = false, mail_held = false, yielded_at = NULL
    WHERE NOT l.suspended;
    UPDATE instances SET status = shown_status(execution_status, true, false)
    WHERE instance_id = p_id;
    PERFORM update_readiness(ARRAY[p_id]);
    RETURN NULL;
END $$;

-- Ends a pause, a block and a delay, and counts attempts from 0 again.
CREATE OR REPLACE FUNCTION resume_instance(p_id text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_refused text := lock_unfinished(p_id);
BEGIN
    IF v_refused IS NOT NULL THEN
        RETURN v_refused;
    END IF;
    UPDATE instance_locks SET suspended = false, block = NULL, not_before = NULL
    WHERE instance_id = p_id;
    UPDATE orchestrator_queue SET attempt_count = 0
    WHERE instance_id = p_id AND attempt_count > 0;
    UPDATE instances SET status = shown_status(execution_status, false, false)
    WHERE instance_id = p_id;
    PERFORM update_readiness(ARRAY[p_id]);
    RETURN NULL;
END $$;

-- Locks an instance for an operator, also if another holder has the lock.
CREATE OR REPLACE FUNCTION lock_instance(p_id text, p_token text, p_lock_ms bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now bigint;
BEGIN
    INSERT INTO instance_locks (instance_id) VALUES (p_id) ON CONFLICT DO NOTHING;
    PERFORM lock_instance_rows(ARRAY[p_id]);
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = p_id) THEN
        PERFORM delete_idle_locks(ARRAY[p_id]);
        RETURN 'missing';
    END IF;
    v_now := now_ms();
    UPDATE instance_locks SET
        lock_token = p_token, locked_at = v_now, locked_until = v_now + p_lock_ms, owner = NULL,
        kept = false, mail_held = false, yielded_at = NULL
    WHERE instance_id = p_id;
    PERFORM update_readiness(ARRAY[p_id]);
    RETURN NULL;
END $$;

-- Deletes instances. Returns {instances, executions, events, messages}, or {refused, instance_id,
-- status}. p_root, if given, must be a root that was completed before p_before; NULL is no bound.
CREATE OR REPLACE FUNCTION delete_instances(
    p_ids text[], p_force boolean, p_root text, p_before bigint
) RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_refused jsonb;
BEGIN
    PERFORM lock_for_removal(p_ids);
    IF NOT EXISTS (SELECT FROM instances i WHERE i.instance_id = ANY (p_ids)) THEN
        RETURN '{"refused": "missing"}';
    END IF;
    SELECT jsonb_build_object(
        'refused', 'running', 'instance_id', i.instance_id, 'status', i.status
    ) INTO v_refused
    FROM instances i
    WHERE i.instance_id = ANY (p_ids) AND NOT p_force AND (
        NOT has_ended(i)
        OR i.instance_id = p_root AND (
            i.parent_instance_id IS NOT NULL
            OR NOT coalesce(i.completed_at < p_before, p_before IS NULL)
        )
    )
    LIMIT 1;
    IF v_refused IS NULL THEN
        SELECT jsonb_build_object(
            'refused', 'tree', 'instance_id', i.parent_instance_id, 'status', i.instance_id
        ) INTO v_refused
        FROM instances i
        WHERE i.parent_instance_id = ANY (p_ids) AND NOT i.instance_id = ANY (p_ids)
        LIMIT 1;
    END IF;
    IF v_refused IS NOT NULL THEN
        RETURN v_refused;
    END IF;
    RETURN (SELECT to_jsonb(r) FROM remove_instances(p_ids) r);
END $$;

-- Deletes past executions. Returns {instances_processed, executions, events}; NULL for an unknown
-- instance.
CREATE OR REPLACE FUNCTION prune_instance(p_id text, p_keep_last bigint, p_before bigint)
RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_current bigint;
    v_deletable bigint[];
    v_events bigint;
BEGIN
    PERFORM lock_instance_rows(ARRAY[p_id]);
    SELECT execution_id INTO v_current FROM instances WHERE instance_id = p_id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_deletable := ARRAY(
        SELECT x.execution_id
        FROM (
            SELECT e.*, row_number() OVER (ORDER BY e.execution_id DESC) AS age
            FROM executions e WHERE e.instance_id = p_id
        ) x
        WHERE x.age > greatest(p_keep_last, 1) AND x.execution_id <> v_current
            AND ends_execution(x.status)
            AND (p_before IS NULL OR x.completed_at < p_before)
    );
    DELETE FROM history WHERE instance_id = p_id AND execution_id = ANY (v_deletable);
    GET DIAGNOSTICS v_events = ROW_COUNT;
    DELETE FROM executions WHERE instance_id = p_id AND execution_id = ANY (v_deletable);
    RETURN jsonb_build_object(
        'instances_processed', 1, 'executions', cardinality(v_deletable), 'events', v_events
    );
END $$;

-- Puts a dead letter back into the orchestrator queue.
CREATE OR REPLACE FUNCTION requeue_letter(p_letter bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_message jsonb;
BEGIN
    DELETE FROM dead_letters WHERE letter_id = p_letter RETURNING message::jsonb INTO v_message;
    IF NOT FOUND THEN
        RETURN 'missing';
    END IF;
    PERFORM lock_instance_rows(ARRAY[v_message ->> 'instance_id']);
    PERFORM add_messages(jsonb_build_array(v_message), now_ms());
    RETURN NULL;
END $$;

-- --- export and import

CREATE OR REPLACE FUNCTION queued_message(q orchestrator_queue, p_locked boolean) RETURNS json
LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object(
        'message_id', q.message_id,
        'message', json_build_object(
            'instance_id', q.instance_id, 'kind', q.kind, 'body', q.body,
            'visible_at_ms', q.given_at,
            'start', CASE WHEN q.start_name IS NOT NULL THEN json_build_object(
                'name', q.start_name, 'version', q.start_version,
                'parent_instance_id', q.start_parent
            ) END,
            'timer', CASE WHEN q.timer_id IS NOT NULL THEN json_build_object(
                'execution_id', q.timer_execution_id, 'timer_id', q.timer_id
            ) END
        ),
        'visible_at_ms', q.visible_at, 'enqueued_at_ms', q.enqueued_at,
        'attempt_count', q.attempt_count, 'locked', p_locked
    )
$$;

CREATE OR REPLACE FUNCTION queued_work(w worker_queue, p_locked_until bigint) RETURNS json
LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object(
        'message_id', w.message_id,
        'message', json_build_object(
            'identity', json_build_object(
                'instance_id', w.instance_id, 'execution_id', w.execution_id,
                'activity_id', w.activity_id
            ),
            'name', w.name, 'body', w.body, 'session_id', w.session_id, 'tag', w.tag,
            'visible_at_ms', w.given_at
        ),
        'visible_at_ms', w.visible_at, 'enqueued_at_ms', w.enqueued_at,
        'attempt_count', w.attempt_count, 'locked_until_ms', p_locked_until,
        'heartbeat', w.heartbeat
    )
$$;

-- Returns true if the store has any row for the id, also only a message or a work item.
CREATE OR REPLACE FUNCTION has_anything(p_id text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM instances WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM history WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM orchestrator_queue WHERE instance_id = p_id)
        OR EXISTS (SELECT FROM worker_queue WHERE instance_id = p_id);
END $$;

-- Returns the whole instance as one document, read at one moment; NULL if the store has no row for
-- it.
CREATE OR REPLACE FUNCTION export_instance(p_id text) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT json_build_object(
        'instance_id', p_id,
        'name', CASE WHEN k.is_known THEN coalesce(i.name, 'unknown') END,
        'version', CASE WHEN k.is_known THEN i.version END,
        'execution_id', coalesce(nullif(i.execution_id, 0), k.last_execution_id, 1),
        'created_at_ms', coalesce(i.created_at, 0),
        'updated_at_ms', coalesce(i.updated_at, 0),
        'parent_instance_id', i.parent_instance_id,
        'custom_status', i.custom_status,
        'custom_status_version', coalesce(i.custom_status_version, 0),
        'suspended', coalesce(l.suspended, false),
        'block', l.block::json,
        'not_before_ms', l.not_before,
        'executions', coalesce((
            SELECT json_agg(json_build_object(
                'execution_id', e.execution_id,
                'status', coalesce(x.status, 'Running'),
                'output', x.output,
                'started_at_ms', coalesce(x.started_at, 0),
                'completed_at_ms', x.completed_at,
                'framework_version', x.framework_version,
                'history', coalesce((
                    SELECT json_agg(
                        json_build_object('event_id', h.event_id, 'data', h.data)
                        ORDER BY h.event_id
                    )
                    FROM history h
                    WHERE h.instance_id = p_id AND h.execution_id = e.execution_id
                ), '[]')
            ) ORDER BY e.execution_id)
            FROM (
                SELECT y.execution_id FROM executions y WHERE y.instance_id = p_id
                UNION
                SELECT h.execution_id FROM history h WHERE h.instance_id = p_id
            ) e
            LEFT JOIN executions x ON x.instance_id = p_id AND x.execution_id = e.execution_id
        ), '[]'),
        'kv_store', coalesce((
            SELECT json_object_agg(
                s.key, json_build_object('value', s.value, 'updated_at_ms', s.updated_at)
                ORDER BY s.key
            )
            FROM kv_store s WHERE s.instance_id = p_id
        ), '{}'),
        'kv_delta', coalesce((
            SELECT json_object_agg(
                d.key,
                CASE WHEN d.value IS NOT NULL THEN
                    json_build_object('value', d.value, 'updated_at_ms', d.updated_at)
                END
                ORDER BY d.key
            )
            FROM kv_delta d WHERE d.instance_id = p_id
        ), '{}'),
        'messages', coalesce((
            SELECT json_agg(queued_message(q, false) ORDER BY q.message_id)
            FROM orchestrator_queue q WHERE q.instance_id = p_id
        ), '[]'),
        'work', coalesce((
            SELECT json_agg(queued_work(w, NULL) ORDER BY w.message_id)
            FROM worker_queue w WHERE w.instance_id = p_id
        ), '[]')
    )::text
    FROM (
        SELECT
            (SELECT max(h.execution_id) FROM history h WHERE h.instance_id = p_id)
                AS last_execution_id,
            EXISTS (SELECT FROM history h WHERE h.instance_id = p_id)
                OR EXISTS (SELECT FROM executions x WHERE x.instance_id = p_id) AS is_known
    ) k
    LEFT JOIN instances i ON i.instance_id = p_id
    LEFT JOIN instance_locks l ON l.instance_id = p_id
    WHERE has_anything(p_id)
$$;

-- Writes an exported instance. Returns 'present' if it exists and is not to be replaced.
CREATE OR REPLACE FUNCTION import_instance(p_snapshot jsonb, p_replace boolean) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_id text := p_snapshot ->> 'instance_id';
    v_now bigint;
    v_block text := p_snapshot ->> 'block';
    v_suspended boolean := (p_snapshot ->> 'suspended')::boolean;
BEGIN
    -- This row keeps other transactions from writing the instance until the end of this one.
    INSERT INTO instance_locks (instance_id) VALUES (v_id) ON CONFLICT DO NOTHING;
    PERFORM lock_instance_rows(ARRAY[v_id]);
    IF has_anything(v_id) THEN
        IF NOT p_replace THEN
            PERFORM delete_idle_locks(ARRAY[v_id]);
            RETURN 'present';
        END IF;
        PERFORM remove_instances(ARRAY[v_id]);
        INSERT INTO instance_locks (instance_id) VALUES (v_id);
    END IF;
    v_now := now_ms();
    IF p_snapshot -> 'executions' <> '[]' THEN
        PERFORM import_turns(p_snapshot);
    END IF;
    UPDATE instance_locks SET
        suspended = v_suspended, block = v_block,
        not_before = (p_snapshot ->> 'not_before_ms')::bigint
    WHERE instance_id = v_id;
    PERFORM add_messages((
        SELECT jsonb_agg(
            (m.entry -> 'message') || jsonb_build_object(
                'resolved_at_ms', m.entry -> 'visible_at_ms',
                'enqueued_at_ms', m.entry -> 'enqueued_at_ms',
                'attempt_count', m.entry -> 'attempt_count'
            ) ORDER BY m.position
        )
        FROM jsonb_array_elements(p_snapshot -> 'messages')
            WITH ORDINALITY AS m (entry, position)
    ), v_now);
    PERFORM add_work((
        SELECT jsonb_agg(
            (w.entry -> 'message') - 'claim' || jsonb_build_object(
                'resolved_at_ms', w.entry -> 'visible_at_ms',
                'enqueued_at_ms', w.entry -> 'enqueued_at_ms',
                'attempt_count', w.entry -> 'attempt_count',
                'heartbeat', w.entry -> 'heartbeat'
            ) ORDER BY w.position
        )
        FROM jsonb_array_elements(p_snapshot -> 'work') WITH ORDINALITY AS w (entry, position)
    ), v_now);
    UPDATE instances SET
        status = shown_status(execution_status, v_suspended, v_block IS NOT NULL)
    WHERE instance_id = v_id;
    PERFORM update_readiness(ARRAY[v_id]);
    PERFORM delete_idle_locks(ARRAY[v_id]);
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION import_turns(p_snapshot jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_id text := p_snapshot ->> 'instance_id';
BEGIN
    INSERT INTO executions (
        instance_id, execution_id, status, output, started_at, completed_at, framework_version
    )
    SELECT v_id, x.*
    FROM jsonb_to_recordset(p_snapshot -> 'executions') AS x (
        execution_id bigint, status text, output text, started_at_ms bigint,
        completed_at_ms bigint, framework_version bigint[]
    );
    INSERT INTO history (instance_id, execution_id, event_id, data)
    SELECT v_id, x.execution_id, h.event_id, h.data
    FROM jsonb_to_recordset(p_snapshot -> 'executions')
        AS x (execution_id bigint, history jsonb)
    CROSS JOIN LATERAL jsonb_to_recordset(x.history) AS h (event_id bigint, data text);
    INSERT INTO instances (
        instance_id, name, version, parent_instance_id, named, execution_id, execution_status,
        status, custom_status, custom_status_version, created_at, updated_at, completed_at
    )
    SELECT
        v_id, s.name, s.version, s.parent_instance_id, s.name IS NOT NULL, s.execution_id,
        x.status, coalesce(x.status, 'Pending'), s.custom_status, s.custom_status_version,
        s.created_at_ms, s.updated_at_ms, x.completed_at
    FROM jsonb_to_record(p_snapshot) AS s (
        name text, version text, parent_instance_id text, execution_id bigint, custom_status text,
        custom_status_version bigint, created_at_ms bigint, updated_at_ms bigint
    )
    LEFT JOIN executions x ON x.instance_id = v_id AND x.execution_id = s.execution_id;
    INSERT INTO kv_store (instance_id, key, value, updated_at)
    SELECT v_id, e.key, e.value ->> 'value', (e.value ->> 'updated_at_ms')::bigint
    FROM jsonb_each(p_snapshot -> 'kv_store') e;
    INSERT INTO kv_delta (instance_id, key, value, updated_at)
    SELECT v_id, e.key, e.value ->> 'value', (e.value ->> 'updated_at_ms')::bigint
    FROM jsonb_each(p_snapshot -> 'kv_delta') e;
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
    PERFORM lock_instance_rows(p_ids);
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

-- Returns the instances of the messages that exist, with their trees.
CREATE OR REPLACE FUNCTION trees_of(p_messages jsonb) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.instance_id
        FROM unnest(ids_of(p_messages)) AS m (instance_id)
        CROSS JOIN LATERAL unnest(CASE
            -- An instance can name a parent that does not exist yet.
            WHEN has_anything(m.instance_id) THEN tree_of(m.instance_id)
        END) AS t (instance_id)
    );
END $$;

-- --- moves

-- Refuses every change of a store whose content was moved.
CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'PDMOV', MESSAGE = (SELECT s.moved_to FROM store s);
END $$;

-- Marks the store as moved, or takes the mark back. While there is a mark, triggers refuse every
-- change, so that commits without a mark pay nothing. The locks wait for transactions that are
-- writing, so their rows are there when the mark is. Triggers belong to the owner of the tables,
-- therefore the function runs with the rights of the owner.
CREATE OR REPLACE FUNCTION mark_moved(p_location text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_tables text[] := ARRAY[
        'instance_locks', 'worker_queue', 'instances', 'executions', 'history', 'kv_store',
        'kv_delta', 'orchestrator_queue', 'sessions', 'dead_letters', 'workers'
    ];
    v_table text;
BEGIN
    EXECUTE format(
        'LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', array_to_string(v_tables, ', ')
    );
    UPDATE store SET moved_to = p_location;
    FOREACH v_table IN ARRAY v_tables LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS refuse_change ON %I', v_table);
        IF p_location IS NOT NULL THEN
            EXECUTE format(
                'CREATE TRIGGER refuse_change BEFORE INSERT OR UPDATE OR DELETE ON %I '
                'FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()', v_table
            );
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION mark_moved(text) FROM PUBLIC;
