"""UserAccess: lets a riscv64 kernel access user memory without a loss of all cached address translations.

Linux sets SUM before it copies from or to user memory, and clears SUM afterwards. Unicorn drops its whole TLB
at each change of SUM. Before each instruction that changes SUM, a routine of the host makes the change in
place of Unicorn. When the routine clears SUM, it drops the translations of user pages only. Kernel code
without SUM then faults at user addresses, as on a real CPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.machine.cpu.registers import FastRegs, Regs
from emulated_kernel.machine.cpu.riscv import Riscv64Cpu
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.native.sum_words import ENTRY_SIZE, VICTIMS, SumWords
from emulated_kernel.machine.quirks.harness import own_memory
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.machine.unicorn_engine import HOOK_CODE, Engine

_REGISTERS = tuple(Riscv64Cpu.registers)
_CLEARS = 1 << 12
"""Bit of an instruction's code that is set in csrc and clear in csrs."""
_MODES = 4
"""Number of Unicorn's TLBs: one for each privilege mode."""
_TABLES_AT = -0x58
"""Offset, from the first register in Unicorn's CPU state, of two words for each mode's TLB.

The words are the offset of the last entry in the table, and the address of the table.
"""
_TABLES = struct.Struct(f"<{2 * _MODES}Q")
_KERNEL = 1
"""Number of the mode in which the kernel runs."""
_MODE_SIZE = 48 + VICTIMS * (ENTRY_SIZE + 16) + 8
_KERNEL_AT = _TABLES_AT - (_MODES - _KERNEL) * _MODE_SIZE
"""Offset, from the first register in Unicorn's CPU state, of further TLB data of the kernel's mode.

The data are the words of _HEAD, then TLB entries that were replaced.
"""
_HEAD = struct.Struct("<QQqQQQ")
"""Layout of the words at _KERNEL_AT, which are the first members of QEMU's CPUTLBDesc.

The members are large_page_addr, large_page_mask, window_begin_ns, window_max_entries, n_used_entries and
vindex.
"""
_USED_AT = _KERNEL_AT + 32
_VICTIMS_AT = _KERNEL_AT + _HEAD.size
_NONE = (1 << 64) - 1
_LARGEST_TABLE = 1 << 16


class UserAccess:
    """Changes SUM in place of the CPU, before each kernel instruction that sets or clears it.

    If the host has no routine, or Unicorn's TLB is not laid out as expected, the CPU itself changes SUM.
    """

    def __init__(self, engine: Engine, regs: Regs, state: int, mstatus: int) -> None:
        """Check the layout of Unicorn's TLB, which must be empty because the guest has not run yet.

        `state`: address in this process of Unicorn's CPU state. `mstatus`: address of the register mstatus.
        """
        self._engine = engine
        self._regs = regs
        self._state = state
        self._mstatus = mstatus
        self._is_known = _has_empty_tlb(state)
        self._all: list[SumWords] = []

    @property
    def spared(self) -> int:
        """Number of changes of SUM after which Unicorn still had its cached translations."""
        return sum(int(words.spared) for words in self._all)

    def take_over(self, sites: Mapping[str, int], memory: LinuxMemory, root: int, ram: int) -> None:
        """Make the host change SUM at `sites` from now on, unless it does so already. The guest must not run.

        `sites`: the map KernelOffsets.user_access. `root`: physical address of the kernel's page tables.
        `ram`: address in this process of the physical address 0.
        """
        routines = routine_address("set_sum"), routine_address("clear_sum")
        if not self._is_known or None in routines:
            return
        known = {words.site for words in self._all}
        for place, code in sites.items():
            address = int(place, 16)
            try:
                words = self._words(ram + memory.translate(root, address), code)
            except MemoryFault:
                continue
            if words.site in known:
                continue
            self._all.append(words)
            routine = routines[bool(code & _CLEARS)]
            self._engine.add_hook(
                HOOK_CODE,
                ctypes.c_void_p(routine),
                at=address,
                data=ctypes.addressof(words),
                keep=(words,),
            )
        # Code that is already translated does not contain the calls.
        self._engine.flush_code()

    def _words(self, site: int, code: int) -> SumWords:
        regs = self._regs
        assert isinstance(regs, FastRegs)
        state = self._state
        return SumWords(
            site=site,
            insn=code,
            operand=regs.address_of(_REGISTERS[(code >> 15 & 31) - 1]),
            mstatus=self._mstatus,
            tlb=state + _TABLES_AT + 16 * _KERNEL,
            victims=state + _VICTIMS_AT,
            used=state + _USED_AT,
        )


def _has_empty_tlb(state: int) -> bool:
    """Return True if the CPU state at the host address `state` has the TLB layout that UserAccess expects.

    Precondition: no translation is cached.
    """
    tables = own_memory(state + _TABLES_AT, _TABLES.size)
    kernel = own_memory(state + _KERNEL_AT, _HEAD.size + VICTIMS * ENTRY_SIZE)
    if len(tables) != _TABLES.size or len(kernel) != _HEAD.size + VICTIMS * ENTRY_SIZE:
        return False
    words = _TABLES.unpack(tables)
    page, mask, _, _, used, replaced = _HEAD.unpack_from(kernel)
    if (page, mask, used, replaced) != (_NONE, _NONE, 0, 0) or kernel[_HEAD.size :].strip(b"\xff"):
        return False
    return all(map(_is_empty_table, words[::2], words[1::2]))


def _is_empty_table(last: int, table: int) -> bool:
    """Return True if the memory at the host address `table` is a TLB table of empty entries.

    `last`: offset in bytes of the table's last entry, which gives the table's size. Return False if the
    number of entries is no power of two.
    """
    size = last + ENTRY_SIZE
    if last % ENTRY_SIZE or size & (size - 1) or size > _LARGEST_TABLE * ENTRY_SIZE:
        return False
    return own_memory(table, size) == b"\xff" * size
