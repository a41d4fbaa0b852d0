"""The language of event filters: accepted filters, errors with their columns, and the programs that filters
compile to.
"""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.trace.filter.fields import FilterField, FilterType, filter_type_of
from emulated_kernel.trace.filter.filter_errors import FilterError, FilterParseError
from emulated_kernel.trace.filter.parse import parse_filter
from emulated_kernel.trace.filter.pattern import literal_pattern
from emulated_kernel.trace.filter.predicates import (
    ACCEPT,
    REJECT,
    ComparePredicate,
    CpuPredicate,
    FilterOp,
    FilterProgram,
    FilterStep,
    NeverPredicate,
    StringPredicate,
)
from emulated_kernel.trace.ring.trace_entry import EventField, RawEntry
from tests.trace.events.kernel import no_string


def _field(type_: FilterType, offset: int, size: int, is_signed: bool) -> FilterField:
    return FilterField(type_, EventField("", "", offset, size, is_signed))


FIELDS = {name: _field(FilterType.OTHER, at, 1, False) for at, name in enumerate("abcdefgh")}
FIELDS |= {
    "s16": _field(FilterType.OTHER, 8, 2, True),
    "u64": _field(FilterType.OTHER, 8, 8, False),
    "odd": _field(FilterType.OTHER, 8, 3, False),
    "str": _field(FilterType.DYN_STRING, 8, 4, True),
    "fix": _field(FilterType.STATIC_STRING, 8, 16, True),
    "cpu": _field(FilterType.CPU, 0, 0, True),
    "comm": _field(FilterType.COMM, 0, 0, True),
    "ptr": _field(FilterType.PTR_STRING, 8, 8, False),
}


def _truth(text: str, values: tuple[int, ...]) -> bool:
    return parse_filter(text, FIELDS.get).accepts(RawEntry(bytes(values), 0, b"", no_string))


def _failure(text: str) -> tuple[str, FilterError | None, int]:
    with pytest.raises(FilterParseError) as caught:
        parse_filter(text, FIELDS.get)
    return caught.value.name, caught.value.error, caught.value.column


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("a==1", "a"),
        ("!a==1", "not a"),
        ("!!a==1", "a"),
        ("a==1 && b==1 || c==1", "a and b or c"),
        ("a==1 || b==1 && c==1", "a or b and c"),
        ("(a==1 || b==1) && c==1", "(a or b) and c"),
        ("!(a==1 || !b==1) && c==1", "not (a or not b) and c"),
        ("!(!(a==1) && (b==1 || !(c==1)))", "not (not a and (b or not c))"),
        ("((a==1))||!((b==1)&&c==1)", "a or not (b and c)"),
        ("a!=1 && ! b!=1", "not a and b"),
        ("a==1 && !(b==1 || c==1) || d==1 && !e==1", "a and not (b or c) or d and not e"),
    ],
)
def test_logic(text: str, python: str) -> None:
    code = compile(python, "", "eval")
    for values in itertools.product((0, 1), repeat=5):
        names = dict(zip("abcde", values, strict=True))
        assert _truth(text, values) == bool(eval(code, names)), values


_LEAVES = st.sampled_from("abcdefgh").map(lambda name: (f"{name}==1", name))
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda one: (f"!({one[0]})", f"(not ({one[1]}))")),
        st.tuples(inner, inner).map(
            lambda two: (f"({two[0][0]})&&{two[1][0]}", f"({two[0][1]}) and {two[1][1]}")
        ),
        st.tuples(inner, inner).map(
            lambda two: (f"({two[0][0]}) || {two[1][0]}", f"({two[0][1]}) or {two[1][1]}")
        ),
    ),
    max_leaves=8,
)


@given(_EXPRESSIONS, st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_logic_of_any_shape(expression: tuple[str, str], values: list[int]) -> None:
    text, python = expression
    names = dict(zip("abcdefgh", values, strict=True))
    assert _truth(text, tuple(values)) == bool(eval(python, names))


def test_steps_branch_forward() -> None:
    program = parse_filter("a==1 && b==2 || !c==3", FIELDS.get)
    predicates = [ComparePredicate(FilterOp.EQ, at, 1, False, at + 1) for at in range(3)]
    assert program.steps == (
        FilterStep(predicates[0], 1, 2),
        FilterStep(predicates[1], ACCEPT, 2),
        FilterStep(predicates[2], REJECT, ACCEPT),
    )


@pytest.mark.parametrize(
    ("text", "predicate"),
    [
        ("s16 <= -0x10", ComparePredicate(FilterOp.LE, 8, 2, True, -16)),
        ("s16==0xffff", ComparePredicate(FilterOp.EQ, 8, 2, True, -1)),
        ("s16 == -32769", ComparePredicate(FilterOp.EQ, 8, 2, True, 32767)),
        ("a > 0x1ff", ComparePredicate(FilterOp.GT, 0, 1, False, 255)),
        ("a&010", ComparePredicate(FilterOp.BAND, 0, 1, False, 8)),
        ("u64 < 0xffffffffffffffff", ComparePredicate(FilterOp.LT, 8, 8, False, (1 << 64) - 1)),
        ("u64.ustring >= 1", ComparePredicate(FilterOp.GE, 8, 8, False, 1)),
        ("odd != 1", NeverPredicate()),
        ("cpu & 1", NeverPredicate()),
        ("cpu == 0x1ffffffff", CpuPredicate(FilterOp.EQ, -1)),
        ('str != "x"', StringPredicate(FilterType.DYN_STRING, 8, 4, literal_pattern(b"x"), True)),
        ("fix=='a\"b'", StringPredicate(FilterType.STATIC_STRING, 8, 16, literal_pattern(b'a"b'), False)),
        ("comm ~ '!5'", StringPredicate(FilterType.COMM, 0, 0, literal_pattern(b"5"), True)),
        ("\xa0a\t==\v1", ComparePredicate(FilterOp.EQ, 0, 1, False, 1)),
    ],
)
def test_predicates(text: str, predicate: object) -> None:
    assert [step.predicate for step in parse_filter(text, FIELDS.get).steps] == [predicate]


@pytest.mark.parametrize(
    ("text", "code", "error", "column"),
    [
        ("", "EINVAL", None, 0),
        ("( )", "EINVAL", None, 0),
        ("&& a==1", "EPERM", None, 0),
        ("a==1 || )", "EPERM", FilterError.TOO_MANY_CLOSE, 8),
        ("(a==1) && ()", "EPERM", None, 0),
        ("((a==1)", "ENOENT", FilterError.TOO_MANY_OPEN, 0),
        ("a==1 && ((b==1)", "ENOENT", FilterError.TOO_MANY_OPEN, 8),
        ("a==')' || ((b==1) && c", "ENOENT", FilterError.TOO_MANY_OPEN, 10),
        ("str=='(\"", "ESRCH", FilterError.MISSING_QUOTE, 5),
        ("!", "EINVAL", FilterError.NO_FILTER, 1),
        ("a==1 ||", "EINVAL", FilterError.INVALID_FILTER, 7),
        ("a==1 && !", "EINVAL", FilterError.INVALID_FILTER, 9),
        ("a==1 | b==1", "EPERM", FilterError.TOO_MANY_PREDS, 5),
        ("a==1 (b==1)", "EPERM", FilterError.TOO_MANY_PREDS, 5),
        ("a==1 && nosuch", "EINVAL", FilterError.FIELD_NOT_FOUND, 15),
        ("stacktrace == 1", "EINVAL", FilterError.FIELD_NOT_FOUND, 11),
        ("a", "EINVAL", FilterError.INVALID_OP, 2),
        ("a.function == 1", "EINVAL", FilterError.INVALID_OP, 2),
        ("a !~ 1", "EINVAL", FilterError.INVALID_OP, 3),
        ("!= 1", "EPERM", None, 0),
        ("a ==", "EINVAL", FilterError.INVALID_VALUE, 5),
        ("a &&", "EINVAL", FilterError.INVALID_VALUE, 4),
        ("a < '1'", "EINVAL", FilterError.ILLEGAL_FIELD_OP, 5),
        ("a == '1'", "EINVAL", FilterError.EXPECT_DIGIT, 6),
        ("a ~ 1", "EINVAL", FilterError.ILLEGAL_FIELD_OP, 5),
        ("str ~ 1", "EINVAL", FilterError.EXPECT_STRING, 7),
        ("comm == -", "EINVAL", FilterError.EXPECT_STRING, 9),
        ("a == -", "EINVAL", FilterError.ILLEGAL_INTVAL, 6),
        ("a == 1x", "EINVAL", FilterError.ILLEGAL_INTVAL, 6),
        ("a == 0x10000000000000000", "EINVAL", FilterError.ILLEGAL_INTVAL, 6),
        ("s16 == 0x8000000000000000", "EINVAL", FilterError.ILLEGAL_INTVAL, 8),
        (f"a == {'1' * 24}", "EINVAL", FilterError.OPERAND_TOO_LONG, 30),
        (f"str == '{'x' * 256}'", "EINVAL", FilterError.OPERAND_TOO_LONG, 265),
    ],
)
def test_errors(text: str, code: str, error: FilterError | None, column: int) -> None:
    assert _failure(text) == (code, error, column)


def test_operands_may_be_as_long_as_linux_has_room_for() -> None:
    assert _truth(f"fix != '{'x' * 255}' && u64 == {'0' * 23}", (0,) * 24)


def test_nesting_is_limited_by_the_length_alone() -> None:
    depth = 2000
    assert _truth("!(" * depth + "a==1" + ")" * depth, (1,))


_NAMES = st.sampled_from(["a", "s16", "str", "cpu", "comm", ".ustring", "1", "-1", "0x", "é"])
_SIGNS = st.sampled_from(
    ["==", "!=", "<", "&", "~", "&&", "||", "|", "!", "(", ")", "'x*'", "'", '"', " ", "\n"]
)
_WORDS = _NAMES | _SIGNS


def _parsed(text: str) -> FilterProgram | FilterParseError:
    try:
        return parse_filter(text, FIELDS.get)
    except FilterParseError as failure:
        return failure


@given(st.lists(_WORDS, max_size=14).map("".join))
def test_anything_is_a_filter_or_an_error(text: str) -> None:
    program = _parsed(text)
    if isinstance(program, FilterParseError):
        assert program.errno in (errno.EPERM, errno.ENOENT, errno.ESRCH, errno.EINVAL)
        assert 0 <= program.column <= len(text) + 1
        return
    assert program.steps
    for index, step in enumerate(program.steps):
        assert all(target in (ACCEPT, REJECT) or target > index for target in (step.on_true, step.on_false))
    program.accepts(RawEntry(bytes(16), 0, b"x", no_string))


def _strings(address: int, is_user: bool) -> bytes | None:
    """Return the string at `address`. Address 16 is valid in user space, where "inner" is stored, and in the
    kernel, where "outer" is stored.
    """
    return {(16, True): b"inner\0", (16, False): b"outer\0"}.get((address, is_user))


@pytest.mark.parametrize(
    ("text", "pointer", "accepted"),
    [
        ('ptr == "outer"', 16, True),
        ('ptr == "inner"', 16, False),
        ('ptr != "inner"', 16, True),
        ('ptr.ustring == "inner"', 16, True),
        ('ptr.ustring ~ "*er"', 16, True),
        ('ptr.ustring ~ "out*"', 16, False),
        ('ptr.ustring != "inner"', 16, False),
        ('ptr == "outer"', 17, False),
        ('ptr != "outer"', 17, False),
    ],
)
def test_strings_by_their_pointer(text: str, pointer: int, accepted: bool) -> None:
    entry = RawEntry(bytes(8) + pointer.to_bytes(8, "little"), 0, b"x", _strings)
    assert parse_filter(text, FIELDS.get).accepts(entry) is accepted


def test_a_pointer_to_a_string_is_no_number() -> None:
    assert _failure("ptr == 16") == ("EINVAL", FilterError.EXPECT_STRING, 8)


@pytest.mark.parametrize(
    ("declared", "type_"),
    [
        ("const char *", FilterType.PTR_STRING),
        ("char *", FilterType.PTR_STRING),
        ("const char **", FilterType.OTHER),
        ("char[16]", FilterType.STATIC_STRING),
        ("__data_loc char[]", FilterType.DYN_STRING),
        ("unsigned char", FilterType.OTHER),
    ],
)
def test_types(declared: str, type_: FilterType) -> None:
    assert filter_type_of(declared) is type_
