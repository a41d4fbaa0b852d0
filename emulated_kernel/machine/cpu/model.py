"""CpuModel: the architecture-dependent properties of a guest's CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import PageTables
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.machine.unicorn_engine import Engine


class CpuModel(ABC):
    """An instruction set: the numbers that Unicorn uses, and the set-up that Linux makes."""

    name: str
    """Name of the architecture, as in MachineConfig.arch."""
    bits: int
    engine_mode: tuple[int, int]
    """Unicorn's numbers of architecture and mode."""
    page_tables: type[PageTables]
    layout: MemoryLayout

    registers: Mapping[str, int]
    """Name in Linux's pt_regs -> Unicorn's number, in the order of its CPU structure; ip is last."""
    ip_slot: int
    """Number of 8-byte registers before the instruction pointer in Unicorn's CPU structure."""
    register_set: Callable[..., Any]
    """Named tuple type for the values of all registers, followed by the flags."""
    flags_register: int
    """Unicorn's number of the flags register, or of the register with the interrupt flag."""
    fixed_flags: int
    """Flags that are always set."""
    interrupt_flag: int
    """The flag that enables interrupts."""
    special_registers: Mapping[str, int]
    """Read-only registers: name -> Unicorn's number."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Linux's name -> the machine's common name of a register."""
    arguments: tuple[str, ...]
    """Registers of a function's first arguments; further arguments are words above the return address."""
    variadic_arguments: tuple[str, ...]
    """Registers of a variadic function's first arguments."""
    result: str
    """Register with a function's result."""
    kept_in_calls: tuple[str, ...] = ()
    """Registers that have fixed values in the kernel, which functions expect."""
    room_above_call: int
    """Bytes above the stack pointer at the entry of a function that the host calls."""
    hypercall_register: str
    """Register with a hypercall's number and later its answer."""
    hypercall_arguments: tuple[str, ...]
    """Registers with a hypercall's arguments."""
    syscall_arguments: tuple[str, ...]
    """Registers with a system call's arguments, in the answer to Hypercall.USER."""
    per_cpu_register: int
    """Unicorn's number of the register with the address of the per-CPU area."""
    boot_argument: str
    """Register with the address of the boot parameters at the kernel's entry."""

    halt: bytes
    """The instruction that ends a run; ip is after it then."""
    breakpoints: tuple[bytes, ...]
    """All breakpoint instructions."""
    fetch_unit: int = 1
    """Bytes of an aligned piece that CPUs fetch atomically; instructions consist of such pieces."""
    filler: bytes
    """The shortest breakpoint, which fills unused text."""
    trap_flag: int = 0
    """The flag that makes the CPU trap after the next instruction; Unicorn stores flags after ip."""
    cleared_flags: int = 0
    """Flags that the delivery of an interrupt clears."""

    @property
    def word_size(self) -> int:
        """Bytes of a general-purpose register."""
        return self.bits // 8

    @abstractmethod
    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        """Enable paging and set the system registers as Linux does before it runs C code.

        `per_cpu` is the address of the CPU's per-CPU area.
        """

    @abstractmethod
    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:
        """Return the trap for an exception or `int n` that Unicorn reported with this ip."""

    @abstractmethod
    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        """Return the trap for a failed data access of the kernel; `present` means that the page is mapped."""

    def trap_number(self, trap: Trap) -> int:
        """Return the architecture's number of an exception, which Linux passes to fault handlers."""
        return trap.vector

    @abstractmethod
    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:
        """Return the registers after a call with this return address; on x86 write the address to the stack.

        Raises: MemoryFault (the stack isn't writable).
        """
