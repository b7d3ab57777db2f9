"""Ids: random ones of instances, executions, lock tokens and workers, and those of children.

The random bytes are fetched from the system for many ids at once: one call costs more than
everything else that a new instance needs, and it releases the interpreter lock.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from perdure.limits import ID_CHARACTERS_MAX
from perdure.processes import after_fork_in_child

_IDS_PER_CALL: Final = 256
_unused: list[str] = []


def new_id() -> str:
    """Return 32 random hexadecimal digits; no other call returns the same ones."""
    try:
        return _unused.pop()
    except IndexError:
        digits = os.urandom(16 * _IDS_PER_CALL).hex()
        _unused.extend([digits[start : start + 32] for start in range(32, len(digits), 32)])
        return digits[:32]


after_fork_in_child(_unused.clear)  # a fork must not use the same ids


def child_id(instance_id: str, execution_id: int, event_id: int) -> str:
    """Return the id of a child for which the code names none: its place in the parent's history."""
    tail = f"::{execution_id}.{event_id}"
    full = instance_id + tail
    if len(full) <= ID_CHARACTERS_MAX:
        return full
    digest = hashlib.blake2b(instance_id.encode(), digest_size=16).hexdigest()
    head = instance_id[: ID_CHARACTERS_MAX - len(tail) - len(digest) - 1]
    return f"{head}~{digest}{tail}"
