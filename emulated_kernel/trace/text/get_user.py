"""Splitting of writes to tracing files that accept lists: take_word()."""

from __future__ import annotations

import errno
import re

from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.util.errors import KernelError

WORD_MAX = 127
"""Maximum length of a word in bytes.

Mirrors: kernel/trace/trace_events.c:EVENT_BUF_SIZE, PID_BUF_SIZE (v6.1).
"""
FUNCTION_WORD_MAX = 670
"""Maximum length in bytes of a word in a list of functions.

Mirrors: kernel/trace/ftrace.c:FTRACE_BUFF_MAX (v6.1).
"""
_WORD = re.compile(rb"[%b]*([^\0%b]*)" % (SPACES.encode("latin-1"), SPACES.encode("latin-1")))


def take_word(data: bytes, longest: int = WORD_MAX) -> tuple[bytes, int]:
    """Return the first word of `data`, and the number of bytes that it takes.

    The bytes include the blanks before the word and one blank after it. The word ends at a blank or NUL, and
    is empty if there are only blanks.
    Raises: KernelError EINVAL (more than `longest` bytes).
    Mirrors: kernel/trace/trace.c:trace_get_user (v6.1).
    """
    found = _WORD.match(data)
    assert found is not None, "the pattern also matches the empty string"
    if len(found[1]) > longest:
        raise KernelError(errno.EINVAL, f"write: a word has {len(found[1])} bytes; at most {longest} fit")
    return found[1], min(found.end() + 1, len(data))
