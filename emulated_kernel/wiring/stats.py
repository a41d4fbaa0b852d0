"""kprobes/stats: what is known of the probes of an event, told from the engine's own state."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.event import KprobeTraceEvent
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.wiring.probes import EventKprobe
from emulated_kernel.wiring.views import EventViews


class PatchedText(Protocol):
    def original(self, va: int, size: int) -> bytes: ...

    def current(self, va: int, size: int) -> bytes: ...


class ProbeStatistics:
    """Implements ProbeStats for an event; of several probes each has a line."""

    def __init__(self, owner: Stats, event: KprobeTraceEvent) -> None:
        self._owner = owner
        self._event = event

    def _kprobes(self) -> list[EventKprobe]:
        """Those that are registered; a probe in a module that isn't there has none."""
        return [probe.handle for probe in self._event.probes if isinstance(probe.handle, EventKprobe)]

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
        return self._lines(self._owner.kprobes.mode)

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
        return False

    def set_optimized(self, wanted: bool) -> None:
        """Raises: KernelError EOPNOTSUPP: this kernel is built without jump optimization."""
        if wanted:
            raise KernelError(errno.EOPNOTSUPP, "this kernel is built without jump optimization")

    @property
    def reason(self) -> str:
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
        return self._lines(lambda kprobe: kprobe.cost.text())


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
    ) -> None:
        self.kprobes = kprobes
        self.events = events
        self.describe = describe
        self._text = text
        self._arch = arch
        self._groups: dict[str, StatsGroup] = {}
        self._views = EventViews(lambda event: ProbeStatistics(self, event))

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
        """The probed instruction's bytes, original and as they stand in the text now."""
        size = kprobe.insn.prepared.length if kprobe.insn is not None else 1
        original, current = (read(kprobe.address, size) for read in (self._text.original, self._text.current))
        return f"original {original.hex(' ')}\ncurrent  {current.hex(' ')}"

    def detour_text(self, kprobe: Kprobe) -> str:
        """Disassembly of the insn slot; an emulated instruction has none and is shown itself."""
        insn = kprobe.insn
        if insn is None:
            return ""
        if insn.slot is None:
            code = self._text.original(kprobe.address, insn.prepared.length)
            return "emulated, no slot\n" + _join(self._arch.disassemble(code, kprobe.address))
        return _join(self._arch.disassemble(insn.prepared.slot_bytes, insn.slot))


def _join(lines: Sequence[str]) -> str:
    return "\n".join(lines)
