"""CoreFile: an ELF core of a machine, as dump-guest-memory writes it: RAM, and its kernel's VMCOREINFO."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from errno import ENOEXEC
from typing import NamedTuple

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.errors import KernelError

_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_CLASS64, _LITTLE, _ET_CORE, _X86_64 = 2, 1, 4, 62
_PT_LOAD, _PT_NOTE = 1, 4
_MOST_SEGMENTS = 0xFFFE
_NOTES_LIMIT = 16 << 20
_DEVICES = range(3 << 30, 4 << 30)
"""Physical addresses of devices' memory, firmware and screens among them, wherever RAM goes on."""
RAM_LIMIT = 64 << 30
_MOST_LINES = 4096
_INFO_SIZE = 4096
_SIGNS = (b"SYMBOL(init_uts_ns)=", b"KERNELOFFSET=")
_OTHERS = {
    b"KDUMP   ": "it is a compressed kdump: dump it anew without -z, -l, -s and -R",
    b"PAGEDU64": "it is a dump for Windows",
    b"MDMPMDMP": "it is a dump for Windows",
}


def unusable_core(message: str) -> KernelError:
    """The error to raise: ENOEXEC, with what is wrong."""
    return KernelError(ENOEXEC, f"not a usable dump: {message}")


class CoreSegment(NamedTuple):
    """A piece of RAM: its physical address, where it is in the file, and bytes."""

    pa: int
    offset: int
    size: int


class CoreFile:
    """An open dump; `segments` by address, without the memory of devices.

    Raises: KernelError ENOEXEC for what is no whole dump of an x86_64 machine; OSError.
    """

    def __init__(self, file: int) -> None:
        """`file`: a descriptor of a regular file, which stays the caller's."""
        self._size = os.fstat(file).st_size
        if not self._size:
            raise unusable_core("it is empty")
        self._data = mmap.mmap(file, self._size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        programs = [*self._programs()]
        loads = [CoreSegment(*where) for kind, *where in programs if kind == _PT_LOAD and where[2]]
        if not loads:
            raise unusable_core("it has no memory")
        if len(loads) > 1 and not any(load.pa for load in loads):
            raise unusable_core("it is a core of a process, not of a machine")
        self.segments = tuple(sorted(load for load in loads if load.pa not in _DEVICES))
        self._check()
        noted = (text for kind, *where in programs if kind == _PT_NOTE for text in self._infos(*where[1:]))
        self.vmcoreinfo = self._first_info(noted) or self._first_info(self._scanned())
        """What its kernel says of itself, by name. Source: Documentation/admin-guide/kdump/vmcoreinfo.rst."""
        if not self.vmcoreinfo:
            raise unusable_core("no VMCOREINFO is in it: a kernel with CONFIG_CRASH_CORE has that")

    def _programs(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each header: type, physical address, offset and bytes in the file."""
        start = self._data[: _HEADER.size]
        for magic, message in _OTHERS.items():
            if start.startswith(magic):
                raise unusable_core(message)
        if len(start) < _HEADER.size or start[:4] != b"\x7fELF":
            raise unusable_core("it is no ELF file")
        _, kind, order, _, file_type, machine, _, _, at, _, _, _, size, count, *_ = _HEADER.unpack(start)
        if file_type != _ET_CORE:
            raise unusable_core("it is an ELF file, but no core")
        if machine == _X86_64 and (kind, order) != (_CLASS64, _LITTLE):
            raise unusable_core("it is of 32 bits or big-endian, not of an x86_64 kernel")
        if machine != _X86_64:
            raise unusable_core(f"it is of another architecture (ELF machine {machine}), not x86_64")
        if size != _PROGRAM.size or not 0 < count <= _MOST_SEGMENTS:
            raise unusable_core("its program headers are damaged")
        if at + count * size > self._size:
            raise unusable_core("it is truncated within its headers")
        for number in range(count):
            segment, _, offset, _, pa, file_size, _, _ = _PROGRAM.unpack_from(self._data, at + number * size)
            if offset + file_size > self._size:
                missing = offset + file_size - self._size
                raise unusable_core(f"it is truncated: {missing} bytes are missing")
            yield segment, pa, offset, file_size

    def _check(self) -> None:
        end = 0
        for pa, _, size in self.segments:
            if pa < end or (pa | size) % PAGE_SIZE or pa + size > RAM_LIMIT:
                raise unusable_core(f"its memory at {pa:#x} overlaps, isn't whole pages or is beyond 64 GiB")
            end = pa + size
        if not end:
            raise unusable_core("it has no memory")

    @property
    def end(self) -> int:
        """Where RAM ends."""
        last = self.segments[-1]
        return last.pa + last.size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file."""
        return self._data[offset : offset + size]

    def _infos(self, offset: int, size: int) -> Iterator[str]:
        notes = self._data[offset : offset + min(size, _NOTES_LIMIT)]
        at = 0
        while at + _NOTE.size <= len(notes):
            name_size, text_size, _ = _NOTE.unpack_from(notes, at)
            at += _NOTE.size
            name = notes[at : at + name_size].rstrip(b"\0")
            at += -(-name_size // 4) * 4
            if name == b"VMCOREINFO":
                yield notes[at : at + text_size].decode("latin1")
            at += -(-text_size // 4) * 4

    def _scanned(self) -> Iterator[str]:
        """The page in which its kernel keeps that, for who dumps it."""
        at = self._data.find(b"OSRELEASE=")
        while at >= 0:
            text = self._data[at : at + _INFO_SIZE].partition(b"\0")[0]
            if all(sign in text for sign in _SIGNS):
                yield text.decode("latin1")
            at = self._data.find(b"OSRELEASE=", at + 1)

    @staticmethod
    def _first_info(texts: Iterator[str]) -> dict[str, str]:
        for text in texts:
            lines = (line.partition("=") for line in text.split("\n", _MOST_LINES)[:_MOST_LINES])
            found = {name: value for name, equals, value in lines if equals}
            if "SYMBOL(_stext)" in found:
                return found
        return {}

    def close(self) -> None:
        """Let go of the file."""
        self._data.close()
