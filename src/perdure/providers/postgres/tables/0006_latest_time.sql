-- The latest time at which locks were renewed. Together with lanes.used_at it shows that the clock of the
-- server has gone back: see follow_clock_back.

ALTER TABLE store ADD COLUMN latest_at bigint NOT NULL DEFAULT 0;
