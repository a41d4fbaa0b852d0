"""Reads the kernel log in the guest's memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from emulated_kernel.image.kallsyms import Kallsyms, address_of
from emulated_kernel.machine.guest_info import Message
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.traps.trap import MemoryFault

_RECORD = struct.Struct("<QQHHB3x")
"""Layout of the guest's struct printk_record: seq, ts_ns, size, text_len, level. The text follows it."""


def read_log(reader: GuestReader, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[Message]:
    """Yield the messages of the log's ring, oldest first.

    Raises: MemoryFault (after the intact messages: a record is damaged, or the records overlap).
    """
    buffer = address_of(symbols, "__log_buf")
    data = reader.read(buffer, abi["log_buf.size"])
    index = reader.u32(address_of(symbols, "log_first_idx"))
    first = reader.number(address_of(symbols, "log_first_seq"), 8)
    following = reader.number(address_of(symbols, "log_next_seq"), 8)
    left = len(data)
    for expected in range(first, following):
        if index + _RECORD.size <= len(data) and not _size_of(data, index):
            index = 0
        if index + _RECORD.size > len(data):
            raise MemoryFault(buffer + index, "no log record")
        sequence, time_ns, size, length, level = _RECORD.unpack_from(data, index)
        left -= size
        if sequence != expected or size < _RECORD.size + length or left < 0:
            raise MemoryFault(buffer + index, "no log record")
        text = data[index + _RECORD.size :][:length].decode("utf-8", "replace")
        yield Message(sequence, time_ns, level, text)
        index += size


def _size_of(data: bytes, index: int) -> int:
    """Return the size in bytes of the record at the offset `index` in the log's ring.

    0 means that no record is at this offset, and that the next one is at the start of the ring.
    """
    return int(_RECORD.unpack_from(data, index)[2])
