"""Ports of trace arrays: what their files need of the buffers, and nothing more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from emulated_kernel.vfs.ports import EventsPort, ListPort, Stream


class OptionsPort(Protocol):
    """Switches of a trace array, by name."""

    def names(self, *, instance: bool = False) -> Collection[str]:
        """All names, or those that an instance has files for."""

    def get(self, name: str) -> bool:
        """Whether an option is on."""

    def set(self, name: str, value: int) -> None:
        """Switch an option. Raises: KernelError EINVAL for a value but 0 and 1, or where it is refused."""

    def text(self) -> str:
        """A line for each, "no" before those that are off."""

    def write(self, data: bytes) -> int:
        """Switch the named option, off with "no" before it; bytes taken. Raises: KernelError EINVAL."""


class SnapshotPort(Protocol):
    """Events that were set aside; `cpu` None means all CPUs."""

    def text(self, cpu: int | None = None) -> str:
        """The events, or how to set some aside."""

    def write(self, number: int, cpu: int | None = None) -> None:
        """0 frees, 1 takes a snapshot, another number clears. Raises: KernelError EINVAL, ENOMEM."""


class PidListsPort(Protocol):
    """Which tasks' events are recorded."""

    @property
    def traced(self) -> ListPort:
        """Only these, if there are any."""

    @property
    def untraced(self) -> ListPort:
        """Not these."""


class TracePort(Protocol):
    """The buffers of a trace array and their controls; `cpu` None means all CPUs."""

    @property
    def options(self) -> OptionsPort: ...

    @property
    def snapshot(self) -> SnapshotPort: ...

    @property
    def pids(self) -> PidListsPort: ...

    @property
    def cpus(self) -> int:
        """How many there are."""

    def trace_text(self, cpu: int | None = None) -> str:
        """The buffer's content with its header; nothing is consumed."""

    def clear_trace(self, cpu: int | None = None) -> None:
        """Empty the buffer."""

    @property
    def pauses_for_readers(self) -> bool:
        """Whether nothing is to be recorded while the trace is open for reading."""

    def stop(self) -> None:
        """Record nothing until start() was called as often."""

    def start(self) -> None:
        """The other half of stop(), without which it does nothing."""

    def open_pipe(self, cpu: int | None = None, *, nonblock: bool = False) -> Stream:
        """A consuming reader of text; `nonblock`: opened with O_NONBLOCK.

        Raises: KernelError EBUSY while there is one already.
        """

    def open_raw_pipe(self, cpu: int, *, snapshot: bool = False) -> Stream:
        """A consuming reader of binary pages, of the buffer or of what was set aside."""

    def stats_text(self, cpu: int) -> str:
        """Counters of a CPU's buffer."""

    @property
    def tracing_on(self) -> bool:
        """Whether the buffer takes records."""

    def set_tracing_on(self, on: bool) -> None:
        """Let the buffer take records, or not."""

    def write_marker(self, data: bytes) -> int:
        """Record text from user space; bytes taken."""

    def write_raw_marker(self, data: bytes) -> int:
        """Record bytes from user space; bytes taken."""

    def buffer_size_text(self, cpu: int | None = None) -> str:
        """Size of one CPU's buffer in KiB, with a newline; "7 (expanded: 1408)" before the first use."""

    def resize_buffer(self, size_kb: int, cpu: int | None = None) -> None:
        """Give each CPU a buffer of that many KiB. Raises: KernelError EINVAL, ENOMEM."""

    def buffer_total_size_text(self) -> str:
        """The same for all CPUs together."""

    def free_buffer(self) -> None:
        """Give the buffers' memory back, as far as that goes."""

    @property
    def buffer_percent(self) -> int:
        """How full a CPU's buffer has to be for who waits for it, in percent."""

    def set_buffer_percent(self, percent: int) -> None:
        """Raises: KernelError EINVAL."""

    @property
    def cpumask(self) -> int:
        """CPUs whose events are recorded, a bit each."""

    def set_cpumask(self, mask: int) -> None:
        """Record the events of these CPUs alone."""

    max_latency_ns: int

    def clock_text(self) -> str:
        """All clocks in one line, the current one in brackets."""

    def set_clock(self, name: str) -> None:
        """Count time with another one. Raises: KernelError EINVAL."""

    def timestamp_mode_text(self) -> str:
        """How the buffers store times."""

    def tracers(self) -> Collection[str]:
        """Names that current_tracer takes."""

    @property
    def current_tracer(self) -> str:
        """The tracer in use; "nop" records events alone."""

    def set_tracer(self, name: str) -> None:
        """Use another tracer. Raises: KernelError EINVAL for an unknown one."""


class ErrorLogPort(Protocol):
    """Failed commands."""

    def records(self) -> Iterable[str]:
        """The last ones, each with a caret under the place."""

    def clear(self) -> None:
        """Forget them."""


class CmdlinesPort(Protocol):
    """Names and thread groups of the tasks that were traced."""

    @property
    def size(self) -> int:
        """How many are remembered."""

    def resize(self, size: int) -> None:
        """Forget all and remember that many. Raises: KernelError EINVAL."""

    def records(self) -> Iterable[str]:
        """Pid and name, a line each."""

    def tgid_records(self) -> Iterable[str]:
        """Pid and thread group, a line each."""


class FunctionsPort(Protocol):
    """The functions whose calls can be traced."""

    def available(self) -> Iterable[str]:
        """A line for each, with its newline."""

    def enabled(self) -> Iterable[str]:
        """A line for each that is hooked, with the number of users."""


class FunctionTracerPort(Protocol):
    """Which functions' calls a trace array records, and for which tasks."""

    @property
    def filter(self) -> ListPort:
        """Only these, if there are any; and commands."""

    @property
    def notrace(self) -> ListPort:
        """Not these."""

    @property
    def traced_pids(self) -> ListPort:
        """Only calls by these tasks, if there are any."""

    @property
    def untraced_pids(self) -> ListPort:
        """No calls by these."""


class InstancePort(Protocol):
    """A trace array with its events and its errors."""

    @property
    def trace(self) -> TracePort: ...

    @property
    def events(self) -> EventsPort: ...

    @property
    def errors(self) -> ErrorLogPort: ...

    @property
    def functions(self) -> FunctionTracerPort: ...


class InstancesPort(Protocol):
    """Trace arrays beside the top one."""

    def names(self) -> Collection[str]:
        """Their names."""

    def find(self, name: str) -> InstancePort | None:
        """The one of that name; the same object as long as it exists."""

    def make(self, name: str) -> None:
        """Make one. Raises: KernelError EEXIST, ENOMEM."""

    def remove(self, name: str) -> None:
        """Remove one that has no open files. Raises: KernelError ENODEV."""
