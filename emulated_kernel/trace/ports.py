"""What trace events need of the layers below and of the buffer, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from emulated_kernel.arch.program_builder import HitWay, ProgramBuilder

if TYPE_CHECKING:
    from emulated_kernel.trace.event import TraceEvent
    from emulated_kernel.trace.guest import RecordTarget


class TraceArch(Protocol):
    """The properties of an architecture that fetch arguments depend on."""

    @property
    def registers(self) -> Mapping[str, str]:
        """Names accepted after `%`, to the attribute of the registers object."""

    @property
    def argument_registers(self) -> Sequence[str]:
        """Attributes of the first arguments of a C function, in order."""

    @property
    def stack_arguments(self) -> bool:
        """Whether further arguments lie on the stack, above the return address (x86)."""

    @property
    def return_register(self) -> str:
        """Attribute of a function's result."""

    @property
    def kept_at_return(self) -> frozenset[str]:
        """Attributes that have a function's values when it has returned."""

    @property
    def stack_pointer(self) -> str:
        """Attribute of the stack pointer."""

    @property
    def general_registers(self) -> frozenset[str]:
        """Attributes that guest code can read."""

    @property
    def seen_ip(self) -> int:
        """What a probe's handlers find in ip, in bytes from the probed address on."""

    @property
    def word_size(self) -> int:
        """Bytes of an `unsigned long`: 4 or 8."""

    @property
    def thread_size(self) -> int:
        """Bytes of a kernel stack, which is aligned to its size."""

    @property
    def task_size(self) -> int:
        """The first address that is not user space."""


@dataclass(frozen=True)
class SymbolLocation:
    """The symbol that an address lies in: start and offset are addresses and bytes."""

    name: str
    start: int
    size: int
    offset: int
    module: str | None = None


class TraceSymbols(Protocol):
    """The kernel's symbol table, modules included."""

    def lookup_name(self, name: str) -> int | None:
        """The address of `NAME` or `MODULE:NAME`. Mirrors: kallsyms_lookup_name."""

    def count_name(self, name: str) -> int:
        """How many symbols, in the kernel and all modules, are called `name`."""

    def lookup(self, address: int) -> SymbolLocation | None:
        """The symbol that `address` lies in, the first alias. Mirrors: kallsyms_lookup."""

    def has_module(self, name: str) -> bool:
        """Whether a module of that name is loaded. Mirrors: find_module."""

    def has_fentry(self, start: int, end: int) -> bool:
        """Whether an fentry site lies in [start, end]. Mirrors: ftrace_location_range."""

    def is_return_trampoline(self, address: int) -> bool:
        """Whether it is where hooked functions return to. Mirrors: is_kretprobe_trampoline."""


class ProbeHit(Protocol):
    """A hit, as a backend hands it to the handler; valid during the call only."""

    @property
    def regs(self) -> Any:
        """The registers at the hit, attributes as in TraceArch."""

    @property
    def comm(self) -> bytes:
        """The current task's name, without padding."""

    @property
    def context(self) -> tuple[int, int]:
        """common_flags and common_preempt_count of its entry."""

    @property
    def return_address(self) -> int:
        """Of a return probe: where the function returns to."""

    def read(self, address: int, size: int, /) -> bytes | None:
        """Guest memory; None where a byte of it faults."""


class ProbeUser(Protocol):
    """What is done at a probe's hits."""

    def hit(self, hit: ProbeHit, /) -> None: ...

    def emit(self, builder: ProgramBuilder, way: HitWay, /) -> bool:
        """Add what hit() does to a program of guest code; False, with nothing added, where it can't be."""


@dataclass(frozen=True)
class ProbeSpec:
    """What to probe: `symbol` (may be MODULE:NAME) and `offset` in bytes, or `address`.

    `maxactive` 0 asks for the default. A `disabled` probe is registered, not armed.
    """

    symbol: str | None
    offset: int
    address: int | None
    is_return: bool
    maxactive: int
    disabled: bool


class ProbeHandle(Protocol):
    """A registered kprobe or kretprobe."""

    @property
    def address(self) -> int:
        """The probed address."""

    @property
    def nmissed(self) -> int:
        """Missed hits; of a return probe those for want of an instance too."""

    @property
    def maxactive(self) -> int:
        """Of a return probe: the number of instances in effect; else 0."""

    @property
    def is_gone(self) -> bool:
        """Whether the probed code was unloaded."""


class ProbeBackend(Protocol):
    """The kprobes engine. All methods raise KernelError with the errno that Linux would give."""

    def register(self, spec: ProbeSpec, user: ProbeUser, /) -> ProbeHandle:
        """Raises: KernelError ENOENT (nothing there), EILSEQ (not an instruction), EINVAL, EOPNOTSUPP..."""

    def unregister(self, handle: ProbeHandle, /) -> None: ...

    def enable(self, handle: ProbeHandle, /) -> None: ...

    def disable(self, handle: ProbeHandle, /) -> None: ...

    def handler_changed(self, handle: ProbeHandle, /) -> None:
        """What the user's emit() makes differs from now on."""

    def on_func_entry(self, symbol: str, offset: int, /) -> bool:
        """Whether the place is a function's entry. Raises: KernelError ENOENT.

        Mirrors: kernel/kprobes.c:kprobe_on_func_entry (v6.1).
        """


@dataclass(frozen=True)
class RawEntry:
    """What an event filter looks at: a whole entry, common fields first, and who ran on which CPU."""

    data: bytes
    cpu: int
    comm: bytes
    """The current task's name, without padding."""
    string_at: Callable[[int, bool], bytes | None] = lambda _address, _is_user: None
    """The string at an address of user space or of the kernel, and its NUL; None where there is none."""


class EntryPlace(Protocol):
    """A ring buffer that entries are written to."""

    def write(self, payload: bytes, time_stamp: int, /) -> bool: ...


class Recorder(Protocol):
    """A trace array's buffer."""

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        """The entry that record() would write; nothing is written."""

    def record(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> None:
        """Write an entry: `payload` is what follows the 8 bytes of common fields."""

    def reserve(self) -> EntryPlace | None:
        """Where an entry would be written now; None while none is taken.

        Mirrors: kernel/trace/trace.c:trace_event_buffer_lock_reserve (v6.1).
        """

    def commit(self, place: EntryPlace, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> None:
        """As record(), to where reserve() said."""

    def target(self) -> RecordTarget | None:
        """Its buffer for guest code to write to, as it is now; None where record() has to be called."""

    def event_removed(self, event: TraceEvent, /) -> None:
        """An event that this recorder once enabled is gone; its entries can't be printed any more.

        Linux empties the buffer then. Mirrors: kernel/trace/trace.c:tracing_reset_all_online_cpus (v6.1).
        """
