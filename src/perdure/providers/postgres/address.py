"""The address of a store: connection string with safe defaults, schema, and a text for people.

Refuses names and servers on which the store would be unsafe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import conninfo

from perdure.errors import InvalidValue, StoreRefused
from perdure.providers.url import without_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER_VERSION_MIN: Final = 140_000
STATEMENT_TIMEOUT_SECONDS: Final = 30
"""A statement takes milliseconds; one that runs this long is stuck."""
ANSWER_SECONDS: Final = STATEMENT_TIMEOUT_SECONDS + 5.0
"""The server gives up first; this limits the wait for an answer that never comes."""

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PARAMETERS: Final = {
    "application_name": "perdure",
    "client_encoding": "utf8",
    "connect_timeout": "10",
    # A peer that vanished silently is noticed within half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_SETTINGS: Final = (
    f"-c statement_timeout={STATEMENT_TIMEOUT_SECONDS}s -c lock_timeout=10s "
    "-c idle_in_transaction_session_timeout=30s "
    r"-c default_transaction_isolation=read\ committed"
)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One schema of one database."""

    conninfo: str = field(repr=False)
    schema: str
    location: str
    """Shown to people: without user and password."""

    def for_listening(self) -> StoreAddress:
        """Return the address for a connection that waits: no statement of it may time out."""
        options = conninfo.conninfo_to_dict(self.conninfo)
        options.pop("options", None)
        return replace(self, conninfo=conninfo.make_conninfo("", **options))


def address_of(dsn: str, schema: str, *, sessions: bool) -> StoreAddress:
    """Return the address; raise InvalidValue for a bad schema name or connection string.

    ``sessions=False``: a pooler may give each transaction another session, and takes no settings
    for a session.
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
    settings = {"options": _SETTINGS} if sessions else {}
    if "options" in given and sessions:
        settings = {"options": f"{_SETTINGS} {given['options']}"}
    if "," in str(given.get("host", "")):
        given.setdefault("target_session_attrs", "read-write")
    merged = {**_PARAMETERS, **given, **settings}
    return StoreAddress(conninfo.make_conninfo("", **merged), schema, _location(given, schema))


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
    if facts["in_recovery"] == "true" or facts["transaction_read_only"] == "on":
        raise StoreRefused(
            "open",
            f"{location} is read-only (a replica?); connect to the primary, or name all servers "
            "in the connection string and add target_session_attrs=read-write",
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


def _location(given: Mapping[str, Any], schema: str) -> str:
    host = given.get("host") or given.get("hostaddr") or "local"
    host = f"[{host}]" if ":" in host else host
    port = f":{given['port']}" if "port" in given else ""
    database = given.get("dbname") or given.get("user") or ""
    shown = f"{host}{port}/{database}"
    if "@" in shown:
        shown = "***"  # a password with / or @ in it was taken for a part of the address
    return f"postgresql://{shown} schema {schema}"
