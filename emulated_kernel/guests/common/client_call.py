"""The system call in which a process of the host waits for us: FUSE doesn't tell it, /proc does."""

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
"""By the guest's name of a call, a letter for each argument: n a number, f a descriptor, d one where the path
may be empty, p the address of a path, s of text, o of output or data, t of two times, h of an open_how."""
SIZES = {"t": 32, "h": 24}
"""Bytes of the structures."""

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
"""More bytes than a line of /proc/PID/syscall has."""
_FALLS_ASLEEP = 20, 0.0001
"""Who has just sent its request may still run: so often, and so many seconds, it is looked at again."""


def _by_number(table: str) -> dict[int, str]:
    words = table.split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


_NAMES = _by_number({"x86_64": _X86_64}.get(os.uname().machine, _GENERIC))


@dataclass(frozen=True)
class ClientCall:
    """A system call of a host process, with what stands behind its pointers."""

    name: str
    args: tuple[int, ...]
    data: Mapping[int, bytes]
    """By the number of an argument: a path or string without its NUL, or a structure."""

    @property
    def fd(self) -> int | None:
        """The descriptor that it works on, None for one that names its file."""
        kind = ARGUMENTS[self.name][0]
        return self.args[0] & 0xFFFFFFFF if kind == "f" or (kind == "d" and not self.data.get(1)) else None

    @property
    def paths(self) -> list[tuple[int, str]]:
        """Its paths, with the numbers of the arguments."""
        kinds = enumerate(ARGUMENTS[self.name])
        return [(number, os.fsdecode(self.data[number])) for number, kind in kinds if kind == "p"]


def client_call(pid: int) -> ClientCall | None:
    """The call in which a process, or thread, waits for us.

    None in a call that isn't listed here, or where nobody can say in which: that takes the right to trace it.
    """
    fields = _waiting_in(pid)
    name = _NAMES.get(int(fields[0])) if fields else None
    if name is None or len(fields) < 7:
        return None
    kinds = ARGUMENTS[name]
    args = tuple(int(field, 16) for field in fields[1 : 1 + len(kinds)])
    # A 32-bit program, whose calls have other numbers.
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
        data = {at: _behind(memory, args[at], SIZES.get(kind)) for at, kind in pointers}
        if name == "openat2":
            data[2] = _seen_to(data[2])
    except (OSError, OverflowError):
        return None
    finally:
        os.close(memory)
    return ClientCall(name, args, data)


def next_fd(pid: int) -> int | None:
    """The descriptor that an open(2) which is under way returns: the lowest that is free; None if unknown."""
    try:
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return None
    return next(fd for fd in range(len(used) + 1) if fd not in used)


def _waiting_in(pid: int) -> list[bytes]:
    tries, pause = _FALLS_ASLEEP
    try:
        file = os.open(f"/proc/{pid}/syscall", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(tries):
            fields = os.pread(file, _LINE, 0).split()
            if fields != [b"running"]:
                return fields if fields and fields[0].isdigit() else []
            sleep(pause)
    except OSError:
        pass
    finally:
        os.close(file)
    return []


def _seen_to(how: bytes) -> bytes:
    """A struct open_how without what the host's kernel has seen to already: O_DIRECT, and how to resolve."""
    flags = int.from_bytes(how[:8], "little") & ~os.O_DIRECT
    return flags.to_bytes(8, "little") + how[8:16] + bytes(8)


def _behind(memory: int, address: int, size: int | None) -> bytes:
    """A structure, or a C string of at most two pages; nothing behind NULL."""
    if not address:
        return b""
    if size is not None:
        return os.pread(memory, size, address)
    data = b""
    for _ in range(2):
        # The page behind it need not be there.
        data += os.pread(memory, PAGE_SIZE - (address + len(data)) % PAGE_SIZE, address + len(data))
        if b"\0" in data:
            break
    return data.split(b"\0")[0]
