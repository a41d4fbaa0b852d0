"""ProbedMachine: what the probe engine asks of the computer whose guest it probes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.interrupts.hooks import Breakpoints, TrapHooks
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.record_memory import RecordMemory
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.traps.trap import MemoryFault


class ProbedMachine(ABC):
    """Registers, memory, text and traps of a guest, whichever kernel that is."""

    model: CpuModel
    """The instruction set and the memory map that this machine has."""
    regs: Regs
    hooks: TrapHooks
    """Where the guest's traps come in."""
    memory: GuestMemory
    text: Text
    records: RecordMemory
    clock: GuestClock
    cpu: int
    """Number of the CPU that runs, and that `regs` is about."""
    per_cpu_bases: Sequence[int]
    """Address of each CPU's per-CPU area."""

    def __init__(self) -> None:
        self.on_leave: list[Callable[[], None]] = []
        """Called when a run on a stack of the host's has ended; what it stood in half way never ends."""
        self.on_switch: list[Callable[[int], None]] = []
        """Told the number of the CPU that is current from now on."""
        self.clock_loops: list[range] = []
        """Text that reads the clock, and again if that has moved meanwhile."""
        self.interrupt_if: list[Callable[[], bool]] = []
        """The current CPU takes an interrupt where it stands if all of these say so."""
        self.in_handler: list[Callable[[int], bool]] = []
        """Whether an ip lies in a handler in guest code, where a CPU may have written half a record."""

    def in_clock_loop(self, address: int) -> bool:
        """Whether code there is run again if the clock has moved: handlers may read it without moving it."""
        return any(address in loop for loop in self.clock_loops)

    @abstractmethod
    def positions(self) -> list[tuple[int, int]]:
        """Instruction and stack pointer of each CPU, by its number."""

    @abstractmethod
    def send_back(self, number: int, ip: int, /) -> None:
        """Within a run: let a CPU go on at `ip`, if it isn't the one that runs."""

    @abstractmethod
    def alloc_pages(self, size: int, /) -> int:
        """Zeroed pages of the host's that the guest can read and write; an address of the direct map.

        Raises: HardwareError (none left).
        """

    @abstractmethod
    def free_pages(self, va: int, /) -> None:
        """Give back what `alloc_pages` returned. Raises: HardwareError (not allocated)."""

    @abstractmethod
    def preempt_if(self, may_end: Callable[[], bool]) -> None:
        """Call `may_end` when the current CPU's quantum is used up; if false, one more instruction is run."""

    @property
    def breakpoints(self) -> Breakpoints:
        """Address of an int3 to its handler, which is called within the run with regs.ip behind the int3."""
        return self.hooks.breakpoints

    @property
    def debug_traps(self) -> Breakpoints:
        """Where a step by the trap flag ends to its handler, called within the run with regs.ip there."""
        return self.hooks.debug_traps

    def raise_fault(self, fault: MemoryFault) -> None:
        """Within a breakpoint handler: the instruction at regs.ip faults, as by an access of its own."""
        present = self.memory.is_mapped(fault.address)
        trap = self.model.access_fault(self.regs.ip, fault.address, write=fault.write, present=present)
        self.hooks.raise_exception(trap)
