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
    SLEEP_TIME = "sleep-time"
    GRAPH_TIME = "graph-time"


BLK_CLASSIC = "blk_classic"
"""Name of the option of the blk tracer that also switches the trace option context-info.

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
    set(GraphOption) - {GraphOption.OVERRUN, GraphOption.PROC, GraphOption.ABSTIME, GraphOption.TAIL}
)


class TracerOptions:
    """Values of the tracers' options; all trace arrays share one object.

    Mirrors: kernel/trace/trace.h:tracer_flags (v6.1).
    """

    def __init__(self, others: Mapping[str, Mapping[str, bool]] | None = None) -> None:
        """Start with the values at boot.

        `others`: tracers that have options but can't be selected: name -> option -> value at boot.
        """
        self._on: set[str] = set(_ON_AT_BOOT)
        self.others: tuple[str, ...] = ()
        """Names of the options of tracers that can't be selected."""
        for options in (others or {}).values():
            self.others += tuple(options)
            self._on.update(name for name, on in options.items() if on)
        self.on_switch: list[Callable[[], object]] = []
        """Functions that are called after an option was switched."""

    @staticmethod
    def names(tracers: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the options of `tracers`."""
        return tuple(str(option) for tracer in tracers for option in _OPTIONS.get(tracer, ()))

    def is_on(self, name: str) -> bool:
        """Return True if an option is on."""
        return name in self._on

    def switch(self, name: str, *, on: bool) -> None:
        """Switch an option on or off. Raises: KernelError EINVAL (the tracer refuses)."""
        if name == NopOption.REFUSE:
            raise KernelError(errno.EINVAL, f"{name}: the nop tracer refuses this option")
        if on:
            self._on.add(name)
        else:
            self._on.discard(name)
        for notify in self.on_switch:
            notify()
