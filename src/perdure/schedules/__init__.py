"""Schedules: instances of a built-in orchestration that start one instance for each slot."""
