-- locked_at is the time at which the current lock was taken; extending the lock does not change it.
-- It is NULL without a lock, and for a lock that was taken before this migration.

ALTER TABLE instance_locks ADD COLUMN locked_at bigint;
ALTER TABLE worker_queue ADD COLUMN locked_at bigint;

-- The status of a paused instance was called Suspended before.
UPDATE instances SET status = 'Paused' WHERE status = 'Suspended';

-- The functions in the schema: the version of perdure that has them, and their checksum.
ALTER TABLE store ADD COLUMN functions_version text;
ALTER TABLE store ADD COLUMN functions_checksum text;
