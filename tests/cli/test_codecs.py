"""A store whose payloads a program wrote with its own codec, and the commands that run its code."""

import asyncio
import base64
import json
import uuid
import zlib

import pytest

from integration.conditions import until
from perdure import Runtime

APP = """
import zlib
from perdure import Codec, activity, orchestration, wait_for_event

class Squeezed:
    name = "squeezed"

    def wrap(self, data, context):
        return zlib.compress(data)

    def unwrap(self, data, context):
        return zlib.decompress(data)

@activity
def greet(name: str) -> str:
    return f"hello {name}"

@orchestration
async def hello(name: str) -> str:
    text = await greet(name)
    return text + await wait_for_event("go", str)

HANDLERS = [hello, greet]
"""
CODEC = "codec = Codec(Squeezed())\n"


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Writes the program and gives the name of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        name = f"app_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def squeezed(app, sqlite_cli):
    """Its module, with one instance that waits."""
    name = app(APP + CODEC)
    module = __import__(name)

    async def main():
        async with Runtime(sqlite_cli.store, [module], codec=module.codec) as runtime:
            handle = await runtime.start(module.hello, "ann", id="h-1")

            async def waits():
                steps = (await handle.describe()).waiting_for
                return bool(steps) and steps[0].kind == "event"

            await until(waits)

    asyncio.run(main())
    return name


def test_replay_and_stack_read_with_the_codec_of_the_module(sqlite_cli, squeezed):
    sqlite_cli("export", "h-1", "--file", "h-1.jsonl")

    assert sqlite_cli("replay", squeezed).lines == ["1 history · 1 ok"]
    assert sqlite_cli("replay", f"{squeezed}:HANDLERS", "h-1.jsonl").lines == ["1 history · 1 ok"]
    assert "'hello ann'" in sqlite_cli("stack", "h-1", "-m", squeezed).out


def test_a_worker_goes_on_with_what_the_program_wrote(sqlite_cli, squeezed, start_process):
    sqlite_cli("send", "h-1", "go", "--data", '"!"')

    start_process("worker", squeezed)
    output = json.loads(sqlite_cli("result", "h-1", "--timeout", "120s").out)

    assert output["$perdure"] == "squeezed"
    assert zlib.decompress(base64.b64decode(output["data"])) == b'"hello ann!"'


def test_commands_without_the_codec_say_what_they_cannot_read(sqlite_cli, squeezed):
    shown = sqlite_cli("show", "h-1").out
    assert "input    (sealed with 'squeezed', not readable here)" in shown
    assert "greet((sealed with 'squeezed', not readable here))" in shown
    assert "(sealed with 'squeezed', not readable here)" in sqlite_cli("history", "h-1").out
    assert sqlite_cli("db", "check").lines == ["✓ 1 instance read, no damage found"]
    for flags in ((), ("--from-event", "2")):
        refused = sqlite_cli("rerun", "h-1", "--id", "h-2", *flags, code=2)
        assert "'squeezed', and goes to another instance, so it has to be read here" in refused.err


def test_a_rerun_with_the_module_seals_the_copy_for_its_id(sqlite_cli, squeezed, start_process):
    sqlite_cli("rerun", "h-1", "--id", "h-2", "--from-event", "2", "-m", squeezed)
    sqlite_cli("send", "h-2", "go", "--data", '"!"')

    start_process("worker", squeezed)

    assert sqlite_cli("result", "h-2", "--timeout", "120s").out
    assert sqlite_cli("replay", squeezed).lines[-1].endswith(" ok")


def test_two_codecs_are_a_question(sqlite_cli, app):
    name = app(APP + CODEC + "again = codec\nother = Codec()\n")

    answer = sqlite_cli("replay", name, code=2)

    assert f"{name}:codec or {name}:other" in answer.err
