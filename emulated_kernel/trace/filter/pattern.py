"""String patterns of event filters: whole strings, prefixes, suffixes, substrings, and globs."""

from __future__ import annotations

import re
from enum import Enum, auto

from emulated_kernel.util.fast_dataclass import dataclass

_ANY = frozenset(range(1, 256))


class MatchType(Enum):
    """Way in which a pattern is matched. Mirrors: kernel/trace/trace.h:regex_type (v6.1)."""

    FULL = auto()
    FRONT_ONLY = auto()
    MIDDLE_ONLY = auto()
    END_ONLY = auto()
    GLOB = auto()


@dataclass(frozen=True)
class StringPattern:
    """A string pattern. `text` has no NUL. `glob` is the regular expression of a GLOB, else None."""

    type: MatchType
    text: bytes
    glob: re.Pattern[bytes] | None = None

    def matches(self, data: bytes, length: int) -> bool:
        """Return True if the string at the start of `data` matches the pattern.

        `length` is the size of the string's field, including the NUL. If `length` is 0, only the NUL ends the
        string. If `length` is not 0, MIDDLE_ONLY and END_ONLY may also match bytes of the field after the
        NUL.
        Linux: END_ONLY assumes that the string fills its field, so it does not match the end of a short
        `comm`.
        Mirrors: kernel/trace/trace_events_filter.c:regex_match_full and others (v6.1).
        """
        match self.type:
            case MatchType.FULL:
                return _until_nul(data[:length] if length else data) == self.text
            case MatchType.FRONT_ONLY:
                return (not length or len(self.text) <= length) and data.startswith(self.text)
            case MatchType.MIDDLE_ONLY:
                return self.text in (data[:length] if length else _until_nul(data))
            case MatchType.END_ONLY:
                return length > len(self.text) and data[: length - 1].endswith(self.text)
            case MatchType.GLOB:
                return self.glob is not None and self.glob.fullmatch(_until_nul(data)) is not None


def literal_pattern(text: bytes) -> StringPattern:
    """Return the pattern for an operand of `==` or `!=`, which matches only the whole string."""
    return StringPattern(MatchType.FULL, text)


def parse_pattern(text: bytes) -> tuple[StringPattern, bool]:
    """Return the pattern for an operand of `~`, and whether a leading `!` negates the pattern.

    Linux: if the text starts with a digit, it is not a pattern, and only an equal string matches.
    Mirrors: kernel/trace/trace_events_filter.c:filter_parse_regex (v6.1).
    """
    negated = text.startswith(b"!")
    return classify_pattern(text[1:] if negated else text), negated


def classify_pattern(text: bytes) -> StringPattern:
    """Return the pattern of a text that has no negation; `!` is an ordinary character."""
    if text[:1].isdigit():
        return literal_pattern(text)
    inner = text[1:-1] if len(text) > 1 else b""
    if any(special in text for special in (b"[", b"?", b"\\")) or b"*" in inner:
        return StringPattern(MatchType.GLOB, text, _compiled(text))
    head = text.startswith(b"*")
    tail = len(text) > 1 and text.endswith(b"*")
    types = {
        (False, False): MatchType.FULL,
        (False, True): MatchType.FRONT_ONLY,
        (True, False): MatchType.END_ONLY,
        (True, True): MatchType.MIDDLE_ONLY,
    }
    return StringPattern(types[head, tail], text[head : len(text) - tail])


def _until_nul(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Compile a glob to a regular expression.

    A glob may contain `*`, `?`, `[a-z]`, `[!a-z]`, and a backslash before any byte. A match needs to
    backtrack only to the last `*`. Therefore the part between two `*` is an atomic group. This limits the
    time of a match to the product of the lengths of glob and string.
    Mirrors: lib/glob.c:glob_match (v6.1).
    """
    parts = [b""]
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            parts.append(b"")
        elif byte == b"?":
            parts[-1] += b"."
        elif byte == b"[" and (bracket := _bracket(pattern, at)):
            members, at = bracket
            parts[-1] += b"[%b]" % b"".join(b"\\x%02x" % each for each in members) if members else b"(?!)"
        else:
            if byte == b"\\":
                # A backslash at the end is ignored.
                byte = pattern[at : at + 1]
                at += 1
            parts[-1] += re.escape(byte)
    first, *others = parts
    for part in others[:-1]:
        first += b"(?>.*?%b)" % part
    return re.compile(first + (b".*" + others[-1] if others else b""), re.DOTALL)


def _bracket(pattern: bytes, at: int) -> tuple[frozenset[int], int] | None:
    """Parse a class such as `[a-z]`; `at` is the offset after the `[`.

    Return the bytes that the class matches, and the offset after its `]`. Return None if the class has no
    closing `]`. A `]` that comes first is a member of the class. A backslash has no special meaning in a
    class.
    """
    inverted = pattern[at : at + 1] == b"!"
    at += inverted
    members: set[int] = set()
    while True:
        if at >= len(pattern):
            return None
        low = pattern[at]
        high = low
        at += 1
        if pattern[at : at + 1] == b"-" and pattern[at + 1 : at + 2] != b"]":
            if at + 1 >= len(pattern):
                return None
            high = pattern[at + 1]
            at += 2
        members.update(range(low, high + 1))
        if pattern[at : at + 1] == b"]":
            return (_ANY - members if inverted else frozenset(members)), at + 1
