"""Exports that were changed and given a checksum that fits, imported and then run.

    python -m campaigns.forged_exports --forgeries 5000      (with tests/ on the path)

Each forgery changes one to three values of an export with instances of every kind. An import must
refuse it in one line, or take it; then ``perdure db check`` finds no damage, every command that
looks at the store works, and a worker on the store still runs other instances.
"""

import argparse
import asyncio
import copy
import hashlib
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

from cli import flows
from cli.conftest import Cli
from patience import HANG_SECONDS
from perdure import Runtime

VALUES = (
    *(None, True, -1, 0, 1, 2, 3, 2**31, 2**53, 2**62, 2**64, 1.5, "", "x", "a-1", "p-1", "h-1"),
    *("Completed", "Failed", "Running", "ContinuedAsNew", "Cancelled", "Paused", "1.0.0", "\0"),
    *([], {}, [1], {"a": 1}, {"$perdure": 5}, {"$perdure": "datetime"}, "x" * 300),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forgeries", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    print(f"{options.forgeries} forgeries, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        ends = run_forgeries(options.forgeries, seed)
    print(f"{ends['refused']} refused, {ends['taken']} taken: 0 damaged stores")


def run_forgeries(number: int, seed: int) -> Counter:
    """Run in the current directory; raise at the first violation."""
    rng = random.Random(seed)
    *lines, end = exported()
    ends: Counter = Counter()
    for place in range(number):
        chosen = rng.randrange(len(lines))
        forged = resealed(lines[chosen], lambda instance: _forge(instance, lines, rng))
        text = "".join([*lines[:chosen], forged, *lines[chosen + 1 :], end])
        try:
            ends[_import(text)] += 1
        except Exception:
            print(f"forgery {place} of seed {seed}: {forged[:2_000]}")
            raise
    return ends


def exported() -> list[str]:
    """The lines of an export: waiting, retrying, asleep, ended, continued, not begun."""
    cli = Cli("origin.db")
    waiting = {"a-1", "p-1", "p-1::1.2", "r-1", "s-1", "k-1"}
    cli.run(
        ("a-1", flows.approval, 1),
        ("c-1", flows.approval, 1),
        ("f-1", flows.failing, "boom"),
        ("h-1", flows.hello, "ann"),
        ("k-1", flows.rounds, 2),
        ("p-1", flows.parent_of_waiting),
        ("r-1", flows.retrying),
        ("s-1", flows.sleeper, 99_999.0),
        until_open={*waiting, "c-1"},
    )
    cli("send", "k-1", "go", "--data", '"x"')
    cli("cancel", "c-1")
    cli.run(("k-1", flows.rounds, 2), ("c-1", flows.approval, 1), until_open={"k-1"})
    cli("send", "k-1", "go", "--data", '"x"')
    cli("send", "a-1", "answer", "--data", '"x"')
    cli("start", "hello", "--id", "n-1", "--input", '["x"]')
    cli("start", "hello", "--id", "l-1", "--input", '["x"]', "--in", "1h")
    assert cli("db", "check", "-o", "json").json["damages"] == []
    return cli("export", "--query", "created:<1d").out.splitlines(keepends=True)


def resealed(line: str, change) -> str:
    """The line of an export after a change of its instance, with a checksum that fits."""
    document = json.loads(line)
    change(document["instance"])
    body = json.dumps(document["instance"], separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"perdure_export":1,"sha256":"{digest}","instance":{body}}}\n'


def _forge(instance, lines, rng) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = [path for path in _paths(instance) if path]
        if not paths:
            return
        *inside, key = rng.choice(paths)
        parent = _at(instance, inside)
        donor = json.loads(rng.choice(lines))["instance"]
        alike = [path for path in _paths(donor) if path and path[-1] == key]
        match rng.randrange(6):
            case 0 | 1:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
            case 2:
                del parent[key]
            case 3:
                parent[key] = _at(donor, rng.choice(list(_paths(donor))))
            case 4 if alike:
                parent[key] = _at(donor, rng.choice(alike))
            case _ if isinstance(parent, list):
                parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
            case _ if isinstance(parent[key], int):
                parent[key] += rng.choice([-1, 1])
            case _:
                pass


def _paths(value, path=()):
    yield path
    members = value.items() if isinstance(value, dict) else ()
    for key, member in enumerate(value) if isinstance(value, list) else members:
        yield from _paths(member, (*path, key))


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def _import(text: str) -> str:
    Path("forged.jsonl").write_text(text)
    for left in Path().glob("target.db*"):
        left.unlink()
    target = Cli("target.db")
    answer = target("import", "forged.jsonl", code=None)
    if answer.code:
        assert answer.code == 2, answer
        assert len(answer.err.splitlines()) == 1, answer
        return "refused"
    ids = target("list", "--limit", "100", "-o", "ids").lines
    assert len(ids) == text.count('"sha256"'), ids
    target("list", "-o", "json")
    for command in ("show", "tree", "history"):
        for instance_id in ids:
            target(command, instance_id)
    target("db", "check")
    asyncio.run(_run_another())
    target("db", "check")
    return "taken"


async def _run_another() -> None:
    async with Runtime("target.db", [flows]) as runtime:
        handle = await runtime.start(flows.hello, "bob", id="bob")
        assert await handle.result(HANG_SECONDS) == "hello bob"


if __name__ == "__main__":
    main()
