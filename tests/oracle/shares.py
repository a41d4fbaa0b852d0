"""Share of the registered probes that a real kernel optimized, by several ways to count.

python -m tests.oracle.shares
The kernel was asked about a sample of instructions; each answer is one point.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.oracle.recorded import Recording, oracle_directory, recordings

Weight = Callable[[int, int], float]
"""Function that returns the weight of a point from the function's number of points and its size in bytes."""
WAYS: dict[str, Weight] = {
    "each point as often": lambda _points, _size: 1.0,
    "each function as often": lambda points, _size: 1 / points,
    "each function by its size": lambda points, size: size / points,
}


def by_function(recording: Recording) -> Iterator[tuple[list[bool], int]]:
    """Yield (list of optimized or not for each point, size in bytes) of each function in a recording.

    Points that cannot be registered and fentry sites are left out.
    """
    functions = sorted(recording.sample.functions, key=lambda function: function.addr)
    starts = [function.addr for function in functions]
    points: dict[int, list[bool]] = defaultdict(list)
    for point in recording.points:
        if point.addr is None or point.errno != "0" or point.flags in ("?", "[FTRACE]"):
            continue
        at = bisect_right(starts, point.addr) - 1
        if at >= 0 and point.addr < functions[at].end:
            points[at].append(point.flags == "[OPTIMIZED]")
    for at, answers in points.items():
        yield answers, functions[at].size


def share(recording: Recording, weight: Weight) -> float:
    """Return the share of optimized points in percent."""
    optimized = registered = 0.0
    for answers, size in by_function(recording):
        each = weight(len(answers), size)
        optimized += each * sum(answers)
        registered += each * len(answers)
    return 100 * optimized / registered


def main() -> None:
    """Print a row for each way to count, and a column for each recording."""
    found = list(recordings(oracle_directory()))
    print("", *(recording.version for recording in found), sep=" | ")
    for way, weight in WAYS.items():
        print(way, *(f"{share(recording, weight):.1f}" for recording in found), sep=" | ")


if __name__ == "__main__":
    main()
