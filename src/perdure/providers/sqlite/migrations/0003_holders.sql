-- holder begins the tokens of all locks of a worker's process. When the process has died, its locks,
-- its sessions and its entry here are removed at once instead of at their end.

ALTER TABLE workers ADD COLUMN holder TEXT;
