"""The URLs and paths that a user writes for a store."""

import importlib
import inspect
import sys
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from perdure.errors import InvalidValue, UsageError
from perdure.providers.url import (
    OPTIONS,
    local_path,
    open_provider,
    shown_url,
    without_secrets,
)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("shop.db", "shop.db"),
        ("/srv/shop.db", "/srv/shop.db"),
        ("sqlite:shop.db", "shop.db"),
        ("sqlite:///shop.db", "shop.db"),
        ("sqlite:////srv/shop.db", "/srv/shop.db"),
        ("SQLite:///shop.db", "shop.db"),
        ("file:./store", "./store"),
        ("file:/srv/store", "/srv/store"),
        ("file:///srv/store", "/srv/store"),
        ("file:////srv/store", "/srv/store"),
        ("sqlite:///shop.db?durability=relaxed", "shop.db"),
        ("sqlite:shop.db?", "shop.db"),
        ("file:./store?archive=30d&orphan_grace=5s", "./store"),
        ("what?.db", "what?.db"),
        ("c:/shop.db", "c:/shop.db"),
        (r"C:\srv\shop.db", r"C:\srv\shop.db"),
    ],
)
def test_a_local_store_is_a_path(written, path):
    assert local_path(written) == path


@pytest.mark.parametrize(
    "url",
    ["memory:", "postgresql://db.example/shop", "toy:somewhere", "host=a,b dbname=shop"],
)
def test_other_stores_have_no_path(url):
    assert local_path(url) is None


@pytest.mark.parametrize("url", ["sqlite://shop.db", "file://shop", "sqlite:", "file:///"])
def test_a_url_without_a_local_path_is_refused_with_an_example(url):
    with pytest.raises(UsageError, match=r"write e\.g\.") as refused:
        open_provider(url)

    assert repr(url) in str(refused.value)


_RIGHT_VALUES = {
    "archive": "30d",
    "auto_migrate": "false",
    "durability": "relaxed",
    "listen": "false",
    "answer_timeout": "5s",
    "mail_bytes_max": "1",
    "mail_max": "1",
    "orphan_grace": "5s",
    "pool_size": "7",
    "prepare": "false",
    "retry_timeout": "500ms",
    "schema": "shop",
}
_PLACES = {
    "sqlite": ("sqlite:///shop.db", "perdure.providers.sqlite.SqliteProvider"),
    "file": ("file:./store", "perdure.providers.directory.FileSystemProvider"),
    "memory": ("memory:", "perdure.providers.sqlite.memory.InMemoryProvider"),
    "postgresql": ("postgresql://db.example/shop", "perdure.providers.postgres.PostgresProvider"),
}
_EVERY_OPTION = [(scheme, name) for scheme, options in OPTIONS.items() for name in options]


@pytest.mark.parametrize(("scheme", "option"), _EVERY_OPTION)
def test_an_option_of_the_url_reaches_the_constructor(scheme, option, monkeypatch):
    place, provider = _PLACES[scheme]
    given = {}
    monkeypatch.setattr(provider, lambda *_, **named: given.update(named))

    open_provider(f"{place}?{option}={_RIGHT_VALUES[option]}")

    as_said = {
        "30d": 30 * 86_400, "false": False, "5s": 5, "1": 1, "7": 7, "500ms": 0.5
    }  # fmt: skip
    value = _RIGHT_VALUES[option]
    assert given[option] == as_said.get(value, value)


@pytest.mark.parametrize(("scheme", "option"), _EVERY_OPTION)
def test_the_provider_has_each_option_of_its_urls(scheme, option):
    module, _, name = _PLACES[scheme][1].rpartition(".")
    constructor = getattr(importlib.import_module(module), name).__init__

    assert option in inspect.signature(constructor).parameters


@pytest.mark.parametrize("scheme", OPTIONS)
@pytest.mark.parametrize("tail", ["durabilty=relaxed", "mode=ro", "Durability=full"])
def test_an_unknown_option_is_refused_with_the_known_ones(scheme, tail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = next(iter(OPTIONS[scheme]))
    url = f"{_PLACES[scheme][0]}?{first}={_RIGHT_VALUES[first]}&{tail}"

    for asked in (open_provider, local_path) if scheme in {"sqlite", "file"} else (open_provider,):
        with pytest.raises(UsageError) as refused:
            asked(url)

        assert all(option in str(refused.value) for option in OPTIONS[scheme])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///shop.db?durability=fast", "'full' or 'relaxed', not 'fast'"),
        ("file:./store?archive=soon", "archive in the URL of a store: 'soon' is no length of time"),
        ("sqlite:///shop.db?orphan_grace=1s&orphan_grace=2s", "'orphan_grace' twice"),
        ("memory:?mail_max=many", "mail_max in the URL of a store is a whole number, not 'many'"),
        ("memory:?mail_max=0", "mail_max must be at least 1, not 0"),
        ("shop.db?durability=relaxed", "write sqlite:///shop.db[?]durability=relaxed"),
    ],
)
def test_a_wrong_option_of_a_local_store_is_named_with_what_to_write(url, said):
    with pytest.raises(UsageError, match=said):
        open_provider(url)


def test_a_path_object_may_have_a_question_mark(tmp_path):
    assert open_provider(Path(tmp_path) / "shop.db?durability=relaxed").name == "sqlite"


def test_a_path_object_is_a_file(tmp_path):
    assert open_provider(Path(tmp_path) / "shop.db").name == "sqlite"


@pytest.mark.parametrize("store", [None, 5, b"shop.db"])
def test_what_cannot_be_a_store_is_named(store):
    with pytest.raises(UsageError, match=f"a store is a path, a URL or a Provider, not {store!r}"):
        open_provider(store)


def test_an_unknown_scheme_is_named_without_the_password_behind_it():
    with pytest.raises(UsageError, match="no provider for 'mysql' stores") as refused:
        open_provider("mysql://ann:s3cret@db.example/shop")

    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("prepare=maybe", "prepare .* not 'maybe'; write prepare=true or prepare=false"),
        ("listen=", "listen .* not ''; write listen=true or listen=false"),
        ("listen", "listen .* not ''; write listen=true or listen=false"),
        ("pool_size=many", "pool_size .* not 'many'; write e.g. pool_size=10"),
        ("pool_size=-5", "pool_size .* not '-5'; write e.g. pool_size=10"),
        (f"pool_size={'9' * 5_000}", "pool_size .* not '9999"),
        ("pool_size=1", "pool_size must be at least 2, not 1"),
        ("schema=No-Name", "not 'No-Name'"),
    ],
)
def test_a_wrong_option_of_a_server_is_named_with_what_to_write(tail, said):
    with pytest.raises(InvalidValue, match=said):
        open_provider(f"postgresql://db.example/shop?sslmode=require&{tail}")


@pytest.mark.parametrize("option", ["prepare", "listen", "pool_size", "schema"])
def test_the_end_of_a_password_is_not_taken_for_an_option(option):
    url = f"postgresql://ann:s3?{option}=cret@db.example/shop"

    assert open_provider(url).name == "postgres"


def test_a_driver_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "perdure.providers.postgres", None)

    with pytest.raises(UsageError, match=r"pip install 'perdure\[postgres\]'"):
        open_provider("postgresql://db.example/shop")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("host=a.example,b.example dbname=shop", "postgresql://a.example,b.example/shop"),
        ("service=none dbname=shop hostaddr=10.0.0.1,10.0.0.2", "service=none"),
        ("dbname = shop user=me", "/shop"),
    ],
)
def test_a_connection_string_of_libpq_is_a_server(written, shown, monkeypatch, tmp_path):
    services = tmp_path / "services"
    services.write_text("[none]\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))

    provider = open_provider(written)

    assert provider.name == "postgres"
    assert shown in f"{provider._store.address.location} {shown_url(written)}"
    assert [each.name for each in tmp_path.iterdir()] == ["services"]


def test_the_server_to_listen_to_may_be_named_in_the_url(monkeypatch):
    given = {}
    monkeypatch.setattr(_PLACES["postgresql"][1], lambda *_, **named: given.update(named))
    direct = "postgresql://me@db.example:5432/shop"

    open_provider(f"postgresql://pool.example:6432/shop?prepare=false&listen={quote(direct, '')}")

    assert given["listen"] == direct


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("host=a user=me password=s3cret", "host=a user=me password=***"),
        ("host=a password = 's3 cret' dbname=shop", "host=a password =*** dbname=shop"),
        (
            "postgresql://h/d?listen=postgresql%3A%2F%2Fme%3As3cret%40db%2Fshop",
            "postgresql://h/d?listen=***",
        ),
    ],
)
def test_no_form_of_an_address_shows_its_password(url, shown):
    assert shown_url(url) == shown
    assert "cret" not in without_secrets(f"cannot open {url}, {unquote(url)}", url)


@pytest.mark.parametrize("url", ["postgresql://[", "sqlite://[", "postgresql://u:secret@["])
def test_a_url_that_cannot_be_read_is_a_usage_error_without_its_password(url):
    with pytest.raises(UsageError, match="is no URL of a store") as refused:
        open_provider(url)

    assert "secret" not in str(refused.value)
