"""The directory kprobes/stats/: statistics and state of each kprobe event, which Linux does not show."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import ClassVar

from emulated_kernel.arch.program.ir_builder import EntryKind
from emulated_kernel.components.records import KernelComponents
from emulated_kernel.kprobes.hit.handling import stub_traps
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.probe_text import ProbeText
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHook
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.probes.handler_cost import MOST_TRAPS
from emulated_kernel.trace.probes.trace_kprobe import EventProbe, KprobeTraceEvent, TraceKprobe
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.vfs.core.attribute_file import AttributeFile
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.kstrtox import kstrtoul, switch
from emulated_kernel.vfs.core.node import Directory, DynamicDirectory, Node, Objects, Owner
from emulated_kernel.vfs.core.open_file import File
from emulated_kernel.vfs.core.past_requests import PastRequests
from emulated_kernel.vfs.core.seq_file import PerClientFile, Records, SeqFile, StreamFile, listing_of, single

_DIRECTORY = 0o755
_READ_WRITE = 0o644
_READ_ONLY = 0o444
_ADDRESS = lazy_pattern(r"0x([0-9a-f]{8,})")
"""Pattern for addresses in a text: hexadecimal numbers with at least eight digits."""


def stats_directory(kernel: KernelComponents, owner: Owner) -> Directory:
    """Return stats/ with a directory <group>/<event>/ for each kprobe event.

    Clients other than root and `owner` see 0 for addresses in the files of stats/.
    """
    events = kernel.tracing.kprobe_events
    registry = events.registry

    def find_group(name: str) -> Mapping[str, TraceEvent] | None:
        """Return all events of the group `name`, or None if the group has no kprobe event.

        The result is the same dictionary while the group exists.
        """
        members = registry.in_group(name)
        for event in members.values():
            if events.own(event) is not None:
                return members
        return None

    def group_directory(members: Mapping[str, TraceEvent]) -> Directory:
        def find(name: str) -> KprobeTraceEvent | None:
            return events.own(members.get(name))

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


class ProbeSwitches(NamedTuple):
    """An event's name, and the state of the switches in the event's directory of stats/."""

    event: str
    """The event as GROUP/EVENT."""
    is_enabled: bool
    """Whether the event's probes are registered and none of them is disabled."""
    asked: str
    """The "0" or "1" that was written to the file `optimized` and still applies, or ""; see _asked()."""
    can_change: bool
    """Whether the switches can be set: the probes are registered, and the probed code still exists."""


def probe_switches(kernel: KernelComponents) -> Iterator[ProbeSwitches]:
    """Yield the state of the switches of each kprobe event, sorted by the event's name."""
    table = kernel.engine.kprobes.table
    events = [(f"{event.group}/{event.name}", event) for event in kernel.tracing.kprobe_events.events()]
    events.sort(key=itemgetter(0))
    for name, event in events:
        found = _registered(event)
        can_change = bool(found) and not any(kprobe.is_gone for kprobe in found)
        yield ProbeSwitches(name, _is_enabled(found), _asked(table, found), can_change)


def probes_file(kernel: KernelComponents) -> SeqFile:
    """Return the file machine/probes, which has the state of each kprobe event as a line of JSON."""

    def show(probe: TraceKprobe) -> str:
        # Each read skips the records of earlier reads: faster in the list of probes than in events().
        event = probe.event
        if event.first_probe is not probe:
            return ""
        return f"{json.dumps(_EventStats(event, kernel).state())}\n"

    return SeqFile(0o400, listing_of(kernel.tracing.kprobe_events.probes, show))


class HistoryFile(StreamFile):
    """The file machine/history, with JSON lines about all kprobe events that were enabled.

    The first line is about the mount's past requests, and about all trace arrays and histograms, also removed
    ones. Linux has no such file.
    All reads of an open file use one iterator. Therefore, no event is missing if other events are removed
    between two reads.
    """

    is_unseen: ClassVar[bool] = True
    __slots__ = ()

    def __init__(self, kernel: KernelComponents, past: Callable[[], PastRequests] = PastRequests) -> None:
        """Create the file for `kernel`. `past`: function that returns the mount's record of past requests."""

        def lines() -> Iterator[str]:
            tracing = kernel.tracing
            history = tracing.kprobe_events.history
            first = {
                "recorded": tracing.arrays.has_recorded,
                "forgotten_hits": history.forgotten_hits,
                "hists": [*tracing.arrays.past_hists()],
                "has_forgotten_hists": tracing.arrays.has_forgotten_hists,
                "removed_errors": tracing.arrays.removed_errors,
                "used": sorted(past().used),
                "missing": past().missing,
                "refused": past().refused,
            }
            yield f"{json.dumps(first)}\n"
            yield from (f"{json.dumps(event)}\n" for event in history.events())

        super().__init__(0o400, lines)


def _registered(event: KprobeTraceEvent) -> list[EventProbe]:
    """Return the registered kprobes and kretprobes of an event.

    A probe whose module is not loaded is not registered.
    """
    return [probe.handle for probe in event.probes if probe.handle is not None]


def _is_enabled(found: Sequence[EventProbe]) -> bool:
    return bool(found) and not any(kprobe.is_disabled for kprobe in found)


def _asked(table: ProbeTable, found: Sequence[EventProbe]) -> str:
    """Return the last value written to the file `optimized` if it still applies, else "".

    `found`: the event's registered probes. "0": the address of one of the probes is kept unoptimized. "1": a
    probe has a `length`, which makes it a djprobe (see Kprobe.length).
    """
    for kprobe in found:
        head = table.valid(kprobe)
        if head is not None and head.is_held:
            return "0"
    return "1" if any(kprobe.length for kprobe in found) else ""


class _EventStats:
    """The files of a kprobe event in stats/.

    A file with a counter or a size shows the sum for all probes. `enabled` and `optimized` show 1 if all
    probes are enabled or optimized, else 0. `asked` has one value for the event. Each other file has a line
    for each probe.
    """

    def __init__(self, event: KprobeTraceEvent, kernel: KernelComponents) -> None:
        self._event = event
        self._kernel = kernel
        self._kprobes = kernel.engine.kprobes
        self._probe_text = ProbeText(kernel.engine.kprobes, kernel.arch, kernel.machine.text)

    def directory(self, owner: Owner) -> Directory:
        """Return the event's directory in stats/. Only root and `owner` see addresses."""
        files: dict[str, Node] = {
            "hits": _counter(self._hits, self._reset_hits),
            "nmissed": _counter(self._nmissed, self._reset_nmissed),
            "mode": _text(lambda: self._mode(self._registered())),
            "enabled": _switch(lambda: _is_enabled(self._registered()), self._set_enabled),
            "optimized": _switch(lambda: self._is_optimized(self._registered()), self._set_optimized),
            "asked": _text(lambda: self._asked(self._registered())),
            "reason": _addressed(lambda: self._reason(self._registered()), owner),
            "address": _addressed(lambda: self._lines(self._address), owner),
            "bytes": _addressed(lambda: self._lines(self._probe_text.replaced_text), owner),
            "detour": _addressed(lambda: self._lines(self._probe_text.out_of_line), owner),
            "cost": _text(self._cost),
        }
        if self._event.is_return:
            files["active"] = _text(lambda: self._total(lambda hook: hook.active))
            files["maxactive"] = _text(lambda: self._total(lambda hook: hook.nodes))
            files["high_water"] = _text(lambda: self._total(lambda hook: hook.high_water))
            files["memory"] = _text(self._memory)
        return Directory(_DIRECTORY, files)

    def state(self) -> Mapping[str, str | int | bool]:
        """Return a map for JSON: the event's name, and the values of some of the event's files.

        The value of the key `event` is GROUP/EVENT. All other keys are names of files in the event's
        directory.
        """
        found = self._registered()
        return {
            "event": f"{self._event.group}/{self._event.name}",
            "mode": self._mode(found),
            "asked": self._asked(found),
            "enabled": _is_enabled(found),
            "optimized": self._is_optimized(found),
            "hits": self._hits(),
            "nmissed": self._nmissed(),
            "reason": self._reason(found),
        }

    def _hits(self) -> int:
        return sum(probe.hits for probe in self._event.probes)

    def _nmissed(self) -> int:
        return sum(probe.nmissed for probe in self._event.probes)

    def _mode(self, found: Sequence[EventProbe]) -> str:
        return "\n".join([self._kprobes.mode(kprobe) for kprobe in found]) or "pending"

    def _registered(self) -> list[EventProbe]:
        return _registered(self._event)

    def _lines(self, text: Callable[[Kprobe], str]) -> str:
        return "\n".join(text(kprobe) for kprobe in self._registered())

    def _reset_hits(self) -> None:
        for probe in self._event.probes:
            probe.hits = 0

    def _reset_nmissed(self) -> None:
        for kprobe in self._registered():
            kprobe.nmissed = 0

    def _set_enabled(self, enabled: bool) -> None:
        for kprobe in self._registered():
            if enabled:
                self._kprobes.enable_kprobe(kprobe)
            else:
                self._kprobes.disable_kprobe(kprobe)

    def _is_optimized(self, found: Sequence[EventProbe]) -> bool:
        return bool(found) and all(self._kprobes.table.is_patched(kprobe) for kprobe in found)

    def _set_optimized(self, wanted: bool) -> None:
        """Optimize all probes of the event if `wanted` is True, otherwise unoptimize them.

        After a call with False, addresses that have a detour stay unoptimized until a call with True.

        Raises: the errors of Kprobes.set_optimized(); the probes before the failing one keep the change.
        """
        for kprobe in self._registered():
            self._kprobes.set_optimized(kprobe, wanted)

    def _asked(self, found: Sequence[EventProbe]) -> str:
        return _asked(self._kprobes.table, found)

    def _hooks(self) -> list[ReturnHook]:
        """Return the hooks of the event's return probes; the list is empty for other events."""
        found = [rp.hook for rp in self._registered() if isinstance(rp, Kretprobe)]
        return [hook for hook in found if hook is not None]

    def _total(self, value: Callable[[ReturnHook], int]) -> str:
        return str(sum(value(hook) for hook in self._hooks()))

    def _memory(self) -> str:
        """Return the size in bytes of the memory of the event's return hooks, as text.

        Arrays that several hooks share are counted once.
        """
        hooks = self._hooks()
        shared = {hook.stack: hook.stack.shared_memory for hook in hooks}
        return str(sum(hook.memory for hook in hooks) + sum(shared.values()))

    def _reason(self, found: Sequence[EventProbe]) -> str:
        """Return a line for each probe: why the probe is not in a better mode, such as optimized.

        The line is empty if there is no better mode. If no probe is registered, return one line that says
        why.
        """
        if not found:
            return "the place isn't there: it may be in a module"
        return "\n".join([self._kprobes.reason(kprobe) for kprobe in found])

    def _address(self, kprobe: Kprobe) -> str:
        return f"0x{kprobe.address:x} {sprint_symbol(self._kernel.tracing.symbols, kprobe.address)}"

    def _cost(self) -> str:
        pairs = [(probe, probe.handle) for probe in self._event.probes]
        return "\n".join(self._cost_of(probe, it) for probe, it in pairs if isinstance(it, EventProbe))

    def _cost_of(self, probe: TraceKprobe, kprobe: Kprobe) -> str:
        """Return a line with the number of a probe's hits, and the median cost of a hit.

        If guest code handles the hits, the cost is measured with a copy of the handler (HandlerCosts). The
        line for a disabled probe, for a probe without hits, or for a probe whose next hit compiles its
        handlers, has no cost.
        """
        head = self._kprobes.table.valid(kprobe)
        if head is None or kprobe.is_disabled or not probe.hits:
            return f"hits {probe.hits}"
        in_python = head.cost
        compiled = head.compiled
        stub = head.entered_stub
        if compiled is None and stub is None:
            if self._kprobes.routes.next_hit_compiles(head):
                return f"hits {probe.hits}"
            return in_python.text(probe.hits)
        traps = 0
        if compiled is None and stub is not None:
            traps = stub_traps(head, stub)
            if self._kprobes.hits.ends_in_python(head, stub):
                return f"{in_python.text(probe.hits)}, {traps} traps"
        if compiled is None:
            entry = EntryKind.BREAKPOINT
        elif head.is_ftrace:
            entry = EntryKind.CALL
        else:
            entry = EntryKind.JUMP
        costs = None if traps > MOST_TRAPS else self._kernel.tracing.handler_costs
        cost = None if costs is None else costs.median_ns(probe, head, entry, steps=traps > 1)
        text = f"hits {probe.hits}" + ("" if cost is None else f" median {cost:.1f} ns")
        return f"{text}, {traps} trap{'s' * (traps > 1)}" if traps else f"{text} in guest code"


def _counter(value: Callable[[], int], reset: Callable[[], None]) -> File:
    def store(data: bytes) -> None:
        number = kstrtoul(data)
        if number:
            raise KernelError(errno.EINVAL, f"{number}: a counter can only be set to 0")
        reset()

    return AttributeFile(_READ_WRITE, show=lambda: f"{value()}\n", store=store)


def _switch(value: Callable[[], bool], set_value: Callable[[bool], None]) -> File:
    return AttributeFile(
        _READ_WRITE, show=lambda: f"{value():d}\n", store=lambda data: set_value(switch(data))
    )


def _text(value: Callable[[], str]) -> File:
    """Return a file that shows the text from `value()` and a newline, or nothing if the text is empty."""
    return SeqFile(_READ_ONLY, single(lambda: f"{text}\n" if (text := value()) else ""))


def _addressed(value: Callable[[], str], owner: Owner) -> File:
    """Return a file that shows the text from `value()`, in which only root and `owner` see addresses.

    Other clients see 0 in place of addresses.
    """

    def records_for(client: Client) -> Records:
        def show() -> str:
            text = value()
            if not owner.is_privileged(client):
                text = _ADDRESS.sub(lambda found: "0x" + "0" * len(found[1]), text)
            return f"{text}\n" if text else ""

        return single(show)

    return PerClientFile(_READ_ONLY, records_for)
