"""GuestRunner: runs the guest until the system call of one task has ended or sleeps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum, auto
from typing import NoReturn

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.common.call_time import MAX_CALL, CallTime
from emulated_kernel.machine.guest_info import GIVEN_UP, HOST_NOTE, Message
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault, Trap, TrapKind
from emulated_kernel.util.abi import ERESTARTSYS, HZ, PARK, Hypercall, Vector
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock, YieldLock
from emulated_kernel.util.fast_dataclass import dataclass, field

HostfsHandler = Callable[[int, int, int], int]
"""Function that serves a guest's request to the host: (operation, address of a user buffer, count) -> result.

Raises: KernelError (an errno), WouldBlock (the task must sleep and repeat its request).
"""

_KEEPING_NAMES = ("read", "write", "pread64", "pwrite64")
"""Frequent system calls that neither rename nor create a task; see TaskObserver.call_begins()."""
SERVED = (Hypercall.HOSTFS, Hypercall.MODULE, Hypercall.KPROBES)
"""Hypercalls by which a system call requests a service of the host; GuestRunner._serve answers them."""
NSEC_PER_JIFFY = 1_000_000_000 // HZ
OVERDUE = 0.005
"""Seconds until the runner tries again to interrupt an overlong run, if no interrupt can be taken now."""
MAX_WATCHDOGS = 4
"""Maximum number of watchdog interrupts of an overlong run; if it goes on, the guest is declared dead."""
AFTER_WATCHDOG = 0.25
"""Seconds that a run may take after a watchdog interrupt."""
KERN_EMERG = 0
MAX_NOTES = 64
"""Maximum number of the host's messages that are kept for readers of the kernel log."""
MAX_SLEEP_JIFFIES = 10 * HZ
"""Maximum number of jiffies that a system call may sleep while no task runs; then it fails with EIO."""


class DeferToGuest(Exception):
    """Exception by which a control file's handler requests an action that runs guest code.

    A handler itself cannot run guest code. The runner calls `action` while the requesting task sleeps. The
    result of `action` becomes the result of the file operation. If `action` raises KernelError, the
    operation fails with that errno.
    """

    def __init__(self, action: Callable[[], int]) -> None:
        super().__init__("the guest is needed")
        self.action = action


@dataclass(eq=False)
class GuestTask:
    """A guest task that represents a process of the host."""

    pid: int
    addr: int
    """Address of the task's task_struct."""
    comm: str
    uid: int
    gid: int
    cpu: int | None = None
    """CPU that the task is pinned to because its process is pinned; None if the task is not pinned."""
    has_executed: bool = False
    """Whether the process has probably called execve(2) since its last request.

    If so, the guest repeats the execve at the process's next request.
    """
    request: Request | None = field(default=None, repr=False)
    """System call that the task is to make or has not finished; None if there is none."""


@dataclass(eq=False)
class Request:
    """A system call that a guest task is to make, and its progress."""

    nr: int
    args: tuple[int, ...]
    hostfs: HostfsHandler | None
    wanted: object = None
    """The control file that the process reads, if the task reads another file instead; otherwise None."""
    started: bool = False
    waits_for_host: type[WouldBlock] | None = None
    """Class of the exception that made the task sleep until `GuestRunner.resume` is called.

    The value is None if the task does not sleep for this reason.
    """
    elsewhere: Callable[[], int] | None = None
    """Action of a DeferToGuest exception, which runs before the task repeats its request.

    None if there is no such action.
    """
    result: int | None = None
    killed: bool = False
    """Whether the task died in the system call."""
    failure: BaseException | None = None
    """Unexpected exception of `hostfs`; it is raised again when the guest's call has ended."""

    def kill(self) -> None:
        """Record that the task died in this call, with the result -EIO.

        Do nothing if the call has a result already.
        """
        if self.result is None:
            self.killed = True
            self.result = -errno.EIO


class CpuPosition(Enum):
    """Where a CPU is between two runs of the guest: in user mode, idle, in the kernel, or stopped."""

    USER = auto()
    """In user mode: its task waits for the next system call."""
    IDLE = auto()
    """In the idle loop: no task is runnable on the CPU."""
    DEAD = auto()
    """Stopped for ever: the guest has panicked or was declared dead."""
    UNDERWAY = auto()
    """Elsewhere in the kernel: in its next turn, the CPU continues there."""
    ANSWERED = auto()
    """At a hypercall that the host has answered; the CPU has not resumed, and takes no interrupt."""
    OFFLINE = auto()
    """The CPU has not been started yet."""


class GuestRunner:
    """Runs one guest, which executes nothing between calls of this object's methods.

    Between these calls, the CPU is in the idle loop, or its task is in user mode and waits for the next
    system call. If the process of that task makes no request, the task stays current until another task
    must run.
    """

    def __init__(self, kernel: BuiltinKernel, events: TaskEvents, lock: ControlLock) -> None:
        machine = kernel.machine
        self._machine = machine
        self._kernel = kernel
        self.events = events
        self._lock = lock
        self._tasks: dict[int, GuestTask] = {}
        self._at = CpuPosition.IDLE
        self._depth = 0
        self._call_time = CallTime(machine.handler_time, MAX_CALL)
        self._user: GuestTask | None = None
        self._last_jiffy = machine.clock.now_ns() // NSEC_PER_JIFFY
        self._keeping_names = {kernel.syscall_numbers[name] for name in _KEEPING_NAMES}
        self.services: dict[int, HostfsHandler] = {}
        """Number of a hypercall -> handler that serves it for any task, with or without a request."""
        self.notes: list[Message] = []
        """Messages that the guest could not log itself, such as the reason of its death."""

    def note(self, text: str) -> None:
        """Keep a message of the host for readers of the kernel log.

        Drop the message if it repeats the last one, or if MAX_NOTES messages are kept already.
        """
        message = HOST_NOTE + text
        if len(self.notes) < MAX_NOTES and (not self.notes or self.notes[-1].text != message):
            self._add_note(message)

    def _add_note(self, message: str) -> None:
        self.notes.append(Message(len(self.notes), self._machine.clock.now_ns(), KERN_EMERG, message))

    def _may_interrupt(self) -> bool:
        """Return True if an interrupt may be delivered at the guest's current instruction."""
        for may_interrupt in self._machine.interrupt_if:  # noqa: SIM110 - a generator would cost more calls
            if not may_interrupt():
                return False
        return True

    @property
    def is_dead(self) -> bool:
        """Whether the guest has panicked or was declared dead. In the second case, `notes` has the reason."""
        return self._at is CpuPosition.DEAD

    def start(self) -> None:
        """Run a kernel that has just booted until its first task is in user mode."""
        self._machine.answer(0)
        self._call_time.begin()
        self._step()

    def add(self, task: GuestTask) -> None:
        """Register a task that the guest has created, so that it can make system calls."""
        self._tasks[task.addr] = task

    def is_alive(self, task: GuestTask) -> bool:
        """Return True if the task has not ended. Then `task.addr` is still the address of its task_struct."""
        return task.addr in self._tasks

    def syscall(self, task: GuestTask, nr: int, *args: int, hostfs: HostfsHandler | None = None) -> int:
        """Run a system call in a task and return its raw result, which may be a negative errno; see check().

        A negative errno may be an unsigned word, such as 2**64 - 9 for EBADF. `nr`: number of the call.
        `hostfs`: answers the call's requests to the host; None lets them fail with EBADF. Raises: WouldBlock
        (the task sleeps in a request to a control file; call `resume` later), KernelError EIO (the guest is
        dead, or the call killed its task), EDEADLK (called from a probe's handler).
        """
        return self.run(task, Request(nr, args, hostfs))

    def run(self, task: GuestTask, request: Request) -> int:
        """Run the system call `request` in a task and return its result. Raises: as `syscall`."""
        self.check_stopped()
        if task.request is not None:
            self.interrupt(task)
        task.request = request
        return self._finish(task)

    def resume(self, task: GuestTask) -> int:
        """Make a sleeping task repeat its request to a control file; return the result of its system call.

        Raises: as `syscall`.
        """
        self.check_stopped()
        assert task.request is not None
        task.request.waits_for_host = None
        return self._finish(task)

    @property
    def at_hand(self) -> GuestTask | None:
        """The current task if it is in user mode and has no request; otherwise None.

        Such a task can make a system call without a task switch.
        """
        return self._user if self._user is not None and self._user.request is None else None

    def check_stopped(self) -> None:
        """Check that the guest is not running, since a running guest can take no system call.

        Raises: KernelError EDEADLK (called from a probe's handler).
        """
        self._lock.assert_held()
        if self._machine.is_running:
            raise KernelError(errno.EDEADLK, "guest: it is running; call again when the handler has returned")

    def exit(self, task: GuestTask, nr: int) -> None:
        """Make a task end itself by the system call with the number `nr`, which does not return.

        Raises: as `syscall`, except for the error that the call has killed the task.
        """
        request = Request(nr, (0,), None)
        try:
            self.run(task, request)
        except KernelError:
            if self.is_dead or not request.killed:
                raise

    def interrupt(self, task: GuestTask, error: int = errno.EINTR) -> None:
        """End the system call in which a task sleeps: the call fails with the errno `error`.

        EINTR is for a task whose process makes another request.
        Raises: KernelError (as `syscall`).
        """
        assert task.request is not None

        def end(_op: int, _buffer: int, _count: int) -> int:
            raise KernelError(error)

        task.request.hostfs = end
        self.resume(task)

    def _finish(self, task: GuestTask) -> int:
        self._depth += 1
        try:
            keeps_names = task.request is not None and task.request.nr in self._keeping_names
            for notify in self.events.call_begins:
                notify(keeps_names=keeps_names)
            return self._run_to_end(task)
        except MemoryFault as fault:
            self._die(f"its data are corrupted: {fault}")
            self._refuse(task)
        except BaseException:
            # Drop a request that the guest has not seen. If it were ended like a sleeping call, the guest
            # would make the call.
            if task.request is not None and not task.request.started:
                task.request = None
            raise
        finally:
            self._depth -= 1
            for notify in self.events.call_ended:
                notify()
            if not self._depth and self._machine.hooks.engine.is_interrupted:
                self._machine.hooks.engine.raise_interrupt()

    @property
    def is_busy(self) -> bool:
        """Whether a system call is in progress. Another call would then be nested in it."""
        return self._depth > 0

    def _run_to_end(self, task: GuestTask) -> int:
        """Run the guest until the task's request has ended and return the result."""
        request = task.request
        assert request is not None
        self._call_time.begin()
        self._tick()
        self._wake(task)
        slept = 0
        self._step()
        while request.result is None:
            if request.elsewhere is not None:
                result = self._run_elsewhere(request, request.elsewhere)
                self._call_time.begin()
                if self._at is CpuPosition.DEAD:
                    # The guest died in the action, but the action's result is valid.
                    request.result = result
                    request.killed = False
                    break
                if request.result is not None:
                    # The action ended this task, so no task must be woken.
                    break
                self._wake(task)
            elif self._ends_overdue():
                pass
            elif self._go_on(task, slept):
                slept += 1
            self._step()
        task.request = None
        if request.failure is not None:
            raise request.failure
        if request.killed:
            raise KernelError(errno.EIO, f"task {task.pid} was killed; see machine/dmesg")
        return request.result

    def _ends_overdue(self) -> bool:
        """Return True, and declare the guest dead, if the current system call takes too long.

        Return False otherwise, also if the guest is dead already.
        """
        if self.is_dead or not self._call_time.is_over():
            return False
        self._die(f"a system call kept it busy for {self._call_time.limit:g} s")
        return True

    def _run_elsewhere(self, request: Request, action: Callable[[], int]) -> int:
        """Run `action`, which was deferred until the task sleeps; return its result, or a negative errno.

        The task then repeats the file operation in `request`; this operation gets the result of `action`. If
        `action` raises an unexpected exception, keep it in `request.failure`, and return -EIO.

        Raises: YieldLock (by `action`).
        """
        request.elsewhere = None
        try:
            result = action()
        except YieldLock:
            request.waits_for_host = YieldLock
            raise
        except KernelError as error:
            result = -(error.errno or errno.EIO)
        except Exception as error:
            # As in _serve, the guest's call must end before the exception is raised.
            request.failure = error
            result = -errno.EIO
        request.hostfs = lambda _op, _buffer, _count: result
        return result

    def _tick(self) -> None:
        """Deliver a timer interrupt and run its handler, if a jiffy has passed since the last one."""
        jiffy = self._machine.clock.now_ns() // NSEC_PER_JIFFY
        if jiffy != self._last_jiffy and self._at is not CpuPosition.DEAD:
            self._last_jiffy = jiffy
            self._deliver(Vector.TIMER)
            self._step()

    def _wake(self, task: GuestTask) -> None:
        """Make the guest switch to this task in its next run. Raises: KernelError EIO (the guest is dead)."""
        if self._at is CpuPosition.DEAD:
            self._refuse(task)
        if self._at is CpuPosition.IDLE:
            self._kernel.set_mailbox(task.addr)
            self._deliver(Vector.WAKE)
        elif self._user is not task:
            self._machine.answer(PARK, task.addr)
        else:
            self._start_call()

    @staticmethod
    def _refuse(task: GuestTask) -> NoReturn:
        task.request = None
        raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")

    def _go_on(self, task: GuestTask, slept: int) -> bool:
        """Prepare the guest's next run, in which `task` is to continue its system call.

        If the CPU is idle, advance the time by a jiffy, and return True. Otherwise, make the current task,
        which is in user mode, begin its own call or yield the CPU; return False. `slept`: number of jiffies
        for which `task` has slept in its call so far.
        """
        if self._at is CpuPosition.IDLE:
            assert task.request is not None
            self._await_time(task.request, slept)
            return True
        self._start_call()
        return False

    def _start_call(self) -> None:
        """Make the current task, which is in user mode, begin the system call in its `request`.

        If it has no request, or has begun the call already, put the task to sleep.
        """
        task = self._user
        request = None if task is None else task.request
        if request is None or request.started:
            self._machine.answer(PARK, 0)
        else:
            request.started = True
            self._machine.answer(request.nr, *request.args)

    def _step(self) -> None:
        """Run the guest until it is idle or in user mode, and serve the guest's hypercalls."""
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
                # A guest that loops makes hypercalls for ever, and each run after one has its own budget.
                self._ends_overdue()
            elif trap.number == Hypercall.USER:
                return self._enter_user(trap.args[0])
            elif trap.number == Hypercall.IDLE:
                self._at = CpuPosition.IDLE
                self._user = None
                return self._reap()
            else:
                return self._stopped_otherwise(trap)
        return None

    def _ends_handler(self, trap: Trap) -> bool:
        """If a probe's handler loops at `trap`, end it as if it had faulted, and return True; else False."""
        machine = self._machine
        return any(deal_with(trap, machine.regs) for deal_with in machine.hooks.fault_hooks)

    def _stopped_otherwise(self, trap: Trap) -> None:
        """Declare the guest dead, after a panic or an exception that the guest cannot take.

        The guest itself has logged a panic.
        """
        self._die("" if trap.number == Hypercall.PANIC else f"it stopped with {trap}")

    def _run_cpu(self, budget: float | None) -> Trap | None:
        """Run the current CPU up to its next trap; return None if the emulator failed and the guest is dead.

        `budget`: seconds of CPU time that the run may take; None selects the machine's `run_budget`. The
        emulator fails if the guest executes unmapped memory.
        """
        try:
            return self._machine.run(budget)
        except HardwareError as error:
            self._die(str(error))
            return None
        except BaseException as error:
            # The guest did not stop at a hypercall: it would not take a value in a register as an answer.
            self._die(f"a callback of the host failed while it ran: {error!r}")
            raise

    def _deliver(self, vector: Vector) -> None:
        """Interrupt the guest with `vector`.

        If the guest's stack cannot take the interrupt, declare the guest dead.
        """
        try:
            self._machine.deliver(vector)
        except GuestFault as fault:
            self._die(f"it can't be interrupted: {fault}")

    def _enter_user(self, last_result: int) -> None:
        """Record that a task has returned from the kernel to user mode.

        `last_result`: the result of the task's system call.
        """
        self._reap()
        task = self._tasks.get(self._kernel.current_task())
        self._at = CpuPosition.USER
        self._user = task
        request = None if task is None else task.request
        if request is not None and request.started and request.result is None:
            request.result = last_result

    def _serve(self, trap: Trap) -> int:
        """Answer a hypercall that requests a control file, the module loader or another service of the host.

        The guest is in the middle of a system call. Return the result for the guest, or a negative errno.
        """
        task = self._tasks.get(self._kernel.current_task())
        request = None if task is None else task.request
        if trap.number in self.services:
            # The service may be used by a task without a client's request.
            request = request or Request(0, (), None)
            serve = self.services[trap.number]
        elif request is None or request.hostfs is None:
            return -errno.EBADF
        else:
            serve = request.hostfs
        try:
            return serve(trap.args[0], trap.args[2], trap.args[3])
        except WouldBlock as wait:
            request.waits_for_host = type(wait)
            return -ERESTARTSYS
        except DeferToGuest as wish:
            request.elsewhere = wish.action
            return -ERESTARTSYS
        except KernelError as error:
            return -(error.errno or errno.EIO)
        except MemoryFault:
            # An argument that leads nowhere is the guest's mistake.
            return -errno.EFAULT
        except Exception as error:
            # The guest's call must end before the exception is raised to the caller.
            request.failure = error
            return -errno.EIO

    def _await_time(self, request: Request, slept: int) -> None:
        """Advance the time by a jiffy, because the task sleeps and no other task runs.

        Raises: WouldBlock or YieldLock (the task waits for the host), KernelError EIO (the task has slept
        for MAX_SLEEP_JIFFIES).
        """
        if request.waits_for_host is not None:
            raise request.waits_for_host
        if slept >= MAX_SLEEP_JIFFIES:
            self.note(f"system call {request.nr} does not return: it sleeps, and nothing will wake it")
            raise KernelError(errno.EIO, "the system call does not return; see machine/dmesg")
        self._machine.clock.advance(NSEC_PER_JIFFY)
        self._last_jiffy = self._machine.clock.now_ns() // NSEC_PER_JIFFY
        self._deliver(Vector.TIMER)

    def _reap(self) -> None:
        """Forget the tasks that have ended; the system call of a killed task fails with EIO."""
        for addr in self._kernel.new_exits():
            task = self._tasks.pop(addr, None)
            if task is None:
                continue
            if task.request is not None:
                task.request.kill()
            for notify in self.events.died:
                notify(task.pid)

    def _die(self, why: str) -> None:
        """Declare the guest dead. `why`: the reason to note, or "" if the guest has logged the reason."""
        if why and not self.is_dead:
            # The reason is also kept if there are MAX_NOTES messages already.
            self._add_note(GIVEN_UP + why)
        self._at = CpuPosition.DEAD
        self._user = None
        for task in list(self._tasks.values()):
            if task.request is not None:
                task.request.kill()
