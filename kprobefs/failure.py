"""Failure: an error for the person at the terminal, in one line that says what to do."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of the program; `run` otherwise passes on its command's."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_MOUNTED = 3
    """umount, status: nothing of ours is mounted there."""
    RUN_FAILED = 125
    """run: the mount failed, the command wasn't started."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class Failure(Exception):
    """Ends the program with one line on standard error and an exit status."""

    def __init__(self, message: str, status: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.status = status
