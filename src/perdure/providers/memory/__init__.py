"""The in-memory provider: the readable model of the contract, for tests and for trying out."""

from perdure.providers.memory.provider import InMemoryProvider
from perdure.providers.memory.store import MemoryStore

__all__ = ["InMemoryProvider", "MemoryStore"]
