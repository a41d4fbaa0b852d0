"""The services that all trace arrays of a kernel share, and the base class of tracers."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.compiled.guest_records import GuestRecords
from emulated_kernel.trace.context.call_stack import CallStack
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords
from emulated_kernel.trace.interface import Interface
from emulated_kernel.trace.output.function_args import FunctionArgs
from emulated_kernel.trace.output.tracer_options import TracerOptions
from emulated_kernel.trace.ring.trace_clock import ClockSource
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.fast_dataclass import dataclass, field

NOP_TRACER = "nop"
"""Name of the tracer that records nothing."""
FUNCTION_TRACER = "function"
"""Name of the tracer that records calls of functions."""


@dataclass(eq=False)
class TracingServices:
    """Objects that all trace arrays of a kernel use: clock, symbols, events, tasks, memory of buffers."""

    lock: ControlLock
    cpus: int
    now_ns: Callable[[], int]
    """Returns the time of the machine's clock: nanoseconds since boot."""
    events: EventRegistry
    symbols: KernelSymbols
    arch: Arch
    tasks: Tasks
    stack: CallStack
    current_ctx: ProbeHit
    """A ProbeHit of the current task and context, which markers and their triggers get in place of a hit."""
    memory: GuestRecords
    """Allocator of the ring buffers' memory; it also lets guest code write to the buffers."""
    markers: PrintEvent
    cmdlines: SavedCmdlines
    printk: Callable[[str], None]
    """Adds a line to the kernel's log."""
    clocks: ClockSource
    interface: Interface
    release: str
    """Release of the kernel, as uname -r prints it."""
    marker_preempt_count: int = 0
    """Value of the field common_preempt_count in the records of markers."""
    tracer_options: TracerOptions = field(default_factory=TracerOptions)
    filter_words: FilterWords = NO_WORDS
    function_args: FunctionArgs | None = None
    """Printer of the functions' arguments in records of calls; None if these records have no arguments."""
    user_data: UserDataSize | None = None
    """Setting for the number of bytes of user memory that a record of a system call contains.

    The value is None if these records contain no user memory.
    """
    is_expanded: bool = False
    """Whether the top array's buffers have got their full size, or a size that was written to buffer_size_kb.

    The buffers stay small until something is traced. Before Linux 6.8, this value applies to the buffers of
    all trace arrays.
    Mirrors: kernel/trace/trace.c:ring_buffer_expanded (v6.1).
    """


class Tracer:
    """A tracer, which records to its trace array while it is the current one. This base class is `nop`."""

    def start(self) -> None:
        """Begin to trace: this tracer becomes the current one. Raises: KernelError (it cannot start)."""

    def stop(self) -> None:
        """Stop tracing: another tracer becomes the current one."""

    def switched_on(self) -> None:
        """Handle a write to tracing_on that switches recording on while this tracer is current.

        Mirrors: trace.h:tracer.start (v6.1).
        """

    def option_changed(self, name: str) -> None:
        """Apply the option called `name`, which was switched while this tracer is current.

        Mirrors: trace.h:tracer.set_flag (v6.1).
        """
        del name

    def rewired(self) -> None:
        """Recompile the tracer's guest code after a change of the buffers, clock, options or pid lists."""
