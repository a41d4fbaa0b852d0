"""A stand-in for a kernel, for tests of kprobe events: symbols, registers, and an engine without code."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import KprobeFlag
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.events.event_filters import EventFilters
from emulated_kernel.trace.events.registry import FIRST_EVENT_ID, EventRegistry
from emulated_kernel.trace.interface import LINUX_6_1, Interface
from emulated_kernel.trace.probes.dynamic_events import DynamicEvents, EventCommands
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import (
    EventKprobe,
    EventProbe,
    ProbeEngine,
    TraceKprobe,
)
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import MIN_PAGES, RecordTarget, RingMemory, memory_size
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY, RawEntry
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limits

ARGUMENTS = ("di", "si", "dx", "cx", "r8", "r9")
HIGH_REGISTERS = tuple(f"r{number}" for number in range(10, 16))
REGISTERS = (*ARGUMENTS, "ax", "bx", "bp", "sp", "ip", "flags", "cs", "ss", "orig_ax", *HIGH_REGISTERS)
REGISTERS_32 = ("bx", "cx", "dx", "si", "di", "bp", "ax", "orig_ax", "ip", "cs", "flags", "sp", "ss")
DEFAULT_MAXACTIVE = 10


@dataclass(frozen=True)
class Function:
    """A function of the stand-in kernel: its name and address, whether it has an fentry site, and the errno
    of registering a probe there.
    """

    name: str
    address: int
    size: int = 0x100
    module: str | None = None
    fentry: bool = True
    boundaries: tuple[int, ...] = (0, 5, 9)
    refused: int = 0


class Symbols:
    """KernelSymbols over a list of functions."""

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
        module, colon, symbol = name.rpartition(":")
        return sum(
            function.name == symbol and (not colon or function.module == module)
            for function in self.functions
        )

    def count_in_kernel(self, name: str) -> int:
        return sum(function.name == name and function.module is None for function in self.functions)

    def at(self, address: int) -> Function | None:
        for function in self.functions:
            if function.address <= address < function.address + function.size:
                return function
        return None

    def lookup(self, address: int) -> Location | None:
        function = self.at(address)
        if function is None:
            return None
        symbol = Symbol(function.name, function.address, "t", function.size)
        return Location(symbol, address - function.address, function.module)

    symbol_at = lookup

    def has_module(self, name: str) -> bool:
        return name in self.modules

    def is_return_trampoline(self, address: int) -> bool:
        function = self.at(address)
        return function is not None and function.name == "arch_rethook_trampoline"


@dataclass(eq=False)
class Handle:
    """The registration of an event's probe."""

    kprobe: EventProbe
    user: TraceKprobe
    enabled: bool

    @property
    def address(self) -> int:
        return self.kprobe.address

    def gone(self) -> None:
        """Mark the probe as gone, because its module was unloaded."""
        self.kprobe.flags |= KprobeFlag.GONE


class Backend:
    """A stand-in for Kprobes and Kretprobes, which refuses registrations by a table of functions."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.handles: list[Handle] = []
        self.refuse_enabling: set[int] = set()
        self.probe_checker = self

    def check_traced(self, addr: int) -> Rejection | None:
        function = self.symbols.at(addr)
        if function is None or function.fentry:
            return None
        whole = self.symbols.at(self.symbols.lookup_name(function.name.partition(".")[0]) or 0)
        return (
            None if whole is not None and whole.fentry else Rejection(RejectReason.NOTRACE, function.address)
        )

    def function_entry(self, where: Location, addr: int) -> int | None:
        return None if where.offset else addr

    def _register(self, kprobe: EventProbe, user: TraceKprobe) -> None:
        if not kprobe.addr:
            raise KernelError(errno.EINVAL)
        function = self.symbols.at(kprobe.addr)
        if function is None:
            raise KernelError(errno.ENOENT)
        if function.refused:
            raise KernelError(function.refused)
        if kprobe.addr - function.address not in function.boundaries:
            raise KernelError(errno.EILSEQ)
        self.handles.append(Handle(kprobe, user, not kprobe.disabled))

    def register_kprobe(self, kprobe: EventKprobe, _kind: str) -> None:
        self._register(kprobe, kprobe.user)

    def register_kretprobe(self, rp: Kretprobe) -> None:
        self._register(rp, rp.handler.__self__)  # type: ignore[union-attr]
        rp.maxactive = rp.maxactive or DEFAULT_MAXACTIVE

    def _of(self, kprobe: EventProbe) -> Handle:
        return next(handle for handle in self.handles if handle.kprobe is kprobe)

    def unregister_kprobe(self, kprobe: EventProbe) -> None:
        self.handles.remove(self._of(kprobe))

    unregister_kretprobe = unregister_kprobe

    def enable_kprobe(self, kprobe: EventProbe) -> None:
        if kprobe.address in self.refuse_enabling:
            raise KernelError(errno.EINVAL)
        self._of(kprobe).enabled = True

    def disable_kprobe(self, kprobe: EventProbe) -> None:
        self._of(kprobe).enabled = False

    def handler_changed(self, kprobe: EventProbe) -> None:
        """Do nothing, because handlers are not compiled."""


@dataclass
class Hit:
    """A ProbeHit that reads from a few pieces of memory. The rest of their pages is zero, and other pages are
    not mapped.
    """

    regs: Any = field(default_factory=lambda: SimpleNamespace(**dict.fromkeys(REGISTERS, 0)))
    memory: dict[int, bytes] = field(default_factory=dict)
    comm: bytes = b"python3"
    return_address: int = 0
    handler_preempt_count: int = 0
    nested: int = 0
    entry_waits: bool = False

    def keep_origin(self, keep: bool) -> bool:
        return not keep

    def read(self, address: int, size: int) -> bytes | None:
        for start, data in self.memory.items():
            page = start & ~0xFFF
            pages = bytes(start - page) + data + bytes(-(start + len(data)) & 0xFFF)
            if page <= address and address + size <= page + len(pages):
                return pages[address - page : address - page + size]
        return None


@dataclass(eq=False)
class FakeRecorder(Recorder):
    """A Recorder that keeps all entries. Their pid is 42."""

    entries: list[tuple[TraceEvent, bytes]] = field(default_factory=list)
    removed: list[TraceEvent] = field(default_factory=list)
    enabled_events: int = 0
    place: RingBuffer = field(
        default_factory=lambda: RingBuffer(
            RingMemory(memoryview(bytearray(memory_size(MIN_PAGES)))), MIN_PAGES
        )
    )

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit) -> RawEntry:
        return RawEntry(TRACE_ENTRY.pack(event.id, 0, 1, 42) + payload, 0, hit.comm, no_string)

    def triggers_ignore(self, _event: TraceEvent, _payload: bytes) -> bool:
        return False

    def reserve(self) -> RingBuffer:
        return self.place

    def record(
        self, event: TraceEvent, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None
    ) -> None:
        del hit
        assert place in (None, self.place)
        self.entries.append((event, payload))

    def target(self) -> RecordTarget | None:
        return None

    def event_switched(self, _event: TraceEvent, /, *, enabled: bool) -> None:
        self.enabled_events += 1 if enabled else -1

    def event_removed(self, event: TraceEvent) -> None:
        self.removed.append(event)


def no_string(_address: int, _is_user: bool) -> None:
    """Return None: a RawEntry.string_at for a hit without memory."""


@dataclass
class Kernel:
    """Symbols, probes, events and recorder of the stand-in for a kernel."""

    symbols: Symbols
    backend: Backend
    recorder: FakeRecorder
    messages: list[str]
    commands: EventCommands
    events: KprobeEvents
    dynamic_events: DynamicEvents
    """Dynamic events, of which only kprobe events exist."""
    filters: EventFilters


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
    arch: Arch | None = None,
    recorder: FakeRecorder | None = None,
    first_id: int = FIRST_EVENT_ID,
    interface: Interface = LINUX_6_1,
    types: Btf | None = None,
) -> Kernel:
    """Return a stand-in for a kernel, without events.

    `functions`: all functions of the kernel. `modules`: names of the loaded modules. `arch`: None for x86-64.
    `recorder`: receives the records; None for a new FakeRecorder. `first_id`: id of the first event. `types`:
    BTF, or None if the kernel has none.
    """
    symbols: Any = Symbols(functions, modules)
    backend: Any = Backend(symbols)
    recorder = recorder or FakeRecorder()
    messages: list[str] = []
    nothing: Any = None
    engine = ProbeEngine(
        arch or X86_64(), symbols, backend, backend, nothing, nothing, nothing, types=lambda: types
    )
    commands = EventCommands(
        EventRegistry(first_id), ErrorLog(lambda: 0), messages.append, Limits(), interface
    )
    events = KprobeEvents(engine, commands)
    dynamic_events, filters = DynamicEvents(commands, events), EventFilters(recorder, commands.error_log)
    return Kernel(symbols, backend, recorder, messages, commands, events, dynamic_events, filters)


def hit_all(kernel: Kernel, hit: Hit) -> None:
    """Hit every armed probe once, the newest probe first, as Linux does."""
    for handle in reversed(kernel.backend.handles):
        if handle.enabled and not handle.kprobe.is_gone:
            handle.user.hit(hit)  # type: ignore[arg-type]


def errno_of(action: Callable[[], object]) -> str:
    """Return the name of the errno with which `action` fails, or "" if it succeeds."""
    try:
        action()
    except KernelError as failure:
        return failure.name
    return ""
