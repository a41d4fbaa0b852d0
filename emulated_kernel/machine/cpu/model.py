"""CpuModel: everything about a guest's CPU that the rest of the machine must not know by heart."""

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
    """One instruction set as the emulator runs it and as Linux sets it up."""

    name: str
    """As in MachineConfig.arch."""
    bits: int
    engine_mode: tuple[int, int]
    """The library's numbers for architecture and mode."""
    page_tables: type[PageTables]
    layout: MemoryLayout

    registers: Mapping[str, int]
    """Linux's pt_regs name to the library's number, in the order of the emulator's CPU state; ip is last."""
    ip_slot: int
    """How many 8-byte registers lie before the instruction pointer in that state."""
    register_set: Callable[..., Any]
    """The type of a complete set of values, a tuple with names: the registers, then the flags."""
    flags_register: int
    """The library's number of the flags, or of what holds the interrupt flag."""
    fixed_flags: int
    """Flags that are always set."""
    interrupt_flag: int
    """The flag that lets interrupts in."""
    special_registers: Mapping[str, int]
    """Registers that can only be read: name to the library's number."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Linux's names for what the machine names alike on all CPUs."""
    arguments: tuple[str, ...]
    """Registers of a function's first arguments; further ones are words above the return address."""
    variadic_arguments: tuple[str, ...]
    """The same for a variadic function."""
    result: str
    """Register of a function's result."""
    kept_in_calls: tuple[str, ...] = ()
    """Registers that functions expect to be the kernel's own."""
    room_above_call: int
    """Bytes from the stack pointer up when a function is entered that the host calls."""
    hypercall_register: str
    """Where a hypercall's number is, and its answer."""
    hypercall_arguments: tuple[str, ...]
    """Registers of a hypercall's arguments."""
    syscall_arguments: tuple[str, ...]
    """Registers of a system call's arguments, which the host answers Hypercall.USER with."""
    per_cpu_register: int
    """The library's number of what holds the address of the per-CPU area."""
    boot_argument: str
    """Register that the kernel finds its boot parameters in."""

    halt: bytes
    """The instruction that ends a run; the CPU stands behind it then."""
    breakpoints: tuple[bytes, ...]
    """The breakpoint instructions that there are."""
    fetch_unit: int = 1
    """Bytes that CPUs fetch in one piece, aligned to as many; instructions consist of such pieces."""
    filler: bytes
    """The shortest breakpoint, which fills text that nobody has written."""
    trap_flag: int = 0
    """The flag that makes the CPU trap behind the next instruction; the emulator has it behind ip."""
    cleared_flags: int = 0
    """Flags that an interrupt's entry clears."""

    @property
    def word_size(self) -> int:
        """Bytes of a general register."""
        return self.bits // 8

    @abstractmethod
    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        """Turn paging on and load what Linux has loaded by the time it runs C; `per_cpu`: the CPU's area."""

    @abstractmethod
    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:
        """An exception or `int n` that the library reported with the instruction pointer at `ip`."""

    @abstractmethod
    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        """What a data access of the kernel's raises that can't be made; `present`: the page is mapped."""

    def trap_number(self, trap: Trap) -> int:
        """The architecture's own number for an exception, as its Linux passes it on."""
        return trap.vector

    @abstractmethod
    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:
        """The registers and the stack as a call instruction leaves them that returns to `return_address`.

        Raises: MemoryFault (the stack isn't writable).
        """
