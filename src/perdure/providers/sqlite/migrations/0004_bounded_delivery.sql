-- A fetch hands out a bounded batch. mail_held is 1 while mail does not make the instance ready: its
-- lock carries a whole batch, or its last turn wanted no more. yielded_at is the time of a turn that
-- left messages behind: the instance is handed out again after those that were ready by then.
ALTER TABLE instance_locks ADD COLUMN mail_held INTEGER NOT NULL DEFAULT 0;
ALTER TABLE instance_locks ADD COLUMN yielded_at INTEGER;

-- Completions, timers, cancellations and starts, which overtake mail if more waits than fits.
CREATE INDEX orchestrator_queue_without_mail
    ON orchestrator_queue (instance_id, visible_at, message_id)
    WHERE kind NOT IN ('ExternalRaised', 'QueueMessage');
