"""A store in a directory of readable files, for one process at a time."""

from perdure.providers.directory.store import FileSystemProvider

__all__ = ["FileSystemProvider"]
