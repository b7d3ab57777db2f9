"""Runs one turn as a pure function of history and messages: no I/O, no clock, no provider."""
