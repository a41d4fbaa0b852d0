"""KernelOffsets: the addresses and offsets that the host needs of a kernel, read from symbols and BTF."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from errno import ENOENT
from typing import Any

from emulated_kernel.guests.linux.guest_abi import STACK_TOP, abi_named
from emulated_kernel.guests.linux.inodes import inode_offsets
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.safe_read import is_word

RESCHEDULE = "resched_curr"
"""Symbol of the function that asks the running task of a run queue to reschedule."""
THREAD_FLAGS = "task_struct.thread_info.flags"
"""Path of the member of task_struct with a task's thread flags."""
_SYMBOLS = (
    "alloc_pid", "d_hash_shift", "delayed_put_task_struct", "dentry_hashtable", "do_exit",
    "emergency_restart", "init_pid_ns", RESCHEDULE, "wake_up_new_task", "wake_up_process", "__per_cpu_offset",
)  # fmt: skip
SYSCALL_WORK = "task_struct.thread_info.syscall_work"
"""Path of the member with the flags for system calls since v5.11; before, thread_info.flags has them."""
TRACE_SYSCALLS = "syscall_regfunc", "syscall_unregfunc"
"""Symbols of the functions that set and clear the flag of traced system calls in all tasks.

KernelOffsets has their addresses only for kernels without SYSCALL_WORK.
"""
TEXT_POKE = "__text_poke"
"""Symbol of x86's function that writes text."""
POKED = f"{TEXT_POKE}(addr)", f"{TEXT_POKE}(len)"
"""Keys in KernelOffsets.offsets of the positions, from 0, of two parameters of __text_poke().

The keys are absent if BTF lacks the parameters.
"""
FREES_TEXT = "module_memfree", "execmem_free"
"""Symbols of the function that frees memory for code; the second exists since Linux 6.10."""
_OPTIONAL = (
    TEXT_POKE,
    *FREES_TEXT,
    "no_llseek",
    "do_open_execat",
    "unshare_files",
    "set_cred_ucounts",
    "tomoyo_realpath_nofollow",
)
KEEPING = "init_on_free", "_page_poisoning_enabled"
"""Symbols of kernel switches. If one is set, a free page must keep the pattern written when it was freed."""
_OF_NODES = ("node_data", "contig_page_data", "vmemmap_base", *KEEPING)
_MEMBERS = (
    "task_struct.pid", "task_struct.rcu", "task_struct.stack", "task_struct.comm",
    "task_struct.mm", THREAD_FLAGS, "task_struct.cred", "mm_struct.pgd",
    "pid_namespace.idr.idr_next",
    "cred.uid", "cred.cap_permitted", "cred.cap_effective", "task_struct.files", "files_struct.fdt",
    "files_struct.count", "filename.name",
    "fdtable.fd", "file.f_mode", "file.f_op", "file.f_inode", "file.f_path.dentry", "file_operations.llseek",
    "dentry.d_flags", "dentry.d_hash", "dentry.d_parent", "dentry.d_name", "dentry.d_inode", "qstr.name",
)  # fmt: skip
_OF_FREE_PAGES = (
    "page.lru", "page.private", "pglist_data.node_zones", "pglist_data.nr_zones", "zone.free_area",
    "zone.present_pages", "zone.vm_stat",
)  # fmt: skip
_SIZES = "page", "zone", "free_area"
PT_REGS = "pt_regs"
"""Key of the size of struct pt_regs in KernelOffsets.offsets."""
STATE = "task_struct.__state", "task_struct.state"
"""Paths of the member with a task's state: an unsigned int since v5.14, and a long before."""
TIMEKEEPER = "tk_core"
"""Key, in KernelOffsets.symbols, of the address of the kernel's timekeeper."""
_TIMEKEEPERS = "tk_core", "timekeeper_data"
"""Symbols by which the kernel's timekeeper is found.

Before v6.17 a variable contains the timekeeper. Since then it is the first element of an array.
"""
PID_MAX = "pid_max"
"""Key, in KernelOffsets.symbols, of the address of the kernel's limit of pids.

The limit is a variable or, since v6.14, a member of the pid namespace.
"""
COARSE_CLOCKS = ("ktime_get_coarse_real_ts64", "ktime_get_coarse_real_ts64_mg")
"""Functions that return the timestamps of files; the second exists since Linux 6.13."""
TIME_READ = "time_read"
"""Key, in KernelOffsets.symbols, of the address of the function that GuestAbi.time_read names."""
_OF_TIME = (
    *(f"timekeeper.tkr_mono.{name}" for name in (
        "clock", "mask", "cycle_last", "mult", "shift", "xtime_nsec", "base", "base_real",
    )),
    "timekeeper.xtime_sec", "clocksource.read",
)  # fmt: skip
_TIMEKEEPER_AT = "tk_data.timekeeper"
"""Path of the timekeeper in the variable tk_core since Linux 6.13."""
_COARSE = "timekeeper.coarse_nsec"
"""Path of the member with the nanoseconds of the coarse time. The member exists since Linux 6.15."""
JIFFIES = "jiffies_64"
"""Symbol of the number of ticks since the boot."""
TICK_NSEC = "tick_nsec"
"""Symbol of the length of a tick in nanoseconds."""
TICK_TIMES = "last_jiffies_update", "tick_next_period"
"""Symbols of the time of the last counted tick and of the time of the next tick."""
TIMER_BASES = "timer_bases"
"""Symbol of the CPU's timer wheels; in KernelOffsets.offsets, the key of the size of one wheel in bytes."""
PUNCTUAL = "timer_bases[]"
"""Key in KernelOffsets.offsets of the number of wheels whose timers wake an idle CPU.

These wheels precede the wheel of deferrable timers.
"""
_MIGRATING = "tmigr_cpu"
"""Name of a structure that only kernels with two wheels of non-deferrable timers have (since Linux 6.9)."""
RUN_QUEUES = "runqueues"
"""Symbol of the CPU's run queue."""
_OF_TICKS = JIFFIES, TICK_NSEC, *TICK_TIMES
_OF_TIMERS = "timer_base.next_expiry", "rq.nr_running"
_BEFORE_TIMEKEEPER = "seqcount_raw_spinlock"
"""Name of the structure that precedes the timekeeper in tk_core before Linux 6.13.

With CONFIG_PREEMPT_RT, the structure also contains the address of a lock, after its sequence count.
"""
_ALIGNMENT = 8
_LONGEST_USER_ACCESS = 0x200
"""Number of bytes of each function in GuestAbi.user_access that are searched for changes of sstatus."""
_CHANGES_OF_SSTATUS = 0x10002073, 0x10003073
"""Encodings of csrs and csrc for sstatus with the register x0 as operand."""
_OPERAND = 31 << 15
ORDERS = "zone.free_area[]"
"""Key, in KernelOffsets.offsets, of the number of a zone's free areas, which is the number of orders."""
_DENTRY_FLAGS = {
    "DCACHE_OP_REVALIDATE": 1 << 2, "DCACHE_MOUNTED": 1 << 16, "DCACHE_NEED_AUTOMOUNT": 1 << 17,
    "DCACHE_MANAGE_TRANSIT": 1 << 18,
}  # fmt: skip
"""Name of a flag in d_flags that forbids the host to look up a dentry in guest memory -> value of the flag.

The values are for kernels that define the flags as macros. In newer kernels, the flags are an enum, whose
values are in BTF.
"""


@dataclass(frozen=True)
class KernelOffsets:
    """Addresses and offsets in a kernel.

    `symbols`: name of a symbol, or another key -> address. `offsets`: path of a member, or another key ->
    offset, size or number.
    """

    release: str
    architecture: str
    """Name of the architecture, as abi_named() takes it."""
    symbols: dict[str, int]
    offsets: dict[str, int]
    per_cpu: dict[str, int]
    """Name of a per-CPU variable -> its offset in the per-CPU area, which can be negative."""
    asks: int
    """Mask of the flags in d_flags that forbid the host to look up a dentry in guest memory."""
    need_resched: int = 0
    """Mask of the bit TIF_NEED_RESCHED in thread_info.flags of the booted kernel; 0 before the boot."""
    executed: dict[str, int] = field(default_factory=dict)
    """Address of an instruction that the host executes in place of the CPU -> the instruction's encoding.

    The address is a hexadecimal number without a prefix, because JSON keys are strings.
    """
    user_access: dict[str, int] = field(default_factory=dict)
    """Address of an instruction that allows or forbids user accesses -> its encoding, as in `executed`.

    These are instructions in the functions GuestAbi.user_access.
    """
    syscall_trace: int = 0
    """Mask of the bit TIF_SYSCALL_TRACEPOINT in thread_info.flags of the booted kernel.

    0 before the boot, or if the kernel keeps the flag in syscall_work.
    """


def kernel_offsets(kernel: LinuxKernel) -> KernelOffsets:
    """Return the addresses and offsets of a kernel, from its symbols and BTF.

    Raises: KernelError ENOEXEC (the kernel lacks a symbol or member), ENODATA (the kernel has no BTF).
    """
    abi = abi_named(kernel.architecture)
    symbols = {name: kernel.required(name) for name in (*_SYMBOLS, *abi.symbols)}
    for name in (*_OPTIONAL, *_OF_NODES, *COARSE_CLOCKS, *_OF_TICKS):
        if (address := kernel.kallsyms.lookup_name(name)) is not None:
            symbols[name] = address
    if (reads := kernel.kallsyms.lookup_name(abi.time_read)) is not None:
        symbols[TIME_READ] = reads
    if (timekeeper := timekeeper_address(kernel)) is not None:
        symbols[TIMEKEEPER] = timekeeper
    try:
        symbols[PID_MAX] = _pid_max(kernel)
        offsets = {path: kernel.btf.offset(path) for path in _MEMBERS} | inode_offsets(kernel.btf)
        offsets[STATE[0]] = kernel.btf.offset(STATE[0] if kernel.btf.has(STATE[0]) else STATE[1])
        offsets |= _of_free_pages(kernel.btf) | _of_time(kernel.btf) | _of_timers(kernel.btf)
        offsets |= _of_text_poke(kernel.btf)
        offsets |= {path: kernel.btf.offset(path) for path in abi.members}
        offsets |= {name: kernel.btf.constant(name) for name in abi.constants}
        offsets[PT_REGS] = kernel.btf.size(PT_REGS)
        per_cpu = _per_cpu_offsets(kernel, abi.per_cpu)
        if not kernel.btf.has(SYSCALL_WORK):
            found = {name: kernel.kallsyms.lookup_name(name) for name in TRACE_SYSCALLS}
            symbols |= {name: address for name, address in found.items() if address is not None}
    except KernelError as error:
        if error.errno != ENOENT:
            raise
        raise unusable(error.strerror or "") from None
    return KernelOffsets(
        kernel.release,
        kernel.architecture,
        symbols,
        offsets,
        per_cpu,
        dentry_slow_path_flags(kernel.btf),
        executed={f"{at:x}": code for at, code in _instructions_ending(kernel, abi.executed)},
        user_access={f"{at:x}": code for at, code in _user_access(kernel, abi.user_access)},
    )


def _user_access(kernel: LinuxKernel, functions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield (address, encoding) of each csrs or csrc instruction for sstatus in the kernel's `functions`.

    Leave out instructions with the operand x0, because they change nothing.
    """
    for name in functions:
        start = kernel.kallsyms.lookup_name(name)
        if start is None:
            continue
        code = kernel.read(start, _LONGEST_USER_ACCESS)
        for at in range(0, len(code) - 3, 2):
            (word,) = struct.unpack_from("<I", code, at)
            if word & ~_OPERAND not in _CHANGES_OF_SSTATUS or not word & _OPERAND:
                continue
            found = kernel.kallsyms.lookup(start + at)
            if found is not None and found.symbol.address == start:
                yield start + at, word


def _instructions_ending(kernel: LinuxKernel, ends: tuple[bytes, ...]) -> Iterator[tuple[int, int]]:
    """Yield (address, value) of each aligned 32-bit word of a kernel, if its last three bytes are in `ends`.

    Some of these words may be data. The host's hooks for data are never called, because the CPU never
    executes data.
    """
    for segment in kernel.vmlinux.segments:
        data = bytes(segment.data)
        for end in ends:
            at = data.find(end)
            while at >= 0:
                if at % 4 == 1:
                    yield segment.va + at - 1, int.from_bytes(data[at - 1 : at + 3], "little")
                at = data.find(end, at + 1)


def timekeeper_address(kernel: LinuxKernel) -> int | None:
    """Return the address of the variable with the kernel's timekeeper; None if no known symbol names it."""
    found = (kernel.kallsyms.lookup_name(name) for name in _TIMEKEEPERS)
    return next((address for address in found if address is not None), None)


def timekeeper_offset(btf: Btf) -> int:
    """Return the offset in bytes of the timekeeper in the variable that contains it."""
    if btf.has(_TIMEKEEPER_AT):
        return btf.offset(_TIMEKEEPER_AT)
    return -(-btf.size(_BEFORE_TIMEKEEPER) // _ALIGNMENT) * _ALIGNMENT


def _pid_max(kernel: LinuxKernel) -> int:
    """Return the address of the kernel's limit of pids.

    Raises: KernelError ENOENT, ENODATA (the limit is not found).
    """
    address = kernel.kallsyms.lookup_name("pid_max")
    if address is not None:
        return address
    return kernel.required("init_pid_ns") + kernel.btf.offset("pid_namespace.pid_max")


def _per_cpu_offsets(kernel: LinuxKernel, needed: tuple[str, ...]) -> dict[str, int]:
    """Return a map: name of a per-CPU variable -> its offset in the per-CPU area, for KernelOffsets.per_cpu.

    The variables are `needed`, RUN_QUEUES and, if the kernel has it, TIMER_BASES.
    Raises: KernelError ENOEXEC, ENOENT, ENODATA (a variable is unknown).
    """
    found = {name: kernel.per_cpu(name) for name in (*needed, RUN_QUEUES, TIMER_BASES)}
    if STACK_TOP in needed:
        found[STACK_TOP] = _stack_top(kernel)
    for name in (*needed, RUN_QUEUES):
        if found[name] is None:
            found[name] = kernel.required_per_cpu(name)
    return {name: offset for name, offset in found.items() if offset is not None}


def _stack_top(kernel: LinuxKernel) -> int | None:
    """Return the per-CPU offset of the pointer to the end of the running task's struct pt_regs.

    Return None if the kernel has no known symbol for the pointer.

    Mirrors: arch/x86/include/asm/processor.h:cpu_current_top_of_stack (v5.10, v6.1),
    arch/x86/include/asm/current.h:struct pcpu_hot (v6.12).
    """
    own = kernel.per_cpu(STACK_TOP)
    hot = kernel.kallsyms.lookup_name("pcpu_hot")
    if own is not None or hot is None:
        segment = kernel.per_cpu("cpu_tss_rw")
        if own is not None or segment is None:
            return own
        return segment + kernel.btf.offset("tss_struct.x86_tss.sp1")
    return hot + kernel.btf.offset("pcpu_hot.top_of_stack")


def checked_offsets(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the types and ranges of the values in `kept`, and return `kept`.

    `kept`: attribute of KernelOffsets or VmcoreOffsets -> its value, as a snapshot stores them. `release`
    must be a text, and all numbers must fit into 64 bits.
    Raises: KeyError, TypeError, ValueError (the check fails).
    """
    if not isinstance(kept["release"], str):
        raise ValueError("facts: the release is no text")
    # Offsets of variables that are linked at addresses of the kernel are negative.
    distances = [abs(offset) for offset in kept["per_cpu"].values()]
    others = [value for name, value in kept.items() if name not in ("release", "architecture", "per_cpu")]
    words = (word for each in others for word in (each.values() if isinstance(each, dict) else (each,)))
    if not all(map(is_word, (*distances, *words))):
        raise ValueError("facts: not numbers of 64 bits")
    return kept


def dentry_slow_path_flags(btf: Btf) -> int:
    """Return the mask of the flags in d_flags that forbid the host to look up a dentry in guest memory.

    The lookup of a dentry with one of these flags needs code of the guest kernel.

    Mirrors: include/linux/dcache.h:DCACHE_OP_REVALIDATE, DCACHE_MANAGED_DENTRY (v6.1).
    """
    asks = 0
    for name, number in _DENTRY_FLAGS.items():
        try:
            asks |= btf.constant(name)
        except KernelError as error:
            if error.errno != ENOENT:
                raise
            asks |= number
    return asks


def _of_free_pages(btf: Btf) -> dict[str, int]:
    """Return the entries of KernelOffsets.offsets for the page allocator; {} if BTF lacks one of them."""
    try:
        found = {path: btf.offset(path) for path in _OF_FREE_PAGES}
        return found | {name: btf.size(name) for name in _SIZES} | {ORDERS: btf.length("zone.free_area")}
    except KernelError as error:
        if error.errno != ENOENT:
            raise
        return {}


def _of_text_poke(btf: Btf) -> dict[str, int]:
    """Return a map: key in POKED -> position of the parameter; {} if BTF lacks __text_poke()."""
    try:
        _, parameters = btf.prototype(TEXT_POKE)
    except KernelError as error:
        if error.errno != ENOENT:
            raise
        return {}
    found = {f"{TEXT_POKE}({each.name})": number for number, each in enumerate(parameters)}
    return {key: found[key] for key in POKED if key in found}


def _of_time(btf: Btf) -> dict[str, int]:
    """Return the entries of KernelOffsets.offsets for the timekeeper; {} if BTF lacks one of _OF_TIME."""
    found = {path: btf.offset(path) for path in (*_OF_TIME, _COARSE) if btf.has(path)}
    if not found.keys() >= set(_OF_TIME):
        return {}
    return found | {TIMEKEEPER: timekeeper_offset(btf)}


def _of_timers(btf: Btf) -> dict[str, int]:
    """Return the entries of KernelOffsets.offsets for the timer wheels; {} if BTF lacks one of _OF_TIMERS."""
    if not all(btf.has(path) for path in _OF_TIMERS):
        return {}
    wheels = {TIMER_BASES: btf.size("timer_base"), PUNCTUAL: 2 if btf.has(_MIGRATING) else 1}
    return {path: btf.offset(path) for path in _OF_TIMERS} | wheels
