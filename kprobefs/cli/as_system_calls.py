"""Answers the system calls that the seccomp filter of a command under `--as-system` passes on."""

from __future__ import annotations

import _thread
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

from kprobefs.cli.as_system_filter import Call, Kind, this_machine
from kprobefs.cli.as_system_lookup import CAP_SYS_ADMIN, Found, Lookup, owner_of_namespace

TRACEFS_MAGIC = 0x74726163
DEBUGFS_MAGIC = 0x64626720
PAGE_SIZE = 4096
NAME_MAX = 255
PATH_MAX = 4096
ST_FLAGS = 0x1026
"""Flags of the mount, as statfs(2) returns them: valid, relatime, nodev and nosuid."""
PROC = b"proc"
MS_RDONLY = 1
MS_MAGIC = 0xC0ED0000
"""Flag of mount(2) that old programs add; it has no effect. Mirrors: MS_MGC_VAL."""
MS_MAGIC_MASK = 0xFFFF0000
MS_NOT_NEW = 0x20 | 0x1000 | 0x2000 | 1 << 17 | 1 << 18 | 1 << 19 | 1 << 20
"""Flags with which mount(2) mounts no new file system."""

_NOTIF_RECV = 0xC0502100
_NOTIF_SEND = 0xC0182101
_NOTIF_ID_VALID = 0x40082102
_NOTIF_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""Layout of struct seccomp_notif: id, pid, flags, number, architecture, instruction pointer, arguments."""
_RESPONSE = struct.Struct("=QqiI")

_libc = ctypes.CDLL(None, use_errno=True)


class CallAnswerer:
    """Answers the system calls that the seccomp filter passes on, for the files of one mount."""

    def __init__(self, device: int, tracing: tuple[str, ...], debug: tuple[str, ...]) -> None:
        """Create an answerer for the mount with the st_dev `device`.

        `tracing`, `debug`: paths at which the mount is shown as a tracefs or as a debugfs.
        """
        self._device = os.major(device), os.minor(device)
        self._fsid = device
        self._tracing = tracing
        self._debug = debug

    def serve(self, listener: int) -> None:
        """Receive the next system call from the seccomp filter, and answer it.

        `listener`: descriptor of the filter's listener. If the call copies between files, this thread
        answers. Any other call is answered in a new thread, because another file system or the waiting task
        may delay the answer.
        """
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _NOTIF_RECV, buffer, True)
        except OSError:
            # The caller of the system call was killed meanwhile.
            return
        waiting = _Waiting(listener, bytes(buffer))
        if waiting.call.kind is Kind.COPY:
            self._answer(waiting)
            return
        try:
            # Unlike threading.Thread, this does not wait until the thread has started.
            _thread.start_new_thread(self._answer, (waiting,))
        except RuntimeError:
            # No thread can be started. This thread must not take the caller's ids, so the kernel answers.
            waiting.finish(None)

    def _answer(self, waiting: _Waiting) -> None:
        result = None
        try:
            result = self._result(waiting)
        except (OSError, OverflowError, RuntimeError, ValueError):
            # The kernel answers a call that cannot be inspected here, for example one with a bad address.
            pass
        finally:
            # Hazard: a caller without an answer waits until it is killed.
            waiting.finish(result)

    def _result(self, waiting: _Waiting) -> int | None:
        """Return the result of a call, 0 or an errno; None if the kernel must execute the call.

        Raises: OSError (the arguments or the files of the call cannot be read).
        """
        if waiting.call.kind is Kind.COPY:
            return self._copying(waiting)
        with _Caller(waiting) as caller:
            if waiting.call.kind is Kind.MOUNT:
                return _mount(waiting, caller)
            layout = waiting.call.layout
            assert layout is not None
            if layout.sizes and waiting.arguments[1] not in layout.sizes:
                return errno.EINVAL
            if waiting.call.kind is Kind.FSTATFS:
                return self._statfs(caller.open_descriptor(waiting.arguments[0]), waiting, caller)
            opened = caller.look_up(waiting.arguments[0])
            return self._statfs(opened, waiting, caller)

    def _copying(self, waiting: _Waiting) -> int | None:
        """Return EINVAL for a sendfile(2), splice(2) or copy_file_range(2) from a text file of the mount.

        Linux's tracefs fails likewise, and programs then use read(2). Return None if the call copies from
        another file, so that the kernel executes the call.
        """
        number = waiting.arguments[waiting.call.file] & 0xFFFFFFFF
        found = Found(f"/proc/{waiting.task}/fd/{number}")
        is_text = found.device == self._device and stat.S_ISREG(found.mode) and not found.size
        return errno.EINVAL if is_text else None

    def _statfs(self, opened: int, waiting: _Waiting, caller: _Caller) -> int | None:
        """Write the result of the caller's statfs(2) or fstatfs(2) to the caller's memory.

        `opened`: descriptor, in this process, of the file that the call is about. Return 0 or an errno; None
        if the file is not on the mount, so that the kernel must execute the call.
        Mirrors: fs/libfs.c:simple_statfs (v6.1).
        """
        if Found(opened, only_device=True).device != self._device:
            return None
        magic = DEBUGFS_MAGIC if self._is_debug(caller.path_of(opened)) else TRACEFS_MAGIC
        layout = waiting.call.layout
        assert layout is not None
        fsid = self._fsid & 0xFFFFFFFF
        counts = (0,) * 5
        text = layout.fields.pack(
            magic, PAGE_SIZE, *counts, fsid, self._fsid >> 32, NAME_MAX, PAGE_SIZE, ST_FLAGS
        )
        return caller.write(waiting.arguments[2 if layout.sizes else 1], text)

    def _is_debug(self, name: str) -> bool:
        return any(_is_in(name, each) for each in self._debug) and not any(
            _is_in(name, each) for each in self._tracing
        )


class _Waiting:
    """A system call of a task that waits until the call is answered."""

    def __init__(self, listener: int, notification: bytes) -> None:
        fields = _NOTIFICATION.unpack(notification)
        self._listener = listener
        self._id: int = fields[0]
        self.task: int = fields[1]
        self.call: Call = this_machine().call(fields[4] & 0xFFFFFFFF, fields[3])
        self.arguments: tuple[int, ...] = fields[6:]

    def check(self) -> None:
        """Check that the task still waits for the result of its call. Raises: OSError (it does not)."""
        fcntl.ioctl(self._listener, _NOTIF_ID_VALID, struct.pack("=Q", self._id))

    def finish(self, result: int | None) -> None:
        """Let the caller continue: its call returns 0, or fails with the errno `result`.

        If `result` is None, the kernel executes the call.
        """
        flags = _NOTIF_CONTINUE if result is None else 0
        # The caller may have been killed meanwhile.
        with suppress(OSError):
            fcntl.ioctl(self._listener, _NOTIF_SEND, _RESPONSE.pack(self._id, 0, -(result or 0), flags))


class _Caller:
    """Access to the memory and the files of a task that waits in a system call.

    The thread that answers the call creates the object, and serves no other task.
    """

    def __init__(self, waiting: _Waiting) -> None:
        """Open the memory of the task that waits, and its directory in /proc. Raises: OSError."""
        self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        self._opened = [self._proc]
        self._lookup: Lookup | None = None
        try:
            self._task = self.open(str(waiting.task), os.O_PATH, self._proc)
            self._memory = self.open("mem", os.O_RDWR)
            self._maps = self.open("maps")
            # If the caller still waits, its pid was not reused, so the opened directory is the caller's.
            waiting.check()
        except OSError:
            self.close()
            raise

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close each file that this object has opened."""
        if self._lookup is not None:
            self._lookup.close()
        for each in self._opened:
            os.close(each)

    def open(self, name: str, flags: int = os.O_RDONLY, directory: int | None = None) -> int:
        """Open the file `name`, which stays open until close(), and return its descriptor. Raises: OSError.

        `name` is relative to the open directory `directory`; None: the task's directory in /proc.
        """
        directory = self._task if directory is None else directory
        self._opened.append(os.open(name, flags | os.O_CLOEXEC, dir_fd=directory))
        return self._opened[-1]

    def open_descriptor(self, number: int) -> int:
        """Open again, with O_PATH, the file that the task has open as descriptor `number`.

        Return the new descriptor. Raises: OSError.
        """
        return self.open(f"fd/{number & 0xFFFFFFFF}", os.O_PATH)

    def path_of(self, opened: int) -> str:
        """Return the path of the file that this process has open as descriptor `opened`.

        Raises: OSError.
        """
        return os.readlink(f"self/fd/{opened}", dir_fd=self._proc)

    @property
    def lookup(self) -> Lookup:
        """The object with which this thread looks up paths as the task would. Raises: OSError."""
        if self._lookup is None:
            self._lookup = Lookup(self._task)
        return self._lookup

    def look_up(self, address: int) -> int:
        """Open, with O_PATH, the file whose path is at `address` in the task's memory.

        The path is looked up as it would be for the task. Return the descriptor. Raises: OSError.
        """
        return self.lookup.open(self.read_text(address))

    def read_text(self, address: int) -> bytes:
        """Return the text before the first NUL from `address` on, in the task's memory. Raises: OSError."""
        found = b""
        while b"\0" not in found and len(found) < PATH_MAX:
            # The next page may not be mapped.
            place = address + len(found)
            part = os.pread(self._memory, PAGE_SIZE - place % PAGE_SIZE, place)
            if not part:
                # The caller has died, and its memory with it.
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
            found += part
        if b"\0" not in found[:PATH_MAX]:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return found.split(b"\0")[0]

    def write(self, address: int, text: bytes) -> int:
        """Write `text` to the task's memory; return 0, or EFAULT if the task may not write there."""
        try:
            # Hazard: /proc/PID/mem writes to what the task itself may only read.
            if not self._may_write(address, address + len(text)):
                return errno.EFAULT
            return 0 if os.pwrite(self._memory, text, address) == len(text) else errno.EFAULT
        except (OSError, OverflowError):
            return errno.EFAULT

    def _may_write(self, start: int, end: int) -> bool:
        """Return True if the task may write to all addresses from `start` on and below `end`."""
        with open(os.dup(self._maps), "rb") as lines:
            for line in lines:
                words = line.split(None, 2)
                first, last = (int(word, 16) for word in words[0].split(b"-"))
                if first <= start < last and words[1][1:2] == b"w":
                    start = last
        return start >= end


def _mount(waiting: _Waiting, caller: _Caller) -> int | None:
    """Mount a read-only /proc for the caller, because the kernel refuses to mount a writable one.

    Return 0 or an errno. Return None if the kernel must execute the call, for example because the call
    mounts something else. Raises: OSError.
    """
    source, target, fstype, flags, data = waiting.arguments[:5]
    if flags & MS_MAGIC_MASK == MS_MAGIC:
        flags &= ~MS_MAGIC_MASK
    if flags & (MS_NOT_NEW | MS_RDONLY) or not fstype or caller.read_text(fstype) != PROC:
        return None
    namespaces = [caller.open(f"ns/{name}") for name in ("user", "mnt", "pid")]
    if owner_of_namespace(namespaces[1]) != os.fstat(namespaces[0]).st_ino:
        return None
    texts = [caller.read_text(each) if each else None for each in (source, data)]
    opened = caller.look_up(target)
    if not caller.lookup.credentials.effective & CAP_SYS_ADMIN:
        return None

    def mount() -> None:
        for namespace in namespaces:
            _check(_libc.setns(namespace, 0))
        os.fchdir(opened)
        # setns(2) to a pid namespace takes effect only for children, so a child calls mount(2).
        if failure := errno_of(act):
            raise OSError(failure, os.strerror(failure))

    def act() -> None:
        _check(_libc.mount(texts[0], b".", PROC, ctypes.c_ulong(flags | MS_RDONLY), texts[1]))

    caller.lookup.take_all_rights()
    return errno_of(mount)


def errno_of(action: Callable[[], None]) -> int:
    """Call `action` in a forked process, and return the errno with which it fails, or 0 if it succeeds."""
    child = os.fork()
    if not child:
        status = errno.EIO
        try:
            action()
            status = 0
        except OSError as failure:
            status = failure.errno or errno.EIO
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
