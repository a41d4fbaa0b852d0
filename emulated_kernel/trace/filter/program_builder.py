"""Builder of filter programs: it turns && and || into branches, whose targets are filled in later."""

from __future__ import annotations

from collections.abc import Iterable

from emulated_kernel.trace.filter.predicates import ACCEPT, REJECT, FilterProgram, FilterStep, Predicate
from emulated_kernel.util.fast_dataclass import dataclass

Exit = tuple[int, bool]
"""A branch that leaves a fragment: index of its step, and the result on which the branch is taken."""


@dataclass(frozen=True)
class Fragment:
    """A part of a filter: the index of its first step, and the branches that leave it.

    Some branches are taken if the part is true, the others if the part is false.
    """

    start: int
    on_true: tuple[Exit, ...]
    on_false: tuple[Exit, ...]

    def negated(self) -> Fragment:
        """Return the fragment for the same expression with `!` before it."""
        return Fragment(self.start, self.on_false, self.on_true)


class FilterBuilder:
    """Builds a filter program from predicates, in the order in which they are written."""

    def __init__(self) -> None:
        self._predicates: list[Predicate] = []
        self._targets: dict[Exit, int] = {}

    def leaf(self, predicate: Predicate) -> Fragment:
        """Add a predicate as a step, and return the fragment of this step."""
        index = len(self._predicates)
        self._predicates.append(predicate)
        return Fragment(index, ((index, True),), ((index, False),))

    def both(self, left: Fragment, right: Fragment) -> Fragment:
        """Return the fragment for `left && right`: if `left` is true, execution goes on at `right`."""
        self._lead(left.on_true, right.start)
        return Fragment(left.start, right.on_true, left.on_false + right.on_false)

    def either(self, left: Fragment, right: Fragment) -> Fragment:
        """Return the fragment for `left || right`: if `left` is false, execution goes on at `right`."""
        self._lead(left.on_false, right.start)
        return Fragment(left.start, left.on_true + right.on_true, right.on_false)

    def finish(self, whole: Fragment) -> FilterProgram:
        """Return the program of the filter. `whole`: the fragment of the whole filter."""
        self._lead(whole.on_true, ACCEPT)
        self._lead(whole.on_false, REJECT)
        targets = self._targets
        steps = (
            FilterStep(predicate, targets[index, True], targets[index, False])
            for index, predicate in enumerate(self._predicates)
        )
        return FilterProgram(tuple(steps))

    def _lead(self, exits: Iterable[Exit], target: int) -> None:
        self._targets.update(dict.fromkeys(exits, target))
