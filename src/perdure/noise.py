"""Texts that nobody can guess and that are never given twice.

Fetched from the system in bulk: the call costs more than everything else that a new instance
needs, and it lets go of the interpreter.
"""

from __future__ import annotations

import os
from typing import Final

_TEXTS_AT_ONCE: Final = 256
_unused: list[str] = []


def unguessable() -> str:
    """32 hexadecimal digits."""
    try:
        return _unused.pop()
    except IndexError:
        digits = os.urandom(16 * _TEXTS_AT_ONCE).hex()
        _unused.extend(digits[start : start + 32] for start in range(32, len(digits), 32))
        return digits[:32]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unused.clear)  # two processes must not use the same ones
