"""The guest code of a probe: its compiled handler, the copy of its instruction, its detour buffer."""

from __future__ import annotations

from dataclasses import field

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import ArchSpecificInsn
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(eq=False)
class CompiledCode:
    """Guest code of a probe's handler, with what follows it: a stub or a detour; addresses and bytes."""

    address: int
    size: int
    entry: int
    """Where a hit enters it."""
    traps: tuple[int, ...]
    """Breakpoints where it calls the host."""
    accesses: tuple[int, ...]
    """Instructions with a fixup."""
    copied: int = 0
    """Of a detour: address of the copied instructions behind the handler."""
    target: int | None = field(default=None, init=False)
    """Of a stub for breakpoints: where it goes on, None if at the host."""
    tail: int = field(default=0, init=False)
    """Of such a stub: the breakpoint at its end."""
    retired: bool = field(default=False, init=False)

    def contains(self, address: int) -> bool:
        return self.address <= address < self.address + self.size


@dataclass(slots=True)
class OutOfLine:
    """How the probed instruction is run away from its place: an insn slot, or emulation."""

    prepared: ArchSpecificInsn
    slot: GuestAddr | None
    """Address of the copy, in an insn slot; None for an emulated instruction."""
    lead: int = 0
    """Bytes in front of the copy that set the trap flag for it."""
    boosted: bool = False
    """A jump back stands behind the copy, and no step's end."""

    @property
    def entry(self) -> int | None:
        """Where guest code goes on to have the copy run."""
        return self.slot if self.slot is None or self.boosted else self.slot - self.lead

    @property
    def step_end(self) -> int | None:
        """Address behind the copy: of the breakpoint that ends the step, or of the jump back."""
        return None if self.slot is None else self.slot + self.prepared.length


@dataclass(frozen=True, slots=True)
class DetourBuffer:
    """A detour that stands ready in executable memory; addresses and bytes."""

    address: GuestAddr
    region: Region
    trap: int
    """Address of the breakpoint that reaches the handlers."""
    copied: int
    """Address of the copied instructions."""
    size: int
    jump: bytes
    """What stands at the probe while it is optimized."""

    @property
    def length(self) -> int:
        """Bytes of whole instructions that the jump replaces."""
        return self.region.length
