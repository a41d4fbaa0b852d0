"""GuestHeap: guest memory for shadow stacks; TaskFields: the fields of task_structs for shadow stacks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Protocol

from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

_CHUNK = 64 << 10
_UNIT = 16
_FORMATS = {4: "I", 8: "Q"}


class ViewedMemory(Protocol):
    """Guest memory of which a live view can be taken."""

    def view(self, va: int, size: int, /) -> memoryview: ...


class PageSource(Protocol):
    """The machine's allocator of pages that host and guest can read and write."""

    @property
    def memory(self) -> ViewedMemory: ...

    def alloc_pages(self, size: int, /) -> int: ...

    def free_pages(self, va: int, /) -> None: ...


class GuestHeap:
    """Allocates small pieces of zeroed guest memory; `heap[address]` is the word at `address`.

    Raises: MemoryFault (`heap[address]` with an address outside of the heap's memory, for example from a
    pointer that the guest has damaged).
    """

    def __init__(self, source: PageSource, word_size: int) -> None:
        self._source = source
        self.word_size = word_size
        self._shift = word_size.bit_length() - 1
        self._chunks: dict[int, UnitPool] = {}
        self._pages: dict[int, memoryview] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        """Address of a piece -> its size in bytes, and the address of its chunk."""

    def __getitem__(self, address: int) -> int:
        try:
            return self._pages[address // PAGE_SIZE][address % PAGE_SIZE >> self._shift]
        except KeyError:
            raise MemoryFault(address, "not in a shadow stack") from None

    def __setitem__(self, address: int, value: int) -> None:
        try:
            self._pages[address // PAGE_SIZE][address % PAGE_SIZE >> self._shift] = value
        except KeyError:
            raise MemoryFault(address, "not in a shadow stack", write=True) from None

    def view(self, address: int, size: int) -> memoryview:
        """Return a live view of `size` bytes at `address` in an allocated piece, for reading and writing."""
        return self._source.memory.view(address, size)

    @property
    def used(self) -> int:
        """Total size of the pieces that are allocated now, in bytes."""
        return sum(size for size, _ in self._sizes.values())

    def size_of(self, address: int) -> int:
        """Return the size in bytes of the piece at `address`, as it was passed to alloc()."""
        return self._sizes[address][0]

    def alloc(self, size: int) -> int:
        """Return the address of a new piece of `size` zeroed bytes.

        Raises: KernelError ENOMEM (the heap is full, and the machine has no memory to extend it).
        """
        # Try the newest chunk first; if there are thousands, the older ones are full.
        for base, pool in reversed(self._chunks.items()):
            try:
                address = pool.alloc(size)
            except HardwareError:
                continue
            self._sizes[address] = size, base
            self.view(address, size)[:] = bytes(size)
            return address
        self._add_chunk(max(_CHUNK, -(-size // PAGE_SIZE) * PAGE_SIZE))
        return self.alloc(size)

    def free(self, address: int) -> None:
        """Free the piece of memory at `address`.

        The heap gets memory from the machine in chunks of pages. If no other piece of this piece's chunk is
        in use, give the chunk back to the machine.
        """
        _, base = self._sizes.pop(address)
        pool = self._chunks[base]
        pool.free(address)
        if not pool.used:
            self._drop_chunk(base)

    def _add_chunk(self, size: int) -> None:
        try:
            base = self._source.alloc_pages(size)
        except HardwareError as error:
            raise KernelError(errno.ENOMEM, "shadow stacks: no memory left") from error
        self._chunks[base] = UnitPool(base, size, _UNIT)
        for page in range(base, base + size, PAGE_SIZE):
            self._add_page(page)

    def _add_page(self, page: int) -> None:
        view = self._source.memory.view(page, PAGE_SIZE)
        self._pages[page // PAGE_SIZE] = view.cast(_FORMATS[self.word_size])  # type: ignore[call-overload]

    def _drop_chunk(self, base: int) -> None:
        pool = self._chunks.pop(base)
        for page in range(base, pool.end, PAGE_SIZE):
            del self._pages[page // PAGE_SIZE]
        self._source.free_pages(base)


_CACHE_SIZE = 1024
RETHOOKS = 0
"""Value of `field` in TaskFields.of() that selects the field `rethooks` of a task."""
RET_STACK = 1
"""Value of `field` in TaskFields.of() that selects the field `ret_stack` of a task."""
_FIELDS = "task_struct.rethooks", "task_struct.ret_stack"
"""Names of the fields RETHOOKS and RET_STACK in an ABI table."""


class TaskFields:
    """Finds a task's fields `rethooks` and `ret_stack`. A field that task_struct lacks is in host memory.

    If no `running_task` is given and the image's ABI table lacks `percpu.current_task`, all tasks share one
    shadow stack.
    Mirrors: include/linux/sched.h:struct task_struct, rethooks, ret_stack (v6.1).
    """

    def __init__(
        self,
        memory: ViewedMemory,
        abi: Mapping[str, int],
        word_size: int,
        running_task: Callable[[], int] | None = None,
    ) -> None:
        """Find the fields `rethooks` and `ret_stack` by the offsets in `abi`.

        `abi`: name -> offset in bytes. `running_task`: returns the address of the running
        task; None if a per-CPU variable holds it.
        """
        self._memory = memory
        self._running_task = running_task
        self._format = _FORMATS[word_size]
        self._word_size = word_size
        self._known: tuple[dict[int, memoryview], ...] = ({}, {})
        """Number of a field (RETHOOKS or RET_STACK) -> address of a task -> live view of the task's field."""
        self._currents: dict[int, memoryview] = {}
        """Address of a per-CPU area -> live view of the word with the CPU's current task."""
        self._offsets = tuple(abi.get(name) for name in _FIELDS)
        self._current_at = abi.get("percpu.current_task")
        self._current: memoryview | None = None
        self.cpu = 0
        """Number of the current CPU, which look_from() sets."""
        if self._current_at is not None:
            self.look_from(0, abi["percpu.base"])

    def look_from(self, cpu: int, area: int) -> None:
        """Make `cpu` the current CPU, whose task current() returns.

        `area`: address of this CPU's per-CPU area.
        """
        self.cpu = cpu
        current = self._currents.get(area)
        if current is None and self._current_at is not None:
            current = self._words(self._memory.view(area + self._current_at, self._word_size))
            self._currents[area] = current
        self._current = current

    def _words(self, view: memoryview) -> memoryview:
        return view.cast(self._format)  # type: ignore[call-overload, no-any-return]

    def current(self) -> int:
        """Return the address of the current CPU's running task.

        Return 0 if no `running_task` was given and the image's ABI table lacks `percpu.current_task`.
        """
        if self._running_task is not None:
            return self._running_task()
        return 0 if self._current is None else int(self._current[0])

    def of(self, task: int, field: int) -> memoryview:
        """Return a live view of a field of a task, which is one word.

        `task`: address of the task_struct. `field`: RETHOOKS or RET_STACK.
        """
        known = self._known[field]
        word = known.get(task)
        if word is None:
            offset = self._offsets[field]
            if offset is None:
                word = self._words(memoryview(bytearray(self._word_size)))
            else:
                if len(known) >= _CACHE_SIZE:
                    known.clear()
                word = self._words(self._memory.view(task + offset, self._word_size))
            known[task] = word
        return word

    def ended(self, task: int) -> None:
        """Discard the cached views, and the fields in host memory, of a task that has ended."""
        for known in self._known:
            known.pop(task, None)
