"""Decoders of the kernel's tables about its text: exceptions, jump labels, static calls, bugs, returns."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple

RETURN_SIZE = 5
"""Size in bytes of a return site, which is a jump to the return thunk."""
BLACKLISTED = ("kprobes", "noinstr", "entry")
"""Parts of the names of text sections that must not be probed: NAME stands for .NAME.text.

They are in the order of debugfs kprobes/blacklist.
"""
_JMP32 = 0xE9
_PLAIN_RETURN = b"\xc3\xcc\xcc\xcc\xcc"
_KEY_FLAGS = 3
"""Mask of the low bits of a key's address, which jump labels and static calls use as flags."""
_LONGEST = 1 << 9
"""Maximum length in bytes of a source file's name, including its zero byte."""
_ADDRESS = (1 << 64) - 1
"""Mask of an address. In a damaged table, an address plus an offset may have more than 64 bits."""


class Range(NamedTuple):
    """Range of addresses from `start` up to `end`, exclusive."""

    start: int
    end: int


class ExTableEntry(NamedTuple):
    """Entry of the exception table: addresses of an instruction that may fault, and of its fixup."""

    insn: int
    fixup: int


class BlacklistEntry(NamedTuple):
    """Entry of the kprobe blacklist: a function that must not be probed; `end` is exclusive."""

    start: int
    end: int
    name: str


class JumpLabel(NamedTuple):
    """Branch of a static key: an instruction at `code` that is a nop or a jump to `target`.

    The value of the static key at `key` decides which of the two it is.
    """

    code: int
    target: int
    key: int


class StaticCall(NamedTuple):
    """Call site of a static call: the call instruction at `site` is patched when `key` is updated.

    `key` is the address of the struct static_call_key.
    """

    site: int
    key: int


@dataclass(frozen=True, slots=True)
class BugEntry:
    """Entry of the bug table: the trap instruction of a BUG() or WARN(), and its source file and line."""

    address: int
    file: str
    line: int
    flags: int


class ProbedTables(Protocol):
    """Interface to a kernel's text and the tables about it. All addresses are virtual."""

    @property
    def kallsyms(self) -> Kallsyms: ...

    @property
    def text_ranges(self) -> Iterable[Range]:
        """Ranges of text that can be probed. The first range is the text of the core kernel."""

    @property
    def blacklist(self) -> Iterable[BlacklistEntry]:
        """Functions that must not be probed."""

    @property
    def mcount(self) -> Collection[int]:
        """Addresses of the calls to mcount or fentry, which ftrace patches."""

    @property
    def ex_table(self) -> Iterable[ExTableEntry]:
        """The exception table: instructions that may fault, and their fixups."""

    @property
    def bugs(self) -> Collection[int]:
        """Addresses of the trap instructions of BUG() and WARN()."""

    @property
    def jump_labels(self) -> Iterable[JumpLabel]:
        """Branches of static keys (struct jump_entry)."""

    @property
    def static_calls(self) -> Iterable[StaticCall]:
        """Call sites of static calls (struct static_call_site)."""

    @property
    def data(self) -> Iterable[tuple[int, bytes]]:
        """Address and contents of each range of the kernel's data."""

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes at the address `va` as they are without probes."""


def words(data: bytes, size: int = 8) -> tuple[int, ...]:
    """Decode an array of unsigned longs of `size` bytes each, such as the mcount table or the blacklist."""
    return struct.unpack(f"<{len(data) // size}{'Q' if size == 8 else 'I'}", data[: len(data) // size * size])


def ex_table(address: int, data: bytes, layout: str = "<iii") -> Iterator[ExTableEntry]:
    """Decode the exception table at `address`, whose entries are relative to their own address.

    `layout`: format of an entry for Python's struct module.
    Mirrors: include/asm-generic/extable.h (v5.0 to v6.12).
    """
    for at, (insn, fixup, *_) in _entries(layout, data):
        yield ExTableEntry(address + at + insn & _ADDRESS, address + at + 4 + fixup & _ADDRESS)


def jump_labels(address: int, data: bytes, layout: str = "<iiq") -> Iterator[JumpLabel]:
    """Decode the table of jump labels at `address`.

    `layout`: format of an entry for Python's struct module.
    Mirrors: include/linux/jump_label.h:struct jump_entry (v6.1).
    """
    for at, (code, target, key) in _entries(layout, data):
        key_at = address + at + 8 + key & _ADDRESS & ~_KEY_FLAGS
        yield JumpLabel(address + at + code & _ADDRESS, address + at + 4 + target & _ADDRESS, key_at)


def static_calls(address: int, data: bytes) -> Iterator[StaticCall]:
    """Decode the table of static calls at `address`.

    Mirrors: include/linux/static_call_types.h:struct static_call_site (v6.1).
    """
    for at, (site, key) in _entries("<ii", data):
        yield StaticCall(address + at + site & _ADDRESS, address + at + 4 + key & _ADDRESS & ~_KEY_FLAGS)


def bugs(
    address: int, data: bytes, string: Callable[[int, int], str], *, has_format: bool = False
) -> dict[int, BugEntry]:
    """Decode a bug table; return a map: address of the trap instruction -> entry.

    `string(address, limit)` reads a string of at most `limit` bytes. `has_format`: whether an entry also has
    a format string, before the file's name.
    Mirrors: include/asm-generic/bug.h:struct bug_entry (v6.1, v7.2), with CONFIG_DEBUG_BUGVERBOSE.
    """
    found = {}
    file_at = 8 if has_format else 4
    for at, (bug, *_, file, line, flags) in _entries("<iiiHH" if has_format else "<iiHH", data):
        where = address + at + bug & _ADDRESS
        found[where] = BugEntry(where, string(address + at + file_at + file, _LONGEST), line, flags)
    return found


def return_sites(address: int, data: bytes) -> Iterator[int]:
    """Yield the addresses of jumps to the return thunk, from the table of return sites at `address`.

    Mirrors: arch/x86/kernel/alternative.c:apply_returns (v6.1).
    """
    for at, (site,) in _entries("<i", data):
        yield address + at + site & _ADDRESS


def plain_return(code: bytes) -> bytes | None:
    """Return the code with which boot replaces `code`, a jump to the return thunk, if the CPU needs no thunk.

    If `code` isn't such a jump, return None.
    """
    return _PLAIN_RETURN if len(code) == RETURN_SIZE and code[0] == _JMP32 else None


def blacklist(symbols: Kallsyms, listed: Iterable[int], areas: Iterable[Range]) -> Iterator[BlacklistEntry]:
    """Yield the functions at the addresses `listed`, then all functions in `areas`.

    Mirrors: kernel/kprobes.c:populate_kprobe_blacklist, kprobe_add_area_blacklist (v6.1).
    """
    for address in listed:
        found = blacklisted(symbols, address)
        if found is not None:
            yield found
    for area in areas:
        address = area.start
        while address < area.end and (entry := blacklisted(symbols, address)) is not None:
            yield entry
            address = max(entry.end, address + 1)


def blacklisted(symbols: Kallsyms, address: int) -> BlacklistEntry | None:
    """Return a blacklist entry from `address` to the end of its function; None if it is in no function."""
    found = symbols.lookup(address)
    if found is None:
        return None
    return BlacklistEntry(address, address + found.symbol.size - found.offset, found.name)


def _entries(layout: str, data: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the offset and the fields of each complete entry of a table.

    `layout`: format of an entry for Python's struct module.
    """
    entry = struct.Struct(layout)
    whole = data[: len(data) // entry.size * entry.size]
    return zip(range(0, len(whole), entry.size), entry.iter_unpack(whole), strict=True)
