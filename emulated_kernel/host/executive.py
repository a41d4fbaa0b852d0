"""The executive: runs the guest until the system call of one task has ended or sleeps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic
from typing import Protocol

from emulated_kernel.abi import ERESTARTSYS, HZ, PARK, Hypercall, Vector
from emulated_kernel.errors import KernelError, WouldBlock
from emulated_kernel.machine.traps import GuestFault, Trap, TrapKind

HostfsHandler = Callable[[int, int, int], int]
"""Serves a file of ours for the task that asks: (op, user buffer, count) -> result.

Raises: KernelError for an errno, WouldBlock to let the task sleep and ask again.
"""

NSEC_PER_JIFFY = 1_000_000_000 // HZ
OVERDUE = 0.005
"""Seconds until the next try, where a run that took too long couldn't be interrupted."""
MAX_WATCHDOGS = 4
"""Interrupts of one run that takes too long: a guest that goes on even so has lost its way."""
AFTER_WATCHDOG = 0.25
"""Seconds that a run may take which was interrupted for that."""
MAX_CALL = 10.0
"""Seconds that a system call may keep the guest busy, with whatever other tasks do meanwhile."""
MAX_SLEEP_JIFFIES = 10 * HZ
"""A system call that sleeps longer by itself than this is given up."""


class RunElsewhere(Exception):
    """A file of ours needs the guest itself: `action` is to run while the task that asks sleeps.

    Its result is the file operation's; what it raises as KernelError, its errno.
    """

    def __init__(self, action: Callable[[], int]) -> None:
        super().__init__("the guest is needed")
        self.action = action


@dataclass(eq=False)
class GuestTask:
    """A task of the guest that stands for a process of the host."""

    pid: int
    addr: int
    """Its struct task_struct."""
    comm: str
    uid: int
    gid: int
    request: Request | None = field(default=None, repr=False)


@dataclass(eq=False)
class Request:
    """One system call on its way through the guest."""

    nr: int
    args: tuple[int, ...]
    hostfs: HostfsHandler | None
    started: bool = False
    waits_for_host: bool = False
    """The task sleeps in a file of ours until `resume`."""
    elsewhere: Callable[[], int] | None = None
    """What has to run before the task asks its file again."""
    result: int | None = None
    killed: bool = False
    """The task died in the call."""
    failure: BaseException | None = None
    """What the handler raised that is no errno; raised again outside of the guest."""
    on_end: Callable[[], None] = lambda: None
    """Called once when the call has ended, however it did."""

    def end(self, result: int) -> None:
        self.result = result
        self.on_end()


class At(Enum):
    """Where a CPU of the guest stands between two runs."""

    USER = auto()
    IDLE = auto()
    DEAD = auto()
    UNDERWAY = auto()
    """Anywhere in the kernel: it waits for another CPU, or for its turn."""
    TOLD = auto()
    """At a question that it has got the answer to, but not taken yet: nothing else may be told it."""
    OFFLINE = auto()


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def advance(self, ns: int) -> None: ...


class Cpu(Protocol):
    """What the executive needs of the machine."""

    @property
    def clock(self) -> Clock: ...

    @property
    def is_running(self) -> bool: ...

    def run(self, budget: float | None = None) -> Trap: ...

    def answer(self, value: int, *args: int) -> None: ...

    def deliver(self, vector: int) -> None: ...


class SharedCells(Protocol):
    """The guest's variables that the host reads and writes."""

    def current_task(self) -> int: ...

    def set_mailbox(self, task: int) -> None: ...

    def new_exits(self) -> list[int]:
        """Tasks that ended since the last call."""


class Executive:
    """Runs one guest under the kernel's control lock; the guest stands still between calls.

    It stands at one of two places: in the idle loop, or with a task in user mode that waits for its
    next system call. A task whose process does nothing is left where it is until another one runs.
    """

    def __init__(self, cpu: Cpu, cells: SharedCells) -> None:
        self._cpu = cpu
        self._cells = cells
        self.may_interrupt: Callable[[], bool] = lambda: True
        """Whether an interrupt may be delivered where the guest stands now."""
        self.before_call: Callable[[], None] = lambda: None
        """Called before a system call goes to the guest."""
        self.in_handler: Callable[[int], bool] = lambda _address: False
        """Whether an address lies in a handler, where a CPU may have written half a record."""
        self.after_call: Callable[[], None] = lambda: None
        """Called when it has ended, or sleeps: the guest stands still again."""
        self._tasks: dict[int, GuestTask] = {}
        self._at = At.IDLE
        self._depth = 0
        self._user: GuestTask | None = None
        self._last_jiffy = cpu.clock.now_ns() // NSEC_PER_JIFFY
        self.on_death: Callable[[GuestTask], None] = lambda _task: None

    @property
    def is_dead(self) -> bool:
        """The guest gave up (a panic, or it can't take an exception any more)."""
        return self._at is At.DEAD

    def start(self) -> None:
        """Let a kernel that has just booted go on until its first task is in user mode."""
        self._cpu.answer(0)
        self._step()

    def add(self, task: GuestTask) -> None:
        self._tasks[task.addr] = task

    def syscall(self, task: GuestTask, nr: int, *args: int, hostfs: HostfsHandler | None = None) -> int:
        """Run a system call in this task; its result, negative errno included.

        Raises: WouldBlock when the task sleeps in a file of ours (go on with `resume`); KernelError
        EIO when the guest is dead or the call killed its task, EDEADLK from a probe's handler.
        """
        return self.run(task, Request(nr, args, hostfs))

    def run(self, task: GuestTask, request: Request) -> int:
        """Run a system call that the caller has described. Raises: as `syscall`."""
        self._check_stopped()
        if task.request is not None:
            self.interrupt(task)
        task.request = request
        return self._finish(task)

    def resume(self, task: GuestTask) -> int:
        """Let a sleeping task ask its file again. Raises: as `syscall`."""
        self._check_stopped()
        assert task.request is not None
        task.request.waits_for_host = False
        return self._finish(task)

    @property
    def at_hand(self) -> GuestTask | None:
        """The task that the guest stands in, in user mode: it can run a call without a task switch."""
        return self._user if self._user is not None and self._user.request is None else None

    def _check_stopped(self) -> None:
        """Nothing may be told to a guest that runs. Raises: KernelError EDEADLK in a probe's handler."""
        if self._cpu.is_running:
            raise KernelError(errno.EDEADLK, "called from within the guest's run")

    def exit(self, task: GuestTask, nr: int) -> None:
        """Let a task run the system call that it doesn't come back from. Raises: KernelError EIO."""
        request = Request(nr, (0,), None)
        try:
            self.run(task, request)
        except KernelError:
            if self.is_dead or not request.killed:
                raise

    def interrupt(self, task: GuestTask, error: int = errno.EINTR) -> None:
        """End the call that a task sleeps in; EINTR: its process has turned to something else.

        Raises: KernelError EIO, as `syscall`.
        """
        assert task.request is not None

        def end(_op: int, _buffer: int, _count: int) -> int:
            raise KernelError(error)

        task.request.hostfs = end
        self.resume(task)

    def _finish(self, task: GuestTask) -> int:
        self._depth += 1
        self.before_call()
        try:
            return self._run_to_end(task)
        finally:
            self._depth -= 1
            self.after_call()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way: what is asked now is asked from the middle of it."""
        return self._depth > 0

    def _run_to_end(self, task: GuestTask) -> int:
        request = task.request
        assert request is not None
        self._tick()
        self._wake(task)
        slept = 0
        until = monotonic() + MAX_CALL
        self._step()
        while request.result is None:
            if request.elsewhere is not None:
                result = self._run_elsewhere(request, request.elsewhere)
                until = monotonic() + MAX_CALL
                if self._at is At.DEAD:
                    # It died of the action, whose result is the answer all the same.
                    request.result, request.killed = result, False
                    break
                if request.result is not None:
                    # The action ended this very task: there is nobody to wake.
                    break
                self._wake(task)
            elif self._at is not At.IDLE and monotonic() > until:
                self._die()
            elif self._go_on(task, slept):
                slept += 1
            self._step()
        task.request = None
        if request.failure is not None:
            raise request.failure
        if request.killed:
            raise KernelError(errno.EIO, f"task {task.pid} was killed; see machine/dmesg")
        return request.result

    def _go_on(self, task: GuestTask, slept: int) -> bool:
        """Tell the guest what to do next for this task; True: time had to pass."""
        if self._at is At.IDLE:
            assert task.request is not None
            self._await_time(task.request, slept)
            return True
        self._feed()
        return False

    def _run_elsewhere(self, request: Request, action: Callable[[], int]) -> int:
        request.elsewhere = None
        try:
            result = action()
        except KernelError as error:
            result = -(error.errno or errno.EIO)
        except Exception as error:
            # As in _serve: first the guest's call has to end.
            request.failure = error
            result = -errno.EIO
        request.hostfs = lambda _op, _buffer, _count: result
        return result

    def _tick(self) -> None:
        """Deliver a timer interrupt when the clock has passed a jiffy since the last one."""
        jiffy = self._cpu.clock.now_ns() // NSEC_PER_JIFFY
        if jiffy != self._last_jiffy and self._at is not At.DEAD:
            self._last_jiffy = jiffy
            self._deliver(Vector.TIMER)
            self._step()

    def _wake(self, task: GuestTask) -> None:
        """Make the guest switch to this task when it goes on."""
        if self._at is At.DEAD:
            task.request = None
            raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")
        if self._at is At.IDLE:
            self._cells.set_mailbox(task.addr)
            self._deliver(Vector.WAKE)
        elif self._user is not task:
            self._cpu.answer(PARK, task.addr)
        else:
            self._feed()

    def _feed(self) -> None:
        """The task in user mode gets its system call, or goes to sleep without one."""
        task = self._user
        request = None if task is None else task.request
        if request is None or request.started:
            self._cpu.answer(PARK, 0)
        else:
            request.started = True
            self._cpu.answer(request.nr, *request.args)

    def _step(self) -> None:
        """Run the guest until it stands at one of its two places; answer what it asks on the way."""
        budget: float | None = None
        overdue = 0.0
        while self._at is not At.DEAD:
            trap = self._run_cpu(budget)
            budget = None
            if trap.kind is TrapKind.BUDGET:
                overdue += 1
                if overdue > MAX_WATCHDOGS:
                    self._die()
                elif self.may_interrupt():
                    self._deliver(Vector.WATCHDOG)
                    budget = AFTER_WATCHDOG
                else:
                    overdue -= 1 - OVERDUE
                    budget = OVERDUE
            elif trap.kind is not TrapKind.HYPERCALL:
                return self._stopped_otherwise(trap)
            elif trap.number in (Hypercall.HOSTFS, Hypercall.MODULE):
                self._cpu.answer(self._serve(trap.args))
            elif trap.number == Hypercall.USER:
                return self._enter_user(trap.args[0])
            elif trap.number == Hypercall.IDLE:
                self._at, self._user = At.IDLE, None
                return self._bury()
            else:
                return self._stopped_otherwise(trap)
        return None

    def _stopped_otherwise(self, _trap: Trap) -> None:
        """A panic, or an exception that can't be delivered."""
        self._die()

    def _run_cpu(self, budget: float | None) -> Trap:
        try:
            return self._cpu.run(budget)
        except BaseException:
            # It stopped in the middle of anything: what it is told next would be no answer to a question.
            self._die()
            raise

    def _deliver(self, vector: Vector) -> None:
        """Interrupt the guest; one whose stack can't take that is lost."""
        try:
            self._cpu.deliver(vector)
        except GuestFault:
            self._die()

    def _enter_user(self, last_result: int) -> None:
        self._bury()
        task = self._tasks.get(self._cells.current_task())
        self._at, self._user = At.USER, task
        request = None if task is None else task.request
        if request is not None and request.started and request.result is None:
            request.end(last_result)

    def _serve(self, args: tuple[int, ...]) -> int:
        """The Python side of a file of ours, or of the module loader, in the middle of a guest's call."""
        task = self._tasks.get(self._cells.current_task())
        request = None if task is None else task.request
        if request is None or request.hostfs is None:
            return -errno.EBADF
        try:
            return request.hostfs(args[0], args[2], args[3])
        except WouldBlock:
            request.waits_for_host = True
            return -ERESTARTSYS
        except RunElsewhere as wish:
            request.elsewhere = wish.action
            return -ERESTARTSYS
        except KernelError as error:
            return -(error.errno or errno.EIO)
        except Exception as error:
            # The guest's call has to end first; then the fault is reported where it belongs.
            request.failure = error
            return -errno.EIO

    def _await_time(self, request: Request, slept: int) -> None:
        """The awaited task sleeps, and nobody else runs: on us, or on something that time brings."""
        if request.waits_for_host:
            raise WouldBlock
        if slept >= MAX_SLEEP_JIFFIES:
            raise KernelError(errno.EIO, "the system call doesn't come back")
        self._cpu.clock.advance(NSEC_PER_JIFFY)
        self._last_jiffy = self._cpu.clock.now_ns() // NSEC_PER_JIFFY
        self._deliver(Vector.TIMER)

    def _bury(self) -> None:
        """Forget tasks that ended; one that was killed in a system call fails it with EIO."""
        for addr in self._cells.new_exits():
            task = self._tasks.pop(addr, None)
            if task is None:
                continue
            if task.request is not None and task.request.result is None:
                task.request.killed = True
                task.request.end(-errno.EIO)
            self.on_death(task)

    def _die(self) -> None:
        self._at, self._user = At.DEAD, None
        for task in list(self._tasks.values()):
            if task.request is not None and task.request.result is None:
                task.request.killed = True
                task.request.end(-errno.EIO)
