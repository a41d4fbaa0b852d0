"""Options of the individual tracers, which exist in addition to the trace options of all tracers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from emulated_kernel.util.errors import KernelError


class NopOption(StrEnum):
    """Options of the nop tracer. Mirrors: kernel/trace/trace_nop.c:nop_opts (v6.1)."""

    ACCEPT = "test_nop_accept"
    REFUSE = "test_nop_refuse"


class FunctionOption(StrEnum):
    """Options of the function tracer. Mirrors: kernel/trace/trace_functions.c:func_opts (v6.1)."""

    STACK_TRACE = "func_stack_trace"
    NO_REPEATS = "func-no-repeats"
    ARGS = "func-args"
    """Option that adds the functions' arguments to records of calls; it exists since Linux 6.16."""


class GraphOption(StrEnum):
    """Options of the function_graph tracer.

    Mirrors: kernel/trace/trace_functions_graph.c:trace_opts (v6.1).
    """

    OVERRUN = "funcgraph-overrun"
    CPU = "funcgraph-cpu"
    OVERHEAD = "funcgraph-overhead"
    PROC = "funcgraph-proc"
    DURATION = "funcgraph-duration"
    ABSTIME = "funcgraph-abstime"
    IRQS = "funcgraph-irqs"
    TAIL = "funcgraph-tail"
    ARGS = "funcgraph-args"
    """Option that adds the functions' arguments to records of calls; it exists since Linux 6.16."""
    SLEEP_TIME = "sleep-time"
    GRAPH_TIME = "graph-time"


BLK_CLASSIC = "blk_classic"
"""Name of an option of the blk tracer; switching it on or off does the reverse with context-info.

Mirrors: kernel/trace/blktrace.c:blk_tracer_set_flag (v6.1).
"""
TracerOption = NopOption | FunctionOption | GraphOption

_OPTIONS: Mapping[str, tuple[TracerOption, ...]] = {
    "nop": tuple(NopOption),
    "function": tuple(FunctionOption),
    "function_graph": tuple(GraphOption),
}
TRACERS = tuple(_OPTIONS)
"""Names of the tracers that have options and can be selected."""
_ON_AT_BOOT = frozenset(
    set(GraphOption)
    - {GraphOption.OVERRUN, GraphOption.PROC, GraphOption.ABSTIME, GraphOption.TAIL, GraphOption.ARGS}
)
_OF_ARGS = FunctionOption.ARGS, GraphOption.ARGS


class TracerOptions:
    """Values of the tracers' options; all trace arrays share one object.

    Mirrors: kernel/trace/trace.h:tracer_flags (v6.1).
    """

    def __init__(
        self, others: Mapping[str, Mapping[str, bool]] | None = None, *, has_args: bool = False
    ) -> None:
        """Create the options, with their values at boot.

        `others`: tracers that have options but can't be selected: name -> option -> value at boot.
        `has_args`: whether records of calls can have the arguments of functions; if not, the options for that
        do not exist.
        """
        self.has_args = has_args
        self._on: set[str] = set(_ON_AT_BOOT)
        self.others: tuple[str, ...] = ()
        """Names of the options of tracers that can't be selected."""
        for options in (others or {}).values():
            self.others += tuple(options)
            self._on.update(name for name, on in options.items() if on)
        self.on_switch: list[Callable[[], object]] = []
        """Functions that are called after an option was switched."""

    def names(self, tracers: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the options of `tracers`."""
        options = (option for tracer in tracers for option in _OPTIONS.get(tracer, ()))
        return tuple(str(option) for option in options if self.has_args or option not in _OF_ARGS)

    def is_on(self, name: str) -> bool:
        """Return True if the option `name` is on."""
        return name in self._on

    def switch(self, name: str, *, on: bool) -> None:
        """Switch the option `name` on or off.

        Raises: KernelError EINVAL (the tracer refuses, or another option that is on excludes it).
        """
        if name == NopOption.REFUSE:
            raise KernelError(errno.EINVAL, f"{name}: the nop tracer refuses this option")
        if on and name in tuple(FunctionOption):
            self._check_functions(name)
        if on:
            self._on.add(name)
        else:
            self._on.discard(name)
        for notify in self.on_switch:
            notify()

    def _check_functions(self, name: str) -> None:
        """Check that the function tracer's option `name` can be switched on together with those that are on.

        Raises: KernelError EINVAL (an option that is on excludes it).
        Mirrors: kernel/trace/trace_functions.c:select_trace_function (v7.2).
        """
        others = [each for each in FunctionOption if each != name and self.is_on(each)]
        if others and FunctionOption.ARGS in (name, *others):
            raise KernelError(errno.EINVAL, f"{name}: it excludes {others[0]}")
