"""kprobes/stats: what is known of the probes of an event, told from the engine's own state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.arch.program_builder import HitWay
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.kretprobe import Kretprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hooks import ReturnHook
from emulated_kernel.trace.event import KprobeTraceEvent
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.trace_kprobe import TraceKprobe
from emulated_kernel.wiring.probes import EventProbe
from emulated_kernel.wiring.rehearsal import Rehearsals
from emulated_kernel.wiring.views import EventViews

GONE = "gone with its module"
"""Shown of a probe whose code was freed."""


class PatchedText(Protocol):
    def original(self, va: int, size: int) -> bytes: ...

    def current(self, va: int, size: int) -> bytes: ...


class ProbeStatistics:
    """Implements ProbeStats for an event; of several probes each has a line."""

    def __init__(self, owner: Stats, event: KprobeTraceEvent) -> None:
        self._owner = owner
        self._event = event

    def _kprobes(self) -> list[EventProbe]:
        """Those that are registered; a probe in a module that isn't there has none."""
        return [probe.handle for probe in self._event.probes if isinstance(probe.handle, EventProbe)]

    def _lines(self, text: Callable[[Kprobe], str]) -> str:
        return "\n".join(text(kprobe) for kprobe in self._kprobes())

    @property
    def hits(self) -> int:
        return sum(probe.hits for probe in self._event.probes)

    def reset_hits(self) -> None:
        for probe in self._event.probes:
            probe.hits = 0

    @property
    def nmissed(self) -> int:
        return sum(probe.nmissed for probe in self._event.probes)

    def reset_nmissed(self) -> None:
        for kprobe in self._kprobes():
            kprobe.nmissed = 0

    @property
    def mode(self) -> str:
        return self._lines(self._owner.kprobes.mode) or "pending"

    @property
    def enabled(self) -> bool:
        kprobes = self._kprobes()
        return bool(kprobes) and not any(kprobe.is_disabled for kprobe in kprobes)

    def set_enabled(self, enabled: bool) -> None:
        switch = self._owner.kprobes.enable_kprobe if enabled else self._owner.kprobes.disable_kprobe
        for kprobe in self._kprobes():
            switch(kprobe)

    @property
    def optimized(self) -> bool:
        kprobes = self._kprobes()
        return bool(kprobes) and all(self._owner.kprobes.is_optimized(kprobe) for kprobe in kprobes)

    def set_optimized(self, wanted: bool) -> None:
        """Raises: KernelError EOPNOTSUPP where a probe can't be optimized."""
        for kprobe in self._kprobes():
            self._owner.kprobes.set_optimized(kprobe, wanted)

    @property
    def reason(self) -> str:
        if not self._kprobes():
            return "the place isn't there: it may be in a module"
        return self._lines(self._owner.kprobes.reason)

    @property
    def address(self) -> str:
        return self._lines(lambda kprobe: f"0x{kprobe.address:x} {self._owner.describe(kprobe.address)}")

    @property
    def bytes(self) -> str:
        return self._lines(self._owner.bytes_text)

    @property
    def detour(self) -> str:
        return self._lines(self._owner.detour_text)

    @property
    def cost(self) -> str:
        texts: list[str] = []
        for probe in self._event.probes:
            if isinstance(probe.handle, Kprobe):
                texts.append(self._owner.cost_text(probe, probe.handle))
        return _join(texts)

    # Of return probes

    @property
    def is_return(self) -> bool:
        return self._event.is_return

    def _kretprobes(self) -> list[Kretprobe]:
        return [kprobe for kprobe in self._kprobes() if isinstance(kprobe, Kretprobe)]

    def _hooks(self) -> list[ReturnHook]:
        return [rp.hook for rp in self._kretprobes() if rp.hook is not None]

    @property
    def active(self) -> int:
        return sum(hook.active for hook in self._hooks())

    @property
    def maxactive(self) -> int:
        return sum(hook.nodes for hook in self._hooks())

    @property
    def high_water(self) -> int:
        return sum(hook.high_water for hook in self._hooks())

    @property
    def memory(self) -> int:
        return sum(hook.memory for hook in self._hooks())


class StatsGroup:
    """Implements StatsGroupPort."""

    def __init__(self, owner: Stats, name: str) -> None:
        self._owner = owner
        self._name = name

    def names(self) -> Collection[str]:
        return [event.name for event in self._owner.events.events() if event.group == self._name]

    def find(self, name: str) -> ProbeStatistics | None:
        return self._owner.probe(self._name, name)


class Stats:
    """Implements StatsPort."""

    def __init__(
        self,
        kprobes: Kprobes,
        events: KprobeEvents,
        text: PatchedText,
        arch: Arch,
        describe: Callable[[int], str],
        rehearsals: Rehearsals | None = None,
    ) -> None:
        """Without `rehearsals` nothing is told of what guest code costs."""
        self.kprobes = kprobes
        self.events = events
        self.describe = describe
        self._text = text
        self._arch = arch
        self._rehearsals = rehearsals
        self._groups: dict[str, StatsGroup] = {}
        self._views: EventViews[KprobeTraceEvent, ProbeStatistics] = EventViews(
            lambda event: ProbeStatistics(self, event)
        )

    def names(self) -> Collection[str]:
        return list(dict.fromkeys(event.group for event in self.events.events()))

    def find(self, name: str) -> StatsGroup | None:
        if not self.events.registry.has_group(name):
            self._groups.pop(name, None)
            return None
        return self._groups.setdefault(name, StatsGroup(self, name))

    def probe(self, group: str, name: str) -> ProbeStatistics | None:
        event = self.events.find(group, name)
        if event is None:
            return None
        return self._views.of(event)

    def bytes_text(self, kprobe: Kprobe) -> str:
        """The bytes that the probe may replace, original and as they stand in the text now."""
        if kprobe.is_gone:
            return GONE
        size = self._patched_size(kprobe)
        original, current = (read(kprobe.address, size) for read in (self._text.original, self._text.current))
        return f"original {original.hex(' ')}\ncurrent  {current.hex(' ')}"

    def _patched_size(self, kprobe: Kprobe) -> int:
        """Whole instructions that a jump or call would cover; else the probed one."""
        detour = self.kprobes.detour(kprobe)
        if detour is not None:
            return detour.length
        return kprobe.insn.prepared.length if kprobe.insn is not None else self._arch.call_size

    def detour_text(self, kprobe: Kprobe) -> str:
        """Disassembly of what runs out of line; an emulated instruction has no copy and is shown itself."""
        if kprobe.is_gone:
            return GONE
        head = self.kprobes.head(kprobe)
        if head is not None and head.code is not None:
            return self._disassembly(head.code.address, head.code.size)
        stub = None if head is None else head.stub
        handler = "" if stub is None else self._disassembly(stub.address, stub.size) + "\n"
        return handler + self._copy_text(kprobe)

    def _copy_text(self, kprobe: Kprobe) -> str:
        """What runs behind a handler that isn't in the same piece, or traps."""
        insn, detour = kprobe.insn, self.kprobes.detour(kprobe)
        if detour is not None and self.kprobes.runs_in_detour(kprobe):
            return self._disassembly(detour.address, detour.size)
        if insn is None:
            trampoline = self.kprobes.trampoline
            return "" if trampoline is None else self._disassembly(*trampoline)
        if insn.slot is None:
            return "emulated, no slot\n" + self._disassembly(
                kprobe.address, insn.prepared.length, self._text.original
            )
        end = self._arch.jump_size if insn.boosted else len(self._arch.breakpoint)
        return self._disassembly(insn.slot, insn.prepared.length + end)

    def cost_text(self, probe: TraceKprobe, kprobe: Kprobe) -> str:
        """Hits, and the nanoseconds of one: of the latest where Python sees its end, else of rehearsals."""
        head = self.kprobes.head(kprobe)
        if head is None or (head.code is None and head.stub is None):
            return kprobe.cost.text(probe.hits)
        traps = 0 if head.code is not None else self.kprobes.hits.stub_traps(head)
        if traps > 1:
            return f"{kprobe.cost.text(probe.hits)}, {traps} traps"
        cost = None if self._rehearsals is None else self._rehearsals.median_ns(probe, head, self._way(head))
        text = f"hits {probe.hits}" + ("" if cost is None else f" median {cost:.1f} ns")
        return f"{text}, 1 trap" if traps else f"{text} in guest code"

    def _way(self, head: Kprobe) -> HitWay:
        if head.code is None:
            return HitWay.BREAKPOINT
        return HitWay.CALL if head.is_ftrace else HitWay.JUMP

    def _disassembly(self, va: int, size: int, read: Callable[[int, int], bytes] | None = None) -> str:
        return _join(self._arch.disassemble((read or self._text.current)(va, size), va))


def _join(lines: Sequence[str]) -> str:
    return "\n".join(lines)
