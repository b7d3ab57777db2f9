"""Where a command works: the store and the code, from flags, environment and pyproject.toml."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_STORE: Final = "perdure.db"


@dataclass
class Settings:
    """What holds for one invocation; commands read it, the option callbacks fill it."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: Path = field(default_factory=Path.cwd)
    store_flag: str | None = None
    traceback: bool = False
    other_stores: tuple[str, ...] = ()
    """Those that a command was given as arguments."""

    @cached_property
    def project(self) -> tuple[Path, Mapping[str, Any]]:
        """The nearest pyproject.toml upwards that has [tool.perdure]: its folder and that table."""
        for folder in (self.directory, *self.directory.parents):
            file = folder / "pyproject.toml"
            if file.is_file():
                table = _perdure_table(file)
                if table is not None:
                    return folder, table
        return self.directory, {}

    def store(self) -> str:
        """The store's URL or path; flag, then environment, then project, then the default."""
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
        """Where the user's code is: as given, or $PERDURE_MODULE, or the project's ``module``."""
        if given:
            return given
        if self.environ.get("PERDURE_MODULE"):
            return tuple(self.environ["PERDURE_MODULE"].split(","))
        folder, table = self.project
        written = table.get("module", ())
        listed = [written] if isinstance(written, str) else list(written)
        if not all(isinstance(name, str) for name in listed):
            raise UsageError(
                f"[tool.perdure] module in {folder}/pyproject.toml must be a text or list of them"
            )
        return tuple(_module_beside(folder, name) for name in listed)

    def existing_store(self) -> str:
        """As ``store``, for commands that must not create one: a local path has to be there."""
        url = self.store()
        path = self.place(url)
        if path is not None and is_empty(path):
            raise no_store(url)
        return url

    def place(self, url: str) -> Path | None:
        """Where a local store lies; None for servers, memory and foreign schemes."""
        from perdure.providers.url import local_path  # felt in --help

        path = local_path(url)
        return None if path is None else self.directory / path

    def conceal(self, text: str) -> str:
        """An error text, which may quote a store's URL, without the passwords of any."""
        from perdure.providers._shared.secrets import without_secrets

        named = [self.store_flag, self._environment_store(), *self.other_stores]
        with suppress(UsageError, OSError):  # of a project file that cannot be read
            named.append(str(self.project[1].get("store", "")))
        return without_secrets(text, *filter(None, named))

    def _environment_store(self) -> str | None:
        return self.environ.get("PERDURE_STORE") or None


def no_store(url: str) -> NotFound:
    return NotFound(
        f"there is no store at {shown_store(url)}; name it with --store or $PERDURE_STORE, "
        "or let 'perdure start' or 'perdure worker' create one"
    )


def is_empty(path: Path) -> bool:
    """Nothing, an empty directory or an empty file: whoever opened it would make a store of it."""
    if path.is_dir():
        return next(path.iterdir(), None) is None
    return not path.exists() or path.stat().st_size == 0


def shown_store(url: str) -> str:
    """The store's name without its password."""
    from perdure.providers._shared.secrets import shown_url  # felt in --help

    return shown_url(url)


def _beside(folder: Path, written: str) -> str:
    """A relative path in a project file is relative to that file."""
    from perdure.providers.url import local_path

    path = local_path(written)
    if path is None or Path(path).is_absolute():
        return written
    return written[: len(written) - len(path)] + os.path.relpath(folder / path)


def _module_beside(folder: Path, written: str) -> str:
    place, colon, attribute = written.partition(":")
    if not place.endswith(".py") or Path(place).is_absolute():
        return written
    return os.path.relpath(folder / place) + colon + attribute


def _perdure_table(file: Path) -> Mapping[str, Any] | None:
    import tomllib

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    table: Any = document.get("tool", {}).get("perdure")
    return cast("dict[str, Any]", table) if isinstance(table, dict) else None
