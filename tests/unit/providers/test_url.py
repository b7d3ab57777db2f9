"""What a user writes for a store, and what it stands for."""

import sys
from pathlib import Path

import pytest

from perdure.errors import InvalidValue, UsageError
from perdure.providers.url import local_path, open_provider


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
    ],
)
def test_a_local_store_is_a_path(written, path):
    assert local_path(written) == path


@pytest.mark.parametrize("url", ["memory:", "postgresql://db.example/shop", "toy:somewhere"])
def test_other_stores_have_no_path(url):
    assert local_path(url) is None


@pytest.mark.parametrize("url", ["sqlite://shop.db", "file://shop", "sqlite:", "file:///"])
def test_a_url_without_a_local_path_is_refused_with_an_example(url):
    with pytest.raises(UsageError, match=r"write e\.g\.") as refused:
        open_provider(url)

    assert repr(url) in str(refused.value)


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
