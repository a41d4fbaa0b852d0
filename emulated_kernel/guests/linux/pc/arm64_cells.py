"""Finds words of Unicorn's arm64 CPU state: system registers, processor state, syndrome of an exception.

Unicorn's API does not give access to the syndrome and the faulting address of an exception. Its calls are
also slow. So the host accesses the words in Unicorn's memory. A separate engine is used to find their
offsets.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

from emulated_kernel.guests.linux.pc.cpu_state import WordSearch, cpu_state, state_words
from emulated_kernel.machine.cpu import arm64
from emulated_kernel.machine.cpu.arm64 import Arm64Cpu, read_system_register, write_system_register
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.machine.unicorn_engine import HOOK_INTR, INTR_CALLBACK, Engine
from emulated_kernel.util.fast_named_tuple import NamedTuple

CPU_MODEL: Final = 2
"""Unicorn's id of the CPU model Cortex-A72: Armv8.0 without pointer authentication and large atomics."""
_RAM = 1 << 20
_CODE = 0x1000
_ROOT = 0x2000
_DIRECTORY = 0x3000
_WINDOW = 1 << 30
"""Virtual address of RAM during the search. Lower addresses are not mapped."""
_TABLE = 3
_BLOCK = 0x401
"""Bits of a page table entry that maps a block of 1 GiB: valid and accessed."""
_SCTLR_EL1 = 3, 0, 1, 0, 0
_TCR_EL1 = 3, 0, 2, 0, 2
_USE_48_BITS = 0x800010
"""Value of tcr_el1 for 48-bit addresses without page tables for the kernel's half."""
_MMU = 1
_SVC = 0xD4000001
_LOAD = 0xF9400000  # ldr x0, [x0]
_ERET = 0xD69F03E0
_BRK = 0xD4200000
_VALUES = 0x1234567890A0, 0x0ABCDEF12340
_REGISTERS = (
    arm64.TTBR0_EL1, arm64.TTBR1_EL1, arm64.VBAR_EL1, arm64.ELR_EL1, arm64.ELR_EL3, arm64.ESR_EL1,
    arm64.FAR_EL1, arm64.SP_EL0, arm64.SP_EL1,
)  # fmt: skip
_PSTATE_AFTER_IP = 8
_HFLAGS_AFTER_IP = 16
"""Offset in bytes of the translator's flags (hflags) from the program counter.

_PSTATE_AFTER_IP is the offset of the processor state from the program counter.
"""


class Arm64Cells(NamedTuple):
    """Offsets in bytes of words in Unicorn's CPU state, from the first register.

    A field that has the name of a system register without the suffix `_el1` is the offset of this register.
    """

    ttbr0: int
    ttbr1: int
    vbar: int
    elr: int
    spare: int
    """Offset of elr_el3, in which the host can store a value, because the CPU never enters exception level 3.
    """
    esr: int
    far: int
    sp_el0: int
    sp_el1: int
    spsr: int
    daif: int
    pstate: int
    """Offset of the processor state PSTATE, without the condition flags and the exception masks."""
    hflags: int
    """Offset of the translator's flags.

    They are CPU state on which translated code depends, such as the exception level.
    """
    syndrome: int
    """Offset of the syndrome of the last exception."""
    bad_address: int
    """Offset of the faulting address of the last exception."""


def find_arm64_cells() -> Arm64Cells:
    """Return the offsets of the words that Arm64Cells names, which differ between versions of Unicorn.

    Raises: HardwareError (for a register, not exactly one word has the values that were written).
    """
    ram = mmap.mmap(-1, _RAM)
    engine = Engine(*Arm64Cpu.engine_mode, CPU_MODEL)
    try:
        engine.map_ram(0, ram)
        return _find(engine, ram)
    finally:
        engine.close()


def _find(engine: Engine, ram: mmap.mmap) -> Arm64Cells:
    state = cpu_state(engine, Arm64Cpu())
    registers = [_register(engine, state, number) for number in _REGISTERS]
    ip = Arm64Cpu.ip_slot * 8
    found = _spsr(engine, state), _daif(engine, state), ip + _PSTATE_AFTER_IP, ip + _HFLAGS_AFTER_IP
    _check_level(engine, ram, state, ip)
    return Arm64Cells._make((*registers, *found, *_exception(engine, ram, state)))


def _register(engine: Engine, state: int, number: int) -> int:
    kept = engine.reg_read(number)
    search = WordSearch(state)
    for value in _VALUES:
        engine.reg_write(number, value)
        search.keep(value)
    engine.reg_write(number, kept)
    return search.offset(f"register {number}")


def _spsr(engine: Engine, state: int) -> int:
    kept = read_system_register(engine, arm64.SPSR_EL1)
    search = WordSearch(state)
    for value in (0x12345678, 0x5432100):
        write_system_register(engine, arm64.SPSR_EL1, value)
        search.keep(value)
    write_system_register(engine, arm64.SPSR_EL1, kept)
    return search.offset("spsr_el1")


def _daif(engine: Engine, state: int) -> int:
    kept = engine.reg_read(arm64.PSTATE)
    search = WordSearch(state)
    for value in (0x100, 0x3C0, 0x2C0):
        engine.reg_write(arm64.PSTATE, value | arm64.EL1H)
        search.keep(value)
    engine.reg_write(arm64.PSTATE, kept)
    return search.offset("the masks of exceptions")


def become_aarch64(engine: Engine) -> None:
    """Make the CPU use AArch64 at exception level 1.

    Unicorn: after power-on, the higher exception levels select AArch32, whose page tables have another form.
    """
    write_system_register(engine, arm64.SCR_EL3, arm64.SCR_64_BITS)
    write_system_register(engine, arm64.HCR_EL2, arm64.HCR_64_BITS)


def _run(engine: Engine, ram: mmap.mmap, *code: int, at: int = 0) -> None:
    struct.pack_into(f"<{len(code)}I", ram, _CODE, *code)
    engine.flush_code()
    engine.start(at + _CODE)


def _check_level(engine: Engine, ram: mmap.mmap, state: int, ip: int) -> None:
    """Check that the processor state and the translator's flags are at the expected offsets from `ip`.

    The check runs code at exception levels 1 and 0, and compares the words. `ip`: offset of the program
    counter in the CPU state, which is at the host's address `state`.
    Raises: HardwareError (a word is not at the expected offset).
    """
    seen: list[tuple[int, int]] = []

    def interrupt(_engine: int, _number: int, _data: int) -> None:
        words = state_words(state, "I")
        seen.append((words[(ip + _PSTATE_AFTER_IP) // 4], words[(ip + _HFLAGS_AFTER_IP) // 4]))
        engine.stop()

    hook = engine.add_hook(HOOK_INTR, INTR_CALLBACK(interrupt))
    _run(engine, ram, _BRK)
    engine.reg_write(arm64.ELR_EL1, _CODE + 4)
    write_system_register(engine, arm64.SPSR_EL1, 0)
    _run(engine, ram, _ERET, _BRK)
    engine.remove_hook(hook)
    engine.reg_write(arm64.PSTATE, arm64.EL1H | arm64.DAIF)
    if [level for level, _ in seen] != [arm64.EL1H, 0] or seen[0][1] == seen[1][1]:
        raise HardwareError(f"the emulator's CPU state: levels and flags are {seen}")


def _exception(engine: Engine, ram: mmap.mmap, state: int) -> tuple[int, int]:
    """Return the offsets of the words with the syndrome and with the faulting address of the last exception.

    The search runs code that causes exceptions with known values. `state`: the host's address of the CPU
    state. Raises: HardwareError (no word or several words have the values).
    """
    hook = engine.add_hook(HOOK_INTR, INTR_CALLBACK(lambda *_: engine.stop()))
    syndromes = WordSearch(state, "I")
    for number in (0x1234, 0x4321, 0x2222):
        _run(engine, ram, _SVC | number << 5)
        syndromes.keep(arm64.CLASS_SVC << 26 | arm64.FULL_SIZE | number)
    become_aarch64(engine)
    struct.pack_into("<Q", ram, _ROOT, _DIRECTORY | _TABLE)
    struct.pack_into("<Q", ram, _DIRECTORY + 8, _BLOCK)
    engine.reg_write(arm64.TTBR0_EL1, _ROOT)
    write_system_register(engine, _TCR_EL1, _USE_48_BITS)
    write_system_register(engine, _SCTLR_EL1, read_system_register(engine, _SCTLR_EL1) | _MMU)
    addresses = WordSearch(state)
    for address in (0x2468AC0, 0x13579B8, 0x7A5C3E8):
        engine.reg_write(Arm64Cpu.registers["x0"], address)
        _run(engine, ram, _LOAD, at=_WINDOW)
        engine.reg_write(Arm64Cpu.registers["x0"], 0)
        addresses.keep(address)
    engine.remove_hook(hook)
    return syndromes.offset("a syndrome"), addresses.offset("the address of a fault")
