"""The dashboard: a page, a JSON API and health checks on one port, on top of a client."""

from perdure.dashboard.app import dashboard
from perdure.dashboard.security import Identity, Scope, read_tokens

__all__ = ["Identity", "Scope", "dashboard", "read_tokens"]
