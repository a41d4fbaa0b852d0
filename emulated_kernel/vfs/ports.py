"""Ports: what the trees need of the kernel's other parts, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol


class KprobesPort(Protocol):
    """What debugfs kprobes/ and its sysctl show and set."""

    def list_text(self) -> Iterable[str]:
        """A line for each registered probe, with its newline."""

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

    @property
    def enabled(self) -> bool:
        """Whether its hits are recorded."""

    def set_enabled(self, enabled: bool) -> None:
        """Start or stop recording its hits."""

    def format_text(self) -> str:
        """Its fields and print format."""

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


class KprobeEventsPort(Protocol):
    """kprobe_events and kprobe_profile."""

    def definitions(self) -> Iterable[str]:
        """A line for each event, with its newline, as it could be written back."""

    def execute(self, data: bytes) -> int:
        """Create and delete events as the lines of one write(2) say; bytes taken.

        Raises: KernelError of the first line that fails; the lines before it stay done.
        """

    def clear(self) -> None:
        """Delete all events. Raises: KernelError EBUSY while one is enabled."""

    def profile(self) -> Iterable[str]:
        """A line of hits and misses for each event, with its newline."""


class TracePort(Protocol):
    """What tracefs shows of the ring buffer and its controls."""

    def trace_text(self) -> str:
        """The buffer's content with its header; nothing is consumed."""

    def clear_trace(self) -> None:
        """Empty the buffer."""

    def open_pipe(self, *, nonblock: bool = False) -> Stream:
        """A consuming reader; `nonblock`: opened with O_NONBLOCK.

        Raises: KernelError EBUSY while there is one already.
        """

    @property
    def tracing_on(self) -> bool:
        """Whether the buffer takes records."""

    def set_tracing_on(self, on: bool) -> None:
        """Let the buffer take records, or not."""

    def write_marker(self, data: bytes) -> int:
        """Record text from user space; bytes taken."""

    def buffer_size_text(self) -> str:
        """Size of one CPU's buffer in KiB, with a newline; "7 (expanded: 1408)" before the first use."""

    def resize_buffer(self, size_kb: int) -> None:
        """Give each CPU a buffer of that many KiB. Raises: KernelError EINVAL, ENOMEM."""

    def buffer_total_size_text(self) -> str:
        """The same for all CPUs together."""

    def tracers(self) -> Collection[str]:
        """Names that current_tracer takes."""

    @property
    def current_tracer(self) -> str:
        """The tracer in use; "nop" records events alone."""

    def set_tracer(self, name: str) -> None:
        """Use another tracer. Raises: KernelError EINVAL for an unknown one."""

    def error_log(self) -> Iterable[str]:
        """The last failed commands, each with a caret under the place."""

    def clear_error_log(self) -> None:
        """Forget them."""


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

    def call(self, line: str) -> str:
        """Call a guest function as `line` says ("name argument..."); its result as a line of text.

        Raises: KernelError EINVAL, ENOENT (no such function), EFAULT (the guest faulted).
        """
