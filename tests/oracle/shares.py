"""How much of what registers a real kernel optimized, by ways of counting: python -m tests.oracle.shares.

It was asked of instructions here and there; each answer is one point.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.oracle.recorded import Recording, oracle_directory, recordings

Weight = Callable[[int, int], float]
"""Of each point of a function, by how many it has and the function's bytes."""
WAYS: dict[str, Weight] = {
    "each point as often": lambda _points, _size: 1.0,
    "each function as often": lambda points, _size: 1 / points,
    "each function by its size": lambda points, size: size / points,
}


def by_function(recording: Recording) -> Iterator[tuple[list[bool], int]]:
    """Of each function that was asked about: whether its points are optimized, and its bytes.

    Left out are points that don't register, and fentry sites.
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
    """In per cent."""
    optimized = registered = 0.0
    for answers, size in by_function(recording):
        each = weight(len(answers), size)
        optimized += each * sum(answers)
        registered += each * len(answers)
    return 100 * optimized / registered


def main() -> None:
    """Prints a row for each way, a column for each recording."""
    found = list(recordings(oracle_directory()))
    print("", *(recording.version for recording in found), sep=" | ")
    for way, weight in WAYS.items():
        print(way, *(f"{share(recording, weight):.1f}" for recording in found), sep=" | ")


if __name__ == "__main__":
    main()
