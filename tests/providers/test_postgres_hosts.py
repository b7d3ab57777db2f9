"""The choice of one server of several."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from campaigns import failover_cases, failover_hosts
from perdure.conformance.factories import start
from perdure.errors import InvalidValue, StoreUnavailable
from perdure.providers.postgres import PostgresProvider
from perdure.providers.postgres import hosts as hosts_module
from perdure.providers.postgres.address import HostAddress, address_of
from perdure.providers.postgres.faults import OldPrimary
from perdure.providers.postgres.hosts import Fence, Hosts, Server, ServerConnection
from perdure.providers.postgres.pool import ConnectionPool
from postgres_bouncer import missing_bouncer
from postgres_factory import new_schema
from postgres_server import PostgresServer, shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TWO = (HostAddress("a", "", "1"), HostAddress("b", "", "2"))


# --- lists of servers


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Without the variables that libpq reads, and with a service file of its own."""
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)
    services = tmp_path / "services"
    services.write_text("[shop]\nhost=a,b\nport=1,2\ndbname=shop\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    return monkeypatch


@pytest.mark.parametrize(
    ("dsn", "variables"),
    [
        ("postgresql://a:1,b:2/shop", {}),
        ("postgresql:///shop?host=a,b&port=1,2", {}),
        ("host=a,b port=1,2 dbname=shop", {}),
        ("dbname=shop", {"PGHOST": "a,b", "PGPORT": "1,2"}),
        ("postgresql:///shop", {"PGHOST": "a,b", "PGPORT": "1,2"}),
        ("service=shop", {}),
        ("", {"PGSERVICE": "shop"}),
    ],
)
def test_a_list_of_servers_is_read_in_every_form_of_libpq(
    environment: pytest.MonkeyPatch, dsn: str, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)

    address = address_of(dsn, "s", sessions=True)

    assert address.hosts == TWO
    assert address.location == "postgresql://a:1,b:2/shop schema s"


def test_a_name_that_no_server_can_have_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a server cannot have the name 'aaa"):
        address_of(f"postgresql://b,{'a' * 64}/shop", "s", sessions=True)

    assert address_of(f"host=/{'a' * 64} dbname=shop", "s", sessions=True).hosts


def test_a_name_that_is_not_resolved_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    server = shared_server()

    async def check() -> None:
        async def getaddrinfo(name: str, *_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        address = address_of(server.dsn, "s", sessions=True, connect_seconds=0.1)
        silent = HostAddress("no-answer")
        fence = Fence(lambda: None)

        both = replace(address, hosts=(silent, *address.hosts))
        connection = await Hosts(both, fence).connect()
        assert connection.server.host == address.hosts[0]
        await connection.close()

        only = Hosts(replace(address, hosts=(silent,)), fence)
        with pytest.raises(psycopg.OperationalError, match=r"no name was resolved within 0\.1 s"):
            await only.connect()
        await only.look()

    asyncio.run(check())


def test_addresses_of_servers_may_be_given_without_names(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PGPORT", "7")

    address = address_of("hostaddr=10.0.0.1,::1 dbname=shop", "s", sessions=True)

    assert address.hosts == (HostAddress("", "10.0.0.1", "7"), HostAddress("", "::1", "7"))
    assert address.location == "postgresql://10.0.0.1:7,[::1]:7/shop schema s"


def test_lists_of_different_length_are_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="names 2 servers, but port has 3 values"):
        address_of("host=a,b port=1,2,3", "s", sessions=True)


@pytest.mark.parametrize("attributes", ["standby", "read-only"])
def test_a_connection_string_that_asks_for_a_standby_is_refused(attributes: str) -> None:
    with pytest.raises(InvalidValue, match=f"target_session_attrs={attributes}"):
        PostgresProvider(f"postgresql://a,b/shop?target_session_attrs={attributes}")


def test_a_limit_for_connecting_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidValue, match="connect_timeout"):
        PostgresProvider("postgresql://a/shop?connect_timeout=soon")


# --- old primaries

HOST = HostAddress("a", "", "1")


def primary(timeline: int, system: int) -> Server:
    return Server(HOST, is_standby=False, is_read_only=False, timeline=timeline, system=system)


def test_a_newer_timeline_is_told_to_every_handle_of_the_process() -> None:
    async def check() -> list[str]:
        told: list[str] = []
        one, other = Fence(lambda: told.append("one")), Fence(lambda: told.append("other"))
        for fence in (one, other):
            fence.open()
            fence.settle(primary(3, system=1))
            fence.note(primary(3, system=1))
        one.note(primary(4, system=1))
        assert other.newest == 4
        assert isinstance(other.refusal(primary(3, system=1)), OldPrimary)
        assert other.refusal(primary(4, system=1)) is None
        await asyncio.sleep(0)
        for fence in (one, other):
            fence.close()
        return told

    assert sorted(asyncio.run(check())) == ["one", "other"]


def test_another_database_system_is_refused() -> None:
    fence = Fence(lambda: None)
    fence.settle(primary(9, system=2))
    fence.note(primary(9, system=2))

    fence.note(primary(10, system=3))

    assert fence.newest == 9
    assert "another database system" in str(fence.refusal(primary(10, system=3)))


def test_two_systems_in_one_list_are_not_mixed() -> None:
    async def check(other: PostgresServer) -> None:
        one = shared_server()
        dsn = f"{one.dsn},{other.socket_directory}"
        async with PostgresProvider(dsn, schema=new_schema(), retry_timeout=0.2) as provider:
            await provider.enqueue_for_orchestrator(start("x"))

            hosts = Hosts(address_of(other.dsn, "s", sessions=True), provider._store._fence)
            with pytest.raises(OldPrimary, match="another database system"):
                await hosts.connect()

    with PostgresServer(durable=False) as other:
        asyncio.run(check(other))


@pytest.fixture
def role() -> Iterator[str]:
    """A role that may log in and nothing else."""
    name = f"plain_{os.getpid()}"
    with psycopg.connect(shared_server().dsn, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        yield name
        owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_plain_role_knows_the_timeline_unless_it_may_not(role: str, is_allowed: bool) -> None:
    schema = new_schema()
    function = sql.SQL("EXECUTE ON FUNCTION pg_control_system()")
    with psycopg.connect(shared_server().dsn, autocommit=True) as owner:
        owner.execute(
            sql.SQL("SELECT {}.grant_worker({})").format(sql.Identifier(schema), sql.Literal(role))
        )
        if not is_allowed:
            owner.execute(sql.SQL("REVOKE {} FROM public").format(function))

    async def check() -> Any:
        dsn = shared_server().dsn.replace("postgres@", f"{role}@")
        async with PostgresProvider(dsn, schema=schema, auto_migrate=False) as provider:
            await provider.enqueue_for_orchestrator(start("x"))
            return provider._store._fence.newest

    try:
        assert asyncio.run(check()) == (1 if is_allowed else 0)
    finally:
        with psycopg.connect(shared_server().dsn, autocommit=True) as owner:
            owner.execute(sql.SQL("GRANT {} TO public").format(function))


def test_a_connection_that_was_found_before_a_newer_primary_was_seen_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_newest", {})
    found_first = hosts_module._first

    async def check() -> None:
        fence = Fence(lambda: None)

        async def found_late(*arguments: Any) -> ServerConnection | None:
            connection = await found_first(*arguments)
            assert connection is not None
            timeline = (connection.server.timeline or 0) + 1
            fence.note(replace(connection.server, timeline=timeline))
            return connection

        monkeypatch.setattr(hosts_module, "_first", found_late)
        directory = shared_server().socket_directory
        address = address_of(f"{shared_server().dsn},{directory}", "s", sessions=True)
        with pytest.raises(OldPrimary, match="is an old primary"):
            await Hosts(address, fence).connect()

    asyncio.run(check())


def test_a_connection_to_an_old_primary_does_not_stay_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_newest", {})

    async def check() -> None:
        fence = Fence(lambda: None)
        address = address_of(shared_server().dsn, "s", sessions=True)
        hosts = Hosts(address, fence)
        pool = ConnectionPool(hosts, size=2, prepare=True, retry_seconds=1)
        pool.open()
        connection = await hosts.connect()
        fence.note(replace(connection.server, timeline=(connection.server.timeline or 0) + 1))

        pool.adopt(connection)

        assert connection.closed
        pool.close()

    asyncio.run(check())


# --- with a primary and a standby: cases of the campaign


def test_a_process_does_not_go_back_to_an_old_primary() -> None:
    failover_hosts.split_brain_resurrected(starts=20)


def test_a_new_process_works_on_the_newest_primary() -> None:
    failover_hosts.split_brain_at_opening()


@pytest.mark.skipif(missing_bouncer() is not None, reason=str(missing_bouncer()))
def test_a_pooler_cannot_lead_commits_back_to_an_old_primary() -> None:
    failover_hosts.split_brain_behind_pooler(starts=5)


# --- a standby that is away, and servers that accept no writes


def test_deliveries_whose_turns_cannot_be_committed_are_not_counted() -> None:
    failover_cases.counted_while_standby_is_away()


def test_a_commit_whose_wait_for_the_standby_was_cancelled_is_not_acknowledged() -> None:
    failover_cases.acknowledged_when_cancelled(starts=2)


def test_a_standby_that_is_away_is_named_and_sessions_do_not_grow() -> None:
    failover_hosts.standby_away_said(seconds=14)


def test_opening_waits_until_a_listed_server_accepts_writes() -> None:
    failover_hosts.opened_before_promotion(seconds=1)


def test_a_standby_is_refused_with_the_same_words_however_it_is_asked_for() -> None:
    failover_hosts.standby_refused()


@pytest.mark.skipif(missing_bouncer() is not None, reason=str(missing_bouncer()))
def test_a_handle_behind_a_pooler_can_listen_to_the_server_itself() -> None:
    failover_hosts.listening_beside_pooler(steps=5)


# --- silent servers


def test_a_frozen_primary_is_left_as_soon_as_there_is_a_new_one() -> None:
    failover_hosts.frozen_primary()
    gc.collect()  # a connection that was left open would be warned of here


def test_a_server_that_says_nothing_does_not_hold_up_the_others() -> None:
    async def check() -> None:
        writers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(
            lambda _reader, writer: writers.append(writer), "127.0.0.1", 0
        )
        port = silent.sockets[0].getsockname()[1]
        directory = shared_server().socket_directory
        dsn = f"host=127.0.0.1,{directory} port={port},5432 user=postgres dbname=postgres"
        hosts = Hosts(address_of(dsn, "s", sessions=True), Fence(lambda: None))

        for _ in range(2):
            connection = await hosts.connect()
            assert connection.server.host.host == str(directory)
            await connection.close()

        silent.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)  # the transports close

    asyncio.run(check())


def test_each_server_of_a_list_says_why_it_was_not_taken() -> None:
    provider = PostgresProvider("postgresql://me:secret@127.0.0.1:1,127.0.0.1:2/shop")

    async def check() -> None:
        async with provider:
            pass

    provider._store.pool.retry_seconds = 0.1
    with pytest.raises(StoreUnavailable) as error:
        asyncio.run(check())

    assert "port 1 failed" in str(error.value)
    assert "port 2 failed" in str(error.value)
    assert "secret" not in str(error.value)
