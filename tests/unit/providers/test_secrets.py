"""The URL of a store is shown without its password."""

import pytest

from perdure.providers.url import shown_url, without_secrets

SHOWN = {
    "shop.db": "shop.db",
    "C:/a@b?c=d/shop.db": "C:/a@b?c=d/shop.db",
    "sqlite:///a:b@c?d=e.db": "sqlite:///a:b@c?d=e.db",
    "file:./a:b@c": "file:./a:b@c",
    "memory:": "memory:",
    "postgresql://ann@db.example:5433/shop?schema=s&sslmode=require": (
        "postgresql://ann@db.example:5433/shop?schema=s&sslmode=require"
    ),
    "postgresql:///shop?host=/run/pg": "postgresql:///shop?host=/run/pg",
    "postgresql://db/shop?prepare=false&listen=false&pool_size=5": (
        "postgresql://db/shop?prepare=false&listen=false&pool_size=5"
    ),
    "postgresql://a,[::1]:5433,c:1/shop": "postgresql://a,[::1]:5433,c:1/shop",
    "postgresql://db:5432/shop schema perdure": "postgresql://db:5432/shop schema perdure",
    "postgresql://ann:pw@db.example/shop": "postgresql://ann:***@db.example/shop",
    "postgresql://:pw@db.example/shop": "postgresql://:***@db.example/shop",
    "postgresql://ann:p?w=#@db.example/shop": "postgresql://ann:***@db.example/shop",
    "postgresql://db/shop?password=pw&schema=s": "postgresql://db/shop?password=***&schema=s",
    "postgresql://db/shop?%70assword=pw": "postgresql://db/shop?%70assword=***",
    "postgresql://db/shop?PASSWORD=pw": "postgresql://db/shop?PASSWORD=***",
    "postgresql://ann:p@w@db/shop": "postgresql://***",
    "postgresql://ann:p/w@db/shop": "postgresql://***",
    "postgresql://ann:1/w@db/shop": "postgresql://***",
    "postgresql://ann:1?w/@db/shop": "postgresql://***",
    "postgresql://ann:pw/shop": "postgresql://***",
    "nosuch://ann:pw@db/shop#pw": "nosuch://***",
    "nosuch:ann:pw@db": "nosuch:ann:***@db",
}


@pytest.mark.parametrize("url", SHOWN)
def test_a_url_is_shown_without_what_may_be_a_password(url):
    assert shown_url(url) == SHOWN[url]
    assert shown_url(SHOWN[url]) == SHOWN[url]


def test_a_message_is_told_without_the_passwords_of_the_urls_that_it_quotes():
    url = "postgresql://ann:po%73tgres@db/shop?sslpassword=hunter2"

    told = without_secrets(f'{url}: "postgres" and "po%73tgres" (hunter2) of nosuch://b:c@d', url)

    assert told == (
        'postgresql://ann:***@db/shop?sslpassword=***: "***" and "***" (***) of nosuch://b:***@d'
    )
