-- Times are integer milliseconds of the store's clock. Texts called body, data, output, value or
-- block are JSON that this store never looks into. asked_visible_at is what the sender asked for.

CREATE TABLE store_info (
    id              INTEGER PRIMARY KEY CHECK (id = 1),
    format_version  INTEGER NOT NULL,
    next_message_id INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    moved_to        TEXT
) STRICT;

-- instance_key stands for the id in the big tables below: it is short, and instances that run at
-- the same time lie side by side. execution_id is 0 while there is only history that a tool wrote.
-- Until a turn names the instance (is_named), name, version and parent are those of the first start
-- that was consumed. The status is the one that people see, holds included.
CREATE TABLE instances (
    instance_key          INTEGER PRIMARY KEY,
    instance_id           TEXT    NOT NULL UNIQUE,
    is_named              INTEGER NOT NULL,
    name                  TEXT,
    version               TEXT,
    parent_instance_id    TEXT,
    execution_id          INTEGER NOT NULL,
    status                TEXT    NOT NULL,
    framework_version     TEXT,
    custom_status         TEXT,
    custom_status_version INTEGER NOT NULL,
    created_at            INTEGER NOT NULL,
    updated_at            INTEGER NOT NULL,
    completed_at          INTEGER
) STRICT;

CREATE INDEX instances_by_creation ON instances (created_at, instance_id) WHERE execution_id > 0;
CREATE INDEX instances_by_status
    ON instances (status, created_at, instance_id) WHERE execution_id > 0;
CREATE INDEX instances_by_name ON instances (name, created_at, instance_id) WHERE execution_id > 0;
CREATE INDEX instances_by_parent
    ON instances (parent_instance_id, created_at, instance_id)
    WHERE parent_instance_id IS NOT NULL;
CREATE INDEX instances_by_completion
    ON instances (completed_at, instance_id) WHERE completed_at IS NOT NULL;
-- Hardly any, so that all others are counted without reading a row.
CREATE INDEX instances_without_turns ON instances (instance_key) WHERE execution_id = 0;

CREATE TABLE executions (
    instance_key      INTEGER NOT NULL,
    execution_id      INTEGER NOT NULL,
    status            TEXT    NOT NULL,
    output            TEXT,
    framework_version TEXT,
    started_at        INTEGER NOT NULL,
    completed_at      INTEGER,
    PRIMARY KEY (instance_key, execution_id)
) STRICT, WITHOUT ROWID;

-- In the order of arrival: the events that many instances add in one commit share few pages.
CREATE TABLE history (
    instance_key INTEGER NOT NULL,
    execution_id INTEGER NOT NULL,
    event_id     INTEGER NOT NULL,
    data         TEXT    NOT NULL,
    PRIMARY KEY (instance_key, execution_id, event_id)
) STRICT;

CREATE TABLE kv_store (
    instance_key INTEGER NOT NULL,
    key          TEXT    NOT NULL,
    value        TEXT    NOT NULL,
    updated_at   INTEGER NOT NULL,
    PRIMARY KEY (instance_key, key)
) STRICT, WITHOUT ROWID;

-- Changes of the current execution; without a value: cleared.
CREATE TABLE kv_delta (
    instance_key INTEGER NOT NULL,
    key          TEXT    NOT NULL,
    value        TEXT,
    updated_at   INTEGER,
    PRIMARY KEY (instance_key, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE orchestrator_queue (
    message_id         INTEGER PRIMARY KEY,
    instance_id        TEXT    NOT NULL,
    kind               TEXT    NOT NULL,
    body               TEXT    NOT NULL,
    visible_at         INTEGER NOT NULL,
    enqueued_at        INTEGER NOT NULL,
    attempt_count      INTEGER NOT NULL,
    lock_token         TEXT,
    asked_visible_at   INTEGER,
    start_name         TEXT,
    start_version      TEXT,
    start_parent_id    TEXT,
    timer_execution_id INTEGER,
    timer_id           INTEGER
) STRICT;

CREATE INDEX orchestrator_queue_by_instance
    ON orchestrator_queue (instance_id, visible_at, message_id);
CREATE INDEX orchestrator_queue_by_parent
    ON orchestrator_queue (start_parent_id) WHERE start_parent_id IS NOT NULL;
-- Few rows: a message for an instance that has not begun must not read all its queued messages.
CREATE INDEX orchestrator_queue_starts
    ON orchestrator_queue (instance_id, message_id) WHERE start_name IS NOT NULL;
CREATE INDEX orchestrator_queue_by_timer
    ON orchestrator_queue (instance_id, timer_execution_id, timer_id) WHERE timer_id IS NOT NULL;

-- Everything that decides whether an instance can be handed out, in one row for each instance that
-- has a message, a lock or a hold: so a fetch looks at one row and never past the ones that have to
-- wait. state: 0 ready from due_at on, 1 waits until wake_at, 2 unknown (dead at wake_at),
-- 3 suspended. (due_at, first_message_id) is the oldest message that no live lock carries.
-- wake_at may be early, never late: the row is computed again at that time. The messages that a lock
-- carries have its token and were visible at carried_until; a token of an earlier lock means nothing.
-- touched_at is the time of the instance's last turn if it changed nothing else of its row in instances:
-- such a turn writes only here.
CREATE TABLE instance_locks (
    instance_id      TEXT    PRIMARY KEY,
    instance_key     INTEGER,
    name             TEXT,
    version          TEXT,
    pending_since    INTEGER,
    state            INTEGER NOT NULL,
    wake_at          INTEGER,
    due_at           INTEGER,
    first_message_id INTEGER,
    lock_token       TEXT,
    locked_until     INTEGER,
    owner            TEXT,
    kept             INTEGER NOT NULL DEFAULT 0,
    carried_until    INTEGER,
    suspended        INTEGER NOT NULL DEFAULT 0,
    not_before       INTEGER,
    block            TEXT,
    touched_at       INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX instance_locks_ready ON instance_locks (due_at, first_message_id)
    WHERE state = 0 AND due_at IS NOT NULL;
CREATE INDEX instance_locks_ready_by_name ON instance_locks (name, due_at, first_message_id)
    WHERE state = 0 AND due_at IS NOT NULL;
CREATE INDEX instance_locks_by_wake ON instance_locks (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX instance_locks_kept ON instance_locks (owner, due_at, first_message_id)
    WHERE kept = 1 AND due_at IS NOT NULL;
CREATE UNIQUE INDEX instance_locks_by_token
    ON instance_locks (lock_token) WHERE lock_token IS NOT NULL;
CREATE INDEX instance_locks_pending ON instance_locks (pending_since, instance_id)
    WHERE pending_since IS NOT NULL;

-- state: 0 ready, 1 waits (delayed or locked) until wake_at.
CREATE TABLE worker_queue (
    message_id    INTEGER PRIMARY KEY,
    instance_id   TEXT    NOT NULL,
    execution_id  INTEGER NOT NULL,
    activity_id   INTEGER NOT NULL,
    name          TEXT    NOT NULL,
    body          TEXT    NOT NULL,
    session_id    TEXT,
    tag           TEXT,
    visible_at    INTEGER NOT NULL,
    enqueued_at   INTEGER NOT NULL,
    attempt_count INTEGER NOT NULL,
    state         INTEGER NOT NULL,
    wake_at       INTEGER,
    lock_token    TEXT,
    locked_until  INTEGER,
    heartbeat     TEXT,
    asked_visible_at INTEGER
) STRICT;

CREATE INDEX worker_queue_ready ON worker_queue (tag, message_id)
    WHERE state = 0 AND session_id IS NULL;
CREATE INDEX worker_queue_ready_by_name ON worker_queue (tag, name, message_id)
    WHERE state = 0 AND session_id IS NULL;
CREATE INDEX worker_queue_by_session ON worker_queue (session_id, message_id)
    WHERE session_id IS NOT NULL;
CREATE INDEX worker_queue_by_wake ON worker_queue (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX worker_queue_by_identity ON worker_queue (instance_id, execution_id, activity_id);
CREATE UNIQUE INDEX worker_queue_by_token
    ON worker_queue (lock_token) WHERE lock_token IS NOT NULL;

CREATE TABLE sessions (
    session_id       TEXT    PRIMARY KEY,
    owner_id         TEXT    NOT NULL,
    locked_until     INTEGER NOT NULL,
    last_activity_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX sessions_by_owner ON sessions (owner_id);
CREATE INDEX sessions_by_lease ON sessions (locked_until);

CREATE TABLE dead_letters (
    letter_id          INTEGER PRIMARY KEY AUTOINCREMENT,
    reason             TEXT    NOT NULL,
    dead_since         INTEGER NOT NULL,
    instance_id        TEXT    NOT NULL,
    kind               TEXT    NOT NULL,
    body               TEXT    NOT NULL,
    asked_visible_at   INTEGER,
    start_name         TEXT,
    start_version      TEXT,
    start_parent_id    TEXT,
    timer_execution_id INTEGER,
    timer_id           INTEGER
) STRICT;

CREATE TABLE workers (
    worker_id  TEXT    PRIMARY KEY,
    record     TEXT    NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
