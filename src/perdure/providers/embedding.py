"""JSON texts inside JSON documents: shown as what they are, and given back to the letter."""

from __future__ import annotations

from typing import Final

import msgspec

NO_JSON: Final = msgspec.Raw()
_NESTING_SPARE: Final = 64


def embed(text: str | None) -> tuple[msgspec.Raw, str | None]:
    """A text for a document: as JSON, or as a string if it would not come back unchanged."""
    if text is None:
        return NO_JSON, None
    data = text.encode()
    try:
        if msgspec.json.format(data, indent=-1) == data and not is_deep(data):
            return msgspec.Raw(data), None
    except (msgspec.MsgspecError, RecursionError):
        pass
    return NO_JSON, text


def extract(json: msgspec.Raw, text: str | None) -> str | None:
    """Inverse of ``embed``, for a document without spaces between its tokens."""
    return bytes(json).decode() if json != NO_JSON else text


def is_deep(data: bytes) -> bool:
    """Return True if the text is nested too deeply to be read inside a document."""
    if data.count(b"[") + data.count(b"{") <= _NESTING_SPARE:
        return False
    try:
        msgspec.json.format(b"[" * _NESTING_SPARE + data + b"]" * _NESTING_SPARE, indent=-1)
    except RecursionError:
        return True
    return False
