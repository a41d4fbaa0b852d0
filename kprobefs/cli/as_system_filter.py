"""The seccomp filter of a command under `--as-system`: the system calls to intercept, by machine.

The filter passes system calls on to a process of kprobefs, which answers them. It passes statfs(2) on,
because all FUSE file systems have the same f_type. It passes calls that copy files on, because FUSE splices
nothing from files of size 0. It passes mount(2) on, because the kernel allows a command only a read-only
mount of its own /proc.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from enum import Enum

from emulated_kernel.util.fast_dataclass import dataclass

_SECCOMP_SET_MODE_FILTER = 1
_FILTER_FLAG_NEW_LISTENER = 1 << 3
_FILTER_FLAG_WAIT_KILLABLE_RECV = 1 << 5
"""Flag since Linux 5.19: once a call is being answered, only a fatal signal interrupts its caller."""
_RET_USER_NOTIF = 0x7FC00000
_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_OFFSET_NUMBER = 0
_OFFSET_ARCH = 4
_X32 = 1 << 30
"""Bit that is set in the numbers of x32's system calls, which the filter sees as calls of x86-64."""

_libc = ctypes.CDLL(None, use_errno=True)


class Kind(Enum):
    """Kind of a system call that the filter passes to kprobefs."""

    STATFS = "statfs"
    FSTATFS = "fstatfs"
    COPY = "copy"
    MOUNT = "mount"


@dataclass(frozen=True)
class StatfsLayout:
    """Layout of one variant of struct statfs, such as the struct statfs64 of i386."""

    fields: struct.Struct
    """Layout: type, block size, five counts, two words of fsid, name length, fragment size, flags.

    The counts: blocks, free blocks, available blocks, inodes, free inodes.
    """
    sizes: tuple[int, ...] = ()
    """Sizes of the structure that the system call accepts in its second argument, before the buffer.

    The tuple is empty if the system call has no such argument.
    """


@dataclass(frozen=True)
class Call:
    """An intercepted system call of one ABI: its kind, and how its arguments and its result are laid out."""

    kind: Kind
    file: int = 0
    """Index of the argument that names the file: a path or a descriptor.

    For a call that copies, it is the descriptor of the source.
    """
    layout: StatfsLayout | None = None


@dataclass(frozen=True)
class _Abi:
    """Numbers of the system calls that the filter must recognize in programs of one ABI."""

    arch: int
    """Value of AUDIT_ARCH_* for the ABI. The filter compares it with `arch` of struct seccomp_data."""
    calls: dict[int, Call]
    perf_event_open: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """The system calls that the filter intercepts on one kind of machine, by ABI."""

    abis: tuple[_Abi, ...]
    """ABIs whose programs the machine runs. The ABI of the kernel itself comes first."""
    seccomp: int
    ids: tuple[int, int, int]
    """Numbers of setgroups(2), setresgid(2) and setresuid(2), for changing the ids of one thread only.

    The functions of the C library would change the ids of all threads.
    """

    def call(self, arch: int, number: int) -> Call:
        """Return the intercepted call with the number `number`.

        `arch`: AUDIT_ARCH_* of the ABI to which the number belongs.
        """
        return next(abi.calls[number] for abi in self.abis if abi.arch == arch)


_NATIVE = StatfsLayout(struct.Struct("=qqQQQQQIIqqq32x"))
_STATFS_32 = StatfsLayout(struct.Struct("=IIIIIIIIIIII16x"))
_STATFS64_I386 = StatfsLayout(struct.Struct("=IIQQQQQIIIII16x"), (84,))
_STATFS64_ARM = StatfsLayout(_STATFS64_I386.fields, (84, 88))


def _calls(
    numbers: dict[str, int], layout: StatfsLayout, statfs64: StatfsLayout | None = None
) -> dict[int, Call]:
    """Return a map system call number -> call, for one ABI.

    `numbers`: name of a system call -> its number. `layout`: layout of the struct statfs of statfs(2).
    `statfs64`: layout for statfs64(2), or None if the ABI has no statfs64(2).
    """
    known = {
        "statfs": Call(Kind.STATFS, layout=layout),
        "fstatfs": Call(Kind.FSTATFS, layout=layout),
        "statfs64": Call(Kind.STATFS, layout=statfs64),
        "fstatfs64": Call(Kind.FSTATFS, layout=statfs64),
        "sendfile": Call(Kind.COPY, file=1),
        "sendfile64": Call(Kind.COPY, file=1),
        "splice": Call(Kind.COPY),
        "copy_file_range": Call(Kind.COPY),
        "mount": Call(Kind.MOUNT),
    }
    return {number: known[name] for name, number in numbers.items()}


_X86_64 = _calls(
    {"statfs": 137, "fstatfs": 138, "sendfile": 40, "splice": 275, "copy_file_range": 326, "mount": 165},
    _NATIVE,
)
_GENERIC = _calls(
    {"statfs": 43, "fstatfs": 44, "sendfile": 71, "splice": 76, "copy_file_range": 285, "mount": 40},
    _NATIVE,
)
_OLD = {"mount": 21, "statfs": 99, "fstatfs": 100, "sendfile": 187, "sendfile64": 239}
"""Name of a system call -> its number, for calls with the same number on 32-bit x86 and on ARM."""
_I386 = _calls(
    {**_OLD, "statfs64": 268, "fstatfs64": 269, "splice": 313, "copy_file_range": 377},
    _STATFS_32,
    _STATFS64_I386,
)
_ARM = _calls(
    {**_OLD, "statfs64": 266, "fstatfs64": 267, "splice": 340, "copy_file_range": 391},
    _STATFS_32,
    _STATFS64_ARM,
)
_GENERIC_IDS = (159, 149, 147)
_MACHINES = {
    "x86_64": Machine(
        (
            _Abi(
                0xC000003E,
                _X86_64 | {number | _X32: call for number, call in _X86_64.items()},
                (298, 298 | _X32),
            ),
            _Abi(0x40000003, _I386, (336,)),
        ),
        seccomp=317,
        ids=(116, 119, 117),
    ),
    "aarch64": Machine(
        (_Abi(0xC00000B7, _GENERIC, (241,)), _Abi(0x40000028, _ARM, (364,))), seccomp=277, ids=_GENERIC_IDS
    ),
    "riscv64": Machine((_Abi(0xC00000F3, _GENERIC, (241,)),), seccomp=277, ids=_GENERIC_IDS),
}


def this_machine() -> Machine:
    """Return the system calls to intercept on the host's machine.

    Raises: OSError (ENOSYS: their numbers are unknown).
    """
    try:
        return _MACHINES[os.uname().machine]
    except KeyError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None


def install_filter(*, own_user: bool, listen: bool) -> int | None:
    """Install the filter on the calling process and return the listener's descriptor.

    `own_user`: the process is in a user namespace of its own. Then perf_event_open(2) fails with EACCES,
    because ids of events are those of the host's kernel. `listen`: create the listener, to which the filter
    passes the intercepted calls; mount(2) is one of them only with `own_user`. If `listen` is False, the
    filter passes on no calls; return None.
    Raises: OSError (ENOSYS: the machine's system calls are unknown; EBUSY: there is a listener already).
    """
    machine = this_machine()
    code = _filter_code(machine, own_user=own_user, listen=listen)
    text = ctypes.create_string_buffer(b"".join(code))
    program = struct.pack("@HP", len(code), ctypes.addressof(text))
    if not listen:
        system_call(machine.seccomp, _SECCOMP_SET_MODE_FILTER, 0, program)
        return None
    flags = _FILTER_FLAG_NEW_LISTENER
    try:
        return system_call(
            machine.seccomp, _SECCOMP_SET_MODE_FILTER, flags | _FILTER_FLAG_WAIT_KILLABLE_RECV, program
        )
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        return system_call(machine.seccomp, _SECCOMP_SET_MODE_FILTER, flags, program)


def _filter_code(machine: Machine, *, own_user: bool, listen: bool) -> list[bytes]:
    """Return the instructions of the seccomp filter: for each ABI, comparisons of a system call's number.

    With `listen`, the intercepted calls are passed to the listener, mount(2) only with `own_user`. With
    `own_user`, perf_event_open(2) fails with EACCES. All other calls are allowed.
    """
    code = [_instruction(_LOAD, _OFFSET_ARCH)]
    for abi in machine.abis:
        verdicts = {
            number: _RET_USER_NOTIF
            for number, call in abi.calls.items()
            if listen and (own_user or call.kind is not Kind.MOUNT)
        }
        if own_user:
            verdicts |= dict.fromkeys(abi.perf_event_open, _RET_ERRNO | errno.EACCES)
        body = [_instruction(_LOAD, _OFFSET_NUMBER)]
        for number, verdict in verdicts.items():
            body.append(_instruction(_JUMP_EQUAL, number, otherwise=1))
            body.append(_instruction(_RETURN, verdict))
        body.append(_instruction(_RETURN, _RET_ALLOW))
        code.append(_instruction(_JUMP_EQUAL, abi.arch, otherwise=len(body)))
        code += body
    return [*code, _instruction(_RETURN, _RET_ALLOW)]


def _instruction(code: int, value: int, otherwise: int = 0) -> bytes:
    """Return a struct sock_filter with the BPF code `code` and the operand `value`.

    `otherwise`: number of instructions that a failed comparison skips.
    """
    return struct.pack("=HBBI", code, 0, otherwise, value)


def system_call(number: int, *arguments: int | bytes) -> int:
    """Execute a system call and return its result. Raises: OSError."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
