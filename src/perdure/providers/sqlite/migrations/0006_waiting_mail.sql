-- Mail that joins a queue is numbered: mail_number counts the mail of the instance, mail_bytes adds up its
-- bytes. Mail leaves the queue in order, so the first and the last row tell how much waits. Both are NULL
-- for mail that found the queue empty or was sent for later, and for all other messages.
ALTER TABLE orchestrator_queue ADD COLUMN mail_number INTEGER;
ALTER TABLE orchestrator_queue ADD COLUMN mail_bytes INTEGER;

CREATE INDEX orchestrator_queue_mail
    ON orchestrator_queue (instance_id, mail_number) WHERE mail_number IS NOT NULL;
