"""Handlers of trace events as guest code: checks whether the guest can handle an event, and emits code."""

from __future__ import annotations

from collections.abc import Sequence

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import Arithmetic, ComputeImmediate, Label, Move, StoreImmediate
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.trace.compiled.fetch import BASE, POSITION, FetchEmitter, can_fetch
from emulated_kernel.trace.compiled.filter import can_filter, emit_filter
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.compiled.record import ENTRY_HEADER_SIZE, EventSpace, RecordEmitter
from emulated_kernel.trace.context.task_check import TaskCheck
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.filter.predicates import FilterProgram
from emulated_kernel.trace.ring.ring_layout import RecordTarget
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class Recording:
    """A trace array that records an event: its ring buffers, and the conditions for a record."""

    target: RecordTarget
    filter: FilterProgram | None
    """The filter for the event, or None if the event has no filter in the trace array."""
    tasks: TaskCheck | None
    """The check of the current task against the lists of pids; None if all tasks are recorded."""


@dataclass(frozen=True)
class CompiledEvent:
    """The data of an event from which guest code is generated: its id, its arguments, and its recordings."""

    event_id: int
    args: tuple[ProbeArg, ...]
    recordings: tuple[Recording, ...]


def compiled_event(
    event: TraceEvent, is_return: bool, args: tuple[ProbeArg, ...], arch: Arch
) -> CompiledEvent | None:
    """Return the data for an event's guest code, or None if the host has to handle the event.

    `is_return`: whether the event's hits are returns of a function.

    The host handles an event if one of these conditions is true:
    - Guest code cannot fetch the arguments, for example a `symstr` or too many values; see can_fetch().
    - An argument is from a register that is not a general-purpose one, or that a returning function has
      overwritten.
    - A filter does more than compare numbers, or the event has a trigger or is in soft mode.
    - Guest code cannot write to the buffers of a trace array that records the event (see Recorder.target).
    """
    registers = arch.valid_at_return if is_return else arch.general_registers
    if event.needs_entry or not can_fetch(args, registers):
        return None
    recordings = []
    for recorder in event.recorders:
        target = recorder.target()
        event_filter = event.filters.get(recorder)
        program = None if event_filter is None else event_filter.program
        if target is None or (program is not None and not can_filter(program)):
            return None
        recordings.append(Recording(target, program, recorder.task_check()))
    return CompiledEvent(event.id, args, tuple(recordings))


class EventEmitter:
    """Emits code that records an event when its probe at `address` is hit.

    The code does not count the hit.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        compiled: CompiledEvent,
        way: EntryKind,
        address: int,
        arch: Arch,
        places: GuestAddresses,
        *,
        returns_by_breakpoint: bool = False,
        more_count: int = 0,
    ) -> None:
        """Prepare to emit code for hits of the probe at `address`. `way`: how hits enter the handler.

        `places`: guest addresses that the code uses. `returns_by_breakpoint`: whether Linux handles returns
        in the exception of a breakpoint. `more_count`: amount to add to the preempt count of the record.
        """
        self._builder = builder
        self._compiled = compiled
        self._address = address
        self._places = places
        self._word = arch.word_size
        self._more_count = more_count
        self._fetch = FetchEmitter(builder, arch, places, address, way)
        self._is_return = way is EntryKind.RETURN
        by_breakpoint = returns_by_breakpoint if self._is_return else way is EntryKind.BREAKPOINT
        self._record = RecordEmitter(builder, places, self._word, by_breakpoint=by_breakpoint)
        header = self._word * (2 if self._is_return else 1)
        self._fixed = ENTRY_HEADER_SIZE + header + sum(arg.size for arg in compiled.args)
        self._is_dynamic = any(arg.type.is_dynamic for arg in compiled.args)

    def emit(self) -> None:
        """Emit code that records the hit in each trace array whose filter and lists of pids accept it."""
        recordings = self._compiled.recordings
        if len(recordings) == 1 and not recordings[0].filter and not self._is_dynamic:
            self._record_in_place(recordings[0])
        elif recordings:
            self._record_copies(recordings)

    def _record_in_place(self, recording: Recording) -> None:
        """Emit code that writes an entry directly to the buffer of the event's only recording trace array.

        Precondition: the size of the entry is known before the hit, and the event has no filter.
        """
        builder = self._builder
        record = self._record
        target = recording.target
        space = EventSpace(self._fixed)
        done = builder.label()
        if recording.tasks is not None:
            record.check_task(recording.tasks, done)
        record.reserve(BASE, space.length, target, done)
        record.header(BASE, space)
        record.common_fields(space.header, self._compiled.event_id, target, self._more_count)
        self._fields(space.header, done)
        record.commit(BASE, space.length, target)
        builder.place(done)

    def _record_copies(self, recordings: Sequence[Recording]) -> None:
        """Emit code that assembles the entry in scratch memory, and copies it to the ring buffers.

        The code copies the entry to the buffer of each trace array whose filter and lists of pids accept it.
        """
        builder = self._builder
        record = self._record
        done = builder.label()
        record.scratch()
        if self._is_dynamic:
            builder.emit(Move(POSITION, BASE), ComputeImmediate(Arithmetic.ADD, POSITION, self._fixed))
        record.common_fields(0, self._compiled.event_id, None, self._more_count)
        self._fields(0, done)
        for recording in recordings:
            following = builder.label()
            if recording.filter is not None:
                emit_filter(builder, recording.filter, self._places.cpu, self._word, following)
            if recording.tasks is not None:
                record.check_task(recording.tasks, following)
            record.copy(self._fixed, dynamic=self._is_dynamic, target=recording.target, dropped=following)
            builder.place(following)
        builder.place(done)

    def _fields(self, at: int, too_large: Label) -> None:
        """Emit code that stores the event's own fields in the entry that begins at BASE + at.

        If the entry gets larger than a ring buffer can hold, the code jumps to `too_large`.
        """
        at += ENTRY_HEADER_SIZE
        self._builder.emit(StoreImmediate(BASE, at, self._address, self._word))
        at += self._word
        if self._is_return:
            self._fetch.store_return_address(at)
            at += self._word
        self._fetch.store(self._compiled.args, at, too_large)
