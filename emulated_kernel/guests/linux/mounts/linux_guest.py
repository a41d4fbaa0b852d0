"""LinuxGuest: what the file systems of one distribution's kernel share: tasks, lock, calls that wait."""

from __future__ import annotations

import errno
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.clients import LinuxClients
from emulated_kernel.guests.linux.guest.file_times import FileTimes
from emulated_kernel.guests.linux.guest.page_reporting import PageReporting
from emulated_kernel.guests.linux.guest.syscalls import PATIENCE, LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.mounts.guest_paths import FORWARDED, MODULES
from emulated_kernel.guests.linux.mounts.kernel_modules import KernelModules
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner

POLLED = select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDNORM | select.POLLWRNORM


class Closable(Protocol):
    """An open file of which the guest has a descriptor."""

    @property
    def fd(self) -> int | None:
        """The guest's descriptor."""

    @property
    def task(self) -> LinuxTask | None:
        """Whose call was the last one on it."""


class Polled(Protocol):
    """An open file that somebody polls."""

    @property
    def is_open(self) -> bool:
        """Whether it hasn't been released."""

    def mask(self) -> int:
        """Return its readiness. Lock: needs."""


File = TypeVar("File", bound=Closable)


class DeferredCloses(Generic[File]):
    """Closes that the guest makes before it does anything else.

    The request for a close(2) comes from no process, and its client goes on: waiting for the lock would hold
    that up. So a file is *deferred*, without the lock, and closed by `flush` at the next request, by the task
    that has used it last. If the next request is an open by that very task, and no other file is deferred,
    the file is *taken*: both calls are made in one run of the guest.
    """

    def __init__(self, close: Callable[[LinuxTask | None, int], None]) -> None:
        """`close`: close(2) by a task, or by any if it is None; it must not fail."""
        self._close = close
        self.deferred: deque[File] = deque()
        self.defer: Callable[[File], None] = self.deferred.append
        """Has a file closed before the next request. Lock: leaves."""
        self.taken: File | None = None
        """The next open closes it. Needs the lock."""

    def take(self) -> None:
        """Leave the only file that is deferred to the open that follows. Lock: needs."""
        # From here on others may add to them.
        self.taken = self.deferred.popleft()

    def flush(self) -> None:
        """Close all. Lock: needs."""
        taken = self.taken
        self.taken = None
        if taken is not None:
            self._close(taken.task, taken.fd or 0)
        while self.deferred:
            file = self.deferred.popleft()
            self._close(file.task, file.fd or 0)


class Running:
    """What may run the guest is done in it: the lock is taken, and the guest's death is EIO.

    It keeps nothing of a request, so that one is enough for all of them.
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


class Request:
    """A system call of a client's is made in it, by the task that it yields.

    It is no generator: one costs more than the lock, in each request.
    """

    __slots__ = ("_client", "_guest", "_opens")

    def __init__(self, guest: LinuxGuest, client: Client, opens: bool = False) -> None:
        """Prepare one. `opens`: its first call closes what LinuxGuest.closes has taken."""
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


class LinuxGuest:
    """One distribution's kernel, as the file systems of one mount use it."""

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
        """`modules`: this kernel's own. `lock`: the control lock.

        `begins` is called before each request, and those of `ended` after each.
        """
        self.tasks = tasks
        self.owner = owner
        self.lock = lock or ControlLock()
        self.begins = begins
        self.ended = ended
        self.syscalls = LinuxSyscalls(tasks)
        self._modules = KernelModules(self.syscalls, modules)
        self.closes = DeferredCloses[Closable](self._close)
        """Of the guest's own files."""
        self.control_closes = DeferredCloses[Closable](self._close_control)
        """Of control files, which the guest has open, too."""
        self.clients = LinuxClients(tasks, watch, owner.uid, self.closes.flush)
        self._asleep: dict[int, int] = {}
        """Client whose call sleeps in the guest, by pid -> number of requests at the last look."""
        self._requests = 0
        self.pollers: dict[Polled, tuple[int, Callable[[], None]]] = {}
        """File -> what was there when it was asked, and whom to tell that this has changed."""
        self._activity = threading.Condition()
        self.waiters = 0
        """Threads that wait for activity; without any, nobody is told. Who is about to looks again soon."""
        self.is_closed = False
        self.times = FileTimes(tasks.machine, tasks.facts)
        self.free_pages = PageReporting(tasks.machine.memory, tasks.root, tasks.facts)
        self.running = Running(self)

    def check_open(self) -> None:
        """Check that the mount hasn't ended. Raises: KernelError EIO."""
        if self.is_closed:
            raise KernelError(errno.EIO, "the mount has ended")

    def _close(self, task: LinuxTask | None, fd: int) -> None:
        with suppress(KernelError):
            self.syscalls.close(task or self.tasks.init, fd)

    def _close_control(self, task: LinuxTask | None, fd: int) -> None:
        """Close it; that the guest dies of it is no matter of the file of ours that is asked for next."""
        with suppress(GuestFault):
            self._close(task, fd)

    # Requests. The order of the steps counts: another one would change traces.

    def begin(self, client: Client, opens: bool) -> LinuxTask:
        """Begin a request; return the task that makes it. What was put off is done before. Lock: needs."""
        if self.begins is not None:
            self.begins()
        if self.control_closes.deferred:
            self.control_closes.flush()
        closes = self.closes
        if opens and len(closes.deferred) == 1 and closes.taken is None:
            closes.take()
        elif closes.deferred or closes.taken is not None:
            closes.flush()
        task = self.clients.task_of(client)
        taken = closes.taken
        if taken is not None and (taken.task is not task or task.pending):
            closes.flush()
        return task

    def end(self, *, has_failed: bool) -> None:
        """End a request. Lock: needs."""
        try:
            if not has_failed:
                self._requests += 1
                if self.pollers:
                    self._tell_pollers()
                self.see_free_pages()
        finally:
            for tell in self.ended:
                tell()

    def see_free_pages(self) -> None:
        """Give pages back to the host that the guest has freed, if those are many. Lock: needs."""
        pages = self.free_pages
        if not pages.fewest <= pages.words[pages.counter] <= pages.most:
            pages.look()

    # Who waits

    def slept(self, client: Client, task: LinuxTask, begin: Callable[[], int]) -> int:
        """Return what a call returns that may sleep: it is made once, and asked for until it has ended.

        Lock: needs. Raises: WouldBlock (it sleeps).
        """
        asked = self._asleep.get(client.pid)
        try:
            if asked is None:
                result = begin()
            else:
                # What somebody has done may wake it in some ticks, and nothing else but time itself.
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
        """Kill the client's task, which sleeps in a call. Lock: takes."""
        with self.running:
            self._asleep.pop(client.pid, None)
            self.clients.end(client.pid)

    def unasked(self, client: Client) -> KernelError:
        """Return EINTR for a call that sleeps, and whose answer nobody could ask for: its task is killed."""
        self.clients.end(client.pid)
        return KernelError(errno.EINTR)

    def wait(self, timeout: float) -> None:
        """Return once a request was made that may have woken somebody, or after `timeout` seconds.

        Lock: leaves.
        """
        with self._activity:
            self.waiters += 1
            try:
                self._activity.wait(timeout)
            finally:
                self.waiters -= 1

    def wake(self) -> None:
        """Let who waits look again. Lock: leaves."""
        with self._activity:
            self._activity.notify_all()

    def _tell_pollers(self) -> None:
        for file, (mask, notify) in list(self.pollers.items()):
            if not file.is_open or file.mask() != mask:
                self.pollers.pop(file, None)
                notify()

    # Files that the host makes of what the guest knows

    def log_text(self) -> bytes:
        """Return the kernel's log; if it has died, the end of its serial console and why. Lock: needs."""
        machine = self.tasks.machine
        if not machine.death:
            with suppress(GuestFault):
                return self.syscalls.log()
        return bytes(machine.pc.console) + f"{machine.death}\n".encode()

    def prepared_modules(
        self, client: Client, data: bytes, refused: Collection[str] = ()
    ) -> Callable[[], int]:
        """Return what the client's write to machine/modules will do, within a request of his.

        Files are read here. Lock: leaves. `refused`: see KernelModules.prepared.
        """
        try:
            change = self._modules.prepared(data, refused)
        except KernelError as error:
            # As the kernel's own loader does where it refuses one.
            with suppress(KernelError), self.running:
                self.syscalls.say(f"machine/modules: {error.strerror}")
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
        """Whether it can't run any more."""
        return bool(self.tasks.machine.death)

    def close(self) -> None:
        """Wake who waits, free the machine. May be called twice. Lock: takes."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.clients.close()
            self.tasks.machine.close()
        self.wake()
