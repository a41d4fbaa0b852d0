"""Records made by guest code: the cells and pages that it writes to, and what it asks the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from emulated_kernel.machine.traps import HardwareError
from emulated_kernel.trace.cmdlines import SavedCmdlines
from emulated_kernel.trace.guest import SCRATCH_SIZE, GuestPlaces, HitCounter
from emulated_kernel.trace.ring_buffer import RingBuffer
from emulated_kernel.trace.ring_layout import CONTROL_SIZE, RingControls, RingMemory

_CELL = 8
_NO_PID = 0xFFFFFFFF


class RecordCells(Protocol):
    """The machine's memory for this; cells are each CPU's own."""

    @property
    def words(self) -> Sequence[memoryview]: ...

    def word_index(self, offset: int) -> int: ...

    def alloc_cells(self, size: int) -> int: ...

    def free_cells(self, offset: int) -> None: ...

    def cells(self, offset: int, size: int) -> list[memoryview]: ...

    def alloc_pages(self, size: int) -> int: ...

    def free_pages(self, va: int) -> None: ...

    def view(self, va: int, size: int) -> memoryview: ...


class TaskNames(Protocol):
    """The task that runs on the CPU, and which that is."""

    def cpu(self) -> int: ...

    def pid(self) -> int: ...

    def comm(self) -> bytes: ...


class Recorded(Protocol):
    """A trace array."""

    @property
    def listeners(self) -> Collection[object]: ...

    @property
    def written(self) -> int:
        """Records made so far."""

    def notify(self) -> None: ...


class GuestRecords:
    """Gives out the memory, and answers the calls of compiled handlers."""

    def __init__(self, cells: RecordCells, tasks: TaskNames, cmdlines: SavedCmdlines) -> None:
        self._cells = cells
        self.tasks = tasks
        self._cmdlines = cmdlines
        self._request_at = cells.alloc_cells(2 * _CELL)
        self._requests = [cell.cast("Q") for cell in cells.cells(self._request_at, 2 * _CELL)]
        """Of each CPU."""
        self._last_pid_at = cells.alloc_cells(_CELL)
        self._last_pids = [cell.cast("Q") for cell in cells.cells(self._last_pid_at, _CELL)]
        self._scratch_at = cells.alloc_cells(SCRATCH_SIZE)
        self.can_tell_time = True
        """Whether the guest's clock moves while it runs: a real one, which is set between runs, doesn't."""
        self._arrays: WeakKeyDictionary[Recorded, int] = WeakKeyDictionary()
        """With the records that were there when it was told."""
        self.forget_comm()

    def allocate(self, size: int) -> RingMemory:
        """Pages for a ring buffer. Raises: MemoryError."""
        cells = self._cells
        try:
            pages = cells.alloc_pages(size)
        except HardwareError as error:
            raise MemoryError(f"{size} bytes for a ring buffer") from error
        return RingMemory(cells.view(pages, size), pages, release=lambda: cells.free_pages(pages))

    def allocate_controls(self, cpus: int) -> RingControls:
        """Control blocks for the ring buffers of that many CPUs. Raises: MemoryError."""
        cells = self._cells
        try:
            offset = cells.alloc_cells(CONTROL_SIZE)
        except HardwareError as error:
            raise MemoryError("ring buffers' control blocks") from error
        blocks = cells.cells(offset, CONTROL_SIZE)[:cpus]
        return RingControls(blocks, offset, lambda: cells.free_cells(offset))

    def new_counter(self) -> HitCounter | None:
        """A counter at 0; None if there are no cells left."""
        cells = self._cells
        try:
            offset = cells.alloc_cells(_CELL)
        except HardwareError:
            return None
        return HitCounter(offset, cells.words, cells.word_index(offset), lambda: cells.free_cells(offset))

    def places(
        self,
        abi: Mapping[str, int],
        interrupt_flag: tuple[str, int],
        breakpoint_context: tuple[int, int],
        clock_step: Callable[[], int],
    ) -> GuestPlaces:
        """All that compiled handlers need to know of this guest."""
        return GuestPlaces(
            clock=abi["host_clock"],
            clock_step=clock_step,
            this_cpu_off=abi["percpu.this_cpu_off"],
            cpu_number=abi["percpu.cpu_number"],
            current_task=abi["percpu.current_task"],
            pid=abi["task_struct.pid"],
            comm=abi["task_struct.comm"],
            preempt_count=abi["percpu.preempt_count"],
            need_resched=abi["percpu.need_resched"],
            hardirq_mask=abi["preempt.hardirq_mask"],
            softirq_mask=abi["preempt.softirq_mask"],
            interrupt_flag=interrupt_flag,
            last_pid=self._last_pid_at,
            event_time=self._request_at,
            scratch=self._scratch_at,
            breakpoint_context=breakpoint_context,
            save_comm=self._save_comm,
            new_counter=self.new_counter,
        )

    def forget_comm(self) -> None:
        """A task's name may have changed, or what is remembered of it: ask at its next record."""
        for cell in self._last_pids:
            cell[0] = _NO_PID

    def watch(self, array: Recorded) -> None:
        """Tell the array of records that guest code made, as long as it is there."""
        self._arrays[array] = 0

    def notify(self) -> None:
        """Tell those who wait for records, if guest code may have made some."""
        for array, seen in self._arrays.items():
            if array.listeners and array.written != seen:
                self._arrays[array] = array.written
                array.notify()

    def _save_comm(self) -> bool:
        pid = self.tasks.pid()
        self._cmdlines.save(pid, self.tasks.comm().decode("utf-8", "surrogateescape"))
        self._last_pids[self.tasks.cpu()][0] = pid
        return True

    def room_maker(self, buffers: Sequence[RingBuffer]) -> Callable[[], bool]:
        """RingBuffer.make_room of the CPU's buffer, called for the event that a handler asks for."""

        def make_room() -> bool:
            cpu = self.tasks.cpu()
            time_stamp, length = self._requests[cpu]
            return buffers[cpu].make_room(int(length), int(time_stamp))

        return make_room
