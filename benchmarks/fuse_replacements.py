"""CPU time of requests if one of kprobefs's replacements for parts of fusepy and libfuse is turned off.

Each variant has a mount of its own, which shows the built-in kernel. For scratch, reads of 128 KiB and lists
of names, the mount shows files that take no time instead. Client and daemons share a CPU and take turns.
The table shows the CPU time of a variant divided by the time in the same turn with all replacements. If the
ratio is above 1, the replacement is a gain. The second row shows the noise.
"""

# The variants replace parts of the program by others, which mypy would reject.
# mypy: disable-error-code="assignment, attr-defined, misc, unused-ignore"

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import stat
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from round import Nothing, cpu_time

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat
from kprobefs.fuse import libfuse, operations
from kprobefs.fuse.protocol import FUSE_READ, FUSE_RELEASE
from kprobefs.measure.host_load import HostLoad

_PR_SET_PDEATHSIG = 1
_PROBE = b"p:reads vfs_read\n"
_FILE = "kprobes/stats/kprobes/reads/hits"
_fuse: Any = libfuse.fuse


class Files(Nothing):
    """Mount of files that take no time, and of a directory with 5000 names."""

    _entries = tuple(DirEntry(f"name{number}", stat.S_IFREG, number + 5) for number in range(5000))

    def opendir(self, _client: Client, _path: str) -> int:
        return 1

    def getdents(self, _client: Client, _handle: int, start: int) -> Iterable[DirEntry]:
        return self._entries[start:]

    def fgetattr(self, _handle: int, _client: object = None) -> Stat:
        return self.getattr("/file")

    def read(self, _client: Client, _handle: int, size: int, _offset: int) -> bytes:
        return bytes(size)

    read_page = read


def _operations_without(*names: str) -> None:
    """Turn off kprobefs's argument types of the operations `names`: use fusepy's pointers to structures."""

    class Operations(ctypes.Structure):
        _fields_ = [
            (name, _forms[name] if name in names else form, *bits)
            for name, form, *bits in libfuse.FuseOperations._fields_
        ]

    libfuse.FuseOperations = Operations  # type: ignore[misc]


_forms = {name: form for name, form, *_ in _fuse.fuse_operations._fields_}


def stat_bytes() -> None:
    """Turn off the fast packing of a struct stat: set the members of the structure by their names."""

    def fill(session: Any, buffer: Any, *arguments: object) -> int:
        found = session.operations.getattr(*arguments)._asdict()
        members = {f"st_{name.removesuffix('_ns')}": value for name, value in found.items()}
        ctypes.memset(buffer, 0, ctypes.sizeof(_fuse.c_stat))
        _fuse.set_st_attrs(buffer.contents, members, use_ns=True)
        return 0

    def getattr_(session: Any, path: bytes, buffer: Any) -> int:
        return fill(session, buffer, path.decode(session.encoding))

    def fgetattr(session: Any, path: bytes | None, buffer: Any, info: Any) -> int:
        return fill(session, buffer, session._decode_optional_path(path), info.contents)

    _operations_without("getattr", "fgetattr")
    libfuse.Session.getattr = getattr_  # type: ignore[method-assign]
    libfuse.Session.fgetattr = fgetattr  # type: ignore[method-assign]


def cache_of_stat_bytes() -> None:
    """Turn off the cache of stat_bytes(), so that each request creates its struct stat."""
    libfuse.stat_bytes = libfuse.stat_bytes.__wrapped__  # type: ignore[assignment]


def addresses() -> None:
    """Turn off the plain addresses in the arguments of getattr and open: use pointer objects."""

    def fill(session: Any, buffer: Any, path: bytes | None, *info: object) -> int:
        name = path and path.decode("utf-8", "surrogateescape")
        data = libfuse.stat_bytes(session.operations.getattr(name, *info))
        ctypes.memmove(buffer, data, len(data))
        return 0

    def getattr_(session: Any, path: bytes, buffer: Any) -> int:
        return fill(session, buffer, path)

    def fgetattr(session: Any, path: bytes | None, buffer: Any, info: Any) -> int:
        return fill(session, buffer, path, info.contents)

    def open__(session: Any, path: bytes, info: Any) -> int:
        session.operations.open(path.decode("utf-8", "surrogateescape"), info.contents)
        return 0

    _operations_without("getattr", "fgetattr", "open")
    libfuse.Session.getattr = getattr_  # type: ignore[method-assign]
    libfuse.Session.fgetattr = fgetattr  # type: ignore[method-assign]
    libfuse.Session.open = open__  # type: ignore[method-assign]


def open_() -> None:
    """Turn off Session.open: decode a path with a codec found by name, and find the operation by its name."""
    _operations_without("open")
    libfuse.Session.open = _fuse.FUSE.open  # type: ignore[method-assign]


def readdir() -> None:
    """Turn off Session.readdir: create a struct stat for each entry of a directory, from a dictionary."""

    def list_(session: Any, _path: bytes, buffer: int, filler: Any, offset: int, info: Any) -> int:
        entries = session.operations.readdir(info.contents, offset)
        for number, (name, kind, inode) in enumerate(entries, offset + 1):
            attributes = _fuse.c_stat()
            _fuse.set_st_attrs(attributes, {"st_mode": kind, "st_ino": inode}, use_ns=True)
            if filler(buffer, name.encode(session.encoding), attributes, number):
                break
        return 0

    libfuse.Session.readdir = list_  # type: ignore[method-assign]


def reads() -> None:
    """Turn off kprobefs's own answers to READ requests: libfuse answers them."""
    libfuse.FUSE_READ = 0


def known_nodes() -> None:
    """Turn off the answers from KnownNodes to requests for control files.

    libfuse answers them, and the kernel looks up the files' names again.
    """
    operations.KnownNodes.path_of = lambda *_: None  # type: ignore[method-assign]


def releases() -> None:
    """Turn off kprobefs's own answers to RELEASE requests, and therefore also to OPEN requests."""
    libfuse.FUSE_RELEASE = 0
    known_nodes()


def lasting_names() -> None:
    """Turn off lasting names: the kernel looks up a name in the root again for each path."""
    Files.lasting = ()  # type: ignore[assignment]


def clients_own_names() -> None:
    """Turn off clients' own names: the kernel looks up a name in scratch again for each path."""
    Files.clients_own = ()  # type: ignore[assignment]


def session_loop() -> None:
    """Turn off SessionLoop: run libfuse's fuse_session_loop() in WorkerThreads."""
    loop = libfuse._libfuse.fuse_session_loop
    loop.argtypes = [ctypes.c_void_p]
    libfuse.SessionLoop.run = lambda self: loop(self._session)  # type: ignore[method-assign]


def worker_threads() -> None:
    """Turn off WorkerThreads: serve requests in libfuse's own pool of threads."""

    class Pool:
        def __init__(self, loop: Any, _free: int) -> None:
            self._session = loop.__self__._session

        def blocking(self) -> nullcontext[int]:
            return nullcontext(1)

        waiting = blocking

        def run(self) -> None:
            pool = libfuse._libfuse.fuse_session_loop_mt
            pool.argtypes = [ctypes.c_void_p]
            pool(self._session)

    operations.WorkerThreads = Pool  # type: ignore[assignment,misc]


VARIANTS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "nothing, again": lambda: None,
    "stat_bytes": stat_bytes,
    "cache of stat_bytes": cache_of_stat_bytes,
    "addresses": addresses,
    "open": open_,
    "readdir": readdir,
    "READ": reads,
    "RELEASE": releases,
    "lasting names": lasting_names,
    "clients' own names": clients_own_names,
    "known nodes": known_nodes,
    "SessionLoop": session_loop,
    "WorkerThreads": worker_threads,
}
assert (FUSE_READ, FUSE_RELEASE) == (libfuse.FUSE_READ, libfuse.FUSE_RELEASE)


def _round(path: str, count: int) -> None:
    for _ in range(count):
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)


def _stat(path: str, count: int) -> None:
    for _ in range(count):
        os.stat(path)


def _pread(path: str, count: int, size: int = 4096) -> None:
    fd = os.open(path, os.O_RDONLY)
    for _ in range(count):
        os.pread(fd, size, 0)
    os.close(fd)


def _list(path: str, count: int) -> None:
    for _ in range(count):
        os.listdir(path)


WORK: dict[str, tuple[bool, Callable[[str, int], None], str, int]] = {
    "open, read, close": (True, _round, _FILE, 100),
    "stat": (True, _stat, _FILE, 100),
    "pread of 8 bytes": (True, _pread, _FILE, 300),
    "open, read, close in scratch": (False, _round, "scratch/file", 200),
    "pread of 128 KiB": (False, lambda path, count: _pread(path, count, 1 << 17), "scratch/file", 200),
    "list of 5000 names": (False, _list, "scratch/directory", 2),
}
"""Name of the work -> (whether the built-in kernel is needed, function, file, repetitions in a turn)."""


def _start(change: Callable[[], None], place: Path, *, is_own_kernel: bool) -> int:
    """Serve a mount at `place` in a child process, which first calls `change`; return the child's PID.

    `is_own_kernel`: the mount shows the built-in kernel, and not the class Files.
    """
    daemon = os.fork()
    if daemon:
        return daemon
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    change()
    mount: Any = Files()
    if is_own_kernel:
        mount = Kernel().mount()
        client = Client(os.getpid(), 0, 0)
        handle = mount.open(client, "/tracing/kprobe_events", os.O_WRONLY)
        mount.write(client, handle, _PROBE, 0)
        mount.release(handle)
    operations.Server(mount, operations.FuseOptions("bench")).serve(str(place), lambda: None)
    os._exit(0)


def _turn(daemon: int, work: Callable[[str, int], None], path: str, count: int) -> float:
    """Return the CPU time in microseconds of client and daemon for one repetition of `work`.

    The result is the least of three measurements with `count` repetitions each.
    """
    found = []
    for _ in range(3):
        before = cpu_time(daemon) + time.thread_time_ns() / 1000
        work(path, count)
        found.append((cpu_time(daemon) + time.thread_time_ns() / 1000 - before) / count)
    return min(found)


def measure(name: str, turns: int) -> None:
    """Measure the work called `name` with all variants, in `turns` turns, and print the ratios."""
    is_own_kernel, work, file, count = WORK[name]
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-") as top:
        daemons: dict[str, tuple[int, Path]] = {}
        cpu = min(os.sched_getaffinity(0))
        try:
            for variant, change in VARIANTS.items():
                place = Path(top, variant)
                place.mkdir()
                daemons[variant] = _start(change, place, is_own_kernel=is_own_kernel), place
            for daemon, place in daemons.values():
                while not os.path.ismount(place):
                    time.sleep(0.01)
                for task in os.listdir(f"/proc/{daemon}/task"):
                    os.sched_setaffinity(int(task), {cpu})
            os.sched_setaffinity(0, {cpu})
            found: dict[str, list[float]] = {variant: [] for variant in daemons}
            for turn in range(turns + 1):
                order = list(daemons) if turn % 2 else list(daemons)[::-1]
                for variant in order:
                    daemon, place = daemons[variant]
                    taken = _turn(daemon, work, f"{place}/{file}", count)
                    # The first turn fills caches.
                    if turn:
                        found[variant].append(taken)
        finally:
            for daemon, place in daemons.values():
                subprocess.run(["umount", "-l", place], check=False)
                os.waitpid(daemon, 0)
    base = found["nothing"]
    print(f"{name}: {statistics.median(base):.1f} us of CPU time; turned off, in {turns} turns:")
    for variant, samples in found.items():
        ratios = sorted(one / other for one, other in zip(samples, base, strict=True))
        print(
            f"  {variant:20} {statistics.median(ratios):6.3f}  {ratios[1]:6.3f} to {ratios[-2]:6.3f}",
            flush=True,
        )


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("work", nargs="*", choices=[[], *WORK], help="default: all")
    options = parser.parse_args()
    host = HostLoad()
    affinity = os.sched_getaffinity(0)
    for name in options.work or WORK:
        os.sched_setaffinity(0, affinity)
        measure(name, options.turns)
    print(host.line())


if __name__ == "__main__":
    main()
