"""Reads from /proc the system calls in which host processes wait for kprobefs: FUSE does not report them.

Functions of this module must not be called with the control lock held. A read of a process's memory can
block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from io import FileIO
from time import sleep

from emulated_kernel.guests.common.process_memory import ProcessMemory
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

ARGUMENTS: Mapping[str, str] = {
    "access": "pn",
    "chdir": "p",
    "chmod": "pn",
    "chown": "pnn",
    "creat": "pn",
    "faccessat": "npn",
    "faccessat2": "npnn",
    "fchdir": "f",
    "fchmod": "fn",
    "fchmodat": "npn",
    "fchown": "fnn",
    "fchownat": "npnnn",
    "fdatasync": "f",
    "fsync": "f",
    "ftruncate": "fn",
    "getdents64": "fon",
    "lchown": "pnn",
    "link": "pp",
    "linkat": "npnpn",
    "lseek": "fnn",
    "mkdir": "pn",
    "mkdirat": "npn",
    "mknod": "pnn",
    "mknodat": "npnn",
    "newfstat": "fo",
    "newfstatat": "dpon",
    "newlstat": "po",
    "newstat": "po",
    "open": "pnn",
    "openat": "npnn",
    "openat2": "nphn",
    "pread64": "fonn",
    "pwrite64": "fonn",
    "read": "fon",
    "readlink": "pon",
    "readlinkat": "npon",
    "rename": "pp",
    "renameat2": "npnpn",
    "rmdir": "p",
    "statx": "dpnno",
    "symlink": "sp",
    "symlinkat": "snp",
    "truncate": "pn",
    "unlink": "p",
    "unlinkat": "npn",
    "utimensat": "dptn",
    "write": "fon",
}
"""Name of a system call in the guest -> one letter for each argument.

Letters of values are n (a number), f (a descriptor) and d (a descriptor that is used if the path is empty).
Letters of addresses are p (path), s (text), o (output or data), t (two struct timespec) and h (struct
open_how).
"""
OPENS = frozenset({"open", "openat", "openat2", "creat"})
_PLAIN_OPENS = frozenset({"open", "openat"})
_CREATING = os.O_CREAT | os.O_EXCL | os.O_DIRECTORY
"""Flags of open(2). If a call has one of them, its path must be read from the process's memory.

Such a call may fail at the lookup of its path, or create the file.
"""
SIZES = {"t": 32, "h": 24}
"""Letter of a structure in `ARGUMENTS` -> size of that structure in bytes."""

_X86_64 = (
    "read 0 write 1 open 2 newstat 4 newfstat 5 newlstat 6 lseek 8 pread64 17 pwrite64 18 access 21 fsync 74 "
    "fdatasync 75 truncate 76 ftruncate 77 chdir 80 fchdir 81 rename 82 mkdir 83 rmdir 84 creat 85 link 86 "
    "unlink 87 symlink 88 readlink 89 chmod 90 fchmod 91 chown 92 fchown 93 lchown 94 mknod 133 "
    "getdents64 217 openat 257 mkdirat 258 mknodat 259 fchownat 260 newfstatat 262 unlinkat 263 linkat 265 "
    "symlinkat 266 readlinkat 267 fchmodat 268 faccessat 269 utimensat 280 renameat2 316 statx 332 "
    "openat2 437 faccessat2 439"
)
_GENERIC = (
    "mknodat 33 mkdirat 34 unlinkat 35 symlinkat 36 linkat 37 truncate 45 ftruncate 46 faccessat 48 chdir 49 "
    "fchdir 50 fchmod 52 fchmodat 53 fchownat 54 fchown 55 openat 56 getdents64 61 lseek 62 read 63 write 64 "
    "pread64 67 pwrite64 68 readlinkat 78 newfstatat 79 newfstat 80 fsync 82 fdatasync 83 utimensat 88 "
    "renameat2 276 statx 291 openat2 437 faccessat2 439"
)
_FD_LIMIT = 1 << 20
_LONGEST = 2 * PAGE_SIZE
"""Maximum number of bytes that are read of a string; a path is shorter."""
_LINE = 256
"""Number of bytes to read of /proc/PID/syscall, whose content is shorter."""
_MAX_OPEN = 32
"""Maximum number of files /proc/PID/syscall that stay open."""
_TRIES = 20
"""Maximum number of reads of /proc/PID/syscall until it shows that the process sleeps in its call.

A process that has just sent its request may not sleep yet.
"""
_TRY_INTERVAL = 0.0001
"""Seconds between two reads of /proc/PID/syscall."""


def _by_number(table: str) -> dict[int, str]:
    words = table.split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


_NAMES = _by_number({"x86_64": _X86_64}.get(os.uname().machine, _GENERIC))


@dataclass(frozen=True)
class ClientCall:
    """A system call of a host process, with the data to which its pointer arguments refer."""

    name: str
    args: tuple[int, ...]
    data: Mapping[int, bytes]
    """Index of an argument -> the path or string without its NUL, or the bytes of the structure."""
    is_hidden: bool = False
    """Whether `data` lacks the call's paths, because the process's memory was not read, or not in time."""

    @property
    def fd(self) -> int | None:
        """The descriptor that the call works on; None if the call names its file by a path."""
        kind = ARGUMENTS[self.name][0]
        is_empty = kind == "d" and not self.is_hidden and not self.data.get(1)
        return self.args[0] & 0xFFFFFFFF if kind == "f" or is_empty else None

    @property
    def opens(self) -> bool:
        """Whether the call opens a file."""
        return self.name in OPENS

    @property
    def flags(self) -> int:
        """The flags of a call that opens a file; 0 for other calls."""
        if self.name == "creat":
            return os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        if self.name == "openat2":
            return int.from_bytes(self.data[2][:8], "little")
        return self.args[-2] if self.opens else 0

    def opens_as(self, path: str, flags: int) -> bool:
        """Return True if this call can be the cause of a request to open `path` with `flags`.

        FUSE forwards the access mode, O_APPEND and O_TRUNC, so these flags must be the same in the call and
        in `flags`. O_TRUNC may differ if the call creates the file. In that case the call's path and `path`
        must have the same last name. A file system above the mount, such as overlayfs, opens files for its
        own use with other flags; then the result is False.
        """
        decisive = os.O_ACCMODE | os.O_APPEND
        # A new file needs no O_TRUNC, and the host's kernel drops it next to O_EXCL.
        if not (flags & os.O_CREAT or self.flags & os.O_EXCL):
            decisive |= os.O_TRUNC
        if not self.opens or (self.flags ^ flags) & decisive:
            return False
        if self.is_hidden or not self.flags & os.O_CREAT:
            return True
        return any(text.rstrip("/").rpartition("/")[2] == path.rpartition("/")[2] for _at, text in self.paths)

    @property
    def paths(self) -> list[tuple[int, str]]:
        """The known paths of the call, each with the index of its argument."""
        kinds = enumerate(ARGUMENTS[self.name])
        return [(at, os.fsdecode(self.data[at])) for at, kind in kinds if kind == "p" and at in self.data]

    def names(self, count: int) -> bool:
        """Return True if the call names exactly `count` files by paths that are not empty.

        If the paths could not be read, each path argument counts as such a path.
        """
        if self.is_hidden:
            return ARGUMENTS[self.name].count("p") == count
        return sum(bool(text) for _at, text in self.paths) == count


def client_call(pid: int, memory: ProcessMemory, instead: str | None = None) -> ClientCall | None:
    """Return the system call in which a process or thread waits for kprobefs.

    Return None if `ARGUMENTS` does not list the call, or if kprobefs may not trace the process `pid`. If the
    process's memory can't be read in time, return a call with `is_hidden` set and without its paths. If that
    call also has pointers to other data than paths, return None.

    `instead`: path to return if the call is an open(2) of an existing file; the process's memory is then not
    read. If `instead` is "", return such an open with `is_hidden` set and without its path. If `instead` is
    None, the process's memory is read for all calls.
    """
    fields = _waiting_in(pid)
    name = _NAMES.get(int(fields[0])) if fields else None
    if name is None or len(fields) < 7:
        return None
    kinds = ARGUMENTS[name]
    args = tuple(int(field, 16) for field in fields[1 : 1 + len(kinds)])
    # This is a 32-bit program: its numbers name other calls, so the argument is no descriptor.
    if kinds[0] == "f" and args[0] & 0xFFFFFFFF >= _FD_LIMIT:
        return None
    if instead is not None and name in _PLAIN_OPENS and not args[-2] & _CREATING:
        paths = {kinds.index("p"): os.fsencode(instead)} if instead else {}
        return ClientCall(name, args, paths, is_hidden=not instead)
    pointers = [at for at, kind in enumerate(kinds) if kind in "psth"]
    named = [at for at in pointers if args[at]]
    data = dict.fromkeys(pointers, b"")
    if named:
        pieces = [(args[at], SIZES.get(kinds[at], -_LONGEST)) for at in named]
        try:
            found = memory.read(f"/proc/{pid}/mem", pieces)
        except TimeoutError:
            needs_more = any(kinds[at] != "p" for at in pointers)
            return None if needs_more else ClientCall(name, args, {}, is_hidden=True)
        if found is None:
            return None
        data.update(zip(named, found, strict=True))
    if name == "openat2":
        data[2] = _without_host_flags(data[2])
    return ClientCall(name, args, data)


def next_fd(pid: int) -> int | None:
    """Return the descriptor that the process's current open(2) will return: the lowest free one.

    Return None if /proc/PID/fd cannot be read.
    """
    try:
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return None
    return next(fd for fd in range(len(used) + 1) if fd not in used)


@lru_cache(_MAX_OPEN)
def _syscall_file(pid: int) -> FileIO:
    """Return the open file /proc/PID/syscall of a process or thread.

    The file is kept open for later requests, so that a request needs no open and no close. A read of the file
    fails when the process has ended. The file is closed when it is no longer kept and no thread reads it.
    Raises: OSError (the process has ended, or the file cannot be opened).
    """
    return FileIO(f"/proc/{pid}/syscall")


def _waiting_in(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/syscall; [] if the process is in no call or the file is unreadable."""
    for _ in range(2):
        try:
            file = _syscall_file(pid)
            for _ in range(_TRIES):
                fields = os.pread(file.fileno(), _LINE, 0).split()
                if fields != [b"running"]:
                    return fields if fields and fields[0].isdigit() else []
                sleep(_TRY_INTERVAL)
        # Another process can have the pid of the process for which the file was opened.
        except ProcessLookupError:
            _syscall_file.cache_clear()
        except OSError:
            return []
    return []


def _without_host_flags(how: bytes) -> bytes:
    """Return a struct open_how without O_DIRECT and `resolve`, which the host's kernel has applied."""
    flags = int.from_bytes(how[:8], "little") & ~os.O_DIRECT
    return flags.to_bytes(8, "little") + how[8:16] + bytes(8)
