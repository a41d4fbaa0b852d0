"""Arrows at the left of a listing, which lead from jumps to their targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two rows of a listing."""

    source: int
    """Index of the row with the jump."""
    target: int
    lane: int
    """Column of the arrow's vertical line, counted from the listing to the left; 0 is next to the listing."""

    @property
    def top(self) -> int:
        """Index of the arrow's upper row."""
        return min(self.source, self.target)

    @property
    def bottom(self) -> int:
        """Index of the arrow's lower row."""
        return max(self.source, self.target)


def arrows(jumps: Iterable[tuple[int, int]], limit: int) -> list[Arrow]:
    """Return arrows for jumps, in at most `limit` lanes. Each jump is (its row, the row of its target).

    A lane is a column of vertical lines. Short arrows are next to the listing. Two arrows in one lane do not
    touch, except if they have the same target. A jump for which there is no lane gets no arrow.
    """
    found: list[Arrow] = []
    for source, target in sorted(set(jumps), key=lambda jump: (abs(jump[0] - jump[1]), jump)):
        for lane in range(limit):
            arrow = Arrow(source, target, lane)
            if all(_are_apart(arrow, other) for other in found if other.lane == lane):
                found.append(arrow)
                break
    return found


def _are_apart(one: Arrow, other: Arrow) -> bool:
    return one.bottom < other.top or other.bottom < one.top or one.target == other.target


def gutter(found: Sequence[Arrow], rows: int) -> list[str]:
    """Return, for each of `rows` rows of a listing, the text that draws the arrows in the row.

    All texts have the same length.
    """
    lanes = 1 + max((arrow.lane for arrow in found), default=-1)
    if not lanes:
        return [""] * rows
    width = lanes + 2
    cells = [[" "] * width for _ in range(rows)]
    for arrow in found:
        column = lanes - 1 - arrow.lane
        for row in range(arrow.top + 1, arrow.bottom):
            cells[row][column] = _crossed(cells[row][column], "|")
    for arrow in found:
        column = lanes - 1 - arrow.lane
        for row in (arrow.source, arrow.target):
            for at in range(column + 1, width - 1):
                cells[row][at] = _crossed(cells[row][at], "-")
        cells[arrow.source][-1] = "-" if cells[arrow.source][-1] == " " else cells[arrow.source][-1]
        cells[arrow.target][-1] = ">"
        if arrow.top == arrow.bottom:
            cells[arrow.top][column] = "o"
            continue
        for row, corner in ((arrow.top, ","), (arrow.bottom, "'")):
            before = cells[row][column]
            cells[row][column] = corner if before in (" ", corner) else "+"
    return ["".join(row) for row in cells]


def _crossed(before: str, line: str) -> str:
    return line if before in (" ", line) else "+"
