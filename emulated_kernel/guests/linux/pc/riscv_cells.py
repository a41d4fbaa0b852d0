"""Finds words of Unicorn's RISC-V CPU state: trap registers, privilege level, address of a page fault.

Unicorn ignores writes of supervisor registers by its API in user mode, and returns wrong values for them. So
the host accesses the words in Unicorn's memory. A separate engine is used to find their offsets.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

from emulated_kernel.guests.linux.pc.cpu_state import WordSearch, cpu_state, only
from emulated_kernel.machine.cpu import riscv
from emulated_kernel.machine.cpu.riscv import Riscv64Cpu
from emulated_kernel.machine.quirks.harness import HANDLE_SIZE, own_memory
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.machine.unicorn_engine import (
    HOOK_INSN_INVALID,
    HOOK_INTR,
    INSN_INVALID_CALLBACK,
    INTR_CALLBACK,
    Engine,
)
from emulated_kernel.util.fast_named_tuple import NamedTuple

CPU_MODEL: Final = 3
"""Unicorn's id of the CPU model SiFive U54, an RV64GC."""
MACHINE_MODE: Final = 3
MSTATUS: Final = 116
_SSCRATCH = 139
_RAM = 1 << 20
_WINDOW = 1 << 30
"""Virtual address of RAM during the search. Lower addresses are not mapped."""
_ROOT = 0x1000
_EBREAK = 0x100
_LOAD = bytes.fromhex("03350500")  # ld a0, 0(a0)
_SV39 = 8 << 60
_GIGAPAGE = 0xCF
_EXCEPTION = 21
"""Unicorn's error number of an unhandled exception, such as that of an ebreak."""
_VALUES = {
    riscv.SATP: (_SV39 | 0x12345, _SV39 | 0x54321),
    riscv.STVEC: (0x81234568, 0x87654320),
    riscv.SEPC: (0x91234560, 0x97654320),
    riscv.SCAUSE: (0x1357911, 0x2468024),
    riscv.STVAL: (0x55667788AA, 0x6677889911),
    _SSCRATCH: (0x1111222233, 0x3333222211),
    MSTATUS: (0x80000, 0xC0000),
}
"""Register -> two distinctive values, by which the register's word is found in the CPU state."""


class RiscvCells(NamedTuple):
    """Offsets in bytes, from the first register in Unicorn's CPU state, of the words named by the fields.

    The field `error` is an offset in Unicorn's handle (struct uc_struct) instead.
    """

    bad_address: int
    error: int
    satp: int
    stvec: int
    sepc: int
    scause: int
    stval: int
    sscratch: int
    mstatus: int
    privilege: int


def find_riscv_cells() -> RiscvCells:
    """Return the offsets of the words that RiscvCells names, which differ between versions of Unicorn.

    Raises: HardwareError (for a register, not exactly one word has the values that were written).
    """
    ram = mmap.mmap(-1, _RAM)
    engine = Engine(*Riscv64Cpu.engine_mode, CPU_MODEL)
    try:
        engine.map_ram(0, ram)
        state = cpu_state(engine, Riscv64Cpu())
        registers = [_register(engine, state, number) for number in _VALUES]
        bad_address = _bad_address(engine, ram, state)
        error = _error(engine, ram)
        return RiscvCells._make((bad_address, error, *registers, _privilege(engine, state)))
    finally:
        engine.close()


def _register(engine: Engine, state: int, number: int) -> int:
    """Return the offset of the word with the register `number`, which is found by writes in machine mode.

    `state`: address in this process of Unicorn's CPU state.
    """
    engine.reg_write(riscv.PRIV, MACHINE_MODE)
    kept = engine.reg_read(number)
    search = WordSearch(state)
    for value in _VALUES[number] * 2:
        engine.reg_write(number, value)
        search.keep(engine.reg_read(number))
    engine.reg_write(number, kept)
    return search.offset(f"register {number}")


def _privilege(engine: Engine, state: int) -> int:
    search = WordSearch(state)
    for level in (1, 3, 1, 0, 3):
        engine.reg_write(riscv.PRIV, level)
        search.keep(level)
    return search.offset("the privilege level")


def _bad_address(engine: Engine, ram: mmap.mmap, state: int) -> int:
    """Return the offset of the word with the faulting address of the last page fault."""
    model = Riscv64Cpu()
    ram[: len(_LOAD)] = _LOAD
    struct.pack_into("<Q", ram, _ROOT + 8, _GIGAPAGE)
    engine.reg_write(riscv.SATP, _SV39 | _ROOT >> 12)
    causes: list[int] = []

    def interrupt(_engine: int, cause: int, _data: int) -> None:
        causes.append(cause)
        engine.stop()

    engine.add_hook(HOOK_INTR, INTR_CALLBACK(interrupt))
    search = WordSearch(state)
    for address in (0x2468AC0, 0x13579B8, 0x7A5C3E8):
        engine.reg_write(riscv.PRIV, 1)
        engine.reg_write(model.registers["a0"], address)
        engine.start(_WINDOW)
        engine.reg_write(model.registers["a0"], 0)
        search.keep(address)
    if causes != [riscv.CAUSE_LOAD_FAULT] * 3:
        raise HardwareError(f"the emulator raises {causes} for page faults")
    return search.offset("the address of a page fault")


def _error(engine: Engine, ram: mmap.mmap) -> int:
    """Return the offset, in Unicorn's handle, of the error number that an ebreak leaves."""

    def handle() -> tuple[int, ...]:
        return struct.unpack(f"<{HANDLE_SIZE // 4}I", own_memory(engine.address, HANDLE_SIZE))

    seen: list[tuple[int, ...]] = []

    def ebreak(_engine: int, _data: int) -> bool:
        seen.append(handle())
        engine.stop()
        return True

    engine.add_hook(HOOK_INSN_INVALID, INSN_INVALID_CALLBACK(ebreak))
    before = handle()
    ram[_EBREAK : _EBREAK + len(riscv.EBREAK)] = riscv.EBREAK
    for _ in range(3):
        engine.reg_write(riscv.PRIV, 1)
        engine.flush_code()
        engine.start(_WINDOW + _EBREAK)
    found = {
        4 * at
        for at, value in enumerate(before)
        if len(seen) == 3 and not value and all(words[at] == _EXCEPTION for words in seen)
    }
    return only(found, "the error of an ebreak")
