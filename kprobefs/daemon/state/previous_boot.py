"""Reads the trace records that an earlier daemon has saved in a file, and shows the records in instances."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import count
from typing import BinaryIO

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.memory.persistent import PersistentLayout
from emulated_kernel.trace.array.previous_boot import PreviousBootNames, PreviousBootRecords
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.recover import UnreadableControlBlock, recover_ring_buffer
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, MIN_PAGES, RingMemory, memory_size
from emulated_kernel.trace.text.cmdlines import SAVED_CMDLINES_SIZE, SavedCmdlines
from emulated_kernel.trace.trace_arrays import Tracing
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

LAST = "last"
"""Name of the instance with the earlier records of the top-level trace array.

The earlier records of an instance NAME are in the instance `last.NAME`.
"""
NAME_MAX = 255
"""Maximum length of a file name in bytes. Mirrors: include/uapi/linux/limits.h (v6.1)."""


def is_last(instance: str) -> bool:
    """Return True if the instance called `instance` shows the records of an earlier daemon."""
    return instance == LAST or instance.startswith(f"{LAST}.")


def last_names(instances: Iterable[str]) -> dict[str, str]:
    """Return a map: name of an earlier daemon's instance -> name of the instance that shows its records.

    The name "" means the top-level trace array. A name that would be too long is shortened.
    """
    found: dict[str, str] = {}
    # Long names come last, so that the short ones keep the form that they always have.
    for instance in sorted(instances, key=lambda name: len(os.fsencode(name))):
        name = f"{LAST}.{instance}" if instance else LAST
        encoded = os.fsencode(name)
        if len(encoded) > NAME_MAX:
            ends = (b"~%d" % number for number in count(1))
            shortened = (os.fsdecode(encoded[: NAME_MAX - len(end)] + end) for end in ends)
            name = next(each for each in shortened if each not in found.values())
        found[instance] = name
    return found


@dataclass(frozen=True)
class ArrayPlace:
    """Location of a trace array's ring buffers in the file of records, and the name of the array's clock."""

    name: str
    """Name of the instance; "" for the top-level trace array."""
    controls: tuple[int, ...]
    """Offsets in bytes of two ring buffers' control blocks in each CPU's per-CPU area, ascending.

    One is the control block of the array's own buffer, and the other is that of its snapshot buffer.
    """
    clock: str
    time_start: int
    has_snapshot: bool


def array_places(kernel: Kernel) -> list[ArrayPlace]:
    """Return the locations of all trace arrays in the file of records, the top array first."""
    arrays = kernel.trace_arrays
    names = ["", *arrays.names()]
    return [
        _place(name, tracing.array.past(), tracing.array.clock.name)
        for name, tracing in zip(names, arrays, strict=True)
    ]


def _place(name: str, past: PreviousBootRecords, clock: str) -> ArrayPlace:
    controls = sorted(each[0].place.control_at for each in (past.buffers, past.aside))
    return ArrayPlace(name, tuple(controls), clock, past.time_start, past.has_snapshot)


@dataclass
class LastRecords:
    """The trace records of the previous boot, as found in the file of records in the --state directory."""

    arrays: dict[str, tuple[ArrayPlace, PreviousBootRecords]]
    """Name of the instance that will show records -> (former location of the records, the records)."""
    torn: int = 0
    """Number of records for which a ring buffer had reserved space, but which were not finished."""
    damage: list[str] = field(default_factory=list)
    """A message for each damaged ring buffer."""

    def __len__(self) -> int:
        return sum(len(past) for _, past in self.arrays.values())


def read_records(
    file: BinaryIO, kernel: Kernel, places: Sequence[ArrayPlace], names_at: int
) -> tuple[LastRecords, SavedCmdlines]:
    """Return the intact records and the saved command names that an equal kernel has written to `file`.

    An equal kernel has the same fingerprint() as `kernel`. `places`: locations of the trace arrays in the
    file. `names_at`: virtual address of the saved command names in the kernel that wrote them.

    Raises: OSError, ValueError (the file is not one of an equal kernel).
    """
    layout = kernel.machine.records.persistent_layout
    if os.fstat(file.fileno()).st_size != layout.size:
        raise ValueError("of another size than it was")
    reader = _PersistentReader(file, layout, kernel.config.cpus)
    cmdlines = SavedCmdlines.kept(reader.pages(names_at, SAVED_CMDLINES_SIZE))
    found = LastRecords({})
    for place in places:
        past = reader.past(place, found)
        if len(past):
            found.arrays[place.name] = place, past
    # Newer records replace those that the earlier daemon itself showed in `last`.
    fresh = {name: each for name, each in found.arrays.items() if not is_last(name)}
    names = last_names(fresh)
    renamed = {names[name]: each for name, each in fresh.items()}
    found.arrays = {name: each for name, each in found.arrays.items() if is_last(name)} | renamed
    return found, cmdlines


class _PersistentReader:
    def __init__(self, file: BinaryIO, layout: PersistentLayout, cpus: int) -> None:
        self._file = file
        self._layout = layout
        self._cpus = cpus

    def pages(self, address: int, size: int) -> bytes:
        return self._read(self._layout.pages(address, size), size)

    def _read(self, at: int, size: int) -> bytes:
        data = b""
        while part := os.pread(self._file.fileno(), size - len(data), at + len(data)):
            data += part
        if len(data) != size:
            raise ValueError("shorter than it was")
        return data

    def past(self, place: ArrayPlace, found: LastRecords) -> PreviousBootRecords:
        pairs = [self._buffers(place, cpu, found) for cpu in range(self._cpus)]
        own = _same_order([pair[0] for pair in pairs], place, found)
        aside = _same_order([pair[1] for pair in pairs], place, found)
        return PreviousBootRecords(own, aside, place.has_snapshot, place.time_start)

    def _buffers(self, place: ArrayPlace, cpu: int, found: LastRecords) -> tuple[RingBuffer, RingBuffer]:
        """Return a CPU's buffer and its snapshot buffer; each is empty if it is missing or damaged.

        Add the number of unfinished records to `found.torn`, and append a message about damage to
        `found.damage`.
        """
        own: list[RingBuffer] = []
        aside: list[RingBuffer] = []
        damage: list[str] = []
        for offset in place.controls:
            try:
                at = self._layout.cells(cpu, offset, CONTROL_SIZE)
                result = recover_ring_buffer(self._read(at, CONTROL_SIZE), self.pages)
            except ValueError as error:
                found.torn += error.lost if isinstance(error, UnreadableControlBlock) else 0
                damage.append(str(error))
                continue
            if result is None:
                continue
            found.torn += result.torn
            if result.damage:
                damage.append(result.damage)
            # If both blocks claim the same role, the second one gets the other role.
            is_aside = bool(own) or (result.is_aside and not aside)
            (aside if is_aside else own).append(result.buffer)
        if not own and not damage:
            damage.append("no buffer of its own")
        if damage:
            found.damage.append(f"CPU {cpu} of {place.name or 'tracing'}: {', '.join(damage)}")
        return own[0] if own else _empty(), aside[0] if aside else _empty()


def _empty(order: int = 0) -> RingBuffer:
    memory = memoryview(bytearray(memory_size(MIN_PAGES, order)))
    return RingBuffer(RingMemory(memory), MIN_PAGES, order=order)


def _same_order(buffers: list[RingBuffer], place: ArrayPlace, found: LastRecords) -> list[RingBuffer]:
    """Return `buffers`; replace each buffer whose sub-buffers have the wrong size by an empty buffer.

    The right size is that of the buffer with the most records. Append a message about lost records to
    `found.damage`. All sub-buffers of a trace array must have one size, because guest code relies on this.
    """
    order = max(buffers, key=len).order
    lost = sum(len(buffer) for buffer in buffers if buffer.order != order)
    if lost:
        found.damage.append(f"{place.name or 'tracing'}: {lost} records on pages of another size")
    return [buffer if buffer.order == order else _empty(order) for buffer in buffers]


def show(kernel: Kernel, last: LastRecords, cmdlines: SavedCmdlines) -> dict[str, str]:
    """Show the records `last` in instances, which are created if they are missing.

    Return a map: name of an instance -> reason why it cannot show its records. Such instances are removed
    from `last`.

    `cmdlines`: the command names that were saved with the records.
    """
    events = kernel.tracing.system.events
    # Entries of ftrace itself are printed without an event.
    known = {event.id: event for event in events if events.by_id(event.id) is event}
    names = PreviousBootNames(known, cmdlines)
    refused: dict[str, str] = {}
    for name, (place, past) in tuple(last.arrays.items()):
        named = PreviousBootRecords(past.buffers, past.aside, past.has_snapshot, past.time_start, names=names)
        is_new = kernel.trace_arrays.find(name) is None
        try:
            _show(_instance(kernel, name).array, place, named)
        except KernelError as error:
            refused[name] = error.strerror or str(error)
            del last.arrays[name]
            if is_new and kernel.trace_arrays.find(name) is not None:
                kernel.trace_arrays.remove(name)
    return refused


def _show(array: TraceArray, place: ArrayPlace, past: PreviousBootRecords) -> None:
    array.set_clock(place.clock)
    array.set_tracing_on(False)
    array.take_records(past, array.memory_for(past))


def _instance(kernel: Kernel, name: str) -> Tracing:
    """Return the instance `name`. If it is missing, create it, even beyond the limit on instances.

    Raises: KernelError (it cannot be created).
    """
    return kernel.trace_arrays.find(name) or kernel.trace_arrays.make(name, is_limited=False)


def show_empty(kernel: Kernel) -> None:
    """Create the instance `last` without records, so that it always exists.

    Raises: KernelError (it cannot be created).
    """
    _instance(kernel, LAST)


def make_again(kernel: Kernel, former: Kernel) -> None:
    """Create in `kernel` the instances `last` and `last.NAME` that the kernel `former` has.

    The records that `former` shows in them can then be moved to `kernel`. Raises: KernelError (an instance
    cannot be created).
    """
    for name in filter(is_last, former.trace_arrays.names()):
        _instance(kernel, name)
