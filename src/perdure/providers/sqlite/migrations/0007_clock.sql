-- When the clock was last found to have gone back: the latest time that the store knew then, and the
-- time that it was set to. All handles follow such a change once, also those that are opened later.

ALTER TABLE store_info ADD COLUMN clock_was_at INTEGER;
ALTER TABLE store_info ADD COLUMN clock_set_to INTEGER;
