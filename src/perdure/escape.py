"""Escape control characters, so that stored text cannot control the terminal."""

from __future__ import annotations

import codecs
import re
from typing import Final

# C0 and C1 controls, DEL, line and paragraph separators, bidirectional controls, lone surrogates,
# and marks without width that hide a difference between two ids.
_DANGEROUS: Final = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_PATTERN: Final = re.compile(f"[{_DANGEROUS}]")
_PATTERN_IN_BLOCK: Final = re.compile(f"(?![\n\t])[{_DANGEROUS}]")
ESCAPED: Final = "perdure.escaped"
"""Error handler for streams: a character that the encoding lacks is written as in JSON."""
_SHORT: Final = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def clean(text: str) -> str:
    """Return the text as one line, with control characters as Python escapes."""
    return text if text.isprintable() else _PATTERN.sub(_escaped, text)


def clean_block(text: str) -> str:
    """Return the text with newlines and tabs kept and other control characters escaped."""
    return _PATTERN_IN_BLOCK.sub(_escaped, text)


def clean_json(text: str) -> str:
    """Return equal JSON without control characters; they occur only inside its strings."""
    return _PATTERN_IN_BLOCK.sub(lambda match: _in_json(match.group()), text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    short = _SHORT.get(character)
    if short is not None:
        return short
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _in_json(character: str) -> str:
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def _encode_error(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_json, error.object[error.start : error.end])), error.end


codecs.register_error(ESCAPED, _encode_error)
