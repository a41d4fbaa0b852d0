"""machine/call: guest functions called by lines of text, and their results."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable

from emulated_kernel.machine.guest_calls import MAX_ARGUMENTS
from emulated_kernel.util.errors import KernelError


class Calls:
    """Calls in a guest whose registers have so many bytes; `result` is what the last write's calls gave."""

    def __init__(self, call: Callable[..., int], word_size: int) -> None:
        """`call`: of a function by name, with numbers and strings. Raises: KernelError."""
        self._call_function = call
        self._bits = 8 * word_size
        self.result = ""

    def execute(self, data: bytes) -> int:
        """Call a function for each line; the results can be read afterwards.

        Raises: KernelError (of the first call that fails; the calls before it were made).
        """
        # Of any bytes: what a string of the guest holds is its user's business.
        lines = filter(None, map(str.strip, data.decode("utf-8", "surrogateescape").split("\n")))
        self.result = ""
        for line in lines:
            try:
                self.result += f"{self._call(line)}\n"
            except KernelError as error:
                self.result += f"{line.split(maxsplit=1)[0]}: {error.strerror}\n"
                raise
        return len(data)

    def _call(self, line: str) -> str:
        """`FUNCTION ARG...`: numbers, strings in quotes; the result in hexadecimal and decimal.

        Raises: KernelError EINVAL (malformed), ERANGE (a number wider than a register), E2BIG (too many
        arguments), ENOENT (no such function), EFAULT (it oopsed, see dmesg), EIO (it doesn't come back).
        """
        name, *words = _split(line)
        if len(words) > MAX_ARGUMENTS:
            raise KernelError(errno.E2BIG, f"at most {MAX_ARGUMENTS} arguments")
        value = self._call_function(name, *(_argument(word, self._bits) for word in words))
        return f"{name} = {_result(value, self._bits)}"


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise KernelError(errno.EINVAL, str(error)) from error


def _result(value: int, bits: int) -> str:
    """A result register: nothing tells its C type, so a negative int is shown beside the whole."""
    if bits > 32 and value >> 31 == 1:
        return f"0x{value:x} ({value}, as an int {value - (1 << 32)})"
    return f"0x{value:x} ({value - (1 << bits) if value >> bits - 1 else value})"


def _argument(word: str, bits: int) -> int | str:
    if len(word) >= 2 and word[0] in "\"'" and word[-1] == word[0]:
        return word[1:-1]
    try:
        number = int(word, 0)
    except ValueError:
        raise KernelError(errno.EINVAL, f"{word!r} is neither a number nor a string in quotes") from None
    if not -(1 << bits - 1) <= number < 1 << bits:
        raise KernelError(errno.ERANGE, f"{word} doesn't fit into a register")
    return number
