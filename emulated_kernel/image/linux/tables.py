"""The kernel's tables about its own text, decoded: where it may fault, is patched, or traps."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from emulated_kernel.image.image import BugEntry, ExTableEntry, JumpLabel, StaticCall
from emulated_kernel.image.linux.vmlinux import LinkedMemory

RETURN_SIZE = 5
"""Bytes of a return site."""
_JMP32 = 0xE9
_PLAIN_RETURN = b"\xc3\xcc\xcc\xcc\xcc"
_KEY_FLAGS = 3
"""Bits of a key's address that say something else, in jump labels and static calls."""
_LONGEST = 1 << 9
"""Bytes of a source file's name, with its end."""


def words(data: bytes) -> tuple[int, ...]:
    """An array of unsigned longs, as mcount's and the blacklist's."""
    return struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])


def ex_table(address: int, data: bytes) -> Iterator[ExTableEntry]:
    """Each entry is relative to where it stands. Mirrors: include/asm-generic/extable.h (v5.0 to v6.12)"""
    for at, (insn, fixup, _) in _entries("<iii", data):
        yield ExTableEntry(address + at + insn, address + at + 4 + fixup)


def jump_labels(address: int, data: bytes) -> Iterator[JumpLabel]:
    """Mirrors: include/linux/jump_label.h:struct jump_entry (v6.1)"""
    for at, (code, target, key) in _entries("<iiq", data):
        yield JumpLabel(address + at + code, address + at + 4 + target, address + at + 8 + key & ~_KEY_FLAGS)


def static_calls(address: int, data: bytes) -> Iterator[StaticCall]:
    """Mirrors: include/linux/static_call_types.h:struct static_call_site (v6.1)"""
    for at, (site, key) in _entries("<ii", data):
        whole = address + at + 4 + key
        yield StaticCall(address + at + site, whole & ~_KEY_FLAGS, bool(whole & 1))


def bugs(address: int, data: bytes, vmlinux: LinkedMemory) -> Iterator[BugEntry]:
    """Mirrors: include/asm-generic/bug.h:struct bug_entry (v6.1), with CONFIG_DEBUG_BUGVERBOSE."""
    for at, (bug, file, line, flags) in _entries("<iiHH", data):
        yield BugEntry(address + at + bug, vmlinux.string(address + at + 4 + file, _LONGEST), line, flags)


def return_sites(address: int, data: bytes) -> Iterator[int]:
    """The jumps to the return thunk. Mirrors: arch/x86/kernel/alternative.c:apply_returns (v6.1)"""
    for at, (site,) in _entries("<i", data):
        yield address + at + site & (1 << 64) - 1


def plain_return(code: bytes) -> bytes | None:
    """What boot makes of a jump to the return thunk where the CPU needs none; None for other code."""
    return _PLAIN_RETURN if len(code) == RETURN_SIZE and code[0] == _JMP32 else None


def _entries(layout: str, data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Offset and fields of each whole entry."""
    entry = struct.Struct(layout)
    whole = data[: len(data) // entry.size * entry.size]
    return zip(range(0, len(whole), entry.size), entry.iter_unpack(whole), strict=True)
