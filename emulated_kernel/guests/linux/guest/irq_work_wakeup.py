"""IrqWorkWakeup: wakes a task of a RISC-V kernel by an irq_work, which an interprocessor interrupt runs.

The host writes the address of a task_struct into a word, queues its own irq_work as a CPU would, and makes
the software interrupt pending. The kernel's own entry code runs the work, whose function calls
wake_up_process().
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.arch.riscv.encoder import (
    BranchFunct3,
    branch,
    jump_register,
    load,
    long_jump,
    set_to_address,
)
from emulated_kernel.arch.riscv.insn import A0, RA, T0, T1, ZERO
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import Wakeup
from emulated_kernel.guests.linux.guest_abi import RISCV64
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.ram import PAGE
from emulated_kernel.guests.linux.pc.riscv_board import SOFTWARE_INTERRUPT
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine

_TEXT = RISCV64.host_code
_DATA = _TEXT + PAGE
"""Virtual addresses of the code and data pages, in the part of module space that Linux does not reach."""
_WORK = 0x40
"""Offset in bytes of the irq_work in the data page, whose first word is the address of the task to wake."""
_ROOM = 0x100
"""Offset in bytes of the free part of the data page, and of the free part of the code page."""
_EXECUTABLE = 0xEB
"""Bits of a page table entry that maps a global page which can be read and executed."""
_WRITABLE = 0xE7
"""Bits of a page table entry that maps a global page which can be read and written."""
_VALID = 1
_FLAGS = 8
"""Offset in bytes of the flags in an irq_work's node.

Mirrors: include/linux/smp_types.h:__call_single_node (v6.12)
"""
_CLAIMED = 3
"""Flags of a queued work. Mirrors: include/linux/irq_work.h:IRQ_WORK_CLAIMED (v6.12)"""
_MASK = (1 << 64) - 1


class IrqWorkWakeup(Wakeup):
    """Owns a page of code, a page of data and a page table, at the start of the host's memory."""

    def __init__(self, machine: RiscvMachine, facts: KernelOffsets, structs: KernelStructs) -> None:
        self._machine = machine
        self._symbols = facts.symbols
        self._structs = structs
        self._words = machine.memory.words
        self._base = len(machine.memory.ram) - HOST_SIZE
        self._task = self._base + PAGE
        self.host_room = self._task + _ROOM, _DATA + _ROOM
        self.stub_text = self._base + _ROOM, _TEXT + _ROOM
        self._node = self._task + _WORK + facts.offsets["irq_work.node"]
        self._function = self._task + _WORK + facts.offsets["irq_work.func"]
        per_cpu = structs.word(facts.symbols["__per_cpu_offset"])
        self._list = structs.physical(per_cpu + facts.per_cpu["raised_list"])
        interrupts = structs.word(facts.symbols["ipi_mux_pcpu"]) + per_cpu & _MASK
        self._bits = structs.physical(interrupts + facts.offsets["ipi_mux_cpu.bits"])
        self._bit = 1 << facts.offsets["IPI_IRQ_WORK"]

    def install(self) -> None:
        """Map the pages and write the code; snapshots of the guest keep it."""
        text, data, table = (self._base + PAGE * number for number in range(3))
        store = self._structs.store
        memory = self._machine.memory
        # All page tables share the kernel's directories, which Linux allocates in advance.
        slot, _ = memory.last(self._machine.cpu.root, _TEXT)
        store("<Q", slot << 3, table >> 2 | _VALID)
        store("<Q", table, text >> 2 | _EXECUTABLE)
        store("<Q", table + 8, data >> 2 | _WRITABLE)
        code = self._code()
        self._structs.store_bytes(text, code)
        store("<Q", self._function, _TEXT)
        self._machine.engine.flush_tlb()

    def _code(self) -> bytes:
        """Return the code of the work: call wake_up_process(task) unless the word with the task is 0."""
        code = set_to_address(T0, _TEXT, _DATA) + load(A0, T0, 0, 8)
        code += branch(BranchFunct3.NE, A0, ZERO, 8) + jump_register(RA)
        return code + long_jump(ZERO, T1, _TEXT + len(code), self._symbols["wake_up_process"])

    def wake(self, task: int) -> None:
        """Begin the next run with the interrupt that wakes a task; see Wakeup.

        Mirrors: kernel/irq_work.c:irq_work_queue, kernel/irq/ipi-mux.c:ipi_mux_send_mask (v6.12)
        """
        self._words[self._task >> 3] = task
        ram = self._machine.memory.ram
        if not struct.unpack_from("<I", ram, self._node + _FLAGS)[0]:
            first = self._words[self._list >> 3]
            struct.pack_into("<QI", ram, self._node, first, _CLAIMED)
            self._words[self._list >> 3] = _DATA + self._node - self._task
        bits = struct.unpack_from("<I", ram, self._bits)[0]
        struct.pack_into("<I", ram, self._bits, bits | self._bit)
        self._machine.cpu.set_pending(1 << SOFTWARE_INTERRUPT)

    @contextmanager
    def replaced_by(self, callback: int) -> Iterator[None]:
        """During the block, make the interrupt call the function at `callback`; see Wakeup."""
        self._structs.store("<Q", self._function, callback)
        yield
        # If the guest dies in the block, the function is not restored.
        self._structs.store("<Q", self._function, _TEXT)
