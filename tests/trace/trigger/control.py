"""Stand-ins for a trace array and for a kernel with triggers. The trace array's switch, clock, call chain and
snapshots are attributes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.hist.services import HistServices
from emulated_kernel.trace.hist.trigger import HistCommand, hist_records
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents
from emulated_kernel.trace.probes.eprobe import EventProbes
from emulated_kernel.trace.ring.trace_clock import TraceClock
from emulated_kernel.trace.synth.synthetic_events import SyntheticEvents
from emulated_kernel.trace.trigger.commands import PLAIN_COMMANDS
from emulated_kernel.trace.trigger.triggers import EventTriggers
from emulated_kernel.util.errors import KernelError
from tests.trace.events.kernel import FUNCTIONS, FakeRecorder, Function, Hit, Kernel, hit_all, make_kernel

CLOCKS = {"local": True, "global": True, "counter": False, "uptime": False, "mono": True}


@dataclass
class FakeSnapshot:
    """A Snapshot that records the calls of its methods."""

    actions: list[str]
    condition: object = None

    def allocate(self) -> None:
        self.actions.append("allocate")

    def take(self) -> None:
        self.actions.append("snapshot")


@dataclass(eq=False)
class Control(FakeRecorder):
    """A stand-in for TraceArray."""

    tracing_on: bool = True
    clock_name: str = "local"
    time: int = 1000
    chain: tuple[int, ...] = (0xFFFFFFFF8135D4F1, 0xFFFFFFFF8134CC60)
    actions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshot = FakeSnapshot(self.actions)

    def set_tracing_on(self, on: bool) -> None:
        self.tracing_on = on
        self.actions.append(f"tracing_on {on:d}")

    def record_stack(self, hit: ProbeHit) -> None:
        del hit
        self.actions.append("stack")

    def callers(self, hit: ProbeHit) -> Sequence[int]:
        del hit
        return self.chain

    def now(self) -> int:
        return self.time

    def set_clock(self, name: str) -> None:
        if name not in CLOCKS:
            raise KernelError(errno.EINVAL, "no such clock")
        self.clock_name = name

    @property
    def clock(self) -> TraceClock:
        return TraceClock(self.clock_name, CLOCKS[self.clock_name])


class TriggerKernel:
    """A stand-in for a kernel with triggers on its events."""

    def __init__(self, control: Control | None = None, functions: Iterable[Function] = FUNCTIONS) -> None:
        self.control = control or Control()
        self.kernel: Kernel = make_kernel(functions, recorder=self.control)
        events, commands = self.kernel.events, self.kernel.commands
        symbols: Any = self.kernel.symbols
        array: Any = self.control
        self.synthetic = SyntheticEvents(commands, 8)
        self.event_probes = EventProbes(X86_64(), symbols, commands)
        self.kernel.dynamic_events = DynamicEvents(commands, events, self.synthetic, self.event_probes)
        self.system = HistServices(events.registry, {0: "sys_read"}.get)
        self.hists = HistCommand(self.system)
        triggers = (*PLAIN_COMMANDS, self.hists)
        self.triggers = EventTriggers(array, events.registry, events.error_log, symbols, triggers)

    def define(self, *commands: str) -> None:
        """Define kprobe events."""
        for command in commands:
            self.kernel.events.write(command.encode())

    def event(self, name: str) -> TraceEvent:
        """Return a kprobe event or a synthetic event by its name."""
        registry = self.kernel.events.registry
        found = registry.find("kprobes", name) or registry.find("synthetic", name)
        assert found is not None
        return found

    def write(self, text: str, event: str = "a") -> None:
        """Write a text to an event's trigger file."""
        assert self.triggers.write(self.event(event), text.encode()) == len(text)

    def show(self, event: str = "a") -> str:
        """Return the text of the event's trigger file."""
        return "".join(self.triggers.records(self.event(event)))

    def hist(self, event: str = "a") -> str:
        """Return the text of the event's hist file."""
        return "".join(hist_records(self.triggers, self.event(event)))

    def entries(self, event: str = "a") -> list[str]:
        """Return the elements in the event's hist file."""
        return [line for line in self.hist(event).splitlines() if line.startswith("{")]

    def errors(self) -> str:
        """Return the error log without times."""
        return "".join(f"{record.partition('] ')[2]}" for record in self.kernel.events.error_log.records())

    def enabled(self, event: str = "a") -> str:
        """Return the text of the event's enable file."""
        return self.event(event).file(self.kernel.recorder).enabled_text()

    def hit(self, hit: Hit | None = None, **regs: int) -> None:
        """Hit every armed probe once, with the registers `regs`."""
        hit = hit or Hit()
        for name, value in regs.items():
            setattr(hit.regs, name, value)
        hit_all(self.kernel, hit)

    @property
    def recorded(self) -> list[str]:
        """Return the names of the recorded events."""
        return [event.name for event, _ in self.kernel.recorder.entries]
