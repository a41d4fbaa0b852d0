#!/usr/bin/env python3
"""Comparison of kprobefs's answers with those of a distribution's kernel that runs in the emulator.

inside.py IMAGE [--profile NAME] [--count N] [--seed N] [--only WHAT]
Definitions, most of which are wrong, are written to kprobe_events of both kernels. Places in the kernel's
text are probed in the kernel, and checked by kprobefs's probe checker. The records of a workload are compared
between the kernel's own kprobes and kprobefs's. The exit status is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from emulated_kernel.arch.analysis.probe_rules import ProbeRules, probe_rules_named
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.probing.detect_interface import detect_interface, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.profile import DEFAULT, KERNEL_INTERFACE, profile_named
from emulated_kernel.trace.interface import LINUX_6_1, Interface, InterfaceRule, interface_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.parts import guest_of

CLIENT = Client(4001, 0, 0)
_ARGUMENT_OF = {name: number for number, name in enumerate(("di", "si", "dx", "cx", "r8"))}
"""Register of x86_64 in a question -> number of the argument that it holds at a function's entry."""
_REGISTER = re.compile(rf"%({'|'.join(_ARGUMENT_OF)})\b")
TIME = re.compile(r"^\[ *\d+\.\d+\] ", re.MULTILINE)
ADDRESS = re.compile(r"0x(?:\(____ptrval____\)|[0-9a-f]{16})")
"""Pattern of addresses, since Linux prints pointers hashed or not at all."""
ENTRIES = re.compile(r"^\{.*?(?=^\nTotals:)|^    .*\n", re.MULTILINE | re.DOTALL)
"""Pattern of a histogram's entries and its totals, which depend on the tasks that run meanwhile."""
PIECE = 1 << 17
RECORDED = (
    "p:k/created shmem_create mode=%cx:x16",
    "p:k/written shmem_write_begin at=%dx size=%cx:u32 c=$comm",
    "r:k/begun shmem_write_begin result=$retval:s32",
    "p:k/inside shmem_write_end+{first} at=%dx copied=%r8:u32 at8=+8(%si):x64",
    "p:k/later shmem_write_end+{second} copied=%r8:u32",
    "r:k/read shmem_file_read_iter size=$retval:s64",
    "p:k/ends shmem_evict_inode bytes=+0(%di):x8[4]",
    "p:k/opened shmem_file_llseek to=%si",
    "r:k/made shmem_get_inode",
)
"""Definitions of probes on functions that only requests for scratch/ execute."""
OFFSETS = {"first": 5, "second": 21}
"""Minimum offsets of instructions in shmem_write_end."""
STACK_AT_RETURN = " s=$stack0:x8"
RECORDED_BY_NAME = (
    "p:k/n1 shmem_create dentry:%pd mode=mode dir->i_ino dentry->d_name.len",
    "p:k/n2 shmem_file_llseek $arg*",
    "r:k/n3 shmem_file_read_iter $retval iocb->ki_pos $arg2 iocb->ki_filp:%pD",
    "p:k/n4 shmem_file_llseek file->f_flags whence c=whence:char file->f_inode->i_opflags",
    "f:k/n5 shmem_create name=dentry->d_name.name:string $arg4:x16 c=$comm",
    f"f:k/n6 shmem_file_read_iter%return ret=$retval iocb->ki_flags{STACK_AT_RETURN}",
    "f:k/n7 shmem_write_b*",
    "f:k/n8 __shmem_get_inode $retval->i_ino mode $retval->i_sb->s_id:string",
)
"""Definitions with arguments by name, for kernels since 6.12."""
RECORDED_CASTS = (
    "p:k/c1 shmem_create who=$current->pid name=$current->comm:string same=(task_struct)$current->pid",
    "r:k/c2 shmem_write_begin fs=(address_space)mapping->host->i_sb->s_id:string len=len",
    "p:k/c3 shmem_file_read_iter flags=(file)(iocb->ki_filp)->f_flags cpu=this_cpu_read(@cpu_number):u32",
    "f:k/c4 shmem_write_end own=(inode,i_mapping)+0(mapping)->i_ino on=(rq)this_cpu_ptr(@runqueues)->cpu",
)
"""Definitions with typecasts, the current task and per-CPU variables, for kernels since 7.3."""
STAMP = re.compile(r"^.*?-(?=\d+ )| [^ ]+ +\d+\.\d{6}:")
"""Pattern of a record's task name, time and context, which are not compared.

Linux knows the name only after the next task switch. A probe is a jump only after the optimizer has run.
"""
_HAS_DEPTH = re.compile(r"\d: (?:begun|read|made|n3|n[5-8]): ")
"""Pattern of records of returns and fprobes, whose preemption depth does not depend on the way of a hit."""
_DEPTH = re.compile(r" [^ ]*([^ ]{2}) +\d+\.\d{6}:")
LONG_CALL = b"\x67\xe8"
"""First bytes of a call of 6 bytes, into which boot changes indirect calls.

In Linux 6.1, such a call with a probe returns after its fifth byte, which crashes the kernel.
"""
MODULES = ("dm_mod", "kvm")
"""Modules that together have tables of all kinds."""
OPTIMIZING = 5_000_000
"""Time of the guest in microseconds in which all possible probes are optimized."""
KINDS = ("p", "r") * 6 + ("p:", "r8", "p8", "r0", "r99999", "x", "P", "-", "pp", "r-1")
NAMES = ("", ":x") * 4 + (":g/x", ":g/", ":1x", ":a-b", ":" + "n" * 64, ":g.h", ":kprobes/x", ":/x")
PLACES = ("vfs_read", "vfs_write") * 4 + (
    "vfs_read+0", "vfs_read-1", "no_such_function", "vfs_read+3", "vfs_read%return", "vfs_read%nothing",
    "vfs_read+0%return", "", "0", "nothing:at_all", "vfs_read+x", "+8", "_text", "vfs_read+-1",
    "@vfs_read",
)  # fmt: skip
ARGUMENTS = (
    "%di", "%dx:u8", "a=%si", "a=%dx:s64", "b=$stack", "$stack0", "$stack1:x16", "$stack99999", "$stackx",
    "$retval", "r=$retval:u8", "$comm", "c=$comm:string", "$comm:u8", "@0xffffffff81000000", "@vfs_read",
    "@no_such_symbol", "@", "@+5", "+0(%di)", "+0(%di", "-8(%di):u32", "+0(+8(%di)):string",
    "+u0(%si):ustring", "0(%di)", "+(%di)", "+0()", "+0", "a=%nothing", "%", "a=", "=%di", "1a=%di",
    "a-b=%di", "a=%di:", "a=%di:nothing", "a=%di:b4@2/16", "a=%di:b0@2/16", "a=%di:b9@2/8", "a=%di:b4@2/",
    "a=%di:x8[4]", "+0(%di):x8[4]", "+0(%di):x8[0]", "+0(%di):x8[65]", "+0(%di):x8[4",
    "+0(%di):string[2]", "a=%di:string", "a=\\1", "a=\\x", 'a=\\"text"', 'a=\\"text', "a=%di:char",
    "a=%di:symbol", "a=%di a=%si", "common_pid=%di", "__probe_ip=%di", "n" * 33 + "=%di", "a=%di:u128",
    "$arg1", "$", "a=$nothing1", "+0(+0(+0(%di)))", "+99999999999999999999(%di)", "\\5", "%di:%si",
    "a=b=%di", "imm=\\0x10:u8", "+0(\\1)",
)  # fmt: skip

BY_NAME = (
    "file", "count", "buf", "pos", "count:u8", "file:x32", "x=file", "x=count", "nothing", "_x", "$arg*",
    "$arg*", "$arg1", "$arg2:u8", "$arg4", "$arg5", "$arg0", "$argx", "$arg*:u8", "$arg1x", "x=$arg1",
    "x=$arg*", "file->f_flags", "file->f_inode->i_ino", "file->f_path.dentry->d_name.name:string",
    "file->f_path.dentry->d_iname:string", "file->nothing", "file->f_path.nothing", "file.f_path",
    "file-f_path",
    "file->", "file->.", "count->x", "buf:string", "buf:ustring", "file:string", "file->f_inode:%pd",
    "file->f_path.dentry:%pd", "file:%pD", "x=file:%pD", "$arg1:%pD", "$retval", "$retval:u8", "$retval->x",
    "$retvalx", "$retval.x", "r=$retval", "+8(file)", "+0(file->f_inode)", "+0(file):x8[4]", "buf:char",
    "file->f_mode", "file->f_inode->i_opflags", "file->f_inode->i_mode:x16", "+u0(buf):char[4]",
    "file->f_inode->i_sb->s_id:string", "file->f_inode->i_sb->s_iflags", "$comm:char", "%di:char",
    "x=%di:%pd", "file->f_op", "+0(+8(file)):string", "+8(%di):b4@2/", "+8(%di):symstr", "+0(buf):b9@2/8",
)  # fmt: skip
"""Fetch arguments that name parameters and fields, for kernels since 6.12."""
TPROBE_KINDS = ("t", "t", "t", "t3", "t0")
TPROBE_PLACES = (
    "sched_switch",
    "kfree",
    "sys_enter",
    "kmem_cache_alloc",
    "no_such_tracepoint",
    "9lives",
    "kmem:kfree",
    "kmem/kfree",
    "kfree%return",
    "vfs_*",
)
EPROBE_KINDS = ("e",) * 6 + ("e:", "e8", "ex")
EPROBE_PLACES = ("sched.sched_switch", "sched/sched_switch", "kmem.kfree", "kmem/kfree") * 3 + (
    "syscalls/sys_enter_openat", "sched", "sched.", "no.event", "ftrace/print", "sched.sched_switch.x",
)  # fmt: skip
EVENT_ARGUMENTS = (
    "$prev_pid", "x=$prev_comm:string", "$prev_state:u8", "$next_pid:x16", "$call_site", "$ptr:symbol",
    "+0($ptr):u8", "+0($filename):ustring", "$filename", "$nothing", "$common_pid", "$comm", "$COMM:u8",
    "(task_struct)next_pid", "(task_struct)ptr->pid", "x=(task_struct)ptr->comm:string", "(task_struct)ptr",
    "(task_struct)ptr->mm->owner->pid:s64", "(task_struct)ptr->nothing", "(task_struct)ptr.pid",
    "(task_struct)",
    "(no_struct)ptr->pid", "(task_struct", "(task_struct)nothing->pid", "(task_struct)ptr->sched_task_group",
    "+8((task_struct)ptr->mm)", "(task_struct)ptr->se.run_node", "(file)filename->f_path.dentry:%pd",
    "(task_struct)ptr-pid", "(task_struct)ptr->pid:char", "(pid_t)ptr->x", "(sk_buff)ptr->cloned", "($ptr)",
    "(inode)prev_comm->i_ino", "(qstr)filename->name:string", "(qstr)filename->len:string",
    "(task_struct)$ptr->pid", "(task_struct)ptr->comm",
)  # fmt: skip
"""Fetch arguments of event probes."""
CASTS = (
    "$current", "x=$current", "$current->pid", "$current->comm:string", "$current->mm->owner->pid:u8",
    "$current.pid", "$current-pid", "$currentx", "$current->nothing", "+0($current)", "$current:u8",
    "(task_struct)$current->pid", "(task_struct)%di->pid", "(file)%di->f_flags", "(file)(%di)->f_flags",
    "(file)(%di)", "(file)%di", "(file", "(file)(%di", "(file)+8(%di)->f_mode", "(file)+8%di->f_mode",
    "(file)+8(%di->f_mode", "(task_struct,se.run_node)$stack->pid", "(task_struct,tasks)%si->comm:string",
    "(task_struct,nothing)%si->pid", "(task_struct,mm->pgd)%si->pid", "(task_struct,sched_task_hot)%si->pid",
    "(task_struct,in_execve)%si->pid", "(no_struct,x)%si->pid", "(file)@vfs_read->f_mode",
    "(file)@vfs_read+4->f_mode", "(file)(@vfs_read+4)->f_mode", "(file)file->f_inode->i_ino",
    "(file)\\1->f_op",
    "(task_struct)((file)%di->f_inode)->pid", "(inode)((file)%di->f_inode)->i_mode:x16", "(qstr)$comm->len",
    "this_cpu_read(@cpu_number)", "this_cpu_ptr(@cpu_number)", "this_cpu_ptr(@cpu_number):u8",
    "this_cpu_read(%di)", "this_cpu_read(%di", "this_cpu_ptr(+8(%di))", "+0(this_cpu_ptr(@runqueues)):u32",
    "(rq)this_cpu_ptr(@runqueues)->nr_running", "(rq)this_cpu_ptr(@runqueues)", "this_cpu_read($comm)",
    "(rq)this_cpu_ptr(@runqueues)->curr->pid", "this_cpu_x(%di)", "this_cpu_read()", "(file)->f_op",
    "+0(+0(+0(+0(+0(+0(+0(+0(%di))))))))", "+0(+0(+0(+0(+0(+0(+0(+0(+0(%di)))))))))",
    "(file)%di->f_op:string",
    "(file)%di->f_path.dentry:%pd", "(file)%di-f_op", "(file)%di.f_op", "(file)buf->f_flags:char",
    "(dentry)file->d_name.name:string", "(vm_area_struct)%di->vm_flags", "(file)$arg1->f_flags",
    "(file)$retval->f_flags", "(file)$nothing->f_flags", "(file)%nothing->f_flags", "(sk_buff)%di->cloned",
)  # fmt: skip
"""Fetch arguments with typecasts, the current task and per-CPU variables, for kernels since 7.3."""
FPROBE_KINDS = ("f",) * 6 + ("f:", "f8", "f0", "f99999", "fx")
FPROBE_PLACES = ("vfs_read", "vfs_write", "vfs_read%return", "vfs_write%return") * 3 + (
    "vfs_read+0", "no_such_function", "vfs_read%nothing", "nothing:at_all", "0xffffffff81000000",
)  # fmt: skip

BUFFER_WRITES = (
    ("buffer_subbuf_size_kb", ("0", "1", "4", "5", "8", "16", "33", "512", "513", "-1", "x")),
    ("buffer_size_kb", ("0", "1", "9", "20", "100", "1408")),
    ("per_cpu/cpu0/buffer_size_kb", ("1", "50", "1408")),
    ("trace_marker", ("one", "two", "three")),
    ("trace_marker", ("m" * 3000, "n" * 4050)),
    ("snapshot", ("0", "1", "2")),
    ("trace", ("",)),
)
"""Files of a trace array, and texts that are written to them; an empty text only truncates."""
BUFFER_FILES = (
    "buffer_subbuf_size_kb",
    "buffer_size_kb",
    "per_cpu/cpu0/buffer_size_kb",
    "buffer_total_size_kb",
    "events/header_page",
)

FILTERED = ("sched/sched_switch", "kmem/kfree", "ipi/ipi_send_cpumask", "irq/softirq_entry")
"""Events with strings, addresses and sets of CPUs."""
FIELDS = (
    "prev_pid", "prev_comm", "call_site", "ptr", "cpumask", "callsite", "vec", "CPU", "common_pid", "comm",
    "nothing", "call_site.function", "ptr.function", "prev_pid.function", "CPU.function", "callsite.function",
    "comm.ustring", "vec.function", *("call_site.function", "CPU", "vec", "cpumask") * 3,
)  # fmt: skip
OPERATORS = ("==", "!=", "&") * 4 + (">", "~", " == ", "= ", "")
VALUES = (
    "0", "1", "-1", "0x10", '"sh"', "'s*'", "vfs_read", "no_such_function", "0xffffffff81200000", "12x",
    "CPUS{0}", "CPUS{0-1}", "CPUS{}", "CPUS{0", "CPUS 0}", "CPUS{all}", "CPUS{N}", "CPUS{0-0:1/2}", "CPUS{x}",
    "CPUS{3}", "CPUS{ 0 }", "CPUS{0,}", *("CPUS{0}", "1", "vfs_read", "0xffffffff81200000") * 3, "CPU",
    "x" * 30, "1" * 24, "vfs_read)", "",
)  # fmt: skip

HISTOGRAMS = (
    "keys=prev_pid",
    "keys=prev_pid:vals=next_prio",
    "keys=stacktrace",
    "keys=common_stacktrace",
    "keys=prev_pid,stacktrace",
    "keys=common_cpu",
    "keys=common_comm",
    "keys=comm",
    "keys=common_comm,prev_pid",
    "keys=prev_comm:vals=next_prio",
    "keys=prev_pid:vals=hitcount",
    "keys=prev_pid:vals=next_prio.percent",
    "keys=prev_pid:vals=next_prio.graph",
    "keys=nothing",
    "key=prev_pid.hex",
    "keys=prev_pid.execname",
    "keys=common_pid.execname",
    "vals=next_prio",
    "keys=prev_pid:x=next_prio",
    "keys=prev_pid:vals=nothing",
    "keys=prev_state.log2",
    "keys=prev_pid.buckets=10",
    "keys=prev_pid:s=common_stacktrace",
    "keys=prev_pid:s=stacktrace,t=$s",
    "keys=common_stacktrace.hex",
    "keys=STACKTRACE",
    "keys=common_stacktrace.stacktrace",
    "keys=prev_pid.stacktrace",
    "keys=prev_pid:vals=common_stacktrace",
    "keys=prev_pid:vals=stacktrace",
    "keys=common_stacktrace.log2",
    "keys=common_stacktrace,prev_comm,next_comm",
    "keys=common_stacktrace,stacktrace",
    "keys=prev_pid:s=common_stacktrace:onchange($s).save(next_comm,common_stacktrace)",
    "keys=prev_pid:s=common_stacktrace,p=prev_pid:onmax($p).trace(asked_chain,prev_pid,$s)",
    "keys=prev_pid:s=common_stacktrace,p=prev_pid:onmax($p).trace(asked_chain,$s,prev_pid)",
    "keys=prev_pid:p=prev_pid:onmax($p).trace(asked_chain,prev_pid,common_stacktrace)",
    "keys=prev_pid:p=prev_pid:onmax($p).trace(asked_chain,prev_pid,prev_state)",
    "keys=prev_pid:s=common_stacktrace+1",
    "keys=prev_pid:s=common_stacktrace,d=$s-1",
)
CHAIN_HISTOGRAMS = (
    "keys=stack", "keys=stack.stacktrace", "keys=pid,stack.stacktrace", "keys=pid.stacktrace",
    "keys=stack.hex", "keys=pid:vals=stack", "keys=pid:s=stack", "keys=pid:s=stack.stacktrace,t=$s",
    "keys=stack.stacktrace,common_stacktrace", "keys=stack,stack", "keys=stack.log2",
    "keys=pid:p=pid:onmax($p).save(stack)", "keys=pid:s=stack,p=pid:onmax($p).trace(asked_chain,pid,stack)",
    "keys=stack.execname", "keys=stack.sym", "keys=stack.sym-offset", "keys=stack.syscall",
    "keys=stack.buckets=2", "keys=stack.usecs",
)  # fmt: skip
ATTRIBUTES = (
    "", "", ":nohitcount", ":NOHC", ":sort=hitcount", ":sort=next_prio", ":size=256", ":size=1", ":pause",
    ":clear",
    ":name=x", ":nothing", ":nohitcount:nohitcount", ":sort=prev_pid.descending", ":vals=next_prio",
    ":sort=stacktrace", ":sort=common_stacktrace", " if prev_pid > 0", " if nothing",
    ":nohitcount if prev_pid==0",
)  # fmt: skip

LISTED = (
    ("", r"[.](percent|graph)", "Invalid field modifier"),
    ("", r"[$]arg0\b", "No BTF entry|This variable is not found"),
    ("", r"[$]arg[*]", r"(?s)BTF is not available.*: error: "),
    (r"5[.]10[.]", r"^p\S* ([+]8|0)\b", "Failed to register probe event"),
    (r"5[.]10[.]", r"^-:\S+/ ", "^$"),
    (r"6[.]1[.]", r"trace[(]asked_chain,pid,stack[)]", "^$"),
    (r"6[.]1[6-9][.]", r"^e.*[$]", r"event_probe: error: Invalid [$]-variable"),
    (r"6[.]1[6-9][.]|7[.][01][.]", r"[.]stacktrace|STACKTRACE|=stack", ""),
)
"""Deviations that the compatibility page lists: patterns of releases, questions, and Linux's answers."""
_AT_ENTRY = re.compile(r"^(p\S*) (vfs_read|vfs_write)(?= |$)")
_PAST_SITE = 8
"""Offset of the first instruction after a site of ftrace, in kernels for RISC-V."""
_AUIPC_SIZE = 4
_AUIPC_T0 = 0x297
"""Low 12 bits of `auipc t0`: opcode and destination register."""


@dataclass
class Tally:
    """Number of answers that agree, and the differences."""

    compared: int = 0
    refused: int = 0
    """Number of answers that agree because both kernels refuse."""
    differences: list[str] = field(default_factory=list)

    def add(self, what: str, linux: object, ours: object, *, is_refused: bool) -> None:
        """Count one question."""
        self.compared += 1
        self.refused += is_refused
        if linux != ours:
            self.differences.append(f"{what}\n  Linux {linux!r:.300}\n  ours  {ours!r:.300}")


def for_processor(text: str, architecture: str) -> str:
    """Return a question with an architecture's registers of arguments in place of those of x86_64."""
    arguments = arch_named(architecture).registers.arguments
    return _REGISTER.sub(lambda found: f"%{arguments[_ARGUMENT_OF[found[1]]]}", text)


def refused_sites(kernel: LinuxKernel) -> frozenset[int]:
    """Return the addresses that the kernel's own kprobes refuse because ftrace changes the instruction there.

    `kernel`: the kernel with its text as it runs. On RISC-V since v6.16, ftrace changes only the second
    instruction of a site, and the first is `auipc`.
    Mirrors: kernel/kprobes.c:check_ftrace_location (v6.12), arch/riscv/kernel/ftrace.c:ftrace_call_adjust
    (v6.16)
    """
    if kernel.kallsyms.lookup_name("kprobe_ftrace_handler") is not None:
        return frozenset()
    start, end = kernel.text
    text = kernel.read(start, end - start)
    sites = (site for site in kernel.mcount if start <= site < end)
    return frozenset(site + _AUIPC_SIZE * _is_auipc(text, site - start) for site in sites)


def _is_auipc(text: bytes, at: int) -> bool:
    return int.from_bytes(text[at : at + 2], "little") & 0xFFF == _AUIPC_T0


def refuses_entries(kernel: LinuxKernel) -> bool:
    """Return True if the kernel's own kprobes refuse the entries of functions."""
    return kernel.required("vfs_read") in refused_sites(kernel)


def definitions(count: int, seed: int, interface: Interface) -> Iterator[str]:
    """Yield random definitions, most parts of which are valid, with the registers of x86_64."""
    dice = random.Random(seed)
    arguments = ARGUMENTS + (BY_NAME if InterfaceRule.BTF_ARGS in interface else ())
    kinds = [(KINDS, PLACES)] * 2
    if InterfaceRule.FPROBE_EVENTS in interface:
        kinds.append((FPROBE_KINDS, FPROBE_PLACES))
    if InterfaceRule.TRACEPOINT_EVENTS in interface:
        kinds.append((TPROBE_KINDS, TPROBE_PLACES))
    if InterfaceRule.EVENT_PROBES in interface:
        kinds.append((EPROBE_KINDS, EPROBE_PLACES))
        arguments += EVENT_ARGUMENTS
    if InterfaceRule.TYPECASTS in interface:
        arguments += CASTS
    for _ in range(count):
        letters, places = dice.choice(kinds)
        words = [dice.choice(letters) + dice.choice(NAMES), dice.choice(places)]
        words += dice.sample(arguments, k=dice.choice((0, 0, 1, 1, 1, 2, 3)))
        yield " ".join(words)


def read(mount: Mount | Mount, path: str) -> str:
    """Return the text of a whole file."""
    handle, text = mount.open(CLIENT, path, os.O_RDONLY), b""
    while piece := mount.read(CLIENT, handle, PIECE, len(text)):
        text += piece
    mount.release(handle)
    return text.decode()


def write(mount: Mount | Mount, path: str, text: str, flags: int = 0) -> str:
    """Write with one write(2); return the name of the errno, or "" after success."""
    try:
        handle = mount.open(CLIENT, path, os.O_WRONLY | flags)
    except KernelError as error:
        return errno.errorcode[error.errno or 0]
    try:
        if text:
            mount.write(CLIENT, handle, text.encode(), 0)
    except KernelError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        mount.release(handle)
    return ""


def answer(mount: Mount | Mount, definition: str) -> tuple[str, str, str]:
    """Return errno, error_log and dynamic_events after a definition."""
    is_general = definition.startswith(("e", "f", "t"))
    file = "/tracing/dynamic_events" if is_general else "/tracing/kprobe_events"
    for path in ("/tracing/dynamic_events", "/tracing/error_log"):
        write(mount, path, "", os.O_TRUNC)
    result = write(mount, file, definition, os.O_APPEND)
    log = TIME.sub("", read(mount, "/tracing/error_log"))
    # A word that Linux spells so up to 6.1.
    events = ADDRESS.sub("(address)", read(mount, "/tracing/dynamic_events"))
    return result, log.replace("$-valiable", "$-variable"), events


def is_listed(release: str, question: str, log: str) -> bool:
    """Return True if a kernel's answer to a question is one of the listed deviations."""
    return any(
        re.match(releases, release) and re.search(asked, question) and re.search(answer, log)
        for releases, asked, answer in LISTED
    )


def release_of(mount: Mount) -> str:
    """Return the release of a mount's kernel."""
    return read(mount, "/machine/version").split()[2].removesuffix("\n")


def compare_definitions(
    linux: Mount,
    ours: Mount,
    count: int,
    seed: int,
    interface: Interface,
    kernel: LinuxKernel | None = None,
) -> Tally:
    """Compare both kernels' answers to random definitions.

    `kernel`: the kernel, unless it is one for x86_64. If it refuses probes at entries, the places are inside
    of functions, and its refusals of other probes at entries are not compared.
    """
    tally, release = Tally(), release_of(linux)
    is_without_entries = kernel is not None and refuses_entries(kernel)
    for question in definitions(count, seed, interface):
        definition = question
        if kernel is not None:
            definition = for_processor(definition, kernel.architecture)
        if is_without_entries:
            definition = _AT_ENTRY.sub(rf"\1 \2+{_PAST_SITE}", definition)
        theirs = answer(linux, definition)
        mine = answer(ours, definition)
        if is_without_entries and "Failed to register probe event" in theirs[1]:
            continue
        if not is_listed(release, definition, theirs[1]):
            tally.add(definition, theirs, mine, is_refused=bool(theirs[0]))
    return tally


def filters(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield events, and filters most parts of which are valid."""
    dice = random.Random(seed)
    for _ in range(count):
        terms = [
            "".join(map(dice.choice, (FIELDS, OPERATORS, VALUES)))
            for _ in range(dice.choice((1, 1, 1, 2, 3)))
        ]
        yield dice.choice(FILTERED), dice.choice((" && ", " || ", "&&", " ")).join(terms)


def filtered(mount: Mount, event: str, text: str) -> tuple[str, str, str]:
    """Return errno, filter file and error_log after a filter of an event."""
    path = f"/tracing/events/{event}/filter"
    write(mount, "/tracing/error_log", "", os.O_TRUNC)
    result = write(mount, path, text)
    return result, read(mount, path), TIME.sub("", read(mount, "/tracing/error_log"))


def compare_filters(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare both kernels' answers to random filters."""
    tally = Tally()
    have = {line.replace(":", "/") for line in read(linux, "/tracing/available_events").splitlines()}
    for event, text in filters(count, seed):
        if event not in have:
            continue
        theirs = filtered(linux, event, text)
        tally.add(f"{event}: {text}", theirs, filtered(ours, event, text), is_refused=bool(theirs[0]))
    return tally


def histogram(
    mount: Mount, command: str, path: str = "/tracing/events/sched/sched_switch"
) -> tuple[str, str, str, str]:
    """Return errno, trigger file, error_log and hist file after a hist trigger, which is removed again."""
    write(mount, "/tracing/error_log", "", os.O_TRUNC)
    result = write(mount, f"{path}/trigger", command)
    log = TIME.sub("", read(mount, "/tracing/error_log"))
    # Linux 7.2 shows this key in a form that no trigger file accepts.
    shown = read(mount, f"{path}/trigger").replace("common_cpu" * 2, "common_cpu")
    counted = read(mount, f"{path}/hist").replace("common_cpu" * 2, "common_cpu")
    # A trigger that is shown with a wrong sort key is removed only by its own command.
    shown_commands = [re.sub(r" \[\w+\]$", "", line) for line in shown.splitlines() if line[0] != "#"]
    for each in (command, *shown_commands):
        write(mount, f"{path}/trigger", f"!{each}")
    return result, shown, log, ENTRIES.sub("", counted)


def compare_histograms(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare both kernels' answers to random hist triggers, without the counts."""
    tally = Tally()
    if all(entry.name != "hist" for entry in linux.readdir("/tracing/events/sched/sched_switch")):
        print("the kernel was built without histograms")
        return tally
    dice, release = random.Random(seed), release_of(linux)
    for each in (linux, ours):
        write(each, "/tracing/synthetic_events", "asked_chain pid_t pid; unsigned long[] stack")
    for _ in range(count):
        command = f"hist:{dice.choice(HISTOGRAMS)}{dice.choice(ATTRIBUTES)}{dice.choice(ATTRIBUTES)}"
        theirs = histogram(linux, command)
        mine = histogram(ours, command)
        if not is_listed(release, command, theirs[2]):
            tally.add(command, theirs, mine, is_refused=bool(theirs[0]))
    for question in CHAIN_HISTOGRAMS:
        command = f"hist:{question}"
        path = "/tracing/events/synthetic/asked_chain"
        theirs = histogram(linux, command, path)
        mine = histogram(ours, command, path)
        if not is_listed(release, command, theirs[2]):
            tally.add(command, theirs, mine, is_refused=bool(theirs[0]))
    for each in (linux, ours):
        write(each, "/tracing/synthetic_events", "!asked_chain")
    return tally


def table_places(kernel: ProbedTables, text: range, *more: Iterable[int]) -> Iterator[list[int]]:
    """Yield, for each table that decides about probes, the addresses in a text that the table names."""
    tables: tuple[Iterable[int], ...] = (
        kernel.mcount,
        [code for code, *_ in kernel.jump_labels],
        [target for _, target, _ in kernel.jump_labels],
        [site for site, *_ in kernel.static_calls],
        kernel.bugs,
        [insn for insn, _ in kernel.ex_table],
        [fixup for _, fixup in kernel.ex_table],
        [start for start, *_ in kernel.blacklist],
        [end for _, end, _ in kernel.blacklist],
        *more,
    )
    for table in tables:
        found = sorted({addr for addr in table if addr in text})
        if found:
            yield found


def kernel_places(kernel: LinuxKernel, count: int, seed: int) -> Iterator[int]:
    """Yield addresses in a kernel's text."""
    symbols, text = kernel.kallsyms.symbols, range(*kernel.text)
    thunks = [symbol.address for symbol in symbols if symbol.name.startswith("__x86_indirect_thunk")]
    tables = [*table_places(kernel, text, kernel.return_sites, thunks)]
    return places(kernel, text, symbols, tables, count, seed, kernel.architecture)


def module_places(live: LiveImage[LinuxKernel], module: Module, count: int, seed: int) -> Iterator[int]:
    """Yield addresses in a module's text."""
    text = range(*module.text)
    return places(live, text, module.symbols, [*table_places(live, text)], count, seed)


def places(
    kernel: ProbedTables,
    text: range,
    symbols: Iterable[Symbol],
    tables: Sequence[Sequence[int]],
    count: int,
    seed: int,
    architecture: str = "x86_64",
) -> Iterator[int]:
    """Yield addresses in a text, most of which are boundaries of instructions.

    Half of the addresses are random, and the others are near addresses that a table names.
    """
    dice = random.Random(seed)
    arch = arch_named(architecture)
    starts = sorted({symbol.address for symbol in symbols if symbol.address in text})
    for number in range(count):
        named = dice.choice(tables[number // 2 % len(tables)]) if number % 2 else None
        at = max(bisect_right(starts, dice.choice(text) if named is None else named) - 1, 0)
        start, end = starts[at], (*starts, text.stop)[at + 1]
        size = min(end - start, 2000 if named is None else named - start + 16)
        boundaries = [*arch.instruction_boundaries(kernel.read(start, size), start)]
        if named is not None:
            boundaries = [addr for addr in boundaries if -12 < addr - named < 6] or [named]
        yield dice.choice(boundaries) + (dice.random() < 0.1)


def compare_places(
    linux: Mount,
    kernel: ProbedTables,
    places: Iterable[int],
    rules: ProbeRules,
    architecture: str = "x86_64",
    sites: Set[int] = frozenset(),
) -> Tally:
    """Compare the errnos of probes' definitions, and the lines of kprobes/list for armed probes.

    `kernel`: the kernel with its text as it runs. `sites`: the result of refused_sites(). If it is empty, the
    kernel calls probes on fentry sites through ftrace.
    """
    arch = arch_named(architecture)
    # Linux makes jumps only on x86_64.
    policy = arch.strategies.get("optprobe-linux")
    verdict = arch.probe_checker(kernel, policy, ftrace=not sites, rules=rules)
    tally, expected = Tally(), {}
    write(linux, "/tracing/kprobe_events", "", os.O_TRUNC)
    moved: dict[int, None] = {}
    for addr in places:
        where = kernel.kallsyms.lookup(addr)
        # A probe on a function's landing pad is placed behind it.
        moved[addr if where is None else verdict.function_entry(where, addr) or addr] = None
    for addr in moved:
        if kernel.read(addr, len(LONG_CALL)) == LONG_CALL:
            continue
        finding = verdict.check_traced(addr) or verdict.may_probe(addr)
        got = write(linux, "/tracing/kprobe_events", f"p:x{addr:x} {addr:#x}", os.O_APPEND)
        wanted = errno.EINVAL if addr in sites else finding.errno if finding else 0
        tally.add(
            f"{addr:#x} {finding}", got, errno.errorcode[wanted] if wanted else "", is_refused=bool(got)
        )
        if not finding and not got:
            outcome = verdict.optimized_region(addr)
            optimized = (
                "[FTRACE]"
                if addr in verdict.fentry
                else ""
                if isinstance(outcome, Rejection)
                else "[OPTIMIZED]"
            )
            expected[addr] = optimized, outcome
    write(linux, "/tracing/events/kprobes/enable", "1")
    guest_of(linux).tasks.idle(OPTIMIZING)
    lines = [line.split() for line in read(linux, "/kprobes/list").splitlines()]
    listed = {int(words[0], 16): words[-1] if words[-1][0] == "[" else "" for words in lines}
    for addr, (flag, outcome) in expected.items():
        length = 0 if isinstance(outcome, Rejection) else outcome.length
        # A jump doesn't cover another probe.
        wanted_flag = "" if any(addr + at in expected for at in range(1, length)) else flag
        tally.add(f"{addr:#x} {outcome}", listed.get(addr), wanted_flag, is_refused=False)
    write(linux, "/tracing/events/kprobes/enable", "0")
    write(linux, "/tracing/kprobe_events", "", os.O_TRUNC)
    return tally


def compare_modules(image: str, names: Iterable[str], count: int, seed: int, rules: ProbeRules) -> Tally:
    """Compare answers about places in loaded modules, of the kernel and of kprobefs in the same guest."""
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.guests.linux.boot_cache import started_with_kernel
    from emulated_kernel.vfs.core.node import Owner

    tasks, kernel = started_with_kernel(image, seed)
    engine = LinuxEngine(tasks, kernel)
    modules = ModuleFiles(Path(image), tasks.release)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False, lock=engine.lock)
    whole = Tally()
    for name in names:
        if write(linux, "/machine/modules", f"load {name}"):
            print(f"{name} can't be loaded")
            continue
        module = engine.live.find(name)
        assert module is not None
        tally = compare_places(linux, engine.live, module_places(engine.live, module, count, seed), rules)
        whole.compared += tally.compared
        whole.refused += tally.refused
        whole.differences += tally.differences
    linux.close()
    return whole


def compare_buffers(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare sizes of buffers and of their pages, and what remains of records, after random writes."""
    rng = random.Random(seed)
    tally = Tally()
    tops = ("/tracing", "/tracing/instances/sized")
    for mount in (linux, ours):
        mount.mkdir(CLIENT, tops[1], 0o755)
    for _ in range(count):
        top = rng.choice(tops)
        name, values = rng.choice(BUFFER_WRITES)
        value = rng.choice(values)
        asked = f"{top}/{name} {value}"
        answers = [buffer_answer(mount, top, name, value) for mount in (linux, ours)]
        tally.add(asked, *answers, is_refused=bool(answers[0][0]))
    for mount in (linux, ours):
        mount.rmdir(CLIENT, tops[1])
        write(mount, "/tracing/snapshot", "0")
        write(mount, "/tracing/buffer_subbuf_size_kb", "4")
        write(mount, "/tracing/buffer_size_kb", "1408")
    return tally


def buffer_answer(mount: Mount, top: str, name: str, value: str) -> tuple[str, ...]:
    """Write to a file of a trace array; return the errno, and the texts that the write may have changed."""
    outcome = write(mount, f"{top}/{name}", value, 0 if value else os.O_TRUNC)
    texts = [read(mount, f"{top}/{file}") for file in BUFFER_FILES]
    for file in ("trace", "snapshot"):
        lines = read(mount, f"{top}/{file}").splitlines()
        texts += [line.partition("mark_write: ")[2][:20] for line in lines if not line.startswith("#")]
    stats = read(mount, f"{top}/per_cpu/cpu0/stats").splitlines()
    if name == "buffer_subbuf_size_kb" and not outcome:
        # Linux still counts the removed records.
        write(mount, f"{top}/trace", "", os.O_TRUNC)
        write(mount, f"{top}/snapshot", "2")
        stats = []
    # The bytes depend on the time between records, which may need a record of their own.
    return outcome, *(line for line in stats if not re.search(r" ts:|^bytes:", line)), *texts


def recorded(mount: Mount | Mount, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Run a workload in scratch/; return the trace and kprobe_profile, without times."""
    write(mount, "/tracing/dynamic_events", "", os.O_TRUNC)
    for definition in lines:
        assert not write(mount, "/tracing/dynamic_events", definition, os.O_APPEND), definition
    assert not write(mount, "/tracing/events/k/enable", "1")
    for turn in range(8):
        handle = mount.create(CLIENT, f"/scratch/file{turn % 3}", 0o640, os.O_RDWR)
        mount.write(CLIENT, handle, bytes([65 + turn]) * (1 + 900 * turn), 0)
        mount.read(CLIENT, handle, 4000, 0)
        mount.release(handle)
        mount.unlink(CLIENT, f"/scratch/file{turn % 3}")
    assert not write(mount, "/tracing/events/k/enable", "0")
    lines = read(mount, "/tracing/trace").splitlines()
    profile = read(mount, "/kprobe_profile").splitlines()
    write(mount, "/tracing/dynamic_events", "", os.O_TRUNC)
    return [_unstamped(line) for line in lines if not line.startswith("#")], profile


def _unstamped(line: str) -> str:
    """Return a record without what is not compared; see STAMP. Put a compared preemption depth first."""
    depth = _DEPTH.search(line) if _HAS_DEPTH.search(line) else None
    return (f"{depth[1]} " if depth else "") + STAMP.sub(" ", line)


def recorded_definitions(engine: LinuxEngine, interface: Interface) -> list[str]:
    """Return the definitions of the probes of compare_records()."""
    kallsyms = engine.kernel.kallsyms
    start = kallsyms.lookup_name("shmem_write_end") or 0
    where = kallsyms.lookup(start)
    assert where is not None
    starts = [at - start for at in engine.kprobes.probe_checker.boundaries(where.symbol)]
    offsets = {name: min(at for at in starts if at >= least) for name, least in OFFSETS.items()}
    by_name: Iterable[str] = RECORDED_BY_NAME if InterfaceRule.BTF_ARGS in interface else ()
    if InterfaceRule.DENTRY_TYPES not in interface:
        by_name = (line for line in by_name if "%p" not in line)
    if InterfaceRule.FPROBE_EVENTS not in interface:
        by_name = (line for line in by_name if not line.startswith("f"))
    if InterfaceRule.TYPECASTS in interface:
        by_name = (*RECORDED_CASTS, *by_name)
    if engine.kernel.architecture == "riscv64":
        # Linux 7.2 saves no stack pointer there, and its own handler crashes.
        by_name = (line.replace(STACK_AT_RETURN, "") for line in by_name)
    recorded = (line.format(**offsets) for line in RECORDED)
    lines = [*(for_processor(line, engine.kernel.architecture) for line in recorded), *by_name]
    return [line for line in lines if "*" in line.split()[1] or kallsyms.count_name(_symbol(line)) == 1]


def _symbol(line: str) -> str:
    return re.split(r"[+%]", line.split()[1])[0]


def compare_records(linux: Mount, ours: Mount, lines: Sequence[str]) -> Tally:
    """Compare hits, misses and records of a kernel's own kprobes with those of kprobefs over this kernel."""
    tally = Tally()
    their_lines, their_profile = recorded(linux, lines)
    our_lines, our_profile = recorded(ours, lines)
    tally.add("kprobe_profile", their_profile, our_profile, is_refused=False)
    tally.add("records", len(their_lines), len(our_lines), is_refused=False)
    for theirs, mine in zip(their_lines, our_lines, strict=False):
        tally.add(theirs, theirs, mine, is_refused=False)
    return tally


def main() -> int:
    """Run the comparison that the command line selects; return the exit status."""
    from emulated_kernel.guests.common.host_processes import ProcessWatch
    from emulated_kernel.guests.linux.boot_cache import started_with_kernel
    from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.vfs.core.node import Owner

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", help="a vmlinuz, a vmlinux, a Debian package, or host")
    parser.add_argument("--count", type=int, default=500, metavar="N", help="questions of each kind")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--profile", default=DEFAULT, metavar="NAME", help="the profile of our engine, or kernel"
    )
    parser.add_argument("--only", metavar="WHAT", help="compare only what begins with this")
    options = parser.parse_args()
    tasks, kernel = started_with_kernel(options.image, options.seed)
    if options.profile == KERNEL_INTERFACE:
        profile = profile_of(kernel)
        interface = detect_interface(kernel)
    else:
        profile = profile_named(options.profile)
        interface = interface_named(profile.interface)
    rules = probe_rules_named(profile.probe_rules)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    engine = LinuxEngine(*started_with_kernel(options.image, options.seed), profile)
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    is_perfect = True
    count = options.count
    seed = options.seed
    compared: dict[str, Callable[[], Tally]] = {
        "places": lambda: compare_places(linux, kernel, kernel_places(kernel, count, seed), rules),
        "places in modules": lambda: compare_modules(options.image, MODULES, count, seed, rules),
        "definitions": lambda: compare_definitions(
            linux, Kernel(profile=profile).mount(), count, seed, LINUX_6_1
        ),
        "definitions over it": lambda: compare_definitions(linux, ours, count, seed + 1, interface),
        "filters over it": lambda: compare_filters(linux, ours, count, seed),
        "histograms over it": lambda: compare_histograms(linux, ours, count, seed),
        "buffers over it": lambda: compare_buffers(linux, ours, count, seed),
        "records over it": lambda: compare_records(linux, ours, recorded_definitions(engine, interface)),
    }
    if options.profile == KERNEL_INTERFACE:
        # Only a named profile has an interface without a distribution's kernel.
        del compared["definitions"]
    if InterfaceRule.SUBBUF_SIZE not in interface:
        del compared["buffers over it"]
    for what, compare in compared.items():
        if not what.startswith(options.only or ""):
            continue
        tally = compare()
        print(f"{what}: {tally.compared} answers, {tally.refused} refusals, {len(tally.differences)} differ")
        print("".join(f"{difference}\n" for difference in tally.differences[:20]), end="")
        is_perfect = is_perfect and not tally.differences
    return not is_perfect


if __name__ == "__main__":
    sys.exit(main())
