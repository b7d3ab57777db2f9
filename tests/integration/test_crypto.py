"""Payloads that are encrypted: nothing readable is stored, and keys can be replaced."""

import secrets

import pytest

from integration.conditions import waiting
from perdure import (
    Client,
    Codec,
    PerdureError,
    Runtime,
    activity,
    next_message,
    orchestration,
    set_custom_status,
    side_effect,
    state,
    transaction,
    wait_for_event,
)
from perdure.crypto import AesGcm
from perdure.errors import CannotUnwrap, InvalidValue

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
SECRET = "4111-1111"


class Declined(PerdureError):
    """An error of the author that is also one of ours."""


@activity(raises=[LookupError])
async def refuse(card: str) -> None:
    raise LookupError(card)


@activity(transactional=True, raises=[Declined])
def refuse_in_transaction(card: str) -> None:
    transaction().execute("SELECT 1")
    error = Declined("no")
    error.card = card
    raise error


@activity
async def echo(card: str) -> str:
    return card


@orchestration
async def child(card: str) -> str:
    return await echo(card)


@orchestration
async def flow(card: str) -> list[str]:
    state["card"] = card
    set_custom_status({"card": card})
    seen = [await child(card), side_effect(lambda: card, str)]
    try:
        await refuse_in_transaction(card)
    except Declined as error:
        seen.append(error.card)
    seen.append(await wait_for_event("card", str))
    seen.append(await next_message("cards", str))
    return [*seen, state["card"]]


HANDLERS = [flow, child, echo, refuse, refuse_in_transaction]


async def test_no_payload_is_readable_in_the_store_and_keys_can_be_replaced(tmp_path):
    store = tmp_path / "store.db"
    async with Runtime(store, HANDLERS, codec=Codec(AesGcm({"old": OLD}))) as runtime:
        await runtime.start(flow, SECRET, id="x")
        await waiting(runtime, "x")
    both = Codec(AesGcm({"new": NEW, "old": OLD}))
    async with Client(store, codec=both) as client:
        await client.raise_event("x", "card", SECRET)
        await client.send_message("x", "cards", SECRET)
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert SECRET.encode() not in files
    assert b'{"$perdure":"aes-gcm"' in files
    async with Runtime(store, HANDLERS, codec=both) as runtime:
        handle = runtime.get("x")
        assert await handle.result() == [SECRET] * 6
    async with Client(store, codec=Codec(AesGcm({"old": OLD}))) as client:
        with pytest.raises(CannotUnwrap, match="it needs the key 'new'; there are: old"):
            await client.get("x").result()


def test_a_changed_byte_is_found():
    transform = AesGcm({"k": NEW})
    wrapped = transform.wrap(b"data")
    assert transform.unwrap(wrapped) == b"data"
    assert transform.wrap(b"data") != wrapped
    for index in range(len(wrapped)):
        changed = bytearray(wrapped)
        changed[index] ^= 1
        with pytest.raises(Exception):  # noqa: B017, PT011 - each part has its own error
            transform.unwrap(bytes(changed))


@pytest.mark.parametrize(
    "keys", [{}, {"": NEW}, {"k": b"short"}, {"k": "x" * 32}, {"k" * 256: NEW}, {1: NEW}]
)
def test_a_key_has_a_name_and_32_bytes(keys):
    with pytest.raises(InvalidValue):
        AesGcm(keys)
