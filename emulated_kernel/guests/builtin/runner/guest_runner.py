"""The executive: runs the guest until the system call of one task has ended or sleeps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import field
from enum import Enum, auto
from time import thread_time
from typing import NoReturn

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.machine.guest_info import Message
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.util.abi import ERESTARTSYS, HZ, PARK, Hypercall, Vector
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock, YieldLock
from emulated_kernel.util.fast_dataclass import dataclass

HostfsHandler = Callable[[int, int, int], int]
"""Serves a file of ours for the task that asks: (op, user buffer, count) -> result.

Raises: KernelError (an errno), WouldBlock (let the task sleep and ask again).
"""

SERVED = (Hypercall.HOSTFS, Hypercall.MODULE, Hypercall.KPROBES)
"""Hypercalls that `_serve` answers."""
NSEC_PER_JIFFY = 1_000_000_000 // HZ
OVERDUE = 0.005
"""Seconds until the next try, where a run that took too long couldn't be interrupted."""
MAX_WATCHDOGS = 4
"""Interrupts of one run that takes too long: a guest that goes on even so has lost its way."""
AFTER_WATCHDOG = 0.25
"""Seconds that a run may take which was interrupted for that."""
MAX_CALL = 10.0
"""CPU seconds that a system call may keep the guest busy, with whatever other tasks do meanwhile; in
the second half handlers count little, as for Watchdog."""
KERN_EMERG = 0
MAX_NOTES = 64
"""Messages of the host's that are kept."""
MAX_SLEEP_JIFFIES = 10 * HZ
"""A system call that sleeps longer by itself than this is given up."""


class DeferToGuest(Exception):
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
    cpu: int | None = None
    """The CPU that it is pinned to, as its process is."""
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

    def kill(self) -> None:
        """Note that the task died in this call: the result is -EIO, unless there is one."""
        if self.result is None:
            self.killed = True
            self.result = -errno.EIO


class CpuPosition(Enum):
    """Where a CPU stands between two runs of the guest."""

    USER = auto()
    IDLE = auto()
    DEAD = auto()
    UNDERWAY = auto()
    """Anywhere in the kernel: it waits for another CPU, or for its turn."""
    ANSWERED = auto()
    """At a hypercall: its result is in the register, and the CPU hasn't resumed. It takes no interrupt."""
    OFFLINE = auto()


class GuestRunner:
    """Runs one guest; the guest stands still between calls.

    It stands at one of two places: in the idle loop, or with a task in user mode that waits for its
    next system call. A task whose process does nothing is left where it is until another one runs.
    """

    def __init__(self, kernel: BuiltinKernel, events: TaskEvents, lock: ControlLock) -> None:
        self._machine = machine = kernel.machine
        self._kernel = kernel
        self.events = events
        self._lock = lock
        self._tasks: dict[int, GuestTask] = {}
        self._at = CpuPosition.IDLE
        self._depth = 0
        self._user: GuestTask | None = None
        self._last_jiffy = machine.clock.now_ns() // NSEC_PER_JIFFY
        self.services: dict[int, HostfsHandler] = {}
        """Who serves a hypercall, whatever the task does that makes it."""
        self.notes: list[Message] = []
        """What the guest couldn't log itself: why it was given up, what of it is broken."""

    def note(self, text: str) -> None:
        """Keep a message for who reads the kernel log, unless it is the last one again."""
        message = f"kprobefs: {text}"
        if len(self.notes) < MAX_NOTES and (not self.notes or self.notes[-1].text != message):
            self.notes.append(Message(len(self.notes), self._machine.clock.now_ns(), KERN_EMERG, message))

    def _may_interrupt(self) -> bool:
        """Whether an interrupt may be delivered where the guest stands now."""
        for may_interrupt in self._machine.interrupt_if:  # noqa: SIM110 - a generator is calls more
            if not may_interrupt():
                return False
        return True

    @property
    def is_dead(self) -> bool:
        """It panicked, or was given up: `notes` says why."""
        return self._at is CpuPosition.DEAD

    def start(self) -> None:
        """Let a kernel that has just booted go on until its first task is in user mode."""
        self._machine.answer(0)
        self._step()

    def add(self, task: GuestTask) -> None:
        self._tasks[task.addr] = task

    def is_alive(self, task: GuestTask) -> bool:
        """Whether its struct task_struct still is one."""
        return task.addr in self._tasks

    def syscall(self, task: GuestTask, nr: int, *args: int, hostfs: HostfsHandler | None = None) -> int:
        """Run a system call in this task; its result, negative errno included.

        Raises: WouldBlock (the task sleeps in a file of ours (go on with `resume`)), KernelError EIO (the
        guest is dead or the call killed its task), EDEADLK (from a probe's handler).
        """
        return self.run(task, Request(nr, args, hostfs))

    def run(self, task: GuestTask, request: Request) -> int:
        """Run a system call that the caller has described. Raises: as `syscall`."""
        self.check_stopped()
        if task.request is not None:
            self.interrupt(task)
        task.request = request
        return self._finish(task)

    def resume(self, task: GuestTask) -> int:
        """Let a sleeping task ask its file again. Raises: as `syscall`."""
        self.check_stopped()
        assert task.request is not None
        task.request.waits_for_host = False
        return self._finish(task)

    @property
    def at_hand(self) -> GuestTask | None:
        """The current task, if in user mode with no call pending: it can run one without a task switch."""
        return self._user if self._user is not None and self._user.request is None else None

    def check_stopped(self) -> None:
        """A running guest can't take a system call. Raises: KernelError EDEADLK (in a probe's handler)."""
        self._lock.assert_held()
        if self._machine.is_running:
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
        try:
            for tell in self.events.call_begins:
                tell()
            return self._run_to_end(task)
        except MemoryFault as fault:
            self._die(f"its own data lead to {fault}")
            self._refuse(task)
        except BaseException:
            # What the guest hasn't seen yet must not be ended as a call that sleeps: the guest would make it.
            if task.request is not None and not task.request.started:
                task.request = None
            raise
        finally:
            self._depth -= 1
            self._machine.handler_time.is_kept = False
            for tell in self.events.call_ended:
                tell()
            if not self._depth and self._machine.hooks.engine.is_interrupted:
                self._machine.hooks.engine.raise_interrupt()

    @property
    def is_busy(self) -> bool:
        """Whether a system call is under way: a call now would be nested in it."""
        return self._depth > 0

    def _run_to_end(self, task: GuestTask) -> int:
        request = task.request
        assert request is not None
        self._tick()
        self._wake(task)
        slept = 0
        since = thread_time()
        self._step()
        while request.result is None:
            if request.elsewhere is not None:
                result = self._run_elsewhere(request, request.elsewhere)
                since = thread_time()
                if self._at is CpuPosition.DEAD:
                    # It died of the action, whose result is the answer all the same.
                    request.result = result
                    request.killed = False
                    break
                if request.result is not None:
                    # The action ended this very task: there is nobody to wake.
                    break
                self._wake(task)
            elif self._at is not CpuPosition.IDLE and self._is_overdue(since):
                self._die(f"a system call kept it busy for {MAX_CALL:g} s")
            elif self._go_on(task, slept):
                slept += 1
            self._step()
        task.request = None
        if request.failure is not None:
            raise request.failure
        if request.killed:
            raise KernelError(errno.EIO, f"task {task.pid} was killed; see machine/dmesg")
        return request.result

    def _is_overdue(self, since: float) -> bool:
        """Whether a call that began at this CPU time of the thread has had MAX_CALL."""
        used = thread_time() - since
        handlers = self._machine.handler_time
        if used <= MAX_CALL / 2:
            return False
        if not handlers.is_kept:
            handlers.keep()
        return used - handlers.kept > MAX_CALL

    def _run_elsewhere(self, request: Request, action: Callable[[], int]) -> int:
        request.elsewhere = None
        try:
            result = action()
        except YieldLock:
            request.waits_for_host = True
            raise
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
        jiffy = self._machine.clock.now_ns() // NSEC_PER_JIFFY
        if jiffy != self._last_jiffy and self._at is not CpuPosition.DEAD:
            self._last_jiffy = jiffy
            self._deliver(Vector.TIMER)
            self._step()

    def _wake(self, task: GuestTask) -> None:
        """Make the guest switch to this task when it goes on. Raises: KernelError EIO (it is dead)."""
        if self._at is CpuPosition.DEAD:
            self._refuse(task)
        if self._at is CpuPosition.IDLE:
            self._kernel.set_mailbox(task.addr)
            self._deliver(Vector.WAKE)
        elif self._user is not task:
            self._machine.answer(PARK, task.addr)
        else:
            self._feed()

    @staticmethod
    def _refuse(task: GuestTask) -> NoReturn:
        task.request = None
        raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")

    def _go_on(self, task: GuestTask, slept: int) -> bool:
        """Tell the guest what to do next for this task; True: time had to pass."""
        if self._at is CpuPosition.IDLE:
            assert task.request is not None
            self._await_time(task.request, slept)
            return True
        self._feed()
        return False

    def _feed(self) -> None:
        """The task in user mode gets its system call, or goes to sleep without one."""
        task = self._user
        request = None if task is None else task.request
        if request is None or request.started:
            self._machine.answer(PARK, 0)
        else:
            request.started = True
            self._machine.answer(request.nr, *request.args)

    def _step(self) -> None:
        """Run the guest until it is idle or in user mode, serving its hypercalls."""
        budget: float | None = None
        overdue = 0.0
        while self._at is not CpuPosition.DEAD:
            trap = self._run_cpu(budget)
            if trap is None:
                return None
            was = budget
            budget = None
            if trap.kind is TrapKind.BUDGET:
                overdue += 1
                if not self._machine.stops_exactly:
                    self._die(f"it looped at {trap.address:#x}, and was stopped within an instruction")
                elif overdue > MAX_WATCHDOGS:
                    self._die(f"it looped at {trap.address:#x}, after {MAX_WATCHDOGS} interrupts as well")
                elif self._may_interrupt():
                    self._deliver(Vector.WATCHDOG)
                    budget = AFTER_WATCHDOG
                elif was == OVERDUE and self._ends_handler(trap):
                    budget = AFTER_WATCHDOG
                else:
                    overdue -= 1 - OVERDUE
                    budget = OVERDUE
            elif trap.kind is not TrapKind.HYPERCALL:
                return self._stopped_otherwise(trap)
            elif trap.number in SERVED:
                self._machine.answer(self._serve(trap))
            elif trap.number == Hypercall.USER:
                return self._enter_user(trap.args[0])
            elif trap.number == Hypercall.IDLE:
                self._at = CpuPosition.IDLE
                self._user = None
                return self._bury()
            else:
                return self._stopped_otherwise(trap)
        return None

    def _ends_handler(self, trap: Trap) -> bool:
        """A probe's handler that never ends is over, as if it had faulted there; False where it can't be."""
        machine = self._machine
        return any(deal_with(trap, machine.regs) for deal_with in machine.hooks.fault_hooks)

    def _stopped_otherwise(self, trap: Trap) -> None:
        """A panic, which the guest has logged, or an exception that can't be delivered."""
        self._die("" if trap.number == Hypercall.PANIC else f"it stopped with {trap}")

    def _run_cpu(self, budget: float | None) -> Trap | None:
        """Run the current CPU; None where the emulator gave up, as with memory that isn't there."""
        try:
            return self._machine.run(budget)
        except HardwareError as error:
            self._die(str(error))
            return None
        except BaseException as error:
            # It stopped anywhere, not at a hypercall: a value written to its registers is no answer.
            self._die(f"a handler of the host's failed in its run: {error!r}")
            raise

    def _deliver(self, vector: Vector) -> None:
        """Interrupt the guest; one whose stack can't take that is lost."""
        try:
            self._machine.deliver(vector)
        except GuestFault as fault:
            self._die(f"it can't be interrupted: {fault}")

    def _enter_user(self, last_result: int) -> None:
        self._bury()
        task = self._tasks.get(self._kernel.current_task())
        self._at = CpuPosition.USER
        self._user = task
        request = None if task is None else task.request
        if request is not None and request.started and request.result is None:
            request.result = last_result

    def _serve(self, trap: Trap) -> int:
        """The Python side of a file of ours, or of the module loader, in the middle of a guest's call."""
        task = self._tasks.get(self._kernel.current_task())
        request = None if task is None else task.request
        if trap.number in self.services:
            # Whatever the task does, which may be none of a client's.
            request = request or Request(0, (), None)
            serve = self.services[trap.number]
        elif request is None or request.hostfs is None:
            return -errno.EBADF
        else:
            serve = request.hostfs
        try:
            return serve(trap.args[0], trap.args[2], trap.args[3])
        except WouldBlock:
            request.waits_for_host = True
            return -ERESTARTSYS
        except DeferToGuest as wish:
            request.elsewhere = wish.action
            return -ERESTARTSYS
        except KernelError as error:
            return -(error.errno or errno.EIO)
        except Exception as error:
            # The guest's call has to end first; then the fault is reported where it belongs.
            request.failure = error
            return -errno.EIO

    def _await_time(self, request: Request, slept: int) -> None:
        """The awaited task sleeps, and no other runs. Raises: WouldBlock (it waits for the host)."""
        if request.waits_for_host:
            raise WouldBlock
        if slept >= MAX_SLEEP_JIFFIES:
            self.note(f"system call {request.nr} doesn't come back: it sleeps, and nobody will wake it")
            raise KernelError(errno.EIO, "the system call doesn't come back")
        self._machine.clock.advance(NSEC_PER_JIFFY)
        self._last_jiffy = self._machine.clock.now_ns() // NSEC_PER_JIFFY
        self._deliver(Vector.TIMER)

    def _bury(self) -> None:
        """Forget tasks that ended; one that was killed in a system call fails it with EIO."""
        for addr in self._kernel.new_exits():
            task = self._tasks.pop(addr, None)
            if task is None:
                continue
            if task.request is not None:
                task.request.kill()
            for tell in self.events.died:
                tell(task.pid)

    def _die(self, why: str) -> None:
        """The guest runs no more; `why`: what nobody else has said."""
        if why and not self.is_dead:
            self.note(f"the guest was given up: {why}")
        self._at = CpuPosition.DEAD
        self._user = None
        for task in list(self._tasks.values()):
            if task.request is not None:
                task.request.kill()
