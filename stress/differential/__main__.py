"""Compare with a real kernel: python -m stress.differential [IMAGE] [--area A] [--cases N] [--record]."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from itertools import chain, islice

from stress.differential import sides
from stress.differential.areas import AREAS
from stress.differential.compare import Kernels, Tally, compare, static_formats
from stress.differential.recorded import Sample
from stress.differential.steps import Area
from tests.guests.linux import debian_kernel
from tests.progress import show_progress

_WANTED = 99.9
"""Minimum percentage of an area's answers that must agree."""
_SHOWN = 20


def _run(kernels: Kernels, area: Area, options: argparse.Namespace, sample: Sample) -> Tally:
    tally = Tally()
    start = time.monotonic()

    def progress(now: Tally) -> None:
        nonlocal tally
        tally = now
        show_progress(now.cases, options.cases, start, f"{area.name}: {now.agreement:.2f} % of {now.answers}")

    kernels.start(area)
    cases = area.cases(options.seed, options.first + options.cases)
    if area.name == "formats":
        cases = chain(static_formats(kernels.events), cases)
    chosen = islice(enumerate(cases), options.first, options.first + options.cases)
    for case, answers in compare(kernels, area, chosen, progress):
        sample.add(area.name, case, answers)
    return tally


def main() -> int:
    """Compare the kernels; return 1 if fewer than _WANTED per cent of an area's answers agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "image", nargs="?", help="a vmlinuz, a vmlinux or a Debian package (default: Debian's Linux 6.1)"
    )
    parser.add_argument(
        "--area", nargs="+", choices=AREAS, default=[*AREAS], metavar="AREA", help=", ".join(AREAS)
    )
    parser.add_argument("--cases", type=int, default=100, metavar="N", help="number of cases of each area")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument(
        "--record", action="store_true", help="keep the answers as the sample that tests compare"
    )
    options = parser.parse_args()
    image = options.image or str(debian_kernel.image())
    kernels = Kernels(partial(sides.linux, image), sides.ours)
    # The recorded cases of areas that are not run are kept.
    sample = Sample.load() if options.record else Sample()
    tallies = {}
    for name in options.area:
        start = time.monotonic()
        sample.forget(name)
        tally = tallies[name] = _run(kernels, AREAS[name], options, sample)
        for difference in tally.differences[:_SHOWN]:
            print(difference)
        print(
            f"{name}: {tally.agreement:.2f} % of {tally.answers} answers to {tally.cases} cases agree, "
            f"{tally.refused} are refusals, {len(tally.differences)} cases differ; "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    total = sum(tally.answers for tally in tallies.values())
    print(f"{total} answers, {sum(tally.differing for tally in tallies.values())} differ")
    if options.record:
        # Kept cases are only valid for the events that both kernels had when they were recorded.
        is_new = set(options.area) == set(AREAS)
        sample.events = kernels.events if is_new else sample.events & kernels.events
        sample.save()
    return any(tally.agreement < _WANTED for tally in tallies.values())


if __name__ == "__main__":
    sys.exit(main())
