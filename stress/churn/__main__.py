"""Tasks, files, pipes, modules and probes come and go for minutes: python -m stress.churn [--minutes M]."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict

from stress.churn.session import Sample, Session

WARM_UP = 20
"""Cycles, and a tenth of the time: until caches have what they keep."""
MEASURED = 10
"""Cycles at least, from the first sample on."""
GROWTH = {"host_bytes": 1 << 20, "resident": 24 << 20}
"""Bytes that there may be more from then on: text is used again after 1 MiB, translated code after 16."""
LINES = 30
"""Samples that are shown."""


def main(argv: list[str] | None = None) -> int:
    """The command; 1 where something grew."""
    parser = argparse.ArgumentParser(prog="python -m stress.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--arch", default="x86_64")
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--probes", type=int, default=0, help="probes besides, e.g. 10000, in each cycle")
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
    """A sample about every hundredth of the time; the first one is taken when everything is warm."""
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
    figures = [f"{name}={value}" for name, value in sample.counts.items()]
    figures += [f"{name}={value / (1 << 20):.1f}M" for name, value in sample.sizes.items()]
    print(f"{sample.seconds:7.1f} s {sample.cycle:7} cycles", *figures, flush=True)


def verdict(samples: list[Sample]) -> list[str]:
    """What isn't flat: counts that aren't what they were, memory that grew beyond its bound."""
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
