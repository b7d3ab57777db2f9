"""Store URLs: the provider that a URL names, and the URL as it may be shown, without secrets."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import unquote, urlsplit

from perdure.errors import InvalidValue, UsageError
from perdure.providers.contract import Provider

if TYPE_CHECKING:
    from perdure.clock import Clock

_ENTRY_POINTS = "perdure.providers"
_SWITCH = {"true": True, "false": False}
_NUMBER = re.compile("[0-9]{1,9}")


class _Options(TypedDict, total=False):
    """Those of PostgresProvider that a URL may carry."""

    schema: str
    prepare: bool
    listen: bool
    pool_size: int


def open_provider(
    store: str | os.PathLike[str] | Provider,
    *,
    clock: Clock | None = None,
    allow_moved: bool = False,
) -> Provider:
    """The provider that a store names; it is not opened yet.

    ``shop.db`` and ``sqlite:///shop.db`` are SQLite files, ``file:./store`` is a directory,
    ``memory:`` forgets, ``postgresql://...`` is a server, where ``?schema=shop`` names a schema
    other than ``perdure``; ``prepare``, ``listen`` and ``pool_size`` are options of the provider
    that may be written there, too. Another scheme is looked up among the entry points of the group
    ``perdure.providers``, whose target takes (url, clock).
    ``allow_moved`` opens a store that is marked as moved; it is for our own kinds of store.
    """
    if isinstance(store, Provider):
        return store
    if not isinstance(store, (str, os.PathLike)):
        raise UsageError(f"a store is a path, a URL or a Provider, not {store!r}")
    text = os.fspath(store)
    if not text:
        raise UsageError("the store must not be empty; name a file, e.g. 'shop.db'")
    match scheme := _scheme_of(text):
        case "" | "sqlite":
            from perdure.providers.sqlite import SqliteProvider

            return SqliteProvider(_path_of(text), clock=clock, allow_moved=allow_moved)
        case "file":
            from perdure.providers.directory import FileSystemProvider

            return FileSystemProvider(_path_of(text), clock=clock, allow_moved=allow_moved)
        case "memory":
            from perdure.providers.sqlite.memory import InMemoryProvider

            return InMemoryProvider(clock=clock)
        case "postgresql" | "postgres":
            return _postgres(text, allow_moved=allow_moved)
        case _:
            return _third_party(text, scheme, clock)


def local_path(url: str) -> str | None:
    """The file or directory of a local store; None for memory, servers and foreign schemes."""
    return _path_of(url) if _scheme_of(url) in {"", "sqlite", "file"} else None


def _scheme_of(url: str) -> str:
    scheme = urlsplit(url).scheme if ":" in url else ""
    return scheme if len(scheme) > 1 else ""  # a single letter is a drive


def _path_of(url: str) -> str:
    """The path as it is, or behind ``sqlite:`` or ``file:``.

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
    dsn, options = _without_options(url)
    return PostgresProvider(dsn, **options, allow_moved=allow_moved)


def _without_options(url: str) -> tuple[str, _Options]:
    """Split a URL into the part for libpq and the options of the provider."""
    # Behind the last question mark: libpq takes a password that has one, or a #, as it is.
    place, mark, query = url.rpartition("?")
    options: _Options = {}
    others: list[str] = []
    for pair in query.split("&") if mark else ():
        name, _, value = pair.partition("=")
        if "@" in value:
            name = ""  # it is the end of such a password
        match name:
            case "schema":
                options["schema"] = unquote(value)
            case "prepare" | "listen":
                options[name] = _switch_of(name, unquote(value))
            case "pool_size":
                options["pool_size"] = _number_of(name, unquote(value))
            case _:
                others.append(pair)
    if not options:
        return url, options
    return f"{place}?{'&'.join(others)}" if others else place, options


def _switch_of(name: str, value: str) -> bool:
    if value.lower() not in _SWITCH:
        raise InvalidValue(
            f"{name} in the URL of a store is true or false, not {value!r}; "
            f"write {name}=true or {name}=false"
        )
    return _SWITCH[value.lower()]


def _number_of(name: str, value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise InvalidValue(
            f"{name} in the URL of a store is a whole number, not {value!r}; write e.g. {name}=10"
        )
    return int(value)


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
