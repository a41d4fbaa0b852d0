"""GuestRecords: allocates memory that compiled handlers write to, and answers their calls to the host."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.memory.guest_reader import DamageReports
from emulated_kernel.machine.memory.record_memory import RecordMemory
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.trace.compiled.guest_addresses import (
    SCRATCH_SIZE,
    GuestAddresses,
    HitCounter,
    NeedResched,
)
from emulated_kernel.trace.compiled.next_page import LENGTH, NEXT_PAGE, REQUEST_SIZE, TIME
from emulated_kernel.trace.context.probe_hit import Tasks
from emulated_kernel.trace.context.task_check import TaskCheck
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, RingControls, RingMemory
from emulated_kernel.trace.text.cmdlines import SavedCmdlines
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import MemoryBudget

_CELL = 8
_NO_PID = 0xFFFFFFFF


class GuestRecords(TaskObserver):
    """Allocates the memory that compiled handlers write to, and answers the handlers' calls to the host."""

    def __init__(
        self,
        cells: RecordMemory,
        tasks: Tasks,
        cmdlines: SavedCmdlines,
        clock: GuestClock,
        damage: DamageReports,
        budget: MemoryBudget,
        compile_next_page: Callable[[int], int | None],
    ) -> None:
        """Allocate the per-CPU memory for entries and for requests for room in a ring buffer.

        `damage` gets reports of damaged ring buffers. `budget`: see the attribute. `compile_next_page`:
        compiles the code of next_page.py and returns the code's address, or None if the code cannot be
        compiled. Its argument is the per-CPU offset of the memory in which handlers request room in a ring
        buffer.
        """
        self._cells = cells
        self.budget = budget
        """The memory budget to which ring buffers are charged, with a limit for each user."""
        self._users: dict[int, tuple[int, int]] = {}
        """Address of a ring buffer's pages -> (size of the pages in bytes, uid to which they are charged)."""
        self._damage = damage
        self.tasks = tasks
        self._cmdlines = cmdlines
        self._request_at = cells.alloc_percpu(REQUEST_SIZE)
        self._requests = [cell.cast("Q") for cell in cells.cells(self._request_at, REQUEST_SIZE)]
        """For each CPU, the words of the memory in which guest code requests room in a ring buffer."""
        self._compile_next_page = compile_next_page
        self._set_next_page(0)
        self._last_pid_at = cells.alloc_percpu(_CELL)
        self._last_pids = [cell.cast("Q") for cell in cells.cells(self._last_pid_at, _CELL)]
        self._scratch_at = cells.alloc_percpu(SCRATCH_SIZE)
        self._named_pid = _NO_PID
        """Pid of the task whose name was saved last; _NO_PID if there is none."""
        self._comm = memoryview(b"")
        """View of the name in the task_struct of the task with the pid `_named_pid`."""
        self._saved_comm = b""
        """Name of the task with the pid `_named_pid` at the time when the name was saved."""
        self._saved_changes = 0
        """Value of SavedCmdlines.changes just after the name of `_named_pid` was saved."""
        self._clock = clock
        self.call_begins()

    @property
    def can_tell_time(self) -> bool:
        """Whether guest code can read the current time. Only a virtual clock makes this possible.

        The host sets a real clock only between runs of the guest, and such a clock does not advance during a
        run.
        """
        return self._clock.is_virtual

    def allocate(self, size: int) -> RingMemory:
        """Allocate `size` bytes of pages for a ring buffer.

        Raises: KernelError ENOMEM.
        """
        with self.exchanged((), (size,)) as (memory,):
            return memory

    @contextmanager
    def exchanged(self, old: Sequence[RingMemory], sizes: Sequence[int]) -> Iterator[list[RingMemory]]:
        """Return a context manager that replaces the pages of the ring buffers `old` by those it yields.

        `sizes`: the size in bytes of each new buffer's pages. The new pages may overlap the old ones. The old
        data is intact at the start of the `with` block, and gone after its end. An exception in the block
        undoes the exchange.
        Raises: KernelError ENOMEM.
        """
        pages = [memory.address for memory in old]
        user = self.budget.user()
        former = [self._users[address] for address in pages]
        with self.budget.exchanged(former, sum(sizes), user), ExitStack() as block:
            try:
                new = block.enter_context(self._cells.exchanged_pages(pages, sizes))
            except HardwareError as error:
                raise KernelError(
                    errno.ENOMEM,
                    f"ring buffers: no memory or disk space for {sum(sizes)} bytes; choose smaller sizes",
                ) from error
            yield [self._pages(address, size) for address, size in zip(new, sizes, strict=True)]
            for address in pages:
                del self._users[address]
            self._users |= {address: (size, user) for address, size in zip(new, sizes, strict=True)}

    def _pages(self, address: int, size: int) -> RingMemory:
        return RingMemory(
            self._cells.view(address, size),
            address,
            release=lambda: self._free(address),
            report=self._damage.report,
        )

    def _free(self, address: int) -> None:
        self._cells.free_pages(address)
        self.budget.give_back(*self._users.pop(address))

    def allocate_controls(self, cpus: int) -> RingControls:
        """Allocate control blocks for the ring buffers of `cpus` CPUs. Raises: KernelError ENOMEM."""
        cells = self._cells
        try:
            offset = cells.alloc_percpu(CONTROL_SIZE)
        except HardwareError as error:
            raise KernelError(
                errno.ENOMEM, "ring buffers: no memory for control blocks; remove instances"
            ) from error
        blocks = cells.cells(offset, CONTROL_SIZE)[:cpus]
        return RingControls(blocks, offset, lambda: cells.free_percpu(offset))

    def new_counter(self) -> HitCounter | None:
        """Return a counter with value 0, or None if the per-CPU memory is used up."""
        cells = self._cells
        try:
            offset = cells.alloc_percpu(_CELL)
        except HardwareError:
            return None
        return HitCounter(offset, cells.words, cells.word_index(offset), lambda: cells.free_percpu(offset))

    def task_check(self, ignores: Callable[[int], bool]) -> TaskCheck | None:
        """Return the data for guest code's check of the current task; None if the per-CPU memory is used up.

        `ignores`: returns True for the pid of a task whose events must not be recorded.
        """
        try:
            return TaskCheck(self._cells, self.tasks, ignores)
        except HardwareError:
            return None

    def places(
        self,
        abi: Mapping[str, int],
        interrupts: tuple[str, int, bool],
        breakpoint_context: tuple[int, int] | None,
        resched: NeedResched,
        words: CpuWords,
    ) -> GuestAddresses:
        """Return the addresses that compiled handlers of this guest use.

        `abi`: name of a variable, member or mask of the guest kernel -> address, offset or value.
        `interrupts`: the values of GuestAddresses.interrupt_flag and has_interrupt_mask.
        `breakpoint_context`, `resched`: see the attributes of GuestAddresses. `words`: where the guest stores
        the number of the current CPU.
        """
        register, bit, has_mask = interrupts
        return GuestAddresses(
            clock=abi["host_clock"],
            time=self._clock,
            this_cpu_off=abi.get("percpu.this_cpu_off"),
            cpu=words,
            pid=abi["task_struct.pid"],
            comm=abi["task_struct.comm"],
            need_resched=abi.get("percpu.need_resched"),
            resched=resched,
            hardirq_mask=abi["preempt.hardirq_mask"],
            softirq_mask=abi["preempt.softirq_mask"],
            interrupt_flag=(register, bit),
            has_interrupt_mask=has_mask,
            last_pid=self._last_pid_at,
            request=self._request_at,
            scratch=self._scratch_at,
            breakpoint_context=breakpoint_context,
            save_comm=self._save_comm,
            new_counter=self.new_counter,
        )

    def call_begins(self, *, keeps_names: bool = False) -> None:
        """Forget which tasks' names are saved, so that the next records save them again.

        This is necessary because a task's name may have changed, or tracefs may have dropped the saved name.
        `keeps_names`: the task whose name was saved last is not forgotten if neither its own name nor the
        saved name has changed. If it is not set, all tasks are forgotten. See TaskObserver.call_begins().
        """
        pid = _NO_PID
        if keeps_names and self._comm == self._saved_comm and self._cmdlines.changes == self._saved_changes:
            pid = self._named_pid
        for cell in self._last_pids:
            if cell[0] != pid:
                cell[0] = _NO_PID

    def renamed(self, pid: int, comm: str) -> None:
        """Save the new name of task `pid` if a CPU saved this task's name last; see TaskObserver.renamed().

        Linux: the name is saved when the CPU switches to another task, so the records get the new name.
        """
        if any(cell[0] == pid for cell in self._last_pids):
            self._cmdlines.save(pid, comm)

    def _save_comm(self) -> bool:
        tasks = self.tasks
        pid = tasks.pid()
        self._cmdlines.save(pid, tasks.comm().decode("utf-8", "surrogateescape"))
        self._last_pids[tasks.cpu()][0] = pid
        try:
            self._comm = tasks.comm_view()
            self._named_pid = pid
        # The guest has damaged the address of its current task.
        except MemoryFault:
            self._named_pid = _NO_PID
        self._saved_comm = self._comm.tobytes()
        self._saved_changes = self._cmdlines.changes
        return True

    def room_maker(self, buffers: Sequence[RingBuffer]) -> Callable[[], bool]:
        """Return a function that guest code calls on the host to get room in the current CPU's ring buffer.

        The function calls RingBuffer.make_room() with the length and time that the guest code has stored. It
        returns True if there is room now, and False if the event is dropped. `buffers`: one buffer for each
        CPU.
        """
        requests = self._requests
        current = self.tasks.cpu

        def make_room() -> bool:
            cpu = current()
            request = requests[cpu]
            if not request[NEXT_PAGE >> 3]:
                self._set_next_page(self._compile_next_page(self._request_at) or 0)
            return buffers[cpu].make_room(request[LENGTH >> 3], request[TIME >> 3])

        return make_room

    def _set_next_page(self, address: int) -> None:
        for request in self._requests:
            request[NEXT_PAGE >> 3] = address
