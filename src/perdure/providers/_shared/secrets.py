"""Store URLs as they may be shown: without passwords, wherever one can be written in them.

Reads a URL as libpq does, which takes a password with ? or # in it that others would cut there.
What cannot be told from a password is not shown.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

_HIDDEN: Final = "***"
_SCHEME: Final = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]+):")  # a single letter is a drive
_LOCAL: Final = frozenset({"sqlite", "file", "memory"})
_HOST: Final = r"(?:\[[^\]@/?#]*\]|[^:@/?#,\[\]]*)(?::\d*)?"
_PARTS: Final = re.compile(
    r"(?P<slashes>//|(?!//))"
    r"(?:(?P<user>[^:@/]*)(?P<password>:[^@/]*)?@)?"
    rf"(?P<place>{_HOST}(?:,{_HOST})*(?:/[^@?#]*)?)"
    r"(?:\?(?P<query>[^=&?]+=[^&?]*(?:&[^=&?]+=[^&?]*)*)?)?"
)
_HARMLESS: Final = frozenset(
    {
        *("schema", "host", "hostaddr", "port", "dbname", "user", "application_name"),
        *("connect_timeout", "sslmode", "target_session_attrs"),
        *("listen", "pool_size", "prepare"),
    }
)
_IN_A_TEXT: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"]*[@?][^\s'\"]*[^\s'\":;,.)]")
_PIECE_MIN: Final = 3
"""Shorter ones give nothing away, and are in every sentence."""


def shown_url(url: str) -> str:
    """The URL or path, with *** in place of what may be secret."""
    scheme, rest = _split(url)
    if scheme is None:
        return url
    parts = _PARTS.fullmatch(rest)
    if parts is None:
        return f"{scheme}:{'//' if rest.startswith('//') else ''}{_HIDDEN}"
    hidden = f":{_HIDDEN}" if parts["password"] else ""
    user = "" if parts["user"] is None else f"{parts['user']}{hidden}@"
    pairs = [pair if _is_harmless(pair) else _masked(pair) for pair in _pairs(parts)]
    query = f"?{'&'.join(pairs)}" if pairs else ""
    return f"{scheme}:{parts['slashes']}{user}{parts['place']}{query}"


def without_secrets(text: str, *urls: str) -> str:
    """A message, which may quote these URLs, parts of them, or others."""
    for url in urls:
        text = text.replace(url, shown_url(url))
    secrets = {secret for url in urls for secret in _secrets(url)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", _HIDDEN, text)
    return _IN_A_TEXT.sub(lambda found: shown_url(found[0]), text)


def _split(url: str) -> tuple[str | None, str]:
    """The scheme, or None for what is a path and has no secrets; and what follows it."""
    found = _SCHEME.match(url)
    if found is None:
        return None, url
    rest = url[found.end() :]
    has_host = rest.startswith("//") and not rest.startswith("///")
    is_local = found[1].lower() in _LOCAL and not has_host
    return (None if is_local else found[1]), rest


def _secrets(url: str) -> set[str]:
    scheme, rest = _split(url)
    if scheme is None:
        return set()
    parts = _PARTS.fullmatch(rest)
    if parts is None:
        pieces = re.split(r"[:@/?#&=]", rest.rpartition("@")[0] or rest)
        return {piece for piece in pieces if len(piece) >= _PIECE_MIN}
    found = [(parts["password"] or "")[1:]]
    found += [pair.partition("=")[2] for pair in _pairs(parts) if not _is_harmless(pair)]
    return {secret for raw in found for secret in (raw, unquote(raw)) if secret}


def _pairs(parts: re.Match[str]) -> list[str]:
    return parts["query"].split("&") if parts["query"] else []


def _is_harmless(pair: str) -> bool:
    key, _, value = pair.partition("=")
    return key in _HARMLESS and "@" not in value


def _masked(pair: str) -> str:
    return f"{pair.partition('=')[0]}={_HIDDEN}"
