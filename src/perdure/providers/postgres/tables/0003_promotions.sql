-- The last transaction that the server had replayed when it became the primary, as far as the store
-- has followed: see follow_promotion.

ALTER TABLE store ADD COLUMN replayed_until timestamptz;
