#!/usr/bin/env python3
"""Comparison of the probe checker's results with a real kernel's: `verdict.py [DIR]`.

The exit status is 1 if any result differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.probe_checks import X86ProbeChecker
from tests.arch.sample import Sample
from tests.oracle.recorded import Point, Recording, errno_name, oracle_directory, recordings

SHOWN = 20
"""Maximum number of differences of each kind that are printed."""


@dataclass
class Comparison:
    """Result of a comparison of answers of one kind.

    It has the number of all answers, the number of answers that agree, and descriptions of the first that
    differ.
    """

    total: int = 0
    agree: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, place: str, ours: str, recorded: str, why: str) -> None:
        self.total += 1
        if ours == recorded:
            self.agree += 1
        elif len(self.differences) < SHOWN:
            self.differences.append(
                f"  {place}: recorded {recorded or 'none'}, ours {ours or 'none'} ({why})"
            )


@dataclass
class Report:
    """The comparison of a checker's answers with the recording of one kernel."""

    version: str
    errno: Comparison = field(default_factory=Comparison)
    flags: Comparison = field(default_factory=Comparison)
    parentless: Comparison = field(default_factory=Comparison)
    """Points in split-off parts of functions whose other part was not recorded.

    Whether such a part is notrace depends on the other part. The kernel's answer must be EINVAL, or
    kprobefs's answer for a traced function.
    """
    by_parent: int = 0
    """Number of points in `parentless` that only the other part explains.

    Their answer is EINVAL, although each point itself is valid.
    """
    unknown: int = 0
    """Number of points in modules, whose bytes were not recorded."""
    seconds: float = 0.0

    @property
    def perfect(self) -> bool:
        """Return True if all answers agree."""
        return all(part.agree == part.total for part in (self.errno, self.flags, self.parentless))


@dataclass(frozen=True)
class Answer:
    """Outcome of a definition in kprobe_events whose probe is the only one in its function."""

    refused: Rejection | None
    detoured: Region | Rejection

    @property
    def errno(self) -> str:
        return errno_name(self.refused.errno if self.refused else 0)

    @property
    def flags(self) -> str:
        """Return the flags as kprobes/list shows them."""
        if isinstance(self.detoured, Region):
            return "[OPTIMIZED]"
        return "[FTRACE]" if self.detoured.reason is RejectReason.FTRACE else ""

    @property
    def why(self) -> str:
        """Return the name of the rule that decides, or "optimized"."""
        found = self.refused or self.detoured
        return "optimized" if isinstance(found, Region) else found.reason.value


def linux_verdict(sample: Sample) -> X86ProbeChecker:
    """Return a checker that applies only the rules of Linux."""
    arch = X86_64()
    return arch.probe_checker(sample, arch.strategies["optprobe-linux"], ftrace=True)


def answer(verdict: X86ProbeChecker, addr: int) -> Answer:
    """Return the outcome of a definition. Raises: LookupError (the sample lacks data for the decision)."""
    return probed(verdict, addr, verdict.check_traced(addr))


def probed(verdict: X86ProbeChecker, addr: int, refused: Rejection | None = None) -> Answer:
    """Return the outcome of a kprobe at `addr`.

    `refused`: an earlier rejection of the definition, or None.
    """
    refused = refused or verdict.may_probe(addr)
    return Answer(refused, refused or verdict.optimized_region(addr))


def compare(recording: Recording) -> Report:
    """Compare all points of a recording, and return a report."""
    report = Report(recording.version)
    started = time.process_time()
    verdict = linux_verdict(recording.sample)
    # The same functions as if the sample were complete, so that no missing parent leaves an answer open.
    alone = linux_verdict(replace(recording.sample, complete=True))
    for point in recording.points:
        if point.addr is None:
            report.errno.add(point.place, "ENOENT", point.errno, "no such symbol")
        elif point.ambiguous:
            report.errno.add(point.place, "EADDRNOTAVAIL", point.errno, "the symbol isn't unique")
        else:
            _compare_at(report, verdict, alone, point, point.addr)
    report.seconds = time.process_time() - started
    return report


def _compare_at(
    report: Report, verdict: X86ProbeChecker, alone: X86ProbeChecker, point: Point, addr: int
) -> None:
    try:
        found = answer(verdict, addr)
        report.errno.add(point.place, found.errno, point.errno, found.why)
    except LookupError:
        try:
            found = probed(alone, addr)
        except LookupError:
            report.unknown += 1
            return
        ours = found.errno
        if point.errno == "EINVAL" != ours:
            report.by_parent += 1
            ours = "EINVAL"
        report.parentless.add(point.place, ours, point.errno, found.why)
    if point.errno == "0" and point.flags != "?":
        report.flags.add(point.place, found.flags, point.flags, found.why)


def main(arguments: list[str]) -> int:
    """Print a line for each kind of answer, and then the differences. Return the exit status."""
    parser = argparse.ArgumentParser(description="Compares our verdicts with a real kernel's.")
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="with the recordings")
    directory = parser.parse_args(arguments).directory or oracle_directory()
    reports = [compare(recording) for recording in recordings(directory)]
    for report in reports:
        _print(report)
    if not reports:
        print(f"no recordings in {directory}", file=sys.stderr)
    return 0 if reports and all(report.perfect for report in reports) else 1


def _print(report: Report) -> None:
    lines = {
        "errno": report.errno,
        "flags": report.flags,
        "errno where the parent function isn't recorded (ours or EINVAL)": report.parentless,
    }
    for kind, comparison in lines.items():
        print(f"{report.version} {kind}: agree {comparison.agree} of {comparison.total}")
        for difference in comparison.differences:
            print(difference)
    judged = report.errno.total + report.parentless.total
    print(
        f"{report.version}: {judged / report.seconds:,.0f} verdicts a second of CPU time; "
        f"{report.by_parent} points refused for their parent alone; "
        f"{report.unknown} points in modules, without bytes"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
