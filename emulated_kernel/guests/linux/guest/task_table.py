"""TaskTable: a map from the addresses of task_structs to the live client tasks."""

from __future__ import annotations

from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE, LinuxTask
from emulated_kernel.guests.linux.kernel_offsets import PT_REGS, KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind

_MAX_PADDING = 64
"""Maximum number of bytes between struct pt_regs and the end of a kernel stack."""


class TaskTable:
    """The live client tasks, by the addresses of their task_structs."""

    def __init__(self, machine: LinuxMachine, structs: KernelStructs, facts: KernelOffsets) -> None:
        """Create an empty table, and find out where struct pt_regs ends in a kernel stack.

        The end is found from the running task, which must be in user mode.

        Raises: GuestFault (the end that was found is not a plausible place in a kernel stack).
        """
        self._structs = structs
        self._pt_regs_size = facts.offsets[PT_REGS]
        self.running = machine.running_task(facts)
        """Function that returns the address of the task_struct of the task that the CPU runs."""
        self.by_address: dict[int, LinuxTask] = {}
        top = machine.regs_end(facts)
        self._regs_end = top - structs.word(self.running() + structs.offsets["task_struct.stack"])
        """Offset in bytes, in a kernel stack, of the end of struct pt_regs.

        The offset is less than the stack's size in a kernel that was built for FRED.
        Mirrors: arch/x86/include/asm/thread_info.h:TOP_OF_KERNEL_STACK_PADDING (v7.2).
        """
        if self._regs_end % 8 or not 0 <= THREAD_SIZE - self._regs_end <= _MAX_PADDING:
            raise GuestFault(Trap(TrapKind.FAULT, top), f"the running task's stack cannot end at {top:#x}")

    def pid_of(self, address: int) -> int:
        """Return the pid of the task whose task_struct is at `address`."""
        return self._structs.load_s32(self._structs.member(address, "task_struct.pid"))

    def page_tables_of(self, address: int) -> int:
        """Return the physical address of the page tables of the task whose task_struct is at `address`.

        The task must not be a kernel thread, which has no page tables of its own.
        """
        offsets = self._structs.offsets
        mm = self._structs.word(address + offsets["task_struct.mm"])
        return self._structs.physical(self._structs.word(mm + offsets["mm_struct.pgd"]))

    def adopt(self, address: int) -> LinuxTask:
        """Add the task whose task_struct is at `address`, and return it."""
        structs = self._structs
        stack = structs.word(address + structs.offsets["task_struct.stack"])
        task = LinuxTask(
            address=address,
            pid=self.pid_of(address),
            root=self.page_tables_of(address),
            registers=structs.physical(stack + self._regs_end - self._pt_regs_size),
            state=structs.member(address, "task_struct.__state"),
            flags=structs.member(address, "task_struct.thread_info.flags"),
        )
        self.by_address[address] = task
        return task
