"""Numbered SQL files, forward only. Finds them and says which are due; the backend applies them.

A file is ``NNNN_name.sql`` beside the backend that it belongs to, numbered from 0001 without gaps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.errors import InternalError, StoreRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from schema ``number - 1`` to schema ``number``."""

    number: int
    name: str
    sql: str


def load_migrations(package: str, folder: str = "migrations") -> tuple[Migration, ...]:
    """Return the migrations in a folder of a package, in order."""
    found: list[Migration] = []
    for entry in folder_of(package, folder).iterdir():
        if entry.name.endswith(".sql"):
            match = _FILE_NAME.fullmatch(entry.name)
            if match is None:
                raise InternalError(f"migration file name {entry.name!r} is not NNNN_name.sql")
            found.append(Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8")))
    found.sort(key=lambda migration: migration.number)
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise InternalError(f"migrations of {package} are not numbered 1, 2, 3, ...")
    return tuple(found)


def folder_of(package: str, folder: str) -> Path:
    """Return the path of a folder of a package.

    Not by importlib.resources: loading that takes as long as opening a store.
    """
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / folder


def due_migrations(
    migrations: Sequence[Migration], schema_version: int, location: str
) -> Sequence[Migration]:
    """Return the migrations that the store needs. Raise StoreRefused for a newer schema."""
    newest = migrations[-1].number
    if schema_version > newest:
        raise StoreRefused(
            "open",
            f"{location} has schema {schema_version}, written by a newer version of perdure; this "
            f"one knows schemas up to {newest}. Upgrade perdure, or open another store",
        )
    return migrations[schema_version:]
