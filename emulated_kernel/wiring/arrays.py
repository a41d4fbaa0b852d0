"""What each trace array is given of the layers below: a recorder of hits, and triggers."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.arch.base import Arch
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import EventRegistry
from emulated_kernel.trace.event_pids import EventPids
from emulated_kernel.trace.function_probes import FunctionProbes
from emulated_kernel.trace.function_tracer import FunctionTracer
from emulated_kernel.trace.hist.system import HistSystem
from emulated_kernel.trace.hist.trigger import HistCommand
from emulated_kernel.trace.ports import ProbeHit, Recorder, TraceSymbols
from emulated_kernel.trace.print_event import FTRACE_SYSTEM, PrintEvent
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trigger import EventTriggers
from emulated_kernel.trace.trigger_commands import plain_commands
from emulated_kernel.wiring.arch import THREAD_SIZE
from emulated_kernel.wiring.call_stack import CallStack, StackMemory
from emulated_kernel.wiring.functions import CallRecorder, KernelFunctions
from emulated_kernel.wiring.probes import HitRecorder, Tasks
from emulated_kernel.wiring.triggers import ArrayControl


class KernelArrayParts:
    """Implements trace.trace_arrays.ArrayParts."""

    def __init__(
        self,
        make_recorder: Callable[[TraceArray], HitRecorder],
        memory: StackMemory,
        symbols: TraceSymbols,
        arch: Arch,
        hists: HistSystem,
        functions: KernelFunctions,
        tasks: Tasks,
        here: Callable[[], ProbeHit],
    ) -> None:
        """`here` gives the place where the guest stands, for what no probe's hit leads to."""
        self.recorder = make_recorder
        self._symbols = symbols
        self._hists = hists
        self._here = here
        self._functions = functions
        self._tasks = tasks
        self._stack = CallStack(memory, symbols, arch, THREAD_SIZE)

    def triggers(
        self, array: TraceArray, recorder: Recorder, registry: EventRegistry, errors: ErrorLog, /
    ) -> EventTriggers:
        """Plain ones and histograms; those of ftrace:print are run for markers."""
        assert isinstance(recorder, HitRecorder), "a recorder of ours"
        markers = registry.find(FTRACE_SYSTEM, "print")
        if isinstance(markers, PrintEvent):
            array.on_marker = lambda text: markers.written(recorder, text, self._here())
        array.snapshot.is_conditional = lambda: recorder in self._hists.snapshots
        control = self._control(array, recorder)
        commands = (*plain_commands(control), HistCommand(self._hists))
        return EventTriggers(recorder, control, registry, errors, self._symbols, commands)

    def functions(self, array: TraceArray, recorder: Recorder, registry: EventRegistry, /) -> FunctionTracer:
        """The tracer of its functions."""
        hooks = self._functions
        control = self._control(array, recorder)
        probes = FunctionProbes(hooks.functions, control, registry, recorder)
        pids = EventPids()
        calls = CallRecorder(array, pids, self._tasks, self._stack.caller, control.record_stack)
        return FunctionTracer(hooks, probes, pids, calls.record)

    def is_held(self, recorder: Recorder, /) -> bool:
        """Mirrors: kernel/trace/trace_events_hist.c:save_hist_vars (v6.1), which takes a reference."""
        return bool(self._hists.with_variables(recorder))

    def _control(self, array: TraceArray, recorder: Recorder) -> ArrayControl:
        assert isinstance(recorder, HitRecorder), "a recorder of ours"
        return ArrayControl(array, recorder, self._stack, array.snapshot)
