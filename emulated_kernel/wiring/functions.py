"""Calls of traced functions: from fentry sites to the tracers of all trace arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from emulated_kernel.trace.event_pids import EventPids
from emulated_kernel.trace.function_filter import Functions
from emulated_kernel.trace.function_tracer import CallHandler
from emulated_kernel.trace.ports import ProbeHit, TraceSymbols
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_entry import EntryType
from emulated_kernel.wiring.probes import CPU, Hit, Tasks


class Sites(Protocol):
    """kprobes.ftrace.FtraceSites, as far as it isn't about kprobes."""

    def set_traced(self, wanted: Mapping[int, tuple[Callable[[Any], None], ...]], /) -> None: ...

    def users(self) -> Mapping[int, tuple[int, bool]]: ...


class KernelFunctions:
    """Implements trace.function_tracer.FunctionHooks, and shows who uses which site.

    Deviates: functions of modules can't be traced.
    """

    def __init__(self, sites: Sites | None, fentry: frozenset[int], symbols: TraceSymbols, hit: Hit) -> None:
        self._sites = sites
        self._hit = hit
        self._owners: dict[object, Mapping[int, tuple[CallHandler, ...]]] = {}
        found = ((site, symbols.lookup(site)) for site in sorted(fentry) if sites is not None)
        self.functions: Functions = [(site, where.name) for site, where in found if where is not None]

    def attach(self, owner: object, handlers: Mapping[int, tuple[CallHandler, ...]], /) -> None:
        self._owners[owner] = handlers
        wanted: dict[int, tuple[Callable[[Any], None], ...]] = {}
        for each in self._owners.values():
            for site, calls in each.items():
                wanted[site] = (*wanted.get(site, ()), *(partial(self._call, site, call) for call in calls))
        if self._sites is not None:
            self._sites.set_traced(wanted)

    def _call(self, site: int, handler: CallHandler, frame: Any) -> None:
        self._hit.regs = frame
        handler(site, self._hit)

    def available(self) -> Iterator[str]:
        """available_filter_functions."""
        return (f"{name}\n" for _, name in self.functions)

    def enabled(self) -> Iterator[str]:
        """enabled_functions. Mirrors: kernel/trace/ftrace.c:t_show (v6.1)."""
        users = {} if self._sites is None else self._sites.users()
        for site, name in self.functions:
            if site in users:
                count, is_probed = users[site]
                # Linux: R, I and D; a kprobe asks for all registers and may change the ip.
                yield f"{name} ({count}){' R' if is_probed else '  '}{' I' if is_probed else '  '}  \n"


class CallRecorder:
    """Writes the function tracer's entries into a trace array."""

    def __init__(self, array: TraceArray, pids: EventPids, tasks: Tasks, memory: Any) -> None:
        self._array = array
        self._pids = pids
        self._tasks = tasks
        self._memory = memory
        self._word = array.system.word_size

    def record(self, site: int, hit: ProbeHit) -> None:
        """Mirrors: kernel/trace/trace_functions.c:function_trace_call (v6.1)."""
        pid = self._tasks.pid()
        if self._pids.is_active and self._pids.ignores(pid):
            return
        flags, preempt_count = hit.context
        parent = self._memory.read(hit.regs.sp, self._word)
        self._array.record(
            EntryType.FN,
            site.to_bytes(self._word, "little") + parent,
            cpu=CPU,
            pid=pid,
            comm=hit.comm.decode("utf-8", "surrogateescape"),
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=self._array.system.now_ns(),
        )
