"""Guest: a mount's interface to the running kernel: tasks, system calls, control files, functions."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from heapq import merge
from operator import attrgetter

from emulated_kernel.guests.builtin.builtin_kernel import BUFFER_SIZE, BuiltinKernel
from emulated_kernel.guests.builtin.processes.process_tracker import INIT_PID, ProcessTracker
from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner, GuestTask, HostfsHandler, Request
from emulated_kernel.guests.builtin.runner.syscalls import Syscalls, check
from emulated_kernel.guests.builtin.watched_calls import WatchedCalls
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.wall_time import WallTime
from emulated_kernel.image.prototypes import load_argument_counts
from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.machine.guest_calls import MAX_ARGUMENTS
from emulated_kernel.machine.guest_info import Message
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.util.abi import HostfsWriter
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

_STRINGS = 8 << 10
"""Offset of strings in the buffer of a function call, in bytes; the arguments are before them."""


class Guest:
    """Gives a mount access to the guest: tasks, system calls, control files and kernel functions."""

    def __init__(
        self, kernel: BuiltinKernel, runner: GuestRunner, processes: ProcessTracker, syscalls: Syscalls
    ) -> None:
        self.kernel = kernel
        machine = kernel.machine
        image = kernel.image
        self._memory = machine.memory
        self._symbols = image.kallsyms
        self._argument_counts = load_argument_counts(image.path)
        """Name of a function -> minimum number of its arguments, for functions where it is known."""
        self.runner = runner
        kernel.damage.tell = runner.note
        self.processes = processes
        self.syscalls = syscalls
        self.buffers = kernel.buffers
        self._read_buffer = kernel.buffers.get()
        """Address of the buffer that all reads of control files share.

        Sleeping reads can share it, because data are written when a read ends, and one read ends at a time.
        """
        self.times = WallTime(lambda: machine.boot_ns + machine.clock.now_ns())
        self.sight: Callable[[], Sight] = lambda: Sight.MEMORY
        """Function that returns the largest Sight of the armed probes: the data that they can read at a hit.

        The code that builds the kernel's probe engine replaces this default.
        """
        self.watched = WatchedCalls(machine.text, image)
        """Finds the kinds of system calls that a probe or tracer could notice."""

    def is_watched(self, kind: int) -> bool:
        """Return True if a probe or tracer could notice a client's system call of a kind in the mask `kind`.

        `kind`: one or more bits of call_graph.Calls. The calls of a dead guest are not watched.
        """
        return self.watched.include(kind) and not self.runner.is_dead

    @property
    def is_dead(self) -> bool:
        """Whether the guest takes no more system calls, because it panicked or was declared dead."""
        return self.runner.is_dead

    def read_file(
        self,
        task: GuestTask,
        fd: int,
        size: int,
        produce: Callable[[], bytes],
        number: int | None = None,
        wanted: object = None,
    ) -> bytes:
        """Make a task read a control file, and return the data.

        `fd`: the guest's descriptor. `produce`: function that is called during the task's vfs_read, and
        returns the data. `number`: the number of the descriptor in the client's process; None if it is
        unknown or no probe can see it. `wanted`: the file that the client reads, if `fd` belongs to another
        file; see Request.
        Raises: WouldBlock (`produce` has raised it, and the task sleeps; call this method with the same
        arguments again to resume the task).
        """
        data = b""

        def serve(_op: int, buffer: int, count: int) -> int:
            nonlocal data
            data = produce()[:count]
            self._memory.write(buffer, data)
            return len(data)

        size = min(size, BUFFER_SIZE)
        if number is None:
            self._transfer(task, "read", fd, size, serve, wanted=wanted)
        else:
            with self.syscalls.numbered(task, number, fd):
                self._transfer(task, "read", number, size, serve)
        return data

    def write_file(
        self,
        task: GuestTask,
        fd: int,
        data: bytes,
        consume: Callable[[], int],
        kept: ExitStack,
        number: int | None = None,
    ) -> int:
        """Make a task write a control file, and return the number of bytes written.

        `fd`: the guest's descriptor. `consume`: function that is called during the task's vfs_write, and
        returns the number of bytes written. `data` is in user memory, where probes of vfs_write can read it.
        `kept`: exit stack that frees the call's buffer in user memory. The caller closes `kept` when the call
        has ended, but not while the task sleeps. `number`: the number of the descriptor in the client's
        process; None if it is unknown or no probe can see it. Raises: YieldLock (`consume` has raised it, and
        the task sleeps; call this method with the same arguments again to resume the task).
        """

        def serve(_op: int, _buffer: int, _count: int) -> int:
            return consume()

        with self.syscalls.numbered(task, number, fd):
            fd = fd if number is None else number
            return self._transfer(task, "write", fd, len(data), serve, data, kept)

    def _transfer(
        self,
        task: GuestTask,
        name: str,
        fd: int,
        size: int,
        serve: HostfsHandler,
        data: bytes = b"",
        kept: ExitStack | None = None,
        wanted: object = None,
    ) -> int:
        """Make `task` read from or write to the guest's descriptor `fd`; return the number of bytes.

        `name`: name of the system call. If the task sleeps in the same call (equal number, descriptor, size
        and `wanted`), continue that call. `serve`: answers the guest's requests to the host. `data`: written
        to a buffer in user memory, which the caller frees by closing `kept`. Without `kept`, the call uses
        the shared buffer for reads. `wanted`: see Request. Raises: KernelError (the call failed), WouldBlock
        (the task sleeps in the call).
        """
        nr = self.syscalls.number(name)
        sleeping = task.request
        if (
            sleeping is not None
            and sleeping.wanted is wanted
            and (sleeping.nr, sleeping.args[0], sleeping.args[2]) == (nr, fd, size)
        ):
            sleeping.hostfs = serve
            return check(self.runner.resume(task), self._memory.word_size)
        buffer = self._read_buffer
        if kept is not None:
            buffer = kept.enter_context(self.buffers.borrowed())
            self._memory.write(buffer, data)
        request = Request(nr, (fd, buffer, size), serve, wanted)
        return check(self.runner.run(task, request), self._memory.word_size)

    def give_up(self, task: GuestTask, error: int) -> None:
        """End the system call in which a task sleeps: the call fails with the errno `error`.

        This is needed when the task's host process no longer waits for the call. Otherwise the task would
        sleep until the process makes another request. If the task sleeps in no system call, do nothing.
        """
        if not self.is_dead and task.request is not None:
            self.runner.interrupt(task, error)

    def enter(self, task: GuestTask) -> None:
        """Make `task` the guest's current task.

        A guest switches to a task only for a system call. So if another task is current, make `task` call
        getpid(2). If the guest is dead, do nothing.
        """
        if not self.is_dead and self.runner.at_hand is not task:
            self.syscalls.call(task, "getpid")

    def open_file(self, path: str, flags: int, writer: HostfsWriter = HostfsWriter.GENERAL) -> int:
        """Open in the guest a control file that is already open on the host; return the guest's descriptor.

        `path`: path of the file. `flags`: flags of open(2); O_CREAT, O_EXCL and O_TRUNC are left out.
        `writer`: selects the function of the guest's kernel that writes to the file.
        """
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        return self.syscalls.open(
            self.processes.init, path, flags, hostfs=lambda _op, _buffer, _count: writer
        )

    def close_file(self, fd: int, number: int | None = None) -> None:
        """Close the guest's descriptor `fd` by a system call of the guest's current task.

        If the current task cannot make a system call, init makes the call. FUSE does not report which process
        closes a file, but usually it is the process that ran last. `number`: the descriptor's number in that
        process, which is passed to the guest's close(2). None means that the number is unknown, or that no
        probe can see it.
        """
        task = self.runner.at_hand or self.processes.init
        if number is None:
            self.syscalls.call(task, "close", fd)
        else:
            with self.syscalls.numbered(task, number, fd):
                self.syscalls.call(task, "close", number)

    def call_function(self, name: str, *args: int | str | bytes) -> int:
        """Call a kernel function in the task of worker() and return its raw result; pass strings by address.

        The result is an unsigned word. No task stays frozen after the call, even if the function was
        freeze_processes.
        Raises: KernelError ENOENT (no such symbol), EINVAL (not a function, fewer arguments than the function
        is known to take, or a string with NUL), E2BIG (too many arguments), EFAULT (the
        function oopsed, looped or does not return; see the kernel log), EIO (the guest was dead before).
        """
        try:
            return self._call_named(name, args)
        finally:
            self.kernel.thaw()

    def _call_named(self, name: str, args: tuple[int | str | bytes, ...]) -> int:
        found = self._symbols.by_name(name)
        if not found:
            raise KernelError(errno.ENOENT, f"no symbol named {name}")
        if not found[0].is_text:
            raise KernelError(errno.EINVAL, f"{name} is not a function")
        if len(args) > MAX_ARGUMENTS:
            raise KernelError(errno.E2BIG, f"at most {MAX_ARGUMENTS} arguments")
        needed = self._argument_counts.get(name.rpartition(":")[2], 0)
        if len(args) < min(needed, MAX_ARGUMENTS):
            noun = "argument" if needed == 1 else "arguments"
            raise KernelError(errno.EINVAL, f"{name} takes {needed} {noun}, not {len(args)}")
        with self.buffers.borrowed() as buffer:
            return self._call(found[0].address, buffer, args)

    def _call(self, address: int, buffer: int, args: tuple[int | str | bytes, ...]) -> int:
        words = self._put_arguments(buffer, args)
        request = Request(self.syscalls.number("host_call"), (address, buffer), None)
        size = self._memory.word_size
        self._memory.write(buffer, b"".join(word.to_bytes(size, "little") for word in words))
        return self.run_in_worker(request, "the call")

    def run_in_worker(self, request: Request, name: str) -> int:
        """Make a system call in the task of worker(), and return its raw result.

        The result is that of GuestRunner.syscall(). If the call sleeps for ever, leave the task asleep, and
        make another task the worker. `name`: name of the call for an error message.
        Raises: KernelError EFAULT (the call was killed or does not return), EIO (the guest was dead before).
        """
        worker = self.processes.worker()
        try:
            return self.runner.run(worker, request)
        except KernelError as error:
            if request.killed:
                raise KernelError(errno.EFAULT, f"{name} was killed; see machine/dmesg") from error
            if worker.request is request:
                self.processes.replace_worker()
                raise KernelError(errno.EFAULT, f"{name} does not return; see machine/dmesg") from error
            raise

    def _put_arguments(self, buffer: int, args: tuple[int | str | bytes, ...]) -> list[int]:
        """Write the strings in `args` to the user buffer at address `buffer`; return MAX_ARGUMENTS words.

        The words are the arguments to pass to a kernel function.

        A number is passed as a word, and a string as its address in the buffer. Zeros follow the last
        argument.
        Raises: KernelError EINVAL (a string with NUL), E2BIG (the strings are too long).
        """
        words = []
        at = buffer + _STRINGS
        for arg in args:
            if isinstance(arg, int):
                words.append(arg % (1 << 8 * self._memory.word_size))
                continue
            if isinstance(arg, str) and "\0" in arg:
                raise KernelError(errno.EINVAL, "a string with NUL in it")
            data = arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg
            if at + len(data) >= buffer + BUFFER_SIZE:
                raise KernelError(errno.E2BIG, "the strings are too long")
            self._memory.write(at, data + b"\0")
            words.append(at)
            at += len(data) + 1
        return words + [0] * (MAX_ARGUMENTS - len(words))

    @contextmanager
    def frozen(self) -> Iterator[bool]:
        """Freeze all tasks except that of worker() during the `with` block, and yield True.

        If the tasks cannot be frozen, yield False, with no task frozen.
        Raises: KernelError (as `call_function`). Mirrors: kernel/power/process.c:freeze_processes (v6.1).
        """
        try:
            yield not self._call_named("freeze_processes", ())
        finally:
            # Clear the flag from the host first: a probe's handler may kill the task in thaw_processes.
            self.kernel.thaw()
            with suppress(KernelError):
                self.call_function("thaw_processes")

    def log(self, message: str) -> None:
        """Print `message`, a message of the host, as a line of the kernel log.

        Do nothing if the guest is dead. The guest may be stopped at any instruction.
        """
        if not self.is_dead:
            with suppress(KernelError):
                self.kernel.print(message)

    def messages(self) -> list[Message]:
        """Return the undamaged messages of the kernel log and the host's own messages, in order of time."""
        by_time = attrgetter("time_ns")
        return [*merge(self.kernel.messages(), self.runner.notes, key=by_time)]


def boot_guest(kernel: BuiltinKernel, watch: ProcessWatch, events: TaskEvents, lock: ControlLock) -> Guest:
    """Run a kernel that has just booted until init is in user mode, and return its Guest.

    Raises: KernelError ENOEXEC (the kernel stops before init is in user mode).
    """
    config = kernel.machine.config
    make_runner = GuestRunner
    if config.cpus > 1 or config.quantum:
        from emulated_kernel.guests.builtin.runner.smp import SmpGuestRunner

        make_runner = SmpGuestRunner
    runner = make_runner(kernel, events, lock)
    init = GuestTask(INIT_PID, kernel.first_task(), "init", 0, 0)
    runner.add(init)
    runner.start()
    if runner.is_dead:
        name = kernel.image.path.name
        raise KernelError(errno.ENOEXEC, f"{name} doesn't boot: it stopped before its first task ran")
    kernel.give_mm(init.addr)
    processes = ProcessTracker(kernel, runner, watch, init)
    return Guest(kernel, runner, processes, Syscalls(runner, kernel))
