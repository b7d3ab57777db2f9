"""Pure replay: turns history and messages into decisions. No I/O, no clock, no provider."""
