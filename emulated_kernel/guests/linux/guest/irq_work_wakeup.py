"""IrqWorkWakeup: wakes a task of an arm64 or RISC-V guest by an irq_work, which an IPI runs.

The host writes the address of a task_struct into a word, queues its own irq_work as irq_work_queue() does,
and makes the interprocessor interrupt (IPI) pending. The guest kernel's entry code then runs the irq_work,
whose function calls wake_up_process().
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from emulated_kernel.arch.riscv.encoder import (
    BranchFunct3,
    branch,
    jalr,
    jump_register,
    load,
    long_jump,
    move_stack_pointer,
    set_register,
    set_to_address,
    store,
)
from emulated_kernel.arch.riscv.insn import A0, RA, SP, T0, T1, ZERO
from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.wakeup_thunk import THUNK_SIZE, FlagCode, Wakeup
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.arm64_machine import Arm64Machine
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.ram import PAGE
from emulated_kernel.guests.linux.pc.riscv_board import SOFTWARE_INTERRUPT
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.code_listing import machine_code

ARM64_WAKEUP = """
    d0 00 00 58   | ldr x16, task_at
    00 02 40 f9   | ldr x0, [x16]
    40 00 00 b5   | cbnz x0, wake
    c0 03 5f d6   | ret
    90 00 00 58   | wake: ldr x16, function_at
    00 02 1f d6   | br x16
    imm64:task            | task_at: .quad task
    imm64:wake_up_process | function_at: .quad wake_up_process
"""
_RISCV_RET_SIZE = 4
ARM64_RESCHEDULE = """
    fd 7b bf a9   | stp x29, x30, [sp, #-16]!
    a0 00 00 58   | ldr x0, queue_at
    d0 00 00 58   | ldr x16, function_at
    00 02 3f d6   | blr x16
    fd 7b c1 a8   | ldp x29, x30, [sp], #16
    c0 03 5f d6   | ret
    imm64:run_queue    | queue_at: .quad run_queue
    imm64:resched_curr | function_at: .quad resched_curr
"""
ARM64_TRACE = """
    fd 7b bf a9   | stp x29, x30, [sp, #-16]!
    b0 00 00 58   | ldr x16, first_at
    00 02 3f d6   | blr x16
    fd 7b c1 a8   | ldp x29, x30, [sp], #16
    90 00 00 58   | ldr x16, second_at
    00 02 1f d6   | br x16
    imm64:syscall_regfunc   | first_at: .quad syscall_regfunc
    imm64:syscall_unregfunc | second_at: .quad syscall_unregfunc
"""
_ARM64_TAIL = 20
"""FlagCode.tail on arm64: 4 bytes for the last instruction, and two constants of 8 bytes after it."""
_WORK = 0x40
"""Offset in bytes of the irq_work in the data page.

The first word of the data page has the address of the task to wake.
"""
_ROOM = 0x100
"""Offset in bytes, in the data page and in the code page, of the part for other uses of the host.

See Wakeup.host_room and Wakeup.stub_text.
"""
_EXECUTABLE = 0xEB
"""Bits of a RISC-V page table entry that maps a global page which can be read and executed."""
_WRITABLE = 0xE7
"""Bits of a RISC-V page table entry that maps a global page which can be read and written."""
_VALID = 1
_FLAGS = 8
"""Offset in bytes of the flags in an irq_work's node.

Mirrors: include/linux/smp_types.h:__call_single_node (v6.12).
"""
_CLAIMED = 3
"""Flags of a queued irq_work. Mirrors: include/linux/smp_types.h:IRQ_WORK_CLAIMED (v6.12)."""
_MASK = (1 << 64) - 1
_TABLES_AT = 2 * PAGE
"""Offset in bytes of the page tables from the code page. The data page is between them."""


def _riscv_reschedule(_at: int, symbols: Mapping[str, int]) -> bytes:
    """Return the code of an irq_work's function that calls resched_curr() for the CPU's run queue.

    `symbols`: name -> address, with "resched_curr" and "run_queue" (the CPU's struct rq).
    """
    return b"".join((
        move_stack_pointer(-16), store(SP, 8, RA, 8),
        set_register(A0, symbols["run_queue"]), set_register(T1, symbols["resched_curr"]), jalr(RA, T1, 0),
        load(RA, SP, 8, 8), move_stack_pointer(16), jump_register(RA),
    ))  # fmt: skip


class IrqWorkWakeup(Wakeup):
    """Wakes tasks by an irq_work, which an interprocessor interrupt runs.

    The host's area at the end of guest RAM, which the guest does not use, begins with a code page, a data
    page, and the page tables that map these two in the kernel.
    """

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets, structs: KernelStructs) -> None:
        self._machine = machine
        self._symbols = facts.symbols
        self._structs = structs
        self._words = machine.memory.words
        self._base = len(machine.memory.ram) - HOST_SIZE
        self._task = self._base + PAGE
        self._text = machine.abi.host_code
        self._data = self._text + PAGE
        """Virtual address of the data page, after that of the code page. Linux uses neither address."""
        self.host_room = self._task + _ROOM, self._data + _ROOM
        self.stub_text = self._base + _ROOM, self._text + _ROOM
        self._node = self._task + _WORK + facts.offsets["irq_work.node"]
        self._function = self._task + _WORK + facts.offsets["irq_work.func"]
        self._per_cpu = structs.word(facts.symbols["__per_cpu_offset"])
        self._list = structs.physical(self._per_cpu + facts.per_cpu["raised_list"] & _MASK)
        self._interrupt = facts.offsets["IPI_IRQ_WORK"]
        """Number of the interprocessor interrupt that runs queued irq_works."""

    def install(self) -> None:
        """Map the pages, and write the code that wakes tasks. Snapshots of the guest contain the code."""
        self._map()
        self._structs.store_bytes(self._base, self._code())
        self._structs.store("<Q", self._function, self._text)
        self._machine.engine.flush_tlb()

    @abstractmethod
    def _map(self) -> None:
        """Map the code page and the data page into the kernel, by page tables in the pages after them."""

    @abstractmethod
    def _code(self) -> bytes:
        """Return the code of the irq_work's function.

        The code reads the task's address in the data page, and calls wake_up_process() unless the address
        is 0.
        """

    @abstractmethod
    def _raise(self) -> None:
        """Raise the interprocessor interrupt in whose handler the guest runs queued irq_works.

        The interrupt stays pending until the guest takes it.
        """

    def wake(self, task: int) -> None:
        """Queue the irq_work for `task`, and make its interrupt pending; see Wakeup.

        The guest wakes the task when it runs again.
        Mirrors: kernel/irq_work.c:irq_work_queue (v6.12).
        """
        self._words[self._task >> 3] = task
        ram = self._machine.memory.ram
        if not struct.unpack_from("<I", ram, self._node + _FLAGS)[0]:
            first = self._words[self._list >> 3]
            struct.pack_into("<QI", ram, self._node, first, _CLAIMED)
            self._words[self._list >> 3] = self._data + self._node - self._task
        self._raise()

    @contextmanager
    def replaced_by(self, callback: int) -> Iterator[None]:
        """Make the interrupt call the function at `callback`, and wake no task, during the `with` block."""
        self._structs.store("<Q", self._function, callback)
        yield
        # If the guest dies in the block, the function is not restored.
        self._structs.store("<Q", self._function, self._text)


class RiscvWakeup(IrqWorkWakeup):
    """Wakes tasks of a RISC-V guest, in which one software interrupt delivers all IPIs."""

    flag_codes = FlagCode(_riscv_reschedule, _RISCV_RET_SIZE), None

    def __init__(self, machine: RiscvMachine, facts: KernelOffsets, structs: KernelStructs) -> None:
        super().__init__(machine, facts, structs)
        self._cpu = machine.cpu
        interrupts = structs.word(facts.symbols["ipi_mux_pcpu"]) + self._per_cpu & _MASK
        self._bits = structs.physical(interrupts + facts.offsets["ipi_mux_cpu.bits"])

    def _map(self) -> None:
        text, data, table = (self._base + PAGE * number for number in range(3))
        store = self._structs.store
        # The root tables of all processes share the kernel's lower tables, which Linux allocates in advance.
        slot, _ = self._machine.memory.last(self._machine.cpu.root, self._text)
        store("<Q", slot << 3, table >> 2 | _VALID)
        store("<Q", table, text >> 2 | _EXECUTABLE)
        store("<Q", table + 8, data >> 2 | _WRITABLE)

    def _code(self) -> bytes:
        code = set_to_address(T0, self._text, self._data) + load(A0, T0, 0, 8)
        code += branch(BranchFunct3.NE, A0, ZERO, 8) + jump_register(RA)
        return code + long_jump(ZERO, T1, self._text + len(code), self._symbols["wake_up_process"])

    def _raise(self) -> None:
        """Make the IPI pending: set its bit in ipi_mux_cpu.bits, and raise the software interrupt.

        Mirrors: kernel/irq/ipi-mux.c:ipi_mux_send_mask (v6.12).
        """
        ram = self._machine.memory.ram
        bits = struct.unpack_from("<I", ram, self._bits)[0]
        struct.pack_into("<I", ram, self._bits, bits | 1 << self._interrupt)
        self._cpu.set_pending(1 << SOFTWARE_INTERRUPT)


class Arm64Wakeup(IrqWorkWakeup):
    """Wakes tasks of an arm64 guest, whose IPIs are software-generated interrupts of the GIC."""

    flag_codes = (
        FlagCode(partial(machine_code, ARM64_RESCHEDULE), _ARM64_TAIL),
        FlagCode(partial(machine_code, ARM64_TRACE), _ARM64_TAIL),
    )

    def __init__(self, machine: Arm64Machine, facts: KernelOffsets, structs: KernelStructs) -> None:
        super().__init__(machine, facts, structs)
        self._board = machine.pc
        self._update = machine.update_interrupt

    def _map(self) -> None:
        memory = self._machine.memory
        pool = UnitPool(self._base + _TABLES_AT, THUNK_SIZE - _TABLES_AT, PAGE)
        tables = memory.tables(memory.ram, pool, memory.kernel_root(self._machine.cpu.root))
        tables.map(self._text, self._base, PAGE, Prot.READ | Prot.EXEC)
        tables.map(self._data, self._task, PAGE, Prot.READ | Prot.WRITE)

    def _code(self) -> bytes:
        return machine_code(ARM64_WAKEUP, self._text, {**self._symbols, "task": self._data})

    def _raise(self) -> None:
        self._board.pending |= 1 << self._interrupt
        self._update()


def irq_work_wakeup(machine: LinuxMachine, facts: KernelOffsets, structs: KernelStructs) -> Wakeup:
    """Return the object that wakes tasks of an arm64 or RISC-V kernel; see wakeup() in wakeups.py."""
    if isinstance(machine, RiscvMachine):
        return RiscvWakeup(machine, facts, structs)
    assert isinstance(machine, Arm64Machine)
    return Arm64Wakeup(machine, facts, structs)
