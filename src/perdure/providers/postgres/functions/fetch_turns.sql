-- Fetching turns. A fetch looks at the first instances of each route, so that instances for other
-- handlers do not slow it down. It finds nothing only if no instance can be locked.

-- Returns every route that has an instance with a message, by one index lookup for each.
CREATE OR REPLACE FUNCTION waiting_routes() RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE found (route) AS (
            (
                SELECT l.route FROM instance_locks l
                WHERE l.route IS NOT NULL AND l.ready_at IS NOT NULL AND is_awake(l)
                ORDER BY l.route LIMIT 1
            )
            UNION ALL
            SELECT (
                SELECT l.route FROM instance_locks l
                WHERE l.route > f.route AND l.ready_at IS NOT NULL AND is_awake(l)
                ORDER BY l.route LIMIT 1
            )
            FROM found f
            WHERE f.route IS NOT NULL
        )
        SELECT f.route FROM found f WHERE f.route IS NOT NULL
    );
END $$;

-- Returns true if the version that an execution is pinned to is in one of the ranges.
CREATE OR REPLACE FUNCTION fits_versions(p_pinned bigint[], p_ranges jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT EXISTS (
        SELECT FROM jsonb_to_recordset(p_ranges) AS r (minimum bigint[], maximum bigint[])
        WHERE p_pinned BETWEEN r.minimum AND r.maximum
    )
$$;

-- Returns true if the first visible start gives an instance one of the routes. Without such a start the
-- instance has the name 'unknown'.
CREATE OR REPLACE FUNCTION start_has_route(p_id text, p_routes text[], p_now bigint)
RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT route_of(q.start_name, q.start_version)
        FROM orchestrator_queue q
        WHERE q.instance_id = p_id AND q.start_name IS NOT NULL AND q.visible_at <= p_now
        ORDER BY q.message_id
        LIMIT 1
    ), route_of('unknown', NULL)) = ANY (p_routes)
$$;

-- Returns true if an instance has begun or its first start is visible, and has one of the routes and one of
-- the versions (NULL: any). The planner puts the expression in place of the call.
CREATE OR REPLACE FUNCTION is_wanted(
    l instance_locks, p_routes text[], p_ranges jsonb, p_now bigint
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT (l.opens_at IS NULL OR l.opens_at <= p_now)
        AND (p_routes IS NULL OR CASE
            WHEN l.route = '' THEN start_has_route(l.instance_id, p_routes, p_now)
            ELSE l.route = ANY (p_routes)
        END)
        AND (
            p_ranges IS NULL OR l.framework_version IS NULL
            OR fits_versions(l.framework_version, p_ranges)
        )
$$;

-- Returns instances that can be locked, oldest message first: unlocked ones, ones whose lock or
-- delay has ended, and ones with a new message whose lock this owner keeps. p_routes: as given to
-- fetch_turns; p_searched: the routes to search in the index of unlocked ones.
CREATE OR REPLACE FUNCTION turn_candidates(
    p_now bigint, p_owner text, p_routes text[], p_searched text[], p_ranges jsonb,
    p_limit integer
) RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT c.instance_id
        FROM (
            SELECT h.instance_id, h.ready_at, h.ready_id
            FROM unnest(p_searched) AS r (route)
            CROSS JOIN LATERAL (
                SELECT l.instance_id, l.ready_at, l.ready_id
                FROM instance_locks l
                WHERE l.route = r.route AND l.ready_at <= p_now AND is_awake(l)
                    AND is_wanted(l, p_routes, p_ranges, p_now)
                ORDER BY l.ready_at, l.ready_id
                LIMIT p_limit
            ) h
            UNION ALL
            SELECT l.instance_id, q.visible_at, q.message_id
            FROM instance_locks l
            CROSS JOIN LATERAL (
                SELECT m.visible_at, m.message_id
                FROM orchestrator_queue m
                WHERE m.instance_id = l.instance_id
                ORDER BY m.visible_at, m.message_id
                LIMIT 1
            ) q
            WHERE l.wake_at <= p_now AND l.route IS NOT NULL AND NOT l.suspended
                AND q.visible_at <= p_now AND is_wanted(l, p_routes, p_ranges, p_now)
            UNION ALL
            SELECT l.instance_id, l.ready_at, l.ready_id
            FROM instance_locks l
            WHERE l.owner = p_owner AND l.kept AND NOT l.suspended
                AND l.ready_at <= p_now AND l.locked_until > p_now
                AND is_wanted(l, p_routes, p_ranges, p_now)
        ) c
        ORDER BY c.ready_at, c.ready_id
        LIMIT p_limit
    );
END $$;

-- Returns when the next instance may become ready: a hint for how long to wait.
CREATE OR REPLACE FUNCTION next_turn_at(
    p_now bigint, p_owner text, p_routes text[], p_filtered boolean
) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN least(
        (
            SELECT min(h.due_at)
            FROM unnest(p_routes) AS r (route)
            CROSS JOIN LATERAL (
                (
                    SELECT greatest(l.ready_at, l.opens_at) AS due_at
                    FROM instance_locks l
                    WHERE l.route = r.route AND l.ready_at > p_now AND is_awake(l)
                    ORDER BY l.ready_at
                    LIMIT 1
                )
                UNION ALL
                SELECT min(l.opens_at)
                FROM instance_locks l
                WHERE l.route = r.route AND l.ready_at <= p_now AND l.opens_at > p_now
                    AND is_awake(l)
            ) h
        ),
        (
            SELECT l.wake_at FROM instance_locks l
            WHERE l.wake_at > p_now AND l.route IS NOT NULL AND NOT l.suspended
                AND (NOT p_filtered OR l.route = ANY (p_routes))
            ORDER BY l.wake_at LIMIT 1
        ),
        (
            SELECT l.ready_at FROM instance_locks l
            WHERE l.owner = p_owner AND l.kept AND NOT l.suspended AND l.ready_at > p_now
            ORDER BY l.ready_at LIMIT 1
        )
    );
END $$;

-- Moves visible messages that have waited longer than the grace period for a start to dead_letters.
CREATE OR REPLACE FUNCTION dead_letter_orphans(p_now bigint, p_grace_ms bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ARRAY(
        SELECT l.instance_id FROM instance_locks l
        WHERE l.route IS NULL AND l.orphaned_at <= p_now - p_grace_ms
        ORDER BY l.orphaned_at
        LIMIT 1000
        FOR UPDATE SKIP LOCKED
    );
BEGIN
    WITH removed AS (
        DELETE FROM orchestrator_queue q
        WHERE q.instance_id = ANY (v_ids)
            AND q.enqueued_at <= p_now - p_grace_ms AND q.visible_at <= p_now
        RETURNING q.*
    )
    INSERT INTO dead_letters (instance_id, reason, dead_since, message)
    SELECT
        b.instance_id, 'no instance and no start with that id', p_now,
        jsonb_strip_nulls(jsonb_build_object(
            'instance_id', b.instance_id, 'kind', b.kind, 'body', b.body,
            'visible_at_ms', b.given_at, 'timer', CASE WHEN b.timer_id IS NOT NULL THEN
                jsonb_build_object('execution_id', b.timer_execution_id, 'timer_id', b.timer_id)
            END
        ))
    FROM removed b
    ORDER BY greatest(b.visible_at, b.enqueued_at + p_grace_ms), b.message_id;
    PERFORM update_readiness(v_ids);
    PERFORM delete_idle_locks(v_ids);
END $$;

-- Chooses from rows, given in the order of the queue, those that fit into a batch beside those that are
-- carried already; at least one. A batch has at most 32 messages and 256 KiB (limits.py).
CREATE OR REPLACE FUNCTION that_fit(p_ids bigint[], p_sizes bigint[], p_carried boolean[])
RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(array_agg(f.id ORDER BY f.place) FILTER (WHERE NOT f.carried), '{}')
    FROM (
        SELECT s.id, s.place, s.carried, bool_or(
            NOT s.carried AND (s.place > 32 OR (s.before > 0 AND s.before + s.size > 262144))
        ) OVER (ORDER BY s.place) AS is_full
        FROM (
            SELECT
                m.id, m.size, m.carried, m.place,
                coalesce(sum(m.size) OVER (
                    ORDER BY m.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ), 0) AS before
            FROM unnest(p_ids, p_sizes, p_carried) WITH ORDINALITY AS m (id, size, carried, place)
        ) s
    ) f
    WHERE NOT f.is_full
$$;

-- Chooses the messages of a fetch that do not have the token: the oldest ones that fit. If some are
-- left (is_cut), completions, timers, cancellations and starts overtake mail, and the first start is
-- part of the batch always: without it the instance could not begin.
CREATE OR REPLACE FUNCTION choose_batch(
    p_id text, p_token text, p_now bigint, OUT batch bigint[], OUT is_cut boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    v_sizes bigint[];
    v_carried boolean[];
    v_since bigint;
    v_start bigint;
BEGIN
    SELECT array_agg(q.message_id), array_agg(q.size), array_agg(q.carried),
        count(*) > 32 OR sum(q.size) > 262144
    INTO batch, v_sizes, v_carried, is_cut
    FROM (
        SELECT m.message_id, octet_length(m.body)::bigint AS size,
            m.lock_token IS NOT DISTINCT FROM p_token AS carried
        FROM orchestrator_queue m
        WHERE m.instance_id = p_id AND m.visible_at <= p_now
        ORDER BY m.visible_at, m.message_id
        LIMIT 33
    ) q;
    IF is_cut OR true = ANY (v_carried) THEN
        batch := that_fit(batch, v_sizes, v_carried);
        is_cut := EXISTS (
            SELECT FROM orchestrator_queue m
            WHERE m.instance_id = p_id AND m.visible_at <= p_now
                AND m.lock_token IS DISTINCT FROM p_token AND NOT m.message_id = ANY (batch)
        );
    END IF;
    batch := coalesce(batch, '{}');
    is_cut := coalesce(is_cut, false);
    IF NOT is_cut THEN
        RETURN;
    END IF;
    SELECT m.visible_at INTO v_since FROM orchestrator_queue m
    WHERE m.instance_id = p_id AND m.message_id = batch[cardinality(batch)];
    SELECT batch || that_fit(array_agg(q.message_id), array_agg(q.size), array_agg(false))
    INTO batch
    FROM (
        SELECT m.message_id, octet_length(m.body)::bigint AS size
        FROM orchestrator_queue m
        WHERE m.instance_id = p_id AND m.visible_at <= p_now
            AND m.lock_token IS DISTINCT FROM p_token AND NOT is_mail(m.kind)
            AND m.visible_at >= coalesce(v_since, m.visible_at) AND NOT m.message_id = ANY (batch)
        ORDER BY m.visible_at, m.message_id
        LIMIT 33
    ) q;
    IF NOT EXISTS (
        SELECT FROM orchestrator_queue m
        WHERE m.instance_id = p_id AND m.start_name IS NOT NULL AND m.message_id = ANY (batch)
    ) THEN
        SELECT m.message_id INTO v_start FROM orchestrator_queue m
        WHERE m.instance_id = p_id AND m.start_name IS NOT NULL AND m.visible_at <= p_now
            AND m.lock_token IS DISTINCT FROM p_token
        ORDER BY m.message_id LIMIT 1;
        IF FOUND THEN
            batch := batch || v_start;
        END IF;
    END IF;
END $$;

-- Locks instances and marks a batch of their messages: instance p_ids[i] for delivery p_deliveries[i].
-- Returns the ids of the messages of each instance, as texts.
-- Stores of earlier versions have this function with another type of its answer, which cannot be replaced.
DROP FUNCTION IF EXISTS deliver_turns(text[], text[], boolean[], bigint, text, bigint);
CREATE OR REPLACE FUNCTION deliver_turns(
    p_ids text[], p_deliveries text[], p_continues boolean[], p_lock_ms bigint, p_owner text,
    p_now bigint
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    v_batches text[];
    v_cuts boolean[];
    v_attempts bigint;
BEGIN
    SELECT array_agg(b.batch::text ORDER BY t.position), array_agg(b.is_cut ORDER BY t.position)
    INTO v_batches, v_cuts
    FROM unnest(p_ids, p_deliveries, p_continues)
        WITH ORDINALITY AS t (instance_id, delivery, continues, position)
    JOIN instance_locks l ON l.instance_id = t.instance_id
    CROSS JOIN LATERAL choose_batch(
        t.instance_id, CASE WHEN t.continues THEN l.lock_token ELSE t.delivery END, p_now
    ) b;
    UPDATE instance_locks l SET
        lock_token = CASE WHEN t.continues THEN l.lock_token ELSE t.delivery END,
        locked_at = CASE WHEN t.continues THEN l.locked_at ELSE p_now END,
        locked_until = CASE WHEN t.continues THEN l.locked_until ELSE p_now + p_lock_ms END,
        owner = CASE WHEN t.continues THEN l.owner ELSE p_owner END,
        kept = t.continues,
        ready_at = f.visible_at,
        ready_id = f.message_id,
        mail_held = t.is_cut,
        yielded_at = NULL,
        wake_at = CASE WHEN t.continues THEN l.locked_until ELSE p_now + p_lock_ms END
    FROM unnest(p_ids, p_deliveries, p_continues, v_batches, v_cuts)
        AS t (instance_id, delivery, continues, batch, is_cut)
    JOIN instance_locks o ON o.instance_id = t.instance_id
    LEFT JOIN LATERAL (
        (
            SELECT q.visible_at, q.message_id
            FROM orchestrator_queue q
            WHERE NOT t.is_cut AND q.instance_id = t.instance_id AND q.visible_at > p_now
            ORDER BY q.visible_at, q.message_id
            LIMIT 1
        )
        UNION ALL
        (
            -- Mail has to wait for the commit of the turn.
            SELECT q.visible_at, q.message_id
            FROM orchestrator_queue q
            WHERE t.is_cut AND q.instance_id = t.instance_id
                AND NOT is_mail(q.kind)
                AND NOT q.message_id = ANY (t.batch::bigint[])
                AND (NOT t.continues OR q.lock_token IS DISTINCT FROM o.lock_token)
            ORDER BY q.visible_at, q.message_id
            LIMIT 1
        )
    ) f ON true
    WHERE l.instance_id = t.instance_id;
    WITH delivered AS (
        UPDATE orchestrator_queue q SET
            lock_token = l.lock_token, delivery = t.delivery, attempt_count = q.attempt_count + 1
        FROM unnest(p_ids, p_deliveries, v_batches) AS t (instance_id, delivery, batch)
        JOIN instance_locks l ON l.instance_id = t.instance_id
        CROSS JOIN LATERAL unnest(t.batch::bigint[]) AS b (message_id)
        WHERE q.instance_id = t.instance_id AND q.message_id = b.message_id
        RETURNING q.attempt_count
    )
    SELECT max(d.attempt_count) INTO v_attempts FROM delivered d;
    PERFORM wait_if_redelivered(v_attempts);
    RETURN v_batches;
END $$;

-- Releases what a fetch has locked or delivered with these tokens and what has expired since: no client
-- knows of it, so it counts no attempt. No message and no lock carries one of the tokens then, with which
-- the fetch that is repeated may take others.
CREATE OR REPLACE FUNCTION release_unanswered(p_tokens text[], p_now bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[] := ARRAY(
        SELECT l.instance_id FROM instance_locks l
        WHERE l.lock_token = ANY (p_tokens) AND l.locked_until <= p_now
        UNION
        SELECT q.instance_id FROM orchestrator_queue q
        WHERE q.delivery = ANY (p_tokens) AND NOT EXISTS (
            SELECT FROM instance_locks l
            WHERE l.instance_id = q.instance_id AND l.lock_token = q.lock_token
                AND l.locked_until > p_now
        )
    );
BEGIN
    IF v_ids = '{}' THEN
        RETURN;
    END IF;
    PERFORM lock_instance_rows(v_ids);
    UPDATE instance_locks l SET
        lock_token = NULL, locked_at = NULL, locked_until = NULL, owner = NULL, mail_held = false
    WHERE l.instance_id = ANY (v_ids) AND l.lock_token = ANY (p_tokens);
    UPDATE orchestrator_queue q SET
        lock_token = CASE WHEN q.lock_token = ANY (p_tokens) THEN NULL ELSE q.lock_token END,
        delivery = NULL, attempt_count = q.attempt_count - 1
    WHERE q.instance_id = ANY (v_ids) AND q.delivery = ANY (p_tokens);
    PERFORM update_readiness(v_ids);
END $$;

-- Locks up to one instance for each token and returns them with their messages; if there is none,
-- one row without an instance that says when to fetch again. With p_again the tokens were sent
-- before and the answer was lost: the same instances are returned again.
CREATE OR REPLACE FUNCTION fetch_turns(
    p_tokens text[], p_again boolean, p_lock_ms bigint, p_owner text, p_routes text[],
    p_ranges jsonb, p_grace_ms bigint, p_with_history boolean
) RETURNS TABLE (
    instance_id text, lock_token text, continues boolean, name text, version text,
    parent_instance_id text, execution_id bigint,
    message_ids bigint[], bodies text[], attempts bigint[], event_ids bigint[], events text[],
    kv_keys text[], kv_values text[], kv_times bigint[], now_at bigint, due_at bigint
)
LANGUAGE plpgsql SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := begin_fetch(p_tokens);
    v_routes text[] := array_append(p_routes, '');
    v_candidates text[];
    v_ids text[];
    v_continues boolean[];
    v_deliveries text[];
    v_batches text[];
BEGIN
    IF p_again THEN
        SELECT array_agg(d.instance_id), array_agg(d.delivery),
            array_agg(l.lock_token <> d.delivery), array_agg(d.batch)
        INTO v_ids, v_deliveries, v_continues, v_batches
        FROM (
            SELECT q.instance_id, q.delivery, q.lock_token, array_agg(q.message_id)::text AS batch
            FROM orchestrator_queue q WHERE q.delivery = ANY (p_tokens)
            GROUP BY q.instance_id, q.delivery, q.lock_token
        ) d
        JOIN instance_locks l
            ON l.instance_id = d.instance_id AND l.lock_token = d.lock_token
            AND l.locked_until > v_now;
        PERFORM release_unanswered(p_tokens, v_now);
    END IF;
    IF v_ids IS NULL AND EXISTS (
        SELECT FROM instance_locks l
        WHERE l.route IS NULL AND l.orphaned_at <= v_now - p_grace_ms
    ) THEN
        PERFORM dead_letter_orphans(v_now, p_grace_ms);
    END IF;
    WHILE v_ids IS NULL LOOP
        IF p_routes IS NULL THEN
            v_routes := waiting_routes();
        END IF;
        v_candidates := turn_candidates(
            v_now, p_owner, p_routes, v_routes, p_ranges, cardinality(p_tokens) + 16
        );
        IF v_candidates = '{}' THEN
            now_at := v_now;
            due_at := next_turn_at(v_now, p_owner, v_routes, p_routes IS NOT NULL);
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT
            array_agg(s.instance_id ORDER BY s.position), array_agg(s.continues ORDER BY s.position)
        INTO v_ids, v_continues
        FROM (
            SELECT l.instance_id, coalesce(l.locked_until > v_now, false) AS continues, c.position
            FROM unnest(v_candidates) WITH ORDINALITY AS c (instance_id, position)
            JOIN instance_locks l ON l.instance_id = c.instance_id
            WHERE l.route IS NOT NULL AND NOT l.suspended
                AND is_wanted(l, p_routes, p_ranges, v_now)
                AND CASE
                    WHEN l.locked_until > v_now
                        THEN l.kept AND l.owner = p_owner AND l.ready_at <= v_now
                    WHEN l.not_before > v_now THEN false
                    WHEN l.lock_token IS NULL THEN l.ready_at <= v_now
                    ELSE EXISTS (
                        SELECT FROM orchestrator_queue q
                        WHERE q.instance_id = l.instance_id AND q.visible_at <= v_now
                    )
                END
            ORDER BY c.position
            LIMIT cardinality(p_tokens)
            FOR UPDATE OF l SKIP LOCKED
        ) s;
        IF v_ids IS NULL THEN
            -- Other transactions have locked all of them. Wait for the first one, then look again.
            PERFORM 1 FROM instance_locks l WHERE l.instance_id = v_candidates[1] FOR UPDATE;
            v_now := now_ms();
        ELSE
            -- Read the clock again: messages committed since the first reading are visible too.
            v_now := now_ms();
            v_deliveries := p_tokens[:cardinality(v_ids)];
            v_batches := deliver_turns(
                v_ids, v_deliveries, v_continues, p_lock_ms, p_owner, v_now
            );
        END IF;
    END LOOP;

    RETURN QUERY
    SELECT
        t.instance_id, l.lock_token, t.continues, w.name, w.version, w.parent_instance_id,
        x.execution_id, b.message_ids, b.bodies, b.attempts, h.event_ids, h.events,
        k.kv_keys, k.kv_values, k.kv_times, v_now, NULL::bigint
    FROM unnest(v_ids, v_batches, v_continues)
        WITH ORDINALITY AS t (instance_id, batch, continues, position)
    JOIN instance_locks l ON l.instance_id = t.instance_id
    CROSS JOIN LATERAL (
        SELECT
            array_agg(q.message_id ORDER BY q.due_at, q.message_id) AS message_ids,
            array_agg(q.body ORDER BY q.due_at, q.message_id) AS bodies,
            array_agg(q.attempt_count ORDER BY q.due_at, q.message_id) AS attempts,
            min(q.message_id) FILTER (WHERE q.start_name IS NOT NULL) AS start_id
        FROM (
            -- A delayed message is ordered by the end of its delay. All others keep their order,
            -- even if the clock was set back in between.
            SELECT
                m.message_id, m.body, m.attempt_count, m.start_name,
                CASE
                    WHEN m.visible_at > m.enqueued_at THEN m.visible_at
                    ELSE max(m.enqueued_at) FILTER (WHERE m.visible_at <= m.enqueued_at)
                        OVER (ORDER BY m.message_id)
                END AS due_at
            FROM orchestrator_queue m
            WHERE m.instance_id = t.instance_id AND m.message_id = ANY (t.batch::bigint[])
        ) q
    ) b
    LEFT JOIN instances i ON i.instance_id = t.instance_id
    LEFT JOIN orchestrator_queue s
        ON s.instance_id = t.instance_id AND s.message_id = b.start_id
    CROSS JOIN LATERAL (
        SELECT i.name, i.version, i.parent_instance_id WHERE i.named OR i.started
        UNION ALL
        SELECT coalesce(s.start_name, 'unknown'), s.start_version, s.start_parent
        WHERE NOT coalesce(i.named OR i.started, false)
    ) w
    CROSS JOIN LATERAL (
        SELECT coalesce(nullif(i.execution_id, 0), (
            SELECT max(e.execution_id) FROM history e WHERE e.instance_id = t.instance_id
        ), 1) AS execution_id
    ) x
    LEFT JOIN LATERAL (
        SELECT
            array_agg(e.event_id ORDER BY e.event_id) AS event_ids,
            array_agg(e.data ORDER BY e.event_id) AS events
        FROM history e
        WHERE p_with_history AND NOT t.continues
            AND e.instance_id = t.instance_id AND e.execution_id = x.execution_id
    ) h ON true
    LEFT JOIN LATERAL (
        SELECT
            array_agg(v.key ORDER BY v.key) AS kv_keys,
            array_agg(v.value ORDER BY v.key) AS kv_values,
            array_agg(v.updated_at ORDER BY v.key) AS kv_times
        FROM kv_store v
        WHERE NOT t.continues AND v.instance_id = t.instance_id
    ) k ON true
    ORDER BY t.position;
END $$;
