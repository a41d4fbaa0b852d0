"""A kernel made of Python values behind the vfs ports: enough to serve every file."""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.layout import KernelPorts, Layout, build_filesystem
from emulated_kernel.vfs.node import Owner
from emulated_kernel.vfs.tracefs import TracefsPorts
from emulated_kernel.vfs.tree import Filesystem
from tests.vfs.fake_trace import FakeCmdlines, FakeList, FakeStackTracer, FakeTrace


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
    is_return: bool = False
    active: int = 1
    maxactive: int = 10
    high_water: int = 4
    memory: int = 480
    filter: str = "none"

    @property
    def is_switchable(self) -> bool:
        return True

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

    def enabled_text(self) -> str:
        return f"{self.enabled:d}"

    def triggers(self) -> Iterable[str]:
        return ["# Available triggers:\n"]

    def execute_trigger(self, data: builtins.bytes) -> int:
        return len(data)

    def hist_text(self) -> str:
        return ""

    def drop_histograms(self) -> None:
        pass

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

    @property
    def is_switchable(self) -> bool:
        return True

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
    chosen: FakeList = field(default_factory=FakeList)

    def names(self) -> Collection[str]:
        return self.groups.keys()

    def find(self, name: str) -> FakeGroup | None:
        return self.groups.get(name)

    def all(self) -> list[FakeEvent]:
        return [event for group in self.groups.values() for event in group.events.values()]

    def enabled_text(self) -> str:
        return FakeGroup({event.name: event for event in self.all()}).enabled_text()

    def header_page_text(self) -> str:
        return "a page\n"

    def header_event_text(self) -> str:
        return "an event\n"

    def newest_first(self) -> Iterable[str]:
        return [f"{event.group}:{event.name}\n" for event in reversed(self.all())]

    def set_enabled(self, enabled: bool) -> None:
        for group in self.groups.values():
            group.set_enabled(enabled)

    def definitions(self, start: int) -> Iterable[str]:
        return [f"p:{event.group}/{event.name} {event.place}\n" for event in self.all()][start:]

    def profile(self, start: int) -> Iterable[str]:
        lines = [f"  {event.name:<44} {event.hits:>15} {event.nmissed:>15}\n" for event in self.all()]
        return lines[start:]

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


class FakeKprobes:
    """The debugfs switches."""

    def __init__(self) -> None:
        self.enabled = True
        self.can_optimize = True
        self.optimization = True

    def list_records(self, start: int) -> Iterable[str]:
        return ["ffffffff81000000  k  vfs_read+0x0    [OPTIMIZED]\n"][start:]

    def blacklist_text(self) -> Iterable[str]:
        return [f"0x{base:016x}-0x{base + 32:016x}\tasm_{base}\n" for base in range(0, 6400, 32)]

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled

    def set_optimization(self, allowed: bool) -> None:
        self.optimization = allowed


class FakeMachine:
    """A computer that can add, and has modules."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def version(self) -> str:
        return "Linux version 6.1.0-fake"

    def kallsyms(self, zero_addresses: bool) -> Iterable[str]:
        base = 0 if zero_addresses else 0xFFFFFFFF81000000
        return [f"{base and base + 16 * number:016x} T function_{number}\n" for number in range(3)]

    def dmesg(self) -> Iterable[str]:
        return ["[    0.000000] booted\n"]

    def tasks(self) -> Iterable[str]:
        return ["PID COMM\n", "0 swapper/0\n"]

    def modules(self, zero_addresses: bool) -> Iterable[str]:
        address = 0 if zero_addresses else 0xFFFFFFFFC0000000
        return [f"{name} 4096 0 - Live 0x{address:016x}\n" for name in self.loaded]

    def command_module(self, line: str) -> None:
        verb, name = line.split()
        if verb == "unload" and name not in self.loaded:
            raise KernelError(errno.ENOENT, name)
        (self.loaded.append if verb == "load" else self.loaded.remove)(name)

    def cpus(self) -> Iterable[str]:
        return ["CPU STATE\n", "0 idle\n"]

    def meminfo(self) -> Iterable[str]:
        return ["MemTotal: 4 kB\n"]

    def loads(self) -> Iterable[str]:
        return []

    def command_load(self, line: str) -> None:
        raise KernelError(errno.EINVAL, line)

    def clock(self) -> str:
        return "mode virtual\n"

    def command_clock(self, line: str) -> None:
        raise KernelError(errno.EINVAL, line)

    def call(self, line: str) -> str:
        name, *arguments = line.split()
        if name != "add":
            raise KernelError(errno.ENOENT, name)
        return str(sum(int(word) for word in arguments))


@dataclass(eq=False)
class FakeFunctionTracer:
    """set_ftrace_filter and its likes."""

    filter: FakeList = field(default_factory=FakeList)
    notrace: FakeList = field(default_factory=FakeList)
    traced_pids: FakeList = field(default_factory=FakeList)
    untraced_pids: FakeList = field(default_factory=FakeList)


class FakeFunctions:
    """The functions that can be traced."""

    def available(self) -> Iterable[str]:
        return ["vfs_read\n", "vfs_write\n"]

    def enabled(self) -> Iterable[str]:
        return []


@dataclass(eq=False)
class FakeInstance:
    """A trace array with its events, errors and function tracer."""

    trace: FakeTrace = field(default_factory=FakeTrace)
    events: FakeEvents = field(default_factory=FakeEvents)
    errors: FakeList = field(default_factory=FakeList)
    functions: FakeFunctionTracer = field(default_factory=FakeFunctionTracer)


class FakeInstances:
    """instances/."""

    def __init__(self) -> None:
        self.made: dict[str, FakeInstance] = {}
        self.names = self.made.keys
        self.find = self.made.get
        self.remove = self.made.__delitem__

    def make(self, name: str) -> None:
        self.made[name] = FakeInstance()


@dataclass
class FakeReturnHooks:
    """Two shadow stacks; one is busy."""

    return_hook: str = "rethook"

    def return_hooks(self) -> list[str]:
        return ["rethook", "fgraph", "busy"]

    def select_return_hook(self, name: str) -> None:
        if name not in self.return_hooks() or name == "busy":
            raise KernelError(errno.EBUSY if name == "busy" else errno.EINVAL)
        self.return_hook = name


@dataclass
class FakeKernel:
    """All the ports, kept together so that a test can look behind the files."""

    kprobes: FakeKprobes = field(default_factory=FakeKprobes)
    events: FakeEvents = field(default_factory=FakeEvents)
    trace: FakeTrace = field(default_factory=FakeTrace)
    machine: FakeMachine = field(default_factory=FakeMachine)
    hooks: FakeReturnHooks = field(default_factory=FakeReturnHooks)
    stack: FakeStackTracer = field(default_factory=FakeStackTracer)
    return_probes: bool = True

    instances: FakeInstances = field(default_factory=FakeInstances)
    dynamic_events: FakeList = field(default_factory=FakeList)

    def filesystem(self, layout: Layout = Layout.FULL, owner: Owner | None = None) -> Filesystem:
        tracefs = TracefsPorts(
            functions=FakeFunctions(),
            top=FakeInstance(self.trace, self.events, self.trace.errors),
            instances=self.instances,
            cmdlines=FakeCmdlines(),
            kprobe_events=self.events,
            dynamic_events=self.dynamic_events,
            synthetic_events=FakeList(),
            uprobe_events=FakeList(),
            stack=self.stack,
            return_probes=self.return_probes,
        )
        return build_filesystem(
            KernelPorts(self.kprobes, self.events, tracefs, self.machine, self.hooks), layout, owner
        )
