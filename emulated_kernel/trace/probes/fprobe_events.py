"""Fprobe events, which probe functions at fentry sites, and dynamic events that probe tracepoints."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.trace.context.probe_hit import ProbeHit, within_another
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.fetch.fetch_context import FetchContext
from emulated_kernel.trace.fetch.fetchargs import MAX_ARGSTR_LEN, parse_args
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.probes.definition import (
    ProbeDefinition,
    ProbePoint,
    default_name,
    parse_event_name,
    parse_maxactive,
    resolve_symbols,
)
from emulated_kernel.trace.probes.dynamic_events import EventCommands
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import EventKprobe, ProbeEngine, TraceKprobe
from emulated_kernel.trace.text.chars import ALNUM
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

FPROBE_EVENT_SYSTEM = "fprobes"
TRACEPOINT_EVENT_SYSTEM = "tracepoints"
_RETURN_VALUE = lazy_pattern(rf"\$retval(?![_{ALNUM}])")


class TraceFprobe(TraceKprobe):
    """A probe of an fprobe event.

    The fprobe is registered while the event is enabled. In some versions of Linux, it is registered as long
    as the event exists.

    Mirrors: kernel/trace/trace_fprobe.c:struct trace_fprobe (v6.12).
    """

    __slots__ = ("_fprobe", "_is_hooked", "_missed_before", "_stays")

    def __init__(self, kind: FprobeEvents, definition: ProbeDefinition, engine: ProbeEngine) -> None:
        super().__init__(kind, definition, engine)
        handler = self._called
        program = self.emit
        is_return = self.place.is_return
        self._fprobe = Fprobe(
            self.symbol,
            entry_handler=(self._kept if self.captured else None) if is_return else handler,
            exit_handler=handler if is_return else None,
            entry_program=None if is_return else program,
            exit_program=program if is_return else None,
            nr_maxactive=self.maxactive,
            entry_data_size=len(self.captured) * engine.arch.word_size,
            is_over_fgraph=InterfaceRule.FPROBE_RETURNS_BY_FGRAPH in kind.interface,
        )
        self._stays = InterfaceRule.FPROBES_STAY in kind.interface
        self._is_hooked = False
        self._missed_before = 0
        """Number of missed hits before the last registration of the fprobe."""

    def why_unarmed(self) -> str:
        """Return "", because nothing disarms the fprobe of an enabled event."""
        return ""

    def register(self) -> None:
        """Look up the functions that the fprobe shall be on, and register the fprobe if the event is enabled.

        In some versions of Linux, also register the fprobe of a disabled event.
        Raises: KernelError EINVAL or ENOENT (no function can be traced), ENOENT (an argument has an unknown
        symbol).
        Mirrors: kernel/trace/trace_fprobe.c:__register_trace_fprobe (v6.12).
        """
        if self._stays:
            # Linux resolves symbols at the registration, and before it looks for the functions.
            self._resolve_symbols()
        try:
            self.address = self.engine.fprobes.matching(self._fprobe)[0]
        except KernelError as failure:
            if InterfaceRule.FPROBE_EINVAL not in self.kind.interface:
                raise
            raise KernelError(errno.ENOENT, str(failure.strerror)) from None
        if self._stays:
            self._fprobe.is_disabled = not self.event.is_enabled
            self._attach()
        elif self.event.is_enabled:
            self._attach()

    def awaits_module(self) -> bool:
        """Return False, because an fprobe's functions must exist when the event is defined."""
        return False

    def _resolve_symbols(self) -> None:
        engine = self.engine
        self.args = resolve_symbols(self.args, engine.symbols, engine.arch.bits)

    def _attach(self) -> None:
        self._resolve_symbols()
        self._missed_before += self._fprobe.nmissed
        self.engine.fprobes.register_fprobe(self._fprobe)
        self._is_hooked = True

    def _unhook(self) -> None:
        if self._is_hooked:
            self.engine.fprobes.unregister_fprobe(self._fprobe)
            self._is_hooked = False

    def enable(self) -> None:
        """Register the fprobe; if it is registered already, enable it.

        Raises: KernelError ENOENT (an argument has an unknown symbol), errors of register_fprobe().
        """
        if self._stays and self._is_hooked:
            self.engine.fprobes.enable_fprobe(self._fprobe)
        elif self.address and not self._is_hooked:
            self._attach()

    def disable(self) -> None:
        if self._stays and self._is_hooked:
            self.engine.fprobes.disable_fprobe(self._fprobe)
        else:
            self._unhook()

    def handler_changed(self) -> None:
        if self.address:
            self.engine.fprobes.handler_changed(self._fprobe)

    @property
    def nmissed(self) -> int:
        return self._missed_before + self._fprobe.nmissed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        self._missed_before = value - self._fprobe.nmissed

    @property
    def letter(self) -> str:
        return f"f{self.maxactive or '' if self.place.is_return else ''}"

    @property
    def place_text(self) -> str:
        return super().place_text + ("%return" if self.place.is_return else "")

    def matches_place(self, word: str) -> bool:
        """Return True if `word` is the symbol. As in Linux, `SYMBOL%return` matches no event.

        Mirrors: kernel/trace/trace_fprobe.c:trace_fprobe_match_command_head (v6.12).
        """
        return word == self.symbol[:MAX_ARGSTR_LEN]

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit guest code for the handler, and return True; see TraceKprobe.emit().

        Return False, with nothing emitted, if the probe is on several functions, because the code contains
        the function's address as a constant.
        """
        return len(self._fprobe.functions) == 1 and super().emit(builder, way)

    @property
    def more_count(self) -> int:
        """Amount that ftrace adds to the preempt count in records of the probe; see TraceKprobe.more_count.

        It is 0 unless preemption is disabled twice. At a return, both the trampoline's handler and ftrace's
        guard against recursion call preempt_disable(). In some versions of Linux, there are two such calls at
        an entry as well.
        """
        has_two = self.place.is_return or InterfaceRule.FPROBE_ENTRY_COUNT in self.kind.interface
        return self.engine.disabled_once if has_two else 0

    @property
    def _returns_by_breakpoint(self) -> bool:
        return False

    def _kept(self, _fp: Fprobe, _address: int, regs: Any, data: memoryview) -> None:
        """Store the arguments that the event will record at the function's exit; called at its entry."""
        self.keep_arguments(data, regs)

    def _called(self, _fp: Fprobe, address: int, regs: Any, data: memoryview) -> None:
        """Handle a hit at the function's entry or exit, as the handler of the fprobe.

        At the exit, regs.ip is the address that the function returns to.
        """
        hit = self.engine.probe_ctx
        hit.regs = regs
        if not self.place.is_return:
            hit.return_address = 0
        elif InterfaceRule.FPROBE_RETURNS_BY_FGRAPH in self.kind.interface:
            hit.return_address = self.engine.fprobes.replaced_address(self._fprobe)
        else:
            hit.return_address = regs.ip
        hit.entry_data = bytes(data)
        with within_another(hit, preempt_count=self.more_count):
            self.hit(hit, address)


class TraceTprobe(TraceKprobe):
    """A probe of a tracepoint event: a kprobe on the stub that is called with the tracepoint's arguments.

    The kprobe exists while the event is enabled. Deviates: Linux attaches an fprobe to the stub.
    Mirrors: kernel/trace/trace_fprobe.c:__regsiter_tracepoint_fprobe (v7.2).
    """

    __slots__ = ("_missed_before", "_point")

    kind: FprobeEvents

    def __init__(self, kind: FprobeEvents, definition: ProbeDefinition, engine: ProbeEngine) -> None:
        super().__init__(kind, definition, engine)
        self._point: Tracepoint | None = None
        """The tracepoint, while the probe is attached to it."""
        self._missed_before = 0
        """Number of missed hits before the last registration of the kprobe."""

    def register(self) -> None:
        """Attach the probe if its event is enabled.

        The tracepoint may be missing, because a module that is loaded later may define it.
        Raises: KernelError ENOENT (an argument has an unknown symbol), errors of register_kprobe().
        """
        symbols = self.engine.symbols
        self.args = resolve_symbols(self.args, symbols, self.engine.arch.bits)
        if self.event.is_enabled:
            self.enable()

    def awaits_module(self) -> bool:
        """Return False, because a probe without its tracepoint is registered too."""
        return False

    def enable(self) -> None:
        """Switch the tracepoint on, and probe its stub.

        Do nothing if that is done already, or if the kernel has no such tracepoint, or no stub for it.
        Raises: errors of register_kprobe().
        """
        point = self.kind.tracepoint(self.symbol)
        stub = None if point is None else point.stub
        if self._point is not None or point is None or stub is None:
            return
        handle = EventKprobe(
            addr=self.engine.symbols.lookup_name(stub.symbol),
            pre_handler=partial(self._called, stub.preempt_count),
            user=self,
        )
        self.engine.kprobes.register_kprobe(handle)
        self.handle = handle
        self.address = handle.address
        point.subscribe(self._ignore)
        if stub.switch is not None:
            stub.switch(True)
        self._point = point

    def disable(self) -> None:
        point = self._point
        if point is None:
            return
        self._point = None
        if point.stub is not None and point.stub.switch is not None:
            point.stub.switch(False)
        point.unsubscribe(self._ignore)
        self._missed_before = self.nmissed
        super().unregister()

    def unregister(self) -> None:
        self.disable()
        super().unregister()

    def _ignore(self, _payload: bytes, _hit: ProbeHit) -> None:
        """Ignore a record of the tracepoint: the tracepoint is on only to make the guest call its stub."""

    def _called(self, preempt_count: int, _kprobe: Kprobe, regs: Regs) -> None:
        """Handle a call of the stub. The record gets the flags of a function call, not of a breakpoint.

        `preempt_count`: amount that the tracepoint adds to preempt_count in Linux, but not in the guest.
        """
        hit = self.kind.called
        hit.regs = regs
        # Linux adds one of the two amounts. The versions in which ftrace raises the count in records do not
        # disable preemption for tracepoints.
        with within_another(hit, preempt_count=self.more_count or preempt_count):
            self.hit(hit)

    @property
    def nmissed(self) -> int:
        return self._missed_before + (0 if self.handle is None else self.handle.nmissed)

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        self._missed_before = value - (0 if self.handle is None else self.handle.nmissed)

    @property
    def more_count(self) -> int:
        """Amount that ftrace adds to the preempt count in records of the event; see TraceKprobe.more_count.

        It is 0, except in the versions of Linux in which TraceFprobe.more_count is not 0 at an entry.
        """
        return self.engine.disabled_once if InterfaceRule.FPROBE_ENTRY_COUNT in self.kind.interface else 0

    @property
    def letter(self) -> str:
        return "t"


class FprobeEvents(KprobeEvents):
    """All fprobe events and tracepoint events of a kernel, which only dynamic_events shows.

    Mirrors: kernel/trace/trace_fprobe.c (v6.12).
    """

    log_name = "trace_fprobe"

    def __init__(
        self,
        engine: ProbeEngine,
        commands: EventCommands,
        points: Mapping[str, Tracepoint],
        called: ProbeHit,
    ) -> None:
        """Create a registry without events.

        `points`: GROUP:EVENT -> tracepoint of the kernel. `called`: the ProbeHit object that is reused for
        all calls of tracepoints' stubs.
        """
        super().__init__(engine, commands)
        self._points = points
        self.called = called

    def tracepoint(self, name: str) -> Tracepoint | None:
        """Return the kernel's tracepoint called `name` (without its group), or None if it does not exist."""
        return next((point for key, point in self._points.items() if key.partition(":")[2] == name), None)

    def _probe(self, definition: ProbeDefinition) -> TraceKprobe:
        kind = TraceTprobe if definition.place.is_tracepoint else TraceFprobe
        return kind(self, definition, self._engine)

    def _parse(self, argv: Sequence[str], log: TraceProbeLog) -> ProbeDefinition | None:
        """Parse `argv`, the words of an `f` or `t` command; return None for other commands.

        The commands are `f[N][:[GRP/][EVENT]] SYMBOL[%return] [FETCHARGS]` and
        `t[:[GRP/][EVENT]] TRACEPOINT [FETCHARGS]`. SYMBOL may be a glob, whose functions are looked up when
        the probe is registered.
        Raises: KernelError EINVAL (malformed), ENOENT (an unknown parameter), EOPNOTSUPP (an argument needs
        BTF, and the kernel has none), ERANGE (a number is too large), E2BIG (too many or too long arguments);
        all are logged.
        Mirrors: kernel/trace/trace_fprobe.c:__trace_fprobe_create (v6.12).
        """
        has_points = InterfaceRule.TRACEPOINT_EVENTS in self.interface
        if len(argv) < 2 or argv[0][0] not in ("ft" if has_points else "f"):
            return None
        head, place_word, *words = argv
        is_point = head[0] == "t"
        maxactive = self._maxactive(head, log)
        log.index = 1
        symbol, percent, suffix = place_word.partition("%")
        if percent and (suffix != "return" or is_point):
            raise log.error(len(symbol), ProbeError.BAD_ADDR_SUFFIX)
        is_return = bool(percent)
        if is_point:
            _check_tracepoint(symbol, words, log)
        else:
            is_return = is_return or any(_RETURN_VALUE.search(word) for word in words)
        log.index = 0
        if maxactive and not is_return:
            raise log.error(1, ProbeError.BAD_MAXACT_TYPE)
        group = TRACEPOINT_EVENT_SYSTEM if is_point else FPROBE_EVENT_SYSTEM
        event = ""
        if ":" in head:
            group, event = parse_event_name(
                head.partition(":")[2], head.index(":") + 1, log, self.interface, group
            )
        engine = self._engine
        point = self.tracepoint(symbol) if is_point else None
        stub = None if point is None else point.stub
        context = FetchContext(
            engine.arch,
            log,
            self.interface,
            on_return=is_return,
            on_entry=not is_return,
            in_fprobe=True,
            types=engine.types,
            function=symbol if stub is None else stub.symbol,
            first_parameter=0 if stub is None else stub.first_parameter,
        )
        args = parse_args(words, context)
        event = event or _default_event(symbol, is_point=is_point, is_return=is_return)
        place = ProbePoint(symbol, 0, None, is_return, is_tracepoint=is_point)
        return ProbeDefinition(group, event, place, None, maxactive, args, tuple(context.captured))

    def _refuse(self, failure: KernelError) -> None:
        if InterfaceRule.FPROBE_EINVAL in self.interface:
            raise KernelError(errno.EINVAL, str(failure.strerror)) from failure

    def _maxactive(self, head: str, log: TraceProbeLog) -> int:
        """Return maxactive, the number after the letter `f` of a command, or 0 if there is no number.

        Raises: KernelError EINVAL (0, malformed, too large, or not accepted by this version of Linux;
        logged).
        """
        if InterfaceRule.FPROBE_WITHOUT_MAXACTIVE in self.interface:
            if head[1:2] not in ("", ":"):
                raise log.error(1, ProbeError.BAD_MAXACT, errno.EINVAL)
            return 0
        return parse_maxactive(head, log) if head[1:2].isdecimal() else 0


def _check_tracepoint(name: str, words: Sequence[str], log: TraceProbeLog) -> None:
    """Check the tracepoint's name and the arguments `words` of a command that begins with `t`.

    Raises: KernelError EINVAL (a wrong character in the name, or an argument has `$retval`; logged).
    Mirrors: kernel/trace/trace_fprobe.c:parse_symbol_and_return (v6.12).
    """
    wrong = re.search(rf"[^_{ALNUM}]", name)
    if wrong is not None:
        raise log.error(wrong.start(), ProbeError.BAD_TP_NAME)
    for number, word in enumerate(words, 2):
        found = _RETURN_VALUE.search(word)
        if found is not None:
            log.index = number
            raise log.error(found.start(), ProbeError.RETVAL_ON_PROBE)


def _default_event(symbol: str, *, is_point: bool, is_return: bool) -> str:
    """Return the default name of an event, for a command without a name.

    `is_point`: whether `symbol` is a tracepoint. `is_return`: whether the probe is at the exit of the
    function.
    """
    if is_point:
        return default_name(f"_{symbol}" if symbol[:1].isdecimal() else symbol)
    return default_name(f"{symbol}__{'exit' if is_return else 'entry'}")
