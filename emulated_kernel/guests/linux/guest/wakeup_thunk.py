"""Wakeup: wakes a guest task by code of the host in the guest's kernel; WakeupThunk: the same on x86.

The host writes the address of a task_struct into a word, and interrupts the CPU. On x86, the kernel's own
entry code calls `x86_platform_ipi_callback`, which calls wake_up_process() for that task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest_abi import X86_64, GuestAbi
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.pc.ram import PAGE, PRESENT, WRITABLE
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.fast_named_tuple import NamedTuple

THUNK_SIZE = 64 << 10
"""Size in bytes of the first part, for wakeup code, of the host's area at the end of guest RAM.

This part holds pages of code and data, and the page tables that map them in the kernel.
"""
WAKEUP = """
    48 8b 3d rel32:task     | mov rdi, [rip + task]
    48 85 ff                | test rdi, rdi
    74 05                   | jz done
    e9 rel32:wake_up_process | jmp wake_up_process
    c3                      | done: ret
"""
RESCHEDULE = """
    48 bf imm64:run_queue   | movabs rdi, run_queue
    e8 rel32:resched_curr   | call resched_curr
    c3                      | ret
"""
"""Code that an interrupt of init runs: resched_curr(run_queue), which sets TIF_NEED_RESCHED of init.

Init is then the queue's current task. For the purpose of the code, see FlagCode.
"""
TRACE = """
    e8 rel32:syscall_regfunc   | call syscall_regfunc
    e9 rel32:syscall_unregfunc | jmp syscall_unregfunc
"""
"""Code that an interrupt runs to set the flag of traced system calls in all tasks, and clear it again.

The code calls syscall_regfunc(), then syscall_unregfunc(). For the purpose of the code, see FlagCode.
"""
_RET_SIZE = 1
_JMP_SIZE = 5
_PLATFORM_IPI = 0xF7
"""Vector of the platform interrupt.

Mirrors: arch/x86/include/asm/irq_vectors.h:X86_PLATFORM_IPI_VECTOR (v6.1).
"""
_TEXT = X86_64.host_code
_DATA = _TEXT + PAGE
"""Virtual address of the data page; _TEXT is that of the code page before it.

Linux leaves both addresses unused, and a relative jump from the kernel's text reaches both.
"""
_CELLS = 0x20
"""Offset in bytes, in the data page, of the words that the code of breakpoint_stub.py uses."""
_STUB = 0x100
"""Offset in bytes of the code of breakpoint_stub.py in the code page."""
_ROOM = 0x100
"""Offset in bytes of the part of the data page that is free for other data of the host.

The first word of the data page is the address of the task to wake.
"""
_ACCESSED_DIRTY = 0x60
_GLOBAL = 0x100
_NO_EXECUTE = 1 << 63
_TABLE = PRESENT | WRITABLE | _ACCESSED_DIRTY


def thunks(abi: GuestAbi) -> range:
    """Return the range of addresses of the page with the code that wakes tasks."""
    return range(abi.host_code, abi.host_code + PAGE)


class FlagCode(NamedTuple):
    """Guest code that makes the kernel set a flag of the running task, to show the host the flag's bit."""

    made: Callable[[int, Mapping[str, int]], bytes]
    """Function that returns the code; it takes the code's address and a map: symbol -> address."""
    tail: int
    """Number of bytes from the start of the code's last instruction to the end of the code."""


class Wakeup(ABC):
    """Interface: wakes guest tasks by an interrupt that calls the host's code in the guest's kernel."""

    host_room: tuple[int, int]
    """Physical and virtual address of the part of the data page that is free for other data of the host."""
    stub_text: tuple[int, int]
    """Physical and virtual address of the part of the code page that is free for other code of the host."""
    flag_codes: tuple[FlagCode, FlagCode | None]
    """Two codes: one sets TIF_NEED_RESCHED, the other sets the flag of traced system calls.

    The second code is None if no kernel for the processor needs it.
    """

    @abstractmethod
    def install(self) -> None:
        """Put the host's code into the kernel. Snapshots of the guest contain the code."""

    @abstractmethod
    def wake(self, task: int) -> None:
        """Begin the next run with the interrupt that wakes the task whose task_struct is at `task`.

        If `task` is 0, the interrupt wakes no task.
        """

    @abstractmethod
    def replaced_by(self, callback: int) -> AbstractContextManager[None]:
        """Make the interrupt call the function at `callback`, and wake no task, during the `with` block."""


class WakeupThunk(Wakeup):
    """Wakes tasks of an x86 guest by an interrupt whose callback is code of the host.

    The host's area at the end of guest RAM begins with four pages: the code, its data, and two page tables
    that map both in the kernel.
    """

    flag_codes = (
        FlagCode(partial(machine_code, RESCHEDULE), _RET_SIZE),
        FlagCode(partial(machine_code, TRACE), _JMP_SIZE),
    )

    def __init__(self, machine: PcMachine, facts: KernelOffsets, structs: KernelStructs) -> None:
        self._machine = machine
        self._symbols = facts.symbols
        self._structs = structs
        self._words = machine.memory.words
        self._base = len(machine.memory.ram) - HOST_SIZE
        self._task = self._base + PAGE
        self._callback = structs.physical(facts.symbols["x86_platform_ipi_callback"])
        self.host_room = self._task + _ROOM, _DATA + _ROOM
        """Physical and virtual address of the free part of the data page."""
        self.stub_cells = self._task + _CELLS, _DATA + _CELLS
        """Physical and virtual address of the five words of the data page that breakpoint_stub.py uses."""
        self.stub_text = self._base + _STUB, _TEXT + _STUB
        """Physical and virtual address of the space in the code page for the code of breakpoint_stub.py."""

    def install(self) -> None:
        """Map the pages, write the code to them, and register the code as the interrupt's callback.

        Snapshots of the guest contain the code and its registration.
        """
        text, data, table, directory = (self._base + PAGE * number for number in range(4))
        store = self._structs.store
        store("<Q", directory + (_TEXT >> 21 & 511) * 8, table | _TABLE)
        store("<Q", table, text | _TABLE | _GLOBAL)
        store("<Q", table + 8, data | _TABLE | _GLOBAL | _NO_EXECUTE)
        top = self._structs.physical(self._symbols["level3_kernel_pgt"])
        store("<Q", top + (_TEXT >> 30 & 511) * 8, directory | _TABLE)
        self._structs.store_bytes(text, machine_code(WAKEUP, _TEXT, {**self._symbols, "task": _DATA}))
        store("<Q", self._callback, _TEXT)
        self._machine.engine.flush_tlb()

    def wake(self, task: int) -> None:
        """Begin the next run with the interrupt that wakes the task whose task_struct is at `task`.

        If `task` is 0, the interrupt wakes no task.
        """
        self._words[self._task >> 3] = task
        self._machine.cpu.interrupt(_PLATFORM_IPI)

    @contextmanager
    def replaced_by(self, callback: int) -> Iterator[None]:
        """Make the interrupt call the function at `callback`, and wake no task, during the `with` block."""
        self._structs.store("<Q", self._callback, callback)
        yield
        # If the guest dies in the block, the callback is not restored.
        self._structs.store("<Q", self._callback, _TEXT)
