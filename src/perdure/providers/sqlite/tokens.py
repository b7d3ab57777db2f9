"""Lock tokens: random for whoever holds them, in order of time for the indexes.

A token begins with its time and a number, so that an index of tokens grows at one end instead of
touching a page for each token; those that callers make up themselves lie wherever they fall.
"""

from __future__ import annotations

import secrets


def new_tokens(now_ms: int, first_number: int, count: int) -> list[str]:
    """Unguessable and unique; the numbers tell apart those of one moment."""
    secret, moment = secrets.token_hex(16 * count), f"{now_ms & 0xFFFFFFFFFFF:011x}"
    return [
        f"{moment}{first_number + index & 0xFFFFF:05x}{secret[32 * index : 32 * index + 32]}"
        for index in range(count)
    ]


def is_text(token: str) -> bool:
    """Whether it can be stored; what cannot be is no token."""
    try:
        return token.isascii() or bool(token.encode())
    except UnicodeEncodeError:
        return False
