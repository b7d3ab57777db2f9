"""Addresses of Postgres stores: servers, schemas, migrations and roles."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from perdure.conformance.factories import start
from perdure.errors import (
    InvalidValue,
    StoreClosed,
    StoreMoved,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres.address import address_of
from perdure.providers.postgres.hosts import Hosts
from perdure.providers.records import InstanceQuery
from perdure.providers.url import open_provider
from postgres_factory import new_schema
from postgres_load import Load
from postgres_server import shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE_NAMES = (
    *("", "A", "1a", "a-b", "a b", "a.b", 'a"b', "a'b", "a;b", "a\0b", "ä", "a" * 64),
    *('x"; DROP SCHEMA public; --', "pg_catalog.x", "a\n", "$1", "%s", "{}", "../a"),
)


@pytest.fixture
def owner() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_server().dsn, autocommit=True) as connection:
        yield connection


def execute(connection: psycopg.Connection[Any], statement: str, **names: str) -> Any:
    """With names as identifiers."""
    identifiers = {key: sql.Identifier(name) for key, name in names.items()}
    return connection.execute(sql.SQL(statement).format(**identifiers))


def open_and_close(provider: PostgresProvider) -> None:
    async def check() -> None:
        async with provider:
            pass

    asyncio.run(check())


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://ann:hunter2@db:1/shop", "postgresql://db:1/shop schema s"),
        ("host=::1 password=hunter2 dbname=shop", "postgresql://[::1]/shop schema s"),
        ("postgresql://ann:hun/hunter2@db/shop", "postgresql://*** schema s"),
        ("postgresql://ann:hun@hunter2@db/shop", "postgresql://*** schema s"),
    ],
)
def test_an_address_is_shown_without_its_password(dsn: str, shown: str) -> None:
    address = address_of(dsn, "s", sessions=True)

    assert address.location == shown
    assert "hunter2" not in repr(address)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ann:hunter2%@db/shop",
        "postgresql://ann:hunter2@[db/shop",
        "postgresql://ann:1?hunter2/@db/shop",
        "host=db password=my hunter2",
        "host=db hunter2",
    ],
)
def test_a_connection_string_that_cannot_be_read_is_not_quoted(dsn: str) -> None:
    with pytest.raises(InvalidValue, match="cannot be read") as refused:
        address_of(dsn, "s", sessions=True)

    assert "hunter2" not in str(refused.value)


# --- schemas


@pytest.mark.parametrize("password", ["", ":plain", ":hun?ter2", ":hun#ter2", ":h?u#n"])
@pytest.mark.parametrize("form", ["{dsn}&schema={schema}", "{head}?schema={schema}&{query}"])
def test_a_url_names_a_schema_beside_any_password(password: str, form: str) -> None:
    schema = new_schema()
    dsn = shared_server().dsn.replace("postgres@", f"postgres{password}@")
    head, _, query = dsn.rpartition("?")
    url = form.format(dsn=dsn, head=head, query=query, schema=schema)

    async def location() -> str:
        async with open_provider(url) as provider:
            admin = provider.admin
            assert admin is not None
            return (await admin.get_store_info()).location

    assert asyncio.run(location()).endswith(f"/postgres schema {schema}")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_schema_that_is_not_a_plain_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue):
        PostgresProvider(shared_server().dsn, schema=name)


def test_two_schemas_of_one_database_know_nothing_of_each_other() -> None:
    async def check() -> None:
        dsn = shared_server().dsn
        async with (
            PostgresProvider(dsn, schema=new_schema()) as one,
            PostgresProvider(dsn, schema=new_schema()) as other,
        ):
            await one.enqueue_for_orchestrator(start("x"))

            assert await other.fetch_orchestration_item(1_000, 0) is None
            assert await one.fetch_orchestration_item(1_000, 0) is not None

    asyncio.run(check())


# --- servers


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    provider = PostgresProvider("postgresql://me:secret@127.0.0.1:1/shop", retry_timeout=0.1)

    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/shop") as error:
        open_and_close(provider)

    assert "secret" not in str(error.value)


def test_a_read_only_server_is_refused() -> None:
    dsn = f"{shared_server().dsn}&options=-c%20default_transaction_read_only%3Don"

    with pytest.raises(StoreRefused, match="read-only"):
        open_and_close(PostgresProvider(dsn, schema="never_made"))


def test_a_database_that_cannot_hold_every_text_is_refused(
    owner: psycopg.Connection[Any],
) -> None:
    name = f"ascii_{os.getpid()}"
    options = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    execute(owner, f"CREATE DATABASE {{name}} {options}", name=name)
    dsn = shared_server().dsn.replace("/postgres?", f"/{name}?")

    with pytest.raises(StoreRefused, match="UTF8"):
        open_and_close(PostgresProvider(dsn))

    execute(owner, "DROP DATABASE {name}", name=name)


def test_transactions_that_are_not_read_committed_are_refused() -> None:
    dsn = f"{shared_server().dsn}&options=-c%20default_transaction_isolation%3Dserializable"

    with pytest.raises(StoreRefused, match="read committed"):
        open_and_close(PostgresProvider(dsn, schema=new_schema(), prepare=False))


def test_a_store_that_was_moved_points_at_its_new_place() -> None:
    schema, dsn = new_schema(), shared_server().dsn

    async def move() -> None:
        async with PostgresProvider(dsn, schema=schema) as provider:
            await provider.admin.mark_moved("elsewhere.db")

    asyncio.run(move())

    with pytest.raises(StoreMoved, match=r"elsewhere\.db"):
        open_and_close(PostgresProvider(dsn, schema=schema))
    open_and_close(PostgresProvider(dsn, schema=schema, allow_moved=True))


# --- migrations


def test_eight_processes_may_start_on_an_empty_database_at_once(
    owner: psycopg.Connection[Any],
) -> None:
    schema = f"eight_{os.getpid()}"
    program = (
        "import asyncio, sys\n"
        "from perdure.providers.postgres import PostgresProvider\n"
        "async def main():\n"
        "    async with PostgresProvider(sys.argv[1], schema=sys.argv[2]) as provider:\n"
        "        await provider.fetch_orchestration_item(1000, 0)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, shared_server().dsn, schema]

    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(8)]
    said = [process.communicate()[1] for process in processes]

    assert [process.returncode for process in processes] == [0] * 8, said
    applied = execute(owner, "SELECT number FROM {schema}.migrations", schema=schema).fetchall()
    assert sorted(applied) == [(number,) for number in range(1, len(applied) + 1)]


def test_what_is_due_can_be_told_without_applying_it(owner: psycopg.Connection[Any]) -> None:
    schema = f"dry_{os.getpid()}"
    provider = PostgresProvider(shared_server().dsn, schema=schema)

    due = asyncio.run(provider.migrate(dry_run=True))

    assert [migration.number for migration in due] == [*range(1, len(due)), len(due) - 1]
    assert [migration.name for migration in due][-1] == "functions"
    found = owner.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
    assert found.fetchall() == []


def test_without_auto_migrate_a_schema_that_lacks_something_is_refused() -> None:
    provider = PostgresProvider(shared_server().dsn, schema="never_made", auto_migrate=False)

    with pytest.raises(StoreRefused, match="perdure db migrate"):
        open_and_close(provider)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "INSERT INTO {schema}.migrations (number, name, checksum) VALUES (99, 'next', '')",
            "newer",
        ),
        ("UPDATE {schema}.store SET format_version = 99", "newer"),
        ("UPDATE {schema}.migrations SET checksum = '' WHERE number = 2", "another build"),
    ],
)
def test_a_schema_of_another_version_is_refused(
    owner: psycopg.Connection[Any], change: str, said: str
) -> None:
    schema = new_schema()
    execute(owner, change, schema=schema)

    with pytest.raises(StoreRefused, match=said):
        open_and_close(PostgresProvider(shared_server().dsn, schema=schema))


def test_a_migration_that_fails_leaves_nothing_behind(owner: psycopg.Connection[Any]) -> None:
    schema = f"half_{os.getpid()}"
    execute(owner, "CREATE SCHEMA {schema}", schema=schema)
    # In the way of the third table or so.
    execute(owner, "CREATE TABLE {schema}.history (mine text)", schema=schema)

    with pytest.raises(Exception, match="history"):
        open_and_close(PostgresProvider(shared_server().dsn, schema=schema))

    left = owner.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace", (schema,)
    )
    assert left.fetchall() == [("history",)]


# --- roles


@pytest.fixture
def role(owner: psycopg.Connection[Any]) -> Iterator[str]:
    name = f"role_{os.getpid()}"
    execute(owner, "CREATE ROLE {role} LOGIN", role=name)
    yield name
    execute(owner, "DROP OWNED BY {role}; DROP ROLE {role}", role=name)


def as_role(role: str) -> str:
    return shared_server().dsn.replace("postgres@", f"{role}@")


def test_a_worker_role_can_do_all_but_migrate(owner: psycopg.Connection[Any], role: str) -> None:
    schema = new_schema()
    owner.execute(
        sql.SQL("SELECT {}.grant_worker({})").format(sql.Identifier(schema), sql.Literal(role))
    )

    async def check() -> None:
        async with PostgresProvider(as_role(role), schema=schema) as provider:
            load = Load(3)
            await load.start(provider)
            await load.run([provider], fetchers=2, workers=2)
            await load.check(provider)
            await provider.admin.delete_instance("root-0")
            await provider.admin.list_instances(InstanceQuery(text="root"))

    asyncio.run(check())
    with psycopg.connect(as_role(role)) as worker:
        for statement in (
            "DELETE FROM {schema}.migrations",
            "CREATE TABLE {schema}.mine ()",
            "DROP TABLE {schema}.history",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                execute(worker, statement, schema=schema)
            worker.rollback()


def test_opening_waits_for_a_connection_that_is_free(
    owner: psycopg.Connection[Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = new_schema()
    owner.execute(
        sql.SQL("SELECT {}.grant_worker({})").format(sql.Identifier(schema), sql.Literal(role))
    )
    execute(owner, "ALTER ROLE {role} CONNECTION LIMIT 1", role=role)
    connect, tries = Hosts.connect, 0

    with psycopg.connect(as_role(role)) as taken:

        async def counted(self: Hosts) -> Any:
            nonlocal tries
            tries += 1
            if tries == 3:
                taken.close()
            return await connect(self)

        monkeypatch.setattr(Hosts, "connect", counted)
        impatient = PostgresProvider(as_role(role), schema=schema, retry_timeout=0)
        with pytest.raises(StoreUnavailable, match=r"too many connections.*try again later"):
            open_and_close(impatient)
        open_and_close(PostgresProvider(as_role(role), schema=schema))
    assert tries >= 3


def test_a_server_that_refuses_the_role_is_not_called_unreachable(
    owner: psycopg.Connection[Any], role: str
) -> None:
    execute(owner, "ALTER ROLE {role} NOLOGIN", role=role)
    nowhere = shared_server().dsn.replace("/postgres?", "/nosuchdb?")

    for dsn, said in (
        (as_role("missing_role"), 'role "missing_role" does not exist'),
        (as_role(role), "is not permitted to log in"),
        (nowhere, 'database "nosuchdb" does not exist'),
    ):
        with pytest.raises(StoreUnavailable, match=said) as refused:
            open_and_close(PostgresProvider(dsn))
        assert "check user, password and database" in refused.value.message
        assert "reachable" not in refused.value.message


def test_a_role_without_rights_is_told_how_to_get_them(role: str) -> None:
    with pytest.raises(StoreRefused, match="grant_worker"):
        open_and_close(PostgresProvider(as_role(role), schema=new_schema()))


def test_a_role_that_may_not_make_the_schema_is_told_who_may(role: str) -> None:
    provider = PostgresProvider(as_role(role), schema=f"none_{os.getpid()}")

    for call in (provider.open, provider.migrate):
        with pytest.raises(StoreRefused, match="permission denied for database") as refused:
            asyncio.run(call())
        assert "perdure db migrate" in refused.value.message
        assert "GRANT CREATE ON DATABASE" in refused.value.message
        assert "function grant_worker" not in refused.value.message


def test_a_role_that_may_not_change_the_schema_is_told_who_may(
    owner: psycopg.Connection[Any], role: str
) -> None:
    schema = new_schema()
    owner.execute(
        sql.SQL("SELECT {}.grant_worker({})").format(sql.Identifier(schema), sql.Literal(role))
    )
    last = sql.SQL(
        "DELETE FROM {0}.migrations WHERE number = (SELECT max(number) FROM {0}.migrations)"
    )
    owner.execute(last.format(sql.Identifier(schema)))

    with pytest.raises(StoreRefused, match="permission denied") as refused:
        open_and_close(PostgresProvider(as_role(role), schema=schema))

    assert "perdure db migrate" in refused.value.message


def test_a_reader_sees_how_things_stand_but_no_payload(
    owner: psycopg.Connection[Any], role: str
) -> None:
    schema = new_schema()
    owner.execute(
        sql.SQL("SELECT {}.grant_reader({})").format(sql.Identifier(schema), sql.Literal(role))
    )

    async def write() -> None:
        async with PostgresProvider(shared_server().dsn, schema=schema) as provider:
            await provider.enqueue_for_orchestrator(start("x"))

    asyncio.run(write())
    with psycopg.connect(as_role(role), autocommit=True) as reader:
        seen = execute(reader, "SELECT instance_id FROM {s}.instance_overview", s=schema)
        assert seen.fetchall() == [("x",)]
        for view in ("message_overview", "work_overview", "execution_overview"):
            execute(reader, "SELECT * FROM {schema}.{view}", schema=schema, view=view)
        for table in ("instances", "history", "orchestrator_queue", "kv_store"):
            for statement in ("SELECT * FROM {schema}.{table}", "DELETE FROM {schema}.{table}"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    execute(reader, statement, schema=schema, table=table)


# --- handles


def test_a_closed_handle_says_so() -> None:
    provider = PostgresProvider(shared_server().dsn, schema=new_schema())
    open_and_close(provider)

    with pytest.raises(StoreClosed):
        asyncio.run(provider.read("x"))


def test_another_event_loop_may_only_renew() -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            with pytest.raises(UsageError, match="event loop"):
                await asyncio.to_thread(lambda: asyncio.run(provider.read("x")))

    asyncio.run(check())


def test_a_handle_that_a_fork_inherited_is_refused() -> None:
    async def check() -> None:
        async with PostgresProvider(shared_server().dsn, schema=new_schema()) as provider:
            provider._store._process_id += 1  # as if this were the child

            with pytest.raises(StoreClosed, match="fork"):
                await provider.read("x")

            provider._store._process_id -= 1

    asyncio.run(check())


def test_a_url_may_name_the_schema():
    dsn, schema = shared_server().dsn, new_schema()
    given = f"{dsn}{'&' if '?' in dsn else '?'}schema={schema}"

    async def count(provider):
        async with provider:
            return await provider.admin.count_instances(InstanceQuery())

    async def check():
        async with PostgresProvider(dsn, schema=schema) as one:
            await one.enqueue_for_orchestrator(start("a"))
        assert await count(open_provider(given)) == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("tail", "said"), [("?bad=1", "invalid URI query parameter"), ("?schema=No-Name", "No-Name")]
)
def test_a_url_that_cannot_be_read_says_why(tail, said):
    with pytest.raises(InvalidValue, match=said):
        open_provider(f"postgresql://me@127.0.0.1/shop{tail}")
