"""SmpGuestRunner: the guest runner of a guest with several CPUs, which run in turns."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.runner.guest_runner import (
    NSEC_PER_JIFFY,
    SERVED,
    CpuPosition,
    GuestRunner,
    GuestTask,
    Request,
)
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.util.abi import PARK, Hypercall, Vector
from emulated_kernel.util.control_lock import ControlLock

TIME_KEEPER = 0
"""Number of the CPU that counts jiffies and runs timers."""
MAX_WAITS = 50_000
"""Maximum number of successive turns that end in a wait, while no CPU becomes idle or enters user mode.

After these turns, a CPU gets a watchdog interrupt, because it may be looping.
"""
MAX_INSTRUCTIONS = 50_000_000
"""Maximum number of instructions in successive turns in which no CPU becomes idle or enters user mode.

This limit applies in place of MAX_WAITS if turns have a quantum, a number of instructions after which they
end.
"""


class SmpGuestRunner(GuestRunner):
    """Runs a guest's CPUs round robin. The turn of a CPU ends when the CPU waits or has nothing to do.

    Between calls of this object's methods, each CPU is at rest: the CPU is idle or has a task in user mode,
    and no interrupt is pending for it. The order of turns depends only on the guest, so traces are
    reproducible.
    """

    def __init__(self, kernel: BuiltinKernel, events: TaskEvents, lock: ControlLock) -> None:
        """Create a runner that runs all CPUs of the machine.

        If the machine's configuration has a quantum, a turn also ends after that number of instructions.
        """
        super().__init__(kernel, events, lock)
        machine = kernel.machine
        machine.text.interrupt_cpus = self.sync_core
        quantum = machine.config.quantum
        self._seats: list[tuple[CpuPosition, GuestTask | None]] = [
            (CpuPosition.OFFLINE, None)
        ] * machine.config.cpus
        """Number of a CPU -> (position of the CPU, such as idle or offline; its task in user mode or None).

        The item of the current CPU is out of date; `_at` and `_user` have its values.
        """
        self._turns = 0
        """Number of successive turns in which no CPU has become idle or entered user mode."""
        self._preempts = False
        """Whether turns have ended at arbitrary instructions, not only where a CPU waits."""
        self._max_turns = MAX_INSTRUCTIONS // quantum if quantum else MAX_WAITS
        self._server: int | None = None
        """Number of the CPU whose hypercall is being served; None while no hypercall is served."""
        self._unserved: dict[int, Trap] = {}
        """Number of a CPU -> hypercall at which the CPU stopped outside of its turn.

        The hypercall is served in the CPU's next turn.
        """

    def add(self, task: GuestTask) -> None:
        """Let the runner run a task, which may be in user mode already.

        For example, another CPU can run a new child while the parent is still in fork(2).
        """
        super().add(task)
        for number in self._round():
            if self._seat(number) == (CpuPosition.USER, None) and self._kernel.task_of(number) == task.addr:
                if number == self._machine.cpu:
                    self._user = task
                else:
                    self._seats[number] = CpuPosition.USER, task

    def _turn_to(self, number: int) -> None:
        """Make CPU `number` the current one; do nothing if the guest is dead."""
        here = self._machine.cpu
        if number == here or self.is_dead:
            return
        self._seats[here] = self._at, self._user
        self._machine.switch_to(number)
        self._at, self._user = self._seats[number]

    def _seat(self, number: int) -> tuple[CpuPosition, GuestTask | None]:
        """Return the position of CPU `number`, such as idle or offline, and its task in user mode.

        The task is None if the CPU is not in user mode.
        """
        return (self._at, self._user) if number == self._machine.cpu else self._seats[number]

    def _step(self) -> None:
        """Run all CPUs until each is idle or in user mode.

        The caller has answered the current CPU's hypercall.
        """
        following: int | None = self._machine.cpu
        self._turns = 0
        while following is not None:
            before = self._at
            super()._step()
            # A CPU that was idle and has only taken a tick is no progress.
            if self._at not in (CpuPosition.UNDERWAY, before):
                self._turns = 0
            self._ends_overdue()
            following = None if self.is_dead else self._next()
            if following is not None:
                self._turn_to(following)
                self._begin_turn()

    def _begin_turn(self) -> None:
        self._interrupt_current()
        hypercall = self._unserved.pop(self._machine.cpu, None)
        if hypercall is not None:
            self._machine.answer(self._serve(hypercall))

    def sync_core(self) -> None:
        """Make all other CPUs execute a serialising instruction.

        This is done by an interrupt. A CPU takes no interrupt in the middle of a hit, so all hits on other
        CPUs have ended afterwards. If this method is called within a hit, no interrupt is sent: the other
        CPUs do not run during the hit, and the host serialises them before they resume.
        Mirrors: arch/x86/kernel/alternative.c:text_poke_sync (v6.1).
        """
        if self._machine.is_running:
            self._machine.serialise()
            return
        if self.is_dead:
            return
        here = self._machine.cpu
        turns = self._turns
        if not self.is_busy:
            self._call_time.begin()
        shared = self._kernel
        waiting = {number: shared.syncs_of(number) for number in self._round() if self._is_other(number)}
        for number in waiting:
            shared.send(number, Vector.SYNC_CORE)
        if self._preempts:
            self._run_before_interrupt(waiting)
        lets_others_run = False
        for _ in range(self._max_turns):
            for number in list(self._round()):
                if number in waiting or (lets_others_run and self._may_run_for_sync(number)):
                    self._turn_to(number)
                    # Interrupts that were sent before have lower vectors and are delivered first.
                    self._run_interrupt()
                    self._run_for_sync(number)
            waiting = {number: count for number, count in waiting.items() if shared.syncs_of(number) == count}
            if not waiting or self.is_dead or self._ends_overdue():
                break
            # A CPU with interrupts disabled may wait for a lock that another CPU holds.
            lets_others_run = True
        self._turns = turns
        self._turn_to(here)

    def _run_before_interrupt(self, numbers: Iterable[int]) -> None:
        """Run each of the CPUs `numbers` for a turn, before it takes an interrupt that was sent to it.

        The turn simulates the time that a real interrupt takes to arrive.
        """
        for number in numbers:
            if self._seat(number)[0] is CpuPosition.UNDERWAY and number not in self._unserved:
                self._turn_to(number)
                self._run_for_sync(number)

    def _is_other(self, number: int) -> bool:
        """Return True if CPU `number` is online and must be interrupted by sync_core().

        The current CPU is interrupted only if it is in the middle of kernel code while no hypercall is
        served. Otherwise it usually is the CPU that patches the text, and needs no interrupt.
        """
        at = self._seat(number)[0]
        if number == self._machine.cpu:
            return at is CpuPosition.UNDERWAY and self._server is None
        return at is not CpuPosition.OFFLINE

    def _may_run_for_sync(self, number: int) -> bool:
        return number != self._server and number not in self._unserved and self._can_go_on(number)

    def _run_for_sync(self, number: int) -> None:
        """Run the current CPU, `number`, up to its next stop.

        If it stops at a hypercall, the hypercall is served in the CPU's next turn.
        """
        trap = self._run_cpu(None)
        if trap is None:
            return
        if trap.number == Hypercall.USER:
            self._enter_user(trap.args[0])
        elif trap.number == Hypercall.IDLE:
            self._at = CpuPosition.IDLE
            self._user = None
        elif trap.number in SERVED:
            self._at = CpuPosition.UNDERWAY
            self._unserved[number] = trap
        elif trap.kind is TrapKind.BUDGET:
            self._at = CpuPosition.UNDERWAY
            if self._may_interrupt():
                self._deliver(Vector.WATCHDOG)
        else:
            self._stopped_otherwise(trap)

    def _next(self) -> int | None:
        """Return the number of the CPU whose turn is next, or None if no CPU can continue."""
        return next((number for number in self._round() if self._can_go_on(number)), None)

    def _round(self) -> Iterator[int]:
        """Return the numbers of all CPUs in the order of their turns, the current CPU last."""
        count = len(self._seats)
        here = self._machine.cpu
        return ((here + step) % count for step in range(1, count + 1))

    def _can_go_on(self, number: int) -> bool:
        at, _ = self._seat(number)
        if at in (CpuPosition.UNDERWAY, CpuPosition.ANSWERED):
            return True
        return at in (CpuPosition.IDLE, CpuPosition.USER) and self._kernel.sent_to(number) != 0

    def _interrupt_current(self) -> None:
        """Deliver the lowest pending interrupt of the current CPU, if there is one and the CPU takes it."""
        cpu = self._machine.cpu
        if self._at is CpuPosition.ANSWERED or not self._kernel.sent_to(cpu):
            return
        if self._machine.interrupts_enabled and self._may_interrupt():
            # The CPU makes its hypercall again after the interrupt.
            self._unserved.pop(cpu, None)
            self._deliver(Vector(self._kernel.take_sent(cpu)))

    def _run_interrupt(self) -> None:
        """Deliver the lowest pending interrupt, and make the next turn end when the handler has returned.

        With a short quantum, a synchronisation of the CPUs would otherwise take a hundred turns. See
        _interrupt_current().
        """
        ip = self._machine.regs.ip
        self._interrupt_current()
        if self._machine.regs.ip != ip:
            self._machine.finish_interrupt(ip)

    def _serve(self, trap: Trap) -> int:
        if self._preempts:
            self._finish_records()
        self._server = self._machine.cpu
        try:
            return super()._serve(trap)
        finally:
            self._server = None

    def _finish_records(self) -> None:
        """Run each CPU that is in a compiled handler, except the current CPU, until the handler has returned.

        Afterwards trace buffers may be read and changed. Linux: waits for an RCU grace period.
        """
        machine = self._machine
        here = self._machine.cpu

        def in_handler(ip: int) -> bool:
            return any(holds(ip) for holds in machine.in_handler)

        for number, (ip, _) in enumerate(machine.positions()):
            if number != here and self._seats[number][0] is CpuPosition.UNDERWAY and in_handler(ip):
                machine.switch_to(number)
                machine.leave(in_handler)
        machine.switch_to(here)

    def _stopped_otherwise(self, trap: Trap) -> None:
        if trap.number == Hypercall.CPU_UP:
            self._machine.answer(self._start_cpu(*trap.args[:3]))
            self._at = CpuPosition.ANSWERED
        elif trap.number == Hypercall.YIELD or trap.kind is TrapKind.PREEMPTED:
            self._at = CpuPosition.UNDERWAY
            self._user = None
            self._preempts = self._preempts or trap.kind is TrapKind.PREEMPTED
            self._count_turn()
        else:
            super()._stopped_otherwise(trap)

    def _start_cpu(self, number: int, entry: int, stack: int) -> int:
        """Prepare a CPU that is not online to start at `entry` with sp = `stack`; return 0.

        Return -EINVAL if there is no such CPU, or if the CPU is already online.
        """
        if number >= len(self._seats) or self._seat(number)[0] is not CpuPosition.OFFLINE:
            return -errno.EINVAL
        self._machine.start_cpu(number, entry, stack)
        self._seats[number] = CpuPosition.UNDERWAY, None
        return 0

    def _count_turn(self) -> None:
        """Count a turn in which no CPU has become idle or entered user mode.

        If a jiffy has passed, send timer interrupts. After too many such turns in succession, send a
        watchdog interrupt to the current CPU, which may be looping.
        """
        if self._jiffy_passed():
            self._send_ticks()
            self._kernel.send(TIME_KEEPER, Vector.TIMER)
        self._turns += 1
        if self._turns > self._max_turns and self._may_interrupt():
            self._turns = 0
            self._deliver(Vector.WATCHDOG)

    def _place_of(self, task: GuestTask) -> int | None:
        """Return the number of the CPU on which this task is in user mode; None if it is not in user mode."""
        return next((number for number in self._round() if self._seat(number)[1] is task), None)

    def _run_to_end(self, task: GuestTask) -> int:
        try:
            return super()._run_to_end(task)
        finally:
            place = self._place_of(task)
            if place is not None:
                self._turn_to(place)

    def _tick(self) -> None:
        if self._jiffy_passed() and not self.is_dead:
            self._send_ticks()
            self._turn_to(TIME_KEEPER)
            self._deliver(Vector.TIMER)
            self._step()

    def _jiffy_passed(self) -> bool:
        """Return True if a jiffy has passed since the last call."""
        jiffy = self._machine.clock.now_ns() // NSEC_PER_JIFFY
        passed = jiffy != self._last_jiffy
        self._last_jiffy = jiffy
        return passed

    def _send_ticks(self) -> None:
        """Send timer interrupts to the CPUs that have work, except TIME_KEEPER; idle CPUs take no ticks."""
        for number in self._round():
            if number != TIME_KEEPER and self._seat(number)[0] in (CpuPosition.USER, CpuPosition.UNDERWAY):
                self._kernel.send(number, Vector.TIMER)

    def _await_time(self, request: Request, slept: int) -> None:
        """Advance the time by a jiffy, because the request's task sleeps; see GuestRunner._await_time.

        First send timer interrupts to the other CPUs that have work. Such an interrupt makes a task in user
        mode whose process makes no request yield its CPU to tasks that wait for the CPU. `slept`: number of
        jiffies for which the task has slept in its call so far.
        """
        self._send_ticks()
        self._turn_to(TIME_KEEPER)
        super()._await_time(request, slept)

    def _wake(self, task: GuestTask) -> None:
        if self.is_dead:
            self._refuse(task)
        self._resume_cpu_of(task, may_rouse=True)

    def _go_on(self, task: GuestTask, slept: int) -> bool:
        if self._resume_cpu_of(task, may_rouse=False):
            return False
        assert task.request is not None
        self._await_time(task.request, slept)
        return True

    def _resume_cpu_of(self, task: GuestTask, *, may_rouse: bool) -> bool:
        """Resume a CPU at rest that can make the task `task` continue; return False if there is no such CPU.

        If the task sleeps, wake it if `may_rouse` is True, otherwise return False.
        """
        place = self._place_of(task)
        if place is not None:
            self._turn_to(place)
            self._start_call()
        elif self._kernel.is_queued(task.addr):
            # Another task is in user mode on this task's CPU, and must sleep to let this task run.
            place = self._kernel.cpu_of(task.addr)
            if self._seat(place)[0] is not CpuPosition.USER:
                return False
            self._turn_to(place)
            self._machine.answer(PARK, 0)
        elif not may_rouse or not self._rouse(task):
            return False
        if not self.is_dead:
            self._at = CpuPosition.ANSWERED
            self._user = None
        return True

    def _rouse(self, task: GuestTask) -> bool:
        """Wake the sleeping task `task`, preferably on an idle CPU; return False if no CPU can take it.

        If no CPU is idle, wake the task on the CPU on which it ran last, if that CPU has a task in user mode.
        """
        last = self._kernel.cpu_of(task.addr)
        idle = next((cpu for cpu in (last, *self._round()) if self._seat(cpu)[0] is CpuPosition.IDLE), None)
        if idle is not None:
            self._turn_to(idle)
            self._kernel.set_mailbox(task.addr)
            self._deliver(Vector.WAKE)
        elif self._seat(last)[0] is CpuPosition.USER:
            self._turn_to(last)
            self._machine.answer(PARK, task.addr)
        else:
            return False
        return True
