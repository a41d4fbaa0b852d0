"""Parser of event filters: predicates, `&&`, `||`, `!` and parentheses, with Linux's errors and columns."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial

from emulated_kernel.trace.filter.fields import FilterField, FilterType, find_event_field
from emulated_kernel.trace.filter.filter_errors import FilterError, FilterParseError
from emulated_kernel.trace.filter.pattern import literal_pattern, parse_pattern
from emulated_kernel.trace.filter.predicates import (
    ComparePredicate,
    CpuPredicate,
    CpusPredicate,
    EventFilter,
    FilterOp,
    FilterProgram,
    FunctionPredicate,
    NeverPredicate,
    Predicate,
    StringPredicate,
)
from emulated_kernel.trace.filter.program_builder import FilterBuilder, Fragment
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords, parse_cpus
from emulated_kernel.trace.ring.trace_entry import EventField
from emulated_kernel.trace.text.chars import ALNUM, SPACES
from emulated_kernel.trace.text.numbers import is_digit, kstrtol, kstrtoul
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

FindField = Callable[[str], FilterField | None]

MAX_FILTER_STR_VAL = 256
"""Maximum length of a string operand in bytes, including its NUL."""
_NUMBER_SIZE = 24
"""Maximum length of a number operand in bytes, including its NUL."""
_QUOTES = "'\""
_NUMBER_SIZES = (1, 2, 4, 8)
_CPU_SIZE = 4
_OPERATORS = "|".join(op.value for op in FilterOp)
_FIELD_AND_OP = lazy_pattern(
    rf"(?P<field>[_{ALNUM}]*)(?P<user>\.ustring)?(?P<function>\.function)?[{SPACES}]*(?P<op>{_OPERATORS})?[{SPACES}]*"
)
_NUMBER = lazy_pattern(f"-?[{ALNUM}]*")
_WORD = lazy_pattern(f"[^{SPACES}]*")
_CPUS = "CPUS"


def parse_event_filter(text: str, fields: Sequence[EventField], words: FilterWords = NO_WORDS) -> EventFilter:
    """Parse the filter `text` of an event whose own fields are `fields`.

    `words`: the features of filters that the kernel's version supports.
    Raises: errors of parse_filter(), KernelError ENOMEM (the limit definition_bytes or user_definition_bytes
    of host memory is reached).
    """
    program = parse_filter(text, partial(find_event_field, fields), words)
    return EventFilter(text, program, words.memory.charge_text(text))


def parse_filter(text: str, find_field: FindField, words: FilterWords = NO_WORDS) -> FilterProgram:
    """Parse a filter, and return its program.

    `text` has one character per byte, and no trailing blanks. `find_field` maps a name to the field, or to
    None. `words`: the features of filters that the kernel's version supports.

    Raises: FilterParseError ESRCH (a quote is missing), ENOENT (a `)` is missing), EPERM (a `(`, a field's
    name or an operator is missing), EINVAL (all other errors).
    Mirrors: kernel/trace/trace_events_filter.c:process_preds (v6.1).
    """
    _check_nesting(text)
    return _FilterParser(text, find_field, words).parse()


def _check_nesting(text: str) -> None:
    """Check the parentheses and quotes of a filter. Raises: FilterParseError (unbalanced, or empty).

    As in Linux, this first pass has its own errnos, such as ESRCH for a missing quote.
    Mirrors: kernel/trace/trace_events_filter.c:calc_stack (v6.1).
    """
    opened: list[int] = []
    quote = ""
    quote_at = 0
    is_empty = True
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char == "(":
            opened.append(at)
        elif char == ")":
            if not opened:
                raise FilterParseError(FilterError.TOO_MANY_CLOSE, at, errno.EPERM)
            opened.pop()
        elif char not in SPACES:
            is_empty = False
            if char in _QUOTES:
                quote = char
                quote_at = at
    if quote:
        raise FilterParseError(FilterError.MISSING_QUOTE, quote_at, errno.ESRCH)
    if opened:
        raise FilterParseError(FilterError.TOO_MANY_OPEN, opened[-1], errno.ENOENT)
    if is_empty:
        raise FilterParseError(None)


@dataclass
class _Level:
    """Parser state of an expression in parentheses, or of the whole filter.

    `any_of`: the finished operands of `||`. `all_of`: the operands so far of the current `&&`. Both are None
    if there are none. `negated`: whether `!` precedes the parentheses.
    """

    negated: bool
    any_of: Fragment | None = None
    all_of: Fragment | None = None
    wants_operand: bool = False
    """Whether the last token was `&&` or `||`."""


class _FilterParser:
    """Parser of a filter. It has an explicit stack of levels, as parentheses may nest arbitrarily deep."""

    def __init__(self, text: str, find_field: FindField, words: FilterWords) -> None:
        self._text = text
        self._words = words
        self._find_field = find_field
        self._builder = FilterBuilder()
        self._levels = [_Level(negated=False)]
        self._negated = False
        self._at = 0

    def parse(self) -> FilterProgram:
        """Parse the whole filter, and return its program.

        Mirrors: kernel/trace/trace_events_filter.c:predicate_parse (v6.1).
        """
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "(":
                self._levels.append(_Level(self._take_negation()))
            elif char == "!" and self._text[self._at + 1 : self._at + 2] not in ("=", "~"):
                self._negated = not self._negated
            elif char not in SPACES:
                self._add(self._builder.leaf(self._predicate()), self._take_negation())
                self._after_operand()
                continue
            self._at += 1
        level = self._levels[0]
        if level.wants_operand:
            raise FilterParseError(FilterError.INVALID_FILTER, len(self._text))
        whole = self._close(level)
        if whole is None:
            raise FilterParseError(FilterError.NO_FILTER, len(self._text))
        return self._builder.finish(whole)

    def _take_negation(self) -> bool:
        negated = self._negated
        self._negated = False
        return negated

    def _after_operand(self) -> None:
        """Parse the text after an operand: closing parentheses, and then an operator or the filter's end."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "&|" and self._text[self._at + 1 : self._at + 2] == char:
                self._at += 2
                self._operator(char)
                return
            if char == ")":
                level = self._levels.pop()
                inner = self._close(level)
                assert inner is not None, "an operand was read in these parentheses"
                self._add(inner, level.negated)
            elif char not in SPACES:
                raise FilterParseError(FilterError.TOO_MANY_PREDS, self._at, errno.EPERM)
            self._at += 1

    def _add(self, operand: Fragment, negated: bool) -> None:
        level = self._levels[-1]
        operand = operand.negated() if negated else operand
        level.all_of = self._builder.both(level.all_of, operand) if level.all_of else operand
        level.wants_operand = False

    def _operator(self, char: str) -> None:
        level = self._levels[-1]
        if char == "|":
            level.any_of = self._close(level)
            level.all_of = None
        level.wants_operand = True

    def _close(self, level: _Level) -> Fragment | None:
        """Return the expression that was parsed at `level`, or None if the expression is empty."""
        if level.any_of is None or level.all_of is None:
            return level.any_of or level.all_of
        return self._builder.either(level.any_of, level.all_of)

    # `FIELD OP VALUE`. Linux: columns of its errors are one higher than the position.

    def _predicate(self) -> Predicate:
        """Parse a predicate (`FIELD OP VALUE`) and return it.

        Mirrors: kernel/trace/trace_events_filter.c:parse_pred (v6.1).
        """
        found = _FIELD_AND_OP.match(self._text, self._at)
        assert found is not None, "it may match nothing"
        if not found["field"]:
            raise FilterParseError(None, code=errno.EPERM)
        field = self._find_field(found["field"])
        if field is None:
            raise _error(FilterError.FIELD_NOT_FOUND, found.end("field"))
        self._at = found.end()
        if found["function"] and not self._words.has_functions:
            raise _error(FilterError.INVALID_OP, found.start("function"))
        if found["op"] is None:
            raise _error(FilterError.INVALID_OP, self._at)
        op = FilterOp(found["op"])
        if found["function"]:
            return self._function(field, op)
        if self._words.has_cpus and self._text.startswith(_CPUS, self._at):
            return self._cpus(field, op)
        first = self._text[self._at : self._at + 1]
        if first and first in _QUOTES:
            # Linux: `.ustring` is accepted, but ignored, for fields of other types.
            by_user = found["user"] is not None and field.type is FilterType.PTR_STRING
            return self._string(field, FilterType.USER_STRING if by_user else field.type, op)
        if first == "-" or is_digit(first):
            return self._number(field, op)
        raise _error(FilterError.INVALID_VALUE, self._at)

    def _function(self, field: FilterField, op: FilterOp) -> Predicate:
        """Parse the operand of `FIELD.function`: the name of a function, or an address within a function.

        A blank or the end of the filter ends the name.
        Mirrors: kernel/trace/trace_events_filter.c:parse_pred (v6.12).
        """
        declared = field.declared
        if declared.size != self._words.word_size:
            raise _error(FilterError.ILLEGAL_FIELD_OP, self._at)
        if op not in (FilterOp.EQ, FilterOp.NE):
            raise _error(FilterError.INVALID_OP, self._at)
        start = self._at
        if is_digit(self._text, start):
            found = _NUMBER.match(self._text, start)
            assert found is not None, "it may match nothing"
            self._at = found.end()
            if len(found[0]) >= _NUMBER_SIZE:
                raise _error(FilterError.OPERAND_TOO_LONG, self._at)
            try:
                place: str | int = kstrtoul(found[0])
            except KernelError:
                raise _error(FilterError.INVALID_VALUE, self._at) from None
        else:
            found = _WORD.match(self._text, start)
            assert found is not None, "it may match nothing"
            self._at = found.end()
            place = found[0]
        function = self._words.find_function(place)
        if function is None:
            raise _error(FilterError.NO_FUNCTION, self._at)
        return FunctionPredicate(op, declared.offset, declared.size, function)

    def _cpus(self, field: FilterField, op: FilterOp) -> Predicate:
        """Parse `CPUS{LIST}`, the value after `field` and `op`, and return the predicate.

        Mirrors: kernel/trace/trace_events_filter.c:parse_pred (v6.12).
        """
        if field.type.is_string or op not in (FilterOp.EQ, FilterOp.NE, FilterOp.BAND):
            raise _error(FilterError.ILLEGAL_FIELD_OP, self._at)
        start = self._at + len(_CPUS) + 1
        if self._text[start - 1 : start] != "{":
            raise _error(FilterError.MISSING_BRACE_OPEN, start)
        end = self._text.find("}", start)
        if end < 0:
            raise _error(FilterError.MISSING_BRACE_CLOSE, len(self._text))
        cpus = parse_cpus(self._text[start:end], self._words.cpus) if end > start else None
        if cpus is None:
            raise _error(FilterError.INVALID_CPULIST, end)
        self._at = end + 1
        if len(cpus) == 1 and field.type is not FilterType.CPUMASK:
            return _compare(field, FilterOp.EQ if op is FilterOp.BAND else op, min(cpus))
        return CpusPredicate(op, field.type, field.declared.offset, field.declared.size, cpus)

    def _string(self, field: FilterField, source: FilterType, op: FilterOp) -> Predicate:
        start = self._at
        if op not in (FilterOp.EQ, FilterOp.NE, FilterOp.GLOB):
            raise _error(FilterError.ILLEGAL_FIELD_OP, start)
        if not source.is_string:
            raise _error(FilterError.EXPECT_DIGIT, start)
        end = self._text.index(self._text[start], start + 1)
        value = self._text[start + 1 : end].encode("latin-1")
        if len(value) >= MAX_FILTER_STR_VAL:
            raise _error(FilterError.OPERAND_TOO_LONG, end)
        self._at = end + 1
        pattern = literal_pattern(value)
        negated = op is FilterOp.NE
        if op is FilterOp.GLOB:
            pattern, negated = parse_pattern(value)
        return StringPredicate(source, field.declared.offset, field.declared.size, pattern, negated)

    def _number(self, field: FilterField, op: FilterOp) -> Predicate:
        start = self._at
        if field.type.is_string:
            raise _error(FilterError.EXPECT_STRING, start)
        if op is FilterOp.GLOB:
            raise _error(FilterError.ILLEGAL_FIELD_OP, start)
        found = _NUMBER.match(self._text, start)
        assert found is not None, "it may match nothing"
        self._at = found.end()
        if len(found[0]) >= _NUMBER_SIZE:
            raise _error(FilterError.OPERAND_TOO_LONG, self._at)
        parse = kstrtol if field.declared.is_signed else kstrtoul
        try:
            value = parse(found[0])
        except KernelError:
            raise _error(FilterError.ILLEGAL_INTVAL, start) from None
        return _compare(field, op, value)


def _compare(field: FilterField, op: FilterOp, value: int) -> Predicate:
    """Return the predicate that compares a field with the number `value` by the operator `op`.

    Linux: the value is truncated to the size of the field.
    """
    declared = field.declared
    is_cpu = field.type is FilterType.CPU
    size = _CPU_SIZE if is_cpu else declared.size
    if size not in _NUMBER_SIZES or (is_cpu and op is FilterOp.BAND):
        return NeverPredicate()
    low = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    value = int.from_bytes(low, "little", signed=declared.is_signed)
    if is_cpu:
        return CpuPredicate(op, value)
    return ComparePredicate(op, declared.offset, size, declared.is_signed, value)


def _error(error: FilterError, at: int) -> FilterParseError:
    return FilterParseError(error, at + 1)
