"""ProbedMachine: the interface of a machine that the probe engine uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.interrupts.trap_handlers import TrapHandlers
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.memory.record_memory import RecordMemory
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.machine.unicorn_engine import Engine


class ProbedMachine(ABC):
    """Interface to a machine's registers, memory, text and traps, for the built-in kernel and for Linux."""

    model: CpuModel
    """Model of the machine's CPUs, with instruction set and memory map."""
    regs: Regs
    hooks: TrapHooks
    """Callbacks that receive the guest's traps."""
    memory: GuestMemory
    text: Text
    records: RecordMemory
    clock: GuestClock
    cpu: int
    """Number of the current CPU, whose registers are `regs`."""
    per_cpu_bases: Sequence[int]
    """Address of each CPU's per-CPU area; 0 if the offsets of per-CPU variables are absolute addresses."""
    running_task: Callable[[], int] | None = None
    """Function that returns the address of the running task; None if a per-CPU variable holds it."""

    def __init__(self) -> None:
        self.damage = DamageReports()
        """Reports of damaged data of the guest, for the log."""
        self.on_leave: list[Callable[[], None]] = []
        """Functions to call after each call of a guest function by the host, even if it did not return.

        They are not called if the host will continue the call from the state in which it ended.
        """
        self.on_give_up: list[Callable[[int], None]] = []
        """Functions to call if a guest function, called by a handler of a hit, did not return.

        The argument is the function's stack pointer at its entry. The interrupted code continues.
        """
        self.on_switch: list[Callable[[int], None]] = []
        """Functions to call when another CPU has become the current one, with that CPU's number."""
        self.clock_loops: list[range] = []
        """Address ranges of loops that read the clock, and read it again if it has changed since."""
        self.interrupt_if: list[Callable[[], bool]] = []
        """Functions that must all return True for the current CPU to take an interrupt at its ip."""
        self.in_handler: list[Callable[[int], bool]] = []
        """Functions that return True for an ip in a compiled handler, where a record may be half-written."""

    def original_text(self) -> Iterator[tuple[int, bytes]]:
        """Yield (address, original bytes) of each piece of text that a probe has patched."""
        yield from self.text.ledger.pieces()

    def in_clock_loop(self, address: int) -> bool:
        """Return True if `address` is in one of `clock_loops`, where handlers must not advance the clock."""
        return any(address in loop for loop in self.clock_loops)

    @abstractmethod
    def at_close(self, action: Callable[[], object], /) -> None:
        """Register `action`, a function to call before the emulator is freed."""

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The Unicorn engine that runs the guest."""

    @abstractmethod
    def positions(self) -> list[tuple[int, int]]:
        """Return (instruction pointer, stack pointer) of each CPU, indexed by the CPU's number."""

    @abstractmethod
    def all_registers(self) -> list[dict[str, int]]:
        """Return the registers of all CPUs, indexed by number: name in pt_regs -> value."""

    @abstractmethod
    def send_back(self, number: int, ip: int, /) -> None:
        """Set the saved ip of CPU `number`, which waits for its turn, to `ip`.

        Do nothing if the CPU is the current one, whose ip is in the registers, or if the guest does not run.
        """

    @abstractmethod
    def alloc_pages(self, size: int, /) -> int:
        """Allocate zeroed host pages for `size` bytes, and return their direct map address.

        The guest can read and write the pages.

        Raises: HardwareError (no page is left).
        """

    @abstractmethod
    def free_pages(self, va: int, /) -> None:
        """Free memory from `alloc_pages`. Raises: HardwareError (not allocated)."""

    @abstractmethod
    def preempt_if(self, may_end: Callable[[], bool]) -> None:
        """From now on, when a CPU's quantum is used up, preempt it only if `may_end` returns True.

        If it returns False, the CPU runs one more instruction, and `may_end` is called again. If several
        functions were given, all must return True.
        """

    def passed_in_step(self) -> Callable[[int], bool]:
        """Return a function that returns True for the addresses at which a debugger's step does not stop.

        These are the addresses of generated code; see DebuggedMachine.passed_in_step. But a step that begins
        in generated code, for example at the breakpoint that calls a detour's handlers, executes one
        instruction.
        """
        if self.text.is_generated(self.regs.ip):
            return lambda _address: False
        return self.text.is_generated

    @property
    def breakpoints(self) -> TrapHandlers:
        """Address of a breakpoint instruction (x86: int3) -> its handler.

        During the handler's call, regs.ip is the address after the instruction.
        """
        return self.hooks.breakpoints

    @property
    def debug_traps(self) -> TrapHandlers:
        """Address at which a single step ends -> its handler.

        During the handler's call, regs.ip is this address.
        """
        return self.hooks.debug_traps

    def raise_fault(self, fault: MemoryFault) -> None:
        """Raise a page fault of the instruction at regs.ip; only breakpoint handlers may call this."""
        present = self.memory.is_mapped(fault.address)
        trap = self.model.access_fault(self.regs.ip, fault.address, write=fault.write, present=present)
        self.hooks.raise_exception(trap)
