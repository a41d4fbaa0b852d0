"""All trace arrays of a kernel: the top one, and instances that come and go."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.array_events import ArrayEvents
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import EventRegistry
from emulated_kernel.trace.filter import EventFilters
from emulated_kernel.trace.function_tracer import FunctionTracer
from emulated_kernel.trace.options import INHERITED_OPTIONS, TraceOption
from emulated_kernel.trace.ports import Recorder
from emulated_kernel.trace.trace_array import FUNCTION_TRACER, TraceArray, TraceSystem
from emulated_kernel.trace.trigger import EventTriggers


@dataclass(frozen=True, eq=False)
class Tracing:
    """A trace array with all that belongs to it."""

    array: TraceArray
    recorder: Recorder
    events: ArrayEvents
    filters: EventFilters
    triggers: EventTriggers
    errors: ErrorLog
    functions: FunctionTracer


class ArrayParts(Protocol):
    """What a trace array needs of the layers around, made for each."""

    def recorder(self, array: TraceArray, /) -> Recorder:
        """What writes its entries."""

    def triggers(
        self, array: TraceArray, recorder: Recorder, registry: EventRegistry, errors: ErrorLog, /
    ) -> EventTriggers:
        """The triggers of its events."""

    def functions(self, array: TraceArray, recorder: Recorder, registry: EventRegistry, /) -> FunctionTracer:
        """The tracer of its functions."""

    def is_held(self, recorder: Recorder, /) -> bool:
        """Whether something beside open files keeps the trace array from being removed."""


class TraceArrays:
    """Callers serialise: Linux holds event_mutex and trace_types_lock.

    `clock` gives the ns of error logs.
    Mirrors: kernel/trace/trace.c:ftrace_trace_arrays (v6.1).
    """

    def __init__(
        self,
        system: TraceSystem,
        registry: EventRegistry,
        parts: ArrayParts,
        clock: Callable[[], int],
    ) -> None:
        self._system = system
        self._registry = registry
        self._parts = parts
        self._clock = clock
        self._instances: dict[str, Tracing] = {}
        top = TraceArray(system)
        self._expand = top.expand
        """Linux: an event enabled anywhere makes the top array's buffers grow, and no others."""
        self.top = self._tracing(top)

    def _tracing(self, array: TraceArray) -> Tracing:
        recorder, errors = self._parts.recorder(array), ErrorLog(self._clock)
        functions = self._parts.functions(array, recorder, self._registry)
        array.tracer_kinds[FUNCTION_TRACER] = functions
        return Tracing(
            array,
            recorder,
            ArrayEvents(self._registry, recorder, self._expand),
            EventFilters(recorder, errors),
            self._parts.triggers(array, recorder, self._registry, errors),
            errors,
            functions,
        )

    def __iter__(self) -> Iterator[Tracing]:
        yield self.top
        yield from self._instances.values()

    def names(self) -> Collection[str]:
        """Names of the instances."""
        return self._instances.keys()

    def find(self, name: str) -> Tracing | None:
        """The instance of that name."""
        return self._instances.get(name)

    def make(self, name: str) -> Tracing:
        """A new instance, with buffers of full size and the top array's options.

        Raises: KernelError EEXIST, ENOMEM. Mirrors: kernel/trace/trace.c:trace_array_create (v6.1).
        """
        if name in self._instances:
            raise KernelError(errno.EEXIST, f"instance {name} exists")
        try:
            array = TraceArray(self._system, expanded=True)
        except MemoryError as error:
            raise KernelError(errno.ENOMEM, str(error)) from error
        array.take_over(self.top.array.options.flags & INHERITED_OPTIONS)
        self._instances[name] = tracing = self._tracing(array)
        return tracing

    def remove(self, name: str) -> None:
        """Remove an instance that nobody uses.

        Raises: KernelError ENODEV (there is none), EBUSY.
        Mirrors: kernel/trace/trace.c:__remove_instance (v6.1).
        """
        tracing = self._instances.get(name)
        if tracing is None:
            raise KernelError(errno.ENODEV, f"no instance {name}")
        if self._parts.is_held(tracing.recorder):
            raise KernelError(errno.EBUSY, f"a histogram of {name} has variables")
        del self._instances[name]
        tracing.functions.remove()
        tracing.triggers.clear()
        tracing.events.forget()
        tracing.array.release()

    def follow_fork(self, parent: int, child: int) -> None:
        """A task was forked: option event-fork lets it be traced as its parent is."""
        for tracing in self:
            if TraceOption.EVENT_FORK in tracing.array.options.flags:
                tracing.array.pids.follow(parent, child)
            if TraceOption.FUNC_FORK in tracing.array.options.flags:
                tracing.functions.pids.follow(parent, child)

    def forget_task(self, pid: int) -> None:
        """A task has ended: with option event-fork its pid isn't traced any more."""
        for tracing in self:
            if TraceOption.EVENT_FORK in tracing.array.options.flags:
                tracing.array.pids.forget(pid)
            if TraceOption.FUNC_FORK in tracing.array.options.flags:
                tracing.functions.pids.forget(pid)
