"""Run Linux's ftrace selftests over kernels of distributions: python -m stress.kernel_selftests FILE IMAGE...

Each kernel is probed in both ways. `tests/conformance/ftracetest.sh` runs the tests of the kernel's version.
FILE keeps each result at once, and a test with a result in FILE is not run again, so an interrupted run
continues. All kernels run the tests of one directory before those of the next one. The program needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from emulated_kernel.image.linux.linux_kernel import open_kernel
from emulated_kernel.util.errors import KernelError

SCRIPT = Path(__file__).resolve().parents[1] / "tests/conformance/ftracetest.sh"
WAYS = {"kernel": "--kernel-kprobes", "kprobefs": "--image"}
"""Value of `--kprobes` -> option of the script."""
VERSIONS = ("5.10", "6.1", "6.12", "7.2")
"""Versions of Linux whose tests can be fetched, ascending."""
FIRST = ("kprobe", "dynevent", "event", "trigger", "00basic", "instances", "ftrace")
"""Directories of tests in the order in which they are run; the others follow."""
_ENVIRONMENT = dict(os.environ)
"""Environment of the script that fetches tests: that of this process before a caller changed it.

By these variables, the script finds the cache of tests.
"""
_LINE = re.compile(r"(\S+\.tc)\s+(top|instance|-)\s+([A-Z]+)")
_PASSES = frozenset({"PASS", "XFAIL"})


class Outcome(NamedTuple):
    """Result of one run of a test, such as PASS or UNSUPPORTED."""

    release: str
    way: str
    test: str
    level: str
    """`top` or `instance`; `-` if the test took too long."""
    result: str


class Selftests:
    """Runs the selftests of kernels, and keeps the outcomes in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.outcomes: list[Outcome] = []
        if file.exists():
            self.outcomes = [Outcome(*json.loads(line)) for line in file.read_text().splitlines()]

    def run(self, image: Path, way: str, directory: str) -> Iterator[Outcome]:
        """Run the tests of a directory that have no outcome yet; keep and yield each outcome.

        `way`: one of WAYS, who serves the probes. `directory`: name of a directory in test.d/, as kprobe.
        Raises: KernelError (not a kernel), OSError.
        """
        release = release_of(image)
        sources = fetched(version_for(release))
        done = {each.test for each in self.outcomes if each[:2] == (release, way)}
        tests = [name for name in names(sources, directory) if name not in done]
        if not tests:
            return
        command = [str(SCRIPT), WAYS[way], str(image.resolve()), str(sources), *tests]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if found := _LINE.fullmatch(line.strip()):
                    outcome = Outcome(release, way, *found.groups())
                    self.keep(outcome)
                    yield outcome

    def keep(self, outcome: Outcome) -> None:
        """Add an outcome, and write it to the file."""
        self.outcomes.append(outcome)
        with self._file.open("a") as kept:
            kept.write(f"{json.dumps(outcome)}\n")

    def cells(self, release: str, way: str) -> tuple[str, str]:
        """Return the number of runs that passed, and the names of the tests that fail, for a table.

        If not all directories were run, name those that were.
        """
        found = [each for each in self.outcomes if each[:2] == (release, way)]
        if not found:
            return "", ""
        passed = sum(each.result in _PASSES for each in found)
        known = directories(fetched(version_for(release)))
        run = {each.test.partition("/")[0] for each in found}
        of = "" if run >= {*known} else f" ({', '.join(name for name in known if name in run)})"
        failed = sorted({each.test.removesuffix(".tc") for each in found if each.result == "FAIL"})
        return f"{passed} of {len(found)}{of}", ", ".join(failed)


@cache
def release_of(image: Path) -> str:
    """Return a kernel's release. Raises: KernelError."""
    return open_kernel(str(image)).release


def version_for(release: str) -> str:
    """Return the newest version with tests that is not newer than the kernel, or else the oldest."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    older = [version for version in VERSIONS if tuple(map(int, version.split("."))) <= numbers]
    return (older or VERSIONS)[-1 if older else 0]


@cache
def fetched(version: str) -> Path:
    """Return the directory of a version's tests. If the cache lacks them, fetch them. Raises: OSError."""
    done = subprocess.run(
        (SCRIPT, "--fetch", version), stdout=subprocess.PIPE, text=True, check=False, env=_ENVIRONMENT
    )
    if done.returncode:
        raise OSError(f"no selftests of Linux {version}")
    return Path(done.stdout.strip())


def names(sources: Path, directory: str) -> list[str]:
    """Return the tests of a directory as paths below test.d/."""
    top = sources / "test.d"
    return sorted(str(path.relative_to(top)) for path in (top / directory).rglob("*.tc"))


def directories(sources: Path) -> list[str]:
    """Return the directories with tests in the order in which they are run."""
    found = {path.relative_to(sources / "test.d").parts[0] for path in (sources / "test.d").rglob("*.tc")}
    return [name for name in FIRST if name in found] + sorted(found - {*FIRST})


def run_all(
    kept: Selftests, images: Sequence[Path], wanted: Sequence[str], ways: Sequence[str]
) -> Iterator[Outcome]:
    """Run all tests without an outcome. `wanted`: directories of tests; if it is empty, all of them."""
    sources = {image: fetched(version_for(release_of(image))) for image in images}
    ordered = dict.fromkeys(name for place in sources.values() for name in directories(place))
    for directory in wanted or ordered:
        for image in images:
            for way in ways:
                yield from kept.run(image, way, directory)


def main() -> int:
    """Print each outcome; return 1 if kprobefs fails a test that the kernel's own kprobes do not fail."""
    parser = argparse.ArgumentParser(prog="python -m stress.kernel_selftests", description=__doc__)
    parser.add_argument("--tests", metavar="DIR", action="append", default=[], help="only this directory")
    parser.add_argument("--kprobes", choices=WAYS, action="append", help="only this way (default: both)")
    parser.add_argument("file", metavar="FILE", type=Path, help="results, which a later run continues")
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+")
    options = parser.parse_args()
    kept = Selftests(options.file)
    try:
        for each in run_all(kept, options.images, options.tests, options.kprobes or [*WAYS]):
            print(*each, flush=True)
    except (KernelError, OSError) as error:
        print(error)
        return 2
    failed = {
        way: {
            (each.release, each.test) for each in kept.outcomes if each.way == way and each.result == "FAIL"
        }
        for way in WAYS
    }
    return 1 if failed["kprobefs"] - failed["kernel"] else 0


if __name__ == "__main__":
    sys.exit(main())
