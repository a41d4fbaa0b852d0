"""Number of Python calls, source files and upward calls through the layers that a request takes.

A call is the entry into a Python function of the root packages. A generator counts once, however often it is
resumed; a comprehension does not count. Files are the source files of the called functions. A call goes
upward if the caller's layer is below that of the called function. The layers are those of import-linter's
contracts. The caller is the innermost function of the root packages on the stack. A lookup resolves
`vfs_read` by its name.

Each way has a kernel of its own. It consists of the calls that the FUSE adapter makes: open, one read or one
write, and release. The client that defines a probe is new to the kernel; the client that reads and disarms is
not. Caches that all kernels of a process share are cold at first. The thread
that watches a run's budget adds a few calls in some runs.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from common import Distribution, arguments, report

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
KNOWN, UNKNOWN = Client(500, 0, 0), Client(501, 0, 0)
DEFINITION = "p:reads vfs_read"
SYMBOL = "vfs_read"
RESOLVER = "lookup_name"
"""Name of the method, in any class, that takes a symbol's name and returns its address."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
GREETING = "/scratch/greeting"
EVENTS = "/tracing/events/kprobes"
MANY = 100


class Layers:
    """The order of the packages according to the contracts of import-linter.

    The contract without containers orders the root packages. A contract whose container is a root package
    orders the subpackages of that root.
    """

    def __init__(self, pyproject: Path) -> None:
        linter = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]
        self.roots: list[str] = linter["root_packages"]
        contracts = [found for found in linter["contracts"] if found["type"] == "layers"]
        inside = {name: found for found in contracts for name in found.get("containers", ())}
        levels: list[str] = []
        for level in next(found for found in contracts if "containers" not in found)["layers"]:
            if level in inside:
                siblings = (each.split("|") for each in inside[level]["layers"])
                levels += ("|".join(f"{level}.{name.strip()}" for name in names) for names in siblings)
            else:
                levels.append(level)
        self._depth = {name: depth for depth, level in enumerate(levels) for name in level.split("|")}
        self.depth_of = cache(self._depth_of)

    def _depth_of(self, module: str) -> int | None:
        """Return the number of a module's layer, 0 for the top one, or None if it is in no layer."""
        parts = module.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self._depth[name] for name in prefixes if name in self._depth), None)


@dataclass
class Count:
    """Counts for one way (open, one read or write, release): calls, files, upward calls and lookups."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    upward: Counter[str] = field(default_factory=Counter)
    """"caller > callee" -> number of calls."""
    lookups: int = 0

    def amounts(self) -> dict[str, int]:
        """Return the figures as a map unit -> amount."""
        return {
            "calls": self.calls,
            "files": len(self.files),
            "upward": self.upward.total(),
            "lookups": self.lookups,
        }


class Counting:
    """Counts the calls on this thread, and on all threads that start after the constructor."""

    def __init__(self, layers: Layers) -> None:
        self._depth_of = layers.depth_of
        self._roots = tuple(str(ROOT / root) + os.sep for root in layers.roots)
        self._count: Count | None = None
        threading.setprofile(self._profile)

    @contextmanager
    def way(self) -> Iterator[Count]:
        """Count the calls within the `with` block, and yield the Count."""
        self._count = count = Count()
        sys.setprofile(self._profile)
        try:
            yield count
        finally:
            sys.setprofile(None)
            self._count = None

    def close(self) -> None:
        """Stop counting on new threads."""
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        count, code = self._count, frame.f_code
        if count is None or event != "call" or not self._is_counted(code) or not _is_start(frame):
            return
        count.calls += 1
        count.files.add(code.co_filename)
        caller = frame.f_back
        while caller is not None and not self._is_counted(caller.f_code):
            caller = caller.f_back
        if _resolves(frame) and not (caller and _resolves(caller)):
            count.lookups += 1
        if caller is not None:
            above, below = (self._depth_of(at.f_globals["__name__"]) for at in (frame, caller))
            if above is not None and below is not None and above < below:
                count.upward[f"{_name(caller)} > {_name(frame)}"] += 1

    def _is_counted(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._roots) and code.co_name not in COMPREHENSIONS


def _is_start(frame: FrameType) -> bool:
    """Return True if `frame` enters its function, and not if it resumes a generator.

    The profiler reports both as calls.
    """
    return frame.f_lasti <= _first_resume(frame.f_code)


@cache
def _first_resume(code: CodeType) -> int:
    return next(found.offset for found in dis.get_instructions(code) if found.opname == "RESUME")


def _resolves(frame: FrameType) -> bool:
    return frame.f_code.co_name == RESOLVER and SYMBOL in frame.f_locals.values()


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}"


class Shell:
    """Client processes that access the files of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._mount = kernel.mount()
        self._mount.release(self._mount.create(KNOWN, GREETING, 0o644, os.O_WRONLY))
        self.write(GREETING, "hello")
        self.read(GREETING)

    def write(self, path: str, text: str, flags: int = 0, client: Client = KNOWN) -> None:
        """Write to a file as `echo TEXT >> PATH` does; if `flags` has O_TRUNC, as `echo TEXT > PATH` does."""
        handle = self._mount.open(client, path, os.O_WRONLY | flags)
        self._mount.write(client, handle, text.encode(), 0)
        self._mount.release(handle)

    def read(self, path: str) -> str:
        """Return the first 64 KiB of a file, by one read."""
        handle = self._mount.open(KNOWN, path, os.O_RDONLY)
        text = self._mount.read(KNOWN, handle, 1 << 16, 0)
        self._mount.release(handle)
        return text.decode()

    def enable(self) -> None:
        """Arm the probes of all events."""
        self.write(f"{EVENTS}/enable", "1")


def count_ways(layers: Layers) -> dict[str, Count]:
    """Make each request once, and return a map name of the request -> figures."""
    counting = Counting(layers)
    try:
        return _define_and_hit(counting) | _read(counting) | _disarm(counting, 1) | _disarm(counting, MANY)
    finally:
        counting.close()


def _define_and_hit(counting: Counting) -> dict[str, Count]:
    with Kernel() as kernel:
        shell = Shell(kernel)
        with counting.way() as define:
            shell.write("/kprobe_events", f"{DEFINITION}\n", os.O_TRUNC, UNKNOWN)
        shell.enable()
        hits = [_hit(counting, shell) for _ in range(2)]
    return {"define": define, "hit, in Python": hits[0], "hit, in guest code": hits[1]}


def _hit(counting: Counting, shell: Shell) -> Count:
    with counting.way() as count:
        shell.read(GREETING)
        text = shell.read("/tracing/trace")
    assert ": reads: (vfs_read+0x" in text, text
    return count


def _read(counting: Counting) -> dict[str, Count]:
    with Kernel() as kernel:
        shell = Shell(kernel)
        with counting.way() as alone:
            shell.read(GREETING)
        shell.write("/kprobe_events", "p:others vfs_write\n")
        shell.enable()
        shell.read(GREETING)
        with counting.way() as beside:
            shell.read(GREETING)
    return {"read, nothing probed": alone, "read, another probed": beside}


def _disarm(counting: Counting, probes: int) -> dict[str, Count]:
    with Kernel() as kernel:
        shell = Shell(kernel)
        _define_many(shell, probes)
        shell.enable()
        # The first hit of a probe makes guest code, which is no part of disarming. This write hits probes.
        shell.write("/kprobes/enabled", "1\n")
        with counting.way() as count:
            shell.write("/kprobes/enabled", "0\n")
        assert shell.read("/kprobes/enabled") == "0\n"
        assert shell.read("/kprobes/list").count("\n") == probes
    return {f"disarm {probes}": count}


def _define_many(shell: Shell, probes: int) -> None:
    """Define a probe at the entry of each of the first `probes` functions that allow a probe."""
    functions = (symbol.name for symbol in shell.kernel.image.kallsyms.symbols if symbol.is_text)
    defined = 0
    while defined < probes:
        with suppress(KernelError):
            shell.write("/kprobe_events", f"p:e{defined} {next(functions)}\n")
            defined += 1


def table(ways: dict[str, Count], with_crossings: bool) -> Iterator[str]:
    """Yield the lines of a table in 80 columns. `with_crossings` adds a line for each upward call."""
    yield f"{'way':<24} {'calls':>7} {'files':>7} {'upward':>7} {'lookups':>8}"
    for name, count in ways.items():
        calls, files, upward, lookups = count.amounts().values()
        yield f"{name:<24} {calls:>7} {files:>7} {upward:>7} {lookups:>8}"
        if with_crossings:
            yield from (f"    {times:>4} {crossing}" for crossing, times in count.upward.most_common())


def figures(ways: dict[str, Count]) -> list[Distribution]:
    """Return the figures as distributions of one sample each, which is the form of all benchmarks."""
    return [
        Distribution(name, unit, (amount,))
        for name, count in ways.items()
        for unit, amount in count.amounts().items()
    ]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--crossings", action="store_true", help="name each call upward, in the table")
    options = parser.parse_args()
    ways = count_ways(Layers(PYPROJECT))
    if options.json:
        report(figures(ways), options)
    else:
        print(*table(ways, options.crossings), sep="\n")


if __name__ == "__main__":
    main()
