"""Cycles of creation and removal of tasks, files, pipes, connections, modules and probes in one kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from emulated_kernel.guests.builtin.workloads.workload import BackgroundWorkload, kinds_of
from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from stress.fuzz.report import answered_in_time
from tests.guests.builtin.conftest import ScriptedWatch
from tests.kprobes.boundaries import all_boundaries

SHELL = Client(500, 0, 0)
WORKER = Client(501, 1000, 1000)
LOAD_PID = 70_000
FIRST_CHILD = 1000
CHILDREN = 30_000
ROUNDS = 5
"""Number of rounds of each kind of load in a cycle."""
MODULES = ("ktgt", "twins", "counter_user")
EVENTS = "/tracing/events/kprobes"
MANY = "many"
"""Group of the events of Session.many()."""
AT_ONCE = 500
"""Number of events of the group MANY that one write defines."""
OOPS_EVERY = 10
"""In one of this many cycles, an oops kills a task."""
BEHIND_ENTRY = {"riscv64": 8, "riscv64i": 8}
"""Architecture -> size in bytes of the nops at a function's entry; 5 on x86."""
DEFINITIONS = (
    "p:a vfs_read count=$arg3 comm=$comm\n"
    "r:b do_sys_openat2 $retval\n"
    "p:c vfs_write+{body}\n"
    "p:d kmem_cache_alloc\n"
    "p:e ktgt:ktgt_add a=$arg1\n"
)


@dataclass(frozen=True)
class Sample:
    """Resources that a kernel and its process use at the end of a cycle."""

    cycle: int
    seconds: float
    free_pages: int
    """Number of free pages in the guest's page allocator."""
    objects: int
    """Number of objects in the guest's slab caches."""
    tasks: int
    host_bytes: int
    """Bytes of the machine's memory that the host uses, for module text and ring buffers."""
    resident: int
    """Resident bytes of this process, without the machine's RAM."""
    descriptors: int

    @property
    def counts(self) -> dict[str, int]:
        """Counts that must be the same after each cycle."""
        names = ("free_pages", "objects", "tasks", "descriptors")
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes that may change within the limits of GROWTH."""
        return {"host_bytes": self.host_bytes, "resident": self.resident}


class Session:
    """A kernel with its mount, and the steps of a cycle."""

    def __init__(self, arch: str = "x86_64", cpus: int = 1, probes: int = 0) -> None:
        self.watch = ScriptedWatch(comms={SHELL.pid: "shell", WORKER.pid: "worker"})
        self.kernel = Kernel(MachineConfig(arch=arch, cpus=cpus), self.watch)
        self.mount = self.kernel.mount()
        self.cycles = 0
        self._body = BEHIND_ENTRY.get(arch, 5)
        self._loads = [
            BackgroundWorkload(self.kernel.guest, kind, LOAD_PID + number)
            for number, kind in enumerate(kinds_of(self.kernel.guest))
        ]
        self.places = [*islice(places(self, probes), probes)] if probes else []
        """Places of the probes of many(), as SYMBOL+OFFSET; empty if there are none."""

    def cycle(self) -> None:
        """Run all steps once. Raises: KernelError if a request fails that must succeed."""
        self.modules("load")
        self.write("/kprobe_events", DEFINITIONS.format(body=self._body))
        self.write(f"{EVENTS}/enable", "1")
        self.loads()
        files_come_and_go(self.mount, SHELL, WORKER)
        self.forks()
        self.write("/machine/call", "ktgt_add 1 2")
        self.read("/tracing/trace")
        if self.places:
            self.many()
        self.write(f"{EVENTS}/enable", "0")
        self.write("/kprobe_events", "".join(f"-:{name}\n" for name in "abcde"))
        self.mount.release(self.mount.open(SHELL, "/tracing/trace", os.O_WRONLY | os.O_TRUNC))
        self.modules("unload")
        if self.cycles % OOPS_EVERY == 0:
            with suppress(KernelError):
                self.write("/machine/call", "strlen 0")
            self.write("/machine/call", "strlen 'the next task'")
        self.settle()
        self.cycles += 1

    def many(self) -> None:
        """Define, arm, hit, disarm and remove the probes at `places`, in addition to those of DEFINITIONS."""
        definitions = [f"p:{MANY}/p{number} {place}\n" for number, place in enumerate(self.places)]
        for first in range(0, len(definitions), AT_ONCE):
            self.write("/kprobe_events", "".join(definitions[first : first + AT_ONCE]))
        self.write(f"/tracing/events/{MANY}/enable", "1")
        self.loads()
        self.settle()
        files_come_and_go(self.mount, SHELL, WORKER)
        self.write(f"/tracing/events/{MANY}/enable", "0")
        for first in range(0, len(definitions), AT_ONCE):
            gone = range(first, min(first + AT_ONCE, len(definitions)))
            self.write("/kprobe_events", "".join(f"-:{MANY}/p{number}\n" for number in gone))

    def modules(self, verb: str) -> None:
        """Load the modules in order if `verb` is "load"; if it is "unload", unload them in reverse order.

        Loading also tries a module whose init function fails; it must not leave anything.
        """
        if verb == "load":
            for name in MODULES:
                self.write("/machine/modules", f"load {name}")
            with suppress(KernelError):
                self.write("/machine/modules", "load initfail")
        else:
            for name in (*reversed(MODULES), "counter"):
                self.write("/machine/modules", f"unload {name}")

    def loads(self) -> None:
        for load in self._loads:
            with self.kernel.lock:
                for _ in range(ROUNDS):
                    load.round()
                load.end()

    def forks(self) -> None:
        """Simulate processes of the host that fork, use the mount and exit."""
        for number in range(3):
            pid = FIRST_CHILD + (3 * self.cycles + number) % CHILDREN
            self.watch.comms[pid] = "child"
            self.watch.pending_forks.append(Fork(pid, SHELL.pid, "child", 0, 0, alive=True))
            self.read("/machine/version", Client(pid, 0, 0))
            self.watch.pending_exits.append(pid)
            del self.watch.comms[pid]
        self.watch.followed.clear()
        self.read("/machine/version")

    def settle(self) -> None:
        """Run the guest until pending work is done: code is freed some jiffies after its last use."""
        for _ in range(12):
            self.read("/machine/version")

    def write(self, path: str, text: str) -> None:
        with answered_in_time(path):
            handle = self.mount.open(SHELL, path, os.O_WRONLY | os.O_APPEND)
            try:
                self.mount.write(SHELL, handle, text.encode(), 0)
            finally:
                self.mount.release(handle)

    def read(self, path: str, client: Client = SHELL) -> bytes:
        with answered_in_time(path):
            handle = self.mount.open(client, path, os.O_RDONLY)
            data = b"".join(self._pieces(client, handle))
            self.mount.release(handle)
        return data

    def _pieces(self, client: Client, handle: int) -> Iterator[bytes]:
        at = 0
        while more := self.mount.read(client, handle, 1 << 16, at):
            at += len(more)
            yield more

    def sample(self, seconds: float) -> Sample:
        kernel = self.kernel
        info = kernel.guest.kernel.memory()
        return Sample(
            cycle=self.cycles,
            seconds=seconds,
            free_pages=info.free,
            objects=sum(cache.objects for cache in kernel.guest.kernel.slabs()),
            tasks=len(list(kernel.guest.processes)),
            host_bytes=kernel.machine.memory.host_pages.used,
            resident=resident_bytes(),
            descriptors=len(os.listdir("/proc/self/fd")),
        )


def files_come_and_go(mount: Mount, owner: Client, worker: Client) -> None:
    """Create, grow, truncate, link, rename and remove a worker's files in the owner's directory."""
    mount.mkdir(owner, "/scratch/d", 0o777)
    for number in range(3):
        path = f"/scratch/d/{number}"
        handle = mount.create(worker, path, 0o644, os.O_RDWR)
        mount.write(worker, handle, bytes(30_000 * number), 0)
        mount.read(worker, handle, 1000, 10)
        mount.release(handle)
        mount.truncate(worker, path, 100)
    mount.symlink(worker, "/scratch/d/s", "0")
    mount.rename(worker, "/scratch/d/1", "/scratch/d/2")
    for name, *_ in mount.readdir("/scratch/d")[2:]:
        mount.unlink(worker, f"/scratch/d/{name}")
    mount.rmdir(owner, "/scratch/d")


def places(session: Session, count: int) -> Iterator[str]:
    """Yield about `count` places SYMBOL+OFFSET at which a probe can be registered.

    They are spread over the whole text.
    """
    kernel = session.kernel
    probeable = [b for b in all_boundaries(kernel.image) if b.refusal is None]
    for boundary in probeable[:: max(1, len(probeable) // (2 * count))]:
        where = kernel.image.kallsyms.lookup(boundary.addr)
        assert where is not None
        place = f"{where.symbol.name}+{where.offset}"
        with suppress(KernelError):
            session.write("/kprobe_events", f"p:tried {place}\n")
            session.write("/kprobe_events", "-:tried\n")
            yield place


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process in bytes; it excludes the machine's RAM."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10
