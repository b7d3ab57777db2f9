"""Payloads that are encrypted: nothing readable is stored, none can be moved, keys are replaced."""

import asyncio
import contextlib
import json
import re
import secrets

import msgspec
import pytest

from integration.conditions import reached, until, waiting
from patience import HANG_SECONDS
from perdure import (
    Client,
    Codec,
    PerdureError,
    Runtime,
    RuntimeOptions,
    Status,
    activity,
    continue_as_new,
    heartbeat,
    instance,
    last_heartbeat,
    next_message,
    orchestration,
    set_custom_status,
    side_effect,
    state,
    transaction,
    wait_for_event,
)
from perdure.client.damage import check_instances
from perdure.client.rerun import rerun_from_event
from perdure.codec import PayloadContext
from perdure.crypto import AesGcm
from perdure.errors import (
    CannotUnwrap,
    InvalidValue,
    OrchestrationCancelled,
    OrchestrationFailed,
    OrchestrationTerminated,
)
from perdure.model.failures import BlockReason
from perdure.providers.records import InstanceSnapshot

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
SECRET = "4111-1111"
CODEC = Codec(AesGcm({"old": OLD}))
PLACE = PayloadContext("x", "input")


class Declined(PerdureError):
    """An error of the author that is also one of ours."""


@activity(raises=[LookupError])
async def refuse(card: str) -> None:
    heartbeat(card)
    raise LookupError(card)


@activity(transactional=True, raises=[Declined])
def refuse_in_transaction(card: str) -> None:
    transaction().execute("SELECT 1")
    error = Declined(card)
    error.card = card
    raise error


@activity(executor="process", raises=[KeyError])
def refuse_in_process(card: str) -> None:
    raise KeyError(card)


@activity
async def echo(card: str) -> str:
    return card


@orchestration
async def child(card: str) -> str:
    return await echo(card)


@orchestration
async def failing(card: str) -> str:
    raise RuntimeError(card)


@orchestration
async def flow(card: str) -> list[str]:
    state["card"] = card
    set_custom_status({"card": card})
    seen = [await child(card), side_effect(lambda: card, str)]
    try:
        await refuse_in_transaction(card)
    except Declined as error:
        seen.append(error.card)
    for fails in (refuse, refuse_in_process):
        try:
            await fails(card)
        except LookupError as error:
            seen.append(error.args[0])
    with contextlib.suppress(OrchestrationFailed):
        await failing(card)
    seen.append(await instance("other", str).result())
    seen.append(await instance("other").state("card", str))
    seen.append(await wait_for_event("card", str))
    seen.append(await next_message("cards", str))
    set_custom_status(None)
    return [*seen, state["card"]]


@orchestration
async def other(card: str) -> str:
    state["card"] = card
    return card


@orchestration
async def waits(card: str) -> str:
    state["card"] = card
    await wait_for_event("go", str)
    return state["card"] + await wait_for_event("more", str)


@orchestration
async def asks(card: str) -> str:
    await wait_for_event("go", str)
    return await echo(card)


@orchestration
async def again(card: str, count: int) -> str:
    state["card"] = card
    await wait_for_event("go", str)
    if count:
        continue_as_new(card, count - 1)
    return state["card"]


HANDLERS = [
    flow,
    child,
    other,
    waits,
    asks,
    again,
    failing,
    echo,
    refuse,
    refuse_in_transaction,
    refuse_in_process,
]


def stored(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_nothing_secret_is_readable_in_the_store_and_keys_can_be_replaced(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        await runtime.start(other, SECRET, id="other")
        await runtime.start(flow, SECRET, id="x")
        await waiting(runtime, "x")
    both = Codec(AesGcm({"new": NEW, "old": OLD}))
    async with Client(store, codec=both) as client:
        await client.raise_event("x", "card", SECRET)
        await client.send_message("x", "cards", SECRET)
    assert SECRET.encode() not in stored(tmp_path)
    assert b'{"$perdure":"aes-gcm"' in stored(tmp_path)
    async with Runtime(store, HANDLERS, codec=both) as runtime:
        handle = runtime.get("x")
        assert await handle.result(HANG_SECONDS) == [SECRET] * 10
        assert (await handle.describe()).custom_status is None
    assert SECRET.encode() not in stored(tmp_path)
    async with Client(store, codec=CODEC) as client:
        with pytest.raises(CannotUnwrap, match="it needs the key 'new'; there are: old"):
            await client.get("x").result()


@pytest.mark.parametrize("kind", ["db", "directory"])
async def test_ends_reasons_and_blocks_are_sealed_and_read_with_the_key(tmp_path, kind):
    store = f"sqlite:{tmp_path}/store.db" if kind == "db" else f"file:{tmp_path}/store"
    async with Runtime(store, [failing, waits], codec=CODEC) as runtime:
        failed = await runtime.start(failing, SECRET, id="failed")
        with pytest.raises(OrchestrationFailed, match=SECRET):
            await failed.result(HANG_SECONDS)
        for verb, error in (
            ("cancel", OrchestrationCancelled),
            ("terminate", OrchestrationTerminated),
        ):
            handle = await runtime.start(waits, "c", id=verb)
            await waiting(runtime, verb)
            await getattr(handle, verb)(f"because of {SECRET}")
            with pytest.raises(error, match=SECRET):
                await handle.result(HANG_SECONDS)
    secret = SECRET.encode()
    async with Client(store, codec=CODEC) as client:
        views = {view.id: view async for view in client.admin.instances()}
        assert all(SECRET in str(view.failure) for view in views.values())
        assert SECRET in views["failed"].failure.traceback
    async with Client(store) as client:
        assert [each async for each in check_instances(client.provider)] == [None] * 3
        view = await client.describe("failed")
        assert view.failure.type_name == "RuntimeError"
        assert view.failure.message == "(sealed with 'aes-gcm', not readable here)"
        with pytest.raises(OrchestrationFailed, match="sealed with 'aes-gcm'"):
            await client.get("failed").result(HANG_SECONDS)
    assert secret not in stored(tmp_path)


@orchestration(name="waits")
async def edited(card: str) -> str:
    await echo(card)
    return await wait_for_event("more", str)


async def test_the_report_of_a_blocked_instance_is_sealed(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        await runtime.start(waits, SECRET, id="x")
        await waiting(runtime, "x")
    async with Client(store, codec=CODEC) as client:
        await client.raise_event("x", "go", SECRET)
    async with Runtime(store, [edited, echo], codec=CODEC) as runtime:
        await reached(runtime, "x", Status.BLOCKED)
        block = (await runtime.describe("x")).block
        assert block.reason is BlockReason.NONDETERMINISM
        assert SECRET in str(block.detail), "the report shows the arguments of the new call"
    assert SECRET.encode() not in stored(tmp_path)
    async with Client(store) as client:
        block = (await client.describe("x")).block
        assert block.reason is BlockReason.NONDETERMINISM
        assert block.message == "(sealed with 'aes-gcm', not readable here)"


# --- payloads that were moved

SEALED = re.compile(r'\$perdure[\\":]+aes-gcm[\\",]+data[\\":]+([A-Za-z0-9+/=]+)')


@pytest.mark.parametrize("kind", ["OrchestrationStarted", "KeyValueSet", "ExternalRaised"])
async def test_a_payload_of_another_instance_blocks_and_is_not_believed(tmp_path, kind):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        for name in ("a", "b"):
            await runtime.start(waits, name, id=name)
            await waiting(runtime, name)
    async with Client(store, codec=CODEC) as client:
        for name in ("a", "b"):
            await client.raise_event(name, "go", name)
            await client.raise_event(name, "more", name)
        admin = client.provider.admin
        texts = [msgspec.json.encode(await admin.export_instance(name)).decode() for name in "ab"]
    one, two = (SEALED.search(text, text.index(kind))[1] for text in texts)
    moved = tmp_path / "moved.db"
    async with Client(moved) as client:
        for text in texts:
            swapped = text.replace(one, "#").replace(two, one).replace("#", two)
            snapshot = msgspec.json.decode(swapped, type=InstanceSnapshot)
            await client.provider.admin.import_instance(snapshot)
    async with Runtime(moved, HANDLERS, codec=CODEC) as runtime:
        for name in ("a", "b"):
            await reached(runtime, name, Status.BLOCKED)
            block = (await runtime.describe(name)).block
            assert block.reason is BlockReason.UNDECODABLE
            assert "another instance or field" in block.message


async def test_a_copy_and_the_next_execution_can_read_what_moves_with_them(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        handle = await runtime.start(again, SECRET, 2, id="x")
        for count in range(3):

            async def has_begun(count=count):
                return (await handle.describe()).execution_id == count + 1

            await until(has_begun)
            await runtime.raise_event("x", "go", SECRET)
        assert await handle.result(HANG_SECONDS) == SECRET
        await runtime.start(asks, SECRET, id="y")
        await waiting(runtime, "y")
        copied = await rerun_from_event(runtime.provider, "y", "y2", 2, clock=runtime.clock)
        assert copied.events_kept
        new_id = await runtime.admin.rerun("x", id="x2")
        assert new_id == "x2"
        for name in ("y", "y2", "x2"):
            await runtime.raise_event(name, "go", SECRET)
        assert await runtime.get("y2").result(HANG_SECONDS) == SECRET
        assert await runtime.get("x2").result(HANG_SECONDS) == SECRET
    assert SECRET.encode() not in stored(tmp_path)
    async with Client(store) as client:
        with pytest.raises(CannotUnwrap, match="goes to another instance"):
            await client.admin.rerun("x", id="x3")
        with pytest.raises(CannotUnwrap, match="goes to another instance"):
            await rerun_from_event(client.provider, "y", "y3", 2, clock=client.clock)


async def test_an_operator_without_the_key_retries_and_the_instance_reads_all_of_it(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        await runtime.start(waits, SECRET, id="x")
        await waiting(runtime, "x")
        await runtime.raise_event("x", "go", SECRET)
        await runtime.terminate("x", "enough")
    async with Client(store) as client:
        await client.admin.retry("x")
    async with Runtime(store, HANDLERS, codec=CODEC) as runtime:
        with contextlib.suppress(PerdureError):
            await runtime.raise_event("x", "go", SECRET)
        await runtime.raise_event("x", "more", SECRET)
        assert await runtime.get("x").result(HANG_SECONDS) == SECRET * 2
    assert SECRET.encode() not in stored(tmp_path)


async def test_heartbeats_are_sealed_and_come_back(tmp_path):
    @activity
    async def beats() -> str | None:
        heard = last_heartbeat(str)
        if heard is None:
            heartbeat(SECRET)
            await asyncio.Event().wait()
        return heard

    @orchestration
    async def listens() -> str | None:
        return await beats()

    store = tmp_path / "store.db"
    options = RuntimeOptions(cancel_grace=0, drain_timeout=0)
    async with Runtime(store, [listens, beats], codec=CODEC, options=options) as runtime:
        await runtime.start(listens, id="x")

        async def has_beaten():
            queued = await runtime.provider.admin.list_work("x")
            return any(each.heartbeat == json.dumps(SECRET) for each in queued)

        await until(has_beaten)
    assert SECRET.encode() not in stored(tmp_path)
    async with Runtime(store, [listens, beats], codec=CODEC) as runtime:
        assert await runtime.get("x").result(HANG_SECONDS) == SECRET


# --- the transform by itself


def test_a_changed_byte_is_found():
    transform = AesGcm({"k": NEW})
    wrapped = transform.wrap(b"data", PLACE)
    assert transform.unwrap(wrapped, PLACE) == b"data"
    assert transform.wrap(b"data", PLACE) != wrapped
    for index in range(len(wrapped)):
        changed = bytearray(wrapped)
        changed[index] ^= 1
        with pytest.raises(Exception):  # noqa: B017, PT011 - each part has its own error
            transform.unwrap(bytes(changed), PLACE)


@pytest.mark.parametrize(
    "place", [("y", "input"), ("x", "output"), ("xi", "nput"), ("", "x\0input"), ("x\0input", "")]
)
def test_another_place_is_found(place):
    transform = AesGcm({"k": NEW})
    with pytest.raises(Exception):  # noqa: B017, PT011
        transform.unwrap(transform.wrap(b"data", PLACE), PayloadContext(*place))


@pytest.mark.parametrize(
    "keys", [{}, {"": NEW}, {"k": b"short"}, {"k": "x" * 32}, {"k" * 256: NEW}, {1: NEW}]
)
def test_a_key_has_a_name_and_32_bytes(keys):
    with pytest.raises(InvalidValue):
        AesGcm(keys)
