"""Create and remove tasks, files, modules and probes for minutes: python -m stress.churn [--minutes M]."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict

from stress.churn.session import Sample, Session

WARM_UP = 20
"""Number of cycles after which caches are considered full; a tenth of the run's time must pass as well."""
MEASURED = 10
"""Minimum number of cycles after the first sample."""
GROWTH = {"host_bytes": 1 << 20, "resident": 24 << 20}
"""Name of a size -> maximum growth in bytes since the first sample.

The limits allow for memory of text, which is reused only after 1 MiB, and of translated code, which is reused
only after 16 MiB.
"""
LINES = 30
"""Number of samples that are printed."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if a count or size has grown."""
    parser = argparse.ArgumentParser(prog="python -m stress.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--arch", default="x86_64")
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--probes", type=int, default=0, help="additional probes in each cycle, e.g. 10000")
    parser.add_argument("--json", action="store_true", help="all samples as JSON, at the end")
    options = parser.parse_args(argv)
    samples = churn(
        Session(options.arch, options.cpus, options.probes), options.minutes * 60, quiet=options.json
    )
    if options.json:
        print(json.dumps([asdict(sample) for sample in samples], indent=1))
    faults = verdict(samples)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not options.json:
        print(f"{samples[-1].cycle} cycles, {'not flat' if faults else 'flat'}")
    return int(bool(faults))


def churn(session: Session, seconds: float, *, quiet: bool) -> list[Sample]:
    """Run cycles for `seconds` seconds, and return about a hundred samples, the first one after the warm-up.

    Unless `quiet` is set, print about LINES of the samples. There are at least MEASURED cycles after the
    first sample.
    """
    start = time.monotonic()
    samples: list[Sample] = []
    shown = -1.0
    with session.kernel:
        while (
            (now := time.monotonic() - start) < seconds
            or not samples
            or session.cycles < samples[0].cycle + MEASURED
        ):
            session.cycle()
            if session.cycles < WARM_UP or now < seconds / 10:
                continue
            if not samples or now - samples[-1].seconds >= seconds / 100:
                gc.collect()
                samples.append(session.sample(now))
                if not quiet and now - shown >= seconds / LINES:
                    shown = now
                    show(samples[-1])
    return samples


def show(sample: Sample) -> None:
    """Print a sample."""
    figures = [f"{name}={value}" for name, value in sample.counts.items()]
    figures += [f"{name}={value / (1 << 20):.1f}M" for name, value in sample.sizes.items()]
    print(f"{sample.seconds:7.1f} s {sample.cycle:7} cycles", *figures, flush=True)


def verdict(samples: list[Sample]) -> list[str]:
    """Return a line for each count that has changed, and each size that has grown by more than GROWTH."""
    first, last = samples[0], samples[-1]
    faults = [
        f"{name}: {first.counts[name]} after {first.cycle} cycles, {value} after {last.cycle}"
        for name, value in last.counts.items()
        if value != first.counts[name]
    ]
    return faults + [
        f"{name}: {first.sizes[name]} bytes after {first.cycle} cycles, {value} after {last.cycle}"
        for name, value in last.sizes.items()
        if value - first.sizes[name] > GROWTH[name]
    ]


if __name__ == "__main__":
    sys.exit(main())
