"""Stops of a run by another thread: makes Unicorn stop only between blocks, not inside an instruction."""

from __future__ import annotations

import ctypes
import struct

from emulated_kernel.machine.quirks.harness import Bench, SelfTest, found, own_memory
from emulated_kernel.machine.unicorn_engine import TRANSLATED, Engine

_HANDLE_SIZE = 32 << 10
_NESTED_RUNS = 64
_JUMP_BUFFERS = (200, 312, 320)
"""Possible sizes in bytes of a sigjmp_buf, which depend on the C library and the host's architecture.

In Unicorn's handle, an array of these buffers is between the fields that find_exit_switch() looks for and the
size of the code buffer.
"""
_ONLY_INIT_DONE = (bytes(3) + b"\x01", b"\x00\x01\x00\x01")
"""Bytes of the fields hook_insert, first_tb, no_exit_request, init_done in a new and in a started engine."""
_NO_EXIT_REQUEST = 2


def find_exit_switch(engine: Engine) -> int | None:
    """Return the address of Unicorn's field that disables stops after each memory access, or None.

    Return None unless exactly one place in Unicorn's handle looks like this field.

    Unicorn: a run that is stopped after an access continues at the start of its block and repeats effects. If
    the field is set, Unicorn only stops between blocks, and translated code is shorter. The field is found by
    the size of the code buffer, a known value a few fields after it.
    """
    handle = own_memory(engine.address, _HANDLE_SIZE)
    size = struct.pack("<I", TRANSLATED)
    found = []
    at = handle.find(size)
    while at >= 0:
        if not at % 8:
            flags = [at - 32 - _NESTED_RUNS * buffer for buffer in _JUMP_BUFFERS]
            found += [flag for flag in flags if flag >= 0 and handle[flag : flag + 4] in _ONLY_INIT_DONE]
        at = handle.find(size, at + 1)
    return engine.address + found[0] + _NO_EXIT_REQUEST if len(found) == 1 else None


def stop_between_blocks(bench: Bench, one: bytes, jump: bytes, two: bytes, result: str) -> SelfTest:
    """Let Unicorn stop runs only between blocks: set the field that find_exit_switch finds.

    The field stays set only if a self-test shows that a stopped run still continues to the end of its block
    and no further. Return the outcome of the self-test. `one` and `two` are code that sets the register
    `result` to 1 and 2. `jump` is code that jumps to the next instruction.
    """
    engine = bench.engine
    address = find_exit_switch(engine)
    if address is not None:
        engine.exit_switch = memoryview(ctypes.c_uint8.from_address(address)).cast("B")
        engine.stop_between_blocks(True)
        with engine.stopped_at(bench.va):
            end = getattr(bench.run(one + jump + two), result)
        # A run that is stopped before its first instruction must continue exactly to the end of the block.
        if end != 1:
            engine.stop_between_blocks(False)
            engine.exit_switch = None
    return found(find_exit_switch, engine.exit_switch is not None)
