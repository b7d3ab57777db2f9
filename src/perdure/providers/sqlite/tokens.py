"""Lock tokens: random for whoever holds them, in order of time for the indexes.

A token ends with its time and a number. It is stored with that end first, so that an index of
tokens grows at one end instead of touching a page for each token; tokens that callers make up
themselves are turned round in the same way and lie wherever they fall.
"""

from __future__ import annotations

import secrets
from typing import Final

_TAIL: Final = 16


def new_token(now_ms: int, number: int) -> str:
    """Unguessable and unique; the number tells apart those of one moment."""
    return f"{secrets.token_hex(16)}{now_ms & 0xFFFFFFFFFFF:011x}{number & 0xFFFFF:05x}"


def as_stored(token: str) -> str:
    return token[-_TAIL:] + token[:-_TAIL]


def as_handed_out(stored_token: str) -> str:
    return stored_token[_TAIL:] + stored_token[:_TAIL]
