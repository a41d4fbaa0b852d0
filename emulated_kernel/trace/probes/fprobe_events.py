"""Fprobe events of Linux 6.5 and later: f[MAXACTIVE][:[GRP/][EVENT]] SYM[%return] [FETCHARGS]."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.trace.fetch.fetch_insn import FetchOp
from emulated_kernel.trace.probes.definition import ProbeDefinition
from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.trace.probes.trace_kprobe import ProbeEngine, TraceKprobe
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace

FPROBE_EVENT_SYSTEM = "fprobes"


class TraceFprobe(TraceKprobe):
    """A probe of an fprobe event. Its fprobe is registered only while the event is enabled.

    Mirrors: kernel/trace/trace_fprobe.c:struct trace_fprobe (v6.5).
    """

    __slots__ = ("_fprobe", "_is_hooked", "_missed_before")

    def __init__(self, kind: FprobeEvents, definition: ProbeDefinition, engine: ProbeEngine) -> None:
        super().__init__(kind, definition, engine)
        handler = self._called
        program = self.emit
        self._fprobe = Fprobe(
            self.symbol,
            entry_handler=None if self.place.is_return else handler,
            exit_handler=handler if self.place.is_return else None,
            entry_program=None if self.place.is_return else program,
            exit_program=program if self.place.is_return else None,
            nr_maxactive=self.maxactive,
        )
        self._is_hooked = False
        self._missed_before = 0
        """Number of missed hits before the last registration of the fprobe."""

    def _hook(self, address: int | None) -> None:
        """Look up the function's fentry site, and register the fprobe if the event is enabled.

        Raises: KernelError EINVAL (the function cannot be traced).
        """
        del address
        site = self.engine.fprobes.functions.get(self.symbol)
        if site is None:
            raise KernelError(errno.EINVAL, f"{self.symbol} can't be traced")
        self.address = site
        if self.event.is_enabled:
            self.enable()

    def _unhook(self) -> None:
        self.disable()

    def enable(self) -> None:
        """Register the fprobe, unless it is registered or the function does not exist.

        Raises: KernelError, as register_fprobe().
        """
        if self.address and not self._is_hooked:
            self._missed_before += self._fprobe.nmissed
            self.engine.fprobes.register_fprobe(self._fprobe)
            self._is_hooked = True

    def disable(self) -> None:
        if self._is_hooked:
            self.engine.fprobes.unregister_fprobe(self._fprobe)
            self._is_hooked = False

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

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit guest code for the handler, as TraceKprobe.emit() does.

        In addition, return False if an argument of an entry event is the ip, which is after the fentry site
        and not constant.
        """
        loads = (arg.stages.load for arg in self.args)
        asks = any(load.op is FetchOp.REG and load.name == "ip" for load in loads)
        return (self.place.is_return or not asks) and super().emit(builder, way)

    def _called(self, _fp: Fprobe, _address: int, regs: Any, _data: memoryview) -> None:
        """Handle a hit at the function's entry or exit, as the handler of the fprobe.

        At the exit, regs.ip is the address that the function returns to.
        """
        hit = self.engine.probe_ctx
        hit.regs = regs
        hit.return_address = regs.ip if self.place.is_return else 0
        self.hit(hit)


class FprobeEvents(KprobeEvents):
    """All fprobe events of a kernel, which only dynamic_events shows.

    Extends: 6.1 has none. Mirrors: kernel/trace/trace_fprobe.c (v6.5), without tracepoint events.
    """

    probe_class = TraceFprobe
    log_name = "trace_fprobe"

    def _parse(self, argv: Sequence[str], log: TraceProbeLog) -> ProbeDefinition | None:
        """Parse an `f` command as a command for a kprobe event. Return None if it is another command.

        Mirrors: kernel/trace/trace_fprobe.c:__trace_fprobe_create (v6.5).
        """
        if len(argv) < 2 or argv[0][0] != "f":
            return None
        symbol, percent, suffix = argv[1].partition("%")
        is_return = suffix == "return"
        log.index = 1
        if percent and not is_return:
            raise log.error(len(symbol), ProbeError.BAD_ADDR_SUFFIX)
        head = ("r" if is_return else "p") + argv[0][1:]
        definition = super()._parse([head, symbol, *argv[2:]], log)
        if definition is None:
            return None
        if definition.place.symbol is None or definition.place.offset:
            log.index = 1
            raise log.error(0, ProbeError.BAD_PROBE_ADDR)
        given = head.partition(":")[2]
        group = definition.group if "/" in given or "." in given else FPROBE_EVENT_SYSTEM
        has_name = bool(given) and given[-1] not in "/."
        event = definition.event if has_name else f"{symbol}__{'exit' if is_return else 'entry'}"
        return replace(definition, group=group, event=event)
