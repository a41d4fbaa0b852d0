"""What the tests of ring buffer and trace text share: a trace array over made-up events, and the oracle."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.output import encode_text
from emulated_kernel.trace.ports import SymbolLocation, TraceSymbols
from emulated_kernel.trace.trace_array import TaskContext, TraceArray, TraceSystem

PROJECT = Path(__file__).resolve().parents[3]


class Symbols:
    """vfs_mkdir of the kernel, ktgt_add of the module ktgt, and a return trampoline."""

    ranges = ((0xFFFFFFFF8135D4F0, 0x140, "vfs_mkdir", None), (0xFFFFFFFFC0219000, 0x10, "ktgt_add", "ktgt"))
    trampoline = 0xFFFFFFFF81C01000

    def lookup(self, address: int) -> SymbolLocation | None:
        for start, size, name, module in self.ranges:
            if start <= address < start + size:
                return SymbolLocation(name, start, size, address - start, module)
        return None

    def lookup_name(self, name: str) -> int | None:
        return next((start for start, _, its, _ in self.ranges if its == name), None)

    def count_name(self, name: str) -> int:
        return sum(its == name for _, _, its, _ in self.ranges)

    def has_module(self, name: str) -> bool:
        return name == "ktgt"

    def has_fentry(self, start: int, end: int) -> bool:
        return any(start <= begin <= end for begin, *_ in self.ranges)

    def is_return_trampoline(self, address: int) -> bool:
        return address == self.trampoline


@dataclass
class TextEvent:
    """An event whose records hold their own text, ended by a NUL."""

    name: str

    def print_line(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        del symbols, sym_addr
        return f"{self.name}: {bytes_to_text(payload.split(bytes(1), 1)[0])}"


class Events(dict[int, TextEvent]):
    """An event table."""

    def by_id(self, event_id: int) -> TextEvent | None:
        return self.get(event_id)


@dataclass
class Clock:
    """Time that tests set."""

    ns: int = 0

    def now(self) -> int:
        return self.ns


@dataclass
class Bench:
    """A trace array with the means to fill it."""

    clock: Clock
    events: Events
    array: TraceArray
    task: TaskContext = field(default_factory=TaskContext)

    def record(self, text: str, ns: int, cpu: int = 0, event: int = 1400, **more: int) -> bool:
        payload = encode_text(text) + b"\0"
        return self.array.record(
            event, payload, cpu=cpu, pid=more.pop("pid", 117), comm="python3", timestamp_ns=ns, **more
        )

    def lines(self, cpu: int | None = None) -> list[str]:
        return [
            line
            for line in self.array.trace_text(cpu).splitlines()
            if not line.startswith("# ") and line != "#"
        ]


def make_bench(cpus: int = 2, **more: object) -> Bench:
    clock = Clock()
    events = Events({1400: TextEvent("ev")})
    task = TaskContext(117, "python3", tgid=117, cpu=cpus - 1)
    system = TraceSystem(
        cpus=cpus,
        now_ns=clock.now,
        events=events,
        symbols=Symbols(),
        current=lambda: task,
        release="6.1.0-56-cloud-amd64",
        **more,  # type: ignore[arg-type]
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
    """The recorded files of a Linux 6.1."""
    root = Path(os.environ.get("KPROBEFS_ORACLE", PROJECT.parent / "shared" / "oracle"))
    if not (root / "samples").is_dir():
        pytest.skip(f"no oracle at {root}")
    return root / "samples"
