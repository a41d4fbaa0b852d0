"""Fprobe events: f[MAXACTIVE][:[GRP/][EVENT]] SYM[%return] [FETCHARGS], as kernels from 6.5 on have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emulated_kernel.arch.program_builder import HitWay, ProgramBuilder
from emulated_kernel.trace.definition import ProbeDefinition, parse_definition
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.probe_errors import CommandLog, ProbeError
from emulated_kernel.trace.trace_kprobe import TraceKprobe
from emulated_kernel.trace.types import FetchOp

FPROBE_EVENT_SYSTEM = "fprobes"


class TraceFprobe(TraceKprobe):
    """One function's entry or exit. Mirrors: kernel/trace/trace_fprobe.c:struct trace_fprobe (v6.5)."""

    __slots__ = ()

    def _head(self) -> str:
        return f"f{self.maxactive or '' if self.is_return else ''}"

    def emit(self, builder: ProgramBuilder, way: HitWay) -> bool:
        """False too where an entry's ip is asked for, which is behind the fentry site and no constant."""
        asks = any(insn.op is FetchOp.REG and insn.name == "ip" for arg in self.args for insn in arg.program)
        return (self.is_return or not asks) and super().emit(builder, way)

    def _place_text(self) -> str:
        return super()._place_text() + ("%return" if self.is_return else "")


class FprobeEvents(KprobeEvents):
    """All fprobe events of a kernel, beside its kprobe events; they stand in dynamic_events.

    Extends: 6.1 has none. Mirrors: kernel/trace/trace_fprobe.c (v6.5), without tracepoint events.
    """

    probe_class = TraceFprobe
    log_name = "trace_fprobe"

    def _parse(self, argv: Sequence[str], log: CommandLog) -> ProbeDefinition | None:
        """Mirrors: kernel/trace/trace_fprobe.c:__trace_fprobe_create (v6.5)."""
        if len(argv) < 2 or argv[0][0] != "f":
            return None
        symbol, percent, suffix = argv[1].partition("%")
        is_return = suffix == "return"
        log.index = 1
        if percent and not is_return:
            raise log.error(len(symbol), ProbeError.BAD_ADDR_SUFFIX)
        head = ("r" if is_return else "p") + argv[0][1:]
        definition = parse_definition([head, symbol, *argv[2:]], self._around, log)
        if definition is None:
            return None
        if definition.place.symbol is None or definition.place.offset:
            log.index = 1
            raise log.error(0, ProbeError.BAD_PROBE_ADDR)
        return _named(definition, head.partition(":")[2], f"{symbol}__{'exit' if is_return else 'entry'}")


def _named(definition: ProbeDefinition, given: str, default: str) -> ProbeDefinition:
    """With the group and the name that an fprobe event has where none was given."""
    has_group = "/" in given or "." in given
    group = definition.group if has_group else FPROBE_EVENT_SYSTEM
    has_name = bool(given) and given[-1] not in "/."
    return replace(definition, group=group, event=definition.event if has_name else default)
