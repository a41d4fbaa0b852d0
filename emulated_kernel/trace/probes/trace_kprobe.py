"""TraceKprobe, a probe of a kprobe event: its registration with the probe engine, and its hits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Hashable
from typing import Any, Protocol

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.arch.program.ir import AddToPerCpu
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.image.kallsyms import Location
from emulated_kernel.kprobes.aggr_kprobe import JPROBE, KPROBE
from emulated_kernel.kprobes.kinds.fprobe import Fprobes
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeInstance
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.sight import LimitedSight, Sight
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses, HitCounter
from emulated_kernel.trace.compiled.handler import EventEmitter, compiled_event
from emulated_kernel.trace.context.probe_hit import ProbeHit, within_another
from emulated_kernel.trace.context.task_check import TaskCheck
from emulated_kernel.trace.events.event import Recorder
from emulated_kernel.trace.fetch.fetch_context import no_types
from emulated_kernel.trace.fetch.fetch_expression import argument_insn
from emulated_kernel.trace.fetch.fetchargs import MAX_ARGSTR_LEN
from emulated_kernel.trace.fetch.memory import FetchEnvironment
from emulated_kernel.trace.fetch.probe_arg import sight_of
from emulated_kernel.trace.fetch.store_args import store
from emulated_kernel.trace.probes.definition import ProbeDefinition, resolve_symbols
from emulated_kernel.trace.probes.trace_probe import (
    ENTRY_ADDRESSES,
    RETURN_ADDRESSES,
    ProbeKind,
    ProbeTraceEvent,
    TraceProbe,
    args_text,
)
from emulated_kernel.trace.ring.ring_layout import RecordTarget
from emulated_kernel.trace.symbols import ADDED_TEXT, KernelSymbols, print_ip
from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf

_PROFILE_LINE = "  %-44s %15d %15d\n"
"""Format of a line of kprobe_profile: event, hits and misses.

The % operator takes half the time of an f-string, and the file may have thousands of lines.
"""


class KprobeRegistry(Protocol):
    """Interface to a registry of kprobes: Kprobes, or OfflineKprobes, which only checks probes."""

    @property
    def probe_checker(self) -> ProbeChecker[Any]: ...

    def register_kprobe(self, kprobe: Kprobe[Any], kind: str = ..., /) -> None: ...

    def unregister_kprobe(self, kprobe: Kprobe[Any], /) -> None: ...

    def enable_kprobe(self, kprobe: Kprobe[Any], /) -> None: ...

    def disable_kprobe(self, kprobe: Kprobe[Any], /) -> None: ...

    def handler_changed(self, kprobe: Kprobe[Any], /) -> None: ...


class KretprobeRegistry(Protocol):
    """Interface to a registry of kretprobes: Kretprobes, or OfflineKretprobes, which only checks probes."""

    def register_kretprobe(self, rp: Kretprobe[Any], /) -> None: ...

    def unregister_kretprobe(self, rp: Kretprobe[Any], /) -> None: ...

    def handler_changed(self, rp: Kretprobe[Any], /) -> None: ...


@dataclass(frozen=True)
class ProbeEngine:
    """The registries in which events register their probes, and the context of the probes' hits."""

    arch: Arch
    symbols: KernelSymbols
    kprobes: KprobeRegistry
    kretprobes: KretprobeRegistry
    fprobes: Fprobes
    probe_ctx: ProbeHit
    """The context of the hit that is being handled; handlers set its registers."""
    places: GuestAddresses | None
    """Addresses of guest data that compiled handlers use; None if all handlers run in Python."""
    has_jprobes: bool = False
    """Whether kprobe_events accepts `j` commands. Extends: Linux has no jprobe events."""
    why_unarmed: Callable[[Kprobe[Any]], str] = lambda _kprobe: ""
    """Returns the reason why an enabled probe cannot be hit now, or "" if it can be hit."""
    types: Callable[[], Btf | None] = no_types
    """Returns the kernel's BTF, or None if the kernel has no BTF."""
    returns_by_breakpoint: bool = False
    """Whether Linux handles the returns of kretprobes in the exception of a breakpoint."""
    disabled_once: int = 0
    """Amount that one preempt_disable() adds to the preempt count; see HitContext."""

    def is_entry(self, found: Location) -> bool:
        """Return True if a location is the entry of a function, before or after its landing pad."""
        address = found.symbol.address + found.offset
        return self.kprobes.probe_checker.function_entry(found, address) is not None


@dataclass(eq=False, slots=True)
class EventKprobe(Kprobe, LimitedSight):
    """The kprobe that a TraceKprobe registers with the probe engine; `user` is this TraceKprobe."""

    user: TraceKprobe = field(kw_only=True)

    @property
    def maxactive(self) -> int:
        return 0

    @property
    def sight(self) -> Sight:
        # A trigger can be an event probe, which may read memory at addresses in the record's fields.
        user = self.user
        return (
            Sight.MEMORY if user.event.needs_entry else max(map(sight_of, user.args), default=Sight.NOTHING)
        )


EventProbe = EventKprobe | Kretprobe


def _kprobe_hit(kprobe: Kprobe, regs: Regs) -> None:
    """Pass a hit to the kprobe's TraceKprobe. All kprobes of events have this pre_handler."""
    assert isinstance(kprobe, EventKprobe)
    user = kprobe.user
    hit = user.engine.probe_ctx
    hit.regs = regs
    user.hit(hit)


class KprobeTraceEvent(ProbeTraceEvent):
    """The event of one or more TraceKprobes: kprobes, kretprobes, fprobes or probes of tracepoints.

    All probes of the event have one class, and either all or none of them are return probes.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def probes(self) -> Collection[TraceKprobe]: ...
        @property
        def first_probe(self) -> TraceKprobe: ...

    @property
    def is_return(self) -> bool:
        return self.addresses is RETURN_ADDRESSES

    def enable(self, recorder: Recorder) -> None:
        super().enable(recorder)
        self.first_probe.kind.note_switched(self)

    def disable(self, recorder: Recorder) -> None:
        self.check_alive()
        kind = self.first_probe.kind
        kind.note_switched(self)
        super().disable(recorder)
        kind.note_switched(self)

    def changed(self) -> None:
        for probe in self.probes:
            probe.handler_changed()

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text that `trace` shows for a record, without the event's name.

        Mirrors: kernel/trace/trace_kprobe.c:print_kprobe_event, print_kretprobe_event (v6.1).
        """
        word = self.word_size
        digits = 2 * self.word_size if sym_addr else 0
        first = int.from_bytes(payload[:word], "little")
        is_return = self.is_return
        text = print_ip(symbols, first, offset=not is_return, digits=digits)
        if is_return:
            second = int.from_bytes(payload[word : 2 * word], "little")
            text = f"{print_ip(symbols, second, offset=True, digits=digits)} <- {text}"
        return f"({text}){args_text(self.args, payload, word * len(self.addresses), symbols)}"


class JprobeTraceEvent(KprobeTraceEvent):
    """The event of one or more jprobes.

    It has a class of its own, so that no other probes can be added to the event.
    """

    __slots__ = ()


class TraceKprobe(TraceProbe):
    """A probe of a kprobe event. Mirrors: kernel/trace/trace_kprobe.c:struct trace_kprobe (v6.1)."""

    __slots__ = (
        "_counter",
        "_hits",
        "_shown",
        "address",
        "captured",
        "engine",
        "found",
        "handle",
        "maxactive",
        "place",
    )

    event: KprobeTraceEvent

    def __init__(self, kind: ProbeKind[Any], definition: ProbeDefinition, engine: ProbeEngine) -> None:
        self.place = definition.place
        self.found = definition.found
        """The location of `place`, or None if its symbol or address does not exist (yet)."""
        event_class = JprobeTraceEvent if definition.place.is_jprobe else KprobeTraceEvent
        event = event_class(
            to_text(definition.group),
            to_text(definition.event),
            definition.args,
            engine.arch.word_size,
            RETURN_ADDRESSES if definition.place.is_return else ENTRY_ADDRESSES,
        )
        super().__init__(kind, event, definition.args)
        self.engine = engine
        self.maxactive = definition.maxactive
        self.captured = definition.captured
        """Numbers, from 0, of the arguments that a return probe stores at the entry, to record later."""
        self.address = 0
        """The probed address; 0 while the place does not exist (yet)."""
        self.handle: EventProbe | None = None
        """The kprobe or kretprobe that is registered with the engine, or None if none is registered."""
        self._hits = 0
        """Number of hits, without those that the present guest code has counted in `_counter`."""
        self._counter: HitCounter | None = None
        """Counter of the hits that guest code handles; None before guest code is emitted."""
        self._shown = ""
        """Cached part of the probe's line after maxactive, or "" before the line is first shown."""

    @property
    def hits(self) -> int:
        """Number of hits since the probe was created or the count was last set."""
        return self._hits + (0 if self._counter is None else self._counter.value)

    @hits.setter
    def hits(self, value: int) -> None:
        self._hits = value
        if self._counter is not None:
            self._counter.reset()

    @property
    def nmissed(self) -> int:
        """Number of missed hits since the probe was registered or the number was set; 0 if not registered."""
        return 0 if self.handle is None else self.handle.nmissed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        if self.handle is not None:
            self.handle.nmissed = value

    # Registration

    def register(self) -> None:
        """Register the probe with the engine at `found`. The probe is armed if the event is enabled.

        Raises: KernelError EINVAL (a notrace function), ENOENT (the place or an argument's symbol does not
        exist), or the error of the engine.
        Mirrors: kernel/trace/trace_kprobe.c:__register_trace_kprobe (v6.1).
        """
        symbols = self.engine.symbols
        found = self.found
        address = self.place.address if found is None else found.symbol.address + found.offset
        refused = self._refused_tracing(address) if address else ""
        if refused:
            self.kind.printk(f"trace_kprobe: Could not probe notrace function {self.symbol}")
            raise KernelError(errno.EINVAL, refused)
        self.args = resolve_symbols(self.args, symbols, self.engine.arch.bits)
        if self.place.symbol is not None and found is None:
            raise KernelError(errno.ENOENT, f"no symbol named {self.place.symbol!r}")
        self._hook(address)

    def _refused_tracing(self, address: int) -> str:
        """Return the reason why the address must not be traced, or "" if it may be traced.

        The host's trampolines are not in the tables of ProbeChecker.check_traced(), so their names are
        checked here.
        """
        if self.found is not None and self.found.symbol.name in ADDED_TEXT:
            return f"{self.symbol} is a notrace function"
        rejection = self.engine.kprobes.probe_checker.check_traced(address)
        return "" if rejection is None else str(rejection)

    def _hook(self, address: int | None) -> None:
        engine = self.engine
        disabled = not self.event.is_enabled
        # Linux: address 0 is a null pointer and means no address.
        address = address or None
        if not self.place.is_return:
            kprobe = EventKprobe(addr=address, pre_handler=_kprobe_hit, user=self, disabled=disabled)
            if not disabled:
                kprobe.program = self.emit
            engine.kprobes.register_kprobe(kprobe, JPROBE if self.place.is_jprobe else KPROBE)
            self.handle = kprobe
            self.address = kprobe.address
            return
        rp = Kretprobe(
            addr=address,
            handler=self._returned,
            return_program=self.emit,
            entry_handler=self._entered if self.captured else None,
            data_size=len(self.captured) * engine.arch.word_size,
            maxactive=self.maxactive,
            disabled=disabled,
        )
        engine.kretprobes.register_kretprobe(rp)
        self.handle = rp
        self.address = rp.address
        self.maxactive = rp.maxactive

    def unregister(self) -> None:
        """Unregister the probe from the engine, but keep the number of hits.

        Mirrors: kernel/trace/trace_kprobe.c:__unregister_trace_kprobe (v6.1).
        """
        self._unhook()
        self.address = 0
        if self._counter is not None:
            self._hits += self._counter.value
            self._counter.release()
            self._counter = None

    def _unhook(self) -> None:
        if isinstance(self.handle, Kretprobe):
            self.engine.kretprobes.unregister_kretprobe(self.handle)
        elif self.handle is not None:
            self.engine.kprobes.unregister_kprobe(self.handle)
        self.handle = None

    @property
    def symbol(self) -> str:
        """The symbol of the place, for messages and comparisons.

        As in Linux, it is "unknown" for a raw address.
        """
        return self.place.symbol or "unknown"

    def is_in_module(self, module: str) -> bool:
        """Return True if the place was given as `MODULE:SYMBOL` and MODULE is `module`."""
        return self.symbol.startswith(f"{module}:")

    def awaits_module(self) -> bool:
        """Return True if the place may exist after a module is loaded.

        As in Linux, any raw address may exist later.
        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_module_exist (v6.1), negated.
        """
        if self.place.symbol is None:
            return True
        module, colon, _ = self.place.symbol.partition(":")
        return bool(colon) and not self.engine.symbols.has_module(module)

    def why_unarmed(self) -> str:
        """Return the reason why the probe of an enabled event cannot be hit now, or "".

        "" means that it can be hit, or that it is not registered for a reason other than a missing module.
        """
        if self.handle is None:
            module, colon, _ = self.symbol.partition(":")
            return f"module {module} was not loaded" if colon else ""
        return self.engine.why_unarmed(self.handle)

    # enable() and disable() skip probes that are gone or unregistered. Linux: enabling succeeds while all
    # kprobes are disarmed.

    def enable(self) -> None:
        """Enable the probe in the engine, unless it is not registered or the probed code is gone.

        Raises: errors of enable_kprobe().
        """
        if self.handle is not None and not self.handle.is_gone:
            if isinstance(self.handle, EventKprobe):
                # Not set before, because a bound method takes memory, and many events are never enabled.
                self.handle.program = self.emit
            self.engine.kprobes.enable_kprobe(self.handle)

    def disable(self) -> None:
        """Disable the probe in the engine, unless it is not registered or the probed code is gone.

        Raises: errors of disable_kprobe().
        """
        if self.handle is not None and not self.handle.is_gone:
            self.engine.kprobes.disable_kprobe(self.handle)

    def handler_changed(self) -> None:
        """Make the engine compile the handler again.

        This method is called when the event's recorders or filters have changed.
        """
        if self.handle is None or self.handle.is_gone:
            return
        if isinstance(self.handle, Kretprobe):
            self.engine.kretprobes.handler_changed(self.handle)
        else:
            self.engine.kprobes.handler_changed(self.handle)

    # Dynamic event

    @property
    def place_text(self) -> str:
        return self.place.show(self.engine.arch.word_size)

    @property
    def identity(self) -> Hashable:
        """Symbol and offset of the place, for comparisons. As in Linux, all raw addresses are equal."""
        return self.symbol, self.place.offset

    def matches_place(self, word: str) -> bool:
        """Return True if `word` is this probe's place. As in Linux, only 63 bytes of the place are compared.

        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_match (v6.1).
        """
        return word == self.place_text[:MAX_ARGSTR_LEN]

    def show(self) -> str:
        if not self._shown:
            self._shown = super().show()[len(self.letter) :]
        return self.letter + self._shown

    @property
    def letter(self) -> str:
        if self.place.is_jprobe:
            return "j"
        return f"r{self.maxactive or ''}" if self.place.is_return else "p"

    def profile(self) -> str:
        """Return the probe's line in kprobe_profile."""
        return _PROFILE_LINE % (self.event.name, self.hits, self.nmissed)

    # Hits

    def _entered(self, instance: KretprobeInstance, regs: Regs) -> None:
        """Handle a function's entry for a return probe: store the arguments that the event will record."""
        self.keep_arguments(instance.data, regs)

    def keep_arguments(self, data: memoryview, regs: Regs) -> None:
        """Store the values of the function arguments `captured` as words in `data`, the data of a call.

        Mirrors: kernel/trace/trace_probe.c:store_trace_entry_data (v6.12).
        """
        engine = self.engine
        hit = engine.probe_ctx
        hit.regs = regs
        environment = FetchEnvironment(engine.arch, hit, engine.symbols)
        size = engine.arch.word_size
        for index, number in enumerate(self.captured):
            value = environment.load(argument_insn(engine.arch, number))
            assert isinstance(value, int)
            data[index * size : (index + 1) * size] = value.to_bytes(size, "little")

    def _returned(self, instance: KretprobeInstance, regs: Regs) -> None:
        hit = self.engine.probe_ctx
        hit.regs = regs
        if self.captured:
            hit.entry_data = bytes(instance.data)
        hit.return_address = instance.ret_addr
        with within_another(hit, preempt_count=self.more_count):
            self.hit(hit)

    def hit(self, hit: ProbeHit, address: int = 0) -> None:
        """Count the hit. If the event is enabled and no filter rejects the hit, record it.

        `address`: the address to record; 0 means the probe's own address.

        Mirrors: kernel/trace/trace_kprobe.c:kprobe_dispatcher, kretprobe_dispatcher (v6.1).
        """
        self._hits += 1
        if not self.address or not self.event.recorders:
            return
        engine = self.engine
        environment = FetchEnvironment(engine.arch, hit, engine.symbols)
        header = (address or self.address).to_bytes(self.event.word_size, "little")
        if self.place.is_return:
            header += hit.return_address.to_bytes(self.event.word_size, "little")
        self.event.record(store(self.args, header, environment), hit)

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit guest code that does the same as hit(), and return True.

        If only Python can handle the event, emit nothing and return False. `way`: how a hit enters the
        handler.
        """
        engine = self.engine
        if not self.address or engine.places is None:
            return False
        compiled = compiled_event(self.event, self.place.is_return, self.args, engine.arch)
        self._counter = self._counter or engine.places.new_counter()
        if compiled is None or self._counter is None:
            return False
        builder.emit(AddToPerCpu(self._counter.offset, 1))
        EventEmitter(
            builder,
            compiled,
            way,
            self.address,
            engine.arch,
            engine.places,
            returns_by_breakpoint=self._returns_by_breakpoint,
            more_count=self.more_count,
        ).emit()
        return True

    @property
    def more_count(self) -> int:
        """Amount that Linux's handling of a hit adds to the preempt count in records of the probe.

        It is 0 except for returns that are handled in the exception of a breakpoint. Such a return disables
        preemption twice: in the exception, and in the trampoline's handler. Linux subtracts only one of them.
        Mirrors: arch/arm64/kernel/debug-monitors.c:brk_handler, kernel/trace/rethook.c (v7.2).
        """
        return self.engine.disabled_once if self.place.is_return and self._returns_by_breakpoint else 0

    @property
    def _returns_by_breakpoint(self) -> bool:
        """Whether Linux handles the probe's returns in the exception of a breakpoint."""
        return self.engine.returns_by_breakpoint

    def emit_apart(
        self,
        builder: ProgramBuilder,
        way: EntryKind,
        places: GuestAddresses,
        target: RecordTarget,
        check: TaskCheck | None,
        counter: int,
    ) -> bool:
        """Emit a copy of emit()'s code that uses `places` and `counter`, and writes all records to `target`.

        HandlerCosts measures the copy. `counter`: per-CPU offset of the count of hits. `check` replaces all
        checks of the lists of pids; if it is None, the copy makes no such checks. Return True. If guest code
        cannot handle the event, emit nothing and return False. Also emit nothing for a return probe, because
        its handler is the smaller part of the probe's cost.
        """
        arch = self.engine.arch
        compiled = compiled_event(self.event, self.place.is_return, self.args, arch)
        if compiled is None or not self.address or self.place.is_return:
            return False
        recordings = tuple(
            replace(recording, target=target, tasks=recording.tasks and check)
            for recording in compiled.recordings
        )
        builder.emit(AddToPerCpu(counter, 1))
        apart = replace(compiled, recordings=recordings)
        EventEmitter(builder, apart, way, self.address, arch, places).emit()
        return True
