"""Parsers of numbers and switches that are written to control files, with Linux's rules."""

from __future__ import annotations

import errno
import re

from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

_UNSIGNED = lazy_pattern(rb"\+?([0-9]+)\n?")
_INTEGER = lazy_pattern(rb"(-?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)(?=[ \t\n]|\Z)")
_INTEGER_LIMIT = 20
"""Maximum number of characters of a sysctl's number, including sign and leading zeros.

Mirrors: kernel/sysctl.c:proc_get_long (v6.1).
"""
_HEXADECIMAL = lazy_pattern(rb"[0-9a-fA-F]+")
_CHUNK_DIGITS = 8
_NUMBER_BUFFER = 31
_SWITCHES = {b"y": True, b"t": True, b"1": True, b"n": False, b"f": False, b"0": False}
_SWITCHES_AFTER_O = {b"n": True, b"f": False}


def shown(data: bytes) -> str:
    """Return the start of the first line of `data` in quotes, for the text of an error."""
    return repr(bytes_to_text(data[:_NUMBER_BUFFER].partition(b"\n")[0]))


def kstrtobool(data: bytes) -> bool:
    """Parse a switch: return True for 1, y, t or on, and False for 0, n, f or off.

    Only the first character counts, or the first two if the first is "o". The case is ignored.
    Raises: KernelError EINVAL (any other text). Mirrors: lib/kstrtox.c:kstrtobool (v6.1).
    """
    lowered = data[:2].lower()
    table, key = (_SWITCHES_AFTER_O, lowered[1:]) if lowered[:1] == b"o" else (_SWITCHES, lowered[:1])
    if key not in table:
        raise KernelError(errno.EINVAL, f"{shown(data)}: not a switch; write 0 or 1")
    return table[key]


def kstrtoul(data: bytes) -> int:
    """Parse an unsigned decimal number of 64 bits, with at most one newline after it.

    Raises: KernelError EINVAL (no such number), ERANGE (it has more than 64 bits).
    Mirrors: lib/kstrtox.c:kstrtoul_from_user (v6.1).
    """
    text = data[:_NUMBER_BUFFER].split(b"\0", 1)[0]
    match = _UNSIGNED.fullmatch(text)
    if match is None:
        raise KernelError(errno.EINVAL, f"{shown(text)}: not an unsigned number")
    value = int(match[1])
    if value >= 1 << 64:
        raise KernelError(errno.ERANGE, f"{shown(text)}: the number has more than 64 bits")
    return value


def switch(data: bytes) -> bool:
    """Parse a number as kstrtoul() does: return True for 1, False for 0, and refuse any other number.

    The file `enable` of an event has these rules.

    Raises: KernelError EINVAL (neither 0 nor 1), ERANGE (the number has more than 64 bits).
    """
    value = kstrtoul(data)
    if value > 1:
        raise KernelError(errno.EINVAL, f"{value}: neither 0 nor 1")
    return bool(value)


def sysctl_switch(data: bytes) -> bool:
    """Parse a number as sysctl_int() does: return True for 1, False for 0, and refuse any other number.

    Blanks around the number are skipped.

    Raises: KernelError EINVAL. Mirrors: kernel/sysctl.c:proc_dointvec_minmax (v6.1).
    """
    value = sysctl_int(data)
    if value not in (0, 1):
        raise KernelError(errno.EINVAL, f"{value}: neither 0 nor 1")
    return value == 1


def sysctl_int(data: bytes) -> int:
    """Parse an int that is decimal, octal (0...) or hexadecimal (0x...), as a sysctl does.

    Blanks around the number are skipped.

    Raises: KernelError EINVAL (no such number, or outside the range of an int).
    Mirrors: kernel/sysctl.c:proc_dointvec (v6.1).
    """
    match = _INTEGER.match(data.lstrip())
    if match is None or len(match[0]) > _INTEGER_LIMIT:
        raise KernelError(errno.EINVAL, f"{shown(data)}: not a number")
    sign, digits = match.groups()
    is_octal = digits[:1] == b"0" and digits[1:2] not in (b"x", b"X")
    value = int(sign + digits, 8 if is_octal else 0)
    if not -(1 << 31) <= value < 1 << 31:
        raise KernelError(errno.EINVAL, f"{value}: not an int")
    return value


def cpumask(data: bytes, cpus: int) -> int:
    """Parse a CPU mask of `cpus` bits: hexadecimal chunks of 32 bits with commas between them.

    Raises: KernelError EINVAL (not hexadecimal), EOVERFLOW (a chunk has more than 32 bits, or the mask more
    than `cpus`).
    Mirrors: lib/bitmap.c:bitmap_parse (v6.1).
    """
    text = re.split(rb"[\n\0]", data, maxsplit=1)[0].replace(b",", b" ")
    mask = 0
    chunks = text.split()
    for chunk in chunks:
        if not _HEXADECIMAL.fullmatch(chunk):
            raise KernelError(errno.EINVAL, f"{shown(chunk)}: not hexadecimal")
        if len(chunk) > _CHUNK_DIGITS:
            raise KernelError(errno.EOVERFLOW, f"{shown(chunk)}: a chunk has at most 32 bits; add commas")
        mask = mask << 4 * _CHUNK_DIGITS | int(chunk, 16)
    if mask >> cpus or len(chunks) > -(-cpus // (4 * _CHUNK_DIGITS)):
        raise KernelError(errno.EOVERFLOW, f"{shown(text)}: no such CPU; the last one is {cpus - 1}")
    return mask


def ascii_lines(data: bytes) -> list[str]:
    """Split written data into lines. Return lines that are not blank, without blanks around them.

    Raises: KernelError EINVAL (the data is not ASCII).
    """
    try:
        lines = [line.strip() for line in data.decode("ascii").split("\n")]
    except UnicodeDecodeError as error:
        raise KernelError(errno.EINVAL, f"byte {data[error.start]:#x} at {error.start}: not ASCII") from error
    return [line for line in lines if line]
