"""ChangeWatcher: interface of an object that records the changes of clients to control files."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ChangeWatcher(ABC):
    """Interface of an object that is called after each request that may have changed a control file.

    Lock: held, for all methods except settle().
    """

    @abstractmethod
    def truncated(self, path: str) -> None:
        """Record that the file at `path` was opened with O_TRUNC."""

    @abstractmethod
    def written(self, handle: int, path: str, data: bytes, *, failed: bool, is_part: bool) -> None:
        """Record that a write(2) took `data`, or that it failed and may have executed a part of `data`.

        `handle`: the mount's handle of the open file. `failed`: whether the write failed. `is_part`: whether
        `data` ends in the middle of a line, which the next write continues.
        """

    @abstractmethod
    def released(self, handle: int) -> None:
        """Record that the last descriptor of the open file with the mount's handle `handle` was closed."""

    @abstractmethod
    def made(self, path: str) -> None:
        """Record that the directory `path` was created."""

    @abstractmethod
    def removed(self, path: str) -> None:
        """Record that the directory `path` was removed."""

    @abstractmethod
    def closed(self) -> None:
        """Record that the mount ends."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the changes that the calling thread has reported are saved.

        The file system calls this method before it answers the request.
        Lock: not used, because the host's file system may take any time.
        """
