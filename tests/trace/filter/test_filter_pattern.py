"""String patterns of event filters: the kind of a pattern's text, and the strings that each kind matches."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.trace.filter.pattern import MatchType, StringPattern, literal_pattern, parse_pattern


@pytest.mark.parametrize(
    ("text", "type_", "inner"),
    [
        (b"", MatchType.FULL, b""),
        (b"abc", MatchType.FULL, b"abc"),
        (b"abc*", MatchType.FRONT_ONLY, b"abc"),
        (b"*abc", MatchType.END_ONLY, b"abc"),
        (b"*abc*", MatchType.MIDDLE_ONLY, b"abc"),
        (b"*", MatchType.END_ONLY, b""),
        (b"**", MatchType.MIDDLE_ONLY, b""),
        (b"***", MatchType.GLOB, b"***"),
        (b"a*c", MatchType.GLOB, b"a*c"),
        (b"*a*c", MatchType.GLOB, b"*a*c"),
        (b"a?", MatchType.GLOB, b"a?"),
        (b"[ab]*", MatchType.GLOB, b"[ab]*"),
        (b"a\\*", MatchType.GLOB, b"a\\*"),
        (b"5*", MatchType.FULL, b"5*"),
    ],
)
def test_kinds(text: bytes, type_: MatchType, inner: bytes) -> None:
    for negation in (b"", b"!"):
        pattern, negated = parse_pattern(negation + text)
        assert (pattern.type, pattern.text, negated) == (type_, inner, bool(negation))


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (b"abc", b"abc", [b"ab", b"abcd", b"Abc"]),
        (b"ab*", b"abc", [b"a", b"xab"]),
        (b"*bc", b"abc", [b"bcd", b"c"]),
        (b"*b*", b"abc", [b"ac"]),
        (b"a?c", b"abc", [b"ac", b"abbc"]),
        (b"a*c*e", b"abcde", [b"abcd", b"ae"]),
        (b"[a-c]x", b"bx", [b"dx", b"-x", b"x"]),
        (b"[!a-c]x", b"dx", [b"bx", b"x"]),
        (b"[]a]", b"]", [b"[]a]"]),
        (b"[a-]", b"-", [b"b"]),
        (b"[ab", b"[ab", [b"a"]),
        (b"[a-", b"[a-", [b"a", b"-"]),
        (b"\\*?", b"*a", [b"aa"]),
        (b"a?\\", b"ab", [b"ab\\"]),
        (b"[\\]?", b"\\x", [b"ax"]),
    ],
)
def test_matching(pattern: bytes, matching: bytes, others: list[bytes]) -> None:
    parsed, _ = parse_pattern(pattern)
    for text in (matching, *others):
        assert parsed.matches(text + b"\0tail", len(text) + 1) is (text == matching)


def test_a_string_without_a_length_ends_at_its_nul() -> None:
    data = b"abc\0def"
    assert literal_pattern(b"abc").matches(data, 0)
    assert parse_pattern(b"ab*")[0].matches(data, 0)
    assert parse_pattern(b"*b*")[0].matches(data, 0)
    assert not parse_pattern(b"*d*")[0].matches(data, 0)
    assert not parse_pattern(b"*c")[0].matches(data, 0)


def test_room_behind_the_nul_counts_where_linux_counts_it() -> None:
    room = b"sh".ljust(16, b"\0")
    assert literal_pattern(b"sh").matches(room, 16)
    assert not StringPattern(MatchType.END_ONLY, b"sh").matches(room, 16)
    assert StringPattern(MatchType.END_ONLY, b"sh").matches(b"a".ljust(13, b"a") + b"sh\0", 16)
    assert StringPattern(MatchType.MIDDLE_ONLY, b"b").matches(b"a\0b\0", 4)


def test_a_pattern_longer_than_the_room_never_matches() -> None:
    assert not parse_pattern(b"abcd*")[0].matches(b"abcdef", 3)
    assert not parse_pattern(b"*abcd*")[0].matches(b"abcdef", 3)


def test_globs_take_no_exponential_time() -> None:
    assert not parse_pattern(b"a*" * 60 + b"[b]")[0].matches(b"a" * 4000 + b"\0", 4001)


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=8))
def test_globs_agree_with_fnmatch(pattern: str, text: str) -> None:
    parsed, _ = parse_pattern(pattern.encode())
    data = text.encode() + b"\0"
    assert parsed.matches(data, len(data)) == fnmatch.fnmatchcase(text, pattern)
