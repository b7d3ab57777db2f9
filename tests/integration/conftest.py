"""Runs async tests, and gives each scenario every kind of runtime that it must work on."""

import asyncio
import inspect

import pytest

from perdure import InMemoryProvider, Runtime, RuntimeOptions
from perdure.testing import Environment


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(params=["memory", "sqlite"])
def make_provider(request, tmp_path):
    """A function that opens the store of this test; a durable one may be opened again."""

    def make():
        if request.param == "sqlite":
            from perdure import SqliteProvider

            return SqliteProvider(tmp_path / "store.db")
        return InMemoryProvider()

    return make


@pytest.fixture(params=["memory", "sqlite", "directory", "postgres"])
def make_every_store(request, tmp_path):
    """Like ``make_provider``, for each kind of store: for scenarios that a store could break."""
    from perdure import FileSystemProvider, PostgresProvider, SqliteProvider

    kind = request.param
    if kind == "postgres":
        from postgres_factory import new_schema
        from postgres_server import shared_server

        schema = new_schema()
        return lambda: PostgresProvider(shared_server().dsn, schema=schema, pool_size=3)
    return {
        "memory": InMemoryProvider,
        "sqlite": lambda: SqliteProvider(tmp_path / "store.db"),
        "directory": lambda: FileSystemProvider(tmp_path / "store"),
    }[kind]


@pytest.fixture(params=["cached", "always replayed"])
def replays(request):
    """Run each scenario as users do, and once with every turn replayed and every commit validated.

    A store trusts the commits of a runtime. The second run proves that it may.
    """
    always = request.param == "always replayed"
    if always:
        request.getfixturevalue("commits_are_validated")
    return always


@pytest.fixture
def make_runtime(replays, make_provider):
    """A function that makes a runtime on the real clock: timers in tests are milliseconds."""

    def make(handlers, provider=None, **settings):
        settings.setdefault("always_replay", replays)
        return Runtime(provider or make_provider(), handlers, options=RuntimeOptions(**settings))

    return make


@pytest.fixture
def make_environment(replays):
    """A function that makes a test environment: time jumps, so timers may be days."""

    def make(handlers, **settings):
        return Environment(handlers, always_replay=replays, **settings)

    return make
