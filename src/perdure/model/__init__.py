"""Frozen records: events, work items, statuses and failures, and their stored form."""
