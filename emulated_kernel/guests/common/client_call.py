"""System calls of host processes that wait for kprobefs, read from /proc since FUSE does not report them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import sleep

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

n is a number, f a descriptor, and d a descriptor that is used if the path is empty. The other letters are
addresses: p of a path, s of a text, o of output or data, t of two struct timespec, h of a struct open_how.
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
_LINE = 256
"""Bytes to read of /proc/PID/syscall; its line is shorter."""
_TRIES = 20
"""How often /proc/PID/syscall is read; a process that has just sent its request may still be running."""
_TRY_INTERVAL = 0.0001
"""Seconds between two such reads."""


def _by_number(table: str) -> dict[int, str]:
    words = table.split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


_NAMES = _by_number({"x86_64": _X86_64}.get(os.uname().machine, _GENERIC))


@dataclass(frozen=True)
class ClientCall:
    """A system call of a host process, with the data that its pointers refer to."""

    name: str
    args: tuple[int, ...]
    data: Mapping[int, bytes]
    """Number of an argument -> the path or string without its NUL, or the structure."""

    @property
    def fd(self) -> int | None:
        """The descriptor that the call works on; None if the call names its file by a path."""
        kind = ARGUMENTS[self.name][0]
        return self.args[0] & 0xFFFFFFFF if kind == "f" or (kind == "d" and not self.data.get(1)) else None

    @property
    def paths(self) -> list[tuple[int, str]]:
        """The paths of the call, each with the number of its argument."""
        kinds = enumerate(ARGUMENTS[self.name])
        return [(number, os.fsdecode(self.data[number])) for number, kind in kinds if kind == "p"]


def client_call(pid: int) -> ClientCall | None:
    """Return the system call in which a process or thread waits for kprobefs.

    Return None if `ARGUMENTS` does not list the call, or if the call is unknown because the caller lacks the
    right to trace the process.
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
    pointers = [(at, kind) for at, kind in enumerate(kinds) if kind in "psth"]
    if not pointers:
        return ClientCall(name, args, {})
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = {at: _read_argument(memory, args[at], SIZES.get(kind)) for at, kind in pointers}
        if name == "openat2":
            data[2] = _without_host_flags(data[2])
    except (OSError, OverflowError):
        return None
    finally:
        os.close(memory)
    return ClientCall(name, args, data)


def next_fd(pid: int) -> int | None:
    """Return the descriptor that the process's current open(2) will return, or None if it is unknown.

    It is the lowest free descriptor.
    """
    try:
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return None
    return next(fd for fd in range(len(used) + 1) if fd not in used)


def _waiting_in(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/syscall; [] if the process is in no call or the file is unreadable."""
    try:
        file = os.open(f"/proc/{pid}/syscall", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(_TRIES):
            fields = os.pread(file, _LINE, 0).split()
            if fields != [b"running"]:
                return fields if fields and fields[0].isdigit() else []
            sleep(_TRY_INTERVAL)
    except OSError:
        pass
    finally:
        os.close(file)
    return []


def _without_host_flags(how: bytes) -> bytes:
    """Return a struct open_how without O_DIRECT and `resolve`, which the host's kernel has applied."""
    flags = int.from_bytes(how[:8], "little") & ~os.O_DIRECT
    return flags.to_bytes(8, "little") + how[8:16] + bytes(8)


def _read_argument(memory: int, address: int, size: int | None) -> bytes:
    """Return `size` bytes at the address, or if `size` is None a C string of at most two pages.

    Return no bytes for NULL.
    """
    if not address:
        return b""
    if size is not None:
        return os.pread(memory, size, address)
    data = b""
    for _ in range(2):
        # The read ends at the page's end, since the next page may not be mapped.
        data += os.pread(memory, PAGE_SIZE - (address + len(data)) % PAGE_SIZE, address + len(data))
        if b"\0" in data:
            break
    return data.split(b"\0")[0]
