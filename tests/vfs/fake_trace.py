"""Trace arrays made of Python values, behind the vfs ports."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from emulated_kernel.errors import KernelError, WouldBlock


@dataclass(eq=False)
class FakeList:
    """A file of lines, such as set_event or an error log."""

    lines: list[str] = field(default_factory=list)

    def records(self) -> Iterable[str]:
        return self.lines

    def profile_records(self) -> Iterable[str]:
        return [f"  {line.strip()} 0\n" for line in self.lines]

    def write(self, data: bytes) -> int:
        self.lines.append(data.decode())
        return len(data)

    def clear(self) -> None:
        self.lines.clear()


@dataclass
class FakeStackTracer:
    """stack_trace and its likes."""

    enabled: int = 0
    max_size: int = 0
    filter: FakeList = field(default_factory=FakeList)

    def enable(self, value: int) -> None:
        self.enabled = value

    def set_max_size(self, size: int) -> None:
        self.max_size = size

    def records(self) -> Iterable[str]:
        return [f"{self.max_size} bytes\n"]


class FakeCmdlines:
    """saved_cmdlines."""

    size = 6552

    def resize(self, size: int) -> None:
        self.size = size

    def records(self) -> Iterable[str]:
        return ["117 bash\n"]

    def tgid_records(self) -> Iterable[str]:
        return ["117 117\n"]


class FakeOptions:
    """Two options, one of which instances don't have."""

    def __init__(self) -> None:
        self.values = {"pause-on-trace": False, "record-cmd": True}

    def names(self, *, instance: bool = False) -> Collection[str]:
        return [name for name in self.values if not (instance and name == "record-cmd")]

    def get(self, name: str) -> bool:
        return self.values[name]

    def set(self, name: str, value: int) -> None:
        if value not in (0, 1):
            raise KernelError(errno.EINVAL, name)
        self.values[name] = bool(value)

    def text(self) -> str:
        return "".join(f"{'' if on else 'no'}{name}\n" for name, on in self.values.items())

    def write(self, data: bytes) -> int:
        text = data.decode().strip()
        self.set(text.removeprefix("no"), not text.startswith("no"))
        return len(data)


class FakeSnapshot:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int | None]] = []

    def text(self, cpu: int | None = None) -> str:
        return f"snapshot {cpu}\n"

    def write(self, number: int, cpu: int | None = None) -> None:
        self.written.append((number, cpu))


class FakePids:
    """set_event_pid and its opposite."""

    def __init__(self) -> None:
        self.traced, self.untraced = FakeList(), FakeList()


class FakeStream:
    """A trace_pipe."""

    def __init__(self, buffer: FakeTrace) -> None:
        self._buffer = buffer

    def read(self, size: int) -> bytes:
        with self._buffer.changed:
            if not self._buffer.pending:
                raise WouldBlock
            data, self._buffer.pending = self._buffer.pending[:size], self._buffer.pending[size:]
            return data

    def ready(self) -> bool:
        return bool(self._buffer.pending)

    def wait(self, timeout: float) -> None:
        with self._buffer.changed:
            self._buffer.changed.wait_for(
                lambda: self._buffer.pending or self._buffer.pipe is not self, timeout
            )

    def subscribe(self, notify: Callable[[], None]) -> None:
        self._buffer.subscribers.append(notify)

    def close(self) -> None:
        with self._buffer.changed:
            self._buffer.pipe = None
            self._buffer.changed.notify_all()


class FakeTrace:
    """A ring buffer that holds what trace_marker writes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pending = b""
        self.subscribers: list[Callable[[], None]] = []
        self.pipe: FakeStream | None = None
        self.text = "# tracer: nop\n"
        self.tracing_on = True
        self.size_kb = 7
        self.current_tracer = "nop"
        self.clock = "local"
        self.errors = FakeList()
        self.options = FakeOptions()
        self.snapshot = FakeSnapshot()
        self.pids = FakePids()
        self.cpus = 2
        self.cpumask = 3
        self.buffer_percent = 50
        self.max_latency_ns = 0
        self.stopped = 0
        self.raw_markers: list[bytes] = []
        self.is_freed = False

    @property
    def pauses_for_readers(self) -> bool:
        return self.options.get("pause-on-trace")

    def stop(self) -> None:
        self.stopped += 1

    def start(self) -> None:
        self.stopped = max(0, self.stopped - 1)

    def trace_text(self, cpu: int | None = None) -> str:
        return self.text if cpu is None else f"CPU {cpu}\n"

    def clear_trace(self, cpu: int | None = None) -> None:
        if cpu is None:
            self.text = "# tracer: nop\n"

    def stats_text(self, cpu: int) -> str:
        return f"entries: {cpu}\n"

    def free_buffer(self) -> None:
        self.is_freed = True

    def set_buffer_percent(self, percent: int) -> None:
        self.buffer_percent = percent

    def set_cpumask(self, mask: int) -> None:
        self.cpumask = mask

    def clock_text(self) -> str:
        return f"[{self.clock}]\n"

    def set_clock(self, name: str) -> None:
        if name not in ("local", "global"):
            raise KernelError(errno.EINVAL, name)
        self.clock = name

    def timestamp_mode_text(self) -> str:
        return "[delta] absolute\n"

    def write_raw_marker(self, data: bytes) -> int:
        self.raw_markers.append(data)
        return len(data)

    def open_raw_pipe(self, cpu: int, *, snapshot: bool = False) -> FakeStream:
        del cpu, snapshot
        return self.open_pipe()

    def open_pipe(self, cpu: int | None = None, *, nonblock: bool = False) -> FakeStream:
        del cpu, nonblock
        if self.pipe is not None:
            raise KernelError(errno.EBUSY, "one reader at a time")
        self.pipe = FakeStream(self)
        return self.pipe

    def set_tracing_on(self, on: bool) -> None:
        self.tracing_on = on

    def write_marker(self, data: bytes) -> int:
        with self.changed:
            self.text += data.decode()
            self.pending += data
            self.changed.notify_all()
            subscribers, self.subscribers = self.subscribers, []
        for notify in subscribers:
            notify()
        return len(data)

    def buffer_size_text(self, cpu: int | None = None) -> str:
        del cpu
        return f"{self.size_kb}\n"

    def resize_buffer(self, size_kb: int, cpu: int | None = None) -> None:
        del cpu
        self.size_kb = size_kb

    def buffer_total_size_text(self) -> str:
        return f"{2 * self.size_kb}\n"

    def tracers(self) -> Collection[str]:
        return ("nop",)

    def set_tracer(self, name: str) -> None:
        if name not in self.tracers():
            raise KernelError(errno.EINVAL, name)
        self.current_tracer = name
