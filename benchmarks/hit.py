"""Time of a hit in each mode and with each kind of handler, minus the time of the unprobed call.

The guest calls int_sqrt(0) in a loop. The figures are the nanoseconds that a probe adds to a call. `kprobefs
bench hit` makes the same measurement and prints more details.
"""

from __future__ import annotations

from common import Distribution, arguments, report, steady

from kprobefs.measure import bench

GOALS = {
    (bench.RECORDING, bench.STEPPED): 100.0,
    (bench.RECORDING, bench.TRAP_FLAG): 100.0,
    (bench.RECORDING, bench.BOOSTED): 60.0,
    (bench.RECORDING, bench.OPTIMIZED): 16.0,
    (bench.RECORDING, bench.SAVE_ALL): 44.0,
    (bench.RETURNING, bench.STEPPED): 200.0,
    (bench.EVENT, bench.STEPPED): 150.0,
    (bench.EVENT, bench.OPTIMIZED): 40.0,
}
"""Handler and mode -> goal for the net nanoseconds of a hit."""


def measure(case: bench.HitCase, hits: int, rounds: int) -> list[Distribution]:
    """Measure a case with `hits` calls in each of `rounds` rounds."""
    figure = bench.measure(case, hits, rounds)
    return [Distribution(f"{case.probe}, {case.mode}", "ns", figure.net, GOALS.get((case.probe, case.mode)))]


def main() -> None:
    """Run the benchmark, and print its figures with their ratios to the first row."""
    parser = arguments(__doc__)
    parser.add_argument("--hits", type=int, default=20000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures: list[Distribution] = []
    for case in bench.cases(bench.ARCHITECTURES[0]):
        figures += steady(options, measure, case, options.hits, options.rounds)
    report(figures, options)


if __name__ == "__main__":
    main()
