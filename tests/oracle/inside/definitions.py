"""Random definitions of probes, and the comparison of the answers to them."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator

from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.mount_files import read, release_of, write
from tests.oracle.inside.places import refuses_entries
from tests.oracle.inside.registers import for_processor
from tests.oracle.inside.tally import Tally, is_listed

TIME = re.compile(r"^\[ *\d+\.\d+\] ", re.MULTILINE)
ADDRESS = re.compile(r"0x(?:\(____ptrval____\)|[0-9a-f]{16})")
"""Pattern of addresses, since Linux prints pointers hashed or not at all."""
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
_AT_ENTRY = re.compile(r"^(p\S*) (vfs_read|vfs_write)(?= |$)")
_PAST_SITE = 8
"""Offset of the first instruction after a site of ftrace, in kernels for RISC-V."""


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


def answer(mount: Mount | Mount, definition: str) -> tuple[str, str, str]:
    """Write a definition; return the errno, error_log and dynamic_events."""
    is_general = definition.startswith(("e", "f", "t"))
    file = "/tracing/dynamic_events" if is_general else "/tracing/kprobe_events"
    for path in ("/tracing/dynamic_events", "/tracing/error_log"):
        write(mount, path, "", os.O_TRUNC)
    result = write(mount, file, definition, os.O_APPEND)
    log = TIME.sub("", read(mount, "/tracing/error_log"))
    # Up to 6.1, Linux spells a word in this way.
    events = ADDRESS.sub("(address)", read(mount, "/tracing/dynamic_events"))
    return result, log.replace("$-valiable", "$-variable"), events


def compare_definitions(
    linux: Mount,
    ours: Mount,
    count: int,
    seed: int,
    interface: Interface,
    kernel: LinuxKernel | None = None,
) -> Tally:
    """Compare both kernels' answers to random definitions.

    `kernel`: the kernel that runs, or None for an x86_64 kernel. If it refuses probes at function entries,
    definitions name places inside of functions. Its refusals to register other probes at entries are not
    compared.
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
