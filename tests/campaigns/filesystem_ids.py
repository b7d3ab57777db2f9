"""Instance ids of every kind, through a store and back, and not one file outside of it.

python -m campaigns.filesystem_ids --ids 100000      (with tests/ on the path)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

from perdure.conformance import factories
from perdure.errors import InvalidValue
from perdure.limits import check_id
from perdure.model.status import Status
from perdure.providers.directory import FileSystemProvider
from perdure.providers.records import (
    ExecutionMetadata,
    OrchestratorMessage,
    StartRouting,
    TurnCommit,
)

NASTY = (
    *("..", ".", "../..", "../../etc/passwd", "/etc/passwd", "/", "//", "\\", "..\\..", "C:\\x"),
    *("CON", "con", "NUL", "aux.txt", "COM1", "LPT1", "a.", "a ", " a", "a..", "~", "~root"),
    *("-", "--help", "-rf", "*", "?", "[a]", "$HOME", "`id`", "$(id)", ";", "|", "&", "'", '"'),
    *(
        "é",
        "e\u0301",
        "Å",
        "A\u030a",
        "ﬁ",
        "fi",
        "Straße",
        "STRASSE",
        "İ",
        "i\u0307",
        "\u0131",
        "I",
    ),
    *("\u202eabc", "\u200b", "a\u200bb", "\ufeff", "日本語", "😀", "👨\u200d👩\u200d👧", "a" * 255),
    *("a/b/c", "a::b::c", "parent::sub::1", "file:///x", "%2e%2e%2f", "%00", "a%2fb", "x" * 254),
    *(
        "meta.json",
        "executions",
        "tmp",
        "journal",
        "lock",
        "store.json",
        "\U0001d4b3" * 255,
        "A",
        "a",
    ),
)
_READS_AT_ONCE = 200
REFUSED = ("", " ", "\0", "a\0b", "\n", "a\nb", "\x7f", "\x85", "\ud800", "a" * 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        ids = [*NASTY, *generated_ids(options.ids, options.seed)]
        asyncio.run(round_trip(Path(directory), ids))
    print(f"{len(set(ids))} ids came back, {len(REFUSED)} were refused, 0 files outside the root")


def generated_ids(count: int, seed: int) -> list[str]:
    """Random ids: any characters, twins that differ in case or composition, path-like ones."""
    rng = random.Random(seed)
    ids: list[str] = []
    while len(ids) < count:
        kind = rng.randrange(4)
        if kind == 0:
            made = "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(rng.randrange(1, 40)))
        elif kind == 1:
            made = "".join(chr(rng.randrange(0x20, 0x110000)) for _ in range(rng.randrange(1, 20)))
        elif kind == 2:
            made = rng.choice("/\\.:") * rng.randrange(1, 5) + str(rng.randrange(count))
        else:
            made = unicodedata.normalize(
                rng.choice(("NFC", "NFD")), f"Ünïcode-{rng.randrange(count // 4 + 1)}"
            )
            made = rng.choice((made, made.upper(), made.lower()))
        try:
            ids.append(check_id(made, "instance id"))
        except InvalidValue:
            continue
    return ids


async def round_trip(directory: Path, ids: list[str]) -> None:
    """Each id through a start, a turn, the files and another opening."""
    unique = list(dict.fromkeys(ids))
    root = directory / "store"
    async with FileSystemProvider(root) as provider:
        for refused in REFUSED:
            try:
                await provider.enqueue_for_orchestrator(
                    OrchestratorMessage(
                        instance_id=refused,
                        kind="start",
                        body="{}",
                        start=StartRouting(name="Shop"),
                    )
                )
            except InvalidValue:
                continue
            raise AssertionError(f"{refused!r} was taken")
        await provider.enqueue_many_for_orchestrator([factories.start(each) for each in unique])
        await asyncio.gather(*(_take_turns(provider) for _ in range(50)))
    began, used = time.monotonic(), time.process_time()
    async with FileSystemProvider(root) as provider:
        print(
            f"opened with {len(unique)} finished instances in {time.monotonic() - began:.1f} s "
            f"({time.process_time() - used:.1f} s of processor time)",
            flush=True,
        )
        found: set[str] = set()
        cursor = None
        while True:
            page = await provider.admin.list_instances(cursor=cursor, limit=1000)
            found.update(info.instance_id for info in page.instances)
            if (cursor := page.next_cursor) is None:
                break
        assert found == set(unique)
        for start in range(0, len(unique), _READS_AT_ONCE):
            part = unique[start : start + _READS_AT_ONCE]
            histories = await asyncio.gather(*(provider.read(each) for each in part))
            assert histories == [[factories.event(each, 1)] for each in part]
    _check_nothing_outside(directory)


def _check_nothing_outside(directory: Path) -> None:
    assert [path.name for path in directory.iterdir()] == ["store"]
    assert not [path for path in directory.rglob("*") if path.is_symlink()]


async def _take_turns(provider: FileSystemProvider) -> None:
    while (fetched := await provider.fetch_orchestration_item(60_000, 0)) is not None:
        instance_id = fetched.item.instance_id
        await provider.ack_orchestration_item(
            fetched.lock_token,
            TurnCommit(
                execution_id=1,
                history_delta=(factories.event(instance_id, 1),),
                metadata=ExecutionMetadata(
                    name="Shop", version="1.0.0", status=Status.COMPLETED, output="1"
                ),
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
