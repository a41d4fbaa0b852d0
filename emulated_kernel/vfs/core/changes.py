"""Who is told of what clients change in the files of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ChangeWatcher(ABC):
    """Told, under the control lock, what was asked of the files of ours that may have changed something."""

    @abstractmethod
    def truncated(self, path: str) -> None:
        """It was opened with O_TRUNC."""

    @abstractmethod
    def written(self, handle: int, path: str, data: bytes, *, failed: bool, is_part: bool) -> None:
        """A write(2) took these bytes, or failed: it may have done a part of what it was told, then.

        `is_part`: what stands behind their last newline goes on in another one.
        """

    @abstractmethod
    def released(self, handle: int) -> None:
        """The last descriptor of an open file was closed."""

    @abstractmethod
    def made(self, path: str) -> None:
        """A directory."""

    @abstractmethod
    def removed(self, path: str) -> None:
        """A directory."""

    @abstractmethod
    def closed(self) -> None:
        """The mount ends."""
