"""The kernel log, read out of the guest's memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_RECORD = struct.Struct("<QQHHB3x")
"""struct printk_record: seq, ts_ns, size, text_len, level; then the text."""


class LogMemory(Protocol):
    def read(self, va: int, size: int) -> bytes: ...

    def read_u64(self, va: int) -> int: ...

    def read_u32(self, va: int) -> int: ...


class LogSymbols(Protocol):
    def lookup_name(self, name: str) -> int | None: ...


@dataclass(frozen=True)
class Message:
    """One message of the log; the time in nanoseconds since boot."""

    sequence: int
    time_ns: int
    level: int
    text: str

    def lines(self) -> Iterator[str]:
        """As dmesg prints it: each line of the text with the time before it."""
        seconds, rest = divmod(self.time_ns // 1000, 1_000_000)
        for line in self.text.split("\n"):
            yield f"[{seconds:5d}.{rest:06d}] {line}\n"


def read_log(memory: LogMemory, symbols: LogSymbols) -> Iterator[Message]:
    """All messages that the ring still holds, oldest first; up to one that the guest has overwritten.

    Raises: MemoryFault where the guest has corrupted the variables.
    """
    at = {name: symbols.lookup_name(name) or 0 for name in _VARIABLES}
    buffer = at["__log_buf"]
    index = memory.read_u32(at["log_first_idx"])
    for expected in range(memory.read_u64(at["log_first_seq"]), memory.read_u64(at["log_next_seq"])):
        sequence, time_ns, size, length, level = _RECORD.unpack(memory.read(buffer + index, _RECORD.size))
        if not size:
            index = 0
            sequence, time_ns, size, length, level = _RECORD.unpack(memory.read(buffer, _RECORD.size))
        if sequence != expected:
            return
        text = memory.read(buffer + index + _RECORD.size, length).decode("utf-8", "replace")
        yield Message(sequence, time_ns, level, text)
        index += size


_VARIABLES = ("__log_buf", "log_first_idx", "log_first_seq", "log_next_seq")
