"""System calls of a command under `--as-system` that a filter takes: statfs(2) and those that copy files.

FUSE has one f_type for all file systems, and splices nothing from files of size 0. A seccomp filter passes
these calls to a process of kprobefs. It answers for files of the mount, and lets the kernel execute the rest.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import stat
import struct
import threading
from contextlib import suppress

from emulated_kernel.util.fast_dataclass import dataclass

TRACEFS_MAGIC = 0x74726163
DEBUGFS_MAGIC = 0x64626720
PAGE_SIZE = 4096
NAME_MAX = 255
PATH_MAX = 4096
ST_FLAGS = 0x1026
"""Flags of the mount in statfs(2): valid, relatime, nodev and nosuid."""
STATFS = struct.Struct("=qqQQQQQIIqqq32x")
"""struct statfs of 64-bit machines: type, block size, five counts, two words of fsid, name length, flags."""

_SECCOMP_SET_MODE_FILTER = 1
_FILTER_FLAG_NEW_LISTENER = 1 << 3
_RET_USER_NOTIF = 0x7FC00000
_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000
_NOTIF_RECV = 0xC0502100
_NOTIF_SEND = 0xC0182101
_NOTIF_ID_VALID = 0x40082102
_NOTIF_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags, number, architecture, instruction pointer, arguments."""
_RESPONSE = struct.Struct("=QqiI")
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_OFFSET_NUMBER = 0
_OFFSET_ARCH = 4
_OPENAT2 = 437
_RESOLVE_IN_ROOT = 0x10
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS = 0x7FF
_STATX = struct.Struct("=IIQIIIH2xQQQQ64xIIII")
"""The first 144 bytes of struct statx, as far as the number of its device."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls of one kind of machine."""

    arch: int
    """AUDIT_ARCH_*"""
    seccomp: int
    statfs: int
    fstatfs: int
    copying: dict[int, int]
    """System call -> index of its argument with the file that is read."""
    ids: tuple[int, int, int]
    """setgroups(2), setresgid(2) and setresuid(2), which the C library would execute in all threads."""
    perf_event_open: tuple[tuple[int, int], ...]
    """Architecture and number, those of compatible programs included."""


_GENERIC_COPYING = {71: 1, 76: 0, 285: 0}
_GENERIC_IDS = (159, 149, 147)
_MACHINES = {
    "x86_64": _Machine(
        arch=0xC000003E,
        seccomp=317,
        statfs=137,
        fstatfs=138,
        copying={40: 1, 275: 0, 326: 0},
        ids=(116, 119, 117),
        perf_event_open=((0xC000003E, 298), (0xC000003E, 298 | 1 << 30), (0x40000003, 336)),
    ),
    "aarch64": _Machine(
        arch=0xC00000B7,
        seccomp=277,
        statfs=43,
        fstatfs=44,
        copying=_GENERIC_COPYING,
        ids=_GENERIC_IDS,
        perf_event_open=((0xC00000B7, 241), (0x40000028, 364)),
    ),
    "riscv64": _Machine(
        arch=0xC00000F3,
        seccomp=277,
        statfs=43,
        fstatfs=44,
        copying=_GENERIC_COPYING,
        ids=_GENERIC_IDS,
        perf_event_open=((0xC00000F3, 241),),
    ),
}


def install_filter(*, refuse_perf: bool, listen: bool) -> int | None:
    """Install the filter on the calling process and return the listener's descriptor.

    `refuse_perf`: perf_event_open(2) fails with EACCES, because ids of events are those of the host's kernel.
    `listen`: statfs(2) and the copying calls wait for the listener. Without it, the result is None.

    Raises: OSError (ENOSYS: the machine's system calls are unknown; EBUSY: there is a listener already).
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    code = _filter_code(machine, refuse_perf=refuse_perf, listen=listen)
    text = ctypes.create_string_buffer(b"".join(code))
    program = struct.pack("@HP", len(code), ctypes.addressof(text))
    flags = _FILTER_FLAG_NEW_LISTENER if listen else 0
    result = _system_call(machine.seccomp, _SECCOMP_SET_MODE_FILTER, flags, program)
    return result if listen else None


def _filter_code(machine: _Machine, *, refuse_perf: bool, listen: bool) -> list[bytes]:
    """Return the filter's instructions; for each architecture a list of numbers and their verdicts."""
    verdicts: dict[int, list[tuple[int, int]]] = {machine.arch: []}
    if refuse_perf:
        for arch, number in machine.perf_event_open:
            verdicts.setdefault(arch, []).append((number, _RET_ERRNO | errno.EACCES))
    if listen:
        for number in (machine.statfs, machine.fstatfs, *machine.copying):
            verdicts[machine.arch].append((number, _RET_USER_NOTIF))
    code = [_instruction(_LOAD, _OFFSET_ARCH)]
    for arch, numbers in verdicts.items():
        body = [_instruction(_LOAD, _OFFSET_NUMBER)]
        for number, verdict in numbers:
            body.append(_instruction(_JUMP_EQUAL, number, otherwise=1))
            body.append(_instruction(_RETURN, verdict))
        body.append(_instruction(_RETURN, _RET_ALLOW))
        code.append(_instruction(_JUMP_EQUAL, arch, otherwise=len(body)))
        code += body
    return [*code, _instruction(_RETURN, _RET_ALLOW)]


def _instruction(code: int, value: int, otherwise: int = 0) -> bytes:
    """Return a struct sock_filter; `otherwise`: instructions that a failed comparison skips."""
    return struct.pack("=HBBI", code, 0, otherwise, value)


class CallAnswerer:
    """Answers the calls that a filter passes on, for the files of one mount."""

    def __init__(self, device: int, tracing: tuple[str, ...], debug: tuple[str, ...]) -> None:
        """`device`: st_dev of the mount; `tracing` and `debug`: where it is a tracefs or a debugfs."""
        self._machine = _MACHINES[platform.machine()]
        self._device = os.major(device), os.minor(device)
        self._fsid = device
        self._tracing = tracing
        self._debug = debug

    def serve(self, listener: int) -> None:
        """Answer the next call. A lookup that another file system may delay has a thread of its own."""
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _NOTIF_RECV, buffer, True)
        except OSError:
            # Its caller was killed meanwhile.
            return
        call = _Call(listener, bytes(buffer))
        if call.number == self._machine.statfs:
            try:
                threading.Thread(target=self._answer, args=(call,), daemon=True).start()
            except RuntimeError:
                # There is no thread left. This one keeps its ids, so the kernel answers.
                call.finish(None)
        else:
            self._answer(call)

    def _answer(self, call: _Call) -> None:
        result = None
        try:
            result = self._result(call)
        except (OSError, OverflowError, RuntimeError, ValueError):
            # The kernel answers a call that cannot be inspected here, for example one with a bad address.
            pass
        finally:
            # Hazard: a caller without an answer waits until it is killed.
            call.finish(result)

    def _result(self, call: _Call) -> int | None:
        """Return 0 or an errno; None where the kernel shall execute the call. Raises: OSError."""
        if call.number in self._machine.copying:
            return self._copying(call)
        memory = call.open_memory()
        try:
            if call.number == self._machine.fstatfs:
                return self._statfs(call.descriptor(0), call.arguments[1], memory)
            opened = call.open_path(memory, self._machine)
            try:
                return self._statfs(f"/proc/self/fd/{opened}", call.arguments[1], memory)
            finally:
                os.close(opened)
        finally:
            os.close(memory)

    def _copying(self, call: _Call) -> int | None:
        """Return EINVAL for a text of the mount, as from tracefs, so that the caller reads it."""
        found = _Found(call.descriptor(self._machine.copying[call.number]))
        is_text = found.device == self._device and stat.S_ISREG(found.mode) and not found.size
        return errno.EINVAL if is_text else None

    def _statfs(self, path: str, address: int, memory: int) -> int | None:
        """Answer as Linux's simple_statfs() does for the file system that `path` stands for."""
        if _Found(path).device != self._device:
            return None
        magic = DEBUGFS_MAGIC if self._is_debug(os.readlink(path)) else TRACEFS_MAGIC
        fsid = self._fsid & 0xFFFFFFFF
        text = STATFS.pack(
            magic, PAGE_SIZE, 0, 0, 0, 0, 0, fsid, self._fsid >> 32, NAME_MAX, PAGE_SIZE, ST_FLAGS
        )
        try:
            return 0 if os.pwrite(memory, text, address) == len(text) else errno.EFAULT
        except (OSError, OverflowError):
            return errno.EFAULT

    def _is_debug(self, name: str) -> bool:
        return any(_is_in(name, each) for each in self._debug) and not any(
            _is_in(name, each) for each in self._tracing
        )


class _Call:
    """A system call that waits for its answer."""

    def __init__(self, listener: int, notification: bytes) -> None:
        fields = _NOTIFICATION.unpack(notification)
        self._listener = listener
        self._id: int = fields[0]
        self._task: int = fields[1]
        self.number: int = fields[3]
        self.arguments: tuple[int, ...] = fields[6:]

    def descriptor(self, index: int) -> str:
        """Return the link to the open file whose number is argument `index`."""
        return f"/proc/{self._task}/fd/{self.arguments[index] & 0xFFFFFFFF}"

    def open_path(self, memory: int, machine: _Machine) -> int:
        """Open the path of the first argument with O_PATH, from the caller's root and with its ids.

        This thread keeps the ids, and so serves no other call.

        Raises: OSError.
        """
        path = _read_text(memory, self.arguments[0])
        for own in (b"/proc/self/", b"/proc/thread-self/"):
            if path.startswith(own):
                path = b"/proc/%d/%s" % (self._task, path.removeprefix(own))
                return os.open(path, os.O_PATH | os.O_CLOEXEC)
        is_absolute = path.startswith(b"/")
        start = os.open(f"/proc/{self._task}/{'root' if is_absolute else 'cwd'}", os.O_PATH | os.O_CLOEXEC)
        try:
            self._take_ids(machine)
            if not is_absolute:
                return os.open(path, os.O_PATH | os.O_CLOEXEC, dir_fd=start)
            how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
            return _system_call(_OPENAT2, start, path, how, len(how))
        finally:
            os.close(start)

    def _take_ids(self, machine: _Machine) -> None:
        """Give this thread the caller's ids, by which FUSE and modes let in. Raises: OSError."""
        own = _ids("self")
        theirs = _ids(str(self._task))
        setgroups, setresgid, setresuid = machine.ids
        if own["Groups:"] != theirs["Groups:"]:
            groups = theirs["Groups:"]
            _system_call(setgroups, len(groups), struct.pack(f"={len(groups)}I", *groups))
        if own["Gid:"] != theirs["Gid:"]:
            _system_call(setresgid, *theirs["Gid:"][:3])
        if own["Uid:"] != theirs["Uid:"]:
            _system_call(setresuid, *theirs["Uid:"][:3])

    def open_memory(self) -> int:
        """Open the caller's memory, after which its pid is known not to be another's. Raises: OSError."""
        memory = os.open(f"/proc/{self._task}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(self._listener, _NOTIF_ID_VALID, struct.pack("=Q", self._id))
        except OSError:
            os.close(memory)
            raise
        return memory

    def finish(self, result: int | None) -> None:
        """Let the caller go on: with 0, an errno, or None for what the kernel says."""
        flags = _NOTIF_CONTINUE if result is None else 0
        # It may have been killed meanwhile.
        with suppress(OSError):
            fcntl.ioctl(self._listener, _NOTIF_SEND, _RESPONSE.pack(self._id, 0, -(result or 0), flags))


class _Found:
    """Attributes of an open file, as far as its file system has told them already."""

    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        # Requests of this process are none of the command's: they would be in its traces.
        buffer = ctypes.create_string_buffer(256)
        encoded = os.fsencode(path)
        if _libc.statx(-100, encoded, _AT_STATX_DONT_SYNC, _STATX_BASIC_STATS, buffer):
            raise OSError(ctypes.get_errno(), path)
        fields = _STATX.unpack_from(buffer)
        self.mode: int = fields[6]
        self.size: int = fields[8]
        self.device: tuple[int, int] = fields[13:15]


def _ids(task: str) -> dict[str, list[int]]:
    """Return the lines Uid, Gid and Groups of a task's status. Raises: OSError."""
    with open(f"/proc/{task}/status", encoding="utf-8", errors="replace") as lines:
        words = [line.split() for line in lines]
    names = ("Uid:", "Gid:", "Groups:")
    return {each[0]: [int(word) for word in each[1:]] for each in words if each[0] in names}


def _read_text(memory: int, address: int) -> bytes:
    """Return the text at `address`, without its end. Raises: OSError."""
    found = b""
    while b"\0" not in found and len(found) < PATH_MAX:
        # What lies behind the page may not be there.
        place = address + len(found)
        part = os.pread(memory, PAGE_SIZE - place % PAGE_SIZE, place)
        if not part:
            # The caller has died, and its memory with it.
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        found += part
    return found.split(b"\0")[0]


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def _system_call(number: int, *arguments: int | bytes) -> int:
    """Raises: OSError."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
