"""Guest code of a probe: its compiled handler, the copy of its instruction, its detour buffer."""

from __future__ import annotations

from enum import Enum

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import ArchSpecificInsn
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field


@dataclass(eq=False)
class CompiledCode:
    """Guest code of a handler, with the code that follows it in a stub or detour. Sizes are in bytes."""

    address: int = field(metadata=ADDRESS)
    size: int
    entry: int = field(metadata=ADDRESS)
    """Address at which a hit enters the code."""
    traps: tuple[int, ...] = field(metadata=ADDRESS)
    """Addresses of the breakpoints that call the host."""
    accesses: tuple[int, ...] = field(metadata=ADDRESS)
    """Addresses of the instructions that may fault; after a fault, the CPU continues at their fixup."""
    copied: int = field(default=0, metadata=ADDRESS)
    """Address of the code after the handler: copied instructions, a relocated form, or a jump.

    The value is 0 for a trampoline and for the code of Compiler.jump(), which have no such code.
    """
    target: int | None = field(default=None, init=False, metadata=ADDRESS)
    """Address at which the guest continues after a stub for breakpoint hits.

    None if the host continues the hit, or if the relocated form of `region` follows the handler. In the code
    of Compiler.jump(): the address to which the instruction jumps.
    """
    region: Region | None = field(default=None, init=False)
    """The emulated instruction whose relocated form follows the handler of a stub; None without one."""
    leads: tuple[int, ...] = field(default=(), init=False, metadata=ADDRESS)
    """Addresses of the breakpoints at a stub's end that redirect the guest; often there are none.

    If there are any, each hit executes exactly one of them.
    """
    tail: int = field(default=0, init=False, metadata=ADDRESS)
    """Address of the breakpoint at the end of the code, which some or all hits reach; 0 if there is none."""
    retired: bool = field(default=False, init=False)

    def contains(self, address: int) -> bool:
        return self.address <= address < self.address + self.size


class BreakpointKind(Enum):
    """How the probed instruction is executed at a hit by a breakpoint.

    The values are the names that commands print.
    """

    STEPPED = "stepped"
    """The guest runs the copy, and a second trap ends the step."""
    BOOSTED = "boosted"
    """The guest runs the copy, which ends in a jump back."""
    EMULATED = "emulated"
    """The instruction is emulated; no copy runs."""


def breakpoint_kind(
    prepared: ArchSpecificInsn, profile: Profile, *, has_post_handler: bool = False
) -> BreakpointKind:
    """Return how the instruction `prepared` is executed at a hit by its breakpoint.

    Linux: a boosted probe stays boosted when a post_handler is added later, and this post_handler never runs.
    Deviates: it runs, because with `has_post_handler` the result is never BOOSTED.
    Mirrors: arch/x86/kernel/kprobes/core.c:setup_singlestep (v6.1).
    """
    if prepared.emulate is not None:
        return BreakpointKind.EMULATED
    boosts = prepared.boostable and not profile.preemption and not has_post_handler
    return BreakpointKind.BOOSTED if boosts else BreakpointKind.STEPPED


@dataclass(slots=True)
class OutOfLine:
    """The out-of-line form of a probed instruction: an insn slot or an emulation."""

    prepared: ArchSpecificInsn
    slot: GuestAddr | None = field(metadata=ADDRESS)
    """Address of the copy in an insn slot; None for an emulated instruction."""
    lead: int = 0
    """Size in bytes of the code before the copy, which sets the trap flag for a single step of the copy."""
    boosted: bool = False
    """Whether a jump back follows the copy, instead of the breakpoint that ends the step."""

    @property
    def entry(self) -> int | None:
        """Address to which guest code jumps to run the copy; None for an emulated instruction."""
        return self.slot if self.slot is None or self.boosted else self.slot - self.lead

    @property
    def step_end(self) -> int | None:
        """Address of the jump back or the breakpoint after the copy; None for an emulated instruction."""
        return None if self.slot is None else self.slot + self.prepared.length


@dataclass(frozen=True, slots=True)
class DetourBuffer:
    """A detour buffer in executable memory: its addresses, and its size in bytes."""

    address: GuestAddr = field(metadata=ADDRESS)
    region: Region
    trap: int = field(metadata=ADDRESS)
    """Address of the breakpoint that calls the handlers."""
    copied: int = field(metadata=ADDRESS)
    """Address of the copied instructions in the buffer."""
    size: int
    jump: bytes
    """Machine code of the jump that is at the probed address while the probe is optimized."""

    @property
    def length(self) -> int:
        """Length in bytes of the instructions that the jump replaces."""
        return self.region.length
