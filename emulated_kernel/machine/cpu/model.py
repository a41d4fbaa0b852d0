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
    """Properties of a CPU architecture: Unicorn's ids, and Linux's calling convention and set-up."""

    name: str
    """Name of the architecture, as in MachineConfig.arch."""
    bits: int
    engine_mode: tuple[int, int]
    """Unicorn's constants for the architecture (UC_ARCH_...) and for the mode (UC_MODE_...)."""
    page_tables: type[PageTables]
    layout: MemoryLayout

    registers: Mapping[str, int]
    """Name in Linux's pt_regs -> Unicorn's register id, in the order of Unicorn's CPU structure (ip last)."""
    ip_slot: int
    """Index of ip's 8-byte slot in Unicorn's CPU structure, counted from the slot of the first register."""
    register_set: Callable[..., Any]
    """Named tuple type for the values of all registers, followed by the flags."""
    flags_register: int
    """Unicorn's id of the flags register, or of sstatus on riscv64, which has the interrupt flag."""
    fixed_flags: int
    """Mask of the flags that are always set."""
    interrupt_flag: int
    """Mask of the flag that enables interrupts, in the register `flags_register`."""
    special_registers: Mapping[str, int]
    """Name of a register that probes can only read -> Unicorn's id of the register."""
    segment_bases: Mapping[str, int] = MappingProxyType({})
    """Name of the base address of a segment -> Unicorn's id of the register that contains this address."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Linux's name of a register -> the name that Regs uses on all architectures, such as epc -> ip."""
    arguments: tuple[str, ...]
    """Names of the registers that pass a function's first arguments; the stack passes further arguments."""
    variadic_arguments: tuple[str, ...]
    """Names of the registers that pass a variadic function's first arguments; empty if none does."""
    result: str
    """Name of the register that returns a function's result."""
    saved_in_calls: tuple[str, ...] = ()
    """Names of registers, such as gp, that keep the guest's values in HostCalls.call().

    Most other registers are 0 when the called function begins.
    """
    call_stack_gap: int
    """Number of bytes that the host leaves above the stack pointer when it calls a guest function.

    They are room for the return address and for arguments on the stack.
    """
    hypercall_register: str
    """Name of the register that passes a hypercall's number, and later the host's answer."""
    hypercall_arguments: tuple[str, ...]
    """Names of the registers that pass a hypercall's arguments."""
    syscall_arguments: tuple[str, ...]
    """Names of the registers that pass a system call's arguments.

    The host sets them when it answers Hypercall.USER with the number of the system call.
    """
    per_cpu_register: int
    """Unicorn's id of the register that contains the address of the per-CPU area."""
    boot_argument: str
    """Name of the register that contains the address of the boot parameters at the kernel's entry."""

    halt: bytes
    """Machine code of the instruction that ends a run of the guest. ip is then the address after it."""
    breakpoints: tuple[bytes, ...]
    """Machine code of each breakpoint instruction."""
    repeated_copy: bytes = b""
    """Machine code of the instruction that copies `cx` words from `si` to `di`; empty if there is none."""
    fetch_unit: int = 1
    """Size in bytes of the aligned pieces that CPUs fetch atomically.

    The size of each instruction is a multiple of this size.
    """
    filler: bytes
    """Machine code of the shortest breakpoint, which fills unused text."""
    trap_flag: int = 0
    """Mask of the flag that makes the CPU trap after the next instruction; 0 if the CPU has none."""
    cleared_flags: int = 0
    """Mask of the flags that the delivery of an interrupt clears."""

    @property
    def all_registers(self) -> dict[str, int]:
        """Name of a register that debuggers show -> Unicorn's id of the register."""
        flags = {"flags": self.flags_register}
        return {**self.registers, **self.special_registers, **self.segment_bases, **flags}

    @property
    def word_size(self) -> int:
        """Size of a general-purpose register in bytes."""
        return self.bits // 8

    @abstractmethod
    def power_on(self, engine: Engine, memory: Memory, per_cpu: int) -> None:
        """Enable paging and set the system registers as Linux does before it runs C code.

        `per_cpu`: address of the CPU's per-CPU area.
        """

    @abstractmethod
    def exception(self, engine: Engine, ip: int, vector: int, error_code: int) -> Trap:
        """Return the trap for an exception or `int n` that Unicorn reported at `ip`.

        `vector` and `error_code`: the exception's number and its error code, as Unicorn reports them.
        """

    @abstractmethod
    def access_fault(self, ip: int, address: int, *, write: bool, present: bool) -> Trap:
        """Return the trap for a failed data access of the kernel at the instruction `ip`.

        `address`: the address that was accessed. `write`: whether the access was a write, not a read.
        `present`: whether a page is mapped there.
        """

    def trap_number(self, trap: Trap) -> int:
        """Return the architecture's number of an exception, which Linux passes to fault handlers."""
        return trap.vector

    @abstractmethod
    def as_called(self, memory: Memory, start: Any, return_address: int) -> Any:
        """Return the register set `start`, changed so that the function returns to `return_address`.

        `start.ip` is the function's address. On x86, the registers stay the same, and `return_address` is
        written to the stack at `start.sp`.
        Raises: MemoryFault (the stack isn't writable).
        """
