"""Compiled event filters: predicates on an entry, and steps that branch on results of predicates."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from enum import Enum

from emulated_kernel.trace.filter.fields import FilterType
from emulated_kernel.trace.filter.pattern import StringPattern
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Charge


class FilterOp(Enum):
    """Comparison operators of filters.

    An operator comes before its prefixes, such as `<=` before `<`, because the parser tries them in order.
    """

    GLOB = "~"
    NE = "!="
    EQ = "=="
    LE = "<="
    LT = "<"
    GE = ">="
    GT = ">"
    BAND = "&"

    def compare(self, left: int, right: int) -> bool:
        """Return True if `left` and `right` fulfil the comparison."""
        return bool(_COMPARE[self](left, right))


_COMPARE: Mapping[FilterOp, Callable[[int, int], int]] = {
    FilterOp.EQ: operator.eq,
    FilterOp.NE: operator.ne,
    FilterOp.LE: operator.le,
    FilterOp.LT: operator.lt,
    FilterOp.GE: operator.ge,
    FilterOp.GT: operator.gt,
    FilterOp.BAND: operator.and_,
}


@dataclass(frozen=True)
class ComparePredicate:
    """Predicate that compares a number in the entry, `size` bytes at `offset`, with `value`.

    `value` is in the range of the number's type.
    """

    op: FilterOp
    offset: int
    size: int
    is_signed: bool
    value: int

    def test(self, entry: RawEntry) -> bool:
        """Return True if the comparison with the entry's number holds."""
        data = entry.data[self.offset : self.offset + self.size]
        return self.op.compare(int.from_bytes(data, "little", signed=self.is_signed), self.value)


@dataclass(frozen=True)
class CpuPredicate:
    """Predicate that compares the number of the CPU on which the event occurred with `value`."""

    op: FilterOp
    value: int

    def test(self, entry: RawEntry) -> bool:
        """Return True if the comparison with the CPU's number holds."""
        return self.op.compare(entry.cpu, self.value)


TASK_COMM_LEN = 16
POINTED_STRING_MAX = 1024
"""Maximum length in bytes of a string that is compared through a pointer, including the NUL.

Mirrors: kernel/trace/trace_events_filter.c:USTRING_BUF_SIZE (v6.1).
"""


@dataclass(frozen=True)
class StringPredicate:
    """Predicate that matches a string field with a pattern.

    `offset` and `size` are the offset and the size of the field in bytes.
    """

    source: FilterType
    offset: int
    size: int
    pattern: StringPattern
    negated: bool

    def test(self, entry: RawEntry) -> bool:
        """Return True if the entry's string matches the pattern; with `negated`, if it does not match.

        If the string cannot be read, return False in both cases.
        """
        found = self._string(entry)
        return found is not None and self.pattern.matches(*found) is not self.negated

    def _string(self, entry: RawEntry) -> tuple[bytes, int] | None:
        """Return the bytes from the string's start on, and a length; None if the string is unreadable.

        The length is the parameter `length` of StringPattern.matches(): the size of a static field or of a
        task's name, the length in __data_loc, or the number of bytes read through a pointer.
        """
        match self.source:
            case FilterType.COMM:
                return entry.comm.ljust(TASK_COMM_LEN, b"\0"), TASK_COMM_LEN
            case FilterType.STATIC_STRING:
                return entry.data[self.offset :], self.size
            case FilterType.DYN_STRING:
                location = int.from_bytes(entry.data[self.offset : self.offset + 4], "little")
                return entry.data[location & 0xFFFF :], location >> 16
            case _:
                pointer = int.from_bytes(entry.data[self.offset : self.offset + self.size], "little")
                text = entry.string_at(pointer, self.source is FilterType.USER_STRING)
                return None if text is None else (text, len(text))


@dataclass(frozen=True)
class FunctionPredicate:
    """Predicate that tests whether an address in the entry is within a function.

    Mirrors: kernel/trace/trace_events_filter.c:filter_pred_function (v6.12).
    """

    op: FilterOp
    offset: int
    size: int
    function: range

    def test(self, entry: RawEntry) -> bool:
        """Return True if the entry's address is in the function; if `op` is NE, return True if it is not."""
        address = int.from_bytes(entry.data[self.offset : self.offset + self.size], "little")
        return (address in self.function) is (self.op is FilterOp.EQ)


@dataclass(frozen=True)
class CpusPredicate:
    """Predicate that compares the set `cpus` with a cpumask field, a number in a field, or the record's CPU.

    As in Linux, a number or the record's CPU counts as a set of one CPU, so it never equals a set of several.
    Mirrors: kernel/trace/trace_events_filter.c:do_filter_cpumask, do_filter_scalar_cpumask,
    do_filter_cpumask_scalar (v6.12).
    """

    op: FilterOp
    source: FilterType
    offset: int
    size: int
    cpus: frozenset[int]

    def test(self, entry: RawEntry) -> bool:
        """Return True if the comparison with the entry's CPUs holds.

        They must be equal to `cpus` (`op` is EQ), differ from `cpus` (NE), or have a CPU in common with
        `cpus` (BAND).
        """
        found = self._cpus(entry)
        if self.op is FilterOp.BAND:
            return not found.isdisjoint(self.cpus)
        return (found == self.cpus) is (self.op is FilterOp.EQ)

    def _cpus(self, entry: RawEntry) -> frozenset[int]:
        if self.source is FilterType.CPU:
            return frozenset((entry.cpu,))
        number = int.from_bytes(entry.data[self.offset : self.offset + self.size], "little")
        if self.source is FilterType.OTHER:
            return frozenset((number,))
        start = number & 0xFFFF
        mask = int.from_bytes(entry.data[start : start + (number >> 16)], "little")
        return frozenset(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


@dataclass(frozen=True)
class NeverPredicate:
    """A predicate that is always false.

    As in Linux, two predicates are always false: a comparison of a number with a field whose size is not 1,
    2, 4 or 8 bytes, such as an array, and the operator `&` on the field CPU.
    """

    def test(self, entry: RawEntry) -> bool:
        """Return False for any entry."""
        del entry
        return False


Predicate = (
    ComparePredicate | CpuPredicate | StringPredicate | FunctionPredicate | CpusPredicate | NeverPredicate
)

ACCEPT = -1
REJECT = -2


@dataclass(frozen=True)
class FilterStep:
    """Step of a filter program: it tests a predicate, and branches on the result.

    `on_true` and `on_false` are ACCEPT, REJECT or the index of a later step.
    """

    predicate: Predicate
    on_true: int
    on_false: int


@dataclass(frozen=True)
class FilterProgram:
    """A compiled filter: a sequence of steps. Execution begins at the first one.

    Mirrors: kernel/trace/trace_events_filter.c:struct prog_entry (v6.1), in its behaviour.
    """

    steps: tuple[FilterStep, ...]

    def accepts(self, entry: RawEntry) -> bool:
        """Return True if the filter accepts the entry.

        Mirrors: kernel/trace/trace_events_filter.c:filter_match_preds (v6.1).
        """
        at = 0
        while at >= 0:
            step = self.steps[at]
            at = step.on_true if step.predicate.test(entry) else step.on_false
        return at == ACCEPT


@dataclass(frozen=True)
class EventFilter:
    """A filter of an event: its text, and its program.

    If parsing failed, `program` is None, and `text` contains the error.
    """

    text: str
    program: FilterProgram | None
    charge: Charge | None = None
    """Charge for the host memory that the filter takes; None if the memory is not charged."""

    def accepts(self, entry: RawEntry) -> bool:
        """Return True if the filter's program accepts the entry, or if the filter has no program."""
        return self.program is None or self.program.accepts(entry)
