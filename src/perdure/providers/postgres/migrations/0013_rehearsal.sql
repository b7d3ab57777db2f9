-- A session of the server reads what it has to know of tables and functions, and plans each
-- statement, when it first needs that. Here a new session does so for the commits of turns while
-- nobody waits for it.

-- Commits two turns, the quick way, of an instance that nobody else ever sees, and takes everything
-- back. p_token is nobody else's.
CREATE FUNCTION rehearse_commits(p_token text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    v_now bigint := now_ms();
    v_turn jsonb := jsonb_build_object(
        'instance_id', p_token, 'token', p_token, 'execution_id', 1, 'consumed', '[]'::jsonb,
        'history_delta', '[{"event_id": 1, "data": ""}]'::jsonb
    );
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    BEGIN
        INSERT INTO instances (
            instance_id, named, execution_id, execution_status, status, created_at, updated_at
        )
        VALUES (p_token, true, 1, 'Running', 'Running', v_now, v_now);
        INSERT INTO executions (instance_id, execution_id, status, started_at)
        VALUES (p_token, 1, 'Running', v_now);
        INSERT INTO instance_locks (instance_id, lock_token, locked_until)
        VALUES (p_token, p_token, v_now + 60000);
        PERFORM commit_turns(p_token, 1, false, jsonb_build_array(v_turn || jsonb_build_object(
            'keep_lock_ms', 60000,
            'worker_items', jsonb_build_array(jsonb_build_object(
                'identity', jsonb_build_object(
                    'instance_id', p_token, 'execution_id', 1, 'activity_id', 1
                ),
                'name', '', 'body', '',
                'claim', jsonb_build_object('lock_token', p_token, 'lock_timeout_ms', 60000)
            ))
        )), 2 | 32);
        PERFORM commit_turns(p_token, 2, false, jsonb_build_array(v_turn || jsonb_build_object(
            'history_delta', '[{"event_id": 2, "data": ""}]'::jsonb,
            'settled_work', jsonb_build_array(p_token), 'status', 'Completed'
        )), 1 | 4 | 16);
        RAISE EXCEPTION USING ERRCODE = 'PD003', MESSAGE = 'only a rehearsal';
    EXCEPTION
        WHEN SQLSTATE 'PD003' THEN NULL;
    END;
END $$;
