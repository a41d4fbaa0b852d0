"""FunctionTracer: the function tracer of a trace array, with the files that select functions and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from emulated_kernel.trace.array.services import Tracer
from emulated_kernel.trace.events.event_pids import EventPids, PidList
from emulated_kernel.trace.output.tracer_options import FunctionOption
from emulated_kernel.trace.tracers.available_functions import Functions, FunctionWatcher
from emulated_kernel.trace.tracers.call_sites import CallRecorder, KernelFunctions
from emulated_kernel.trace.tracers.function_filter import FilterEdit, FunctionSet, ShownFunctions
from emulated_kernel.trace.tracers.function_probes import FunctionProbes
from emulated_kernel.trace.tracers.traced_calls import TracedCalls


class FunctionTracer(Tracer, FunctionWatcher):
    """The function tracer of a trace array. Callers hold the control lock.

    Mirrors: kernel/trace/trace_functions.c, kernel/trace/ftrace.c (v6.1).
    """

    def __init__(
        self,
        hooks: KernelFunctions,
        probes: FunctionProbes,
        pids: EventPids,
        recorder: CallRecorder,
        is_on: Callable[[str], bool],
    ) -> None:
        """Create a tracer that is stopped, with empty filters: it will trace all functions.

        `recorder` writes a call to the trace, unless `pids` (the lists set_ftrace_pid and
        set_ftrace_notrace_pid) exclude the task. `is_on` returns whether an option of the tracer is on; the
        argument is the option's name.
        """
        self._hooks = hooks
        self._option = is_on
        self._recorder = recorder
        self._calls = TracedCalls(hooks, recorder, self._symbol)
        self._is_on = False
        self.on_selection: list[Callable[[], None]] = []
        """Functions that are called when the result of selected() may have changed."""
        self.probes = probes
        self.pids = pids
        self.filter = FilterFile(hooks.functions, "all functions enabled", self._update, probes)
        self.notrace = FilterFile(
            hooks.functions, "no functions disabled", self._update, waiting_counts=False
        )
        hooks.functions.watch(self)

    def _symbol(self) -> str:
        """Return the name of Linux's handler for the current options.

        Mirrors: kernel/trace/ftrace.c:ftrace_update_pid_func,
        kernel/trace/trace_functions.c:select_trace_function (v6.1).
        """
        if self.pids.is_active:
            return "ftrace_pid_func"
        stack = "_stack" if self._option(FunctionOption.STACK_TRACE) else ""
        repeats = "_no_repeats" if self._option(FunctionOption.NO_REPEATS) else ""
        return f"function{stack}{repeats}_trace_call"

    def start(self) -> None:
        """Begin to record calls: current_tracer is `function` now."""
        self._is_on = True
        self._recorder.select_options()
        self._update()

    def stop(self) -> None:
        """Stop recording calls: another tracer becomes current."""
        self._is_on = False
        self._calls.detach()

    def switched_on(self) -> None:
        """Clear the trace: a write to tracing_on has switched recording on.

        Mirrors: kernel/trace/trace_functions.c:function_trace_start (v6.1).
        """
        self._recorder.clear_trace()

    def option_changed(self, name: str) -> None:
        """Attach the handler that the tracer's options now select, if `name` is one of these options.

        Mirrors: kernel/trace/trace_functions.c:func_set_flag (v6.1).
        """
        if name in tuple(FunctionOption):
            self._recorder.select_options()
            self._calls.detach()
            self._update()

    def rewired(self) -> None:
        """Drop the guest code, because it was compiled for buffers or lists of pids that have changed."""
        self._calls.settings_changed()

    def remove(self) -> None:
        """Stop recording and remove all commands, because the trace array is being removed."""
        self._hooks.functions.unwatch(self)
        self.probes.clear()
        self.stop()

    def module_added(self, module: str) -> None:
        """Trace those functions of the new module `module` that the filters select."""
        self.filter.module_added(module)
        self.notrace.module_added(module)
        self._update()

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove functions from the filters and the commands, because the functions no longer exist.

        `sites`: fentry sites of the functions.
        """
        self.filter.functions_removed(sites)
        self.notrace.functions_removed(sites)
        self.probes.functions_removed(sites)
        self._update()

    def selected(self) -> frozenset[int]:
        """Return the fentry sites of the functions that set_ftrace_filter and set_ftrace_notrace select."""
        chosen = self._hooks.functions.sites if self.filter.is_empty else self.filter.sites
        return chosen - self.notrace.sites if self.notrace.sites else chosen

    def _update(self) -> None:
        """Attach to the selected functions if the tracer is current; call each function in `on_selection`.

        Mirrors: kernel/trace/ftrace.c:ftrace_ops_update_code (v6.1).
        """
        if self._is_on:
            self._calls.attach(self.selected())
        for notify in self.on_selection:
            notify()


class FilterFile(FunctionSet):
    """The functions in set_ftrace_filter, which also accepts commands, or in set_ftrace_notrace.

    O_TRUNC does not remove commands. Commands take effect at once, and functions when the file is closed.
    """

    def __init__(
        self,
        functions: Functions,
        title: str,
        changed: Callable[[], None],
        probes: FunctionProbes | None = None,
        *,
        waiting_counts: bool = True,
    ) -> None:
        super().__init__(functions, title, changed, waiting_counts=waiting_counts)
        self._probes = probes

    def records(self) -> Iterator[str]:
        """Yield the lines of the functions, then the lines of the commands."""
        return chain(super().records(), self._commands())

    def _commands(self) -> Iterator[str]:
        return iter(()) if self._probes is None else self._probes.records()

    def shown_from(self, index: int, shown: ShownFunctions) -> Iterator[str]:
        """Return the lines of functions and then commands, from line `index` on, for one read(2).

        If line `index` is the last of the functions' lines, return only this line; the next read returns the
        commands.
        Mirrors: kernel/trace/ftrace.c:t_start, t_next, t_mod_start (v6.1).
        """
        lines = list(islice(self._lines(shown), index, index + 2))
        if len(lines) == 1:
            return iter(lines)
        return islice(chain(self._lines(shown), self._commands()), index, None)

    def execute(self, word: bytes, edit: FilterEdit) -> None:
        """Apply a word to `edit`, the copy of the set in an open file.

        The word is a pattern, PATTERN:mod:MODULE, or PATTERN:COMMAND. A command takes effect at once.
        Raises: KernelError EINVAL (nothing matches the pattern), errors of FunctionProbes.execute().
        Mirrors: kernel/trace/ftrace.c:ftrace_process_regex (v6.1).
        """
        pattern, colon, command = word.partition(b":")
        if command.startswith(b"mod:"):
            self.choose_of_module(pattern, command.removeprefix(b"mod:"), edit)
        elif colon and self._probes is not None:
            self._probes.execute(pattern, command.decode("latin-1"))
        else:
            self.choose(word, edit)


_NO_PIDS = "no pid\n"
"""Line that set_ftrace_pid shows for an empty list."""
_LAST_PID = f"{1 << 22}\n"
"""Line with the number PID_MAX_LIMIT, one more than the greatest pid. Linux shows "no pid" in its place.

Mirrors: kernel/trace/ftrace.c:FTRACE_NO_PIDS (v6.1).
"""


class FunctionPids(PidList):
    """The list of pids in set_ftrace_pid or set_ftrace_notrace_pid.

    The file of an empty list shows "no pid".
    """

    def records_from(self, start: int) -> Iterator[str]:
        """Return the lines of the file from line `start` on; the first line has the number 0.

        As in Linux, the line of pid PID_MAX_LIMIT shows "no pid".

        Mirrors: kernel/trace/ftrace.c:fpid_show (v6.1).
        """
        if not self.pids:
            return islice([_NO_PIDS], start, None)
        return (_NO_PIDS if line == _LAST_PID else line for line in super().records_from(start))
