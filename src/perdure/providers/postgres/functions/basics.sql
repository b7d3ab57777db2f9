-- Functions that the others use. A function that clients call fixes its search path, and plans that
-- use indexes even on small tables: a plan outlives the size of the table that it was made for.
-- Functions take the time as p_now, which is read once, after the deciding rows were locked. All
-- functions lock rows in one order, so that there are no deadlocks: instance_locks by instance_id,
-- worker_queue by message_id, new rows, sessions.

CREATE OR REPLACE FUNCTION now_ms() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

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
    SELECT status IN ('Completed', 'Failed', 'Cancelled', 'Terminated', 'ContinuedAsNew')
$$;

CREATE OR REPLACE FUNCTION shown_status(execution_status text, suspended boolean, blocked boolean)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN execution_status IN ('Completed', 'Failed', 'Cancelled', 'Terminated')
            THEN execution_status
        WHEN suspended THEN 'Paused'
        WHEN blocked THEN 'Blocked'
        ELSE coalesce(execution_status, 'Pending')
    END
$$;

-- --- lanes: a lane has one batch in flight and keeps the answer to its last one

-- Locks the lane until the end of the transaction. Returns the answer that is stored for the batch
-- if it is sent again (p_again) and was applied; otherwise NULL.
CREATE OR REPLACE FUNCTION stored_answer(p_lane text, p_batch bigint, p_again boolean) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_lane, 0));
    IF p_again THEN
        RETURN (SELECT l.answer FROM lanes l WHERE l.lane = p_lane AND l.batch = p_batch);
    END IF;
    RETURN NULL;
END $$;

-- Stores the answer to the batch and returns it.
CREATE OR REPLACE FUNCTION store_answer(p_lane text, p_batch bigint, p_now bigint, p_answer jsonb)
RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE lanes SET batch = p_batch, answer = p_answer, used_at = p_now WHERE lane = p_lane;
    IF NOT FOUND THEN
        INSERT INTO lanes (lane, batch, answer, used_at)
        VALUES (p_lane, p_batch, p_answer, p_now);
    END IF;
    RETURN p_answer;
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

-- Locks the rows of these instances, in order.
CREATE OR REPLACE FUNCTION lock_instances(p_ids text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM instance_locks WHERE instance_id = ANY (p_ids)
    ORDER BY instance_id FOR UPDATE;
END $$;

-- Another transaction has added a message for the instance while its first turn was written. The
-- client repeats the batch, and then the message is visible.
CREATE OR REPLACE FUNCTION raise_overtaken() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'serialization_failure', MESSAGE = 'a message overtook a first turn';
END $$;
