"""kprobes/stats/: a directory for each event's probes, with what Linux doesn't tell about them."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping

from emulated_kernel.arch.program.ir_builder import EntryKind
from emulated_kernel.components.components import KernelComponents
from emulated_kernel.kprobes.hit.handling import stub_traps
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import AggrKprobe, Kprobe
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHook
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.probes.trace_kprobe import EventProbe, KprobeTraceEvent, TraceKprobe
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.kstrtox import kstrtoul, switch
from emulated_kernel.vfs.core.node import Directory, DynamicDirectory, Node, Objects, Owner
from emulated_kernel.vfs.core.open_file import File
from emulated_kernel.vfs.core.seq_file import AttributeFile, PerClientFile, Records, SeqFile, listing, single

_DIRECTORY = 0o755
_READ_WRITE = 0o644
_READ_ONLY = 0o444
_ADDRESS = re.compile(r"0x([0-9a-f]{8,})")
"""What is as long as an address is taken for one."""
_GONE = "gone with its module"
"""Shown of a probe whose code was freed."""


def stats_directory(kernel: KernelComponents, owner: Owner) -> Directory:
    """stats/<group>/<event>/...; `owner` may see addresses."""
    events = kernel.tracing.kprobe_events
    registry = events.registry

    def find_group(name: str) -> Mapping[str, TraceEvent] | None:
        """One dictionary as long as there is the group."""
        members = registry.in_group(name)
        return members if any(events.find(name, event) is not None for event in members) else None

    def group_directory(members: Mapping[str, TraceEvent]) -> Directory:
        def find(name: str) -> KprobeTraceEvent | None:
            event = members.get(name)
            return None if event is None else events.find(event.group, name)

        return DynamicDirectory(
            _DIRECTORY,
            Objects(
                names=lambda: [name for name in members if find(name) is not None],
                find=find,
                make=lambda event: _EventStats(event, kernel).directory(owner),
            ),
        )

    return DynamicDirectory(
        _DIRECTORY,
        Objects(
            names=lambda: list(dict.fromkeys(event.group for event in events.events())),
            find=find_group,
            make=group_directory,
        ),
    )


ProbeState = Mapping[str, str | int | bool]
"""Values of a stats directory's files (hits, mode, ...), by their names."""


def probe_states(kernel: KernelComponents) -> Iterator[ProbeState]:
    """Of each event, with its name as `event`; no file is made for that."""
    for event in kernel.tracing.kprobe_events.events():
        yield {"event": f"{event.group}/{event.name}", **_EventStats(event, kernel).state()}


def probes_file(kernel: KernelComponents) -> SeqFile:
    """machine/probes: an object of JSON for each event: what its files say, in one request."""
    return SeqFile(0o400, listing(lambda: (f"{json.dumps(state)}\n" for state in probe_states(kernel))))


class _EventStats:
    """An event's files: counters are sums over its probes; of other things each probe has a line."""

    def __init__(self, event: KprobeTraceEvent, kernel: KernelComponents) -> None:
        self._event = event
        self._kernel = kernel
        self._kprobes = kernel.engine.kprobes
        self._arch = kernel.arch
        self._text = kernel.machine.text

    def directory(self, owner: Owner) -> Directory:
        """`owner` may see addresses."""
        files: dict[str, Node] = {
            "hits": _counter(self._hits, self._reset_hits),
            "nmissed": _counter(self._nmissed, self._reset_nmissed),
            "mode": _text(self._mode),
            "enabled": _switch(self._is_enabled, self._set_enabled),
            "optimized": _switch(self._is_optimized, self._set_optimized),
            "asked": _text(self._asked),
            "reason": _addressed(self._reason, owner),
            "address": _addressed(lambda: self._lines(self._address), owner),
            "bytes": _text(lambda: self._lines(self._bytes)),
            "detour": _addressed(lambda: self._lines(self._detour), owner),
            "cost": _text(self._cost),
        }
        if self._event.is_return:
            files["active"] = _text(lambda: self._total(lambda hook: hook.active))
            files["maxactive"] = _text(lambda: self._total(lambda hook: hook.nodes))
            files["high_water"] = _text(lambda: self._total(lambda hook: hook.high_water))
            files["memory"] = _text(self._memory)
        return Directory(_DIRECTORY, files)

    def state(self) -> ProbeState:
        return {
            "mode": self._mode(),
            "asked": self._asked(),
            "enabled": self._is_enabled(),
            "optimized": self._is_optimized(),
            "hits": self._hits(),
            "nmissed": self._nmissed(),
            "reason": self._reason(),
        }

    def _hits(self) -> int:
        return sum(probe.hits for probe in self._event.probes)

    def _nmissed(self) -> int:
        return sum(probe.nmissed for probe in self._event.probes)

    def _mode(self) -> str:
        return self._lines(self._kprobes.mode) or "pending"

    def _registered(self) -> list[EventProbe]:
        """A probe in a module that isn't there has none."""
        return [probe.handle for probe in self._event.probes if isinstance(probe.handle, EventProbe)]

    def _lines(self, text: Callable[[Kprobe], str]) -> str:
        return "\n".join(text(kprobe) for kprobe in self._registered())

    def _reset_hits(self) -> None:
        for probe in self._event.probes:
            probe.hits = 0

    def _reset_nmissed(self) -> None:
        for kprobe in self._registered():
            kprobe.nmissed = 0

    def _is_enabled(self) -> bool:
        found = self._registered()
        return bool(found) and not any(kprobe.is_disabled for kprobe in found)

    def _set_enabled(self, enabled: bool) -> None:
        for kprobe in self._registered():
            (self._kprobes.enable_kprobe if enabled else self._kprobes.disable_kprobe)(kprobe)

    def _is_optimized(self) -> bool:
        found = self._registered()
        return bool(found) and all(self._kprobes.table.is_patched(kprobe) for kprobe in found)

    def _set_optimized(self, wanted: bool) -> None:
        """Raises: KernelError EOPNOTSUPP (a probe can't be optimized)."""
        for kprobe in self._registered():
            self._kprobes.set_optimized(kprobe, wanted)

    def _asked(self) -> str:
        """What was written to `optimized` and still counts: 0 holds, 1 made djprobes; empty where nothing."""
        found = self._registered()
        heads = [self._kprobes.table.valid(kprobe) for kprobe in found]
        if any(isinstance(head, AggrKprobe) and head.is_held for head in heads):
            return "0"
        return "1" if any(kprobe.length for kprobe in found) else ""

    def _hooks(self) -> list[ReturnHook]:
        """Of return probes."""
        found = [rp.hook for rp in self._registered() if isinstance(rp, Kretprobe)]
        return [hook for hook in found if hook is not None]

    def _total(self, value: Callable[[ReturnHook], int]) -> str:
        return str(sum(map(value, self._hooks())))

    def _memory(self) -> str:
        """What the hooks have alone, and the arrays that all hooks share."""
        hooks = self._hooks()
        shared = {hook.stack: hook.stack.shared_memory for hook in hooks}
        return str(sum(hook.memory for hook in hooks) + sum(shared.values()))

    def _reason(self) -> str:
        """Empty for a probe that is in the best mode."""
        pending = "the place isn't there: it may be in a module"
        return self._lines(self._kprobes.reason) if self._registered() else pending

    def _address(self, kprobe: Kprobe) -> str:
        return f"0x{kprobe.address:x} {sprint_symbol(self._kernel.tracing.symbols, kprobe.address)}"

    def _bytes(self, kprobe: Kprobe) -> str:
        """The bytes that the probe may replace, original and as they stand in the text now."""
        if kprobe.is_gone:
            return _GONE
        detour = self._kprobes.detour(kprobe)
        if detour is not None:
            size = detour.length
        else:
            size = kprobe.insn.prepared.length if kprobe.insn is not None else self._arch.call_size
        original = self._text.original(kprobe.address, size)
        current = self._text.current(kprobe.address, size)
        return f"original {original.hex(' ')}\ncurrent  {current.hex(' ')}"

    def _detour(self, kprobe: Kprobe) -> str:
        """Disassembly of what runs out of line; an emulated instruction has no copy and is shown itself."""
        if kprobe.is_gone:
            return _GONE
        head = self._kprobes.table.valid(kprobe)
        if head is not None and head.compiled is not None:
            return self._disassembly(head.compiled.address, head.compiled.size)
        stub = None if head is None else head.stub
        handler = "" if stub is None else self._disassembly(stub.address, stub.size) + "\n"
        return handler + self._copy(kprobe)

    def _copy(self, kprobe: Kprobe) -> str:
        """What runs behind a handler that isn't in the same piece, or traps."""
        insn = kprobe.insn
        detour = self._kprobes.detour(kprobe)
        arch = self._arch
        if detour is not None and self._kprobes.table.runs_in_detour(kprobe):
            return self._disassembly(detour.address, detour.size)
        if insn is None:
            trampoline = self._kprobes.trampoline
            return "" if trampoline is None else self._disassembly(*trampoline)
        entry = insn.entry
        if insn.slot is None or entry is None:
            original = self._text.original(kprobe.address, insn.prepared.length)
            return "\n".join(("emulated, no slot", *arch.disassemble(original, kprobe.address)))
        end = arch.jump_size if insn.boosted else len(arch.breakpoint)
        return self._disassembly(entry, insn.slot - entry + insn.prepared.length + end)

    def _disassembly(self, va: int, size: int) -> str:
        return "\n".join(self._arch.disassemble(self._text.current(va, size), va))

    def _cost(self) -> str:
        pairs = [(probe, probe.handle) for probe in self._event.probes]
        return "\n".join(self._cost_of(probe, it) for probe, it in pairs if isinstance(it, EventProbe))

    def _cost_of(self, probe: TraceKprobe, kprobe: Kprobe) -> str:
        """Hits, and the ns of one: of the latest where Python sees its end, else measured beside it."""
        head = self._kprobes.table.valid(kprobe)
        if head is None or (head.compiled is None and head.stub is None):
            return kprobe.cost.text(probe.hits)
        traps = 0 if head.compiled is not None or head.stub is None else stub_traps(head, head.stub)
        if traps > 1:
            return f"{kprobe.cost.text(probe.hits)}, {traps} traps"
        way = (
            EntryKind.BREAKPOINT
            if head.compiled is None
            else EntryKind.CALL
            if head.is_ftrace
            else EntryKind.JUMP
        )
        costs = self._kernel.tracing.handler_costs
        cost = None if costs is None else costs.median_ns(probe, head, way)
        text = f"hits {probe.hits}" + ("" if cost is None else f" median {cost:.1f} ns")
        return f"{text}, 1 trap" if traps else f"{text} in guest code"


def _counter(value: Callable[[], int], reset: Callable[[], None]) -> File:
    def store(data: bytes) -> None:
        if kstrtoul(data) != 0:
            raise KernelError(errno.EINVAL, "a counter can be set to 0 alone")
        reset()

    return AttributeFile(_READ_WRITE, show=lambda: f"{value()}\n", store=store)


def _switch(value: Callable[[], bool], set_value: Callable[[bool], None]) -> File:
    return AttributeFile(
        _READ_WRITE, show=lambda: f"{value():d}\n", store=lambda data: set_value(switch(data))
    )


def _text(value: Callable[[], str]) -> File:
    """A text of whole lines; an empty one is an empty file."""
    return SeqFile(_READ_ONLY, single(lambda: f"{text}\n" if (text := value()) else ""))


def _addressed(value: Callable[[], str], owner: Owner) -> File:
    """A text with addresses in it, which are 0 for who may not know them, as in kallsyms."""

    def records_for(client: Client) -> Records:
        def show() -> str:
            text = value()
            if not owner.is_privileged(client):
                text = _ADDRESS.sub(lambda found: "0x" + "0" * len(found[1]), text)
            return f"{text}\n" if text else ""

        return single(show)

    return PerClientFile(_READ_ONLY, records_for)
