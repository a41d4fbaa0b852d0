"""CPU features of a distribution's kernel: their names, and the alternatives that boot selects for them."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from copy import copy

from emulated_kernel.image.alternatives import nops
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.util.fast_named_tuple import NamedTuple

_FLAGS = "x86_cap_flags"
_BUGS = "x86_bug_flags"
_WORD = 8
_PER_WORD = 32
_SHORTEST_JUMP = 2
_LONG_JUMP = 5
_CALL = 0xE8
_JUMP = 0xE9
_SHORT_JUMP = b"\xeb"
_NOP = 0x90
_LAYOUTS = {12: "<iiHBB", 13: "<iiHBBx", 14: "<iiIBB"}
"""Size of struct alt_instr in bytes -> format of its fields for Python's struct module.

The struct has 13 bytes before v5.13, with the field padlen; 12 bytes from v5.13 to v6.2; 14 bytes since
v6.3.
"""
_INVERTED_16 = 1 << 15
_INVERTED_32 = 1 << 16
_NUMBER = 0x7FFF


class _Alternative(NamedTuple):
    site: int
    replacement: int
    feature: int
    is_inverted: bool
    size: int
    replacement_size: int


def feature_numbers(kernel: LinuxKernel) -> Mapping[str, int]:
    """Return name of a CPU feature in /proc/cpuinfo -> its number in the kernel.

    The map is empty if the kernel's symbols lack the table of names.
    Raises: KernelError ENODATA (no BTF). Mirrors: arch/x86/kernel/cpu/capflags.c:x86_cap_flags (v6.1).
    """
    start = kernel.kallsyms.lookup_name(_FLAGS)
    if start is None:
        return {}
    found = {}
    for number in range(_PER_WORD * capability_words(kernel)):
        name = int.from_bytes(kernel.read(start + _WORD * number, _WORD), "little")
        if name and kernel.vmlinux.has(name):
            found[kernel.vmlinux.string(name, 64)] = number
    return found


def capability_words(kernel: LinuxKernel) -> int:
    """Return the number of 32-bit words of features in struct cpuinfo_x86, without the words of bugs."""
    btf = kernel.btf
    at, end = (btf.offset(f"cpuinfo_x86.{name}") for name in ("x86_capability", "x86_vendor_id"))
    kernel.required(_BUGS)
    bugs = max(kernel.kallsyms.by_name(_BUGS)[0].size // (_WORD * _PER_WORD), 1)
    return (end - at) // 4 - bugs


def with_features(
    kernel: LinuxKernel, unpatched: LinuxKernel, had: Collection[int], named: Collection[str]
) -> LinuxKernel:
    """Return a copy of `kernel` with the alternatives that boot would choose on a CPU with more features.

    `kernel`: a kernel as it was booted. `unpatched`: the same kernel as it is in its file. `had`: numbers of
    the features with which the kernel has booted. `named`: names of the further features; names that the
    kernel lacks are ignored. Mirrors: arch/x86/kernel/alternative.c:apply_alternatives (v6.1).
    """
    numbers = feature_numbers(unpatched)
    has = {*had, *(numbers[name] for name in named if name in numbers)}
    changed: dict[int, bytes] = {}
    sites: dict[int, list[_Alternative]] = {}
    for entry in _alternatives(unpatched):
        if entry.site in range(*kernel.text):
            sites.setdefault(entry.site, []).append(entry)
    for site, entries in sites.items():
        before = _chosen(entries, had)
        chosen = _chosen(entries, has)
        if chosen is not before:
            size = max(entry.size for entry in entries)
            code = unpatched.read(site, size) if chosen is None else _replacement(unpatched, chosen)
            changed[site] = _with_long_nops(code)
    start, end = kernel.text
    text = bytearray(kernel.read(start, end - start))
    for site, code in changed.items():
        text[site - start : site - start + len(code)] = code
    copied = copy(kernel)
    copied.vmlinux = kernel.vmlinux.with_bytes(start, bytes(text))
    return copied


def _alternatives(kernel: LinuxKernel) -> Iterator[_Alternative]:
    table = kernel.between("__alt_instructions", "__alt_instructions_end")
    size = kernel.btf.size("alt_instr")
    if size not in _LAYOUTS:
        return
    layout = struct.Struct(_LAYOUTS[size])
    data = kernel.read(table.start, table.end - table.start)
    inverted = _INVERTED_32 if layout.format.count("I") else _INVERTED_16
    for at in range(0, len(data) - size + 1, size):
        site, replacement, feature, length, replacement_size = layout.unpack_from(data, at)
        where = table.start + at
        yield _Alternative(
            where + site,
            where + 4 + replacement,
            feature & _NUMBER,
            bool(feature & inverted),
            length,
            replacement_size,
        )


def _chosen(entries: Collection[_Alternative], has: Collection[int]) -> _Alternative | None:
    """Return the last alternative in `entries` whose condition is fulfilled; None if there is none.

    The condition is that the CPU has the entry's feature or, if the entry is inverted, that it lacks the
    feature. `entries`: alternatives of one instruction. `has`: numbers of the CPU's features.
    """
    found = None
    for entry in entries:
        if (entry.feature in has) != entry.is_inverted:
            found = entry
    return found


def _replacement(kernel: LinuxKernel, entry: _Alternative) -> bytes:
    code = kernel.read(entry.replacement, entry.replacement_size)
    if len(code) == _LONG_JUMP and code[0] in (_CALL, _JUMP):
        target = entry.replacement + _LONG_JUMP + int.from_bytes(code[1:], "little", signed=True)
        near = target - entry.site - _SHORTEST_JUMP
        if code[0] == _JUMP and (near + _SHORTEST_JUMP >= 0 and near <= 127):
            code = _SHORT_JUMP + near.to_bytes(1, "little", signed=True)
        else:
            code = code[:1] + (target - entry.site - _LONG_JUMP).to_bytes(4, "little", signed=True)
    return code.ljust(entry.size, bytes((_NOP,)))


def _with_long_nops(code: bytes) -> bytes:
    """Return `code` with the one-byte nops at its end replaced by the longest possible nops."""
    kept = code.rstrip(bytes((_NOP,)))
    return kept + nops(len(code) - len(kept))
