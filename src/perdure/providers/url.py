"""From what a user writes (a path, a URL, a provider) to a provider. Backends load on demand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from perdure.errors import UsageError
from perdure.providers.contract import Provider

if TYPE_CHECKING:
    from perdure.clock import Clock

_ENTRY_POINTS = "perdure.providers"


def open_provider(
    store: str | os.PathLike[str] | Provider, *, clock: Clock | None = None
) -> Provider:
    """The provider that a store names; it is not opened yet.

    ``shop.db`` and ``sqlite:///shop.db`` are SQLite files, ``file:./store`` is a directory,
    ``memory:`` forgets, ``postgresql://...`` is a server. Another scheme is looked up among the
    entry points of the group ``perdure.providers``, whose target takes (url, clock).
    """
    if isinstance(store, Provider):
        return store
    text = os.fspath(store)
    if not text:
        raise UsageError("the store must not be empty; name a file, e.g. 'shop.db'")
    scheme = urlsplit(text).scheme if ":" in text else ""
    if len(scheme) <= 1:  # no scheme, or the letter of a drive
        return _sqlite(text, clock)
    match scheme:
        case "sqlite":
            return _sqlite(_path_of(text, "sqlite:"), clock)
        case "file":
            from perdure.providers.filesystem import FileSystemProvider

            return FileSystemProvider(_path_of(text, "file:"), clock=clock)
        case "memory":
            from perdure.providers.memory import InMemoryProvider

            return InMemoryProvider(clock=clock)
        case "postgresql" | "postgres":
            from perdure.providers.postgres import PostgresProvider

            return PostgresProvider(text)
        case _:
            return _third_party(text, scheme, clock)


def _sqlite(path: str, clock: Clock | None) -> Provider:
    from perdure.providers.sqlite import SqliteProvider

    return SqliteProvider(path, clock=clock)


def _path_of(url: str, prefix: str) -> str:
    """``scheme:///relative``, ``scheme:////absolute``, ``scheme:relative`` or ``scheme:/abs``."""
    rest = url.removeprefix(prefix)
    path = rest.removeprefix("///") if rest.startswith("///") else rest
    if not path or path.startswith("//"):
        raise UsageError(f"{url!r} names no local path; write e.g. {prefix}///shop")
    return path


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
        f"no provider for {url!r}; known are a path, 'sqlite:///x.db', 'file:./dir', 'memory:', "
        f"'postgresql://...', and entry points of the group {_ENTRY_POINTS!r}"
    )
