"""Words of a write(2): how tracing files that take lists split what is written to them."""

from __future__ import annotations

import errno
import re

from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.util.errors import KernelError

WORD_MAX = 127
"""Bytes of the longest word. Mirrors: kernel/trace/trace_events.c:EVENT_BUF_SIZE, PID_BUF_SIZE (v6.1)."""
FUNCTION_WORD_MAX = 670
"""The same of lists of functions. Mirrors: kernel/trace/ftrace.c:FTRACE_BUFF_MAX (v6.1)."""
_WORD = re.compile(rb"[%b]*([^\0%b]*)" % (SPACES.encode("latin-1"), SPACES.encode("latin-1")))


def take_word(data: bytes, longest: int = WORD_MAX) -> tuple[bytes, int]:
    """The first word of `data`, and the bytes that it takes with blanks before and one blank behind.

    The word is empty where there are only blanks. Blanks and NUL end it.
    Raises: KernelError EINVAL (more than `longest` bytes).
    Mirrors: kernel/trace/trace.c:trace_get_user (v6.1).
    """
    found = _WORD.match(data)
    assert found is not None, "it may match nothing"
    if len(found[1]) > longest:
        raise KernelError(errno.EINVAL, "the word is too long")
    return found[1], min(found.end() + 1, len(data))
