"""LinuxTasks: the guest tasks that make clients' system calls.

All these tasks descend from the guest's init.
"""

from __future__ import annotations

import struct

from emulated_kernel.guests.linux.boot.snapshot import ShownCpu
from emulated_kernel.guests.linux.guest import breakpoint_stub
from emulated_kernel.guests.linux.guest.client_scheduler import ClientScheduler
from emulated_kernel.guests.linux.guest.dcache import DcacheReader
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.linux_task import Blocked, LinuxTask, Service
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.task_life import TaskLife
from emulated_kernel.guests.linux.guest.task_memory import TaskMemory
from emulated_kernel.guests.linux.guest.task_table import TaskTable
from emulated_kernel.guests.linux.guest.wakeup_thunk import WakeupThunk
from emulated_kernel.guests.linux.guest.wakeups import wakeup
from emulated_kernel.guests.linux.guest_abi import CURRENT_TASK
from emulated_kernel.guests.linux.initramfs import BUFFER, BUFFER_SIZE
from emulated_kernel.guests.linux.kernel_offsets import PID_MAX, KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine

__all__ = ["Blocked", "LinuxTask", "LinuxTasks", "Service"]

_SIGCHLD = 17
_SIG_IGN = 1
_WIPE_ON_FORK = 18
_PID_MAX = 1 << 22
_EXITS = 16
"""Number of exits after which, on arm64 and RISC-V, the guest runs for _GRACE to free the tasks' memory."""
_GRACE = 40_000
"""Microseconds of guest time in which an RCU grace period ends."""


class LinuxTasks(RunningLinux):
    """The scheduler, the memory and the life cycle of client tasks in a booted guest, as one object.

    Init must be at its stub, the user-mode code that waits for requests of the host. The methods of these
    three parts are attributes of this class, because forwarding methods would slow down each system call.
    """

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets) -> None:
        super().__init__()
        self.machine = machine
        self.release = facts.release
        self.facts = facts
        structs = KernelStructs(machine, facts.offsets)
        self._structs = structs
        self._exits = 0
        self.shown_cpu: ShownCpu | None = None
        """The production CPU that the guest sees; None if it sees the emulated one."""
        self.per_cpu = structs.word(facts.symbols["__per_cpu_offset"])
        current = facts.per_cpu.get(CURRENT_TASK)
        self.current_cell = 0 if current is None else self.per_cpu + current
        self.need_resched = facts.need_resched
        self.syscall_trace = facts.syscall_trace
        table = TaskTable(machine, structs, facts)
        self.table = table
        self.init = table.adopt(table.running())
        self.root = self.init.root
        self.files = DcacheReader(machine, facts, self.init.address)
        self._thunk = wakeup(machine, facts, structs)
        self.host_room = self._thunk.host_room
        machine.watch_reset(facts.symbols["emergency_restart"])
        machine.ease_user_access(facts.user_access)

        scheduler = ClientScheduler(machine, table, self._thunk, self.init, facts.need_resched)
        self._scheduler = scheduler
        self.running = table.running
        self.call = scheduler.call
        self.call_after_close = scheduler.call_after_close
        self.wait_for_result = scheduler.wait_for_result
        self.wait_in_call = scheduler.wait_in_call
        self.woken = scheduler.woken
        self.do_work = scheduler.do_work
        self.schedule_in = scheduler.schedule_in
        self.take_interrupts = scheduler.take_interrupts
        self.work = scheduler.work

        memory = TaskMemory(machine.memory, table, scheduler)
        self.copy_to_user = memory.copy_to_user
        self.copy_from_user = memory.copy_from_user
        self.update_page_tables = memory.update_page_tables

        life = TaskLife(machine, facts, structs, table, scheduler, self.events)
        self._life = life
        self.fork = life.fork
        self.set_comm = life.set_comm
        self.set_creds = life.set_creds

    def prepare(self) -> None:
        """Prepare a guest that has just booted: set its limit of pids, and init's signal and memory settings.

        All tasks descend from init and inherit two settings: SIGCHLD is ignored, and a forked child finds
        zeros in the buffer for data.
        """
        self._structs.store("<i", self._structs.physical(self.facts.symbols[PID_MAX]), _PID_MAX)
        self.copy_to_user(self.init, BUFFER, struct.pack("<4Q", _SIG_IGN, 0, 0, 0))
        calls = self.machine.abi.syscalls
        self.call(self.init, calls["rt_sigaction"], _SIGCHLD, BUFFER, 0, 8)
        self.call(self.init, calls["madvise"], BUFFER, BUFFER_SIZE, _WIPE_ON_FORK)

    def deliver_breakpoints(self) -> None:
        """From now on, let guest code, without Python, deliver the exceptions of breakpoints in kernel mode.

        The guest kernel's own kprobes cause these exceptions. Do nothing on machines other than the PC, or if
        Python must handle the breakpoints; see breakpoint_stub.install().
        """
        if isinstance(self.machine, PcMachine) and isinstance(self._thunk, WakeupThunk):
            breakpoint_stub.install(self.machine, self._thunk)

    def idle(self, microseconds: int) -> None:
        self._scheduler.idle(microseconds)

    def exit(self, task: LinuxTask) -> None:
        """End a task whose process has ended on the host. If the task sleeps in a call, kill it."""
        self._life.exit(task, self.init)
        self._exits += 1
        # Kernels for arm64 and RISC-V read their clock so rarely that no tick would end an RCU grace period.
        if not isinstance(self.machine, PcMachine) and not self._exits % _EXITS:
            self.idle(_GRACE)

    @property
    def current(self) -> LinuxTask | None:
        """The task that is at its stub, or None if the CPU runs other code."""
        return self._scheduler.current

    @property
    def sleep_in_call(self) -> int | None:
        """Address of the guest code in which a task sleeps while its system call waits for the host.

        The value is None until the host has written the code.
        """
        return self._scheduler.sleep_in_call

    @sleep_in_call.setter
    def sleep_in_call(self, address: int) -> None:
        self._scheduler.sleep_in_call = address
