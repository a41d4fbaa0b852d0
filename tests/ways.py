"""Counts what it takes to follow a request through the code: calls, files, and crossings back up the layers.

A call is a Python function of the root packages that is entered: a generator once, however often it is
resumed, and comprehensions not at all. Files are those that the calls are in. A crossing is a call whose
caller, the innermost function of the root packages on the stack (whatever is between them: contextlib,
ctypes), stands in a lower layer; the layers are those of import-linter's contracts. Lookups are
those of `vfs_read` by its name.

Each way is gone on a kernel of its own, through the calls of its mount that the FUSE adapter makes: open, one
read or write, and release. Who defines is a process that the kernel meets for the first time; who reads and
disarms is known. What is cached for all kernels of the process is cold in a new one, and the thread that
watches a run's budget makes a few calls more or less.
"""

from __future__ import annotations

import argparse
import ast
import dis
import json
import os
import sys
import textwrap
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from emulated_kernel.errors import KernelError
from emulated_kernel.kernel import Kernel
from emulated_kernel.vfs.core.client import Client

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
KNOWN, STRANGER = Client(500, 0, 0), Client(501, 0, 0)
DEFINITION = "p:reads vfs_read"
SYMBOL = "vfs_read"
RESOLVER = "lookup_name"
"""The function that takes a symbol's name and gives its address, whatever class it is of."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
GREETING = "/scratch/greeting"
EVENTS = "/tracing/events/kprobes"
MANY = 100


class Layers:
    """The layers of import-linter's contracts in one order, and who is in which.

    Raises: KeyError, StopIteration where pyproject.toml has no such contracts.
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
        """0 is the top; None for a module that is in no layer."""
        parts = module.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self._depth[name] for name in prefixes if name in self._depth), None)

    def modules(self) -> Iterator[tuple[str, ast.Module]]:
        """All modules of the root packages."""
        for root in self.roots:
            for path in sorted((ROOT / root).rglob("*.py")):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                yield name.removesuffix(".__init__"), ast.parse(path.read_text())

    def unplaced(self) -> list[str]:
        """Modules in no layer; a root needs none, nor a head that holds nothing but its docstring."""
        return [
            name
            for name, tree in self.modules()
            if self.depth_of(name) is None
            and name not in self.roots
            and not all(isinstance(node, ast.Expr) for node in tree.body)
        ]


@dataclass
class Count:
    """What one way takes."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    upward: Counter[str] = field(default_factory=Counter)
    """Crossings, by "caller > callee"."""
    lookups: int = 0
    """How often SYMBOL was resolved by its name."""


class Counting:
    """Counts the calls on all threads that were started since it was made."""

    def __init__(self, layers: Layers) -> None:
        self._depth_of = layers.depth_of
        self._roots = tuple(str(ROOT / root) + os.sep for root in layers.roots)
        self._count: Count | None = None
        threading.setprofile(self._profile)

    @contextmanager
    def way(self) -> Iterator[Count]:
        """What is called in the block is counted."""
        self._count = count = Count()
        sys.setprofile(self._profile)
        try:
            yield count
        finally:
            sys.setprofile(None)
            self._count = None

    def close(self) -> None:
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        count, code = self._count, frame.f_code
        if count is None or event != "call" or not self._is_ours(code) or not _is_start(frame):
            return
        count.calls += 1
        count.files.add(code.co_filename)
        caller = frame.f_back
        while caller is not None and not self._is_ours(caller.f_code):
            caller = caller.f_back
        if _resolves(frame) and not (caller and _resolves(caller)):
            count.lookups += 1
        if caller is not None:
            above, below = (self._depth_of(at.f_globals["__name__"]) for at in (frame, caller))
            if above is not None and below is not None and above < below:
                count.upward[f"{_name(caller)} > {_name(frame)}"] += 1

    def _is_ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._roots) and code.co_name not in COMPREHENSIONS


def _is_start(frame: FrameType) -> bool:
    """Whether a function is entered: a generator that goes on is a call to the profiler too."""
    return frame.f_lasti <= _first_resume(frame.f_code)


@cache
def _first_resume(code: CodeType) -> int:
    return next(found.offset for found in dis.get_instructions(code) if found.opname == "RESUME")


def _resolves(frame: FrameType) -> bool:
    return frame.f_code.co_name == RESOLVER and SYMBOL in frame.f_locals.values()


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}"


class Shell:
    """Client processes at the files of a kernel of their own."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._mount = kernel.mount()
        self._mount.release(self._mount.create(KNOWN, GREETING, 0o644, os.O_WRONLY))
        self.write(GREETING, "hello")
        self.read(GREETING)

    def write(self, path: str, text: str, flags: int = 0, client: Client = KNOWN) -> None:
        """What `echo TEXT >> PATH` asks for; with O_TRUNC, `echo TEXT > PATH`."""
        handle = self._mount.open(client, path, os.O_WRONLY | flags)
        self._mount.write(client, handle, text.encode(), 0)
        self._mount.release(handle)

    def read(self, path: str) -> str:
        """What `head -c 65536` asks for: one read."""
        handle = self._mount.open(KNOWN, path, os.O_RDONLY)
        text = self._mount.read(KNOWN, handle, 1 << 16, 0)
        self._mount.release(handle)
        return text.decode()

    def enable(self) -> None:
        """Arm the probes of all events."""
        self.write(f"{EVENTS}/enable", "1")


def count_ways(layers: Layers) -> dict[str, Count]:
    """Go each way once, and count."""
    counting = Counting(layers)
    try:
        return _define_and_hit(counting) | _read(counting) | _disarm(counting, 1) | _disarm(counting, MANY)
    finally:
        counting.close()


def _define_and_hit(counting: Counting) -> dict[str, Count]:
    with Kernel() as kernel:
        shell = Shell(kernel)
        with counting.way() as define:
            shell.write("/kprobe_events", f"{DEFINITION}\n", os.O_TRUNC, STRANGER)
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
        # The first hits of a write, which are no part of disarming.
        shell.write("/kprobes/enabled", "1\n")
        with counting.way() as count:
            shell.write("/kprobes/enabled", "0\n")
        assert shell.read("/kprobes/enabled") == "0\n"
        assert shell.read("/kprobes/list").count("\n") == probes
    return {f"disarm {probes}": count}


def _define_many(shell: Shell, probes: int) -> None:
    """A probe on the entry of each of the first functions that take one."""
    functions = (symbol.name for symbol in shell.kernel.image.kallsyms.symbols if symbol.is_text)
    defined = 0
    while defined < probes:
        with suppress(KernelError):
            shell.write("/kprobe_events", f"p:e{defined} {next(functions)}\n")
            defined += 1


@dataclass(frozen=True)
class Report:
    """All that the command shows."""

    ways: dict[str, Count]
    lines: int
    """Of Python in emulated_kernel/, but for what is about distributions' kernels."""
    protocols: int
    """Classes there that are a Protocol."""
    unplaced: list[str]
    """Modules that are in no layer."""


def report(pyproject: Path = PYPROJECT) -> Report:
    """Count everything."""
    layers = Layers(pyproject)
    library = ROOT / "emulated_kernel"
    apart = library / "linux", library / "image" / "linux"
    texts = [
        path.read_text()
        for path in library.rglob("*.py")
        if not any(path.is_relative_to(room) for room in apart)
    ]
    return Report(
        count_ways(layers),
        sum(text.count("\n") for text in texts),
        sum(_is_protocol(node) for text in texts for node in ast.walk(ast.parse(text))),
        layers.unplaced(),
    )


def _is_protocol(node: ast.AST) -> bool:
    bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    return any(base.split("[")[0].split(".")[-1] == "Protocol" for base in bases)


def table(found: Report, every: bool) -> Iterator[str]:
    """The report in 80 columns; `every` crossing by name where asked for."""
    yield f"{'way':<24} {'calls':>7} {'files':>7} {'upward':>7} {'lookups':>8}"
    for name, count in found.ways.items():
        yield (
            f"{name:<24} {count.calls:>7} {len(count.files):>7} {count.upward.total():>7} {count.lookups:>8}"
        )
        for crossing, times in count.upward.most_common() if every else ():
            yield f"    {times:>4} {crossing}"
    yield f"emulated_kernel: {found.lines} lines of Python, {found.protocols} Protocols"
    if found.unplaced:
        yield f"error: {len(found.unplaced)} modules in no layer, so no crossing of theirs is counted:"
        yield from textwrap.wrap(" ".join(found.unplaced), 78, initial_indent="  ", subsequent_indent="  ")


def as_dict(found: Report) -> dict[str, object]:
    """The report for JSON."""
    ways = {
        name: {
            "calls": count.calls,
            "files": sorted(str(Path(file).relative_to(ROOT)) for file in count.files),
            "upward": count.upward,
            "lookups": count.lookups,
        }
        for name, count in found.ways.items()
    }
    return {
        "ways": ways,
        "lines": found.lines,
        "protocols": found.protocols,
        "unplaced": found.unplaced,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where a module is in no layer."""
    parser = argparse.ArgumentParser(prog="python -m tests.ways", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="files and crossings by name, too")
    parser.add_argument("--crossings", action="store_true", help="name each crossing, in the table")
    parser.add_argument(
        "--layers", type=Path, default=PYPROJECT, metavar="FILE", help="another pyproject.toml"
    )
    options = parser.parse_args(arguments)
    found = report(options.layers)
    if options.json:
        print(json.dumps(as_dict(found), indent=2))
    else:
        print(*table(found, options.crossings), sep="\n")
    return 1 if found.unplaced else 0


if __name__ == "__main__":
    sys.exit(main())
