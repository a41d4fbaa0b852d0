"""ChangeWatcher: reports of the changes that clients make to control files."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ChangeWatcher(ABC):
    """Receives the requests that may have changed control files, in their order. Lock: needs."""

    @abstractmethod
    def truncated(self, path: str) -> None:
        """Record that the file at `path` was opened with O_TRUNC."""

    @abstractmethod
    def written(self, handle: int, path: str, data: bytes, *, failed: bool, is_part: bool) -> None:
        """Record that a write(2) took these bytes, or failed and may have executed a part of them.

        `is_part`: the text after the last newline continues in the next write.
        """

    @abstractmethod
    def released(self, handle: int) -> None:
        """Record that the last descriptor of an open file was closed."""

    @abstractmethod
    def made(self, path: str) -> None:
        """Record that the directory `path` was created."""

    @abstractmethod
    def removed(self, path: str) -> None:
        """Record that the directory `path` was removed."""

    @abstractmethod
    def closed(self) -> None:
        """Record that the mount ends."""
