-- Functions that the others use. A function that clients call fixes its search path, and plans that
-- use indexes even on small tables: a plan outlives the size of the table that it was made for.
-- Functions take the time as p_now, which is read once, after the deciding rows were locked. All
-- functions lock rows in one order, so that there are no deadlocks: instance_locks by instance_id,
-- worker_queue by message_id, new rows, sessions.

CREATE OR REPLACE FUNCTION now_ms() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- Follows a promotion of this server, once: its clock can differ from that of the server that gave
-- the locks. pg_last_xact_replay_timestamp() is the time of the last transaction by the clock of that
-- server; it is NULL on a server that was not promoted since its start.
-- Every function that compares times with locks calls it first.
CREATE OR REPLACE FUNCTION follow_promotion() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_replayed timestamptz := pg_last_xact_replay_timestamp();
BEGIN
    IF v_replayed IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM store s WHERE s.replayed_until = v_replayed) THEN
        RETURN;
    END IF;
    PERFORM 1 FROM store FOR UPDATE;
    IF EXISTS (SELECT FROM store s WHERE s.replayed_until = v_replayed) THEN
        RETURN;  -- another transaction has done it meanwhile
    END IF;
    UPDATE store SET replayed_until = v_replayed;
    PERFORM follow_clock(floor(extract(epoch FROM v_replayed) * 1000)::bigint, now_ms());
END $$;

-- Lets locks, sessions and delays that were live at p_last last as long from p_now on. If the clock is
-- behind, what had ended stays ended, and messages and work that were sent without a time are visible,
-- in their order.
CREATE OR REPLACE FUNCTION follow_clock(p_last bigint, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_since bigint := least(p_last, p_now);
    v_ids text[];
BEGIN
    UPDATE worker_queue w SET
        visible_at = p_now, wake_at = CASE WHEN w.lock_token IS NOT NULL THEN w.wake_at END
    WHERE w.visible_at > p_now AND w.visible_at <= w.enqueued_at;
    UPDATE worker_queue w SET enqueued_at = p_now WHERE w.enqueued_at > p_now;
    UPDATE instance_locks l SET
        locked_until = greatest(p_now, l.locked_until + p_now - p_last),
        wake_at = CASE WHEN l.wake_at IS NOT NULL THEN
            greatest(p_now, l.locked_until + p_now - p_last, l.not_before)
        END
    WHERE l.lock_token IS NOT NULL AND l.locked_until > v_since;
    UPDATE worker_queue w SET
        locked_until = greatest(p_now, w.locked_until + p_now - p_last),
        wake_at = greatest(p_now, w.locked_until + p_now - p_last, w.visible_at)
    WHERE w.lock_token IS NOT NULL AND w.locked_until > v_since;
    UPDATE sessions s SET
        locked_until = greatest(p_now, s.locked_until + p_now - p_last),
        last_activity = s.last_activity + p_now - p_last
    WHERE s.locked_until > v_since;
    UPDATE workers k SET lapses_at = greatest(p_now, k.lapses_at + p_now - p_last)
    WHERE k.lapses_at > v_since;
    IF p_now >= p_last THEN
        RETURN;
    END IF;
    UPDATE instance_locks l SET
        not_before = greatest(p_now, l.not_before + p_now - p_last),
        wake_at = CASE WHEN l.wake_at IS NOT NULL THEN
            greatest(p_now, l.locked_until, l.not_before + p_now - p_last)
        END
    WHERE l.not_before > p_now;
    -- Before the messages that were sent since: by the earliest time of one that came after it.
    WITH later AS (
        SELECT q.instance_id, min(q.message_id) AS first_id
        FROM orchestrator_queue q
        WHERE q.enqueued_at > p_now
        GROUP BY q.instance_id
    ), arrivals AS (
        SELECT r.instance_id, least(p_now, (
            SELECT min(o.visible_at) FROM orchestrator_queue o
            WHERE o.instance_id = r.instance_id AND o.message_id > r.first_id
        )) AS arrived_at
        FROM later r
    ), freed AS (
        UPDATE orchestrator_queue q SET
            enqueued_at = a.arrived_at,
            visible_at = CASE
                WHEN q.visible_at <= q.enqueued_at THEN least(q.visible_at, a.arrived_at)
                ELSE q.visible_at
            END
        FROM arrivals a
        WHERE q.instance_id = a.instance_id AND q.enqueued_at > p_now
        RETURNING q.instance_id
    )
    SELECT array_agg(DISTINCT f.instance_id) INTO v_ids FROM freed f;
    UPDATE instance_locks l SET yielded_at = p_now WHERE l.yielded_at > p_now;
    v_ids := v_ids || ARRAY(
        SELECT l.instance_id FROM instance_locks l WHERE l.yielded_at = p_now
    );
    PERFORM lock_instance_rows(v_ids);
    PERFORM update_readiness(v_ids);
END $$;

-- Follows a clock that has gone back by more than a second, once: a batch or a renewal was later than
-- it is now.
CREATE OR REPLACE FUNCTION follow_clock_back() RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := now_ms();
    v_latest bigint := latest_time();
BEGIN
    IF v_latest IS NULL OR v_latest <= v_now + 1000 THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM store FOR UPDATE;
    v_latest := latest_time();  -- another transaction may have done it meanwhile
    v_now := now_ms();
    IF v_latest > v_now + 1000 THEN
        PERFORM follow_clock(v_latest, v_now);
        UPDATE lanes SET used_at = v_now WHERE used_at > v_now;
        UPDATE store SET latest_at = v_now;
    END IF;
    RETURN true;
END $$;

-- Begins a fetch and returns the time. The fetch does not wait for the disk: a lock that a crash of the
-- server loses is like one that has expired. Of two fetches with the same tokens, the second waits.
CREATE OR REPLACE FUNCTION begin_fetch(p_tokens text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true),
        pg_advisory_xact_lock(hashtextextended(p_tokens[1], 0)), follow_promotion(),
        follow_clock_back();
    RETURN now_ms();
END $$;

-- Returns the latest time of a batch or a renewal; NULL if the store was moved.
CREATE OR REPLACE FUNCTION latest_time() RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT greatest(s.latest_at, (SELECT max(l.used_at) FROM lanes l))
    FROM store s WHERE s.moved_to IS NULL
$$;

-- Notes the time of a renewal, about twice a second and without waiting.
CREATE OR REPLACE FUNCTION note_time(p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE store SET latest_at = p_now
    WHERE one IN (
        SELECT s.one FROM store s
        WHERE s.latest_at < p_now - 500 AND s.moved_to IS NULL FOR UPDATE SKIP LOCKED
    );
END $$;

-- Lets a fetch that delivers something again wait for the disk and for synchronous standbys, as the
-- commit of its turn will. So what cannot be committed now is not delivered again, and such a delivery
-- is not counted. A first delivery does not wait.
CREATE OR REPLACE FUNCTION wait_if_redelivered(p_attempts bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_attempts > 1 THEN
        SET LOCAL synchronous_commit TO DEFAULT;
    END IF;
END $$;

-- Returns handler and version, or activity and tag, as one text for an index. A name contains no
-- control characters, so it ends at the first separator.
CREATE OR REPLACE FUNCTION route_of(name text, qualifier text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT name || chr(31) || coalesce('#' || qualifier, '')
$$;

-- Returns the moment of a time in milliseconds, for views.
CREATE OR REPLACE FUNCTION time_of(ms bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT timestamptz 'epoch' + ms * interval '1 millisecond'
$$;

-- Returns a field of a JSON text, for views; NULL if the text is not readable JSON.
CREATE OR REPLACE FUNCTION json_field(data text, field text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN data::json ->> field;
EXCEPTION
    WHEN data_exception THEN RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION is_final(status text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT status IN ('Completed', 'Failed', 'Cancelled', 'Terminated')
$$;

CREATE OR REPLACE FUNCTION ends_execution(status text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT is_final(status) OR status = 'ContinuedAsNew'
$$;

CREATE OR REPLACE FUNCTION shown_status(execution_status text, suspended boolean, blocked boolean)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN is_final(execution_status) THEN execution_status
        WHEN suspended THEN 'Paused'
        WHEN blocked THEN 'Blocked'
        ELSE coalesce(execution_status, 'Pending')
    END
$$;

-- --- batches: a lane has one batch in flight and keeps the answer to its last one

-- Applies operations of one kind and returns {now, refused, turns_at, work_at}: the time, the
-- refused operations as {n: [code, subject]}, and when an instance and a work item become ready
-- because of the batch. The function of a kind takes the operations and says which of its steps
-- they need (p_parts). With p_again the batch was sent before: returns its answer if it was applied.
-- The first operation can say what time it was for the client when it sent the batch (sent): the
-- times of timers are later by as much as that clock was behind this one.
CREATE OR REPLACE FUNCTION apply_batch(
    p_kind text, p_lane text, p_batch bigint, p_again boolean, p_operations jsonb, p_parts integer
) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_done record;
    v_answer text;
    v_behind bigint := now_ms() - (p_operations #>> '{0,sent}')::bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_lane, 0)), follow_promotion();
    IF v_behind > 0 THEN
        PERFORM set_config('perdure_client.behind_ms', v_behind::text, true);
    END IF;
    IF p_again THEN
        SELECT l.answer INTO v_answer FROM lanes l WHERE l.lane = p_lane AND l.batch = p_batch;
        IF FOUND THEN
            -- A transaction that writes waits for the disk and for synchronous standbys, and so for
            -- all that was written before it: the first try may not have waited to the end.
            UPDATE lanes SET answer = v_answer WHERE lane = p_lane;
            RETURN v_answer;
        END IF;
    END IF;
    CASE p_kind
        WHEN 'commit_turns' THEN v_done := commit_turns(p_operations, p_parts);
        WHEN 'start_turns' THEN v_done := start_turns(p_operations, p_parts);
        WHEN 'abandon_turns' THEN v_done := abandon_turns(p_operations);
        WHEN 'complete_work' THEN v_done := complete_work(p_operations);
        WHEN 'abandon_work' THEN v_done := abandon_work(p_operations);
        WHEN 'enqueue_work' THEN v_done := enqueue_work(p_operations);
        WHEN 'enqueue_messages' THEN v_done := enqueue_messages(p_operations, p_parts);
        WHEN 'replace_instances' THEN v_done := replace_instances(p_operations);
        WHEN 'append_history' THEN v_done := append_history(p_operations);
    END CASE;
    v_answer := json_build_object(
        'now', v_done.now_at, 'refused', v_done.refused, 'turns_at', v_done.turns_at,
        'work_at', v_done.work_at
    );
    -- An earlier time would hide that the clock has gone back.
    UPDATE lanes SET batch = p_batch, answer = v_answer, used_at = greatest(used_at, v_done.now_at)
    WHERE lane = p_lane;
    IF NOT FOUND THEN
        INSERT INTO lanes (lane, batch, answer, used_at)
        VALUES (p_lane, p_batch, v_answer, v_done.now_at);
    END IF;
    RETURN v_answer;
END $$;

-- Returns the operations that were not refused; NULL if none is left.
CREATE OR REPLACE FUNCTION not_refused(p_operations jsonb, p_refused jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_refused IS NULL THEN p_operations ELSE (
        SELECT jsonb_agg(o.operation ORDER BY o.position)
        FROM jsonb_array_elements(p_operations) WITH ORDINALITY AS o (operation, position)
        WHERE NOT p_refused ? (o.operation ->> 'n')
    ) END
$$;

-- Returns the instances that operations belong to.
CREATE OR REPLACE FUNCTION ids_of(p_operations jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(SELECT o.instance_id FROM jsonb_to_recordset(p_operations) AS o (instance_id text))
$$;

-- Locks the readiness rows of these instances, in order.
CREATE OR REPLACE FUNCTION lock_instance_rows(p_ids text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM instance_locks WHERE instance_id = ANY (p_ids)
    ORDER BY instance_id FOR UPDATE;
END $$;

-- --- adding to the two queues, and the readiness of instances (columns of instance_locks)

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

-- Returns the route of an instance: that of the turn or the start that has named it, or an undecided
-- one.
CREATE OR REPLACE FUNCTION route_of_instance(
    p_id text, i instances, p_is_open boolean, p_new_starts bigint
) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN i.named OR i.started THEN route_of(i.name, i.version)
        ELSE undecided_route(p_id, i.name, i.version, p_is_open, p_new_starts)
    END
$$;

-- Returns true if the row of an instance in instance_locks is in the index instance_locks_awake, if a
-- message waits: it has no lock, no delay and no pause.
CREATE OR REPLACE FUNCTION is_awake(l instance_locks) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT l.lock_token IS NULL AND l.not_before IS NULL AND NOT l.suspended
$$;

-- Adds messages in their order. A start also adds its instance to the list of instances. The caller
-- has locked the rows in instance_locks. Returns the earliest time at which one of these instances
-- is ready, locks and delays ignored.
CREATE OR REPLACE FUNCTION add_messages(p_messages jsonb, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ready_at bigint;
    -- Of a client whose clock is behind: see apply_batch.
    v_behind bigint := coalesce(nullif(current_setting('perdure_client.behind_ms', true), ''), '0');
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
            start_name, start_version, start_parent, timer_execution_id, timer_id,
            mail_number, mail_bytes
        )
        SELECT
            m.instance_id, m.kind, m.body,
            coalesce(m.resolved_at_ms, p_now + m.delay_ms, m.visible_at_ms + v_behind, p_now),
            m.visible_at_ms + v_behind, coalesce(m.enqueued_at_ms, p_now),
            coalesce(m.attempt_count, 0),
            m.start ->> 'name', m.start ->> 'version', m.start ->> 'parent_instance_id',
            (m.timer ->> 'execution_id')::bigint, (m.timer ->> 'timer_id')::bigint,
            m.mail_number, m.mail_bytes
        FROM ROWS FROM (
            jsonb_to_recordset(p_messages) AS (
                instance_id text, kind text, body text, visible_at_ms bigint, delay_ms bigint,
                resolved_at_ms bigint, enqueued_at_ms bigint, attempt_count bigint,
                start jsonb, timer jsonb, mail_number bigint, mail_bytes bigint
            )
        ) WITH ORDINALITY AS m (
            instance_id, kind, body, visible_at_ms, delay_ms, resolved_at_ms, enqueued_at_ms,
            attempt_count, start, timer, mail_number, mail_bytes, position
        )
        ORDER BY m.position
        RETURNING instance_id, message_id, visible_at, enqueued_at, start_name,
            is_mail(kind) AS is_mail
    ), arrivals AS (
        SELECT
            a.instance_id,
            (array_agg(a.visible_at ORDER BY a.visible_at, a.message_id))[1] AS ready_at,
            (array_agg(a.message_id ORDER BY a.visible_at, a.message_id))[1] AS ready_id,
            (array_agg(a.visible_at ORDER BY a.visible_at, a.message_id)
                FILTER (WHERE NOT a.is_mail))[1] AS other_at,
            (array_agg(a.message_id ORDER BY a.visible_at, a.message_id)
                FILTER (WHERE NOT a.is_mail))[1] AS other_id,
            min(a.enqueued_at) AS enqueued_at,
            min(a.visible_at) FILTER (WHERE a.start_name IS NOT NULL) AS opens_at,
            count(a.start_name) AS starts
        FROM added a
        GROUP BY a.instance_id
    ), known AS (
        SELECT
            a.*, i.instance_id IS NOT NULL AS is_listed, h.is_open, x.framework_version,
            route_of_instance(a.instance_id, i, h.is_open, a.starts) AS route
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
            (ready_at, ready_id) = (
                -- While mail is held, only others make the instance ready.
                SELECT c.ready_at, c.ready_id
                FROM (
                    SELECT l.ready_at, l.ready_id
                    UNION ALL
                    SELECT
                        greatest(CASE WHEN l.mail_held THEN a.other_at ELSE a.ready_at END,
                            l.yielded_at),
                        CASE WHEN l.mail_held THEN a.other_id ELSE a.ready_id END
                    FROM arrivals a
                    WHERE a.instance_id = l.instance_id
                ) c
                WHERE c.ready_id IS NOT NULL
                UNION ALL
                SELECT NULL, NULL
                ORDER BY 1, 2
                LIMIT 1
            ),
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

-- Returns true if a message is mail, which more important messages overtake and which may be held.
CREATE OR REPLACE FUNCTION is_mail(kind text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT kind IN ('ExternalRaised', 'QueueMessage')
$$;

-- Returns the oldest message of an instance that does not carry the token; with p_holds_mail, that is
-- no mail.
CREATE OR REPLACE FUNCTION first_message(p_id text, p_token text, p_holds_mail boolean)
RETURNS TABLE (visible_at bigint, message_id bigint)
LANGUAGE sql STABLE AS $$
    SELECT q.visible_at, q.message_id
    FROM orchestrator_queue q
    WHERE q.instance_id = p_id
        AND (p_token IS NULL OR q.lock_token IS DISTINCT FROM p_token)
        AND NOT (p_holds_mail AND is_mail(q.kind))
    ORDER BY q.visible_at, q.message_id
    LIMIT 1
$$;

-- Computes readiness again from the queued messages, after some were removed or unlocked. The
-- caller has locked the rows. Returns the earliest time at which one of these instances is ready.
CREATE OR REPLACE FUNCTION update_readiness(p_ids text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_ready_at bigint;
BEGIN
    WITH updated AS (
        UPDATE instance_locks l SET
            route = route_of_instance(o.instance_id, i, h.is_open, 0),
            framework_version = x.framework_version,
            opens_at = CASE WHEN NOT h.is_open THEN s.visible_at END,
            ready_at = CASE WHEN f.message_id IS NOT NULL THEN
                greatest(f.visible_at, CASE WHEN b.is_valid THEN o.yielded_at END)
            END,
            ready_id = f.message_id,
            mail_held = o.mail_held AND b.is_valid,
            yielded_at = CASE WHEN b.is_valid THEN o.yielded_at END,
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
        -- How the last batch was cut counts while its lock is live, or while there are messages.
        CROSS JOIN LATERAL (
            SELECT (o.mail_held OR o.yielded_at IS NOT NULL) AND CASE
                WHEN o.lock_token IS NOT NULL THEN o.locked_until > now_ms()
                ELSE EXISTS (
                    SELECT FROM orchestrator_queue q WHERE q.instance_id = o.instance_id
                )
            END AS is_valid
        ) b
        LEFT JOIN LATERAL first_message(
            o.instance_id, o.lock_token, o.mail_held AND b.is_valid
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

-- Does the same as add_work for one item, which most turns add: a commit of such a turn costs a tenth less.
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
        route_of(p_item ->> 'name', p_item ->> 'tag'), p_item ->> 'body', p_item ->> 'session_id',
        p_item ->> 'tag', v_visible_at, (p_item ->> 'visible_at_ms')::bigint,
        coalesce((p_item ->> 'enqueued_at_ms')::bigint, p_now),
        CASE
            WHEN v_token IS NULL THEN coalesce((p_item ->> 'attempt_count')::bigint, 0) ELSE 1
        END,
        p_item ->> 'heartbeat', v_token, CASE WHEN v_token IS NOT NULL THEN p_now END, v_until,
        nullif(greatest(v_visible_at, v_until, p_now), p_now)
    );
    RETURN CASE WHEN v_token IS NULL THEN v_visible_at END;
END $$;
