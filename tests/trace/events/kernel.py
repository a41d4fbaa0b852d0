"""A kernel for kprobe events to be tested on: symbols, registers and an engine that only keeps books."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.dynamic_events import DynamicEvents
from emulated_kernel.trace.event import TraceEvent
from emulated_kernel.trace.guest import RecordTarget
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.ports import (
    EntryPlace,
    ProbeHit,
    ProbeSpec,
    ProbeUser,
    RawEntry,
    SymbolLocation,
    TraceArch,
)
from emulated_kernel.trace.ring_buffer import RingBuffer
from emulated_kernel.trace.ring_layout import MIN_PAGES, memory_size
from emulated_kernel.trace.trace_entry import TRACE_ENTRY

ARGUMENTS = ("di", "si", "dx", "cx", "r8", "r9")
HIGH_REGISTERS = tuple(f"r{number}" for number in range(10, 16))
REGISTERS = (*ARGUMENTS, "ax", "bx", "bp", "sp", "ip", "flags", "cs", "ss", "orig_ax", *HIGH_REGISTERS)
REGISTERS_32 = ("bx", "cx", "dx", "si", "di", "bp", "ax", "orig_ax", "ip", "cs", "flags", "sp", "ss")
DEFAULT_MAXACTIVE = 10


@dataclass(frozen=True)
class X86:
    """TraceArch of x86_64, and with other words and registers of i386."""

    registers: dict[str, str] = field(default_factory=lambda: {name: name for name in REGISTERS})
    argument_registers: tuple[str, ...] = ARGUMENTS
    stack_arguments: bool = True
    kept_at_return: frozenset[str] = frozenset(
        {"ax", "dx", "bx", "bp", "r12", "r13", "r14", "r15", "sp", "ip"}
    )
    return_register: str = "ax"
    stack_pointer: str = "sp"
    general_registers: frozenset[str] = frozenset(REGISTERS) - {"cs", "ss", "orig_ax"}
    seen_ip: int = 1
    word_size: int = 8
    thread_size: int = 16384
    task_size: int = 0x7FFFFFFFF000


@dataclass(frozen=True)
class Function:
    """A symbol: where, whether tracing may probe it, and how registering there fails or not."""

    name: str
    address: int
    size: int = 0x100
    module: str | None = None
    fentry: bool = True
    boundaries: tuple[int, ...] = (0, 5, 9)
    refused: int = 0


class Symbols:
    """TraceSymbols over a list of functions."""

    def __init__(self, functions: Iterable[Function], modules: Iterable[str] = ()) -> None:
        self.functions = list(functions)
        self.modules = set(modules)

    def lookup_name(self, name: str) -> int | None:
        module, _, base = name.rpartition(":")
        for function in self.functions:
            if function.name == base and module in ("", function.module or ""):
                return function.address
        return None

    def count_name(self, name: str) -> int:
        return sum(function.name == name for function in self.functions)

    def at(self, address: int) -> Function | None:
        for function in self.functions:
            if function.address <= address < function.address + function.size:
                return function
        return None

    def lookup(self, address: int) -> SymbolLocation | None:
        function = self.at(address)
        if function is None:
            return None
        offset = address - function.address
        return SymbolLocation(function.name, function.address, function.size, offset, function.module)

    def has_module(self, name: str) -> bool:
        return name in self.modules

    def has_fentry(self, start: int, end: int) -> bool:
        return any(f.fentry for f in self.functions if start <= f.address <= end)

    def is_return_trampoline(self, address: int) -> bool:
        function = self.at(address)
        return function is not None and function.name == "arch_rethook_trampoline"


@dataclass(eq=False)
class Handle:
    """ProbeHandle."""

    spec: ProbeSpec
    handler: Callable[[ProbeHit], None]
    address: int
    maxactive: int
    enabled: bool
    nmissed: int = 0
    is_gone: bool = False


class Backend:
    """ProbeBackend that refuses what a table of functions says."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.handles: list[Handle] = []
        self.refuse_enabling: set[int] = set()

    def _address(self, spec: ProbeSpec) -> int:
        if spec.symbol is not None:
            address = self.symbols.lookup_name(spec.symbol)
            if address is None:
                raise KernelError(errno.ENOENT)
            return address + spec.offset
        if not spec.address:
            raise KernelError(errno.EINVAL)
        return spec.address

    def register(self, spec: ProbeSpec, user: ProbeUser) -> Handle:
        address = self._address(spec)
        function = self.symbols.at(address)
        if function is None:
            raise KernelError(errno.ENOENT)
        if function.refused:
            raise KernelError(function.refused)
        if address - function.address not in function.boundaries:
            raise KernelError(errno.EILSEQ)
        maxactive = (spec.maxactive or DEFAULT_MAXACTIVE) if spec.is_return else 0
        handle = Handle(spec, user.hit, address, maxactive, not spec.disabled)
        self.handles.append(handle)
        return handle

    def unregister(self, handle: Any) -> None:
        self.handles.remove(handle)

    def enable(self, handle: Any) -> None:
        if handle.address in self.refuse_enabling:
            raise KernelError(errno.EINVAL)
        handle.enabled = True

    def disable(self, handle: Any) -> None:
        handle.enabled = False

    def handler_changed(self, handle: Any) -> None:
        """Nothing is compiled here."""

    def on_func_entry(self, symbol: str, offset: int) -> bool:
        address = self.symbols.lookup_name(symbol)
        if address is None or self.symbols.at(address + offset) is None:
            raise KernelError(errno.ENOENT)
        location = self.symbols.lookup(address + offset)
        return location is not None and location.offset == 0


@dataclass
class Hit:
    """ProbeHit over chunks of memory, each the only content of its pages."""

    regs: Any = field(default_factory=lambda: SimpleNamespace(**dict.fromkeys(REGISTERS, 0)))
    memory: dict[int, bytes] = field(default_factory=dict)
    comm: bytes = b"python3"
    return_address: int = 0

    def read(self, address: int, size: int) -> bytes | None:
        for start, data in self.memory.items():
            page = start & ~0xFFF
            pages = bytes(start - page) + data + bytes(-(start + len(data)) & 0xFFF)
            if page <= address and address + size <= page + len(pages):
                return pages[address - page : address - page + size]
        return None


@dataclass(eq=False)
class Recorder:
    """Recorder that keeps everything; its task's pid is 42."""

    entries: list[tuple[TraceEvent, bytes]] = field(default_factory=list)
    removed: list[TraceEvent] = field(default_factory=list)
    place: EntryPlace = field(
        default_factory=lambda: RingBuffer(memoryview(bytearray(memory_size(MIN_PAGES))), MIN_PAGES)
    )

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit) -> RawEntry:
        return RawEntry(TRACE_ENTRY.pack(event.id, 0, 1, 42) + payload, 0, hit.comm)

    def reserve(self) -> EntryPlace:
        return self.place

    def commit(self, place: EntryPlace, event: TraceEvent, payload: bytes, hit: ProbeHit) -> None:
        assert place is self.place
        self.record(event, payload, hit)

    def record(self, event: TraceEvent, payload: bytes, hit: ProbeHit) -> None:
        del hit
        self.entries.append((event, payload))

    def target(self) -> RecordTarget | None:
        return None

    def event_removed(self, event: TraceEvent) -> None:
        self.removed.append(event)


@dataclass
class Kernel:
    """Everything together."""

    symbols: Symbols
    backend: Backend
    recorder: Recorder
    messages: list[str]
    events: KprobeEvents

    @property
    def dynamic_events(self) -> DynamicEvents:
        return self.events.dynamic_events


FUNCTIONS = (
    Function("vfs_read", 0xFFFFFFFF8134CC50),
    Function("vfs_write", 0xFFFFFFFF8134D3D0),
    Function("vfs_mkdir", 0xFFFFFFFF8135D4F0, size=0x140),
    Function("arch_rethook_trampoline", 0xFFFFFFFF81060000, size=0x60, fentry=False),
    Function("__schedule", 0xFFFFFFFF81A00000, fentry=False),
    Function("get_kprobe", 0xFFFFFFFF81200000, refused=errno.EINVAL),
    Function("name_show", 0xFFFFFFFF81300000),
    Function("name_show", 0xFFFFFFFF81310000),
    Function("jiffies", 0xFFFFFFFF82A05000, fentry=False),
    Function("linux_banner", 0xFFFFFFFF82001000, fentry=False),
    Function("ktgt_add", 0xFFFFFFFFC022F010, size=0x10, module="ktgt", boundaries=(0, 5)),
)


def make_kernel(
    functions: Iterable[Function] = FUNCTIONS,
    modules: Iterable[str] = ("ktgt",),
    arch: TraceArch | None = None,
) -> Kernel:
    """A kernel without events."""
    symbols = Symbols(functions, modules)
    backend = Backend(symbols)
    recorder = Recorder()
    messages: list[str] = []
    events = KprobeEvents(arch or X86(), symbols, backend, recorder, lambda: 0, printk=messages.append)
    return Kernel(symbols, backend, recorder, messages, events)


def hit_all(kernel: Kernel, hit: Hit) -> None:
    """One hit of every armed probe, newest first, as Linux runs them."""
    for handle in reversed(kernel.backend.handles):
        if handle.enabled and not handle.is_gone:
            handle.handler(hit)


def errno_of(action: Callable[[], object]) -> str:
    """The name of the errno that `action` fails with, "" where it succeeds."""
    try:
        action()
    except KernelError as failure:
        return failure.name
    return ""
