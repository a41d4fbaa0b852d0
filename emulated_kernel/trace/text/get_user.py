"""Words of writes: splitting of writes to tracing files that accept lists."""

from __future__ import annotations

import errno
import re

from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.util.errors import KernelError

WORD_MAX = 127
"""Bytes of the longest word. Mirrors: kernel/trace/trace_events.c:EVENT_BUF_SIZE, PID_BUF_SIZE (v6.1)."""
FUNCTION_WORD_MAX = 670
"""Bytes of the longest word in lists of functions. Mirrors: kernel/trace/ftrace.c:FTRACE_BUFF_MAX (v6.1)."""
_BLANKS = SPACES.encode("latin-1")
_WORD = re.compile(rb"[%b]*([^\0%b]*)" % (_BLANKS, _BLANKS))
_REST = re.compile(rb"([^\0%b]*)" % _BLANKS)


class WordParser:
    """Takes the words of one open file out of its writes. A word may come in several writes.

    Mirrors: kernel/trace/trace.h:struct trace_parser (v6.1).
    """

    def __init__(self, longest: int) -> None:
        """`longest` is the number of bytes that a word may have."""
        self._longest = longest
        self._has_failed = False
        self.rest = b""
        """The word that no blank has ended so far; b"" if there is none."""

    def take(self, data: bytes, *, is_at_start: bool = False) -> tuple[bytes, int]:
        """Return the word that `data` ends, and the bytes that were taken.

        The word is b"" if `data` has only blanks, or ends within the word, which then is in `rest`. The taken
        bytes include the blanks before the word and one blank or NUL after it. A write with `is_at_start`,
        at file position 0, begins a new word. After a word that is too long, all words are dropped.
        Raises: KernelError EINVAL (more than `longest` bytes).
        Mirrors: kernel/trace/trace.c:trace_get_user (v6.1.176).
        """
        before = b"" if is_at_start else self.rest
        self.rest = b""
        found = (_REST if before else _WORD).match(data)
        assert found is not None, "the patterns also match the empty string"
        word = before + found[1]
        if len(word) > self._longest:
            self._has_failed = True
            raise KernelError(errno.EINVAL, f"write: a word has more than {self._longest} bytes")
        size = min(found.end() + 1, len(data))
        if self._has_failed:
            return b"", size
        if found.end() == len(data):
            self.rest = word
            return b"", size
        return word, size


def take_word(data: bytes) -> tuple[bytes, int]:
    """Return the first word of `data`, and the bytes that it takes, for files that keep no rest of a write.

    Raises: KernelError EINVAL (more than WORD_MAX bytes).
    """
    parser = WordParser(WORD_MAX)
    word, size = parser.take(data)
    return word or parser.rest, size
