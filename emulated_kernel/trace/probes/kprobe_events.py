"""KprobeEvents: create, show and remove kprobe events, for the files kprobe_events and kprobe_profile."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.probes.definition import ProbeDefinition, ProbedSymbols, locate, parse_definition
from emulated_kernel.trace.probes.dynamic_events import EventCommands
from emulated_kernel.trace.probes.probe_history import ProbeHistory, filter_texts
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent, ProbeEngine, TraceKprobe
from emulated_kernel.trace.probes.trace_probe import ProbeKind, ProbeTraceEvent
from emulated_kernel.trace.text.chars import argv_split
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError

_MODULE_MAY_COME = (
    "trace_kprobe: This probe might be able to register after target module is loaded. Continue."
)


class KprobeEvents(ProbeKind[TraceKprobe]):
    """All events of one kind whose probes are TraceKprobes.

    They are the kprobe events of a kernel, or in the subclass FprobeEvents its fprobe and tracepoint events.
    Mirrors: kernel/trace/trace_kprobe.c (v6.1).
    """

    probe_class: ClassVar[type[TraceKprobe]] = TraceKprobe
    log_name: ClassVar[str] = "trace_kprobe"
    """Name by which entries of error_log refer to this kind of events."""

    def __init__(self, engine: ProbeEngine, commands: EventCommands) -> None:
        super().__init__(commands)
        self._engine = engine
        self._symbols = ProbedSymbols(
            engine.arch, engine.symbols, self.interface, engine.types, engine.is_entry
        )
        self._letters = "prj" if engine.has_jprobes else "pr"
        """First letters of the commands that define events of this kind."""
        self.history = ProbeHistory()

    def note_switched(self, event: ProbeTraceEvent) -> None:
        assert isinstance(event, KprobeTraceEvent)
        self.history.note([event])

    def remove(self, probe: TraceKprobe) -> None:
        event = probe.event
        filters = filter_texts(event)
        missed = probe.nmissed
        super().remove(probe)
        self.history.removed(probe, event, filters, missed)

    def profile_records(self, start: int = 0) -> Iterator[str]:
        """Return the lines of kprobe_profile from line `start` on, counted from 0.

        A line has the event, the number of hits and the number of missed hits.
        """
        return (probe.profile() for probe in islice(self._own, start, None))

    def events(self) -> list[KprobeTraceEvent]:
        """Return all events of this kind, in the order in which their oldest probes were created."""
        return list(dict.fromkeys(probe.event for probe in self._own))

    def find(self, group: str, name: str) -> KprobeTraceEvent | None:
        """Return the event of this kind called `name` in `group`, or None if no such event exists."""
        return self.own(self.registry.find(group, name))

    def own(self, event: TraceEvent | None) -> KprobeTraceEvent | None:
        """Return `event` if it is a KprobeTraceEvent with probes of this kind or without probes; else None.

        Events of FprobeEvents, a subclass, are KprobeTraceEvents too. An event without probes has no kind.
        """
        if not isinstance(event, KprobeTraceEvent):
            return None
        kind = event.kind
        return event if kind is self or kind is None else None

    def create(self, command: str) -> bool:
        """Create a probe from a command for this kind of event, such as `p` or `r`; see EventKind.create().

        For an empty command, do nothing and return True.
        """
        argv = argv_split(command)
        if not argv:
            return True
        log = TraceProbeLog(self.error_log, self.log_name, argv)
        definition = self._parse(argv, log)
        if definition is None:
            return False
        try:
            self._register(self._probe(definition), log)
        except KernelError as failure:
            self._log_failure(failure, log)
            self._refuse(failure)
            raise
        return True

    def _probe(self, definition: ProbeDefinition) -> TraceKprobe:
        """Return a new probe for `definition`."""
        return self.probe_class(self, definition, self._engine)

    def _refuse(self, failure: KernelError) -> None:
        """Raise another error in place of `failure` if Linux reports another one. By default, do nothing.

        `failure`: the error of registering the command's probe. If this method returns, the caller raises
        `failure`.
        """

    def _parse(self, argv: Sequence[str], log: TraceProbeLog) -> ProbeDefinition | None:
        return parse_definition(argv, self._symbols, log, self._letters)

    @staticmethod
    def _log_failure(failure: KernelError, log: TraceProbeLog) -> None:
        log.index = 1
        match failure.errno:
            case errno.EILSEQ:
                log.error(0, ProbeError.BAD_INSN_BNDRY)
            case errno.ENOENT:
                log.error(0, ProbeError.BAD_PROBE_ADDR)
            case errno.ENOMEM | errno.EEXIST | errno.ENOSPC:
                pass
            case _:
                log.error(0, ProbeError.FAIL_REG_PROBE)

    def _insert(self, probe: TraceKprobe) -> None:
        """Register a probe, and add it to its event and to the list of dynamic events.

        If registering fails with ENOENT, but the place may exist after a module is loaded, add the probe
        nevertheless.
        """
        try:
            probe.register()
        except KernelError as failure:
            if failure.errno != errno.ENOENT or not probe.awaits_module():
                raise
            self.printk(_MODULE_MAY_COME)
        super()._insert(probe)

    def module_coming(self, module: str) -> None:
        """Register the probes with places `MODULE:...` in a module that is being loaded.

        Probes that are still registered from an earlier load of the module are unregistered first.
        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_module_callback (v6.1).
        """
        registered = {}
        for probe in self.probes():
            if not probe.is_in_module(module):
                continue
            probe.unregister()
            probe.found = locate(probe.place, self._engine.symbols)
            try:
                probe.register()
                registered[probe.event] = True
            except KernelError as failure:
                event = probe.event.name
                code = -failure.errno
                self.printk(f"trace_kprobe: Failed to re-register probe {event} on {module}: {code}")
        self.history.note(registered)
