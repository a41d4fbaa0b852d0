"""A kernel made of Python values behind the vfs ports: enough to serve every file."""

from __future__ import annotations

import builtins
import errno
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from emulated_kernel.errors import KernelError, WouldBlock
from emulated_kernel.vfs.layout import KernelPorts, Layout, build_filesystem
from emulated_kernel.vfs.node import Owner
from emulated_kernel.vfs.tracefs import TracefsPorts
from emulated_kernel.vfs.tree import Filesystem


@dataclass(eq=False)
class FakeEvent:
    """One event; it is also its probe's statistics."""

    id: int
    group: str
    name: str
    place: str
    enabled: bool = False
    optimized: bool = True
    hits: int = 3
    nmissed: int = 1
    mode: str = "optimized"
    reason: str = ""
    address: str = "0xffffffff81000000 vfs_read+0x0"
    bytes: str = "original 55\npatched  cc"
    detour: str = ""
    cost: str = "traps 0"
    filter: str = "none"

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled

    def set_optimized(self, wanted: bool) -> None:
        if wanted:
            raise KernelError(errno.EOPNOTSUPP, "unsafe")
        self.optimized = False

    def reset_hits(self) -> None:
        self.hits = 0

    def reset_nmissed(self) -> None:
        self.nmissed = 0

    def format_text(self) -> str:
        return f"name: {self.name}\nID: {self.id}\n"

    def filter_text(self) -> str:
        return f"{self.filter}\n"

    def set_filter(self, data: builtins.bytes) -> None:
        self.filter = data.decode()


@dataclass(eq=False)
class FakeGroup:
    """The events of a group."""

    events: dict[str, FakeEvent] = field(default_factory=dict)

    def names(self) -> Collection[str]:
        return self.events.keys()

    def find(self, name: str) -> FakeEvent | None:
        return self.events.get(name)

    def enabled_text(self) -> str:
        states = {event.enabled for event in self.events.values()}
        return {0: "?", 2: "X"}.get(len(states), "1" if True in states else "0")

    def set_enabled(self, enabled: bool) -> None:
        for event in self.events.values():
            event.enabled = enabled

    def filter_text(self) -> str:
        return "global filter\n"

    def set_filter(self, data: bytes) -> None:
        for event in self.events.values():
            event.set_filter(data)


@dataclass(eq=False)
class FakeEvents:
    """All events, and what kprobe_events does to them."""

    groups: dict[str, FakeGroup] = field(default_factory=dict)
    next_id: int = 1409

    def names(self) -> Collection[str]:
        return self.groups.keys()

    def find(self, name: str) -> FakeGroup | None:
        return self.groups.get(name)

    def all(self) -> list[FakeEvent]:
        return [event for group in self.groups.values() for event in group.events.values()]

    def enabled_text(self) -> str:
        return FakeGroup({event.name: event for event in self.all()}).enabled_text()

    def set_enabled(self, enabled: bool) -> None:
        for group in self.groups.values():
            group.set_enabled(enabled)

    def definitions(self) -> Iterable[str]:
        return [f"p:{event.group}/{event.name} {event.place}\n" for event in self.all()]

    def profile(self) -> Iterable[str]:
        return [f"  {event.name:<44} {event.hits:>15} {event.nmissed:>15}\n" for event in self.all()]

    def execute(self, data: bytes) -> int:
        for line in data.decode().split("\n"):
            if line:
                self.command(line)
        return len(data)

    def command(self, line: str) -> None:
        if match := re.fullmatch(r"p:(?:(\w+)/)?(\w+) (vfs_(?:read|mkdir|rmdir))", line):
            group = match[1] or "kprobes"
            event = FakeEvent(self.next_id, group, match[2], match[3])
            self.groups.setdefault(group, FakeGroup()).events[match[2]] = event
            self.next_id += 1
        elif match := re.fullmatch(r"-:(?:(\w+)/)?(\w+)", line):
            self.remove(match[1] or "kprobes", match[2])
        else:
            raise KernelError(errno.ENOENT if line.startswith("p") else errno.EINVAL, line)

    def remove(self, group: str, name: str) -> None:
        if group not in self.groups or name not in self.groups[group].events:
            raise KernelError(errno.ENOENT, name)
        if self.groups[group].events[name].enabled:
            raise KernelError(errno.EBUSY, name)
        del self.groups[group].events[name]
        if not self.groups[group].events:
            del self.groups[group]

    def clear(self) -> None:
        if any(event.enabled for event in self.all()):
            raise KernelError(errno.EBUSY, "an event is enabled")
        self.groups.clear()


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
        self.errors: list[str] = []

    def trace_text(self) -> str:
        return self.text

    def clear_trace(self) -> None:
        self.text = "# tracer: nop\n"

    def open_pipe(self, *, nonblock: bool = False) -> FakeStream:
        del nonblock
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

    def buffer_size_text(self) -> str:
        return f"{self.size_kb}\n"

    def resize_buffer(self, size_kb: int) -> None:
        self.size_kb = size_kb

    def buffer_total_size_text(self) -> str:
        return f"{2 * self.size_kb}\n"

    def tracers(self) -> Collection[str]:
        return ("nop",)

    def set_tracer(self, name: str) -> None:
        if name not in self.tracers():
            raise KernelError(errno.EINVAL, name)
        self.current_tracer = name

    def error_log(self) -> Iterable[str]:
        return self.errors

    def clear_error_log(self) -> None:
        self.errors.clear()


class FakeKprobes:
    """The debugfs switches."""

    def __init__(self) -> None:
        self.enabled = True
        self.can_optimize = True
        self.optimization = True

    def list_text(self) -> Iterable[str]:
        return ["ffffffff81000000  k  vfs_read+0x0    [OPTIMIZED]\n"]

    def blacklist_text(self) -> Iterable[str]:
        return [f"0x{base:016x}-0x{base + 32:016x}\tasm_{base}\n" for base in range(0, 6400, 32)]

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled

    def set_optimization(self, allowed: bool) -> None:
        self.optimization = allowed


class FakeMachine:
    """A computer that can add."""

    def version(self) -> str:
        return "Linux version 6.1.0-fake"

    def kallsyms(self, zero_addresses: bool) -> Iterable[str]:
        base = 0 if zero_addresses else 0xFFFFFFFF81000000
        return [f"{base and base + 16 * number:016x} T function_{number}\n" for number in range(3)]

    def dmesg(self) -> Iterable[str]:
        return ["[    0.000000] booted\n"]

    def tasks(self) -> Iterable[str]:
        return ["PID COMM\n", "0 swapper/0\n"]

    def call(self, line: str) -> str:
        name, *arguments = line.split()
        if name != "add":
            raise KernelError(errno.ENOENT, name)
        return str(sum(int(word) for word in arguments))


@dataclass
class FakeKernel:
    """All the ports, kept together so that a test can look behind the files."""

    kprobes: FakeKprobes = field(default_factory=FakeKprobes)
    events: FakeEvents = field(default_factory=FakeEvents)
    trace: FakeTrace = field(default_factory=FakeTrace)
    machine: FakeMachine = field(default_factory=FakeMachine)
    return_probes: bool = True

    def filesystem(self, layout: Layout = Layout.FULL, owner: Owner | None = None) -> Filesystem:
        tracefs = TracefsPorts(self.trace, self.events, self.events, self.return_probes)
        return build_filesystem(KernelPorts(self.kprobes, self.events, tracefs, self.machine), layout, owner)
