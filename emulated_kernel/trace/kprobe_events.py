"""The kprobe_events and kprobe_profile files: kprobe events made, shown, enabled and removed by commands."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import argv_split, to_text
from emulated_kernel.trace.definition import ProbeDefinition, Surroundings, parse_definition
from emulated_kernel.trace.dynamic_events import DynamicEvents, discard, run_commands
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import EventRegistry, KprobeTraceEvent
from emulated_kernel.trace.fetchargs import first_difference
from emulated_kernel.trace.filter import EventFilters
from emulated_kernel.trace.guest import GuestPlaces
from emulated_kernel.trace.ports import ProbeBackend, Recorder, TraceArch, TraceSymbols
from emulated_kernel.trace.probe_errors import CommandLog, ProbeError
from emulated_kernel.trace.trace_kprobe import TraceKprobe

_MODULE_MAY_COME = (
    "trace_kprobe: This probe might be able to register after target module is loaded. Continue."
)


class KprobeEvents:
    """All kprobe events of a kernel.

    `recorder` is the top trace array, `clock` gives ns for error_log. The last four are shared with
    other kinds of events; each is made anew where it isn't given. Callers serialize: Linux holds event_mutex.
    Mirrors: kernel/trace/trace_kprobe.c (v6.1).
    """

    probe_class: ClassVar[type[TraceKprobe]] = TraceKprobe
    log_name: ClassVar[str] = "trace_kprobe"
    """What its errors begin with."""

    def __init__(
        self,
        arch: TraceArch,
        symbols: TraceSymbols,
        backend: ProbeBackend,
        recorder: Recorder,
        clock: Callable[[], int],
        *,
        error_log: ErrorLog | None = None,
        registry: EventRegistry | None = None,
        dynamic_events: DynamicEvents | None = None,
        printk: Callable[[str], None] = discard,
        guest: GuestPlaces | None = None,
    ) -> None:
        """With `guest`, hits are handled by guest code as far as that can be."""
        self._around = Surroundings(arch, symbols, backend, guest)
        self._recorder = recorder
        self.printk = printk
        self.error_log = ErrorLog(clock) if error_log is None else error_log
        self.registry = EventRegistry() if registry is None else registry
        self.dynamic_events = DynamicEvents(printk) if dynamic_events is None else dynamic_events
        self.dynamic_events.register_kind(self.create)
        self._probes: dict[TraceKprobe, None] = {}
        """Those of them that stand on the list of dynamic events, in its order."""
        self.filters = EventFilters(recorder, self.error_log)
        """Those of the top trace array."""

    # The files

    def write(self, data: bytes) -> int:
        """One write(2) to kprobe_events; returns the bytes taken: all of them.

        Raises: KernelError; lines before the one that failed stay done.
        """
        return run_commands(data, self._execute, self.printk)

    def records(self, start: int = 0) -> Iterator[str]:
        """The lines of kprobe_events, from one on."""
        return (probe.show() for probe in islice(self._probes, start, None))

    def show(self) -> str:
        """The text of kprobe_events."""
        return "".join(self.records())

    def profile_records(self, start: int = 0) -> Iterator[str]:
        """The lines of kprobe_profile, from one on."""
        return (probe.profile() for probe in islice(self._probes, start, None))

    def profile(self) -> str:
        """The text of kprobe_profile: event, hits, missed hits."""
        return "".join(self.profile_records())

    def clear(self) -> None:
        """Remove all kprobe events, as opening with O_TRUNC does. Raises: KernelError EBUSY."""
        self.dynamic_events.release_all(self.probes())

    # Events and probes

    def probes(self) -> list[TraceKprobe]:
        """All probes, in order of their making."""
        return list(self._probes)

    def events(self) -> list[KprobeTraceEvent]:
        """All events, in order of their making."""
        return list(dict.fromkeys(probe.event for probe in self.probes()))

    def find(self, group: str, name: str) -> KprobeTraceEvent | None:
        """The kprobe event of that name."""
        event = self.registry.find(group, name)
        if not isinstance(event, KprobeTraceEvent):
            return None
        return event if all(type(probe) is self.probe_class for probe in event.probes) else None

    # Commands

    def _execute(self, command: str) -> None:
        if command.startswith("-"):
            self.dynamic_events.release_matching(command, self.probes())
        elif not self.create(command):
            raise KernelError(errno.EINVAL, "not a kprobe event's command")

    def create(self, command: str) -> bool:
        """Make a probe from a command without its newline; False where the command isn't one for kprobes.

        Raises: KernelError; if the cause is in the command, it stands in error_log.
        """
        argv = argv_split(command)
        if not argv:
            return True
        log = CommandLog(self.error_log, self.log_name, argv)
        definition = self._parse(argv, log)
        if definition is None:
            return False
        try:
            self._register(definition, log)
        except KernelError as failure:
            self._log_failure(failure, log)
            raise
        return True

    def _parse(self, argv: Sequence[str], log: CommandLog) -> ProbeDefinition | None:
        return parse_definition(argv, self._around, log)

    @staticmethod
    def _log_failure(failure: KernelError, log: CommandLog) -> None:
        log.index = 1
        match failure.errno:
            case errno.EILSEQ:
                log.error(0, ProbeError.BAD_INSN_BNDRY)
            case errno.ENOENT:
                log.error(0, ProbeError.BAD_PROBE_ADDR)
            case errno.ENOMEM | errno.EEXIST:
                pass
            case _:
                log.error(0, ProbeError.FAIL_REG_PROBE)

    def _register(self, definition: ProbeDefinition, log: CommandLog) -> None:
        """Mirrors: kernel/trace/trace_kprobe.c:register_trace_kprobe (v6.1)."""
        old = self.find(to_text(definition.group), to_text(definition.event))
        if old is not None:
            probe = self._probe(definition, old)
            self._check_append(probe, old, log)
            self._insert(probe)
            return
        event = self._new_event(definition)
        log.index = 0
        try:
            self.registry.add(event)
        except KernelError as failure:
            if failure.errno == errno.EEXIST:
                log.error(0, ProbeError.EVENT_EXIST)
            raise
        try:
            self._insert(self._probe(definition, event))
        except KernelError:
            self.registry.remove(event)
            raise

    def _new_event(self, definition: ProbeDefinition) -> KprobeTraceEvent:
        return KprobeTraceEvent(
            to_text(definition.group),
            to_text(definition.event),
            definition.place.is_return,
            definition.args,
            self._around.arch.word_size,
        )

    def _probe(self, definition: ProbeDefinition, event: KprobeTraceEvent) -> TraceKprobe:
        return self.probe_class(definition, event, self._around, self)

    @staticmethod
    def _check_append(probe: TraceKprobe, event: KprobeTraceEvent, log: CommandLog) -> None:
        """Whether `probe` may be one more of an event. Mirrors: append_trace_kprobe (v6.1)."""
        log.index = 0
        if probe.is_return != event.is_return:
            raise log.error(0, ProbeError.DIFF_PROBE_TYPE, errno.EEXIST)
        different = first_difference(probe.args, event.args)
        if different is not None:
            log.index = different + 2
            raise log.error(0, ProbeError.DIFF_ARG_TYPE, errno.EEXIST)
        if any(probe.is_same_as(other) for other in event.probes):
            raise log.error(0, ProbeError.SAME_PROBE, errno.EEXIST)

    def _insert(self, probe: TraceKprobe) -> None:
        """Register the probe and put it on the lists; one whose module may come stays pending."""
        try:
            probe.register()
        except KernelError as failure:
            if failure.errno != errno.ENOENT or not probe.awaits_module():
                raise
            self.printk(_MODULE_MAY_COME)
        probe.event.probes += (probe,)
        self.dynamic_events.events.append(probe)
        self._probes[probe] = None

    def remove(self, probe: TraceKprobe) -> None:
        """Remove a probe, and its event with the last one.

        Raises: KernelError EBUSY, only for the last one of an event that is enabled or referred to.
        Mirrors: kernel/trace/trace_kprobe.c:unregister_trace_kprobe (v6.1).
        """
        event = probe.event
        is_last = event.probes == (probe,)
        if is_last and (event.is_enabled or event.references):
            raise KernelError(errno.EBUSY, f"{event.group}/{event.name} is in use")
        probe.unregister()
        event.probes = tuple(each for each in event.probes if each is not probe)
        self.dynamic_events.events.remove(probe)
        del self._probes[probe]
        if is_last:
            self.registry.remove(event)
            for recorder in event.seen_by:
                recorder.event_removed(event)

    def module_coming(self, module: str) -> None:
        """Register the probes that were given as `module:...`, again if they had been.

        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_module_callback (v6.1).
        """
        for probe in self.probes():
            if not probe.is_in_module(module):
                continue
            probe.unregister()
            try:
                probe.register()
            except KernelError as failure:
                event = probe.event.name
                code = -(failure.errno or 0)
                self.printk(f"trace_kprobe: Failed to re-register probe {event} on {module}: {code}")

    # Enabling

    def enable(self, event: KprobeTraceEvent, recorder: Recorder | None = None) -> None:
        """Record its hits in `recorder`, by default the top trace array. Raises: as TraceEvent.enable."""
        event.enable(self._recorder if recorder is None else recorder)

    def disable(self, event: KprobeTraceEvent, recorder: Recorder | None = None) -> None:
        """Stop recording in `recorder`. Raises: as TraceEvent.disable."""
        event.disable(self._recorder if recorder is None else recorder)
