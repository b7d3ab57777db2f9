"""Plain frozen data: events, work items, statuses, failures. No behaviour beyond validation."""
