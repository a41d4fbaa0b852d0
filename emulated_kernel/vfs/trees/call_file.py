"""The file machine/call: a write calls guest functions, one per line, and a read shows their results."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable

from emulated_kernel.machine.guest_calls import MAX_ARGUMENTS
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.open_file import Steps


class Calls:
    """The state of machine/call. `result` is the file's text: the results of the calls in the last write."""

    def __init__(self, call: Callable[..., int], word_size: int) -> None:
        """Create the state before the first write.

        `call` calls a guest function by name, with numbers and strings as arguments. A call that fails raises
        KernelError. `word_size` is the size of the guest's registers in bytes.
        """
        self._call_function = call
        self._bits = 8 * word_size
        self.result = ""

    def execute(self, data: bytes) -> Steps:
        """Call a function for each line, one per step, and store the results for the next read.

        Raises: KernelError, the error of the first call that fails. The calls before it keep their effect.
        """
        results: list[str] = []
        try:
            # Strings may contain any bytes.
            for text in data.decode("utf-8", "surrogateescape").split("\n"):
                line = text.strip()
                if not line:
                    continue
                if results:
                    yield
                try:
                    results.append(f"{self._call(line)}\n")
                except KernelError as error:
                    results.append(f"{line.split(maxsplit=1)[0]}: {error.strerror}\n")
                    raise
        finally:
            self.result = "".join(results)
        return len(data)

    def _call(self, line: str) -> str:
        """Execute the line `FUNCTION ARG...`, and return `FUNCTION = RESULT`.

        An argument is a number or a quoted string.
        Raises: KernelError EINVAL (malformed), ERANGE (a number wider than a register), E2BIG (too many
        arguments), ENOENT (no such function), EFAULT (the function oopsed; see dmesg), EIO (the function
        didn't return).
        """
        name, *words = _split(line)
        if len(words) > MAX_ARGUMENTS:
            raise KernelError(errno.E2BIG, f"{len(words)} arguments; write at most {MAX_ARGUMENTS}")
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
    """Return a function's result as text, in hexadecimal and as a signed number of `bits` bits.

    `value`: content of the result register. The C type of the result is unknown. If the low 32 bits of a
    wider register are a negative int, and all bits above them are 0, this int is shown too.
    """
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
