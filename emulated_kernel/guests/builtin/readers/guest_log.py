"""Reader of the kernel log in the guest's memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.machine.guest_info import Message
from emulated_kernel.machine.memory.memory import Memory

_RECORD = struct.Struct("<QQHHB3x")
"""struct printk_record: seq, ts_ns, size, text_len, level; then the text."""


def read_log(memory: Memory, symbols: Kallsyms) -> Iterator[Message]:
    """Yield the messages of the log's ring, oldest first; stop at a record that the guest has corrupted.

    Raises: MemoryFault (the guest has corrupted the log's variables).
    """
    variables = {name: symbols.lookup_name(name) or 0 for name in _VARIABLES}
    buffer = variables["__log_buf"]
    index = memory.read_u32(variables["log_first_idx"])
    first = memory.read_u64(variables["log_first_seq"])
    for expected in range(first, memory.read_u64(variables["log_next_seq"])):
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
