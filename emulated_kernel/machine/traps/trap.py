"""Trap, which describes the end of a run or an exception of the guest, and the machine's errors."""

from __future__ import annotations

from enum import Enum

from emulated_kernel.util.fast_dataclass import dataclass


class TrapKind(Enum):
    """Reason why the guest stopped."""

    HYPERCALL = "hypercall"
    """The guest made the hypercall Trap.number with the arguments Trap.args."""
    FAULT = "fault"
    """An exception. It ends a run if it is not delivered to the guest."""
    DOUBLE_FAULT = "double fault"
    """An exception whose frame could not be pushed, or whose delivery faults repeatedly."""
    PREEMPTED = "preempted"
    """The Quantum ended the run; the CPU's next run continues where this run ended."""
    BUDGET = "budget"
    """The Watchdog ended the run, mostly because its budget was used up.

    The next run continues where this run ended.
    """


@dataclass(frozen=True)
class Trap:
    """A description of a stop or an exception of the guest."""

    kind: TrapKind
    address: int
    """Instruction pointer: at a faulting instruction, but after a trapping one (int3, hlt, single step)."""
    vector: int = -1
    """Number of the exception as on x86; -1 if this isn't an exception."""
    error_code: int = 0
    cr2: int = 0
    """Faulting address of a page fault."""
    number: int = -1
    """Number of the hypercall in abi.Hypercall; -1 if this isn't a hypercall."""
    args: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is TrapKind.HYPERCALL:
            return f"hypercall {self.number} at {self.address:#x}"
        detail = (
            f", vector {self.vector} error {self.error_code:#x} cr2 {self.cr2:#x}" if self.vector >= 0 else ""
        )
        return f"{self.kind.value} at {self.address:#x}{detail}"


class HardwareError(RuntimeError):
    """The emulated hardware cannot perform an operation: misuse, exhaustion, or a broken library."""


class MemoryFault(Exception):
    """An access to a guest address that is not mapped, or whose page does not permit it.

    `address` is the guest address, and `write` is True if the access was a write.
    """

    def __init__(self, address: int, reason: str = "not mapped", *, write: bool = False) -> None:
        super().__init__(f"{address:#x}: {reason}")
        self.address = address
        self.write = write


class GuestFault(Exception):
    """A guest function called by the host ended in `trap` instead of returning."""

    def __init__(self, trap: Trap, message: str = "") -> None:
        """Create the exception.

        Its text is `message`, such as the text of a panic. If `message` is "", the text describes `trap`.
        """
        super().__init__(message or str(trap))
        self.trap = trap


class BudgetExceeded(GuestFault):
    """A guest function called by the host did not return within the run budget."""
