"""Guest: the running kernel as its host sees it; tasks, system calls, files of ours, its functions."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from emulated_kernel.guests.builtin.builtin_kernel import BUFFER_SIZE, BuiltinKernel
from emulated_kernel.guests.builtin.processes.process_tracker import INIT_PID, ProcessTracker
from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner, GuestTask, HostfsHandler, Request
from emulated_kernel.guests.builtin.runner.smp import SmpGuestRunner
from emulated_kernel.guests.builtin.runner.syscalls import Syscalls, check
from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.wall_time import WallTime
from emulated_kernel.image.prototypes import load_argument_counts
from emulated_kernel.machine.guest_calls import MAX_ARGUMENTS
from emulated_kernel.machine.guest_info import Message
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

_STRINGS = 8 << 10
"""Where strings start in a call's buffer, in bytes; the arguments lie before them."""


class Guest:
    """What the front end needs of the guest."""

    def __init__(
        self, kernel: BuiltinKernel, executive: GuestRunner, mirror: ProcessTracker, syscalls: Syscalls
    ) -> None:
        self.kernel = kernel
        machine = kernel.machine
        image = kernel.image
        self._memory = machine.memory
        self._symbols = image.kallsyms
        self._argument_counts = load_argument_counts(image.path)
        """How many arguments functions take at least, as far as that is known."""
        self.runner = executive
        self.processes = mirror
        self.syscalls = syscalls
        self.buffers = kernel.buffers
        self._read_buffer = kernel.buffers.get()
        """Where all reads of our files get their data, which come when a read ends: however many sleep, each
        with this address, one of them at a time is served."""
        self.times = WallTime(lambda: machine.boot_ns + machine.clock.now_ns())
        self._patched = machine.text.ledger.words

    @property
    def is_watched(self) -> bool:
        """Whether a system call could be noticed: some of the guest's text is patched."""
        return bool(self._patched) and not self.runner.is_dead

    def client_call(self, pid: int, uid: int) -> ClientCall | None:
        """The system call that the guest may do in a process's stead; None where nobody would see it."""
        return self.processes.call_of(pid, uid) if self._patched else None

    @property
    def is_dead(self) -> bool:
        """It takes no more system calls: it panicked, or lost its way."""
        return self.runner.is_dead

    def read_file(
        self, task: GuestTask, fd: int, size: int, produce: Callable[[], bytes], number: int | None = None
    ) -> bytes:
        """read(2) on a file of ours: the guest asks for the data in the middle of its vfs_read.

        `number`: what the process calls the descriptor.

        Raises: WouldBlock (`produce` does; the task sleeps then, and the same call goes on with it).
        """
        data = b""

        def serve(_op: int, buffer: int, count: int) -> int:
            nonlocal data
            data = produce()[:count]
            self._memory.write(buffer, data)
            return len(data)

        with self.syscalls.numbered(task, number, fd):
            fd = fd if number is None else number
            size = min(size, BUFFER_SIZE)
            self._transfer(task, "read", fd, size, serve)
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
        """write(2) on a file of ours; the data stand in user memory for who probes vfs_write.

        `kept`: what the call keeps while it sleeps; to be closed when it has ended.

        Raises: YieldLock (`consume` does; the task sleeps then, and the same call goes on with it).
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
    ) -> int:
        nr = self.syscalls.number(name)
        sleeping = task.request
        if sleeping is not None and (sleeping.nr, sleeping.args[0], sleeping.args[2]) == (nr, fd, size):
            sleeping.hostfs = serve
            return check(self.runner.resume(task), self._memory.word_size)
        buffer = self._read_buffer
        if kept is not None:
            buffer = kept.enter_context(self.buffers.borrowed())
            self._memory.write(buffer, data)
        request = Request(nr, (fd, buffer, size), serve)
        return check(self.runner.run(task, request), self._memory.word_size)

    def give_up(self, task: GuestTask, error: int) -> None:
        """The process doesn't wait for the file that its task sleeps in: the call ends with this errno.

        Otherwise it would sleep on until the process asks for something else.
        """
        if not self.is_dead and task.request is not None:
            self.runner.interrupt(task, error)

    def enter(self, task: GuestTask) -> None:
        """Make this the task that runs on the CPU."""
        if not self.is_dead and self.runner.at_hand is not task:
            self.syscalls.call(task, "getpid")

    def open_file(self, path: str, flags: int) -> int:
        """open(2) of a file of ours that the host has open already; a descriptor."""
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        return self.syscalls.open(self.processes.init, path, flags, hostfs=lambda _op, _buffer, _count: 0)

    def close_file(self, fd: int, number: int | None = None) -> None:
        """close(2) in the task that ran last, mostly the closing one: FUSE doesn't say who it is.

        `number`: what the process calls the descriptor.
        """
        task = self.runner.at_hand or self.processes.init
        if number is None:
            self.syscalls.call(task, "close", fd)
        else:
            with self.syscalls.numbered(task, number, fd):
                self.syscalls.call(task, "close", number)

    def call_function(self, name: str, *args: int | str | bytes) -> int:
        """Call a kernel function in the worker's task; strings are passed by address. The raw result.

        No task is frozen behind it, whatever was called.

        Raises: KernelError ENOENT (no such symbol), EINVAL (no function, fewer arguments than it is known to
        take, a string with NUL), E2BIG (too many arguments), EFAULT (it oopsed or looped: the worker was
        killed, see the kernel log), EIO (the guest was dead before).
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
        try:
            return self.runner.run(self.processes.worker(), request)
        except KernelError as error:
            if request.killed:
                raise KernelError(errno.EFAULT, "the call was killed; see machine/dmesg") from error
            raise

    def _put_arguments(self, buffer: int, args: tuple[int | str | bytes, ...]) -> list[int]:
        words = []
        at = buffer + _STRINGS
        for arg in args:
            if isinstance(arg, int):
                words.append(arg % (1 << 8 * self._memory.word_size))
                continue
            data = arg.encode("utf-8", "surrogateescape") if isinstance(arg, str) else arg
            if b"\0" in data:
                raise KernelError(errno.EINVAL, "a string with NUL in it")
            if at + len(data) >= buffer + BUFFER_SIZE:
                raise KernelError(errno.E2BIG, "the strings are too long")
            self._memory.write(at, data + b"\0")
            words.append(at)
            at += len(data) + 1
        return words + [0] * (MAX_ARGUMENTS - len(words))

    @contextmanager
    def frozen(self) -> Iterator[bool]:
        """All tasks but ours are in the refrigerator meanwhile; False: not all got there, and none is.

        Raises: KernelError (as `call_function`). Mirrors: kernel/power/process.c:freeze_processes (v6.1).
        """
        try:
            yield not self._call_named("freeze_processes", ())
        finally:
            # First of all, and not by the guest: a probe's handler may kill who thaws.
            self.kernel.thaw()
            with suppress(KernelError):
                self.call_function("thaw_processes")

    def log(self, message: str) -> None:
        """printk: a line of the host's in the kernel log, wherever the guest stands; not if it is dead."""
        if not self.is_dead:
            with suppress(KernelError):
                self.kernel.print(message)

    def messages(self) -> list[Message]:
        """The kernel log, as far as it can be read, and what the host has to say behind it."""
        try:
            messages = self.kernel.messages()
        except KernelError as error:
            self.runner.note(str(error.strerror))
            messages = []
        return messages + self.runner.notes


def boot_guest(kernel: BuiltinKernel, watch: ProcessWatch, events: TaskEvents, lock: ControlLock) -> Guest:
    """Run the kernel on from its boot until init is in user mode, and build what serves requests.

    Raises: KernelError ENOEXEC (it doesn't get there).
    """
    config = kernel.machine.config
    executive = (SmpGuestRunner if config.cpus > 1 or config.quantum else GuestRunner)(kernel, events, lock)
    init = GuestTask(INIT_PID, kernel.first_task(), "init", 0, 0)
    executive.add(init)
    executive.start()
    if executive.is_dead:
        name = kernel.image.path.name
        raise KernelError(errno.ENOEXEC, f"{name} doesn't boot: it stopped before its first task ran")
    mirror = ProcessTracker(kernel, executive, watch, init)
    return Guest(kernel, executive, mirror, Syscalls(executive, kernel))
