-- Times are integer milliseconds of the server's clock, always read through now_ms().
-- Columns body, data, output, value, custom_status and block are JSON that the store does not read.
-- Texts compare by code point (COLLATE "C"), as in Python.
-- In every table of an instance, instance_id is the first column of the key. There are no foreign
-- keys, so that a distributed Postgres can keep each instance on one server.

CREATE TABLE store (
    one            boolean PRIMARY KEY DEFAULT true CHECK (one),
    format_version integer NOT NULL,
    created_at     bigint  NOT NULL,
    moved_to       text
);

-- execution_id is 0 while only a start is queued. Until a turn names the instance (named), name,
-- version and parent are those of its start: the first one queued, or consumed (started).
-- execution_status and completed_at are copied from the current execution; status is the public
-- status, which also says Paused and Blocked.
CREATE TABLE instances (
    instance_id           text COLLATE "C" PRIMARY KEY,
    name                  text COLLATE "C",
    version               text COLLATE "C",
    parent_instance_id    text COLLATE "C",
    named                 boolean NOT NULL DEFAULT false,
    started               boolean NOT NULL DEFAULT false,
    execution_id          bigint  NOT NULL DEFAULT 0,
    execution_status      text,
    status                text    NOT NULL,
    custom_status         text,
    custom_status_version bigint  NOT NULL DEFAULT 0,
    created_at            bigint  NOT NULL,
    updated_at            bigint  NOT NULL,
    completed_at          bigint
) WITH (fillfactor = 80);

CREATE INDEX instances_by_creation ON instances (created_at, instance_id);
CREATE INDEX instances_by_status ON instances (status, created_at, instance_id);
CREATE INDEX instances_by_name ON instances (name, created_at, instance_id);
CREATE INDEX instances_by_parent ON instances (parent_instance_id, created_at, instance_id)
    WHERE parent_instance_id IS NOT NULL;
CREATE INDEX instances_by_completion ON instances (completed_at, instance_id)
    WHERE completed_at IS NOT NULL;

CREATE TABLE executions (
    instance_id       text COLLATE "C" NOT NULL,
    execution_id      bigint NOT NULL,
    status            text   NOT NULL,
    output            text,
    framework_version bigint[],
    started_at        bigint NOT NULL,
    completed_at      bigint,
    PRIMARY KEY (instance_id, execution_id)
) WITH (fillfactor = 80);

CREATE TABLE history (
    instance_id  text COLLATE "C" NOT NULL,
    execution_id bigint NOT NULL,
    event_id     bigint NOT NULL,
    data         text   NOT NULL,
    PRIMARY KEY (instance_id, execution_id, event_id)
);

-- The state at the end of the previous execution.
CREATE TABLE kv_store (
    instance_id text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    value       text   NOT NULL,
    updated_at  bigint NOT NULL,
    PRIMARY KEY (instance_id, key)
);

-- Changes of state in the current execution; a NULL value means cleared.
CREATE TABLE kv_delta (
    instance_id text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    value       text,
    updated_at  bigint,
    PRIMARY KEY (instance_id, key)
);

CREATE SEQUENCE message_ids;

-- given_at is the time that the sender asked for. lock_token names the lock that carries the
-- message; it counts only while it is the current lock of the instance. delivery is the token of
-- the fetch that returned it.
CREATE TABLE orchestrator_queue (
    instance_id        text COLLATE "C" NOT NULL,
    message_id         bigint NOT NULL DEFAULT nextval('message_ids'),
    kind               text   NOT NULL,
    body               text   NOT NULL,
    visible_at         bigint NOT NULL,
    given_at           bigint,
    enqueued_at        bigint NOT NULL,
    attempt_count      bigint NOT NULL DEFAULT 0,
    lock_token         text COLLATE "C",
    delivery           text COLLATE "C",
    start_name         text COLLATE "C",
    start_version      text COLLATE "C",
    start_parent       text COLLATE "C",
    timer_execution_id bigint,
    timer_id           bigint,
    PRIMARY KEY (instance_id, message_id)
);

CREATE INDEX orchestrator_queue_by_visibility
    ON orchestrator_queue (instance_id, visible_at, message_id);
CREATE INDEX orchestrator_queue_by_timer
    ON orchestrator_queue (instance_id, timer_execution_id, timer_id) WHERE timer_id IS NOT NULL;
CREATE INDEX orchestrator_queue_of_starts
    ON orchestrator_queue (instance_id, message_id) WHERE start_name IS NOT NULL;

-- Readiness: one row for each instance that has a message, a lock, a delay, a block or a pause.
-- docs/internals/readiness.md explains the columns.
-- Partial indexes contain only rows that can be fetched, so a fetch never reads past the others.
--   route       name and version; NULL while the instance is unknown
--   opens_at    when the first start is visible; NULL once a turn or history exists
--   ready_at/id oldest message that the current lock does not carry
--   wake_at     end of the lock or of the delay, if there is one and there are messages
--   orphaned_at when the oldest message arrived, while the instance is unknown
--   kept        the runtime keeps the lock between turns
--   not_before  end of a delay
--   suspended   the instance is paused
CREATE TABLE instance_locks (
    instance_id       text COLLATE "C" PRIMARY KEY,
    route             text COLLATE "C",
    framework_version bigint[],
    opens_at          bigint,
    ready_at          bigint,
    ready_id          bigint,
    wake_at           bigint,
    orphaned_at       bigint,
    lock_token        text COLLATE "C",
    locked_until      bigint,
    owner             text COLLATE "C",
    kept              boolean NOT NULL DEFAULT false,
    not_before        bigint,
    suspended         boolean NOT NULL DEFAULT false,
    block             text
) WITH (fillfactor = 70);

CREATE INDEX instance_locks_awake ON instance_locks (route, ready_at, ready_id)
    WHERE route IS NOT NULL AND ready_at IS NOT NULL
        AND lock_token IS NULL AND not_before IS NULL AND NOT suspended;
CREATE INDEX instance_locks_asleep ON instance_locks (wake_at)
    WHERE wake_at IS NOT NULL AND route IS NOT NULL AND NOT suspended;
CREATE INDEX instance_locks_kept ON instance_locks (owner, ready_at, ready_id)
    WHERE kept AND ready_at IS NOT NULL AND NOT suspended;
CREATE INDEX instance_locks_orphaned ON instance_locks (orphaned_at) WHERE route IS NULL;
CREATE UNIQUE INDEX instance_locks_by_token ON instance_locks (lock_token)
    WHERE lock_token IS NOT NULL;

-- wake_at is the time at which a locked or delayed item becomes ready; NULL: it is ready.
CREATE TABLE worker_queue (
    instance_id   text COLLATE "C" NOT NULL,
    execution_id  bigint NOT NULL,
    activity_id   bigint NOT NULL,
    message_id    bigint NOT NULL DEFAULT nextval('message_ids'),
    name          text COLLATE "C" NOT NULL,
    route         text COLLATE "C" NOT NULL,
    body          text   NOT NULL,
    session_id    text COLLATE "C",
    tag           text COLLATE "C",
    visible_at    bigint NOT NULL,
    given_at      bigint,
    enqueued_at   bigint NOT NULL,
    attempt_count bigint NOT NULL DEFAULT 0,
    wake_at       bigint,
    lock_token    text COLLATE "C",
    locked_until  bigint,
    heartbeat     text,
    PRIMARY KEY (instance_id, execution_id, activity_id, message_id)
) WITH (fillfactor = 80);

CREATE INDEX worker_queue_awake ON worker_queue (route, message_id)
    WHERE wake_at IS NULL AND session_id IS NULL;
CREATE INDEX worker_queue_asleep ON worker_queue (wake_at) WHERE wake_at IS NOT NULL;
CREATE INDEX worker_queue_of_sessions ON worker_queue (session_id, message_id)
    WHERE session_id IS NOT NULL;
CREATE UNIQUE INDEX worker_queue_by_token ON worker_queue (lock_token)
    WHERE lock_token IS NOT NULL;

CREATE TABLE sessions (
    session_id    text COLLATE "C" PRIMARY KEY,
    owner_id      text COLLATE "C" NOT NULL,
    locked_until  bigint NOT NULL,
    last_activity bigint NOT NULL
) WITH (fillfactor = 70);

CREATE INDEX sessions_by_owner ON sessions (owner_id);

CREATE TABLE dead_letters (
    instance_id text COLLATE "C" NOT NULL,
    letter_id   bigint NOT NULL DEFAULT nextval('message_ids'),
    reason      text   NOT NULL,
    dead_since  bigint NOT NULL,
    message     text   NOT NULL,
    PRIMARY KEY (instance_id, letter_id)
);

CREATE UNIQUE INDEX dead_letters_by_id ON dead_letters (letter_id, instance_id);

CREATE TABLE workers (
    worker_id text COLLATE "C" PRIMARY KEY,
    info      text   NOT NULL,
    lapses_at bigint NOT NULL
);

-- The answer to the last batch of each lane of each handle. A batch whose answer was lost is sent
-- again with the same number, and gets this answer if it was applied.
CREATE TABLE lanes (
    lane    text COLLATE "C" PRIMARY KEY,
    batch   bigint NOT NULL,
    answer  text,
    used_at bigint NOT NULL
) WITH (fillfactor = 50);
