"""Alternatives on x86: instructions that a kernel replaces at boot, depending on the features of its CPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from emulated_kernel.util.fast_named_tuple import NamedTuple

CPU_FEATURES = frozenset({26})
"""Numbers (X86_FEATURE) of the CPU's features for which the built-in image has alternatives: XMM2."""
_ENTRY = struct.Struct("<iiHBB")
_RELATIVE = (0xE8, 0xE9)
"""Opcodes of call and jmp. Their displacement must be adjusted if the replacement is copied to its site."""
_NOPS = (
    b"",
    b"\x90",
    b"\x66\x90",
    b"\x0f\x1f\x00",
    b"\x0f\x1f\x40\x00",
    b"\x0f\x1f\x44\x00\x00",
    b"\x66\x0f\x1f\x44\x00\x00",
    b"\x0f\x1f\x80\x00\x00\x00\x00",
    b"\x0f\x1f\x84\x00\x00\x00\x00\x00",
)
"""Number of bytes -> the nop of this size."""


class Alternative(NamedTuple):
    """An alternative: the code at `replacement` replaces the code at `site` if the CPU has `feature`.

    `site` and `replacement` are addresses. `size` and `replacement_size` are the sizes in bytes of the code
    there. `feature` is an X86_FEATURE number.
    """

    site: int
    replacement: int
    feature: int
    size: int
    replacement_size: int


def alternatives(base: int, table: bytes) -> Iterator[Alternative]:
    """Yield the alternatives in `table`, an array of struct alt_instr (v6.1, x86) at address `base`."""
    for at in range(0, len(table) - _ENTRY.size + 1, _ENTRY.size):
        site, replacement, feature, size, replacement_size = _ENTRY.unpack_from(table, at)
        yield Alternative(base + at + site, base + at + 4 + replacement, feature, size, replacement_size)


def replaced(entry: Alternative, code: bytes) -> bytes:
    """Return the bytes that boot writes to the site of `entry`: the replacement, and nops up to `entry.size`.

    `code`: the bytes of the replacement, which begin at `entry.replacement`. The displacement of a call or
    jump is adjusted to the site.

    Mirrors: arch/x86/kernel/alternative.c:apply_alternatives (v6.1).
    """
    if code[:1] and code[0] in _RELATIVE:
        (offset,) = struct.unpack_from("<i", code, 1)
        code = code[:1] + struct.pack("<i", offset + entry.replacement - entry.site) + code[5:]
    return code + nops(entry.size - len(code))


def nops(size: int) -> bytes:
    """Return nops of `size` bytes, each as long as possible.

    Mirrors: arch/x86/kernel/alternative.c:add_nops (v6.1).
    """
    longest = len(_NOPS) - 1
    return _NOPS[longest] * (size // longest) + _NOPS[size % longest]
