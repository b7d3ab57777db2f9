"""The address of a store: its servers, connection string with safe defaults, schema, shown text.

Refuses names and servers on which the store would be unsafe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import conninfo, pq

from perdure.errors import InvalidValue, StoreRefused
from perdure.providers.url import without_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER_VERSION_MIN: Final = 140_000
ANSWER_SECONDS: Final = 35.0
"""The wait for an answer. A statement takes milliseconds; one that runs this long is stuck."""
CONNECT_SECONDS: Final = 5.0
_SERVER_SHARE: Final = 6 / 7
"""The server gives up first; the client's limit is for an answer that never comes."""

PRIMARY_WANTED: Final = (
    "connect to the primary, or name all servers in the connection string: the store finds the "
    "one that accepts writes"
)

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PARAMETERS: Final = {
    "application_name": "perdure",
    "client_encoding": "utf8",
    # A peer that vanished silently is noticed within 15 seconds.
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "12000",
}
_PORT: Final = "5432"
_PLACE: Final = ("host", "hostaddr", "port")
_CHOICE: Final = ("target_session_attrs", "load_balance_hosts")
_STANDBYS: Final = frozenset({"standby", "read-only"})


@dataclass(frozen=True, slots=True)
class HostAddress:
    """One entry of the list of servers; an empty text means the default of libpq."""

    host: str = ""
    hostaddr: str = ""
    port: str = ""

    def __str__(self) -> str:
        """Return it as in a URL."""
        host = self.host or self.hostaddr or "local"
        host = f"[{host}]" if ":" in host else host
        return host if self.port in {"", _PORT} else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One schema of one database, on one of several servers."""

    conninfo: str = field(repr=False)
    """Everything but the server."""
    hosts: tuple[HostAddress, ...] = field(repr=False)
    schema: str
    location: str
    """Shown to people: without user and password."""
    answer_seconds: float
    """The longest time for the answer to a statement."""
    connect_seconds: float
    """The longest time for a new connection."""

    def for_listening(self) -> StoreAddress:
        """Return the address for a connection that waits: no statement of it may time out."""
        options = conninfo.conninfo_to_dict(self.conninfo)
        options.pop("options", None)
        return replace(self, conninfo=conninfo.make_conninfo("", **options))

    def conninfo_of(self, host: HostAddress) -> str:
        """Return the connection string for one server."""
        return conninfo.make_conninfo(
            self.conninfo,
            host=host.host,
            hostaddr=host.hostaddr,
            port=host.port,
            # The store looks for itself which server accepts writes.
            target_session_attrs="any",
        )


def address_of(
    dsn: str,
    schema: str,
    *,
    sessions: bool,
    answer_seconds: float = ANSWER_SECONDS,
    connect_seconds: float | None = None,
) -> StoreAddress:
    """Return the address; raise InvalidValue for a bad schema name or connection string.

    ``sessions=False``: a pooler may give each transaction another session, and takes no settings
    for a session. ``connect_seconds=None``: as the connection string says.
    """
    if not _SCHEMA.fullmatch(schema):
        raise InvalidValue(
            f"a schema name consists of a-z, 0-9 and _, at most 63 characters, not {schema!r}"
        )
    try:
        given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise InvalidValue(
            f"the connection string cannot be read: {_without_secrets(error, dsn)}"
        ) from None
    if given.get("target_session_attrs") in _STANDBYS:
        raise InvalidValue(
            f"target_session_attrs={given['target_session_attrs']} asks for a server that accepts "
            f"no writes; {PRIMARY_WANTED}"
        )
    known = _as_libpq_knows(given)
    if connect_seconds is None:
        connect_seconds = _connect_seconds(known.get("connect_timeout"))
    merged = {**_PARAMETERS, **given, "connect_timeout": str(max(2, round(connect_seconds)))}
    if sessions:
        merged["options"] = f"{_settings(answer_seconds)} {given.get('options', '')}".strip()
    for name in (*_PLACE, *_CHOICE):
        merged.pop(name, None)
    hosts = _hosts(known)
    return StoreAddress(
        conninfo.make_conninfo("", **merged),
        hosts,
        schema,
        _location(hosts, known, schema),
        answer_seconds,
        connect_seconds,
    )


def _connect_seconds(given: str | None) -> float:
    try:
        # libpq takes 0 or less for no limit. Such a wait would block the pool.
        return max(int(given or 0), 0) or CONNECT_SECONDS
    except ValueError:
        raise InvalidValue(f"connect_timeout is a number of seconds, not {given!r}") from None


def _settings(answer_seconds: float) -> str:
    """Return the settings of a session."""
    statement_ms = round(answer_seconds * _SERVER_SHARE * 1000)
    return (
        f"-c statement_timeout={statement_ms} -c lock_timeout={min(10_000, statement_ms)} "
        "-c idle_in_transaction_session_timeout=30s "
        r"-c default_transaction_isolation=read\ committed"
    )


def _as_libpq_knows(given: Mapping[str, Any]) -> dict[str, str]:
    """Return all options, with those of the environment and of a service file.

    libpq reads them when a connection begins. It refuses the last of these options after it has
    read the others and before it does anything.
    """
    refused = conninfo.make_conninfo("", **{**given, "target_session_attrs": "none"})
    found = pq.PGconn.connect_start(refused.encode())
    return {each.keyword.decode(): each.val.decode() for each in found.info if each.val is not None}


def _hosts(known: Mapping[str, str]) -> tuple[HostAddress, ...]:
    lists = {name: known.get(name, "").split(",") for name in _PLACE}
    length = max(len(lists["host"]), len(lists["hostaddr"]))
    for name, values in lists.items():
        if len(values) == 1:
            lists[name] = values * length
        elif len(values) != length:
            raise InvalidValue(
                f"the connection string names {length} servers, but {name} has {len(values)} "
                "values; give it one, or one for each server"
            )
    for name in lists["host"]:
        try:
            name.encode("idna")
        except UnicodeError:
            if not name.startswith(("/", "@")):
                raise InvalidValue(f"a server cannot have the name {name!r}") from None
    return tuple(map(HostAddress, *lists.values()))


def check_server(facts: Mapping[str, str], location: str) -> None:
    """Raise StoreRefused for a server that cannot hold a store.

    ``facts``: settings of a fresh session, by name.
    """
    version = int(facts["server_version_num"])
    if version < SERVER_VERSION_MIN:
        raise StoreRefused(
            "open",
            f"{location}: the server is version {version // 10_000}, at least "
            f"{SERVER_VERSION_MIN // 10_000} is needed",
        )
    if facts["server_encoding"] != "UTF8":
        raise StoreRefused(
            "open",
            f"{location}: the database is encoded as {facts['server_encoding']}, not as UTF8; "
            "create one with ENCODING 'UTF8'",
        )
    if facts["transaction_isolation"] != "read committed":
        raise StoreRefused(
            "open",
            f"{location}: transactions are {facts['transaction_isolation']} by default, but must "
            "be read committed; ALTER ROLE ... SET default_transaction_isolation",
        )


def _without_secrets(error: psycopg.ProgrammingError, dsn: str) -> str:
    """Return the message without parts of the password.

    Only in a URL is it known which part of the string the message quotes.
    """
    text = str(error).strip()
    return without_secrets(text, dsn) if "://" in dsn else re.sub('"[^"]*"', "***", text)


def _location(hosts: tuple[HostAddress, ...], known: Mapping[str, str], schema: str) -> str:
    database = known.get("dbname") or known.get("user") or ""
    shown = f"{','.join(map(str, hosts))}/{database}"
    if "@" in shown:
        shown = "***"  # a password with / or @ in it was taken for a part of the address
    return f"postgresql://{shown} schema {schema}"
