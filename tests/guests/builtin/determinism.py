"""Print scripted sessions with a kernel as JSON.

python -m tests.guests.builtin.determinism RUNS ARCH,SEED,CPUS...

For each of the given kernels, the program prints the digest of every run, and the whole text of the last run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress

from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import ScriptedWatch

SHELL, WORKER = Client(500, 0, 0), Client(501, 1000, 1000)
SHOWN = (
    "/tracing/trace",
    "/kprobe_profile",
    "/kprobes/list",
    "/tracing/events/kprobes/reads/hist",
    "/tracing/instances/other/trace",
    "/machine/tasks",
    "/machine/cpus",
    "/machine/meminfo",
    "/machine/clock",
    "/machine/modules",
    "/machine/call",
    "/machine/dmesg",
)


class Session:
    """Requests of two processes in a fixed order."""

    def __init__(self, arch: str, seed: int, cpus: int) -> None:
        self.watch = ScriptedWatch(comms={SHELL.pid: "shell", WORKER.pid: "worker"})
        self.kernel = Kernel(MachineConfig(arch=arch, seed=seed, cpus=cpus, pauses=False), self.watch)
        # The session shows the pid of the daemon, which must not differ from run to run.
        self.kernel.guest.processes._own_pid = 400
        self.mount: Mount = self.kernel.mount()

    def write(self, path: str, text: str, client: Client = SHELL) -> None:
        """Write `text` with one write(2), and ignore an error of the kernel."""
        handle = self.mount.open(client, path, os.O_WRONLY | os.O_APPEND)
        with suppress(KernelError):
            self.mount.write(client, handle, text.encode(), 0)
        self.mount.release(handle)

    def read(self, path: str, client: Client = SHELL) -> bytes:
        handle = self.mount.open(client, path, os.O_RDONLY)
        data = b""
        while more := self.mount.read(client, handle, 1 << 16, len(data)):
            data += more
        self.mount.release(handle)
        return data

    def store(self, path: str, data: bytes) -> None:
        handle = self.mount.create(WORKER, path, 0o644, os.O_WRONLY)
        self.mount.write(WORKER, handle, data, 0)
        self.mount.release(handle)

    def fork(self, pid: int) -> None:
        """Let the shell fork a child with the pid `pid`.

        The child executes a program and ends before the next request.
        """
        self.watch.comms[pid] = "child"
        self.watch.pending_forks.append(Fork(pid, SHELL.pid, "child", 0, 0, alive=True))
        self.read("/machine/version")
        self.watch.pending_exits.append(pid)
        self.read("/machine/version", WORKER)

    def run(self) -> str:
        """Run the session, and return the final contents of the files SHOWN."""
        self.define()
        for number in range(4):
            self.store(f"/scratch/f{number}", b"x" * 3000 * number)
            self.read(f"/scratch/f{number}", WORKER)
            self.fork(600 + number)
            self.write("/machine/call", 'strlen "a string"\nktgt_add 3 4\nstrlen 0\nnr_free_pages')
        self.mount.rename(WORKER, "/scratch/f1", "/scratch/g")
        self.mount.unlink(WORKER, "/scratch/f2")
        self.write("/machine/modules", "unload ktgt")
        return "".join(f"== {path}\n{self.read(path).decode()}" for path in SHOWN)

    def define(self) -> None:
        """Define probes of all kinds, triggers, an instance with static events, and a function tracer."""
        self.write("/machine/modules", "load ktgt")
        self.write(
            "/kprobe_events",
            "p:reads vfs_read count=$arg3 comm=$comm\nr:opens do_sys_openat2 $retval\n"
            "p:body vfs_write+5\np:names strlen +0($arg1):string\np:mod ktgt:ktgt_add a=$arg1\n",
        )
        self.write("/tracing/events/kprobes/reads/trigger", "hist:keys=common_pid,count")
        self.write("/tracing/events/kprobes/enable", "1")
        self.mount.mkdir(SHELL, "/tracing/instances/other", 0o755)
        for event in ("sched", "kmem", "timer", "signal"):
            self.write(f"/tracing/instances/other/events/{event}/enable", "1")
        self.write("/tracing/instances/other/set_ftrace_filter", "vfs_*")
        self.write("/tracing/instances/other/current_tracer", "function")


def main() -> None:
    """Run the sessions that the command line selects, and print a JSON object: kernel -> digests and text."""
    runs, *kernels = sys.argv[1:]
    print(json.dumps({kernel: repeated(int(runs), kernel) for kernel in kernels}))


def repeated(runs: int, kernel: str) -> tuple[list[str], str]:
    """Run the session `runs` times, and return the digest of each run and the text of the last run."""
    arch, seed, cpus = kernel.split(",")
    digests = []
    text = ""
    for _ in range(runs):
        session = Session(arch, int(seed), int(cpus))
        with session.kernel:
            text = session.run()
        digests.append(hashlib.sha256(text.encode()).hexdigest())
    return digests, text


if __name__ == "__main__":
    main()
