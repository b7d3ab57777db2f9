"""Names and places inside the root, and the files that were found damaged there.

An id never becomes a path. The name of an instance is a slug of its id, for people, and a short
hash of the id. If two ids would get the same name, the second one gets a longer hash. A damaged
file stays as it is, and its instance is refused.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

from perdure.errors import CorruptData
from perdure.logs import get_logger

_log = get_logger("perdure.directory")

SLUG_CHARACTERS_MAX: Final = 40

STORE_FILE: Final = "store.json"
README_FILE: Final = "README.md"
LOCK_FILE: Final = "lock"
SESSIONS_FILE: Final = "sessions.json"
WORKERS_FILE: Final = "workers.json"
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
    {STORE_FILE, README_FILE, LOCK_FILE, SESSIONS_FILE, WORKERS_FILE, ARCHIVE}
).union(path.partition("/")[0] for path in DIRECTORIES)
"""The names in the root. A directory with any other name in it does not become a store."""

_NOT_SLUG = re.compile(r"[^a-z0-9]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEGMENT = re.compile(r"(\d{16})\.jsonl")
_HASH_CHARACTERS: Final = (12, 32)
"""Digits of the hash in a short and in a long name. In the layout of version 1 a name has all."""
_OLD_NAME = re.compile(r"[a-z0-9-]*~[0-9a-f]{64}")
_OLD_ENTRY = re.compile(r"\d{12,}-[a-z0-9-]*~[a-z0-9-]*\.json")
_ENTRY = re.compile(r"\d{12,}-([a-z0-9-]*~[0-9a-f]+)~[a-z0-9-]*\.json")


def slug(text: str) -> str:
    """Return the readable part of a name, in characters that every file system keeps apart."""
    return _NOT_SLUG.sub("-", text.lower()).strip("-")[:SLUG_CHARACTERS_MAX].rstrip("-")


@lru_cache(maxsize=8192)  # a checkpoint writes many instances, and then their messages
def instance_names(instance_id: str) -> tuple[str, str, str]:
    """Return the short name, the long name and the name of version 1."""
    begin, digest = slug(instance_id), hashlib.sha256(instance_id.encode()).hexdigest()
    short, long = _HASH_CHARACTERS
    return f"{begin}~{digest[:short]}", f"{begin}~{digest[:long]}", f"{begin}~{digest}"


def document_file(name: str) -> str:
    """Return the only file of a small instance."""
    return f"{INSTANCES}/{name}.json"


def instance_directory(name: str) -> str:
    return f"{INSTANCES}/{name}"


def meta_file(name: str) -> str:
    return f"{INSTANCES}/{name}/meta.json"


def executions_directory(name: str) -> str:
    return f"{INSTANCES}/{name}/executions"


def execution_file(name: str, execution_id: int) -> str:
    return f"{executions_directory(name)}/{execution_id}.json"


def history_file(name: str, execution_id: int) -> str:
    return f"{executions_directory(name)}/{execution_id}.jsonl"


def archive_directory(name: str) -> str:
    return f"{ARCHIVE}/{name}"


def archived_history(name: str, execution_id: int) -> str:
    return f"{ARCHIVE}/{name}/{execution_id}.jsonl.gz"


def entry_file(queue: str, entry_id: int, instance_id: str, kind: str) -> str:
    """Return the file of a message, a work item or a dead letter. Names sort in queue order."""
    name = instance_names(instance_id)[0]
    return f"{queue}/{entry_id:012d}-{name}~{_slug_of_kind(kind)}.json"


@lru_cache(maxsize=256)  # of messages and activities there are few kinds
def _slug_of_kind(kind: str) -> str:
    return slug(_HUMP.sub("-", kind))


def instance_of_entry(file_name: str) -> str | None:
    """Return the name of the instance in the name of a queue's file; None if it has none."""
    match = _ENTRY.fullmatch(file_name)
    return match[1] if match else None


def is_old_instance(file_name: str) -> bool:
    """Return True if it is the directory of an instance in the layout of version 1."""
    return _OLD_NAME.fullmatch(file_name) is not None


def is_old_entry(file_name: str) -> bool:
    """Return True if it is the file of a queue in the layout of version 1."""
    return _OLD_ENTRY.fullmatch(file_name) is not None


def segment_file(first_sequence: int) -> str:
    return f"{JOURNAL}/{first_sequence:016d}.jsonl"


def segment_sequence(name: str) -> int | None:
    """Return the first sequence number of a journal segment; None if the name is not one."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match else None


README: Final = """\
# A perdure store

Everything in this directory belongs to one store. Read it, search it, copy it; do not edit it. Open
it with `perdure` or `FileSystemProvider(path)`, one process at a time.

| path | content |
|---|---|
| `store.json` | format, and how far these files are up to date with the journal |
| `journal/` | the commits that the files below do not hold yet; this is where a commit happens |
| `instances/<name>.json` | a small instance and its history; `<name>` is its id, made readable |
| `instances/<name>/meta.json` | a big instance: one with a long history or many executions |
| `instances/<name>/executions/<n>.json` | one execution of a big instance |
| `instances/<name>/executions/<n>.jsonl` | its history if that is long, one event a line |
| `queues/orchestrator/` | messages on their way to instances, in order |
| `queues/worker/` | activities to be run, in order |
| `queues/dead-letters/` | messages that no instance took |
| `sessions.json` | which worker holds which session |
| `workers.json` | runtimes that announced themselves |
| `archive/` | compressed histories of old executions |
| `lock` | the process that has the store open; empty if none has |
| `tmp/` | files that are being written |

The files follow the journal after a moment, and at once when the store is closed. Times are UTC.
Each file has a checksum; one that was changed by hand is left aside when the store is opened. To
keep a state under version control, close the store, then add the whole directory.
"""


class InstanceNames:
    """The names that instances have on the disk."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}
        """The id of the instance, by its name."""
        self.directories: set[str] = set()
        """Names of the instances that have a directory; the others have one file."""

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def name_of(self, instance_id: str) -> str:
        """Return the name that the instance has, or would get."""
        short, long, _ = instance_names(instance_id)
        if self._taken.get(short, instance_id) != instance_id:
            return long
        # The short name may be free again since the instance got its long one.
        return long if self._taken.get(long) == instance_id else short

    def add(self, name: str, instance_id: str, *, is_directory: bool = False) -> None:
        """Give the name to the instance: it has files, or gets them with this checkpoint."""
        self._taken[name] = instance_id
        if is_directory:
            self.directories.add(name)

    def path(self, name: str) -> str:
        """Return the file of a small instance, or the directory of another one."""
        return instance_directory(name) if name in self.directories else document_file(name)

    def discard(self, name: str) -> None:
        self._taken.pop(name, None)
        self.directories.discard(name)


class DamagedFiles:
    """The damaged files of a store, and the instances that cannot be used because of them."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path
        self.reasons: dict[str, str] = {}
        """Why each file is damaged, by its path inside the root."""
        self._refused: dict[str, str] = {}
        """The path of a damaged file, by the name of the instance that cannot be used."""
        self.lost: set[str] = set()
        """Names of the instances whose own files are damaged: they are not written again."""

    def add(self, path: str, reason: object, name: str | None, *, is_lost: bool = False) -> None:
        """Report a file, and refuse its instance from now on."""
        _log.error("%s/%s cannot be read and is left aside: %s", self._root_path, path, reason)
        self.reasons[path] = str(reason)
        if name is not None:
            self._refused[name] = path
            if is_lost:
                self.lost.add(name)

    def is_refused(self, instance_id: str) -> bool:
        """Return True if the instance cannot be used."""
        return bool(self._refused) and not self._refused.keys().isdisjoint(
            instance_names(instance_id)
        )

    def is_lost(self, instance_id: str) -> bool:
        """Return True if the files of the instance itself are damaged."""
        return bool(self.lost) and not self.lost.isdisjoint(instance_names(instance_id))

    def check(self, operation: str, instance_id: str) -> None:
        """Raise CorruptData for an instance that cannot be used."""
        if self._refused:
            for name in instance_names(instance_id):
                if (path := self._refused.get(name)) is not None:
                    raise CorruptData(
                        operation,
                        f"the files of {instance_id!r} are damaged ({self.reasons[path]}); restore "
                        f"{path} from a backup and open the store again",
                    )
