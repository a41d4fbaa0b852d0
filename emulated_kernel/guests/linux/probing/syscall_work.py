"""SyscallWork: the task flag with which system calls of a distribution's kernel reach the tracepoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from emulated_kernel.guests.linux.kernel_offsets import SYSCALL_WORK, THREAD_FLAGS
from emulated_kernel.image.linux.btf import Kind
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.memory.guest_memory import GuestMemory

_COUNT = "sys_tracepoint_refcount"
_BITS = "syscall_work_bit"
_BIT = "SYSCALL_WORK_BIT_SYSCALL_TRACEPOINT"


class SyscallWork:
    """Sets the flag for traced system calls in all tasks while a tracepoint of system calls is enabled.

    Mirrors: kernel/tracepoint.c:syscall_regfunc, syscall_unregfunc (v6.1).
    """

    def __init__(
        self,
        kernel: LinuxKernel,
        memory: GuestMemory,
        task_structs: Callable[[], Iterator[int]],
        old_flag: int = 0,
    ) -> None:
        """Find the task flag that makes system calls reach the tracepoints.

        The flag is SYSCALL_WORK_SYSCALL_TRACEPOINT in thread_info.syscall_work. In kernels before v5.11, it
        is the mask `old_flag` in thread_info.flags; `old_flag` is 0 if the mask is unknown. `task_structs`
        yields the addresses of all task_structs.
        """
        self._kernel = kernel
        self._memory = memory
        self._task_structs = task_structs
        self._old_flag = old_flag

    def is_known(self) -> bool:
        """Return True if the flag is known, and if this kernel counts the tracepoints that use the flag."""
        has_flag = self._kernel.btf.has(SYSCALL_WORK) or self._old_flag
        return self._kernel.kallsyms.lookup_name(_COUNT) is not None and bool(has_flag)

    def _place(self) -> tuple[int, int]:
        """Return the offset in bytes of the word with the flag in task_struct, and the flag as a mask."""
        btf = self._kernel.btf
        if not btf.has(SYSCALL_WORK):
            return btf.offset(THREAD_FLAGS), self._old_flag
        return btf.offset(SYSCALL_WORK), 1 << btf.enumerators(btf.find(Kind.ENUM, _BITS))[_BIT]

    def switch(self, on: bool) -> None:
        """Count one tracepoint more if `on` is True, otherwise one less; set or clear the flag if needed.

        The count is the kernel's own. If it rises from 0, set the flag in all tasks; if it falls to 0, clear
        the flag. While the count is not 0, the kernel sets the flag in each task that is forked. Raises:
        MemoryFault (the task list is damaged).
        """
        offset, flag = self._place()
        count_at = self._kernel.kallsyms.lookup_name(_COUNT)
        assert count_at is not None
        count = int.from_bytes(self._memory.read(count_at, 4), "little")
        changes = {}
        if count == (0 if on else 1):
            # Read everything that may fault before anything is written.
            for task in self._task_structs():
                work = self._memory.read_word(place := task + offset)
                changes[place] = work | flag if on else work & ~flag
        self._memory.write(count_at, (count + (1 if on else -1) & 0xFFFFFFFF).to_bytes(4, "little"))
        for place, work in changes.items():
            self._memory.write_word(place, work)
