"""User memory in records of system calls (Linux 7.2): arguments that point to it, and its text in the trace.

Mirrors: kernel/trace/trace_syscalls.c (v7.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.fetch.memory import read_string
from emulated_kernel.util.fast_dataclass import dataclass

DEFAULT_SIZE = 63
MAX_SIZE = 165
"""Maximum number of bytes of an argument's memory in a record.

Mirrors: kernel/trace/trace.h:SYSCALL_FAULT_USER_MAX (v7.2).
"""
_READ_SIZE = MAX_SIZE + 4
"""Maximum number of bytes of user memory that are read for one argument."""
_EXTRA = b"..."
_PRINTABLE = range(0x20, 0x7F)


@dataclass
class UserDataSize:
    """The value of the file syscall_user_buf_size: how many bytes of an argument's memory are recorded.

    Deviates: all trace arrays share the value; in Linux each has its own.
    """

    value: int = DEFAULT_SIZE

    def set(self, size: int) -> None:
        """Set the number of bytes to record of each argument's memory: `size`, but at most MAX_SIZE."""
        self.value = min(size, MAX_SIZE)


@dataclass(frozen=True)
class UserArguments:
    """The arguments of a system call that point to user memory."""

    positions: tuple[int, ...]
    size: int | None = None
    """Position, from 0, of the argument that gives the size of the memory; None if the memory is a string."""
    is_string: bool = True
    """Whether memory that has a `size` is shown as a string; if False, it is shown in hexadecimal.

    Memory without a `size` is always a string.
    """


_BYTES = {"write": (1, 2), "mq_timedsend": (1, 2), "pwrite64": (1, 2)}
_SIZED = {"setdomainname": (0, 1), "sethostname": (0, 1), "kexec_file_load": (4, 3)}
_STRINGS = {
    (0,): "access acct chdir chown chmod chroot creat delete_module execve fsopen lchown open memfd_create "
    "mkdir mknod mq_open mq_unlink readlink rmdir shmdt statfs swapon swapoff truncate unlink umount utime "
    "utimes",
    (1,): "execveat faccessat faccessat2 finit_module fchmodat fchmodat2 fchownat fgetxattr flistxattr "
    "fsetxattr fspick fremovexattr futimesat inotify_add_watch mkdirat mknodat mount_setattr "
    "name_to_handle_at newfstatat openat openat2 open_tree open_tree_attr readlinkat quotactl syslog statx "
    "unlinkat utimensat",
    (2,): "init_module fsconfig",
    (4,): "fanotify_mark",
    (0, 1): "add_key getxattr lgetxattr lremovexattr link listxattr llistxattr lsetxattr pivot_root "
    "removexattr rename request_key setxattr symlink",
    (0, 2): "symlinkat",
    (1, 3): "getxattrat linkat listxattrat move_mount renameat renameat2 removexattrat setxattrat",
    (0, 1, 2): "mount",
}
USER_ARGUMENTS: Mapping[str, UserArguments] = dict(
    chain(
        ((name, UserArguments((at,), size, False)) for name, (at, size) in _BYTES.items()),
        ((name, UserArguments((at,), size)) for name, (at, size) in _SIZED.items()),
        ((name, UserArguments(positions)) for positions, names in _STRINGS.items() for name in names.split()),
    )
)
"""Name of a system call without `sys_` -> its arguments whose memory is recorded.

Mirrors: kernel/trace/trace_syscalls.c:check_faultable_syscall (v7.2).
"""


def captured(arguments: UserArguments, args: Sequence[int], start: int, limit: int, hit: ProbeHit) -> bytes:
    """Return the end of a record: a `__data_loc` word for each argument's memory, and the memory itself.

    `args` are the values of all arguments, and `start` is the offset of the first word in the entry. `limit`
    is the maximum number of bytes of one argument's memory; a string that is cut there gets `...` in
    addition. If `limit` is 0, no memory is recorded. Memory that cannot be read is empty.
    Mirrors: kernel/trace/trace_syscalls.c:sys_fault_user, syscall_put_data (v7.2).
    """
    found = [_captured(arguments, args, at, limit, hit) if limit else b"" for at in arguments.positions]
    at = start + 4 * len(found)
    words = b""
    for data in found:
        words += (at | len(data) << 16).to_bytes(4, "little")
        at += len(data)
    return words + b"".join(found)


def _captured(arguments: UserArguments, args: Sequence[int], at: int, limit: int, hit: ProbeHit) -> bytes:
    if arguments.size is not None:
        size = min(args[arguments.size], _READ_SIZE)
        return (hit.read(args[at], size) or b"")[:limit] if size else b""
    text = read_string(hit.read, args[at], _READ_SIZE + 1)
    if text is None:
        return b""
    shown = bytes(byte if byte in _PRINTABLE else ord(".") for byte in text[:-1])
    return shown[:limit] + _EXTRA + b"\0" if len(shown) > limit else shown + b"\0"


def shown(arguments: UserArguments, data: bytes, args: Sequence[int]) -> str:
    """Return the text of an argument's memory, which `trace` shows after the argument's value.

    `data` is the recorded memory, and `args` are the values of all arguments.
    Mirrors: kernel/trace/trace_syscalls.c:print_syscall_enter (v7.2).
    """
    if arguments.size is None or arguments.is_string:
        string, _, _ = data.partition(b"\0")
        return f' "{string.decode("latin-1")}"'
    is_cut = len(data) < args[arguments.size] & 0x7FFFFFFF
    text = f" ({data.hex(':')}{', ...' if is_cut else ''})"
    if any(byte in _PRINTABLE for byte in data):
        letters = "".join(chr(byte) if byte in _PRINTABLE else "." for byte in data)
        text += f' "{letters}"{"..." if is_cut else ""}'
    return text


O_ACCMODE = 3
_OPEN_FLAGS = {
    "O_WRONLY": 0o1,
    "O_RDWR": 0o2,
    "O_CREAT": 0o100,
    "O_EXCL": 0o200,
    "O_NOCTTY": 0o400,
    "O_TRUNC": 0o1000,
    "O_APPEND": 0o2000,
    "O_NONBLOCK": 0o4000,
    "O_DSYNC": 0o10000,
    "O_DIRECT": 0o40000,
    "O_LARGEFILE": 0o100000,
    "O_DIRECTORY": 0o200000,
    "O_NOFOLLOW": 0o400000,
    "O_NOATIME": 0o1000000,
    "O_CLOEXEC": 0o2000000,
}
"""Name -> bits of the flags of openat() on x86 and RISC-V."""
_O_TMPFILE = 0o20200000


def open_flags(flags: int) -> tuple[str, bool]:
    """Return the text of openat()'s flags, and whether the call has a mode, which is shown after them.

    Mirrors: kernel/trace/trace_syscalls.c:sys_enter_openat_print (v7.2).
    """
    has_mode = bool(flags & (_OPEN_FLAGS["O_CREAT"] | _O_TMPFILE))
    if not flags:
        return "O_RDONLY", has_mode
    return ("" if flags & O_ACCMODE else "O_RDONLY|") + "|".join(_flag_names(flags)), has_mode


def _flag_names(flags: int) -> Iterator[str]:
    for name, bits in (("O_TMPFILE", _O_TMPFILE), *_OPEN_FLAGS.items()):
        if flags & bits == bits:
            flags &= ~bits
            yield name
    if flags:
        yield f"{flags:#x}"


def open_print_fmt() -> str:
    """Return the print format of sys_enter_openat.

    Mirrors: kernel/trace/trace_syscalls.c:sys_enter_openat_print_fmt (v7.2).
    """
    flags = ", ".join(f'{{ {bits:#x}, "{name}" }}' for name, bits in _OPEN_FLAGS.items())
    return (
        r'"dfd: 0x%08lx, filename: 0x%08lx \"%s\", flags: %s%s, mode: 0%03o",'
        " ((unsigned long)(REC->dfd)), ((unsigned long)(REC->filename)), __get_str(__filename_val),"
        ' (REC->flags & ~3) && !(REC->flags & 3) ? "O_RDONLY|" : "", '
        f' REC->flags ? __print_flags(REC->flags, "|", {flags}) : "O_RDONLY", '
        " ((unsigned long)(REC->mode))"
    )
