"""GuestAbi: tables of the system calls, registers and structures that user mode needs, by processor."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

from emulated_kernel.guests.linux.initramfs import ARM_STUB, RISCV_STUB, X86_STUB, UserStub
from emulated_kernel.util.fast_dataclass import dataclass

CURRENT_TASK = "current_task"
"""Name of the per-CPU variable with the address of the running task's task_struct."""
STACK_TOP = "cpu_current_top_of_stack"
"""Key in KernelOffsets.per_cpu of the per-CPU word that points at the end of the running task's pt_regs."""

ENTRY_TASK = "__entry_task"
"""Per-CPU variable with the address of the running task's task_struct.

An arm64 kernel reads the variable at an exception or system call from user mode.
"""


@dataclass(frozen=True)
class GuestAbi:
    """The system calls, registers and structures by which the host drives user mode of one processor."""

    name: str
    """Name of the architecture, which MachineConfig.arch also uses."""
    symbols: tuple[str, ...]
    """Symbols that the host needs of a kernel for this processor, in addition to those of all kernels."""
    members: tuple[str, ...]
    """Paths of members of structures that the host needs in addition to those of all kernels."""
    constants: tuple[str, ...]
    """Enumerators that the host needs; KernelOffsets.offsets has their values."""
    per_cpu: tuple[str, ...]
    """Per-CPU variables that the host needs in addition to those of all kernels."""
    stub: UserStub
    pt_regs: tuple[str, ...]
    """Names of the first members of struct pt_regs, in order; each is one word."""
    call: tuple[str, ...]
    """Names of registers: those with the arguments of a system call, then the one with the call's number."""
    result: str
    """Name of the register with the result of a system call."""
    counter: str
    """Name of the register in which the stub's code at UserStub.touch takes the number of pages."""
    kept: tuple[str, str]
    """Names of two registers that system calls preserve.

    The stub's code at UserStub.two_calls takes the second call's first argument and number from them.
    """
    syscalls: Mapping[str, int]
    """Name of a system call -> its number.

    If a processor lacks an old call, such as dup2, the name has the number of the newer call that replaces
    it. The newer call has the same effect if its further arguments are 0.
    """
    o_directory: int
    """Value of the flag O_DIRECTORY of open(2)."""
    stat: struct.Struct
    """Layout of struct stat: device, inode, and then the members in `stat_order`."""
    stat_order: tuple[str, ...]
    modules: range
    """Range of addresses of modules' code."""
    time_read: str
    """Symbol of the function that reads the clock source that the host supports."""
    irq_stack: str
    """Name of a per-CPU variable that contains an address on the stack for interrupts."""
    irq_stack_size: int
    """Number of bytes from the address in the variable `irq_stack` to the end of the stack."""
    saved_sp: str
    """Path of the member of task_struct that contains the stack pointer while the task does not run."""
    host_code: int
    """Address at which the host maps its own code and data; Linux leaves the 2 MiB from there on unused."""
    is_word_hashed: bool
    """Whether names of files are hashed by words (CONFIG_DCACHE_WORD_ACCESS); if False, by bytes."""
    executed: tuple[bytes, ...] = ()
    """Patterns of kernel instructions that the host executes in place of the CPU; empty if there are none.

    A pattern is the last three of an instruction's four bytes in memory. Only arm64 has such instructions:
    accesses to the registers of the generic timer.
    """
    user_access: tuple[str, ...] = ()
    """Functions in which a riscv64 kernel sets and clears SUM, the permission to access user memory."""


_O_DIRECTORY = 0o200000
# Mirrors: include/uapi/asm-generic/unistd.h (v6.12).
_GENERIC_SYSCALLS = {
    "dup2": 24, "fcntl": 25, "ioctl": 29, "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36,
    "linkat": 37, "umount2": 39, "mount": 40, "statfs": 43, "truncate": 45, "ftruncate": 46,
    "fchmodat": 53, "fchownat": 54, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
    "read": 63, "write": 64, "pread64": 67, "pwrite64": 68, "ppoll": 73, "readlinkat": 78, "newfstatat": 79,
    "fsync": 82, "fdatasync": 83, "utimensat": 88, "exit_group": 94, "nanosleep": 101, "delete_module": 106,
    "syslog": 116, "kill": 129,
    "rt_sigaction": 134, "umask": 166, "socket": 198, "bind": 200, "listen": 201, "connect": 203,
    "setsockopt": 208,
    "clone": 220, "execve": 221, "madvise": 233, "accept4": 242, "finit_module": 273, "renameat": 276,
}  # fmt: skip
# Mirrors: include/uapi/asm-generic/stat.h:struct stat (v6.12).
_GENERIC_STAT = struct.Struct("<QQIIIIQQqiiq6Q8x")
_GENERIC_STAT_ORDER = (
    "mode",
    "nlink",
    "uid",
    "gid",
    "rdev",
    "pad1",
    "size",
    "blksize",
    "pad2",
    "blocks",
)
X86_64 = GuestAbi(
    name="x86_64",
    symbols=("do_sync_core", "level3_kernel_pgt", "page_offset_base", "x86_platform_ipi_callback"),
    members=(),
    constants=(),
    per_cpu=(CURRENT_TASK, STACK_TOP),
    stub=X86_STUB,
    pt_regs=(
        "r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di",
        "orig_ax", "ip",
    ),
    call=("di", "si", "dx", "r10", "r8", "r9", "ax"),
    result="ax",
    counter="cx",
    kept=("bx", "bp"),
    syscalls=MappingProxyType({
        "read": 0, "write": 1, "close": 3, "poll": 7, "lseek": 8, "rt_sigaction": 13, "ioctl": 16,
        "pread64": 17, "pwrite64": 18, "madvise": 28, "dup2": 33, "nanosleep": 35, "socket": 41,
        "connect": 42, "bind": 49, "listen": 50, "setsockopt": 54, "clone": 56, "execve": 59, "kill": 62,
        "fcntl": 72, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "umask": 95,
        "syslog": 103, "mknod": 133, "statfs": 137, "mount": 165, "umount2": 166,
        "delete_module": 176, "getdents64": 217, "exit_group": 231, "openat": 257, "mkdirat": 258,
        "mknodat": 259, "fchownat": 260, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265,
        "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "utimensat": 280, "accept4": 288,
        "pipe2": 293, "finit_module": 313,
    }),
    o_directory=_O_DIRECTORY,
    # Mirrors: arch/x86/include/uapi/asm/stat.h:struct stat (v6.1).
    stat=struct.Struct("<QQQIIIxxxxQqqq6Q24x"),
    stat_order=("nlink", "mode", "uid", "gid", "rdev", "size", "blksize", "blocks"),
    # Mirrors: arch/x86/include/asm/pgtable_64_types.h:MODULES_VADDR, MODULES_END (v6.1).
    modules=range(0xFFFFFFFFC0000000, 0xFFFFFFFFFF000000),
    time_read="read_tsc",
    irq_stack="hardirq_stack_ptr",
    irq_stack_size=8,
    saved_sp="task_struct.thread.sp",
    host_code=0xFFFFFFFF70000000,
    is_word_hashed=True,
)  # fmt: skip
RISCV64 = GuestAbi(
    name="riscv64",
    symbols=("kernel_map", "ipi_mux_pcpu"),
    members=("kernel_mapping.va_pa_offset", "irq_work.node", "irq_work.func", "ipi_mux_cpu.bits"),
    constants=("IPI_IRQ_WORK",),
    per_cpu=("raised_list",),
    stub=RISCV_STUB,
    pt_regs=(
        "ip", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", "a0", "a1", "a2", "a3", "a4", "a5", "a6",
        "a7",
    ),
    call=("a0", "a1", "a2", "a3", "a4", "a5", "a7"),
    result="a0",
    counter="a6",
    kept=("s1", "s0"),
    syscalls=MappingProxyType(_GENERIC_SYSCALLS),
    o_directory=_O_DIRECTORY,
    stat=_GENERIC_STAT,
    stat_order=_GENERIC_STAT_ORDER,
    # Mirrors: arch/riscv/include/asm/pgtable.h:MODULES_VADDR, MODULES_END (v6.12).
    modules=range(0xFFFFFFFF00000000, 0xFFFFFFFF80000000),
    time_read="riscv_clocksource_rdtime",
    irq_stack="irq_stack_ptr",
    irq_stack_size=16 << 10,
    saved_sp="task_struct.thread.sp",
    host_code=0xFFFFFFFF60000000,
    is_word_hashed=False,
    # Since v6.8, fallback_scalar_usercopy() has the code that both __asm_copy_*_user() had before.
    user_access=(
        "strncpy_from_user", "strnlen_user", "fallback_scalar_usercopy", "__asm_copy_to_user", "__clear_user",
    ),
)  # fmt: skip
ARM64 = GuestAbi(
    name="arm64",
    symbols=(),
    members=("irq_work.node", "irq_work.func"),
    constants=("IPI_IRQ_WORK",),
    per_cpu=("raised_list", ENTRY_TASK),
    stub=ARM_STUB,
    pt_regs=(*(f"x{number}" for number in range(31)), "sp", "ip"),
    call=("x0", "x1", "x2", "x3", "x4", "x5", "x8"),
    result="x0",
    counter="x7",
    kept=("x19", "x20"),
    syscalls=MappingProxyType({**_GENERIC_SYSCALLS, "renameat": 38}),
    # Mirrors: arch/arm64/include/uapi/asm/fcntl.h (v6.12).
    o_directory=0o40000,
    stat=_GENERIC_STAT,
    stat_order=_GENERIC_STAT_ORDER,
    # Mirrors: arch/arm64/include/asm/memory.h:MODULES_VADDR, MODULES_END (v6.12). The range excludes the
    # host's code, which is at the end of module space, because no timer may interrupt a hit there.
    modules=range(0xFFFF800000000000, 0xFFFF80007C000000),
    time_read="arch_counter_read",
    irq_stack="irq_stack_ptr",
    irq_stack_size=16 << 10,
    saved_sp="task_struct.thread.cpu_context.sp",
    # The address is in the direct map, after the end of the largest possible RAM.
    host_code=0xFFFF400000000000,
    is_word_hashed=True,
    # The instructions: mrs of cntfrq_el0, cntpct_el0 and cntvct_el0; mrs of cntv_*_el0; msr of cntv_*_el0.
    executed=(b"\xe0\x3b\xd5", b"\xe3\x3b\xd5", b"\xe3\x1b\xd5"),
)
ABIS = (X86_64, ARM64, RISCV64)


def abi_named(name: str) -> GuestAbi:
    """Return the ABI of the architecture `name`.

    Raises: KeyError (no distribution's kernel can run on it).
    """
    return {abi.name: abi for abi in ABIS}[name]
