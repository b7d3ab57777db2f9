"""The hot statements and the listings find their rows by an index, however full the store is."""

from __future__ import annotations

import asyncio
import re

import apsw
import pytest

from perdure.client.formats import utc_time
from perdure.model.status import Status
from perdure.providers.records import InstanceQuery
from perdure.providers.sqlite import (
    SqliteProvider,
    instances,
    listing,
    statements,
    work,
)
from perdure.providers.sqlite.transaction import ForKeys, ManyRows, Snapshot

FRAGMENTS = {
    "_CANDIDATE",
    "_EXISTENCE",
    "_HELD_LOCK",
    "_EXECUTION",
    "_LOCK_FACTS",
    "_MESSAGE",
    "_READY",
    "SENT",
}
"""Parts of statements."""


def texts(name, value):
    match value:
        case ManyRows():
            return {name: value.of(1), f"{name} x 4": value.of(4)}
        case ForKeys():
            return {name: value.one, f"{name} x 4": value.many}
        case str() if name not in FRAGMENTS:
            return {name.strip("_"): value}
        case _:
            return {}


STATEMENTS = {
    label: text
    for name, value in (vars(statements) | vars(instances) | vars(work)).items()
    if name.isupper()
    for label, text in texts(name, value).items()
}

# One row, what the caller has given, or a walk over what an inner query has found by an index.
HARMLESS_SCANS = (
    "SCAN store_info",
    "SCAN CONSTANT ROW",
    "SCAN tags",
    "SCAN queued",
    "SCAN (subquery",
    "SCAN 4-ROW VALUES CLAUSE",
    "SCAN 4 CONSTANT ROWS",
    "SCAN given VIRTUAL TABLE",
    "SCAN json_each VIRTUAL TABLE",
    "SCAN added",
    "SCAN taken",
    "SCAN ended",
    "SCAN begun",
    "SCAN ready",
    "SCAN first",
    "SCAN last",
)


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "store.db"

    async def create():
        async with SqliteProvider(path):
            pass

    asyncio.run(create())
    opened = apsw.Connection(str(path))
    opened.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    yield opened
    opened.close()


def plan_of(connection, sql, values=None):
    if values is None:
        numbered = [int(number) for number in re.findall(r"\?(\d+)", sql)]
        values = [1] * max([sql.count("?") - len(numbered), *numbered])
    return [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, values)]


@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_a_hot_statement_scans_nothing(connection, name):
    scans = [
        step
        for step in plan_of(connection, STATEMENTS[name])
        if step.startswith("SCAN") and not step.startswith(HARMLESS_SCANS)
    ]

    assert scans == []


@pytest.mark.parametrize("name", ["QUEUED_START", "QUEUED_STARTS"])
def test_a_start_is_found_among_any_number_of_unread_messages(connection, name):
    assert any(
        "orchestrator_queue_starts" in step for step in plan_of(connection, STATEMENTS[name])
    )


@pytest.mark.parametrize(
    "name", ["FIND_MANY_READY", "FIND_READY", "FIND_READY_BY_NAME", "FIND_KEPT", "FIND_WORK"]
)
def test_the_next_candidate_is_found_without_sorting(connection, name):
    assert not any("TEMP B-TREE" in step for step in plan_of(connection, STATEMENTS[name]))


@pytest.mark.parametrize("name", ["_CHILDREN", "_CHILDREN x 4"])
def test_the_children_of_an_instance_are_found_by_an_index(connection, name):
    plan = plan_of(connection, STATEMENTS[name])

    assert not any(step.startswith(("SCAN instances", "SCAN q", "SCAN i")) for step in plan)


class Watched:
    """Notes the plan of each query, and answers it."""

    def __init__(self, connection):
        self.snapshot = Snapshot(connection)
        self.snapshot.execute = self._execute
        self._connection = connection
        self.steps = []

    def _execute(self, sql, values=()):
        self.steps += plan_of(self._connection, sql, values)
        return self._connection.execute(sql, values)


FAILED = frozenset({Status.FAILED})
QUERIES = {
    "everything": (None, "instances_by_creation"),
    "one status": (InstanceQuery(statuses=FAILED), "instances_by_status"),
    "two statuses": (InstanceQuery(statuses=FAILED | {Status.RUNNING}), "instances_by_status"),
    "pending": (InstanceQuery(statuses=frozenset({Status.PENDING})), "instance_locks_pending"),
    "name": (InstanceQuery(name="checkout"), "instances_by_name"),
    "name and status": (InstanceQuery(name="checkout", statuses=FAILED), "instances_by_"),
    "parent": (InstanceQuery(parent_instance_id="root"), "instances_by_parent"),
    "created": (
        InstanceQuery(created_after=utc_time(1), created_before=utc_time(9)),
        "instances_by_creation",
    ),
    "ids": (InstanceQuery(instance_ids=("a", "b")), "autoindex_instances_1"),
}


@pytest.mark.parametrize("cursor", [None, (5, "m")], ids=["first page", "next page"])
@pytest.mark.parametrize(("query", "index"), QUERIES.values(), ids=QUERIES)
def test_a_page_costs_a_page(connection, query, index, cursor):
    watched = Watched(connection)

    listing.list_page(watched.snapshot, query, cursor, 20)

    walks = [step for step in watched.steps if step.split()[1:2] in (["i"], ["l"])]
    assert any(index in step for step in walks), watched.steps
    assert not [step for step in watched.steps if "TEMP B-TREE" in step]
    # Only the whole listing is walked from its end; everything else is looked up.
    scans = [step for step in walks if step.startswith("SCAN")]
    assert all("instances_by_creation" in step or "pending" in step for step in scans), scans
    assert len(scans) <= (2 if query is None else 1), scans


def test_instances_without_a_name_are_found_first_with_any_other_filter(connection):
    watched = Watched(connection)

    listing.count(watched.snapshot, InstanceQuery(statuses=FAILED, version="1.0.0"))

    by_status = [step for step in watched.steps if "instances_by_status" in step]
    assert len(by_status) == 1, watched.steps
    assert any("SEARCH i USING INDEX instances_by_name" in step for step in watched.steps)


def test_counting_by_status_seeks_past_the_completed_ones(connection):
    watched = Watched(connection)

    listing.count_by_status(watched.snapshot)

    by_status = [step for step in watched.steps if "instances_by_status" in step]
    assert by_status
    assert all(step.startswith("SEARCH") for step in by_status), watched.steps
