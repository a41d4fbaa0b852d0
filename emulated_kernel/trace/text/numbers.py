"""Parsers of numbers that mirror lib/kstrtox.c: the strict kstrto*(), and the lenient simple_strtoul()."""

from __future__ import annotations

import errno

from emulated_kernel.util.errors import KernelError

_ULLONG_MAX = (1 << 64) - 1
_MAX_DECIMAL = 20
"""Number of digits of the largest 64-bit number."""
_DIGITS = {c: i for i, c in enumerate("0123456789abcdef")} | {c: 10 + i for i, c in enumerate("ABCDEF")}


def is_digit(text: str, index: int = 0) -> bool:
    """Return True if the character at `index` exists and is an ASCII digit."""
    return "0" <= text[index : index + 1] <= "9"


def _radix(text: str, base: int) -> tuple[int, int]:
    """Return the base of the number at the start of `text`, and the length of its prefix: 2 for 0x, else 0.

    If `base` is 0, the start of the number selects base 8, 10 or 16. Otherwise the base is `base`.
    """
    prefixed = text[:1] == "0" and text[1:2] in ("x", "X")
    if base == 0:
        octal_or_decimal = 8 if text[:1] == "0" else 10
        base = 16 if prefixed and text[2:3] in _DIGITS else octal_or_decimal
    return base, 2 if base == 16 and prefixed else 0


def _digits(text: str, start: int, base: int) -> tuple[int, int]:
    """Return the number at index `start`, of any size, and the index of the first character after it.

    If there is no digit at `start`, return 0 and `start`.
    """
    value = 0
    index = start
    while index < len(text) and _DIGITS.get(text[index], base) < base:
        value = value * base + _DIGITS[text[index]]
        index += 1
    return value, index


def _unsigned(text: str, base: int, sign: str = "") -> int:
    """Parse the number `text` without a sign; `sign` precedes it in the text of an error."""
    if (
        base in (0, 10)
        and text.isdecimal()
        and text[0] != "0"
        and text.isascii()
        and len(text) < _MAX_DECIMAL
    ):
        # A fast path for most numbers, such as the offsets of thousands of probes.
        return int(text)
    base, start = _radix(text, base)
    value, end = _digits(text, start, base)
    if value > _ULLONG_MAX:
        raise KernelError(errno.ERANGE, _out_of_range(sign + text))
    if end == start or text[end:] not in ("", "\n"):
        raise KernelError(errno.EINVAL, f"{_shown(sign + text)}: not a number")
    return value


def _shown(text: str) -> str:
    return repr(text.removesuffix("\n"))


def _out_of_range(text: str) -> str:
    return f"{_shown(text)}: the number is out of range"


def kstrtoul(text: str, base: int = 0, bits: int = 64) -> int:
    """Parse an unsigned number of `bits` bits in base `base`; if `base` is 0, a prefix selects the base.

    A sign "+" and a final newline are allowed.
    Raises: KernelError EINVAL (not a number), ERANGE (too large).
    Mirrors: lib/kstrtox.c:kstrtoull (v6.1).
    """
    digits = text.removeprefix("+")
    value = _unsigned(digits, base, text[: len(text) - len(digits)])
    if value >> bits:
        raise KernelError(errno.ERANGE, _out_of_range(text))
    return value


def kstrtol(text: str, base: int = 0, bits: int = 64) -> int:
    """Parse a signed number of `bits` bits in base `base`; if `base` is 0, a prefix selects the base.

    A final newline is allowed.
    Raises: KernelError EINVAL (not a number), ERANGE (too large or too small).
    Mirrors: lib/kstrtox.c:kstrtoll (v6.1).
    """
    value = -_unsigned(text[1:], base, "-") if text[:1] == "-" else kstrtoul(text, base)
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise KernelError(errno.ERANGE, _out_of_range(text))
    return value


def simple_strtoul(text: str, bits: int = 64) -> tuple[int, int]:
    """Return the number at the start of `text`, modulo 2**bits, and its length; (0, 0) if there is no number.

    Mirrors: lib/vsprintf.c:simple_strtoul (v6.1).
    """
    base, start = _radix(text, 0)
    value, end = _digits(text, start, base)
    return value & (1 << bits) - 1, end
