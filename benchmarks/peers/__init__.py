"""One adapter per engine. Each is imported only inside that engine's own environment."""
