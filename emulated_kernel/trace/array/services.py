"""What all trace arrays of a kernel share, and what each of them can have as its tracer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.context.call_stack import CallStack
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.output.tracer_options import TracerOptions
from emulated_kernel.trace.ring.trace_clock import ClockSource
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.fast_dataclass import dataclass

NOP_TRACER = "nop"
FUNCTION_TRACER = "function"
RELEASE = "6.1.0"
"""Of the kernel that ours is measured by."""


@dataclass(eq=False)
class TracingServices:
    """What all trace arrays of a kernel share."""

    lock: ControlLock
    cpus: int
    now_ns: Callable[[], int]
    """The machine's nanoseconds since boot."""
    events: EventRegistry
    symbols: KernelSymbols
    arch: Arch
    tasks: Tasks
    stack: CallStack
    current_ctx: ProbeHit
    """The current task and its context, for entries that no probe writes: markers, tracers, printk."""
    memory: GuestRecords
    """Memory for ring buffers, and how guest code writes to them."""
    markers: PrintEvent
    cmdlines: SavedCmdlines
    printk: Callable[[str], None]
    """A line of the kernel's log."""
    release: str = RELEASE
    clocks: ClockSource = field(default_factory=ClockSource)
    tracer_options: TracerOptions = field(default_factory=TracerOptions)
    is_expanded: bool = False
    """Whether buffers got their full size: no memory is spent on them before something is traced.

    Mirrors: kernel/trace/trace.c:ring_buffer_expanded (v6.1)
    """


class Tracer:
    """What fills the buffer while it is the current tracer; this one, nop, fills nothing."""

    def start(self) -> None:
        """Raises: KernelError (it can't)."""

    def stop(self) -> None:
        """It is another one now."""

    def option_changed(self, name: str) -> None:
        """An option was switched while it is the current tracer. Mirrors: trace.h:tracer.set_flag (v6.1)."""
        del name

    def rewired(self) -> None:
        """Its array's ring_target() differs from now on, or whom its lists of pids name."""
