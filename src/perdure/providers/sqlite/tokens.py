"""Lock tokens: random for whoever holds them, in order of time for the indexes.

A token ends with its time and a number. It is stored with that end first, so that an index of
tokens grows at one end instead of touching a page for each token; tokens that callers make up
themselves are turned round in the same way and lie wherever they fall.
"""

from __future__ import annotations

import secrets
from typing import Final

_TAIL: Final = 16


def new_tokens(now_ms: int, first_number: int, count: int) -> list[str]:
    """Unguessable and unique; the numbers tell apart those of one moment."""
    secret, moment = secrets.token_hex(16 * count), f"{now_ms & 0xFFFFFFFFFFF:011x}"
    return [
        f"{secret[32 * index : 32 * index + 32]}{moment}{first_number + index & 0xFFFFF:05x}"
        for index in range(count)
    ]


def as_stored(token: str) -> str:
    return token[-_TAIL:] + token[:-_TAIL]


def as_handed_out(stored_token: str) -> str:
    return stored_token[_TAIL:] + stored_token[:_TAIL]


def is_text(token: str) -> bool:
    """Whether it can be stored; what cannot be is no token."""
    try:
        return token.isascii() or bool(token.encode())
    except UnicodeEncodeError:
        return False
