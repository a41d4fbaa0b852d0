"""The function tracer of a trace array: which functions' calls are recorded, and for which tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from emulated_kernel.trace.array.services import Tracer
from emulated_kernel.trace.events.event_pids import EventPids, PidList
from emulated_kernel.trace.output.tracer_options import FunctionOption
from emulated_kernel.trace.text.get_user import FUNCTION_WORD_MAX, take_word
from emulated_kernel.trace.tracers.available_functions import CallHandler, Functions, FunctionWatcher
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_filter import FunctionSet
from emulated_kernel.trace.tracers.function_probes import FunctionProbes


class FunctionTracer(Tracer, FunctionWatcher):
    """Mirrors: kernel/trace/trace_functions.c, kernel/trace/ftrace.c (v6.1). Callers serialise."""

    def __init__(
        self,
        hooks: KernelFunctions,
        probes: FunctionProbes,
        pids: EventPids,
        record: CallHandler,
        is_on: Callable[[str], bool],
    ) -> None:
        """`record` writes the entry of a call, where `pids` (set_ftrace_pid) lets it; `is_on`: an option."""
        self._hooks = hooks
        self._option = is_on
        self._user = hooks.user(record, self._symbol)
        self._is_on = False
        self.on_selection: list[Callable[[], None]] = []
        """Called when selected() may give others."""
        self.probes = probes
        self.pids = pids
        self.filter = FilterFile(hooks.functions, "all functions enabled", self._update, probes)
        self.notrace = FilterFile(
            hooks.functions, "no functions disabled", self._update, waiting_counts=False
        )
        hooks.functions.watch(self)

    def _symbol(self) -> str:
        """Mirrors: ftrace_update_pid_func, select_trace_function (v6.1)."""
        if self.pids.is_active:
            return "ftrace_pid_func"
        stack = "_stack" if self._option(FunctionOption.STACK_TRACE) else ""
        repeats = "_no_repeats" if self._option(FunctionOption.NO_REPEATS) else ""
        return f"function{stack}{repeats}_trace_call"

    def start(self) -> None:
        """current_tracer is `function` now."""
        self._is_on = True
        self._update()

    def stop(self) -> None:
        """It is another one now."""
        self._is_on = False
        self._hooks.detach(self._user)

    def option_changed(self, name: str) -> None:
        """See Tracer: another function records, which is registered anew. Mirrors: func_set_flag (v6.1)."""
        if name in tuple(FunctionOption):
            self._hooks.detach(self._user)
            self._update()

    def remove(self) -> None:
        """The trace array goes."""
        self._hooks.functions.unwatch(self)
        self.probes.clear()
        self.stop()

    def module_came(self, module: str) -> None:
        """Its functions can be traced."""
        self.filter.module_came(module)
        self.notrace.module_came(module)
        self._update()

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't any more."""
        self.filter.functions_went(sites)
        self.notrace.functions_went(sites)
        self.probes.functions_went(sites)
        self._update()

    def selected(self) -> list[int]:
        """Sites of the functions that set_ftrace_filter and set_ftrace_notrace leave."""
        chosen = self._hooks.functions.sites if self.filter.is_empty else self.filter.sites
        left_out = self.notrace.sites
        return [site for site in chosen if site not in left_out]

    def _update(self) -> None:
        """Mirrors: kernel/trace/ftrace.c:ftrace_ops_update_code (v6.1)."""
        if self._is_on:
            self._hooks.attach(self._user, self.selected())
        for tell in self.on_selection:
            tell()


class FilterFile(FunctionSet):
    """set_ftrace_filter, with commands, or set_ftrace_notrace, without; with O_TRUNC commands stay.

    Deviates: Linux lets a change come into force when the file is closed.
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
        """Functions, then commands."""
        yield from super().records()
        if self._probes is not None:
            yield from self._probes.records()

    def records_from(self, index: int) -> Iterator[str]:
        """For one read(2); one that begins with the last function, or with the note of none, ends behind it.

        Mirrors: kernel/trace/ftrace.c:t_start, t_next, t_mod_start (v6.1).
        """
        behind = [*islice(super().records(), index, index + 2)]
        return iter(behind) if len(behind) == 1 else islice(self.records(), index, None)

    def write(self, data: bytes) -> int:
        """One write(2): its first word, a pattern or PATTERN:COMMAND; bytes taken, which may be fewer.

        Raises: KernelError EINVAL, ENOMEM. Mirrors: kernel/trace/ftrace.c:ftrace_process_regex (v6.1).
        """
        word, size = take_word(data, FUNCTION_WORD_MAX)
        pattern, colon, command = word.partition(b":")
        if command.startswith(b"mod:"):
            self.choose_of_module(pattern, command.removeprefix(b"mod:"))
        elif colon and self._probes is not None:
            self._probes.execute(pattern, command.decode("latin-1"))
        elif word:
            self.choose(word)
        return size


_NO_PIDS, _LAST_PID = "no pid\n", f"{1 << 22}\n"
"""Mirrors: kernel/trace/ftrace.c:FTRACE_NO_PIDS (v6.1)."""


class FunctionPids(PidList):
    """set_ftrace_pid: a list of pids, which says so if it is empty."""

    def records(self) -> list[str]:
        """The lines of the file. Linux: the greatest pid + 1 stands for an empty list.

        Mirrors: kernel/trace/ftrace.c:fpid_show (v6.1).
        """
        lines = super().records() or [_NO_PIDS]
        return [_NO_PIDS if line == _LAST_PID else line for line in lines]
