"""Records of kernels with a longer struct trace_entry, or with the number of a system call at another
place.
"""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emulated_kernel.image.trace_events import FieldDefinition, SyscallDefinition
from emulated_kernel.trace.events.static_event import Tracepoint, layout_fields
from emulated_kernel.trace.events.syscall_events import SyscallEnter, SyscallTracepoint

READ = SyscallDefinition(0, "sys_read", ("int", "char *"), ("fd", "buf"))


def test_fields_begin_behind_the_kernel_s_own_entry() -> None:
    """The fields of an event begin after the kernel's struct trace_entry.

    In PREEMPT_RT of 6.1, a fifth common field makes this structure 12 bytes long.
    """
    fields = FieldDefinition("char[3]", "comm", 3, 1, False, 3), FieldDefinition("long", "id", 8, 8, True, 0)
    assert [field.offset for field in layout_fields(fields)] == [8, 16]
    assert [field.offset for field in layout_fields(fields, 12)] == [12, 16]


@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("count", [0, 1])
def test_system_calls_are_found_where_their_number_is(start: int, count: int) -> None:
    raw = Tracepoint(lambda _on: None)
    event = SyscallEnter(READ, SyscallTracepoint(raw, 8, start, count))
    recorded: list[tuple[bytes, int]] = []
    cast(Any, event).record = lambda payload, hit: recorded.append((payload, hit.handler_preempt_count))
    event.start()
    hit = SimpleNamespace(handler_preempt_count=-1, context=None)
    for handler in raw.handlers:
        handler(bytes(start) + struct.pack("<7Q", 0, 3, 4096, 9, 9, 9, 9), cast(Any, hit))
    assert recorded == [(struct.pack("<3Q", 0, 3, 4096), count - 1)]
