"""Trap, the one way a run of the guest ends or a guest exception is shown; and the machine's own errors."""

from __future__ import annotations

from enum import Enum

from emulated_kernel.util.fast_dataclass import dataclass


class TrapKind(Enum):
    """Why the guest does not run on."""

    HYPERCALL = "hypercall"
    """The guest made a hypercall: `number`, with its arguments in `args`."""
    FAULT = "fault"
    """An exception; as the end of a run: one that could not be delivered."""
    DOUBLE_FAULT = "double fault"
    """An exception whose frame could not be pushed, or whose delivery faults again and again."""
    PREEMPTED = "preempted"
    """Its quantum is used up; running again continues it."""
    BUDGET = "budget"
    """The run took longer than its budget; running again continues it."""


@dataclass(frozen=True)
class Trap:
    """A stop or an exception of the guest."""

    kind: TrapKind
    address: int
    """Instruction pointer: at a faulting instruction, behind a trapping one (int3, hlt, single step)."""
    vector: int = -1
    """x86 exception number; -1 where there is none."""
    error_code: int = 0
    cr2: int = 0
    """Address that a page fault is about."""
    number: int = -1
    """abi.Hypercall; -1 where there is none."""
    args: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is TrapKind.HYPERCALL:
            return f"hypercall {self.number} at {self.address:#x}"
        detail = (
            f", vector {self.vector} error {self.error_code:#x} cr2 {self.cr2:#x}" if self.vector >= 0 else ""
        )
        return f"{self.kind.value} at {self.address:#x}{detail}"


class HardwareError(RuntimeError):
    """The emulated hardware itself cannot do what was asked: misuse, exhaustion, or a broken library."""


class MemoryFault(Exception):
    """An access by the host to a guest address that isn't mapped, or not for this."""

    def __init__(self, address: int, reason: str = "not mapped", *, write: bool = False) -> None:
        super().__init__(f"{address:#x}: {reason}")
        self.address = address
        self.write = write


class GuestFault(Exception):
    """A guest function called by the host ended in `trap` instead of returning."""

    def __init__(self, trap: Trap, message: str = "") -> None:
        """With `message` where the guest has said why."""
        super().__init__(message or str(trap))
        self.trap = trap


class BudgetExceeded(GuestFault):
    """A guest function called by the host did not return within the run budget."""
