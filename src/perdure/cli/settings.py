"""The store and the modules of a command, from flags, environment and pyproject.toml.

``perdure.providers.url`` is imported inside functions: the import would slow --help.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.cli.render import warn
from perdure.errors import NotFound, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perdure.authoring.policies import Keep

DEFAULT_STORE: Final = "perdure.db"
_KNOWN: Final = ("store", "module", "keep")


@dataclass
class Settings:
    """The settings of one invocation; option callbacks fill them, commands read them."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: Path = field(default_factory=Path.cwd)
    store_flag: str | None = None
    traceback: bool = False
    other_stores: tuple[str, ...] = ()
    """Stores that were given as arguments; their passwords are hidden in messages."""

    @cached_property
    def project(self) -> tuple[Path, Mapping[str, Any]]:
        """The table [tool.perdure] of the nearest pyproject.toml upwards, with its folder."""
        for folder in (self.directory, *self.directory.parents):
            file = folder / "pyproject.toml"
            if file.is_file():
                table = _perdure_table(file)
                if table is not None and _is_foreign(file):
                    warn(
                        f"{file} belongs to another user and is ignored: it would choose the store "
                        "and the code; name them with --store and -m, or make the file your own"
                    )
                elif table is not None:
                    for name in sorted(table.keys() - set(_KNOWN)):
                        meant = did_you_mean(name, _KNOWN)
                        warn(f"{file}: [tool.perdure] has no setting {name!r}{meant}")
                    return folder, table
        return self.directory, {}

    def store(self) -> str:
        """Return the store's URL or path from the flag, environment, project or default."""
        chosen = self.store_flag if self.store_flag is not None else self._environment_store()
        if chosen is not None:
            if not chosen.strip():
                raise UsageError("the store is empty; name a file, e.g. --store shop.db")
            if (self.directory / chosen).is_dir():
                raise UsageError(f"{chosen!r} is a directory; write --store file:{chosen}")
            return chosen
        folder, table = self.project
        written = table.get("store")
        if written is None:
            return DEFAULT_STORE
        if not isinstance(written, str) or not written:
            raise UsageError(f"[tool.perdure] store in {folder}/pyproject.toml must be a text")
        return _beside(folder, written)

    def modules(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """Return the modules as given, from $PERDURE_MODULE, or from the project's ``module``."""
        if given:
            return given
        if self.environ.get("PERDURE_MODULE"):
            return tuple(self.environ["PERDURE_MODULE"].split(","))
        folder, table = self.project
        written = table.get("module", [])
        listed: list[Any] = written if is_list(written) else [written]
        if not all(isinstance(name, str) for name in listed):
            raise UsageError(
                f"[tool.perdure] module in {folder}/pyproject.toml must be a text or list of them"
            )
        return tuple(_module_beside(folder, name) for name in listed)

    def keep(self) -> Keep | None:
        """Return how long ended instances are kept, from the project's ``keep``."""
        from perdure.authoring.policies import parse_keep

        folder, table = self.project
        written: Keep | None = table.get("keep")
        parse_keep(written, f"[tool.perdure] keep in {folder}/pyproject.toml")
        return written

    def existing_store(self) -> str:
        """Return the store; raise NotFound if a local path does not exist."""
        url = self.store()
        path = self.place(url)
        if path is not None and is_empty(path):
            raise no_store(url)
        return url

    def place(self, url: str) -> Path | None:
        """Return the path of a local store; None for servers, memory and foreign schemes."""
        from perdure.providers.url import local_path

        path = local_path(url)
        return None if path is None else self.directory / path

    def conceal(self, text: str) -> str:
        """Return an error text without the passwords of store URLs that it quotes."""
        from perdure.providers.url import without_secrets

        named = [self.store_flag, self._environment_store(), *self.other_stores]
        with suppress(UsageError, OSError):  # the project file cannot be read
            named.append(str(self.project[1].get("store", "")))
        return without_secrets(text, *filter(None, named))

    def _environment_store(self) -> str | None:
        return self.environ.get("PERDURE_STORE") or None


def no_store(url: str) -> NotFound:
    return NotFound(
        f"there is no store at {shown_store(url)}; name it with --store or $PERDURE_STORE, "
        "or let 'perdure start' or 'perdure worker' create one"
    )


def is_list(value: object) -> bool:
    # A function: inside of it, type checkers lose no type of the members.
    return isinstance(value, list)


def is_empty(path: Path) -> bool:
    """Return True for a missing path, an empty directory or an empty file."""
    if path.is_dir():
        return next(path.iterdir(), None) is None
    return not path.exists() or path.stat().st_size == 0


def shown_store(url: str) -> str:
    """Return the store's URL without its password."""
    from perdure.providers.url import shown_url

    return shown_url(url)


def _beside(folder: Path, written: str) -> str:
    """Resolve a relative path of a project file against the folder of that file."""
    from perdure.providers.url import local_path, with_path

    path = local_path(written)
    if path is None or Path(path).is_absolute():
        return written
    return with_path(written, os.path.relpath(folder / path))


def _module_beside(folder: Path, written: str) -> str:
    place, colon, attribute = written.partition(":")
    if not place.endswith(".py") or Path(place).is_absolute():
        return written
    return os.path.relpath(folder / place) + colon + attribute


def _is_foreign(file: Path) -> bool:
    """Return True for a file of neither this user nor root; False where files have no owner."""
    return hasattr(os, "geteuid") and file.stat().st_uid not in {os.geteuid(), 0}


def _perdure_table(file: Path) -> Mapping[str, Any] | None:
    import tomllib

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    table: Any = document.get("tool", {}).get("perdure")
    return cast("dict[str, Any]", table) if isinstance(table, dict) else None
