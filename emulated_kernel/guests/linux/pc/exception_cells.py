"""Finds two words of Unicorn's x86 CPU state: the error code, and the exception that is being delivered.

Unicorn's API does not give access to these words. So a separate engine raises faults with known error codes,
and the module searches for the words that contain these codes.
"""

from __future__ import annotations

import ctypes
import mmap
import struct

from emulated_kernel.guests.linux.pc.cpu_state import STATE_SIZE, cpu_state
from emulated_kernel.guests.linux.pc.linux_cpu import CPU_MODEL, PcCpu
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu.registers import fast_regs
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.interrupts.exceptions import NONE_IN_FLIGHT
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.machine.unicorn_engine import HOOK_INTR, INTR_CALLBACK, Engine
from emulated_kernel.util.abi import Vector

RAM = 4 << 20
READ_ONLY_DATA = 2 << 20
"""Address of the second half of RAM, which is mapped read-only and no-execute."""
_ROOT = 0x1000
_POINTERS = 0x2000
_DIRECTORY = 0x3000
_CODE = 0x10000
_STACK = 0x20000
_FAULTS = (
    (b"\xff\xe3", READ_ONLY_DATA, 0x11, Vector.PAGE_FAULT),  # jmp rbx
    (b"\x89\x03", READ_ONLY_DATA, 0x3, Vector.PAGE_FAULT),  # mov [rbx], eax
    (b"\x8b\x03", 1 << 40, 0, Vector.PAGE_FAULT),  # mov eax, [rbx]
    (b"\x31\xc9\xf7\xf1", 0, 0, Vector.DIVIDE_ERROR),  # xor ecx, ecx; div ecx
)
"""Faults to raise: code, value of rbx, expected error code and vector.

The rarest error code is first, so that few words of the CPU state remain to be compared after it.
"""


def find_exception_cells() -> tuple[int, int]:
    """Return the offsets in bytes of two words in Unicorn's CPU state.

    The first word has the error code. The second has the number of the exception that is being delivered.
    Raises: HardwareError (not exactly one word contains the known codes).
    """
    ram = mmap.mmap(-1, RAM)
    engine = Engine(*X86_64Cpu.engine_mode, CPU_MODEL)
    try:
        engine.map_ram(0, ram)
        return _find(engine, ram)
    finally:
        engine.close()


def _find(engine: Engine, ram: mmap.mmap) -> tuple[int, int]:
    struct.pack_into("<Q", ram, _ROOT, _POINTERS | 3)
    struct.pack_into("<Q", ram, _POINTERS, _DIRECTORY | 3)
    struct.pack_into("<2Q", ram, _DIRECTORY, 0x83, READ_ONLY_DATA | 0x81 | 1 << 63)
    state = cpu_state(engine, X86_64Cpu())
    regs = fast_regs(X86_64Cpu(), engine, state)
    cpu = PcCpu(engine, regs, LinuxMemory(ram), state)
    vectors: list[int] = []

    def interrupt(_engine: int, vector: int, _data: int) -> None:
        vectors.append(vector)
        engine.stop()

    engine.add_hook(HOOK_INTR, INTR_CALLBACK(interrupt))
    cpu.power_on(_CODE, _STACK, _ROOT, (0, 8))
    words = (ctypes.c_int32 * (STATE_SIZE // 4)).from_address(state)
    errors = list(range(len(words)))
    in_flight = [at for at in errors if words[at] == NONE_IN_FLIGHT]
    for number, (code, rbx, error, vector) in enumerate(_FAULTS):
        start = _CODE + 64 * number
        ram[start : start + len(code)] = code
        regs.bx = rbx
        regs.sp = _STACK
        regs.ip = start
        vectors.clear()
        engine.start(start)
        errors = [at for at in errors if words[at] == error]
        in_flight = [at for at in in_flight if words[at] == vector]
        for at in in_flight:
            words[at] = NONE_IN_FLIGHT
        if vectors != [vector]:
            raise HardwareError(f"the emulator raises {vectors} for a fault with vector {vector}")
    regs.close()
    if len(errors) != 1 or len(in_flight) != 1:
        raise HardwareError("the emulator's CPU state: the word with the error code cannot be found")
    return errors[0] * 4, in_flight[0] * 4
