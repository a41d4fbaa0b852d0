"""Create and remove clients, files, instances, modules and probes of a real kernel.

python -m stress.linux.churn
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES
from stress.churn.session import files_come_and_go, resident_bytes
from tests.guests.builtin.conftest import ScriptedWatch
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import guest_of
from tests.guests.linux.probing import DEFAULT_MODE, IS_ARM, IS_RISCV, MODES, engine, kernel
from tests.guests.linux.rewind import Rewind

SHELL = Client(4500, 0, 0)
WORKER = Client(4501, 1000, 1000)
FIRST_CHILD = 5000
CHILDREN = 20_000
EVENTS = "/tracing/events/kprobes"
COMPLAINT = re.compile(r"BUG|WARN|Oops|Call Trace|cut here")
BEHIND_SITE = 8 if IS_RISCV or IS_ARM else 5
"""Offset in a function of the instruction after its ftrace site."""
ENTRIES = "p:a vfs_read count=$arg3 comm=$comm\nr:b do_sys_openat2 $retval\np:d {}\n"


GROWTH = {"guest": 4 << 20, "resident": 24 << 20}
"""Name of a size -> maximum growth in bytes since the first sample."""
SAMPLES = 30
"""Number of samples that are taken."""


@dataclass(frozen=True)
class Sample:
    """Resources that the kernel and its process use at the end of a cycle."""

    cycle: int
    seconds: float
    counts: dict[str, int]
    """Name of a resource -> its count, which must be the same after each cycle."""
    sizes: dict[str, int]
    """Name of a size -> number of bytes, which may grow by the limit in GROWTH."""


class Session:
    """A mount of Debian's kernel, and the steps of a cycle; `name` is one of mount_options.KPROBES."""

    def __init__(self, name: str) -> None:
        self.watch = ScriptedWatch(comms={SHELL.pid: "shell", WORKER.pid: "worker"})
        self.cycles = 0
        self.tasks = debian_kernel.tasks()
        self.has_kernel_kprobes = name == KERNEL_KPROBES
        owner = Owner(0, 0)
        modules = debian_kernel.modules(self.tasks.release)
        if self.has_kernel_kprobes:
            self.mount: Mount = native_mount(self.tasks, self.watch, owner, modules, is_tracefs=False)
        else:
            probing = engine(MODES[DEFAULT_MODE])
            self.tasks = probing.tasks
            self.mount = probed_mount(probing, self.watch, owner, modules, is_tracefs=False)
        self.definitions = definitions(self.has_kernel_kprobes)
        self.shell, self.worker = Files(self.mount, SHELL), Files(self.mount, WORKER)
        self._written = Rewind(self.tasks.machine.memory.ram, bool)

    def cycle(self) -> None:
        """Run all steps once. Raises: KernelError if a request fails that must succeed."""
        shell = self.shell
        # With kprobefs's own kprobes, other steps are so fast that loading modules would dominate a cycle.
        with_modules = self.has_kernel_kprobes or not self.cycles % 5
        if with_modules:
            shell.write("/machine/modules", "load dm-zero\n")
            shell.write("/kprobe_events", f"p:e dm_zero:zero_map+{BEHIND_SITE}\n", os.O_WRONLY | os.O_APPEND)
        if self.has_kernel_kprobes:
            self.mount.mkdir(SHELL, "/tracing/instances/mine", 0o755)
            shell.write("/tracing/instances/mine/events/sched/sched_switch/enable", "1")
        shell.write("/kprobe_events", self.definitions, os.O_WRONLY | os.O_APPEND)
        shell.write(f"{EVENTS}/enable", "1")
        files_come_and_go(self.mount, SHELL, WORKER)
        self.forks()
        shell.write(f"{EVENTS}/enable", "0")
        # Read the trace only after disabling the events, because each read would add records.
        shell.read("/tracing/trace")
        shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
        shell.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
        if self.has_kernel_kprobes:
            shell.write("/tracing/instances/mine/events/sched/sched_switch/enable", "0")
            self.mount.rmdir(SHELL, "/tracing/instances/mine")
        for module in ("dm_zero", "dm_mod") if with_modules else ():
            shell.write("/machine/modules", f"unload {module}")
        self.cycles += 1

    def forks(self) -> None:
        """Simulate processes of the host that fork, use the mount and exit."""
        for number in range(3):
            pid = FIRST_CHILD + (3 * self.cycles + number) % CHILDREN
            self.watch.comms[pid] = "child"
            self.watch.pending_forks.append(Fork(pid, SHELL.pid, "child", 0, 0, alive=True))
            Files(self.mount, Client(pid, 0, 0)).read("/kprobe_profile")
            self.watch.pending_exits.append(pid)
            del self.watch.comms[pid]
        self.watch.followed.clear()
        self.shell.read("/kprobe_profile")

    def sample(self, seconds: float) -> Sample:
        """Return a sample, after the guest has had time for delayed frees.

        `seconds`: seconds since the start, which are noted in the sample.
        """
        self.tasks.idle(2_000_000)
        written = len(self._written.written()) * 4096
        counts = {
            "tasks": len(self.tasks.table.by_address),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "complaints": len(COMPLAINT.findall(self.shell.read("/machine/dmesg"))),
            "probes": len(self.shell.read("/kprobes/list").splitlines()),
        }
        sizes = {"guest": self._used(), "resident": resident_bytes() - written}
        return Sample(self.cycles, seconds, counts, sizes)

    def _used(self) -> int:
        """Return the bytes of the guest's memory that are in use and cannot be reclaimed."""
        text = guest_of(self.mount).syscalls.read_all("/proc/meminfo").decode()
        found = {name: int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
        return found["MemTotal"] - found["MemAvailable"] << 10


def definitions(has_kernel_kprobes: bool) -> str:
    """Return the definitions of the events; kprobes of riscv64 kernels cannot be at function entries."""
    inside = f"p:c vfs_write+{BEHIND_SITE}\n"
    if IS_RISCV and has_kernel_kprobes:
        return inside
    names = "kmem_cache_alloc", "kmem_cache_alloc_noprof"
    return ENTRIES.format(next(filter(kernel().kallsyms.lookup_name, names))) + inside


def churn(session: Session, seconds: float, warm_up: int = 20) -> Iterator[Sample]:
    """Run cycles for `seconds` seconds, and yield about SAMPLES samples, at least two.

    The first sample comes after `warm_up` cycles.
    """
    start, taken = time.monotonic(), 0
    while (now := time.monotonic() - start) < seconds or taken < 2:
        session.cycle()
        if session.cycles >= warm_up * (taken + 1) and now >= seconds * (taken + 1) / SAMPLES:
            gc.collect()
            taken += 1
            yield session.sample(now)


def grown(first: Sample, last: Sample) -> list[str]:
    """Return a line for each count that has changed, and each size that has grown by more than GROWTH."""
    faults = [
        f"{name}: {first.counts[name]}, then {n}"
        for name, n in last.counts.items()
        if n != first.counts[name]
    ]
    return faults + [
        f"{name}: {first.sizes[name]} bytes, then {size}"
        for name, size in last.sizes.items()
        if size - first.sizes[name] > GROWTH[name]
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if a count or size has grown, or if the kernel has logged more complaints."""
    parser = argparse.ArgumentParser(prog="python -m stress.linux.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kprobes", choices=KPROBES, default=KERNEL_KPROBES)
    options = parser.parse_args(argv)
    session, samples = Session(options.kprobes), list[Sample]()
    for sample in churn(session, options.minutes * 60):
        samples.append(sample)
        print(f"{sample.seconds:7.1f} s {sample.cycle:7} cycles", sample.counts, sample.sizes, flush=True)
    session.mount.close()
    faults = grown(samples[0], samples[-1])
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
