"""The guest's initramfs, with the first process: a stub that makes the system calls that the host requests.

The stub begins with an instruction that faults in user mode, such as `hlt`, which the host intercepts. The
next instruction makes a system call.
"""

from __future__ import annotations

import stat
import struct

from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.config import ElfMachine
from emulated_kernel.util.fast_named_tuple import NamedTuple

_BASE = 0x400000
_START = _BASE + 0x1000


class UserStub(NamedTuple):
    """Init's code for one processor, and the virtual addresses of its parts.

    `elf_machine`: machine type in the header of init's ELF file. `code`: the machine code.
    """

    elf_machine: ElfMachine
    code: bytes
    syscall: int
    """Address of the instruction that makes a system call. The code after it jumps back to `start`."""
    touch: int
    """Address of code that stores a byte at the start of a page and of each of the following pages.

    The code takes the byte in the register of the system call's number. It takes the address of the first
    page in the register of the first argument, and the number of pages in the register GuestAbi.counter.
    """
    two_calls: int
    """Address of code that makes two system calls.

    For the second call, the code takes the first argument and the call's number from the two registers
    GuestAbi.kept.
    """
    start: int = _START
    """Address of the stub, whose first instruction faults in user mode."""


X86_LISTING = """
    f4                              | stub: hlt
    0f 05                           | call: syscall
    eb fb                           | jmp stub
    88 07                           | touch: mov [rdi], al
    48 81 c7 00 10 00 00            | add rdi, 4096
    ff c9                           | dec ecx
    75 f3                           | jnz touch
    eb ec                           | jmp stub
    0f 05                           | two_calls: syscall
    48 89 df                        | mov rdi, rbx
    48 89 e8                        | mov rax, rbp
    eb e3                           | jmp call
"""
X86_STUB = UserStub(
    ElfMachine.X86_64, machine_code(X86_LISTING), _START + 1, touch=_START + 5, two_calls=_START + 20
)
RISCV_LISTING = """
    73 00 50 10 | stub: wfi
    73 00 00 00 | call: ecall
    6f f0 9f ff | j stub
    23 00 15 01 | touch: sb a7, 0(a0)
    b7 12 00 00 | lui t0, 1
    33 05 55 00 | add a0, a0, t0
    13 08 f8 ff | addi a6, a6, -1
    e3 18 08 fe | bnez a6, touch
    6f f0 1f fe | j stub
    73 00 00 00 | two_calls: ecall
    13 85 04 00 | mv a0, s1
    93 08 04 00 | mv a7, s0
    6f f0 5f fd | j call
"""
RISCV_STUB = UserStub(
    ElfMachine.RISCV, machine_code(RISCV_LISTING), _START + 4, touch=_START + 12, two_calls=_START + 36
)
ARM_LISTING = """
    00 00 20 d4 | stub: brk #0
    01 00 00 d4 | call: svc #0
    fe ff ff 17 | b stub
    08 00 00 39 | touch: strb w8, [x0]
    00 04 40 91 | add x0, x0, #1, lsl #12
    e7 04 00 51 | sub w7, w7, #1
    a7 ff ff 35 | cbnz w7, touch
    f9 ff ff 17 | b stub
    01 00 00 d4 | two_calls: svc #0
    e0 03 13 aa | mov x0, x19
    e8 03 14 aa | mov x8, x20
    f6 ff ff 17 | b call
"""
ARM_STUB = UserStub(
    ElfMachine.AARCH64, machine_code(ARM_LISTING), _START + 4, touch=_START + 12, two_calls=_START + 32
)
"""The stub of arm64. Its code changes no flags; see Arm64LinuxCpu.syscall()."""
BUFFER = 0x600000
"""Virtual address of each task's own buffer for paths and for data that is read and written."""
BUFFER_SIZE = 1 << 20
DEBUGFS = "/debug"
"""Mount point of debugfs in the guest."""
TRACEFS = "/tracing"
"""Mount point of tracefs in the guest."""
TMPFS = "/scratch"
"""Mount point of a tmpfs in the guest."""
PROC = "/proc"
"""Mount point of procfs in the guest."""
DEVICES = "/dev"
_PROGRAMS = "/bin"
"""Directory of the link "sh" to init: uprobes need a program file, and init is the only one."""
_DIRECTORIES = DEBUGFS, TRACEFS, TMPFS, PROC, DEVICES, _PROGRAMS
PROGRAM = b"/init"
BOOTED = 0x6592A940
"""Time in seconds since 1970 at which the files were made and the machine boots, by the machine's clock.

The time is 1 January 2024, noon.
"""
_NULL = 1, 3
ROOTS = {DEBUGFS: 0, TRACEFS: 1, TMPFS: 2}
"""Mount point -> file descriptor of its root directory in all tasks."""
_CLASS64 = 2
_LITTLE = 1
_EXECUTABLE = 2
_HEADER_SIZE = 64
_PROGRAM_SIZE = 56
_LOAD = 1
_READ_EXEC = 5
_READ_WRITE = 6


class CpioFile(NamedTuple):
    """A file in an initramfs.

    `data`: content of the file, or target of a symbolic link. `device`: major and minor number of a device
    node; (0, 0) for other files.
    """

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = 0, 0


def init_program(stub: UserStub) -> bytes:
    """Return init's program: an ELF file with two segments, the stub and the buffer."""
    sizes = _HEADER_SIZE, _PROGRAM_SIZE, 2, 0, 0, 0
    identity = struct.pack("<4sBBB9x", b"\x7fELF", _CLASS64, _LITTLE, 1)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH", _EXECUTABLE, stub.elf_machine, 1, stub.start, _HEADER_SIZE, 0, 0, *sizes
    )
    size = len(stub.code)
    code = struct.pack("<IIQQQQQQ", _LOAD, _READ_EXEC, _START - _BASE, _START, _START, size, size, 4096)
    buffer = struct.pack("<IIQQQQQQ", _LOAD, _READ_WRITE, 0, BUFFER, BUFFER, 0, BUFFER_SIZE, 4096)
    return (header + code + buffer).ljust(_START - _BASE, b"\0") + stub.code


def initramfs(stub: UserStub) -> bytes:
    """Return the archive: init (also as /bin/sh), a null device and mount points. Its bytes never vary."""
    directories = [CpioFile(name[1:], stat.S_IFDIR | 0o755) for name in _DIRECTORIES]
    null = CpioFile(f"{DEVICES[1:]}/null", stat.S_IFCHR | 0o666, device=_NULL)
    shell = CpioFile(f"{_PROGRAMS[1:]}/sh", stat.S_IFLNK | 0o777, PROGRAM)
    return _cpio(
        [*directories, null, shell, CpioFile(PROGRAM[1:].decode(), stat.S_IFREG | 0o755, init_program(stub))]
    )


def _cpio(files: list[CpioFile]) -> bytes:
    """Return a cpio archive of files in the format "newc".

    Source: Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    parts = []
    for number, file in enumerate([*files, CpioFile("TRAILER!!!", 0)], start=1):
        name = file.name.encode() + b"\0"
        fields = (number, file.mode, 0, 0, 1, BOOTED, len(file.data), 0, 0, *file.device, len(name), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name
        parts += [_padded(head), _padded(file.data)]
    return b"".join(parts)


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 4) * 4, b"\0")
