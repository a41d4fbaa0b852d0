"""SmpExecutive: the executive of a guest with several CPUs, which run in turns."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from emulated_kernel.abi import PARK, Hypercall, Vector
from emulated_kernel.errors import KernelError
from emulated_kernel.host.executive import NSEC_PER_JIFFY, At, Cpu, Executive, GuestTask, Request, SharedCells
from emulated_kernel.machine.traps import Trap, TrapKind

TIME_KEEPER = 0
"""The CPU that counts jiffies and runs timers."""
MAX_WAITS = 50_000
"""Turns in which CPUs have waited, without any of them coming to rest, after which one counts as looping."""
MAX_INSTRUCTIONS = 50_000_000
"""The same for what they have executed, where turns end after so many instructions."""


class Cpus(Cpu, Protocol):
    """What it needs of the machine."""

    @property
    def cpu(self) -> int: ...

    @property
    def interrupts_enabled(self) -> bool: ...

    def switch_to(self, number: int) -> None: ...

    def stands(self) -> list[tuple[int, int]]: ...

    def leave(self, within: Callable[[int], bool], /) -> None: ...

    def serialise(self) -> None: ...

    def start_cpu(self, number: int, entry: int, stack: int) -> None: ...


class SmpCells(SharedCells, Protocol):
    """The guest's variables that the host reads and writes."""

    def sent_to(self, cpu: int) -> int: ...

    def send(self, cpu: int, vector: int) -> None: ...

    def take_sent(self, cpu: int) -> int: ...

    def task_of(self, cpu: int) -> int: ...
    def syncs_of(self, cpu: int) -> int: ...

    def cpu_of(self, task: int) -> int: ...

    def is_queued(self, task: int) -> bool: ...


class SmpExecutive(Executive):
    """Runs a guest's CPUs round robin, from one place where they can't go on to the next.

    Between calls each CPU is at rest: in its idle loop, or with a task in user mode, and no interrupt waits
    for it. What runs when depends on the guest alone, and so does each trace.
    """

    def __init__(self, cpu: Cpus, cells: SmpCells, count: int, quantum: int = 0) -> None:
        """`quantum`: instructions of a turn on average; 0: as many as there are until the CPU waits."""
        super().__init__(cpu, cells)
        self._cpus = cpu
        self._smp_cells = cells
        self._seats: list[tuple[At, GuestTask | None]] = [(At.OFFLINE, None)] * count
        """Where the CPUs stand that aren't current."""
        self._turns = 0
        self._preempts = False
        """CPUs may stand anywhere, not only where they wait."""
        self._max_turns = MAX_INSTRUCTIONS // quantum if quantum else MAX_WAITS
        self._server: int | None = None
        """The CPU whose question is being answered."""
        self._questions: dict[int, Trap] = {}
        """What a CPU asked while it ran for something else; its turn begins with the answer."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called when one CPU has run, before the next: text may be patched, as by yet another CPU."""

    def add(self, task: GuestTask) -> None:
        """A child may be in user mode already: another CPU took it while its parent was still in its fork."""
        super().add(task)
        for number in self._round():
            if self._seat(number) == (At.USER, None) and self._smp_cells.task_of(number) == task.addr:
                if number == self._cpus.cpu:
                    self._user = task
                else:
                    self._seats[number] = At.USER, task

    def _turn_to(self, number: int) -> None:
        """Make a CPU current."""
        here = self._cpus.cpu
        if number == here or self.is_dead:
            return
        self._seats[here] = self._at, self._user
        self._cpus.switch_to(number)
        self._at, self._user = self._seats[number]

    def _seat(self, number: int) -> tuple[At, GuestTask | None]:
        return (self._at, self._user) if number == self._cpus.cpu else self._seats[number]

    def _step(self) -> None:
        """Run all CPUs until each is at rest; the current one has been told to go on."""
        following: int | None = self._cpus.cpu
        while following is not None:
            super()._step()
            if self._at is not At.UNDERWAY:
                self._turns = 0
            if self.is_dead or self._next() is None:
                return
            self.on_turn()
            following = self._next()
            if following is not None:
                self._turn_to(following)
                self._begin_turn()

    def _begin_turn(self) -> None:
        self._interrupt_current()
        question = self._questions.pop(self._cpus.cpu, None)
        if question is not None:
            self._cpu.answer(self._serve(question.args))

    def sync_core(self) -> None:
        """Let all other CPUs execute a serialising instruction. Mirrors: text_poke_sync() (v6.1).

        None takes the interrupt in the middle of a hit: afterwards each hit that was underway has ended.
        Within a hit none is sent: the host holds the others, and entering them anew serialises too.
        """
        if self._cpu.is_running:
            self._cpus.serialise()
            return
        if self.is_dead:
            return
        here, turns, cells = self._cpus.cpu, self._turns, self._smp_cells
        waiting = {number: cells.syncs_of(number) for number in self._round() if self._is_other(number)}
        for number in waiting:
            cells.send(number, Vector.SYNC_CORE)
        if self._preempts:
            self._run_before_interrupt(waiting)
        lets_others_run = False
        for _ in range(self._max_turns):
            for number in list(self._round()):
                if number in waiting or (lets_others_run and self._may_run_for_sync(number)):
                    self._turn_to(number)
                    # Those sent before have a lower vector, and come first.
                    self._interrupt_current()
                    self._run_for_sync(number)
            waiting = {number: count for number, count in waiting.items() if cells.syncs_of(number) == count}
            if not waiting or self.is_dead:
                break
            # One may wait for a lock, with interrupts off.
            lets_others_run = True
        self._turns = turns
        self._turn_to(here)

    def _run_before_interrupt(self, numbers: Iterable[int]) -> None:
        """An interrupt from another CPU takes its time."""
        for number in numbers:
            if self._seat(number)[0] is At.UNDERWAY and number not in self._questions:
                self._turn_to(number)
                self._run_for_sync(number)

    def _is_other(self, number: int) -> bool:
        """Whether a CPU isn't the one that patches text, which may be none of the guest's."""
        at = self._seat(number)[0]
        if number == self._cpus.cpu:
            return at is At.UNDERWAY and self._server is None
        return at is not At.OFFLINE

    def _may_run_for_sync(self, number: int) -> bool:
        return number != self._server and number not in self._questions and self._can_go_on(number)

    def _run_for_sync(self, number: int) -> None:
        """Run the current CPU until it stands somewhere, with nothing answered."""
        trap = self._run_cpu(None)
        if trap.number == Hypercall.USER:
            self._enter_user(trap.args[0])
        elif trap.number == Hypercall.IDLE:
            self._at, self._user = At.IDLE, None
        elif trap.number in (Hypercall.HOSTFS, Hypercall.MODULE):
            self._at, self._questions[number] = At.UNDERWAY, trap
        elif trap.kind is TrapKind.BUDGET:
            self._at = At.UNDERWAY
            if self.may_interrupt():
                self._deliver(Vector.WATCHDOG)
        else:
            self._stopped_otherwise(trap)

    def _next(self) -> int | None:
        """The CPU whose turn is next, of those that can go on."""
        return next((number for number in self._round() if self._can_go_on(number)), None)

    def _round(self) -> Iterator[int]:
        """All CPUs, the current one last."""
        count, here = len(self._seats), self._cpus.cpu
        return ((here + step) % count for step in range(1, count + 1))

    def _can_go_on(self, number: int) -> bool:
        at, _ = self._seat(number)
        if at in (At.UNDERWAY, At.TOLD):
            return True
        return at in (At.IDLE, At.USER) and self._smp_cells.sent_to(number) != 0

    def _interrupt_current(self) -> None:
        """Deliver one of the interrupts that were sent to the current CPU, if it takes any."""
        cpu = self._cpus.cpu
        if self._at is At.TOLD or not self._smp_cells.sent_to(cpu):
            return
        if self._cpus.interrupts_enabled and self.may_interrupt():
            # It asks again behind the interrupt.
            self._questions.pop(cpu, None)
            self._deliver(Vector(self._smp_cells.take_sent(cpu)))

    def _serve(self, args: tuple[int, ...]) -> int:
        if self._preempts:
            self._finish_records()
        self._server = self._cpus.cpu
        try:
            return super()._serve(args)
        finally:
            self._server = None

    def _finish_records(self) -> None:
        """Let each CPU that stands in a handler come to its end: buffers may be read and changed then.

        Linux: waits for a grace period of RCU.
        """
        cpus, here = self._cpus, self._cpus.cpu
        for number, (ip, _) in enumerate(cpus.stands()):
            if number != here and self._seats[number][0] is At.UNDERWAY and self.in_handler(ip):
                cpus.switch_to(number)
                cpus.leave(self.in_handler)
        cpus.switch_to(here)

    def _stopped_otherwise(self, trap: Trap) -> None:
        if trap.number == Hypercall.CPU_UP:
            number, entry, stack, _ = trap.args
            self._cpus.start_cpu(number, entry, stack)
            self._seats[number] = At.UNDERWAY, None
            self._cpu.answer(0)
            self._at = At.TOLD
        elif trap.number == Hypercall.YIELD or trap.kind is TrapKind.PREEMPTED:
            self._at, self._user = At.UNDERWAY, None
            self._preempts = self._preempts or trap.kind is TrapKind.PREEMPTED
            self._count_turn()
        else:
            self._die()

    def _count_turn(self) -> None:
        if self._jiffy_passed():
            self._send_ticks()
            self._smp_cells.send(TIME_KEEPER, Vector.TIMER)
        self._turns += 1
        if self._turns > self._max_turns and self.may_interrupt():
            self._turns = 0
            self._deliver(Vector.WATCHDOG)

    def _place_of(self, task: GuestTask) -> int | None:
        """The CPU where this task is in user mode."""
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
        jiffy = self._cpu.clock.now_ns() // NSEC_PER_JIFFY
        passed = jiffy != self._last_jiffy
        self._last_jiffy = jiffy
        return passed

    def _send_ticks(self) -> None:
        """To the CPUs that have work; idle ones have stopped their ticks."""
        for number in self._round():
            if number != TIME_KEEPER and self._seat(number)[0] in (At.USER, At.UNDERWAY):
                self._smp_cells.send(number, Vector.TIMER)

    def _await_time(self, request: Request, slept: int) -> None:
        """Ticks also end the turn of a task in user mode that has nothing to do, where others wait for it."""
        self._send_ticks()
        self._turn_to(TIME_KEEPER)
        super()._await_time(request, slept)

    def run_together(self, calls: Sequence[tuple[GuestTask, Request]]) -> list[int]:
        """Run system calls of several tasks at the same time, as far as there are CPUs; their results.

        Raises: KernelError EDEADLK (a file of ours would block), EIO (the guest is dead, a call never ends).
        """
        self._check_stopped()
        for task, request in calls:
            assert task.request is None, "a task makes one call at a time"
            task.request = request
        self._depth += 1
        self.before_call()
        try:
            self._run_all(calls)
        finally:
            self._depth -= 1
            self.after_call()
            for task, _ in calls:
                task.request = None
        return [-errno.EIO if request.result is None else request.result for _, request in calls]

    def _run_all(self, calls: Sequence[tuple[GuestTask, Request]]) -> None:
        self._tick()
        slept = 0
        while waiting := [task for task, request in calls if request.result is None]:
            if self.is_dead:
                raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")
            told = [self._tell(task, may_rouse=not _is_inside(task)) for task in waiting]
            if not any(told):
                request = waiting[0].request
                assert request is not None
                if request.waits_for_host or request.elsewhere is not None:
                    raise KernelError(errno.EDEADLK, "a file of ours waits in the middle of calls together")
                self._await_time(request, slept)
                slept += 1
            self._step()

    def _wake(self, task: GuestTask) -> None:
        if self.is_dead:
            task.request = None
            raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")
        self._tell(task, may_rouse=True)

    def _go_on(self, task: GuestTask, slept: int) -> bool:
        if self._tell(task, may_rouse=False):
            return False
        assert task.request is not None
        self._await_time(task.request, slept)
        return True

    def _tell(self, task: GuestTask, *, may_rouse: bool) -> bool:
        """Tell the CPU that can bring this task forward to go on; False: none at rest can, or it sleeps."""
        place = self._place_of(task)
        if place is not None:
            self._turn_to(place)
            self._feed()
        elif self._smp_cells.is_queued(task.addr):
            # It waits behind another task on its CPU: that one goes to sleep.
            place = self._smp_cells.cpu_of(task.addr)
            if self._seat(place)[0] is not At.USER:
                return False
            self._turn_to(place)
            self._cpu.answer(PARK, 0)
        elif not may_rouse or not self._rouse(task):
            return False
        if not self.is_dead:
            self._at, self._user = At.TOLD, None
        return True

    def _rouse(self, task: GuestTask) -> bool:
        """It sleeps: a CPU without work takes it, if there is one; else the one that it ran on last."""
        last = self._smp_cells.cpu_of(task.addr)
        idle = next((cpu for cpu in (last, *self._round()) if self._seat(cpu)[0] is At.IDLE), None)
        if idle is not None:
            self._turn_to(idle)
            self._cells.set_mailbox(task.addr)
            self._deliver(Vector.WAKE)
        elif self._seat(last)[0] is At.USER:
            self._turn_to(last)
            self._cpu.answer(PARK, task.addr)
        else:
            return False
        return True


def _is_inside(task: GuestTask) -> bool:
    """Whether it sleeps in the middle of its system call."""
    return task.request is not None and task.request.started
