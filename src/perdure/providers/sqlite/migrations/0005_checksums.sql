-- checksum is the CRC-32 of the text of an event, as a store in a file writes it. NULL: the event was
-- written before there were checksums, or by a store that has its own.

ALTER TABLE history ADD COLUMN checksum INTEGER;
