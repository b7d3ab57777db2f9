"""Ids are only ids: never paths, patterns, numbers or statements, and never mixed up."""

from __future__ import annotations

from typing import Final

from perdure.conformance.factories import (
    activity,
    completion,
    create,
    enqueue,
    enqueue_work,
    finish,
    raised,
    take,
    take_work,
)
from perdure.conformance.harness import Store, checks
from perdure.conformance.key_value import put, values
from perdure.conformance.requires import requires
from perdure.conformance.sessions import worker
from perdure.providers.records import TagFilter

NAMES: Final = (
    "..",
    ".",
    "../../etc/passwd",
    "/etc/passwd",
    "\\\\host\\share",
    "C:\\con",
    "CON",
    "nul.txt",
    "a.",
    "a ",
    " a",
    "a",
    "A",
    "\u00e9",
    "e\u0301",
    "\ufb01",
    "fi",
    "stra\u00dfe",
    "STRASSE",
    "0",
    "00",
    "1e3",
    "null",
    "%",
    "_",
    "*",
    "?",
    "'",
    '"',
    "'; DROP TABLE instances; --",
    "${HOME}",
    "$(id)",
    "-rf",
    "~root",
    "a::b",
    "a/b",
    "a%2Fb",
    "\u202egnp.exe",
    "\U0001f980",
    "\u200b",
    "x" * 255,
)


@checks
class TestHostileNames:
    verbs = ("enqueue_for_orchestrator", "read", "fetch_orchestration_item")

    async def test_each_is_an_instance_of_its_own(self, store: Store) -> None:
        for name in NAMES:
            await create(store, name, kv_changes=(put("k", f"of {name}"),))

        for name in NAMES:
            assert len(await store.reader.read(name)) == 1
            assert await values(store, name) == {"k": f"of {name}"}

    async def test_each_comes_back_as_it_was_given(self, store: Store) -> None:
        for name in NAMES:
            await create(store, name)
            await enqueue(store, raised(name))

        assert [(await take(store)).item.instance_id for _ in NAMES] == list(NAMES)

    @requires("admin")
    async def test_each_is_listed_and_deleted_alone(self, store: Store) -> None:
        for name in NAMES:
            await create(store, name)
            await finish(store, name)
        remaining = set(NAMES)

        for name in NAMES:
            assert (await store.admin.delete_instance(name)).instances == 1
            remaining.discard(name)
            page = await store.admin.list_instances()
            assert {info.instance_id for info in page.instances} == remaining

    @requires("durable")
    async def test_each_survives_reopening(self, store: Store) -> None:
        for name in NAMES:
            await create(store, name, kv_changes=(put("k", f"of {name}"),))

        await store.reopen()

        for name in NAMES:
            assert await values(store, name) == {"k": f"of {name}"}

    async def test_they_serve_as_any_other_name(self, store: Store) -> None:
        for number, name in enumerate(NAMES):
            await enqueue_work(store, activity("x", name=name, tag=name, session=name))
            work = await take_work(
                store,
                session=worker(name),
                tags=TagFilter.only(name),
                activities=frozenset({name}),
            )
            assert (work.name, work.tag, work.session_id) == (name, name, name)
            await store.provider.ack_work_item(work.lock_token, completion("x"))

            await create(store, f"x-{number}", name=name, version=name)
            await enqueue(store, raised(f"x-{number}"))
            fetched = await take(store, f"x-{number}")
            assert (fetched.item.name, fetched.item.version) == (name, name)
