"""TraceArrays: all trace arrays of a kernel, which are the top array and the instances that users create."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator

from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.trace.array.array_rings import DEFAULT_BUFFER_SIZE
from emulated_kernel.trace.array.services import FUNCTION_TRACER, TracingServices
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.array_events import ArrayEvents
from emulated_kernel.trace.events.event_filters import EventFilters
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.hist.services import PastHist, holders_of, past_hist
from emulated_kernel.trace.hist.trigger import HistCommand
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.output.options import INHERITED_OPTIONS, TraceOption
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, MIN_PAGES, memory_size, pages_for
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.trace.tracers.call_sites import CallRecorder, KernelFunctions
from emulated_kernel.trace.tracers.function_probes import FunctionProbes
from emulated_kernel.trace.tracers.function_tracer import FunctionPids, FunctionTracer
from emulated_kernel.trace.trigger.commands import PLAIN_COMMANDS
from emulated_kernel.trace.trigger.triggers import EventTriggers
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget

MAX_REMOVED = 100
"""Maximum number of removed instances whose last errors are kept."""


@dataclass(frozen=True, eq=False)
class Tracing:
    """A trace array with its events, filters, triggers, errors and function tracer."""

    array: TraceArray
    events: ArrayEvents
    filters: EventFilters
    triggers: EventTriggers
    errors: ErrorLog
    functions: FunctionTracer


class TraceArrays(TaskObserver):
    """All trace arrays of a kernel.

    Callers hold the control lock, in the place of Linux's event_mutex and trace_types_lock. The constructor's
    `clock` returns the time in nanoseconds for error_log.
    Mirrors: kernel/trace/trace.c:ftrace_trace_arrays (v6.1).
    """

    def __init__(
        self,
        system: TracingServices,
        hists: HistCommand,
        functions: KernelFunctions,
        clock: Callable[[], int],
        lock: ControlLock,
        limits: Limits,
    ) -> None:
        self._system = system
        self._limits = limits
        self._hists = hists
        self._functions = functions
        self._clock = clock
        self._lock = lock
        self._instances: dict[str, Tracing] = {}
        self._has_recorded = False
        """Whether a record was ever written to an instance that has been removed."""
        self.removed_errors: dict[str, str] = {}
        """Name of a removed instance -> the last entry of the instance's error_log; Linux keeps none."""
        self._unlimited: set[str] = set()
        """Names of instances that no user has created; they do not count towards the limit on instances."""
        self.top = self._tracing(TraceArray(system), None)
        self._printk_dest = [self.top.array.options]
        self.top.array.options.printk_dest = self._printk_dest
        if InterfaceRule.OPTION_COPY_MARKER in system.interface:
            self.top.array.marker_targets = self._marker_targets

    def _marker_targets(self) -> list[TraceArray]:
        """Return the trace arrays that record the markers written to the top trace array's files."""
        arrays = [tracing.array for tracing in self]
        return [array for array in arrays if TraceOption.COPY_MARKER in array.options.flags]

    def _tracing(self, array: TraceArray, top: TraceArray | None) -> Tracing:
        system = self._system
        errors = ErrorLog(self._clock, system.interface.texts)
        pids = EventPids(array.rewire_tracer, FunctionPids, system.filter_words.memory)
        registry = system.events
        probes = FunctionProbes(self._functions, array, registry, top or array)
        functions = FunctionTracer(
            self._functions, probes, pids, CallRecorder(array, pids), system.tracer_options.is_on
        )
        if self._functions.has_sites:
            array.register_tracer(FUNCTION_TRACER, functions)
        # Linux: before 6.8, enabling an event in any trace array expands only the top array's buffers.
        expands_alone = InterfaceRule.ARRAYS_EXPANDED_ALONE in system.interface
        expanded = array if top is None or expands_alone else top
        commands = (*PLAIN_COMMANDS, self._hists)
        return Tracing(
            array,
            ArrayEvents(
                registry,
                array,
                expanded.expand,
                system.symbols.has_module if InterfaceRule.EVENT_MODULES in system.interface else None,
            ),
            EventFilters(array, errors, system.filter_words),
            EventTriggers(array, registry, errors, system.symbols, commands, system.filter_words),
            errors,
            functions,
        )

    def __iter__(self) -> Iterator[Tracing]:
        yield self.top
        yield from self._instances.values()

    def module_added(self, module: str) -> None:
        """Enable those events of the new module `module` that a set_event file has selected in advance."""
        for tracing in self:
            tracing.events.module_added(module)

    def names(self) -> Collection[str]:
        """Return the names of the instances."""
        return self._instances.keys()

    def find(self, name: str) -> Tracing | None:
        """Return the instance called `name`, or None if there is no such instance."""
        return self._instances.get(name)

    def past_hists(self) -> Iterator[PastHist]:
        """Yield a PastHist for each histogram that was removed or cleared, and then for each existing one."""
        yield from self._hists.system.removed
        for tracing in self:
            files = [event.files.get(tracing.array) for event in self._system.events]
            yield from (past_hist(holder) for file in files if file for holder in holders_of(file))

    @property
    def has_forgotten_hists(self) -> bool:
        """Whether past_hists() omits a removed histogram, because too many were removed."""
        return self._hists.system.removed.has_forgotten

    @property
    def has_recorded(self) -> bool:
        """Whether a record was ever written to a trace array, even if the record or the array was removed."""
        return self._has_recorded or any(tracing.array.has_recorded for tracing in self)

    @property
    def limited(self) -> int:
        """Number of instances that count towards Limit.INSTANCES."""
        return len(self._instances) - len(self._unlimited)

    def make(self, name: str, *, is_limited: bool = True) -> Tracing:
        """Create an instance with buffers of full size and the top array's options.

        `is_limited`: whether the instance counts towards the limit on instances.
        Raises: KernelError EEXIST (the instance exists), ENOMEM (no memory for the buffers), ENOSPC (a limit
        is reached, and `is_limited` is set).
        Mirrors: kernel/trace/trace.c:trace_array_create (v6.1).
        """
        self._lock.assert_held()
        if name in self._instances:
            raise KernelError(errno.EEXIST, f"instances/{name}: it exists already; choose another name")
        if is_limited:
            self._limits.check(Limit.INSTANCES, self.limited)
        array = TraceArray(self._system, name, expanded=True)
        array.take_over(self.top.array.options.flags & INHERITED_OPTIONS)
        array.options.printk_dest = self._printk_dest
        tracing = self._tracing(array, self.top.array)
        self._instances[name] = tracing
        if not is_limited:
            self._unlimited.add(name)
        return tracing

    @property
    def hist_memory(self) -> MemoryBudget:
        """The memory budget that all histograms of the kernel share."""
        return self._hists.system.memory

    @property
    def record_memory(self) -> MemoryBudget:
        """The memory budget that all ring buffers and snapshots share."""
        return self._system.memory.budget

    def instance_memory(self) -> tuple[int, int]:
        """Return the sizes in bytes of the memory that a new instance allocates, as (pages, per-CPU memory).

        The first size is that of all CPUs' pages together. The second size is that of one CPU's per-CPU
        memory.
        """
        sizes = [memory_size(pages_for(DEFAULT_BUFFER_SIZE)), memory_size(MIN_PAGES)]
        return self._system.cpus * sum(sizes), len(sizes) * CONTROL_SIZE

    def remove(self, name: str) -> None:
        """Remove an instance, and free its buffers.

        Raises: KernelError ENODEV (there is no such instance), EBUSY (one of the instance's histograms has
        variables).
        Mirrors: kernel/trace/trace.c:__remove_instance (v6.1).
        """
        self._lock.assert_held()
        tracing = self._instances.get(name)
        if tracing is None:
            raise KernelError(errno.ENODEV, f"instances/{name}: no such instance")
        # Mirrors: kernel/trace/trace_events_hist.c:save_hist_vars (v6.1), which takes a reference to the
        # instance.
        if self._hists.system.with_variables(tracing.array):
            raise KernelError(errno.EBUSY, f"instances/{name}: a histogram has variables; remove its trigger")
        tracing.array.options.leave_printk()
        del self._instances[name]
        self._unlimited.discard(name)
        self._has_recorded = self._has_recorded or tracing.array.has_recorded
        if errors := tracing.errors.records():
            self.removed_errors.pop(name, None)
            self.removed_errors[name] = errors[-1]
            if len(self.removed_errors) > MAX_REMOVED:
                del self.removed_errors[next(iter(self.removed_errors))]
        tracing.functions.remove()
        tracing.triggers.clear()
        tracing.events.forget()
        tracing.array.release()

    def take_records(self, former: TraceArrays) -> None:
        """Move the records of another kernel's trace arrays to the arrays of the same names in this kernel.

        `former`: the trace arrays of the kernel that this kernel has replaced.
        The saved names of tasks (saved_cmdlines) are moved too.

        Raises: KernelError ENOMEM (no memory for the buffers; no record was moved).
        """
        pairs = [(self.top.array, former.top.array)]
        for name, tracing in self._instances.items():
            if (found := former.find(name)) is not None:
                pairs.append((tracing.array, found.array))
        pasts = [theirs.past() for _, theirs in pairs]
        memories = [mine.memory_for(past) for (mine, _), past in zip(pairs, pasts, strict=True)]
        self._system.cmdlines.take_over(former._system.cmdlines)
        self._system.is_expanded |= former._system.is_expanded
        for (mine, _), past, memory in zip(pairs, pasts, memories, strict=True):
            mine.take_records(past, memory)
            mine.mark_reboot()

    # Events of the guest's tasks

    def call_ended(self) -> None:
        """Wake waiting readers if guest code has written records; see TaskObserver.call_ended()."""
        if self.top.array.listeners:
            self.top.array.notify_of_guest()
        for tracing in self._instances.values():
            tracing.array.notify_of_guest()

    def forked(self, parent: int, child: int) -> None:
        """Add a new task to the lists of pids that contain its parent; see TaskObserver.forked().

        In each trace array, the lists for events change only if option event-fork is on. The lists of the
        function tracer change only if option function-fork is on.
        """
        for pids in self._inherited_pids():
            pids.follow(parent, child)

    def exited(self, pid: int) -> None:
        """Remove the pid of an ended task from the lists of pids; see TaskObserver.exited().

        In each trace array, the lists for events change only if option event-fork is on. The lists of the
        function tracer change only if option function-fork is on.
        """
        for pids in self._inherited_pids():
            pids.forget(pid)

    def _inherited_pids(self) -> Iterator[EventPids]:
        for tracing in self:
            if TraceOption.EVENT_FORK in tracing.array.options.flags:
                yield tracing.array.pids
            if TraceOption.FUNC_FORK in tracing.array.options.flags:
                yield tracing.functions.pids
