"""Ports: what the trees need of the kernel's other parts, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol


class KprobesPort(Protocol):
    """What debugfs kprobes/ and its sysctl show and set."""

    def list_records(self, start: int) -> Iterable[str]:
        """Lines of the registered probes, those of each hash bucket from one on."""

    def blacklist_text(self) -> Iterable[str]:
        """A line for each range that can't be probed, with its newline."""

    @property
    def enabled(self) -> bool:
        """Whether probes are armed at all."""

    def set_enabled(self, enabled: bool) -> None:
        """Arm or disarm all probes. Mirrors: kernel/kprobes.c:arm_all_kprobes, disarm_all_kprobes."""

    @property
    def can_optimize(self) -> bool:
        """Whether the kernel is built with jump optimization; without, it has no sysctl."""

    @property
    def optimization(self) -> bool:
        """sysctl debug.kprobes-optimization."""

    def set_optimization(self, allowed: bool) -> None:
        """Let probes be optimized from now on, or unoptimize all."""


class ReturnHooksPort(Protocol):
    """What keeps the return addresses of hooked functions."""

    def return_hooks(self) -> Collection[str]:
        """Names of the shadow stacks."""

    @property
    def return_hook(self) -> str:
        """The one in use."""

    def select_return_hook(self, name: str) -> None:
        """Use another one. Raises: KernelError EINVAL (unknown), EBUSY while a function is hooked."""


class Stream(Protocol):
    """A consuming reader, such as an open trace_pipe."""

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" is the end. Raises: WouldBlock while there is nothing."""

    def ready(self) -> bool:
        """Whether read() would give something."""

    def wait(self, timeout: float) -> None:
        """Return once read() may give something, or after `timeout` seconds."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, from any thread, when read() would give something."""

    def close(self) -> None:
        """Let go of what the reader holds, and wake all who wait."""


class EventPort(Protocol):
    """One trace event."""

    @property
    def id(self) -> int:
        """Its number in common_type."""

    def set_enabled(self, enabled: bool) -> None:
        """Start or stop recording its hits."""

    @property
    def is_switchable(self) -> bool:
        """Whether it can be enabled."""

    def enabled_text(self) -> str:
        """ "0" or "1", with a "*" while triggers hold it in soft mode; without a newline."""

    def format_text(self) -> str:
        """Its fields and print format."""

    def triggers(self) -> Iterable[str]:
        """A line for each trigger, with its newline; where there are none, what can be written."""

    def execute_trigger(self, data: bytes) -> int:
        """Add, change or remove a trigger as one write(2) says; bytes taken. Raises: KernelError."""

    def hist_text(self) -> str:
        """Its histograms."""

    def drop_histograms(self) -> None:
        """Remove its histograms, and triggers that switch others'."""

    def filter_text(self) -> str:
        """Its filter or what was wrong with the last one, or "none", with a newline."""

    def set_filter(self, data: bytes) -> None:
        """Record only hits that the written expression is true for; "0": all.

        Raises: KernelError EPERM, ENOENT, ESRCH, EINVAL for a wrong expression, ENODEV.
        """


class GroupPort(Protocol):
    """The events of one group."""

    def names(self) -> Collection[str]:
        """Names of its events."""

    def find(self, name: str) -> EventPort | None:
        """The event of that name; the same object as long as it exists."""

    @property
    def is_switchable(self) -> bool:
        """Whether any of its events can be enabled."""

    def enabled_text(self) -> str:
        """ "0", "1", "X" (some are enabled) or "?" (none can be), without a newline."""

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable all of them."""

    def filter_text(self) -> str:
        """What its filter file is for."""

    def set_filter(self, data: bytes) -> None:
        """Set the filter of each of them. Raises: KernelError EINVAL (too long), ENODEV."""


class EventsPort(Protocol):
    """All trace events, by group."""

    def names(self) -> Collection[str]:
        """Names of the groups that have events."""

    def find(self, name: str) -> GroupPort | None:
        """The group of that name; the same object as long as it exists."""

    def enabled_text(self) -> str:
        """As of a group, for all events."""

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable all events."""

    def header_page_text(self) -> str:
        """The layout of a page of trace_pipe_raw."""

    def header_event_text(self) -> str:
        """The layout of what stands before each record on it."""

    def newest_first(self) -> Iterable[str]:
        """group:event of every event that can be enabled, a line each."""

    @property
    def chosen(self) -> ListPort:
        """The enabled ones, as set_event shows them and takes them."""


class ListPort(Protocol):
    """A file of lines that are added by writing and all go with O_TRUNC."""

    def records(self) -> Iterable[str]:
        """A line for each, with its newline."""

    def write(self, data: bytes) -> int:
        """Execute one write(2); bytes taken, which may be fewer than given. Raises: KernelError."""

    def clear(self) -> None:
        """Remove all. Raises: KernelError EBUSY while one is in use."""


class GraphPort(Protocol):
    """What the function_graph tracer records."""

    @property
    def functions(self) -> ListPort:
        """Functions whose calls are recorded with all that they call; none: all are."""

    @property
    def notrace(self) -> ListPort:
        """Functions that aren't recorded, with all that they call."""

    @property
    def max_depth(self) -> int:
        """Calls nested deeper aren't recorded; 0: all are."""

    def set_max_depth(self, depth: int) -> None:
        """Record calls up to that depth from now on."""

    threshold_ns: int
    """Only calls that took at least so long are recorded, when they return; 0: all are."""


class StackTracerPort(Protocol):
    """The deepest stack that was found."""

    @property
    def enabled(self) -> int:
        """What was last written to sysctl kernel.stack_tracer_enabled; 0: nothing is looked for."""

    def enable(self, value: int) -> None:
        """The sysctl."""

    @property
    def max_size(self) -> int:
        """Its depth in bytes."""

    def set_max_size(self, size: int) -> None:
        """Look for deeper ones than that."""

    def records(self) -> Iterable[str]:
        """A title, and a line for each call on it."""

    @property
    def filter(self) -> ListPort:
        """The functions at whose calls stacks are looked at; none: all are."""


class KprobeEventsPort(Protocol):
    """kprobe_events and kprobe_profile."""

    def definitions(self, start: int) -> Iterable[str]:
        """A line for each event from one on, with its newline, as it could be written back."""

    def execute(self, data: bytes) -> int:
        """Create and delete events as the lines of one write(2) say; bytes taken.

        Raises: KernelError of the first line that fails; the lines before it stay done.
        """

    def clear(self) -> None:
        """Delete all events. Raises: KernelError EBUSY while one is enabled."""

    def profile(self, start: int) -> Iterable[str]:
        """A line of hits and misses for each event from one on, with its newline."""


class ProfiledPort(ListPort, Protocol):
    """A file of definitions, and the hits of what they define."""

    def profile_records(self) -> Iterable[str]:
        """A line of hits for each, with its newline."""


class ProbeStats(Protocol):
    """What is known of one probe; texts come without a newline at the end."""

    @property
    def hits(self) -> int:
        """Times the probe fired."""

    def reset_hits(self) -> None:
        """Count from 0 again."""

    @property
    def nmissed(self) -> int:
        """Times it was hit and could not fire."""

    def reset_nmissed(self) -> None:
        """Count from 0 again."""

    @property
    def mode(self) -> str:
        """int3, boosted, optimized, ftrace, disarmed, gone, or pending: its place isn't there yet."""

    @property
    def enabled(self) -> bool:
        """The user's flag, not whether bytes are patched."""

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable this probe alone."""

    @property
    def optimized(self) -> bool:
        """Whether the text holds a jump to its detour buffer."""

    def set_optimized(self, wanted: bool) -> None:
        """False unoptimizes and holds; True asks again. Raises: KernelError EOPNOTSUPP where unsafe."""

    @property
    def reason(self) -> str:
        """Why the probe isn't in a better mode: one line with the address and the rule."""

    @property
    def address(self) -> str:
        """Where it is, as a number and as symbol+offset."""

    @property
    def bytes(self) -> str:
        """The text at the probe: original, and as patched now."""

    @property
    def detour(self) -> str:
        """Disassembly of its detour buffer or insn slot."""

    @property
    def cost(self) -> str:
        """What a hit costs: traps and guest instructions."""

    @property
    def is_return(self) -> bool:
        """Whether it is a return probe, which alone has what follows; sums over its probes."""

    @property
    def active(self) -> int:
        """Calls that haven't returned yet."""

    @property
    def maxactive(self) -> int:
        """Calls that can be pending at a time; 0 where only the tasks' stacks limit them."""

    @property
    def high_water(self) -> int:
        """The most calls that ever were pending."""

    @property
    def memory(self) -> int:
        """Bytes allocated for pending calls, of this probe alone."""


class StatsGroupPort(Protocol):
    """The probes of one event group."""

    def names(self) -> Collection[str]:
        """Names of its events."""

    def find(self, name: str) -> ProbeStats | None:
        """The probe of that event; the same object as long as it exists."""


class StatsPort(Protocol):
    """All probes that belong to events, by group."""

    def names(self) -> Collection[str]:
        """Names of the groups."""

    def find(self, name: str) -> StatsGroupPort | None:
        """The group of that name; the same object as long as it exists."""


class MachinePort(Protocol):
    """The emulated computer."""

    def version(self) -> str:
        """The kernel's banner and what it was built as, without a newline at the end."""

    def kallsyms(self, zero_addresses: bool) -> Iterable[str]:
        """A line for each symbol, with its newline; addresses are 0 for who may not know them."""

    def dmesg(self) -> Iterable[str]:
        """Lines of the kernel log, with their newlines."""

    def tasks(self) -> Iterable[str]:
        """A line for each task, with its newline, after a header."""

    def modules(self, zero_addresses: bool) -> Iterable[str]:
        """A line for each loaded module, with its newline; addresses as in kallsyms."""

    def command_module(self, line: str) -> None:
        """Load or unload a module as `line` says.

        Raises: KernelError EINVAL, ENOENT, ENOEXEC (no module), EEXIST, EWOULDBLOCK and EBUSY (in use)...
        """

    def cpus(self) -> Iterable[str]:
        """A line for each CPU, with its newline, after a header."""

    def meminfo(self) -> Iterable[str]:
        """Lines as those of /proc/meminfo, with their newlines."""

    def loads(self) -> Iterable[str]:
        """A line for each load that runs or ran, with its newline."""

    def command_load(self, line: str) -> None:
        """Start or stop loads as `line` says ("KIND [rate=N] [duration=SECONDS]", "stop").

        Raises: KernelError EINVAL, ERANGE, EOPNOTSUPP (not with this kernel), EBUSY (runs), ENOENT...
        """

    def clock(self) -> str:
        """What the clock follows, its seed, and the time since boot: a line each."""

    def command_clock(self, line: str) -> None:
        """Let the clock follow something else ("MODE", "seed N"). Raises: KernelError EINVAL."""

    def call(self, line: str) -> str:
        """Call a guest function as `line` says ("name argument..."); its result as a line of text.

        Raises: KernelError EINVAL, ENOENT (no such function), EFAULT (the guest faulted).
        """
