"""Sight: the kinds of data that a probe's handlers can read about the system call of a hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum


class Sight(IntEnum):
    """Kind of data that the handlers of a probe can read at a hit."""

    NOTHING = 0
    """No data of the system call: only the hit itself, its time and its task."""
    REGISTERS = 1
    """In addition, registers: they show the numbers that a system call takes and returns."""
    MEMORY = 2
    """In addition, memory: it contains the paths and data of a system call."""


class LimitedSight(ABC):
    """Interface of probes whose handlers may see only a part of the data of a system call."""

    __slots__ = ()

    @property
    @abstractmethod
    def sight(self) -> Sight:
        """Data that the handlers can read about the system call in which the probe is hit."""
