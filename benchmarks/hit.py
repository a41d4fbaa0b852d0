"""Time of a hit in each mode and with each kind of handler, less the time of the unprobed call.

The guest calls int_sqrt(0) in a loop. The figures are the nanoseconds that a probe adds to a call.
`kprobefs bench hit` makes the same measurement and prints more details.
"""

from __future__ import annotations

from common import Distribution, arguments, report

from kprobefs.measure import bench


def main() -> None:
    """Run the benchmark, and print its figures with their ratios to the first row."""
    parser = arguments(__doc__)
    parser.add_argument("--hits", type=int, default=20000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures = []
    for case in bench.cases(bench.ARCHITECTURES[0]):
        figure = bench.measure(case, options.hits, options.rounds)
        target = bench.TARGETS.get((case.probe, case.mode))
        figures.append(Distribution(f"{case.probe}, {case.mode}", "ns", figure.net, target))
    report(figures, options.json)


if __name__ == "__main__":
    main()
