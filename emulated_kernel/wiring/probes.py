"""Trace events on top of kprobes: an event's place becomes a Kprobe, its hits become records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from emulated_kernel.arch.program_builder import HitWay, ProgramBuilder
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.kretprobe import Kretprobe, KretprobeInstance, Kretprobes
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.traps import MemoryFault
from emulated_kernel.trace.event import KprobeTraceEvent, TraceEvent
from emulated_kernel.trace.fetch import read_string
from emulated_kernel.trace.filter_ops import POINTED_STRING_MAX
from emulated_kernel.trace.guest import RecordTarget
from emulated_kernel.trace.options import TraceOption
from emulated_kernel.trace.ports import (
    EntryPlace,
    ProbeHandle,
    ProbeHit,
    ProbeSpec,
    ProbeUser,
    RawEntry,
)
from emulated_kernel.trace.trace_array import TaskContext, TraceArray
from emulated_kernel.trace.trace_entry import TRACE_ENTRY
from emulated_kernel.wiring.context import HitContext
from emulated_kernel.wiring.guest_records import GuestRecords

_HOST_OPTIONS = TraceOption.STACKTRACE | TraceOption.USERSTACKTRACE | TraceOption.RECORD_TGID
"""With these there is more to do for a record than writing it."""


class GuestMemory(Protocol):
    def read(self, va: int, size: int) -> bytes: ...


class Current(Protocol):
    """Who runs on the CPU."""

    def current_task(self) -> int: ...


class Tasks:
    """Reads the current task of the guest: pid and name, for records and $comm."""

    def __init__(
        self, memory: GuestMemory, cells: Current, abi: Mapping[str, int], cpu: Callable[[], int]
    ) -> None:
        """`cpu` gives the number of the CPU that runs."""
        self.cpu = cpu
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
        comm = self.comm().decode("utf-8", "surrogateescape")
        return TaskContext(pid=pid, comm=comm, tgid=pid, cpu=self.cpu())


class Hit:
    """The hit being handled, as an event's handler sees it; one object, valid during the call."""

    def __init__(self, memory: GuestMemory, tasks: Tasks, context: Callable[[Any], tuple[int, int]]) -> None:
        """`context` gives common_flags and common_preempt_count of a hit with these registers."""
        self.return_address = 0
        self._memory = memory
        self._tasks = tasks
        self._context = context
        self.regs: Any = None

    @property
    def context(self) -> tuple[int, int]:
        return self._context(self.regs)

    @property
    def comm(self) -> bytes:
        return self._tasks.comm()

    def read(self, address: int, size: int) -> bytes | None:
        try:
            return self._memory.read(address, size)
        except MemoryFault:
            return None


@dataclass(eq=False, slots=True)
class EventKprobe(Kprobe):
    """The kprobe of a trace event."""

    user: ProbeUser = field(kw_only=True)

    @property
    def maxactive(self) -> int:
        return 0

    @property
    def has_program(self) -> bool:
        return True

    def emit(self, builder: ProgramBuilder, way: HitWay) -> bool:
        return self.user.emit(builder, way)


class EventKretprobe(Kretprobe):
    """The return probe of a trace event."""

    __slots__ = ()


EventProbe = EventKprobe | EventKretprobe


class KprobeBackend:
    """Implements trace.ports.ProbeBackend."""

    def __init__(self, kprobes: Kprobes, kretprobes: Kretprobes, hit: Hit) -> None:
        self._kprobes = kprobes
        self._kretprobes = kretprobes
        self._hit = hit

        def pre_handler(kprobe: Kprobe, regs: Regs) -> None:
            assert isinstance(kprobe, EventKprobe)
            hit.regs = regs
            kprobe.user.hit(hit)

        self._pre_handler = pre_handler
        """One object for all events."""

    def register(self, spec: ProbeSpec, user: ProbeUser, /) -> EventProbe:
        """Raises: KernelError as register_kprobe, register_kretprobe."""
        if spec.is_return:
            return self._register_return(spec, user)
        kprobe = EventKprobe(
            symbol_name=spec.symbol,
            offset=spec.offset,
            # Linux: address 0 is a null pointer, no address.
            addr=spec.address or None,
            pre_handler=self._pre_handler,
            user=user,
            disabled=spec.disabled,
        )
        self._kprobes.register_kprobe(kprobe)
        return kprobe

    def _register_return(self, spec: ProbeSpec, user: ProbeUser) -> EventKretprobe:
        hit = self._hit

        def returned(instance: KretprobeInstance, regs: Regs) -> None:
            hit.regs, hit.return_address = regs, instance.ret_addr
            user.hit(hit)

        rp = EventKretprobe(
            symbol_name=spec.symbol,
            offset=spec.offset,
            addr=spec.address or None,
            handler=returned,
            return_program=user.emit,
            maxactive=spec.maxactive,
            disabled=spec.disabled,
        )
        self._kretprobes.register_kretprobe(rp)
        return rp

    def unregister(self, handle: ProbeHandle, /) -> None:
        probe = _kprobe(handle)
        if isinstance(probe, Kretprobe):
            self._kretprobes.unregister_kretprobe(probe)
        else:
            self._kprobes.unregister_kprobe(probe)

    def enable(self, handle: ProbeHandle, /) -> None:
        self._kprobes.enable_kprobe(_kprobe(handle))

    def disable(self, handle: ProbeHandle, /) -> None:
        self._kprobes.disable_kprobe(_kprobe(handle))

    def handler_changed(self, handle: ProbeHandle, /) -> None:
        probe = _kprobe(handle)
        if isinstance(probe, Kretprobe):
            self._kretprobes.handler_changed(probe)
        else:
            self._kprobes.handler_changed(probe)

    def on_func_entry(self, symbol: str, offset: int, /) -> bool:
        """Raises: KernelError ENOENT."""
        return self._kprobes.on_func_entry(symbol, offset)


def _kprobe(handle: ProbeHandle) -> EventProbe:
    assert isinstance(handle, EventProbe), "a handle of another backend"
    return handle


class HitRecorder:
    """Implements trace.ports.Recorder for hits of kprobes."""

    def __init__(
        self,
        array: TraceArray,
        tasks: Tasks,
        now_ns: Callable[[], int],
        context: HitContext,
        task_size: int,
        guest: GuestRecords | None = None,
        events: Iterable[TraceEvent] = (),
    ) -> None:
        """With `guest`, guest code may record too; `events` are those that exist whenever it is asked."""
        self._array = array
        self._tasks = tasks
        self._now_ns = now_ns
        self._context = context
        self._task_size = task_size
        self._guest = guest
        self._events = events
        array.rewired.append(self._rewired)
        if guest is not None:
            guest.watch(array)

    def target(self) -> RecordTarget | None:
        """Where guest code records to; None where that takes more than writing to the buffer.

        That is so with clocks that don't count the guest's nanoseconds, or that the host sets, with options
        that add to a record, and lists of pids.
        """
        array, guest = self._array, self._guest
        if guest is None or not array.clock.in_ns or array.options.flags & _HOST_OPTIONS:
            return None
        if not guest.can_tell_time or array.pids.is_active:
            return None
        buffers = array.buffers
        return RecordTarget(buffers[0].place.control_at, array.records_comm, guest.room_maker(buffers))

    def _rewired(self) -> None:
        for event in self._events:
            if isinstance(event, KprobeTraceEvent) and self in event.recorders:
                event.changed()

    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        header = TRACE_ENTRY.pack(event.id, *hit.context, self._tasks.pid())
        return RawEntry(header + payload, self._tasks.cpu(), hit.comm, partial(self._string_at, hit))

    def _string_at(self, hit: ProbeHit, address: int, is_user: bool) -> bytes | None:
        """Mirrors: strncpy_from_user_nofault, strncpy_from_kernel_nofault (v6.1)."""
        if (address < self._task_size) is not is_user:
            return None
        return read_string(hit.read, address, POINTED_STRING_MAX)

    def record(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> None:
        self.commit(None, event, payload, hit)

    def reserve(self) -> EntryPlace | None:
        buffer = self._array.buffers[self._tasks.cpu()]
        return None if buffer.disabled else buffer

    def commit(self, place: EntryPlace | None, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> None:
        pids = self._array.pids
        if not (pids.is_active and pids.leaves_out(event, payload, self._tasks.pid())):
            self.record_raw(event.id, payload, hit, place)

    def record_raw(
        self, event_id: int, payload: bytes, hit: ProbeHit, place: EntryPlace | None = None, /
    ) -> None:
        """As record(), of any type of entry."""
        flags, preempt_count = hit.context
        self._array.record(
            event_id,
            payload,
            cpu=self._tasks.cpu(),
            pid=self._tasks.pid(),
            comm=hit.comm.decode("utf-8", "surrogateescape"),
            flags=flags,
            preempt_count=preempt_count,
            timestamp_ns=self._now_ns(),
            place=place,
        )

    def event_removed(self, _event: TraceEvent, /) -> None:
        """Its entries can't be printed any more: empty the buffers."""
        self._array.clear_trace()
        self._array.snapshot.clear()
