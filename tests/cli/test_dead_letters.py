"""``perdure dead-letters``: messages that no instance could take."""

import asyncio

import pytest

from perdure.conformance.factories import raised
from perdure.providers.sqlite import SqliteProvider


@pytest.fixture
def dead(sqlite_cli):
    """A store with the letters of two instances that do not exist."""

    async def make():
        async with SqliteProvider(sqlite_cli.store, orphan_grace=0) as provider:
            await provider.enqueue_for_orchestrator(raised("o-1", "paid", 12))
            await provider.enqueue_for_orchestrator(raised("o-2", "paid", 13))
            while await provider.admin.list_dead_letters() == []:
                await provider.fetch_orchestration_item(1000, 0)

    asyncio.run(make())
    return sqlite_cli


def letters(cli):
    return cli("dead-letters", "list", "-o", "json").json


def test_list_names_the_instance_the_message_and_the_reason(dead):
    first, second = letters(dead)

    assert [first["instance"], second["instance"]] == ["o-1", "o-2"]
    assert first["kind"] == "ExternalRaised"
    assert first["reason"]
    assert first["message"]["data"] == 12
    table = dead("dead-letters", "list").lines
    assert table[0].split() == ["LETTER", "INSTANCE", "MESSAGE", "SINCE", "REASON"]
    assert "o-1" in table[1]
    assert dead("dead-letters", "list", "-o", "ids").lines == [
        str(first["letter"]),
        str(second["letter"]),
    ]


def test_list_says_when_it_is_cut(dead):
    answer = dead("dead-letters", "list", "--limit", 1, "-o", "ids")

    assert len(answer.lines) == 1
    assert "more may follow" in answer.err


def test_show_prints_the_message(dead):
    number = letters(dead)[1]["letter"]

    shown = dead("dead-letters", "show", number)

    assert "o-2" in shown.out
    assert "13" in shown.out
    assert dead("dead-letters", "show", number, "-o", "json").json == letters(dead)[1]


def test_a_requeued_letter_is_a_message_again(dead):
    number = letters(dead)[0]["letter"]

    assert "requeued" in dead("dead-letters", "requeue", number).out

    assert [letter["instance"] for letter in letters(dead)] == ["o-2"]
    assert dead("db", "info", "-o", "json").json["queues"]["orchestrator"]["visible"] == 1


def test_deleted_letters_are_gone(dead):
    number = letters(dead)[0]["letter"]

    assert "add -y" in dead("dead-letters", "delete", number, code=2).err
    assert len(letters(dead)) == 2
    assert "deleted 1 dead letter" in dead("dead-letters", "delete", number, "-y").out
    assert "deleted 1 dead letter" in dead("dead-letters", "delete", "--all", "-y").out
    assert letters(dead) == []


@pytest.mark.parametrize("verb", ["show", "requeue", "delete"])
def test_an_unknown_letter_is_named_and_nothing_is_changed(dead, verb):
    known = letters(dead)[0]["letter"]
    extra = [known] if verb != "show" else []

    assert "no dead letter 999" in dead("dead-letters", verb, *extra, 999, code=3).err

    assert len(letters(dead)) == 2


def test_delete_wants_letters_or_all(dead):
    assert "--all" in dead("dead-letters", "delete", code=2).err
    assert "--all" in dead("dead-letters", "delete", "--all", 1, code=2).err


def test_doctor_points_to_the_command(dead):
    (finding,) = [
        each for each in dead("doctor", "-o", "json").json if each["subject"] == "dead letters"
    ]

    assert finding["text"] == "2"
    assert "perdure dead-letters list" in finding["advice"]


def test_doctor_runs_the_quick_check(dead):
    (finding,) = [each for each in dead("doctor", "-o", "json").json if each["subject"] == "damage"]

    assert finding["level"] == "ok"
    assert "perdure db check --quick" in finding["text"]
