"""The function tracer of a trace array: which functions' calls are recorded, and for which tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice

from emulated_kernel.trace.array.system import Tracer
from emulated_kernel.trace.events.event_pids import EventPids, PidList
from emulated_kernel.trace.output.tracer_options import FunctionOption
from emulated_kernel.trace.text.user_words import FUNCTION_WORD_MAX, take_word
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.trace.tracers.function_filter import FunctionSet
from emulated_kernel.trace.tracers.function_probes import FunctionProbes
from emulated_kernel.trace.tracers.functions import CallHandler, FunctionWatcher


class FilterWatcher(ABC):
    """Told of changes of a function tracer's filters."""

    @abstractmethod
    def filters_changed(self) -> None:
        """FunctionTracer.selected() may give others."""


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
        self._watchers: list[FilterWatcher] = []
        self.probes = probes
        self.pids = pids
        self._chosen = FunctionSet(hooks.functions, "all functions enabled", self._update)
        self._left_out = FunctionSet(
            hooks.functions, "no functions disabled", self._update, waiting_counts=False
        )
        self.filter = FilterFile(self._chosen, probes)
        self.notrace = FilterFile(self._left_out, None)
        hooks.functions.watch(self)
        self.traced_pids = PidFile(self.pids.traced)
        self.untraced_pids = PidFile(self.pids.untraced)

    def _symbol(self) -> str:
        """Mirrors: ftrace_update_pid_func, select_trace_function (v6.1)."""
        if self.pids.is_active:
            return "ftrace_pid_func"
        stack = "_stack" if self._option(FunctionOption.STACK_TRACE) else ""
        repeats = "_no_repeats" if self._option(FunctionOption.NO_REPEATS) else ""
        return f"function{stack}{repeats}_trace_call"

    def watch(self, watcher: FilterWatcher) -> None:
        """Tell this one, for which the filters hold too, of their changes."""
        self._watchers.append(watcher)

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
        self._chosen.module_came(module)
        self._left_out.module_came(module)
        self._update()

    def functions_went(self, sites: frozenset[int]) -> None:
        """They can't any more."""
        self._chosen.functions_went(sites)
        self._left_out.functions_went(sites)
        self.probes.functions_went(sites)
        self._update()

    def selected(self) -> list[int]:
        """Sites of the functions that set_ftrace_filter and set_ftrace_notrace leave."""
        chosen = self._hooks.functions.sites if self._chosen.is_empty else self._chosen.sites
        left_out = self._left_out.sites
        return [site for site in chosen if site not in left_out]

    def _update(self) -> None:
        """Mirrors: kernel/trace/ftrace.c:ftrace_ops_update_code (v6.1)."""
        if self._is_on:
            self._hooks.attach(self._user, self.selected())
        for watcher in self._watchers:
            watcher.filters_changed()


class FilterFile:
    """set_ftrace_filter, with commands, or set_ftrace_notrace, without.

    Deviates: Linux lets a change come into force when the file is closed.
    """

    def __init__(self, functions: FunctionSet, probes: FunctionProbes | None) -> None:
        self._functions = functions
        self._probes = probes

    def clear(self) -> None:
        """Opening for writing with O_TRUNC; commands stay."""
        self._functions.clear()

    def records(self) -> Iterator[str]:
        """Functions, then commands."""
        yield from self._functions.records()
        if self._probes is not None:
            yield from self._probes.records()

    def records_from(self, index: int) -> Iterator[str]:
        """For one read(2); one that begins with the last function, or with the note of none, ends behind it.

        Mirrors: kernel/trace/ftrace.c:t_start, t_next, t_mod_start (v6.1).
        """
        behind = [*islice(self._functions.records(), index, index + 2)]
        return iter(behind) if len(behind) == 1 else islice(self.records(), index, None)

    def write(self, data: bytes) -> int:
        """One write(2): its first word, a pattern or PATTERN:COMMAND; bytes taken, which may be fewer.

        Raises: KernelError EINVAL, ENOMEM. Mirrors: kernel/trace/ftrace.c:ftrace_process_regex (v6.1).
        """
        word, size = take_word(data, FUNCTION_WORD_MAX)
        pattern, colon, command = word.partition(b":")
        if command.startswith(b"mod:"):
            self._functions.choose_of_module(pattern, command.removeprefix(b"mod:"))
        elif colon and self._probes is not None:
            self._probes.execute(pattern, command.decode("latin-1"))
        elif word:
            self._functions.choose(word)
        return size


_NO_PIDS, _LAST_PID = "no pid\n", f"{1 << 22}\n"
"""Mirrors: kernel/trace/ftrace.c:FTRACE_NO_PIDS (v6.1)."""


class PidFile:
    """set_ftrace_pid: a list of pids, which says so if it is empty."""

    def __init__(self, pids: PidList) -> None:
        self._pids = pids
        self.write = pids.write
        self.clear = pids.clear

    def records(self) -> list[str]:
        """The lines of the file. Linux: the greatest pid + 1 stands for an empty list.

        Mirrors: kernel/trace/ftrace.c:fpid_show (v6.1).
        """
        lines = self._pids.records() or [_NO_PIDS]
        return [_NO_PIDS if line == _LAST_PID else line for line in lines]
