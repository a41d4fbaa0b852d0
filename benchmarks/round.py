"""CPU time of open, read and close in scratch/ over a distribution's kernel: FUSE, Python and guest.

The sum is measured with a real mount, once by the absolute path and once from the file's directory. The share
of FUSE is measured with a mount whose methods do nothing, through the same adapter. For the share below FUSE,
the benchmark calls the methods of Mount directly. This share includes the runs of the emulator. Client and
daemon share a CPU, and the times of both count.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from common import Distribution, arguments, mounted, report, steady

from emulated_kernel.guests.common.host_processes import HostProcesses
from emulated_kernel.guests.linux.boot_cache import started_with_kernel
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.vfs.core.client import Client, Stat, StatFs
from emulated_kernel.vfs.core.node import Owner
from kprobefs.fuse.operations import FuseOptions, Server

_CONTENT = b"hello\n"
_PR_SET_PDEATHSIG = 1


class Nothing:
    """Mount of one directory with one file; it implements only the methods that a round calls."""

    lasting = ("scratch",)
    clients_own = ("scratch",)
    acting = ()

    def __init__(self) -> None:
        self.lock = ControlLock()
        self._directory = Stat(1, stat.S_IFDIR | 0o755, 2, 0, 0)
        self._file = Stat(2, stat.S_IFREG | 0o644, 1, 0, 0, len(_CONTENT))

    def getattr(self, path: str, _client: object = None) -> Stat:
        return self._file if path.endswith("/file") else self._directory

    def is_control(self, _path: str) -> bool:
        return False

    def writes_at_once(self, _handle: int) -> bool:
        return False

    def name_lasts(self, _path: str) -> bool:
        return False

    def at_names_end(self, _action: object) -> None:
        """Do nothing, because names get no validity."""

    def chdir(self, _client: Client, _path: str) -> None:
        """Accept that a client enters the directory."""

    def open(self, _client: Client, _path: str, _flags: int) -> int:
        return 1

    def is_stream(self, _handle: int) -> bool:
        return False

    def set_status_flags(self, _handle: int, _flags: int) -> None:
        """Ignore the flags."""

    def read(self, _client: Client, _handle: int, _size: int, _offset: int) -> bytes:
        return _CONTENT

    read_page = read

    def release(self, _handle: int) -> None:
        """Do nothing, because an open file has no state."""

    def statfs(self, _path: str) -> StatFs:
        return StatFs()


def cpu_time(pid: int) -> float:
    """Return the CPU time of all threads of a process in microseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1000


def rounds(path: str, daemon: int, batches: int, size: int) -> tuple[float, ...]:
    """Return for each batch the mean CPU time of a round, client and daemon together, in microseconds.

    A first batch warms up and is not counted.
    """
    open_, read, close = os.open, os.read, os.close
    samples = []
    for _ in range(batches + 1):
        before = cpu_time(daemon) + time.thread_time_ns() / 1000
        for _ in range(size):
            fd = open_(path, os.O_RDONLY)
            read(fd, 4096)
            close(fd)
        samples.append((cpu_time(daemon) + time.thread_time_ns() / 1000 - before) / size)
    return tuple(samples[1:])


def by_path_and_name(directory: Path, daemon: int, batches: int, size: int) -> list[tuple[float, ...]]:
    """Measure rounds by the absolute path, and then rounds by the name from within the file's directory."""
    by_path = rounds(os.fspath(directory / "file"), daemon, batches, size)
    with chdir(directory):
        return [by_path, rounds("file", daemon, batches, size)]


def nothing_served(batches: int, size: int) -> list[tuple[float, ...]]:
    """Measure rounds over a mount whose methods do nothing."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-") as place:
        daemon = os.fork()
        if not daemon:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            Server(Nothing(), FuseOptions("round")).serve(place, lambda: None)  # type: ignore[arg-type]
            os._exit(0)
        while not os.path.ismount(place):
            time.sleep(0.01)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        for task in Path(f"/proc/{daemon}/task").iterdir():
            os.sched_setaffinity(int(task.name), {min(before)})
        try:
            return by_path_and_name(Path(place, "scratch"), daemon, batches, size)
        finally:
            os.sched_setaffinity(0, before)
            subprocess.run(["umount", place], check=True)
            os.waitpid(daemon, 0)


def below_fuse(image: str, batches: int, size: int) -> list[tuple[float, ...]]:
    """Measure the same requests as calls of a mount's methods, and the runs of the emulator within them."""
    linux = LinuxEngine(*started_with_kernel(image, 1))
    mount = probed_mount(linux, HostProcesses(), Owner(0, 0), is_tracefs=False)
    client = Client(os.getpid(), 0, 0)
    mount.release(mount.create(client, "/scratch/file", 0o644, os.O_WRONLY))

    def done() -> None:
        handle = mount.open(client, "/scratch/file", os.O_RDONLY)
        mount.read(client, handle, 4096, 0)
        mount.release(handle)

    whole = _timed(done, batches, size)
    engine = linux.tasks.machine.engine
    run = engine.start
    spent = 0

    def timed(address: int) -> int:
        nonlocal spent
        before = time.thread_time_ns()
        error = run(address)
        spent += time.thread_time_ns() - before
        return error

    # The two calls of the clock add 0.3 us to each run.
    engine.start = timed  # type: ignore[method-assign]
    inside = []
    for _ in range(batches):
        spent = 0
        for _ in range(size):
            done()
        inside.append(spent / size / 1000)
    return [whole, tuple(inside)]


def _timed(function: Callable[[], None], batches: int, size: int) -> tuple[float, ...]:
    samples = []
    for _ in range(batches + 1):
        before = time.thread_time_ns()
        for _ in range(size):
            function()
        samples.append((time.thread_time_ns() - before) / size / 1000)
    return tuple(samples[1:])


def whole(options: argparse.Namespace) -> list[tuple[float, ...]]:
    """Measure rounds over a real mount."""
    with mounted(options, "--image", options.image) as mount:
        (mount.path / "scratch/file").write_bytes(_CONTENT)
        return by_path_and_name(mount.path / "scratch", mount.daemon, options.batches, options.size)


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--image", default="host", help="a vmlinuz or Debian package (default: host)")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--size", type=int, default=100, help="rounds a batch")
    options = parser.parse_args()
    names = (
        "all, by absolute path", "all, from its directory", "FUSE alone, by path", "FUSE alone, by name",
        "below FUSE", "of that the emulator's runs",
    )  # fmt: skip

    def measure() -> list[Distribution]:
        found = whole(options)
        found += nothing_served(options.batches, options.size)
        found += below_fuse(options.image, options.batches, options.size)
        return [Distribution(name, "us", each) for name, each in zip(names, found, strict=True)]

    report(steady(options, measure), options)


if __name__ == "__main__":
    main()
