"""Probes on a workload, and the comparison of their records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.mount_files import CLIENT, read, write
from tests.oracle.inside.registers import for_processor
from tests.oracle.inside.tally import Tally

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
"""Word in a definition -> minimum offset in shmem_write_end of the instruction that replaces the word."""
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

Linux knows the name only after the next task switch. The context depends on whether the optimizer has already
written the probe's jump.
"""
_HAS_DEPTH = re.compile(r"\d: (?:begun|read|made|n3|n[5-8]): ")
"""Pattern of records of returns and fprobes, whose preemption depth does not depend on the way of a hit."""
_DEPTH = re.compile(r" [^ ]*([^ ]{2}) +\d+\.\d{6}:")


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
    """Return a record without the parts that are not compared (see STAMP).

    If the preemption depth is compared, put this depth first.
    """
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
        # On RISC-V, Linux 7.2 saves no stack pointer at a return, and its own handler crashes.
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
