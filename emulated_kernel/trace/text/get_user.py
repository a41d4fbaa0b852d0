"""Splitting of writes to tracing files that accept lists of words."""

from __future__ import annotations

import errno

from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

WORD_MAX = 127
"""Maximum length in bytes of a word in a list of events or pids.

Mirrors: kernel/trace/trace_events.c:EVENT_BUF_SIZE, kernel/trace/trace.c:PID_BUF_SIZE (v6.1).
"""
FUNCTION_WORD_MAX = 670
"""Maximum length in bytes of a word in a list of functions.

Mirrors: kernel/trace/ftrace.c:FTRACE_BUFF_MAX (v6.1).
"""
_BLANKS = SPACES.encode("latin-1")
_WORD = lazy_pattern(rb"[%b]*([^\0%b]*)" % (_BLANKS, _BLANKS))
_REST = lazy_pattern(rb"([^\0%b]*)" % _BLANKS)


class WordParser:
    """Parser of the words that are written to one open file.

    A word may be divided among several writes.

    Mirrors: kernel/trace/trace.h:struct trace_parser (v6.1).
    """

    def __init__(self, longest: int) -> None:
        """Create a parser that has read nothing. `longest` is the maximum length of a word in bytes."""
        self._longest = longest
        self._has_failed = False
        self.rest = b""
        """The start of a word that no blank has ended yet; b"" if there is none."""

    def take(self, data: bytes, start: int = 0, *, is_at_start: bool = False) -> tuple[bytes, int]:
        """Return the first word that ends in `data` after the index `start`, and the number of bytes taken.

        The bytes taken include the blanks before the word, and one blank or NUL after it. The word is b"" if
        `data` has only blanks. It is also b"" if `data` ends within the word; `rest` then keeps the word's
        start.
        `is_at_start`: the write is at file position 0, so it does not continue a word of an earlier write.
        After a word that is too long, all later words of the open file are dropped: the word is always b"".
        Raises: KernelError EINVAL (the word has more than `longest` bytes; see the constructor).
        Mirrors: kernel/trace/trace.c:trace_get_user (v6.1.176).
        """
        before = b"" if is_at_start else self.rest
        self.rest = b""
        found = (_REST if before else _WORD).match(data, start)
        assert found is not None, "the patterns also match the empty string"
        word = before + found[1]
        if len(word) > self._longest:
            self._has_failed = True
            raise KernelError(errno.EINVAL, f"write: a word has more than {self._longest} bytes")
        size = min(found.end() + 1, len(data)) - start
        if self._has_failed:
            return b"", size
        if found.end() == len(data):
            self.rest = word
            return b"", size
        return word, size


def take_word(data: bytes, start: int = 0) -> tuple[bytes, int]:
    """Return the first word of `data` from the index `start` on (b"" if none), and the number of bytes taken.

    The bytes taken include the blanks before the word, and one blank or NUL after it. This function is for
    files in which a word cannot continue in the next write.
    Raises: KernelError EINVAL (the word has more than WORD_MAX bytes).
    """
    parser = WordParser(WORD_MAX)
    word, size = parser.take(data, start)
    return word or parser.rest, size
