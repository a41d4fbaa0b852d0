"""Trace events on top of kprobes: an event's place becomes a Kprobe, its hits become records."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.traps import MemoryFault
from emulated_kernel.trace.event import TraceEvent
from emulated_kernel.trace.ports import HitHandler, ProbeHandle, ProbeHit, ProbeSpec, RawEntry
from emulated_kernel.trace.trace_array import TaskContext, TraceArray
from emulated_kernel.trace.trace_entry import TRACE_ENTRY
from emulated_kernel.wiring.context import HitContext

CPU = 0
"""The only one there is."""


class GuestMemory(Protocol):
    def read(self, va: int, size: int) -> bytes: ...


class Current(Protocol):
    """Who runs on the CPU."""

    def current_task(self) -> int: ...


class Tasks:
    """Reads the current task of the guest: pid and name, for records and $comm."""

    def __init__(self, memory: GuestMemory, cells: Current, abi: Mapping[str, int]) -> None:
        self._memory = memory
        self._current = cells.current_task
        self._pid = abi["task_struct.pid"]
        self._comm = abi["task_struct.comm"]

    def pid(self) -> int:
        return int.from_bytes(self._memory.read(self._current() + self._pid, 4), "little")

    def comm(self) -> bytes:
        """The name without its padding, 15 bytes at most."""
        return self._memory.read(self._current() + self._comm, 16).split(b"\0", 1)[0]

    def context(self) -> TaskContext:
        """For records that no probe makes."""
        pid = self.pid()
        return TaskContext(pid=pid, comm=self.comm().decode("utf-8", "surrogateescape"), tgid=pid)


class Hit:
    """The hit being handled, as an event's handler sees it; one object, valid during the call."""

    return_address = 0

    def __init__(self, memory: GuestMemory, tasks: Tasks) -> None:
        self._memory = memory
        self._tasks = tasks
        self.regs: Any = None

    @property
    def comm(self) -> bytes:
        return self._tasks.comm()

    def read(self, address: int, size: int) -> bytes | None:
        try:
            return self._memory.read(address, size)
        except MemoryFault:
            return None


class EventKprobe(Kprobe):
    """The kprobe of a trace event."""

    @property
    def maxactive(self) -> int:
        return 0


class KprobeBackend:
    """Implements trace.ports.ProbeBackend."""

    def __init__(self, kprobes: Kprobes, memory: GuestMemory, tasks: Tasks) -> None:
        self._kprobes = kprobes
        self._hit = Hit(memory, tasks)

    def register(self, spec: ProbeSpec, handler: HitHandler, /) -> EventKprobe:
        """Raises: KernelError as register_kprobe; EOPNOTSUPP for a return probe."""
        if spec.is_return:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no return probes")
        hit = self._hit

        def pre_handler(_kprobe: Kprobe, regs: Regs) -> None:
            hit.regs = regs
            handler(hit)

        kprobe = EventKprobe(
            symbol_name=spec.symbol,
            offset=spec.offset,
            # Linux: address 0 is a null pointer, no address.
            addr=spec.address or None,
            pre_handler=pre_handler,
            disabled=spec.disabled,
        )
        self._kprobes.register_kprobe(kprobe)
        return kprobe

    def unregister(self, handle: ProbeHandle, /) -> None:
        self._kprobes.unregister_kprobe(_kprobe(handle))

    def enable(self, handle: ProbeHandle, /) -> None:
        self._kprobes.enable_kprobe(_kprobe(handle))

    def disable(self, handle: ProbeHandle, /) -> None:
        self._kprobes.disable_kprobe(_kprobe(handle))

    def on_func_entry(self, symbol: str, offset: int, /) -> bool:
        """Raises: KernelError ENOENT."""
        return self._kprobes.on_func_entry(symbol, offset)


def _kprobe(handle: ProbeHandle) -> EventKprobe:
    assert isinstance(handle, EventKprobe), "a handle of another backend"
    return handle


class HitRecorder:
    """Implements trace.ports.Recorder for hits of kprobes."""

    def __init__(
        self, array: TraceArray, tasks: Tasks, now_ns: Callable[[], int], context: HitContext
    ) -> None:
        self._array = array
        self._tasks = tasks
        self._now_ns = now_ns
        self._context = context

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        header = TRACE_ENTRY.pack(event.id, *self._context.of(hit.regs), self._tasks.pid())
        return RawEntry(header + payload, CPU, hit.comm)

    def record(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> None:
        flags, preempt_count = self._context.of(hit.regs)
        self._array.record(
            event.id,
            payload,
            cpu=CPU,
            pid=self._tasks.pid(),
            comm=hit.comm.decode("utf-8", "surrogateescape"),
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=self._now_ns(),
        )

    def event_removed(self, _event: TraceEvent, /) -> None:
        """Its entries can't be printed any more: empty the buffer."""
        self._array.clear_trace()
