"""Guest: the running kernel as its host sees it; tasks, system calls, files of ours, its functions."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import BUFFER_SIZE, UserBuffers
from emulated_kernel.host.cells import address_of
from emulated_kernel.host.executive import Executive, GuestTask, HostfsHandler, Request
from emulated_kernel.host.mirror import TaskMirror
from emulated_kernel.host.syscalls import Syscalls, UserMemory, check
from emulated_kernel.host.wall_time import WallTime

MAX_ARGUMENTS = 6
_STRINGS = 8 << 10
"""Where strings start in a call's buffer, in bytes; the arguments lie before them."""


class GuestCpu(Protocol):
    """What calling functions needs of the machine."""

    def call(self, address: int, *args: int, variadic: bool = False) -> int: ...


class GuestSymbol(Protocol):
    @property
    def address(self) -> int: ...

    @property
    def is_text(self) -> bool: ...


class GuestSymbols(Protocol):
    def lookup_name(self, name: str) -> int | None: ...

    def by_name(self, name: str) -> Sequence[GuestSymbol]: ...


class Guest:
    """What the front end needs of the guest. Callers hold the control lock."""

    def __init__(
        self,
        executive: Executive,
        mirror: TaskMirror,
        syscalls: Syscalls,
        memory: UserMemory,
        buffers: UserBuffers,
        cpu: GuestCpu,
        symbols: GuestSymbols,
        times: WallTime,
        patched: Mapping[int, int],
        argument_counts: Mapping[str, int] | None = None,
    ) -> None:
        """`argument_counts`: how many arguments functions take at least, as far as that is known."""
        self._argument_counts = argument_counts or {}
        self._cpu = cpu
        self._symbols = symbols
        self.executive = executive
        self.mirror = mirror
        self.syscalls = syscalls
        self.times = times
        self._memory = memory
        self.buffers = buffers
        self._patched = patched

    @property
    def is_watched(self) -> bool:
        """Whether a system call could be noticed: some of the guest's text is patched."""
        return bool(self._patched) and not self.executive.is_dead

    @property
    def is_dead(self) -> bool:
        """It takes no more system calls: it panicked, or lost its way."""
        return self.executive.is_dead

    def read_file(self, task: GuestTask, fd: int, size: int, produce: Callable[[], bytes]) -> bytes:
        """read(2) on a file of ours: the guest asks for the data in the middle of its vfs_read.

        Raises: WouldBlock when `produce` does; the task sleeps then, and the same call goes on with it.
        """
        data = b""

        def serve(_op: int, buffer: int, count: int) -> int:
            nonlocal data
            data = produce()[:count]
            self._memory.write(buffer, data)
            return len(data)

        self._transfer(task, "read", fd, min(size, BUFFER_SIZE), serve)
        return data

    def write_file(self, task: GuestTask, fd: int, data: bytes, consume: Callable[[], int]) -> int:
        """write(2) on a file of ours; the data stand in user memory for who probes vfs_write."""

        def serve(_op: int, _buffer: int, _count: int) -> int:
            return consume()

        return self._transfer(task, "write", fd, len(data), serve, data)

    def _transfer(
        self, task: GuestTask, name: str, fd: int, size: int, serve: HostfsHandler, data: bytes | None = None
    ) -> int:
        nr = self.syscalls.number(name)
        sleeping = task.request
        if sleeping is not None and (sleeping.nr, sleeping.args[0], sleeping.args[2]) == (nr, fd, size):
            sleeping.hostfs = serve
            return check(self.executive.resume(task), self._memory.word_size)
        buffer = self.buffers.get()
        if data is not None:
            self._memory.write(buffer, data)
        request = Request(nr, (fd, buffer, size), serve, on_end=lambda: self.buffers.put(buffer))
        return check(self.executive.run(task, request), self._memory.word_size)

    def give_up(self, task: GuestTask, fd: int, error: int) -> None:
        """The process doesn't wait for the file that its task sleeps in: the call ends with this errno.

        Otherwise it would sleep on, with one of the buffers, until the process asks for something else.
        """
        if not self.is_dead and task.request is not None and task.request.args[0] == fd:
            self.executive.interrupt(task, error)

    def enter(self, task: GuestTask) -> None:
        """Make this the task that runs on the CPU."""
        if not self.is_dead and self.executive.at_hand is not task:
            self.syscalls.call(task, "getpid")

    def open_file(self, path: str, flags: int) -> int:
        """open(2) of a file of ours that the host has open already; a descriptor."""
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        return self.syscalls.open(self.mirror.init, path, flags, hostfs=lambda _op, _buffer, _count: 0)

    def close_file(self, fd: int) -> None:
        """close(2) in the task that ran last, mostly the closing one: FUSE doesn't say who it is."""
        self.syscalls.call(self.executive.at_hand or self.mirror.init, "close", fd)

    def call_function(self, name: str, *args: int | str | bytes) -> int:
        """Call a kernel function in the worker's task; strings are passed by address. The raw result.

        Raises: KernelError ENOENT (no such symbol), EINVAL (no function, fewer arguments than it is known to
        take, a string with NUL), E2BIG (too many arguments), EFAULT (it oopsed or looped: the worker was
        killed, see the kernel log), EIO (the guest was dead before).
        """
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
            return self.executive.run(self.mirror.worker(), request)
        except KernelError as error:
            if request.killed:
                raise KernelError(errno.EFAULT, "the call was killed; see machine/dmesg") from error
            raise

    def _put_arguments(self, buffer: int, args: tuple[int | str | bytes, ...]) -> list[int]:
        words, at = [], buffer + _STRINGS
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

    def log(self, message: str) -> None:
        """printk: a line of the host's in the kernel log, wherever the guest stands; not if it is dead."""
        if self.is_dead:
            return
        printk = address_of(self._symbols, "_printk")
        with self.buffers.borrowed() as buffer:
            self._memory.write(buffer, b"%s\n\0" + message.encode()[:1000] + b"\0")
            self._cpu.call(printk, buffer, buffer + 4, variadic=True)
