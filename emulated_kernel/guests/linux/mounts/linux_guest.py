"""LinuxGuest: the objects and data that the file systems of one distribution's kernel share.

They are the tasks of clients, the control lock, sleeping calls and deferred closes.
"""

from __future__ import annotations

import errno
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.workloads import WorkloadKind, Workloads
from emulated_kernel.guests.linux.guest.clients import LinuxClients
from emulated_kernel.guests.linux.guest.file_times import FileTimes
from emulated_kernel.guests.linux.guest.page_reporting import PageReporting
from emulated_kernel.guests.linux.guest.syscalls import PATIENCE, LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.guest.workload import LinuxWorkload
from emulated_kernel.guests.linux.mounts.guest_paths import FORWARDED, MODULES
from emulated_kernel.guests.linux.mounts.kernel_modules import KernelModules
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner

POLLED = select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDNORM | select.POLLWRNORM
"""Poll mask of the events that are requested from the guest's files."""


class Closable(Protocol):
    """Interface of an open file for which the guest may have a descriptor."""

    @property
    def fd(self) -> int | None:
        """The guest's descriptor, or None if the guest has not opened the file."""

    @property
    def task(self) -> LinuxTask | None:
        """The task that made the last call on the file; None if no task has made one."""


class Polled(Protocol):
    """Interface of an open file that a client polls."""

    @property
    def is_open(self) -> bool:
        """Whether the file has not been released."""

    def mask(self) -> int:
        """Return the poll mask of the events for which the file is ready. Lock: held."""


File = TypeVar("File", bound=Closable)


class DeferredCloses(Generic[File]):
    """Queue of open files that the guest closes at the beginning of the next request.

    A release request comes from no process, and must not wait for the lock. So release() only adds the file
    to a queue: the file is *deferred*. `flush` closes the file at the next request, by the task that used the
    file last. The file is *taken* if the next request is an open by this task, and no other file is deferred.
    Then the guest makes the close and the open in one run.
    """

    def __init__(self, close: Callable[[LinuxTask | None, int], None]) -> None:
        """Create an empty queue.

        `close(task, fd)`: makes `task` call close(2) on the descriptor `fd`; if `task` is None, any task does
        so. `close` must not raise.
        """
        self._close = close
        self.deferred: deque[File] = deque()
        self.defer: Callable[[File], None] = self.deferred.append
        """Queue a file, to be closed before the next request. Lock: not used."""
        self.taken: File | None = None
        """The file that the guest closes together with the next open; None if there is none. Lock: held."""

    def take(self) -> None:
        """Move the only deferred file to `taken`, so that the next open closes it. Lock: held."""
        # Hazard: other threads may defer more files meanwhile.
        self.taken = self.deferred.popleft()

    def flush(self) -> None:
        """Make the guest close all files that clients have released. Lock: held.

        These files are the taken file and the deferred files; see DeferredCloses.
        """
        taken = self.taken
        self.taken = None
        if taken is not None:
            self._close(taken.task, taken.fd or 0)
        while self.deferred:
            file = self.deferred.popleft()
            self._close(file.task, file.fd or 0)


class Running:
    """Context for code that may run the guest. It holds the control lock, and turns guest faults into EIO.

    Raises: KernelError EIO (the mount has ended, the guest has died, or the guest's data lead to memory that
    is not mapped).

    The context keeps no data of a request, so all requests share one instance.
    """

    __slots__ = ("_guest", "_lock")

    def __init__(self, guest: LinuxGuest) -> None:
        self._lock = guest.lock
        self._guest = guest

    def __enter__(self) -> None:
        self._lock.__enter__()
        if self._guest.is_closed:
            self._lock.__exit__()
            self._guest.check_open()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._lock.__exit__()
        if isinstance(error, GuestFault):
            raise KernelError(errno.EIO, f"the guest has died: {error}") from error
        if isinstance(error, MemoryFault):
            self._guest.tasks.machine.damage.report("kernel's data", error)
            raise KernelError(errno.EIO, f"the guest's data lead to {error}") from error


class Request:
    """Context for a client's system call: holds the control lock and yields the task that makes the call.

    This context manager is a class, because a generator would cost each request more time than the lock.
    """

    __slots__ = ("_client", "_guest", "_opens")

    def __init__(self, guest: LinuxGuest, client: Client, opens: bool = False) -> None:
        """Prepare a request.

        `opens`: the client's call is an open. In that case, LinuxGuest.begin() may set
        LinuxGuest.closes.taken to a file that the client has released. The code in the context must then set
        `taken` to None, and make the guest close this file in the run that makes the open.
        """
        self._guest = guest
        self._client = client
        self._opens = opens

    def __enter__(self) -> LinuxTask:
        guest = self._guest
        guest.lock.__enter__()
        try:
            if guest.is_closed:
                guest.check_open()
            return guest.begin(self._client, self._opens)
        except BaseException as error:
            guest.running.__exit__(None, error, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        guest = self._guest
        try:
            guest.end(has_failed=error is not None)
        except BaseException as failed:
            error = failed
            raise
        finally:
            if error is None:
                guest.lock.__exit__()
            else:
                guest.running.__exit__(kind, error, traceback)
        if error is None and guest.waiters:
            guest.wake()


class LinuxWorkloads:
    """Creates the workloads of a distribution's kernel; see guests/common/workloads.py:WorkloadHost."""

    def __init__(self, guest: LinuxGuest) -> None:
        self._guest = guest

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more; see WorkloadHost."""
        return self._guest.is_dead

    def kinds(self) -> Collection[WorkloadKind]:
        """Return all kinds of workloads, since the kernel has their system calls; see WorkloadHost."""
        return list(WorkloadKind)

    def workload(self, kind: WorkloadKind, pid: int) -> LinuxWorkload:
        """Return a workload of the kind `kind`, whose task gets the pid `pid`; see WorkloadHost."""
        guest = self._guest
        return LinuxWorkload(guest.tasks, guest.syscalls, guest.clients.execute, kind, pid)

    def slice_begins(self) -> None:
        """Before a slice of a workload, perform the deferred closes, as a request does.

        See WorkloadHost.

        Raises: KernelError EIO (the mount has ended, or the guest has died).
        """
        guest = self._guest
        guest.check_open()
        try:
            guest.settle()
        except (GuestFault, MemoryFault) as fault:
            raise KernelError(errno.EIO, f"the guest has died: {fault}") from fault

    def slice_ends(self) -> None:
        """After a slice of a workload, notify pollers and threads in wait(), as a request does.

        See WorkloadHost.
        """
        guest = self._guest
        if guest.is_closed:
            return
        with suppress(GuestFault, MemoryFault):
            guest.end(has_failed=guest.is_dead)
        if guest.waiters:
            guest.wake()


class LinuxGuest:
    """A distribution's kernel, with all that the file systems of one mount share: lock, clients, queues."""

    def __init__(
        self,
        tasks: LinuxTasks,
        watch: ProcessWatch,
        owner: Owner,
        modules: ModuleFiles | None = None,
        *,
        lock: ControlLock | None = None,
        begins: Callable[[], None] | None = None,
        ended: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Create the objects that the file systems of a mount share.

        `modules`: module files of this kernel; None: clients cannot load modules. `lock`: the control lock;
        None: create one.

        `begins` is called before each request, and each function in `ended` after each request.
        """
        self.tasks = tasks
        self.owner = owner
        self.lock = lock or ControlLock()
        self.begins = begins
        self.ended = ended
        self.syscalls = LinuxSyscalls(tasks)
        self._modules = KernelModules(self.syscalls, modules)
        self.closes = DeferredCloses[Closable](self._close)
        """Queue of open files, other than control files, that the guest must still close."""
        self.control_closes = DeferredCloses[Closable](self._close_control)
        """Queue of control files that the guest must still close."""
        self.clients = LinuxClients(tasks, watch, owner.uid, self.closes.flush, self.lock)
        self._asleep: dict[int, int] = {}
        """Pid of a client whose call sleeps in the guest -> value of `_requests` when the call last ran.

        `_requests` counts the requests that have succeeded. If it is still the same, only the passing of time
        can wake the call.
        """
        self._requests = 0
        self.pollers: dict[Polled, tuple[int, Callable[[], None]]] = {}
        """File -> its last poll mask, and the function to call when the mask changes."""
        self._activity = threading.Condition()
        self.waiters = 0
        """Number of threads in wait(). If it is 0, wake() is not called.

        A thread that enters wait() just then may miss a wakeup, but checks again after its timeout.
        """
        self.is_closed = False
        self.times = FileTimes(tasks.machine, tasks.facts)
        self.free_pages = PageReporting(tasks.machine.memory, tasks.root, tasks.facts)
        self.running = Running(self)
        self.loads = Workloads(LinuxWorkloads(self), self.lock)
        """The workloads that machine/load starts."""

    def check_open(self) -> None:
        """Check that the mount hasn't ended. Raises: KernelError EIO."""
        if self.is_closed:
            raise KernelError(errno.EIO, "the mount has ended")

    def _close(self, task: LinuxTask | None, fd: int) -> None:
        with suppress(KernelError):
            self.syscalls.close(task or self.tasks.init, fd)

    def _close_control(self, task: LinuxTask | None, fd: int) -> None:
        """Close a control file in the guest. Ignore the guest's death, so that the next request works."""
        with suppress(GuestFault, MemoryFault):
            self._close(task, fd)

    # Requests. Invariant: keep the order of the steps, because traces depend on it.

    def begin(self, client: Client, opens: bool) -> LinuxTask:
        """Perform the deferred closes in the guest, and return the client's task. Lock: held.

        `client`: a result of LinuxClients.informed() at this request.
        `opens`: the call is an open; see Request. If it is True, one file may remain in `closes.taken`, which
        the caller then closes.
        """
        closes = self.closes
        if self.begins is not None:
            self.begins()
        if self.control_closes.deferred:
            self.control_closes.flush()
        if opens and len(closes.deferred) == 1 and closes.taken is None:
            closes.take()
        elif closes.deferred or closes.taken is not None:
            closes.flush()
        task = self.clients.task_of(client, is_informed=True)
        taken = closes.taken
        if taken is not None and (taken.task is not task or task.pending):
            closes.flush()
        return task

    def settle(self) -> None:
        """Begin a request that comes from no client: perform all deferred closes. Lock: held."""
        if self.begins is not None:
            self.begins()
        if self.control_closes.deferred:
            self.control_closes.flush()
        self.closes.flush()

    def end(self, *, has_failed: bool) -> None:
        """End a request: notify pollers, give freed memory back, and call the functions in `ended`.

        `has_failed`: the request has raised an exception, so only the functions in `ended` are called.
        Lock: held.
        """
        try:
            if not has_failed:
                self._requests += 1
                if self.pollers:
                    self._wake_pollers()
                self.see_free_pages()
        finally:
            for notify in self.ended:
                notify()

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes; see FileSystem.

        No client's request is needed.
        """
        with self.running:
            if not self.is_dead and self.clients.has_news():
                self.settle()
                self.clients.catch_up()
                self.end(has_failed=False)

    def see_free_pages(self) -> None:
        """Give memory back to the host if the guest has freed many pages. Lock: held."""
        pages = self.free_pages
        if not pages.low <= pages.words[pages.counter] <= pages.high:
            pages.look()

    # Calls that wait

    def slept(self, client: Client, task: LinuxTask, begin: Callable[[], int]) -> int:
        """Make or continue a client's call that may sleep in the guest, and return its result.

        The client's first request for the call begins it by `begin`. If the call sleeps, the client repeats
        the request, which then continues the call.
        Lock: held. Raises: WouldBlock (the call sleeps).
        """
        asked = self._asleep.get(client.pid)
        try:
            if asked is None:
                result = begin()
            else:
                # Without other requests since, only time can wake the call: run the guest for one tick.
                result = self.tasks.wait_for_result(task, 1 if asked == self._requests else PATIENCE)
        except Blocked:
            self._asleep[client.pid] = self._requests
            raise WouldBlock from None
        except BaseException:
            self._asleep.pop(client.pid, None)
            raise
        self._asleep.pop(client.pid, None)
        return result

    def give_up(self, client: Client) -> None:
        """Kill the client's task, which sleeps in a call that the client has given up. Lock: taken."""
        with self.running:
            self._asleep.pop(client.pid, None)
            self.clients.end(client.pid)

    def unasked(self, client: Client) -> KernelError:
        """Kill the client's task, which sleeps in a call that no request can continue.

        Such calls are the open of a FIFO, and the loading or unloading of a module.

        Return, but do not raise, KernelError EINTR; the caller raises it.
        """
        self.clients.end(client.pid)
        return KernelError(errno.EINTR)

    def wait(self, timeout: float) -> None:
        """Wait until wake() is called, for at most `timeout` seconds. Lock: not used.

        wake() follows each request, because the request may have woken a call that sleeps in the guest.
        """
        with self._activity:
            self.waiters += 1
            try:
                self._activity.wait(timeout)
            finally:
                self.waiters -= 1

    def wake(self) -> None:
        """Wake all threads that are in wait(). Lock: not used."""
        with self._activity:
            self._activity.notify_all()

    def _wake_pollers(self) -> None:
        for file, (mask, notify) in list(self.pollers.items()):
            if not file.is_open or file.mask() != mask:
                self.pollers.pop(file, None)
                notify()

    # Files that the host generates from the guest's state

    def log_text(self) -> bytes:
        """Return the content of the kernel log. Lock: held.

        If the guest is dead, return the end of the output on its serial console, and the cause of death.
        """
        machine = self.tasks.machine
        if not machine.death:
            with suppress(GuestFault, MemoryFault):
                return self.syscalls.log()
        return bytes(machine.pc.console) + f"{machine.death}\n".encode()

    def say(self, line: str) -> None:
        """Write a line to the kernel log, if the guest is alive. Lock: taken."""
        with suppress(KernelError), self.running:
            self.syscalls.say(line)

    def prepared_modules(
        self, client: Client, data: bytes, refused: Collection[str] = ()
    ) -> Callable[[], int]:
        """Read the module files for a client's write to machine/modules; return a function that executes it.

        `data`: the command that the client writes, which may also unload a module. The returned function runs
        the guest with the control lock, and returns the size of `data`. `refused`: names of kernel functions
        that no module may use. Lock: taken only to log an error.
        Raises: KernelError (as KernelModules.prepared() does).
        """
        try:
            change = self._modules.prepared(data, refused)
        except KernelError as error:
            # Log the reason, as the kernel's own loader does when it refuses a module.
            self.say(f"machine/modules: {error.strerror}")
            raise

        def execute() -> int:
            with self.running:
                try:
                    loaded = self.syscalls.read_all(FORWARDED[MODULES]).decode()
                    change(self.clients.task_of(client), loaded)
                except Blocked:
                    raise self.unasked(client) from None
            return len(data)

        return execute

    # The end

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more."""
        return bool(self.tasks.machine.death)

    def close(self) -> None:
        """Free the machine and wake waiting threads. A second call does nothing. Lock: taken."""
        with self.lock:
            if self.is_closed:
                return
            self.loads.stop()
            self.is_closed = True
            self.clients.close()
            self.tasks.machine.close()
        self.wake()
