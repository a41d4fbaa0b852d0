"""TaskMemory: reads and writes the user memory of client tasks.

Before a write, missing and shared pages are replaced by private pages, as the kernel would do.
"""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.guests.linux.guest.client_scheduler import ClientScheduler
from emulated_kernel.guests.linux.guest.linux_task import LinuxTask
from emulated_kernel.guests.linux.guest.task_table import TaskTable
from emulated_kernel.guests.linux.pc.ram import PAGE, PRESENT, LinuxMemory


class TaskMemory:
    """Reads and writes the user memory of client tasks.

    Raises: KernelError (the task has ended), GuestFault (the guest has died).
    """

    def __init__(self, memory: LinuxMemory, table: TaskTable, scheduler: ClientScheduler) -> None:
        self._memory = memory
        self._ram = memory.ram
        self._owned = memory.owned
        self._shift = memory.frame_shift
        self._frame = memory.frame
        self._stub = scheduler.stub
        self._table = table
        self._scheduler = scheduler

    def update_page_tables(self, task: LinuxTask) -> None:
        """Update the address of a task's page tables, because an execve has replaced its memory."""
        task.root = self._table.page_tables_of(task.address)
        task.entries.clear()

    def copy_to_user(self, task: LinuxTask, va: int, data: bytes) -> None:
        """Write `data` to the virtual address `va` of the task."""
        page = va & -PAGE
        slot = task.entries.get(page)
        entry = self._memory.words[slot] if slot is not None else self._entry(task, page)
        if entry & self._owned == self._owned and va + len(data) <= page + PAGE:
            at = (entry << self._shift & self._frame) + va - page
            self._ram[at : at + len(data)] = data
            return
        for at, offset, size in self._own_pages(task, va, len(data)):
            self._ram[at : at + size] = data[offset : offset + size]

    def copy_from_user(self, task: LinuxTask, va: int, size: int) -> bytes:
        """Return `size` bytes at the virtual address `va` of the task. A missing page reads as zeros."""
        start = va & -PAGE
        slot = task.entries.get(start)
        entry = self._memory.words[slot] if slot is not None else self._entry(task, start)
        if entry & PRESENT and va + size <= start + PAGE:
            at = (entry << self._shift & self._frame) + va - start
            return self._ram[at : at + size]
        parts = []
        for page in range(start, va + size, PAGE):
            first = max(page, va)
            last = min(page + PAGE, va + size)
            found = self._memory.walk(task.root, first)
            parts.append(self._ram[found[0] : found[0] + last - first] if found else bytes(last - first))
        return b"".join(parts)

    def _entry(self, task: LinuxTask, page: int) -> int:
        """Return the page table entry of the 4-KiB page at `page`, and cache the entry's index.

        The cache is `task.entries`. If no entry maps exactly this page, return 0 and cache nothing.
        """
        slot, size = self._memory.last(task.root, page)
        if size != PAGE:
            return 0
        task.entries[page] = slot
        return self._memory.words[slot]

    def _own_pages(self, task: LinuxTask, va: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (physical address, offset from `va`, size in bytes) for each page's part of a range.

        The range has `size` bytes and starts at `va`. Before a part is yielded, its page is made private to
        the task, as a write of the task would do.
        """
        for page in range(va & -PAGE, va + size, PAGE):
            first = max(page, va)
            last = min(page + PAGE, va + size)
            found = self._memory.walk(task.root, page)
            if found is None or not self._memory.is_writable(found[1]):
                found = self._touch(task, page, self._ram[found[0]] if found else 0)
            yield found[0] + first - page, first - va, last - first

    def _touch(self, task: LinuxTask, page: int, first_byte: int) -> tuple[int, int, int]:
        """Give the task a private page in place of a missing or shared page.

        The task writes `first_byte` to the page's first byte, which already has this value. The kernel
        handles the page fault of this write, and so provides the page. The first byte of a missing page is 0.

        Return (physical address, page table entry, size in bytes) of the private page.
        """
        self._scheduler.begin(task, self._stub.touch, first_byte, (page,), count=1)
        self._scheduler.wait_for_result(task)
        found = self._memory.walk(task.root, page)
        assert found is not None
        return found
