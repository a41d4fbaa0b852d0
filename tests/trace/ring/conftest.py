"""Fixtures of the tests of ring buffer and trace text: a trace array with made-up events, and recordings."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.trace.array.services import TracingServices
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.context.probe_hit import TaskContext
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.print_event import PrintEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.trace.output.line_formatter import encode_text
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, RingControls, RingMemory
from emulated_kernel.trace.ring.trace_clock import ClockSource
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

PROJECT = Path(__file__).resolve().parents[3]


MARKER_IP = 0xC11B21B0
"""Address of tracing_mark_write, which fits into a word of each architecture."""


class Symbols:
    """Symbols of the kernel and of the module ktgt, and a return trampoline."""

    ranges = (
        (0xFFFFFFFF8135D4F0, 0x140, "vfs_mkdir", None),
        (0xFFFFFFFFC0219000, 0x10, "ktgt_add", "ktgt"),
        (MARKER_IP, 0x100, "tracing_mark_write", None),
    )
    trampoline = 0xFFFFFFFF81C01000

    def lookup(self, address: int) -> Location | None:
        for start, size, name, module in self.ranges:
            if start <= address < start + size:
                return Location(Symbol(name, start, "t", size), address - start, module)
        return None

    symbol_at = lookup

    def is_return_trampoline(self, address: int) -> bool:
        return address == self.trampoline


class TextEvent(TraceEvent):
    """An event whose records hold their own text, ended by a NUL."""

    def __init__(self, name: str) -> None:
        super().__init__("texts", name)

    def start(self) -> None:
        """Do nothing: the event needs no probe."""

    def stop(self) -> None:
        """Do nothing: the event has no probe."""

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        del symbols, sym_addr
        return bytes_to_text(payload.split(bytes(1), 1)[0])


class Events(EventRegistry):
    """An event registry in which the tests choose the ids of events."""

    def __setitem__(self, number: int, event: TextEvent) -> None:
        self._by_id[number] = event

    def __len__(self) -> int:
        return len(self._by_id)


class HostMemory:
    """A GuestRecords that allocates memory of the host instead of a guest."""

    can_tell_time = False

    def allocate(self, size: int) -> RingMemory:
        if size > 256 << 20:
            raise KernelError(errno.ENOMEM, f"{size} bytes for a ring buffer")
        return RingMemory(memoryview(bytearray(size)))

    @contextmanager
    def exchanged(self, old: Sequence[RingMemory], sizes: Sequence[int]) -> Iterator[list[RingMemory]]:
        del old
        yield [self.allocate(size) for size in sizes]

    def allocate_controls(self, cpus: int) -> RingControls:
        return RingControls([memoryview(bytearray(CONTROL_SIZE)) for _ in range(cpus)])


@dataclass
class OneTask:
    """A Tasks object with a single task, which is always the current task."""

    task: TaskContext

    def context(self) -> TaskContext:
        return self.task


@dataclass
class Clock:
    """A clock whose time is set by the tests."""

    ns: int = 0

    def now(self) -> int:
        return self.ns


@dataclass
class Bench:
    """A trace array, and methods that write records to it."""

    clock: Clock
    events: Events
    array: TraceArray
    task: TaskContext = field(default_factory=TaskContext)

    def record(self, text: str, ns: int, cpu: int = 0, event: int = 1400, **more: int) -> bool:
        payload = encode_text(text) + b"\0"
        return self.array.append(
            event, payload, cpu=cpu, pid=more.pop("pid", 117), comm="python3", timestamp_ns=ns, **more
        )

    def lines(self, cpu: int | None = None) -> list[str]:
        return [
            line
            for line in self.array.trace_text(cpu).splitlines()
            if not line.startswith("# ") and line != "#"
        ]


def make_bench(cpus: int = 2, arch: Arch | None = None) -> Bench:
    clock, events = Clock(), Events()
    events[1400] = TextEvent("ev")
    task = TaskContext(117, "python3", cpus - 1)
    arch = arch or X86_64()
    system = TracingServices(
        lock=ControlLock(),
        cpus=cpus,
        now_ns=clock.now,
        events=events,
        symbols=Symbols(),  # type: ignore[arg-type]
        arch=arch,
        tasks=OneTask(task),  # type: ignore[arg-type]
        stack=None,  # type: ignore[arg-type]
        current_ctx=None,  # type: ignore[arg-type]
        memory=HostMemory(),  # type: ignore[arg-type]
        markers=PrintEvent(arch.word_size, MARKER_IP),
        cmdlines=SavedCmdlines(),
        printk=lambda _text: None,
        clocks=ClockSource(SimpleNamespace(is_virtual=True)),  # type: ignore[arg-type]
        interface=LINUX_6_1,
        release="6.1.0-56-cloud-amd64",
    )
    return Bench(clock, events, TraceArray(system), task)


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.fixture
def one_cpu() -> Bench:
    return make_bench(cpus=1)


@pytest.fixture(scope="session")
def samples() -> Path:
    """Return the directory of files that were recorded from Linux 6.1. Skip the test without recordings."""
    root = Path(os.environ.get("KPROBEFS_ORACLE", PROJECT.parent / "shared" / "oracle"))
    if not (root / "samples").is_dir():
        pytest.skip(f"no oracle at {root}")
    return root / "samples"
