"""The kernel's tables about its own text, decoded: where it may fault, is patched, or traps."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.util.fast_dataclass import dataclass

RETURN_SIZE = 5
"""Bytes of a return site."""
BLACKLISTED = ("kprobes", "noinstr", "entry")
"""Parts of the text that mustn't be probed, in the order of debugfs kprobes/blacklist."""
_JMP32 = 0xE9
_PLAIN_RETURN = b"\xc3\xcc\xcc\xcc\xcc"
_KEY_FLAGS = 3
"""Bits of a key's address that say something else, in jump labels and static calls."""
_LONGEST = 1 << 9
"""Bytes of a source file's name, with its end."""


class Range(NamedTuple):
    """Addresses from `start` up to, but not including, `end`."""

    start: int
    end: int


class ExTableEntry(NamedTuple):
    """A faulting instruction's address and where to go on."""

    insn: int
    fixup: int


class BlacklistEntry(NamedTuple):
    """A function that may not be probed."""

    start: int
    end: int
    name: str


class JumpLabel(NamedTuple):
    """A nop that becomes a jump to `target` when the static key at `key` is switched on."""

    code: int
    target: int
    key: int


class StaticCall(NamedTuple):
    """A call that the static call at `key` leads to another function."""

    site: int
    key: int


@dataclass(frozen=True, slots=True)
class BugEntry:
    """A ud2 of BUG() or WARN()."""

    address: int
    file: str
    line: int
    flags: int


class ProbedTables(Protocol):
    """A kernel's text and its tables about it; all addresses are virtual."""

    @property
    def kallsyms(self) -> Kallsyms: ...

    @property
    def text_ranges(self) -> Iterable[Range]:
        """Start and end of each piece of text, the kernel's own first."""

    @property
    def blacklist(self) -> Iterable[BlacklistEntry]:
        """Start, end and name of functions that mustn't be probed."""

    @property
    def mcount(self) -> Collection[int]:
        """ftrace's sites."""

    @property
    def ex_table(self) -> Iterable[ExTableEntry]:
        """Instructions that may fault, and their fixups."""

    @property
    def bugs(self) -> Collection[int]:
        """Traps of BUG() and WARN()."""

    @property
    def jump_labels(self) -> Iterable[JumpLabel]:
        """Code, target and key."""

    @property
    def static_calls(self) -> Iterable[StaticCall]:
        """Site, key, and whether it is a tail call."""

    @property
    def data(self) -> Iterable[tuple[int, bytes]]:
        """What isn't text, with its addresses."""

    def read(self, va: int, size: int, /) -> bytes:
        """Bytes as they were before anything was probed."""


def words(data: bytes, size: int = 8) -> tuple[int, ...]:
    """An array of unsigned longs, as mcount's and the blacklist's; `size`: bytes of one."""
    return struct.unpack(f"<{len(data) // size}{'Q' if size == 8 else 'I'}", data[: len(data) // size * size])


def ex_table(address: int, data: bytes, layout: str = "<iii") -> Iterator[ExTableEntry]:
    """Each entry is relative to where it stands. Mirrors: include/asm-generic/extable.h (v5.0 to v6.12)"""
    for at, (insn, fixup, *_) in _entries(layout, data):
        yield ExTableEntry(address + at + insn, address + at + 4 + fixup)


def jump_labels(address: int, data: bytes, layout: str = "<iiq") -> Iterator[JumpLabel]:
    """Mirrors: include/linux/jump_label.h:struct jump_entry (v6.1)"""
    for at, (code, target, key) in _entries(layout, data):
        yield JumpLabel(address + at + code, address + at + 4 + target, address + at + 8 + key & ~_KEY_FLAGS)


def static_calls(address: int, data: bytes) -> Iterator[StaticCall]:
    """Mirrors: include/linux/static_call_types.h:struct static_call_site (v6.1)"""
    for at, (site, key) in _entries("<ii", data):
        yield StaticCall(address + at + site, address + at + 4 + key & ~_KEY_FLAGS)


def bugs(address: int, data: bytes, string: Callable[[int, int], str]) -> dict[int, BugEntry]:
    """By address; `string` reads a text of so many bytes at most.

    Mirrors: include/asm-generic/bug.h:struct bug_entry (v6.1), with CONFIG_DEBUG_BUGVERBOSE.
    """
    found = {}
    for at, (bug, file, line, flags) in _entries("<iiHH", data):
        where = address + at + bug
        found[where] = BugEntry(where, string(address + at + 4 + file, _LONGEST), line, flags)
    return found


def return_sites(address: int, data: bytes) -> Iterator[int]:
    """The jumps to the return thunk. Mirrors: arch/x86/kernel/alternative.c:apply_returns (v6.1)"""
    for at, (site,) in _entries("<i", data):
        yield address + at + site & (1 << 64) - 1


def plain_return(code: bytes) -> bytes | None:
    """What boot makes of a jump to the return thunk where the CPU needs none; None for other code."""
    return _PLAIN_RETURN if len(code) == RETURN_SIZE and code[0] == _JMP32 else None


def blacklist(symbols: Kallsyms, listed: Iterable[int], areas: Iterable[Range]) -> Iterator[BlacklistEntry]:
    """Functions at these addresses, then all in these areas.

    Mirrors: kernel/kprobes.c:populate_kprobe_blacklist, kprobe_add_area_blacklist (v6.1)
    """
    yield from filter(None, (blacklisted(symbols, address) for address in listed))
    for area in areas:
        address = area.start
        while address < area.end and (entry := blacklisted(symbols, address)) is not None:
            yield entry
            address = max(entry.end, address + 1)


def blacklisted(symbols: Kallsyms, address: int) -> BlacklistEntry | None:
    """The function at an address, from there to its end; None where there is none."""
    found = symbols.lookup(address)
    if found is None:
        return None
    return BlacklistEntry(address, address + found.symbol.size - found.offset, found.name)


def _entries(layout: str, data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Offset and fields of each whole entry."""
    entry = struct.Struct(layout)
    whole = data[: len(data) // entry.size * entry.size]
    return zip(range(0, len(whole), entry.size), entry.iter_unpack(whole), strict=True)
