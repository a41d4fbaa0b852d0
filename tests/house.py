"""Lines of Python of each package of the library, and which of them are of what came after the house.

The measure is the tree before its walls were moved (REVISION); what didn't exist there stands in FEATURES by
the files that hold nothing else, so that one sees what the house itself costs. Lines that a feature has in
older files count as the house's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "emulated_kernel"
REVISION = "947cda0"
"""`git show REVISION:FILE | wc -l` gave BEFORE."""
BEFORE = {
    "trace": 14123,
    "kprobes": 7062,
    "arch": 6702,
    "machine": 4506,
    "vfs": 3348,
    "wiring": 3140,
    "host": 3057,
    "image": 1786,
    "kernel.py": 566,
    "other files": 164,
}
"""Lines by package; wiring became build.py, joints, and parts of trace, vfs and host."""
FEATURES = {
    "distributions' kernels": ("linux/**/*.py", "image/linux/**/*.py"),
    "callers found from code alone": (
        "arch/analysis/frames.py",
        "arch/x86/frames.py",
        "arch/riscv/frames.py",
        "trace/hits/function_frames.py",
    ),
    "state that outlives a daemon": (
        "machine/memory/kept.py",
        "trace/ring/salvage.py",
        "trace/array/past.py",
        "vfs/guest/changes.py",
    ),
    "clients' own system calls": (
        "host/client_call.py",
        "host/mirror/clients_only.py",
        "host/mirror/fork_events.py",
        "vfs/guest/naming.py",
    ),
    "more of tracefs": (
        "trace/tracers/function_profiler.py",
        "trace/events/own_entries.py",
        "trace/events/link_order.py",
    ),
    "limits": ("limits.py", "vfs/trees/limits.py"),
    "debug information in other files": ("image/debug_files.py",),
    "the function graph as guest code": ("trace/compiled/graph.py",),
    "files, threads and stops that fail": ("regular.py", "threads.py", "machine/quirks/stops.py"),
    "long writes give way": ("vfs/core/pieces.py",),
    "a start in half the time": ("dataclass.py",),
    "handlers in assembly, modules that probe": (
        "arch/program/assembly.py",
        "arch/riscv/assembler.py",
        "arch/x86/assembler.py",
        "kprobes/assembled.py",
        "kprobes/kinds/guest_probes.py",
    ),
}


class Row(NamedTuple):
    """A package then and now, in lines."""

    package: str
    before: int
    now: int
    of_features: int


def lines_of(path: Path) -> int:
    """Newlines, as wc(1) counts."""
    return path.read_bytes().count(b"\n")


def feature_files() -> dict[Path, str]:
    """By file, what it is there for. Raises: ValueError where a pattern finds nothing, or one file twice."""
    found: dict[Path, str] = {}
    for feature, patterns in FEATURES.items():
        for pattern in patterns:
            paths = list(LIBRARY.glob(pattern))
            if not paths or not found.keys().isdisjoint(paths):
                raise ValueError(f"{pattern}: no file, or one that is counted already")
            found.update(dict.fromkeys(paths, feature))
    return found


def package_of(path: Path) -> str:
    """The package of a file of the library, as the table names it."""
    top = path.relative_to(LIBRARY).parts[0]
    return top if not top.endswith(".py") or top in BEFORE else "other files"


def rows() -> list[Row]:
    """Largest first; the last one is the sum."""
    now, new, features = Counter[str](), Counter[str](), feature_files()
    for path in LIBRARY.rglob("*.py"):
        now[package_of(path)] += lines_of(path)
        new[package_of(path)] += lines_of(path) if path in features else 0
    names = sorted(BEFORE | now, key=lambda name: -now[name])
    found = [Row(name, BEFORE.get(name, 0), now[name], new[name]) for name in names]
    return [*found, Row("all", *(sum(column) for column in list(zip(*found, strict=True))[1:]))]


def by_feature() -> Counter[str]:
    """Lines of each feature's own files."""
    counts = Counter[str]()
    for path, feature in feature_files().items():
        counts[feature] += lines_of(path)
    return counts


def table() -> Iterator[str]:
    """As the page on the house has it."""
    yield f"| package | {REVISION} | now | of it later features | the house |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for row in rows():
        cells = (*row, row.now - row.of_features)
        yield f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and what the features are."""
    argparse.ArgumentParser(prog="python -m tests.house", description=__doc__.splitlines()[0]).parse_args(
        arguments
    )
    print("\n".join(table()))
    print("\n" + "\n".join(f"{feature}: {count}" for feature, count in by_feature().most_common()))


if __name__ == "__main__":
    main()
