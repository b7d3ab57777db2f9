"""Names and places inside the root.

An id never becomes a path: a slug of it is for people, a hash of it decides.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

SLUG_CHARACTERS_MAX: Final = 40

STORE_FILE: Final = "store.json"
README_FILE: Final = "README.md"
LOCK_FILE: Final = "lock"
SESSIONS_FILE: Final = "sessions.json"
WORKERS_FILE: Final = "workers.json"
INSTANCE_FILE: Final = "meta.json"
EXECUTION_FILE: Final = "state.json"
HISTORY_FILE: Final = "history.jsonl"
JOURNAL: Final = "journal"
INSTANCES: Final = "instances"
ARCHIVE: Final = "archive"
ORCHESTRATOR_QUEUE: Final = "queues/orchestrator"
WORKER_QUEUE: Final = "queues/worker"
DEAD_LETTERS: Final = "queues/dead-letters"
SCRATCH: Final = "tmp"

DIRECTORIES: Final = (
    JOURNAL,
    INSTANCES,
    "queues",
    ORCHESTRATOR_QUEUE,
    WORKER_QUEUE,
    DEAD_LETTERS,
    SCRATCH,
)
"""Parents before children: the order of creation."""

OWN_NAMES: Final = frozenset(
    {
        STORE_FILE,
        README_FILE,
        LOCK_FILE,
        SESSIONS_FILE,
        WORKERS_FILE,
        JOURNAL,
        INSTANCES,
        ARCHIVE,
        "queues",
        SCRATCH,
    }
)
"""What may lie in the root; a directory with anything else in it does not become a store."""

_NOT_SLUG = re.compile(r"[^a-z0-9]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEGMENT = re.compile(r"(\d{16})\.jsonl")


def slug(text: str) -> str:
    """What a person recognises of a text, in characters that every file system keeps apart."""
    return _NOT_SLUG.sub("-", text.lower()).strip("-")[:SLUG_CHARACTERS_MAX].rstrip("-")


def instance_name(instance_id: str) -> str:
    """File name of an instance: unique by the hash, whatever the id holds."""
    return f"{slug(instance_id)}~{hashlib.sha256(instance_id.encode()).hexdigest()}"


def instance_directory(instance_id: str) -> str:
    return f"{INSTANCES}/{instance_name(instance_id)}"


def execution_directory(instance_id: str, execution_id: int) -> str:
    return f"{instance_directory(instance_id)}/executions/{execution_id}"


def history_file(instance_id: str, execution_id: int) -> str:
    return f"{execution_directory(instance_id, execution_id)}/{HISTORY_FILE}"


def archive_directory(instance_id: str) -> str:
    return f"{ARCHIVE}/{instance_name(instance_id)}"


def archived_history(instance_id: str, execution_id: int) -> str:
    return f"{archive_directory(instance_id)}/{execution_id}.jsonl.gz"


def message_file(message_id: int, instance_id: str, kind: str) -> str:
    return f"{ORCHESTRATOR_QUEUE}/{_entry(message_id, instance_id, kind)}"


def work_file(message_id: int, instance_id: str, name: str) -> str:
    return f"{WORKER_QUEUE}/{_entry(message_id, instance_id, name)}"


def letter_file(letter_id: int, instance_id: str, kind: str) -> str:
    return f"{DEAD_LETTERS}/{_entry(letter_id, instance_id, kind)}"


def _entry(entry_id: int, instance_id: str, what: str) -> str:
    """Sorts in queue order."""
    return f"{entry_id:012d}-{slug(instance_id)}~{slug(_HUMP.sub('-', what))}.json"


def segment_file(first_sequence: int) -> str:
    return f"{JOURNAL}/{first_sequence:016d}.jsonl"


def segment_sequence(name: str) -> int | None:
    """First sequence number of a journal segment; None if the name is not one."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match else None


README: Final = """\
# A perdure store

Everything in this directory belongs to one store. Read it, search it, copy it; do not edit it. Open
it with `perdure` or `FileSystemProvider(path)`, one process at a time.

| path | what it is |
|---|---|
| `store.json` | format, and how far these files are up to date with the journal |
| `journal/` | the commits that the files below do not hold yet; this is where a commit happens |
| `instances/<name>/meta.json` | an instance; `<name>` is its id, made readable, and a hash |
| `instances/<name>/executions/<n>/state.json` | one execution of it |
| `instances/<name>/executions/<n>/history.jsonl` | its history, one event a line |
| `queues/orchestrator/` | messages on their way to instances, in order |
| `queues/worker/` | activities to be run, in order |
| `queues/dead-letters/` | messages that nobody could take |
| `sessions.json` | which worker holds which session |
| `workers.json` | runtimes that announced themselves |
| `archive/` | compressed histories of old executions |
| `lock` | says which process has the store open; empty if none has |
| `tmp/` | files that are being written |

The files follow the journal after a moment, and at once when the store is closed. Times are UTC.
Each file has a checksum; one that was changed by hand is left aside when the store is opened. To
keep a state under version control, close the store, then add the whole directory.
"""
