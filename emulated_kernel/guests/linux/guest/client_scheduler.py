"""ClientScheduler: switches between the tasks of clients, and runs the guest until a system call returns.

The host drives a task through its stub, the user-mode code that waits for requests. While the host does not
use a task, the task sleeps outside of system calls, as if an interrupt had put it to sleep. To switch
tasks, the host raises one platform interrupt, whose callback wakes the next task. The kernel does
everything else, and switching makes no system call that a probe could see.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from errno import ESRCH
from functools import partial
from operator import attrgetter
from typing import NoReturn

from emulated_kernel.guests.linux.guest.linux_task import (
    TASK_IDLE,
    TASK_INTERRUPTIBLE,
    Blocked,
    LinuxTask,
    Service,
)
from emulated_kernel.guests.linux.guest.task_table import TaskTable
from emulated_kernel.guests.linux.guest.wakeup_thunk import Wakeup
from emulated_kernel.guests.linux.pc.linux_machine import IDLE, IN_CALL, LinuxMachine
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault, Trap, TrapKind
from emulated_kernel.util.errors import KernelError

_NO_ARGUMENTS = (0,) * 6
_MAX_ERRNO = 4095
_WORD = (1 << 64) - 1


class ClientScheduler:
    """Switches between client tasks, and records which task is at its stub and which task waits in a call."""

    def __init__(
        self,
        machine: LinuxMachine,
        table: TaskTable,
        thunk: Wakeup,
        current: LinuxTask,
        need_resched: int,
    ) -> None:
        """Start with the task `current` at its stub.

        `table`: the map of client tasks. `need_resched`: mask of the bit TIF_NEED_RESCHED in
        thread_info.flags. `thunk`: wakes tasks in the guest.
        """
        self._machine = machine
        self._memory = machine.memory
        self._ram = machine.memory.ram
        self._table = table
        self._by_address = table.by_address
        self._running = table.running
        abi = machine.abi
        self.stub = abi.stub
        self._syscall = abi.stub.syscall
        self._touch = abi.stub.touch
        names = (*abi.call, "ip", abi.counter, *abi.kept)
        self._call_slots = [abi.pt_regs.index(name) for name in names]
        self._result = attrgetter(abi.result)
        self._close = abi.syscalls["close"]
        self._arrival = machine.pc.khz // 1000
        """Number of cycles by which the guest's time advances when a task arrives at its stub: a microsecond.

        Thus the guest's own work takes time even if instructions are not counted.
        """
        self._thunk = thunk
        self._need_resched = need_resched
        self.current: LinuxTask | None = current
        """The task at its stub, or None if the CPU is idle or the guest has not run since a switch."""
        self._in_call: LinuxTask | None = None
        """Task that waits for the host in its system call and does not sleep yet; None if there is none."""
        self.sleep_in_call: int | None = None
        """Address of the guest code in which a task sleeps while its system call waits for the host.

        When the task wakes there, the host calls woken(). The value is None until the host has written the
        code.
        """
        self._answers: dict[LinuxTask, Callable[[], None]] = {}
        """Sleeping task -> function that stores the call result in the registers after the task has woken."""

    # Run and switch

    def run(self) -> LinuxTask | None:
        """Run until a task is at its stub, a task's system call waits for the host, or the CPU is idle.

        Return the task, or None if the CPU is idle.
        """
        if self._in_call is not None:
            self._leave_call()
        self.current = None
        machine = self._machine
        stopped = machine.run()
        if stopped is IDLE:
            return None
        if stopped is IN_CALL:
            return self._in_call
        address = self._running()
        task = self._by_address.get(address) or self._adopt(address)
        if task.pending:
            result = self._result(machine.regs)
            task.pending = False
            task.result = result - (1 << 64) if result >> 63 else result
        machine.pc.pass_time(self._arrival)
        self.current = task
        return task

    def _adopt(self, address: int) -> LinuxTask:
        """Add to the task table the task whose task_struct is at `address`; return the task.

        The task is at its stub.

        Raises: GuestFault (the guest's memory there is no valid task_struct; the guest is declared dead).
        """
        try:
            return self._table.adopt(address)
        except MemoryFault as fault:
            self._machine.death = f"its current task leads to {fault}"
            raise GuestFault(Trap(TrapKind.FAULT, address), self._machine.death) from fault

    def switch(self, to: LinuxTask | None) -> None:
        """Put the current client task to sleep. If `to` is given, wake this task in the guest's next run."""
        self._leave_call()
        task = self.current
        self.current = None
        if task is not None:
            self._put_to_sleep(task)
            # With this flag the kernel calls schedule() on its way back to user mode.
            self._memory.words[task.flags >> 3] |= self._need_resched
        self._thunk.wake(to.address if to else 0)

    def _put_to_sleep(self, task: LinuxTask, state: int = TASK_INTERRUPTIBLE) -> None:
        struct.pack_into("<I", self._ram, task.state, state)

    def run_until(
        self,
        is_done: Callable[[], bool],
        *,
        on_arrival: Callable[[], None] | None = None,
        on_idle: Callable[[], bool] | None = None,
    ) -> bool:
        """Run the guest until `is_done()` is true; return True.

        Return False if `is_done()` is still false after the CPU time that a call may take, or if the guest
        is idle and `on_idle` ends the run. `on_arrival` is called if a task arrives at its stub while
        `is_done()` is false; by default the task is put to sleep. `on_idle` is called when the CPU is idle;
        its result False ends the run. By default, time passes to the next timer interrupt.
        """
        return self._go_on_until(self.run(), is_done, on_arrival, on_idle)

    def _go_on_until(
        self,
        arrived: LinuxTask | None,
        is_done: Callable[[], bool],
        on_arrival: Callable[[], None] | None = None,
        on_idle: Callable[[], bool] | None = None,
    ) -> bool:
        """Continue run_until() after the guest's first run, and return the result of run_until().

        `arrived`: what the first run() returned: a task, or None if the CPU is idle. The other parameters are
        those of run_until().
        """
        time = self._machine.call_time()
        while not is_done():
            if time.is_over():
                return False
            if arrived is None:
                if on_idle is None:
                    self._machine.timer()
                elif not on_idle():
                    return False
            elif on_arrival is None:
                self.switch(None)
            else:
                on_arrival()
            arrived = self.run()
        return True

    def _timer_until(self, end: int) -> bool:
        """Advance the time to the next timer interrupt, deliver the interrupt, and return True.

        Return False, with nothing changed, if the timer is off, or if the interrupt would come after the TSC
        value `end`.
        """
        pc = self._machine.pc
        if pc.timer_vector is None or pc.due is None or max(pc.due, pc.tsc) > end:
            return False
        self._machine.timer()
        return True

    def _tsc_in(self, microseconds: int) -> int:
        return self._machine.pc.tsc + microseconds * self._machine.pc.khz // 1000

    def take_interrupts(self) -> None:
        """Deliver all timer interrupts whose time has come, one after the other.

        Return early if no task is at its stub any more.
        """
        while self.current is not None and self._machine.pc.is_due:
            self._machine.timer()
            self.run()

    # System calls

    def call(
        self,
        task: LinuxTask,
        number: int,
        *arguments: int,
        patience: int = 0,
        service: Service | None = None,
    ) -> int:
        """Make the system call `number` by a task, and return the result. Raises: as wait_for_result().

        `patience`: as for wait_for_result(). `service`: function that does the host's work in the call (see
        Service), or None.
        """
        task.service = service
        self.begin(task, self._syscall, number, arguments)
        return self.wait_for_result(task, patience)

    def call_after_close(
        self, task: LinuxTask, closed: int, number: int, *arguments: int, patience: int = 0
    ) -> int:
        """Make a task close the descriptor `closed` and make the system call `number`, both in one run.

        Ignore errors of the close. Return the result of the system call, as wait_for_result() does.
        `patience`: as for wait_for_result().
        """
        first, *others = arguments
        self.begin(task, self.stub.two_calls, self._close, (closed, *others), kept=(first, number))
        return self.wait_for_result(task, patience)

    def begin(
        self,
        task: LinuxTask,
        ip: int,
        number: int,
        arguments: tuple[int, ...],
        count: int = 0,
        kept: tuple[int, int] = (0, 0),
    ) -> None:
        """Make the task continue at `ip` in the next run, with the registers of a system call.

        `ip`: address in the stub's code, such as UserStub.syscall. `number` and `arguments`: number and
        arguments of the system call. `count`: number of pages, if `ip` is UserStub.touch. `kept`: the first
        argument and the number of the second call, if `ip` is UserStub.two_calls.
        """
        machine = self._machine
        if machine.death:
            machine.check_alive()
        if not task.alive:
            raise KernelError(ESRCH, f"task {task.pid} has ended")
        if self.current is not None and machine.pc.is_due:
            self.take_interrupts()
        values = (*arguments, *_NO_ARGUMENTS[len(arguments) :], number, ip, count, *kept)
        task.pending = True
        if task is self.current:
            # Entering the system call here is cheaper: the emulated instruction would cost a callback.
            if ip != self._touch:
                machine.cpu.syscall(ip, values)
            else:
                machine.cpu.set_call(values)
            return
        words = self._memory.words
        base = task.registers >> 3
        for slot, value in zip(self._call_slots, values, strict=True):
            words[base + slot] = value & _WORD
        self.switch(task)

    def wait_for_result(self, task: LinuxTask, patience: int = 0) -> int:
        """Run until the task's call has returned, and return its result.

        `patience`: microseconds of the guest's time that the call may sleep. 0 means no limit.

        Raises: Blocked (the call has slept for longer), WouldBlock (the host's service for the call must
        wait), KernelError (the call failed), GuestFault (the call sleeps while the guest's timer is off, or
        does not return).
        """
        if task.waits:
            self._serve(task)
        if task.pending or self.current is None:
            arrived = self.run()
            # One run is enough for nearly every call.
            if task.pending:
                self._wait(task, arrived, patience)
        if -_MAX_ERRNO <= task.result < 0:
            raise KernelError(-task.result)
        return task.result

    def _wait(self, task: LinuxTask, arrived: LinuxTask | None, patience: int) -> None:
        end: int | None = None

        def serve_or_send_away() -> None:
            if task.waits:
                self._serve(task)
            else:
                self.switch(None)

        def wait_for_timer() -> bool:
            nonlocal end
            if end is None:
                end = self._tsc_in(patience)
            if patience and self._machine.pc.tsc >= end:
                raise Blocked
            self._machine.timer()
            return True

        if not self._go_on_until(arrived, lambda: not task.pending, serve_or_send_away, wait_for_timer):
            self.give_up(f"task {task.pid} doesn't come back from its call")

    def give_up(self, why: str) -> NoReturn:
        """Declare the guest dead, because an expected event has not happened.

        `why`: the cause of death, for error messages.

        Raises: GuestFault.
        """
        self._machine.death = why
        raise GuestFault(Trap(TrapKind.BUDGET, 0), why)

    # Calls that the host serves

    def wait_in_call(self) -> bool:
        """End the guest's run, because the running task's system call waits for its service (host's work).

        Return True if the run ends. Return False if the running task is no client's, or its call has no
        service; then the guest continues.
        """
        task = self._by_address.get(self._running())
        if task is None or task.service is None:
            return False
        task.waits = True
        self._in_call = task
        self._machine.stop_in_call()
        return True

    def woken(self) -> bool:
        """Deliver the result for which the running task slept in its system call; return True.

        If there is no result yet, put the task to sleep again, and return True. Return False, with nothing
        changed, if the task waits for no result.
        """
        task = self._by_address.get(self._running())
        if task is None or not (task.waits or task in self._answers):
            return False
        answer = self._answers.pop(task, None)
        if answer is None:
            # A signal may have woken the task. While it is pending, an interruptible sleep ends at once.
            self._sleep_in_call(task, TASK_IDLE)
        else:
            answer()
        return True

    def _leave_call(self) -> None:
        """If a task waits in its system call, make it go to sleep when the guest runs next."""
        task = self._in_call
        self._in_call = None
        if task is not None:
            self._sleep_in_call(task)

    def _sleep_in_call(self, task: LinuxTask, state: int = TASK_INTERRUPTIBLE) -> None:
        assert self.sleep_in_call is not None, "nothing waits in a call before that code is there"
        self._put_to_sleep(task, state)
        self._machine.regs.ip = self.sleep_in_call

    def _serve(self, task: LinuxTask) -> None:
        """Run the service (host's work) for which the task's call waits, and pass the result to the call.

        The guest may run during the service. If the task sleeps at the end of the service, wake it; it gets
        the result when it runs.
        Raises: WouldBlock (the service must wait).
        """
        assert task.service is not None
        answer = task.service()
        task.waits = False
        task.service = None
        if self._in_call is task:
            self._in_call = None
            answer()
        else:
            self._answers[task] = answer
            self.switch(task)

    def cancel_service(self, task: LinuxTask) -> None:
        """Cancel the service (the host's work) in the task's call.

        A call that already waits for the service sleeps until something else, such as a signal, wakes the
        task.
        """
        task.waits = False
        task.service = None
        self._answers.pop(task, None)

    # Time for the guest itself

    def idle(self, microseconds: int) -> None:
        """Advance guest time by `microseconds`, and run the guest's own work that is due in this time.

        Such work is timers and kernel threads. The current client task is put to sleep first.
        """
        end = self._tsc_in(microseconds)
        self.work(microseconds)
        self._machine.pc.jump_to(end)

    def work(self, microseconds: int) -> None:
        """Run timers and kernel threads until the guest is idle and no timer is due within `microseconds`.

        First, the current client task is put to sleep.
        """
        end = self._tsc_in(microseconds)
        if self.current is not None:
            self.switch(None)
        self.run_until(lambda: False, on_idle=partial(self._timer_until, end))

    def do_work(self, callback: int, is_done: Callable[[], bool], microseconds: int) -> None:
        """Call the guest code at `callback` in an interrupt, and run timers and kernel threads after it.

        End when `is_done()` is true, or when the guest is idle and no timer is due within `microseconds`.
        """
        self._machine.check_alive()
        if self.current is not None:
            self.take_interrupts()
        end = self._tsc_in(microseconds)
        with self._thunk.replaced_by(callback):
            self.switch(None)
            arrived = self.run()
        self._go_on_until(arrived, is_done, on_idle=partial(self._timer_until, end))

    def schedule_in(self, task: LinuxTask) -> None:
        """Run the guest until `task` is at its stub.

        Do nothing if the task is there already, sleeps in a call, or has ended.
        """
        if task is self.current or task.pending or not task.alive:
            return
        self._machine.check_alive()
        self.switch(task)
        if not self.run_until(lambda: self.current is task, on_arrival=partial(self.switch, task)):
            self.give_up(f"task {task.pid} doesn't come to its stub")
