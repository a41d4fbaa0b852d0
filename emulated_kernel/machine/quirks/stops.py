"""Where a stop from another thread ends a run: the library knows places within instructions, too."""

from __future__ import annotations

import ctypes
import struct

from emulated_kernel.machine.quirks.harness import Bench, SelfTest, found, own_memory
from emulated_kernel.machine.unicorn_engine import TRANSLATED, Engine

_HANDLE_SIZE = 32 << 10
_NESTED_RUNS = 64
_JUMP_BUFFERS = (200, 312, 320)
"""Bytes of a sigjmp_buf, by the C library and the host's architecture."""
_ONLY_INIT_DONE = (bytes(3) + b"\x01", b"\x00\x01\x00\x01")
"""hook_insert, first_tb, no_exit_request, init_done, of an engine that has been started or not."""
_NO_EXIT_REQUEST = 2


def find_exit_switch(engine: Engine) -> int | None:
    """Address of the library's switch against stops behind each access of memory; None if unclear.

    Unicorn: a run that is stopped there goes on at the beginning of the block, and does again what that had
    done. With the switch set it looks between blocks alone, where nothing is half done, and translated code
    is shorter. Found by the size of the code buffer, which is ours, some fields behind it.
    """
    handle = own_memory(engine.address, _HANDLE_SIZE)
    size = struct.pack("<I", TRANSLATED)
    found = []
    for at in range(0, len(handle), 8):
        if handle[at : at + 4] == size:
            flags = [at - 32 - _NESTED_RUNS * buffer for buffer in _JUMP_BUFFERS]
            found += [flag for flag in flags if flag >= 0 and handle[flag : flag + 4] in _ONLY_INIT_DONE]
    return engine.address + found[0] + _NO_EXIT_REQUEST if len(found) == 1 else None


def stop_between_blocks(bench: Bench, one: bytes, jump: bytes, two: bytes, result: str) -> SelfTest:
    """Set the switch, if there is one and it does what it should.

    `one` and `two` put 1 and 2 into the register `result`, `jump` leads behind itself.
    """
    engine = bench.engine
    address = find_exit_switch(engine)
    if address is not None:
        engine.exit_switch = memoryview(ctypes.c_uint8.from_address(address)).cast("B")
        engine.stop_between_blocks(True)
        with engine.stopped_at(bench.va):
            end = getattr(bench.run(one + jump + two), result)
        # Stopped in front of the first instruction it has to go on to the end of the block, and no further.
        if end != 1:
            engine.stop_between_blocks(False)
            engine.exit_switch = None
    return found(find_exit_switch, engine.exit_switch is not None)
