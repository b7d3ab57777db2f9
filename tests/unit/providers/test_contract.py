"""The public verbs of the contract: they refuse wrong calls before a store is asked."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from perdure.conformance import factories
from perdure.errors import InvalidValue, LockLost, NotSupported, StoreClosed
from perdure.model.status import Status
from perdure.providers.administration import ProviderAdmin
from perdure.providers.contract import Provider
from perdure.providers.records import (
    ActivityIdentity,
    EnqueueCondition,
    ExecutionMetadata,
    ExecutionSnapshot,
    HistoryRecord,
    InstanceQuery,
    InstanceSnapshot,
    OrchestratorMessage,
    PruneOptions,
    SessionFetch,
    StartRouting,
    TagFilter,
    TurnCommit,
    WorkerInfo,
    WorkerMessage,
)
from perdure.providers.sqlite.memory import InMemoryProvider

ZERO = HistoryRecord(event_id=0, data="{}")
MESSAGE = OrchestratorMessage(
    instance_id="a", kind="Start", body="{}", start=StartRouting(name="n")
)
NO_ID = OrchestratorMessage(instance_id="", kind="Start", body="{}")
NO_START = OrchestratorMessage(instance_id="a", kind="Event", body="{}")
NO_VERSION = OrchestratorMessage(
    instance_id="a", kind="Start", body="{}", start=StartRouting(name="n", version="")
)
NO_PARENT = OrchestratorMessage(
    instance_id="a", kind="Start", body="{}", start=StartRouting(name="n", parent_instance_id="")
)
WORK = WorkerMessage(
    identity=ActivityIdentity(instance_id="a", execution_id=1, activity_id=1), name="w", body="{}"
)
NO_NAME = WorkerMessage(identity=WORK.identity, name="", body="{}")
COMMIT = TurnCommit(execution_id=1, metadata=ExecutionMetadata(name="n"))
WRONG_COMMITS = [
    TurnCommit(execution_id=0),
    TurnCommit(execution_id=1, metadata=ExecutionMetadata(name="n", version="")),
    TurnCommit(execution_id=1, metadata=ExecutionMetadata(name="n", output="a\0b")),
]
WORKER = WorkerInfo(worker_id="w", host="h", process_id=1, started_at_ms=0, framework_version="1")
NO_WORKER = WorkerInfo(worker_id="", host="h", process_id=1, started_at_ms=0, framework_version="1")
NUL = "a\0b"
IDS = ["", 1, "x" * 5_000]


def stand_in(contract: type) -> type:
    """Return a provider or administration that notes the calls that reach it."""

    def note(name):
        return lambda self, *args, **kwargs: self.asked.append((name, args, kwargs))

    def require_open(self, operation):
        if not self.is_open:
            raise StoreClosed(operation, "closed by the test")

    members = {name: note(name) for name in contract.__abstractmethods__ if name[0] == "_"}
    others = {name: None for name in contract.__abstractmethods__ if name[0] != "_"}
    made = type("StandIn", (contract,), {**others, **members, "_require_open": require_open})
    made.is_open = True
    made.asked = property(lambda self: self.__dict__.setdefault("calls", []))
    return made


CALLS = {
    Provider: {
        "fetch_orchestration_item": ((1, 0), {0: [0], 1: [-1], 3: [""]}),
        "ack_orchestration_item": (("t", COMMIT), {1: WRONG_COMMITS}),
        "abandon_orchestration_item": (("t", 1), {1: [-1]}),
        "renew_orchestration_item_lock": (("t", 1), {1: [0]}),
        "renew_orchestration_item_locks": ((["t"], 1), {1: [0]}),
        "start_orchestration_item": (
            (MESSAGE, COMMIT, "t", "o"),
            {0: [NO_ID, NO_START, NO_VERSION, NO_PARENT], 1: WRONG_COMMITS, 2: [""], 3: [""]},
        ),
        "read": (("a",), {0: IDS}),
        "read_with_execution": (("a", 1), {0: IDS}),
        "append_with_execution": (("a", 1, []), {0: IDS, 1: [0], 2: [[ZERO]]}),
        "enqueue_for_worker": ((WORK,), {0: [NO_NAME]}),
        "fetch_work_item": (
            (1000, 0),
            {0: [0], 1: [-1], 2: [SessionFetch(owner_id="", lock_timeout_ms=1)]},
        ),
        "fetch_work_items": (
            (1, 1, 0, SessionFetch(owner_id="o", lock_timeout_ms=1)),
            {0: [0], 1: [0], 2: [-1], 3: [SessionFetch(owner_id="o", lock_timeout_ms=0)]},
        ),
        "ack_work_item": (("t", MESSAGE), {1: [NO_ID], 2: [WORK]}),
        "settle_in_transaction": (("t", None), {}),
        "abandon_work_item": (("t", 1), {1: [-1]}),
        "renew_work_item_lock": (("t", 1), {1: [0], 2: [NUL]}),
        "renew_work_item_locks": ((["t"], 1), {1: [0]}),
        "renew_session_lock": ((["o"], 1, 0), {1: [0], 2: [-1]}),
        "cleanup_orphaned_sessions": ((), {}),
        "enqueue_for_orchestrator": (
            (MESSAGE, 0),
            {0: [NO_ID, NO_VERSION, NO_PARENT], 1: [-1]},
        ),
        "enqueue_many_for_orchestrator": (
            ([MESSAGE], 0),
            {0: [[MESSAGE, NO_ID]], 1: [-1], 2: [EnqueueCondition.ALIVE]},
        ),
        "get_custom_status": (("a",), {0: IDS}),
        "get_kv_value": (("a", "k"), {0: IDS, 1: [NUL]}),
        "get_kv_all_values": (("a",), {0: IDS}),
        "watch": (("a",), {0: IDS}),
    },
    ProviderAdmin: {
        "list_instances": ((), {"limit": [0, 10**6], "cursor": ["no cursor"]}),
        "count_instances": ((), {}),
        "get_instance_info": (("a",), {0: IDS}),
        "list_executions": (("a",), {0: IDS}),
        "latest_execution_id": (("a",), {0: IDS}),
        "get_execution_info": (("a", 1), {0: IDS}),
        "read_history_with_execution_id": (("a", 1), {0: IDS}),
        "list_children": (("a",), {0: IDS}),
        "get_instance_tree": (("a",), {0: IDS}),
        "suspend_instance": (("a",), {0: IDS}),
        "resume_instance": (("a",), {0: IDS}),
        "lock_instance": (("a", 1), {0: IDS, 1: [0]}),
        "get_queue_depths": ((), {}),
        "list_messages": (("a",), {0: IDS, "limit": [0]}),
        "list_work": (("a",), {0: IDS, "limit": [0]}),
        "list_dead_letters": ((), {"limit": [0]}),
        "requeue_dead_letter": ((1,), {}),
        "delete_dead_letter": ((1,), {}),
        "delete_instances_atomic": ((["a"],), {0: [["a", ""]]}),
        "prune_executions": (
            ("a", PruneOptions()),
            {0: IDS, 1: [PruneOptions(keep_last=-1)]},
        ),
        "get_system_metrics": ((), {}),
        "get_store_info": ((), {}),
        "register_worker": ((WORKER, 0), {0: [NO_WORKER], 1: [-1]}),
        "list_workers": ((), {}),
        "export_instance": (("a",), {0: IDS}),
        "mark_moved": (("there",), {0: [NUL]}),
    },
}
DERIVED = {
    "list_instances_by_status",
    "get_parent_id",
    "delete_instance",
    "delete_instance_bulk",
    "prune_executions_bulk",
    "import_instance",
}
LIFE = {"name", "version", "capabilities", "clock", "new_lock_token", "open", "close", "admin"}

ALL = [(contract, verb) for contract, verbs in CALLS.items() for verb in verbs]
WRONG = [
    (contract, verb, place, value)
    for contract, verbs in CALLS.items()
    for verb, (_, wrong) in verbs.items()
    for place, values in wrong.items()
    for value in values
]


def replaced(args, place, value):
    given = [*args, *[None] * (place + 1 - len(args))] if isinstance(place, int) else [*args]
    if not isinstance(place, int):
        return given, {place: value}
    given[place] = value
    return given, {}


def test_every_verb_is_in_the_table():
    public = {
        name
        for contract in CALLS
        for name, member in vars(contract).items()
        if name[0] != "_" and (inspect.isfunction(member) or isinstance(member, property))
    }

    assert public == {verb for _, verb in ALL} | DERIVED | LIFE


@pytest.mark.parametrize(("contract", "verb"), ALL, ids=[verb for _, verb in ALL])
def test_a_closed_store_is_not_asked(contract, verb):
    store = stand_in(contract)()
    store.is_open = False

    with pytest.raises(StoreClosed, match=verb):
        getattr(store, verb)(*CALLS[contract][verb][0])
    assert store.asked == []


@pytest.mark.parametrize(
    ("contract", "verb", "place", "value"),
    WRONG,
    ids=[f"{verb}-{place}" for _, verb, place, _ in WRONG],
)
def test_a_wrong_argument_is_refused_before_the_store_is_asked(contract, verb, place, value):
    store = stand_in(contract)()
    given, named = replaced(CALLS[contract][verb][0], place, value)

    with pytest.raises(InvalidValue):
        getattr(store, verb)(*given, **named)
    assert store.asked == []


@pytest.mark.parametrize(
    ("contract", "verb"),
    [each for each in ALL if hasattr(each[0], f"_{each[1]}")],
    ids=[verb for contract, verb in ALL if hasattr(contract, f"_{verb}")],
)
def test_a_good_call_reaches_the_store_once(contract, verb):
    made = stand_in(contract)
    setattr(made, f"_{verb}", lambda self, *_, **__: self.asked.append(verb))
    store = made()

    answer = getattr(store, verb)(*CALLS[contract][verb][0])
    if inspect.iscoroutine(answer):
        answer.close()

    assert store.asked == [verb]


@pytest.mark.parametrize(("execution_id", "history"), [(1, (ZERO,)), (0, ())])
def test_a_snapshot_with_a_wrong_part_is_not_imported(execution_id, history):
    admin = stand_in(ProviderAdmin)()
    execution = ExecutionSnapshot(
        execution_id=execution_id, status="Running", output=None, started_at_ms=0,
        completed_at_ms=None, framework_version=None, history=history,
    )  # fmt: skip

    with pytest.raises(InvalidValue):
        admin.import_instance(_snapshot(execution))
    assert admin.asked == []


def _snapshot(execution):
    fields = dict.fromkeys(InstanceSnapshot.__struct_fields__)
    fields |= {"instance_id": "a", "executions": (execution,), "messages": (), "work": ()}
    return InstanceSnapshot(**fields)


def test_a_filter_that_lets_nothing_through_does_not_reach_the_store():
    store = stand_in(Provider)()

    async def fetch():
        assert await store.fetch_work_item(1000, 0, None, TagFilter.none()) is None
        assert await store.fetch_work_items(1, 1000, 0, None, TagFilter.none()) == []

    asyncio.run(fetch())
    assert store.asked == []


@pytest.mark.parametrize(
    ("single", "many", "expected"),
    [
        ("renew_orchestration_item_lock", "_renew_orchestration_item_locks", (("t",), 1)),
        ("renew_work_item_lock", "_renew_work_item_locks", (("t",), 1, None)),
    ],
)
def test_one_lock_is_renewed_by_the_verb_for_many(single, many, expected):
    made, asked = stand_in(Provider), []
    made.renewed = True

    async def renew(self, tokens, *rest):
        asked.append((tokens, *rest))
        return frozenset() if self.renewed else frozenset(tokens)

    setattr(made, many, renew)
    store = made()

    asyncio.run(_awaited(getattr(store, single)("t", 1)))
    store.renewed = False
    with pytest.raises(LockLost, match="'t'") as caught:
        asyncio.run(_awaited(getattr(store, single)("t", 1)))

    assert asked == [expected, expected]
    assert caught.value.operation == single


async def _awaited(answer):
    return await answer


@pytest.mark.parametrize(
    ("verb", "args"),
    [("delete_instance_bulk", ()), ("prune_executions_bulk", (PruneOptions(),))],
)
def test_a_bulk_verb_checks_that_the_store_is_open_and_its_limit(verb, args):
    admin = stand_in(ProviderAdmin)()

    for limit in (0, -1, 1_001, 1.0, True):
        with pytest.raises(InvalidValue, match="limit"):
            asyncio.run(getattr(admin, verb)(InstanceQuery(), *args, limit=limit))
    admin.is_open = False
    with pytest.raises(StoreClosed, match=verb):
        asyncio.run(getattr(admin, verb)(InstanceQuery(), *args))
    assert admin.asked == []


def test_bulk_pruning_checks_its_options():
    admin = stand_in(ProviderAdmin)()

    with pytest.raises(InvalidValue, match="keep_last"):
        asyncio.run(admin.prune_executions_bulk(InstanceQuery(), PruneOptions(keep_last=-1)))


def test_a_provider_without_administration_says_so():
    store = stand_in(Provider)()

    with pytest.raises(NotSupported, match="has no administration"):
        _ = store.admin


@pytest.mark.parametrize(
    ("verb", "args"),
    [("list_messages", ("a",)), ("list_work", ("a",)), ("list_dead_letters", ())],
)
def test_a_listing_may_be_of_one(verb, args):
    admin = stand_in(ProviderAdmin)()

    getattr(admin, verb)(*args, limit=1)

    assert admin.asked == [(f"_{verb}", (*args, 1), {})]


@pytest.mark.parametrize(
    ("verb", "args", "text"),
    [
        ("start_orchestration_item", (MESSAGE, COMMIT, "t", "o"), "does not declare hot_path"),
        ("settle_in_transaction", ("t", None), "does not declare transactions"),
    ],
)
def test_a_verb_that_is_not_declared_is_not_supported(verb, args, text):
    with pytest.raises(NotSupported, match=text):
        getattr(stand_in(Provider)(), verb)(*args)


def test_a_tree_that_grows_is_held_while_it_is_deleted_by_force():
    """Each look at the tree lets its root start one more child, unless it is paused."""

    async def check():
        async with InMemoryProvider() as provider:
            await provider.enqueue_for_orchestrator(factories.start("root"))
            read_tree, children = provider.admin.get_instance_tree, []

            async def grow(instance_id):
                tree = await read_tree(instance_id)
                info = await provider.admin.get_instance_info("root")
                if info.status is not Status.PAUSED and len(children) < 5:
                    children.append(f"child-{len(children)}")
                    start = factories.start(children[-1], parent="root")
                    await provider.enqueue_for_orchestrator(start)
                return tree

            provider.admin.get_instance_tree = grow
            result = await provider.admin.delete_instance("root", force=True)
            assert result.instances == 2
            assert children == ["child-0"]
            assert await provider.admin.count_instances() == 0

    asyncio.run(check())
