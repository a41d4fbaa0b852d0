"""ProbeState: what the engine knows about a registered probe, apart from the user's record."""

from __future__ import annotations

from collections import deque
from dataclasses import field

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, HandlerPoint
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode, OutOfLine
from emulated_kernel.util.fast_dataclass import dataclass

COSTS_KEPT = 63
"""Number of latest hits whose cost is kept; an odd number has a median."""


class HitCost:
    """Host time for handling hits: from the breakpoint to the instruction after the probed one."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: deque[int] | None = None
        """Nanoseconds of the latest hits; created at the first hit, because most probes are never hit."""

    def text(self, hits: int) -> str:
        """Return the number of hits, and the median of the latest hits' nanoseconds."""
        if not self.latest:
            return f"hits {hits}"
        from statistics import median

        return f"hits {hits} median {round(median(self.latest))} ns of the last {len(self.latest)}"


@dataclass(eq=False, slots=True)
class ProbeState:
    """The engine's state of a probe. Each registration of the probe starts with a new one.

    After unregistration the last state stays, because a CPU may still have to end a hit.
    """

    assembled: AssembledHandlers | None = field(default=None, init=False)
    """The assembled handlers of a registered probe."""
    has_assembly: bool = field(default=False, init=False)
    """Whether the probe, or a member of an aggregator, has `code`."""
    has_post_assembly: bool = field(default=False, init=False)
    """Whether the probe, or a member of an aggregator, has `post_code`."""
    takes_flags: bool = field(default=False, init=False)
    """Whether the post_handler has a third argument; set at registration."""
    insn: OutOfLine | None = field(default=None, init=False)
    """The out-of-line form of the probed instruction; None at an fentry site, and after unregistration."""
    cost: HitCost = field(default_factory=HitCost, init=False)
    """Host time of the latest hits; the probes at one address share it."""
    rejection: Rejection | str = field(default="", init=False)
    """Reason why the probe cannot be optimized: address and rule; empty if it can be."""
    place: str = field(default="", init=False)
    """Cached `line_head` of a probe in the kernel proper, where it never changes; otherwise empty."""
    stub: CompiledCode | None = field(default=None, init=False)
    """Handler to which a hit by a breakpoint is sent."""
    compiled: CompiledCode | None = field(default=None, init=False)
    """Compiled handler that the jump or call in the text reaches; None: hits trap."""
    sample: dict[str, int] | None = field(default=None, init=False)
    """Registers at the last hit before the probe's handler was compiled."""
    aggregator: object | None = field(default=None, init=False)
    """The AggrKprobe that is in the table instead of this probe; None if the probe itself is."""
    is_python: bool = field(default=False, init=False)
    """Whether it was found that the present handler cannot be guest code."""

    def attach_assembly(self, assembled: AssembledHandlers) -> None:
        """Set the assembled handlers at registration."""
        self.assembled = assembled
        self.has_assembly = HandlerPoint.PRE in assembled
        self.has_post_assembly = HandlerPoint.POST in assembled

    def leave_assembly(self) -> AssembledHandlers | None:
        """Remove the assembled handlers at unregistration, and return them."""
        assembled = self.assembled
        self.assembled = None
        self.has_assembly = False
        self.has_post_assembly = False
        return assembled
