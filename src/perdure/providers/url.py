"""Store URLs: the provider that a URL names, and the URL as it may be shown, without secrets."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from perdure.arguments import parse_duration_ms
from perdure.errors import InvalidValue, UsageError
from perdure.providers.contract import Provider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perdure.clock import Clock

_ENTRY_POINTS = "perdure.providers"
_SWITCH = {"true": True, "false": False}
_NUMBER = re.compile("[0-9]{1,9}")
_LOCAL_SCHEMES: Final = frozenset({"", "sqlite", "file", "memory"})
_KINDS: Final = {
    "memory": "memory:",
    "sqlite": "sqlite:///shop.db",
    "file": "file:./store",
    "postgres": "postgresql://user@host/shop",
    "postgresql": "postgresql://user@host/shop",
}
"""Names of the kinds of store, which alone are no URLs, and a URL of each."""
_LOOKS_LIKE_OPTIONS: Final = re.compile("[A-Za-z_]+=")
_UNKNOWN_TO_LIBPQ: Final = "invalid URI query parameter"
_KEYWORDS: Final = re.compile(r"\s*(?:host|hostaddr|port|dbname|user|service)\s*=")
"""The beginning of a connection string of libpq that is no URL: ``host=a,b dbname=shop``."""


def open_provider(
    store: str | os.PathLike[str] | Provider,
    *,
    clock: Clock | None = None,
    allow_moved: bool = False,
) -> Provider:
    """Return the provider that a store names; it is not opened yet.

    ``shop.db`` and ``sqlite:///shop.db`` are SQLite files, ``file:./store`` is a directory,
    ``memory:`` forgets, ``postgresql://...`` or ``host=a,b dbname=shop`` is a server. Options of
    the provider follow the question mark of a URL: ``sqlite:///shop.db?durability=relaxed``;
    ``OPTIONS`` has those of each scheme. Another scheme is looked up among the entry points of the
    group ``perdure.providers``, whose target takes (url, clock).
    ``allow_moved`` opens a store that is marked as moved; it is for our own kinds of store.
    """
    if isinstance(store, Provider):
        return store
    if not isinstance(store, (str, os.PathLike)):
        made = f"; make an object of it: {store.__name__}(...)" if isinstance(store, type) else ""
        raise UsageError(f"a store is a path, a URL or a Provider, not {store!r}{made}")
    text = os.fspath(store)
    if not text:
        raise UsageError("the store must not be empty; name a file, e.g. 'shop.db'")
    if isinstance(store, str) and store in _KINDS:
        raise UsageError(
            f"the store {store!r} would be a file of that name; write {_KINDS[store]!r}, or "
            f"'./{store}' for the file"
        )
    scheme = _scheme_of(text)
    if scheme in {"postgresql", "postgres"}:
        return _postgres(text, allow_moved=allow_moved)
    if scheme not in _LOCAL_SCHEMES:
        return _third_party(text, scheme, clock)
    # A Path object names a file: only a text can have options.
    place, options = _split_local(text) if isinstance(store, str) else (text, {})
    match scheme:
        case "file":
            from perdure.providers.directory import FileSystemProvider

            path = _path_of(place)
            return FileSystemProvider(path, clock=clock, allow_moved=allow_moved, **options)
        case "memory":
            from perdure.providers.sqlite.memory import InMemoryProvider

            return InMemoryProvider(clock=clock, **options)
        case _:
            from perdure.providers.sqlite import SqliteProvider

            path = _path_of(place)
            return SqliteProvider(path, clock=clock, allow_moved=allow_moved, **options)


def local_path(url: str) -> str | None:
    """Return the file or directory of a local store; None for memory, servers, other schemes.

    Errors: UsageError for an option that the store does not have.
    """
    if _scheme_of(url) not in {"", "sqlite", "file"}:
        return None
    return _path_of(_split_local(url)[0])


def with_path(url: str, path: str) -> str:
    """Return the URL of a local store with another path."""
    place, mark, query = url.partition("?")
    return place[: len(place) - len(_path_of(place))] + path + mark + query


def _scheme_of(url: str) -> str:
    if _KEYWORDS.match(url):
        return "postgresql"
    try:
        scheme = urlsplit(url).scheme if ":" in url else ""
    except ValueError as error:
        raise UsageError(
            f"{shown_url(url)!r} is no URL of a store: {error}; write sqlite:///shop.db, "
            "file:./dir or postgresql://user@host/shop"
        ) from None
    return scheme if len(scheme) > 1 else ""  # a single letter is a drive


def _path_of(url: str) -> str:
    """Return the path as it is, or behind ``sqlite:`` or ``file:``.

    Behind three slashes it is relative for SQLite, as other tools read such a URL, and absolute for
    ``file:``, as the standard says.
    """
    scheme = _scheme_of(url)
    if not scheme:
        return url
    path = url.partition(":")[2]
    example = f"{scheme}:///shop.db" if scheme == "sqlite" else "file:./shop"
    if path.startswith("//") and not path.startswith("///"):
        raise UsageError(f"{url!r} names a host, and a local store has none; write e.g. {example}")
    if path.startswith("///"):
        path = path[3:] if scheme == "sqlite" else "/" + path.lstrip("/")
        if sys.platform == "win32" and path[2:3] == ":":  # file:///C:/store
            path = path[1:]
    if not path.strip("/"):
        raise UsageError(f"{url!r} names no local path; write e.g. {example}")
    return path


def _postgres(url: str, *, allow_moved: bool) -> Provider:
    try:
        from perdure.providers.postgres import PostgresProvider
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a Postgres store needs {error.name}, which is not installed; "
            "pip install 'perdure[postgres]'"
        ) from error
    dsn, options = (url, {}) if _KEYWORDS.match(url) else _without_options(url)
    try:
        return PostgresProvider(dsn, allow_moved=allow_moved, **options)
    except InvalidValue as error:
        if _UNKNOWN_TO_LIBPQ not in str(error):
            raise
        known = ", ".join(OPTIONS["postgresql"])
        raise InvalidValue(f"{error}; known are {known} and the parameters of libpq") from None


def _without_options(url: str) -> tuple[str, dict[str, Any]]:
    """Split a URL into the part for libpq and the options of the provider."""
    # Behind the last question mark: libpq takes a password that has one, or a #, as it is.
    place, mark, query = url.rpartition("?")
    options: dict[str, Any] = {}
    others: list[str] = []
    for pair in query.split("&") if mark else ():
        # With an @ it is the end of such a password.
        if pair.partition("=")[0] in OPTIONS["postgresql"] and "@" not in pair:
            _add_option(options, pair, "postgresql")
        else:
            others.append(pair)
    if not options:
        return url, options
    return f"{place}?{'&'.join(others)}" if others else place, options


# --- options


def _split_local(url: str) -> tuple[str, dict[str, Any]]:
    """Split the URL or path of a local store into its place and its options."""
    place, _, query = url.partition("?")
    scheme = _scheme_of(url)
    if not scheme:
        if _LOOKS_LIKE_OPTIONS.match(query):
            raise UsageError(
                f"{url!r} is a path, and a path has no options; write sqlite:///{url}, or give a "
                "file of that name as a pathlib.Path"
            )
        return url, {}
    options: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        _add_option(options, pair, scheme)
    return place, options


def _add_option(options: dict[str, Any], pair: str, scheme: str) -> None:
    name, _, value = pair.partition("=")
    known = OPTIONS[scheme]
    if name not in known:
        raise UsageError(
            f"{scheme} stores have no option {name!r}; known are {', '.join(known)}, written as "
            f"{_EXAMPLES[scheme]}"
        )
    if name in options:
        raise UsageError(f"the URL of the store has the option {name!r} twice; keep one of them")
    options[name] = known[name](name, unquote(value))


def _text_of(_: str, value: str) -> str:
    return value


def _seconds_of(name: str, value: str) -> float:
    try:
        return parse_duration_ms(value) / 1000
    except InvalidValue as error:
        raise InvalidValue(f"{name} in the URL of a store: {error}") from None


def _switch_of(name: str, value: str) -> bool:
    if value.lower() not in _SWITCH:
        raise InvalidValue(
            f"{name} in the URL of a store is true or false, not {value!r}; "
            f"write {name}=true or {name}=false"
        )
    return _SWITCH[value.lower()]


def _listen_of(name: str, value: str) -> bool | str:
    """Return a switch, or the connection string of the server to listen to."""
    return value if "=" in value or "://" in value else _switch_of(name, value)


def _number_of(name: str, value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise InvalidValue(
            f"{name} in the URL of a store is a whole number, not {value!r}; write e.g. {name}=10"
        )
    return int(value)


_EVERYWHERE: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "orphan_grace": _seconds_of,
    "mail_max": _number_of,
    "mail_bytes_max": _number_of,
}

OPTIONS: Final[Mapping[str, Mapping[str, Callable[[str, str], Any]]]] = {
    "sqlite": {"durability": _text_of, **_EVERYWHERE},
    "file": {"archive": _seconds_of, **_EVERYWHERE},
    "memory": _EVERYWHERE,
    "postgresql": {
        "schema": _text_of,
        "pool_size": _number_of,
        "listen": _listen_of,
        "prepare": _switch_of,
        "auto_migrate": _switch_of,
        "retry_timeout": _seconds_of,
        "answer_timeout": _seconds_of,
        **_EVERYWHERE,
    },
}
"""Options that the URL of a store may have, by scheme, each with the function that reads it.

They are arguments of the provider's constructor with the same names.
"""

_EXAMPLES: Final = {
    "sqlite": "sqlite:///shop.db?durability=relaxed",
    "file": "file:./shop?archive=30d",
    "memory": "memory:?orphan_grace=5s",
}


def _third_party(url: str, scheme: str, clock: Clock | None) -> Provider:
    from importlib.metadata import entry_points  # slow to load, and hardly ever needed

    for entry_point in entry_points(group=_ENTRY_POINTS, name=scheme):
        provider = entry_point.load()(url, clock)
        if not isinstance(provider, Provider):
            raise UsageError(
                f"the entry point {entry_point.value!r} for {scheme!r} stores gave "
                f"{type(provider).__name__}, not a Provider"
            )
        return provider
    raise UsageError(
        f"no provider for {scheme!r} stores; known are a path, 'sqlite:///x.db', "
        "'file:./dir', 'memory:', 'postgresql://...', and entry points of the group "
        f"{_ENTRY_POINTS!r}"
    )


# --- URLs without secrets
#
# A URL is read as libpq does, which takes a password with ? or # in it that others would cut there.
# A part that could be a password is not shown.

_HIDDEN: Final = "***"
_SCHEME: Final = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]+):")  # a single letter is a drive
_HOST: Final = r"(?:\[[^\]@/?#]*\]|[^:@/?#,\[\]]*)(?::\d*)?"
_PARTS: Final = re.compile(
    r"(?P<slashes>//|(?!//))"
    r"(?:(?P<user>[^:@/]*)(?P<password>:[^@/]*)?@)?"
    rf"(?P<place>{_HOST}(?:,{_HOST})*(?:/[^@?#]*)?)"
    r"(?:\?(?P<query>[^=&?]+=[^&?]*(?:&[^=&?]+=[^&?]*)*)?)?"
)
_HARMLESS: Final = frozenset(
    {
        *("host", "hostaddr", "port", "dbname", "user", "application_name"),
        *("connect_timeout", "sslmode", "target_session_attrs", "service"),
        *(name for options in OPTIONS.values() for name in options),
    }
)
_KEYWORD: Final = re.compile(r"(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|\S+)")
_IN_A_TEXT: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"]*[@?][^\s'\"]*[^\s'\":;,.)]")
_PIECE_MIN: Final = 3
"""Shorter ones give nothing away, and are in every sentence."""


def shown_url(url: str) -> str:
    """Return the URL or path, with *** in place of what may be secret."""
    if _KEYWORDS.match(url):
        return _KEYWORD.sub(
            lambda each: each[0] if _is_harmless(each[0]) else _masked(each[0]), url
        )
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
    """Return a message, which may quote these URLs or others, without their secrets."""
    for url in urls:
        text = text.replace(url, shown_url(url))
    secrets = {secret for url in urls for secret in _secrets(url)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", _HIDDEN, text)
    return _IN_A_TEXT.sub(lambda found: shown_url(found[0]), text)


def _split(url: str) -> tuple[str | None, str]:
    """Return the scheme and what follows it. The scheme is None for a path: it has no secrets."""
    found = _SCHEME.match(url)
    if found is None:
        return None, url
    rest = url[found.end() :]
    has_host = rest.startswith("//") and not rest.startswith("///")
    is_local = found[1].lower() in _LOCAL_SCHEMES and not has_host
    return (None if is_local else found[1]), rest


def _secrets(url: str) -> set[str]:
    if _KEYWORDS.match(url):
        values = [each[2] for each in _KEYWORD.finditer(url) if not _is_harmless(each[0])]
        return {text for value in values for text in (value, value.strip("'"))}
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
    return key.strip() in _HARMLESS and "@" not in unquote(value)


def _masked(pair: str) -> str:
    return f"{pair.partition('=')[0]}={_HIDDEN}"
