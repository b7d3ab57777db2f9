"""A distributed Postgres could keep each instance on one server.

Reads the schema as the server knows it and every statement that is sent or runs inside a function.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from perdure.providers.postgres import statements
from postgres_factory import new_schema
from postgres_server import shared_server

OF_AN_INSTANCE = frozenset(
    {
        "instances",
        "executions",
        "history",
        "kv_store",
        "kv_delta",
        "orchestrator_queue",
        "instance_locks",
        "worker_queue",
        "dead_letters",
    }
)
OF_THE_STORE = frozenset({"store", "migrations", "sessions", "workers", "lanes"})
"""Small, and not about one instance."""

TOKEN_GUARDS = frozenset({"instance_locks_by_token", "worker_queue_by_token"})
"""Unique over all instances, as a guard against a caller's mistake; a sharded schema has them with
the instance, and only loses the guard."""

LOOKING = frozenset(
    {
        *(
            "waiting_routes",
            "turn_candidates",
            "next_turn_at",
            "dead_letter_orphans",
            "fetch_turns",
        ),
        *("waiting_work_routes", "open_sessions", "work_candidates", "next_work_at"),
        *(
            "take_from_session",
            "take_with_sessions",
            "fetch_work",
            "follow_promotion",
            "follow_clock",
        ),
    }
)
"""Fetches, which each server runs for its own instances."""

ADMINISTRATION = frozenset(
    {
        *("tree_of", "cleanup_sessions", "remove_instances", "delete_instances"),
        *("requeue_letter", "grant_worker", "grant_reader"),
    }
)
ASKED_OF_ALL = frozenset(
    {
        *("FIND_TURNS", "FIND_WORK", "LIST_CHILDREN", "GET_DEPTHS", "LIST_DEAD_LETTERS"),
        *("DELETE_LETTER", "LIST_FINISHED_ROOTS", "LIST_BEGUN", "GET_TOTALS", "COUNT_BY_STATUS"),
        *("_COUNT", "_LIST_MATCHING"),
    }
)
"""Statements about many instances, and tokens of another process."""

_TABLE = re.compile(
    r"\b(?:FROM|JOIN|UPDATE|INTO|USING)\s+(?:\{schema\}\.)?(\w+)(?:\s+(?:AS\s+)?(\w+))?"
)
_KEYWORDS = frozenset({"set", "where", "on", "left", "join", "order", "cross", "group", "using"})


@pytest.fixture(scope="module")
def catalog() -> Any:
    with psycopg.connect(shared_server().dsn) as connection:
        yield connection, new_schema()


def test_every_table_is_known_to_be_of_an_instance_or_of_the_store(catalog: Any) -> None:
    connection, schema = catalog
    tables = connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)
    ).fetchall()

    assert {name for (name,) in tables} == OF_AN_INSTANCE | OF_THE_STORE


def test_every_key_of_an_instance_begins_with_its_id(catalog: Any) -> None:
    connection, schema = catalog
    keys = connection.execute(
        """
        SELECT c.relname, i.indexrelid::regclass::text, i.indisprimary, array(
            SELECT a.attname FROM unnest(i.indkey::int[]) WITH ORDINALITY AS k (number, position)
            JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number ORDER BY k.position
        )
        FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
        WHERE c.relnamespace = %s::regnamespace AND i.indisunique
        """,
        (schema,),
    ).fetchall()

    primary = {table: columns for table, _, is_primary, columns in keys if is_primary}
    assert {table: primary[table][0] for table in OF_AN_INSTANCE} == dict.fromkeys(
        OF_AN_INSTANCE, "instance_id"
    )
    unkeyed = {
        index.split(".")[-1]
        for table, index, _, columns in keys
        if table in OF_AN_INSTANCE and "instance_id" not in columns
    }
    assert unkeyed == TOKEN_GUARDS


def test_nothing_refers_from_one_table_to_another(catalog: Any) -> None:
    connection, schema = catalog
    references = connection.execute(
        "SELECT conname FROM pg_constraint WHERE connamespace = %s::regnamespace AND contype = 'f'",
        (schema,),
    ).fetchall()

    assert references == []


def test_every_statement_that_writes_is_about_named_instances(catalog: Any) -> None:
    connection, schema = catalog
    functions = connection.execute(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = %s::regnamespace", (schema,)
    ).fetchall()
    names = {name for name, _ in functions}
    assert names >= LOOKING | ADMINISTRATION

    unkeyed = {
        name: found
        for name, source in functions
        if name not in LOOKING | ADMINISTRATION and (found := unkeyed_tables(source))
    }

    # The one lookup by token alone tells a caller's mistake from a lost lock.
    # The locks of a worker that died are found by its name, whichever instances they are of.
    assert unkeyed == {
        "remove_completed_work": {"worker_queue"},
        "release_holder": {"worker_queue", "instance_locks"},
    }


def test_every_statement_that_is_sent_is_about_named_instances() -> None:
    sent = {
        name: value
        for name, value in vars(statements).items()
        if name.isupper() and isinstance(value, str)
    }
    assert set(sent) >= ASKED_OF_ALL

    unkeyed = {
        name: found
        for name, statement in sent.items()
        if name not in ASKED_OF_ALL and (found := unkeyed_tables(statement))
    }

    assert unkeyed == {}


@pytest.mark.parametrize(
    ("statement", "unkeyed"),
    [
        ("SELECT 1 FROM history h WHERE h.instance_id = p_id", set()),
        ("SELECT 1 FROM history h WHERE h.event_id = 1", {"history"}),
        ("DELETE FROM instances i WHERE i.status = 'x'", {"instances"}),
        ("UPDATE kv_store s SET value = 1 FROM t WHERE s.instance_id = t.instance_id", set()),
        ("INSERT INTO history (instance_id, data) SELECT 1", set()),
        ("SELECT 1 FROM lanes WHERE lane = 1", set()),
    ],
)
def test_the_reader_of_statements_can_tell(statement: str, unkeyed: set[str]) -> None:
    assert unkeyed_tables(statement) == unkeyed


def unkeyed_tables(source: str) -> set[str]:
    """Return tables of instances that a statement reads or writes without naming an instance."""
    source = re.sub(r"--.*", "", source)
    found: set[str] = set()
    for statement in source.split(";"):
        for table, alias in _TABLE.findall(statement):
            if table in OF_AN_INSTANCE and not _is_keyed(statement, table, alias):
                found.add(table)
    return found


def _is_keyed(statement: str, table: str, alias: str) -> bool:
    has_alias = bool(alias) and alias.lower() not in _KEYWORDS
    column = rf"(?<![\w.]){alias}\.instance_id" if has_alias else r"(?<![\w.])instance_id"
    return (
        re.search(rf"{column}\s*=|=\s*{column}\b", statement) is not None
        or re.search(rf"INTO\s+(?:\{{schema\}}\.)?{table}\b[^(]*\(\s*instance_id", statement)
        is not None
        or "USING (instance_id" in statement
    )
