"""CoreFile: an ELF vmcore, for example from QEMU's dump-guest-memory, with its RAM and VMCOREINFO."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from errno import ENXIO

from emulated_kernel.image.elf import elf_notes
from emulated_kernel.image.original_text import OWNER, unpack_original_text
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import UnusableFile
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.safe_read import identity

_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_CLASS64 = 2
_LITTLE = 1
_ET_CORE = 4
_X86_64 = 62
_PT_LOAD = 1
_PT_NOTE = 4
_MAX_SEGMENTS = 0xFFFE
_NOTES_LIMIT = 16 << 20
_MAX_NOTES = 4
_DEVICES = range(3 << 30, 4 << 30)
"""Physical addresses of device memory, such as firmware and video memory, which are no RAM."""
RAM_LIMIT = 64 << 30
_MAX_LINES = 4096
_BLOCK = 1 << 20
INFO_START = b"OSRELEASE="
"""First bytes of VMCOREINFO, which begins at the start of a page."""
_SIGNS = (b"SYMBOL(init_uts_ns)=", b"PAGESIZE=")
_OTHERS = {
    b"KDUMP   ": "it is a compressed kdump: dump it again without -z, -l, -s and -R",
    b"PAGEDU64": "it is a dump for Windows",
    b"MDMPMDMP": "it is a dump for Windows",
}


def unusable_core(message: str) -> UnusableFile:
    """Return the exception (ENOEXEC) for an unusable dump; `message` says what is wrong with it."""
    return UnusableFile("dump", message)


def is_vmcoreinfo(text: bytes) -> bool:
    """Return True if a text that begins with INFO_START has the lines that each VMCOREINFO has."""
    return all(sign in text for sign in _SIGNS)


class CoreSegment(NamedTuple):
    """A piece of RAM: its physical address, its offset in the file, and its size in bytes."""

    pa: int
    offset: int
    size: int


def _merged(loads: Iterable[CoreSegment]) -> Iterator[CoreSegment]:
    """Yield `loads`, but merge segments that overlap both in memory and in the file.

    `loads`: segments sorted by physical address. A core for gdb has a segment for each range of virtual
    addresses. Memory that is mapped twice is therefore in two segments, whose common pages are in the file
    only once.
    """
    last: CoreSegment | None = None
    for load in loads:
        if (
            last is not None
            and load.pa < last.pa + last.size
            and load.offset - load.pa == last.offset - last.pa
        ):
            last = last._replace(size=max(last.size, load.pa + load.size - last.pa))
            continue
        if last is not None:
            yield last
        last = load
    if last is not None:
        yield last


class CoreFile:
    """An open dump of a machine's memory (vmcore).

    `segments`: the pieces of RAM, sorted by physical address, without device memory. The file is read with
    pread(2) when data are needed, not mapped.

    Raises: UnusableFile (not a complete dump of an x86_64 machine). All methods that read can raise it, too.
    """

    def __init__(self, file: int) -> None:
        """Parse the dump's headers. `file` is the descriptor of a regular file, which the caller closes."""
        self._file = file
        self._identity = identity(file)
        self._size = os.fstat(file).st_size
        if not self._size:
            raise unusable_core("it is empty")
        programs = [*self._programs()]
        loads = [CoreSegment(*where) for kind, *where in programs if kind == _PT_LOAD and where[2]]
        if not loads:
            raise unusable_core("it has no memory")
        if len(loads) > 1 and not any(load.pa for load in loads):
            raise unusable_core("it is a core of a process, not of a machine")
        self.segments = tuple(_merged(sorted(load for load in loads if load.pa not in _DEVICES)))
        self._check()
        # One is usual. The limit is for hostile files, in which each header can claim the whole file.
        notes = [where[1:] for kind, *where in programs if kind == _PT_NOTE][:_MAX_NOTES]
        noted = (text.decode("latin1") for where in notes for text in self._noted(b"VMCOREINFO", *where))
        self.vmcoreinfo = self._first_info(noted) or self._first_info(self._scanned())
        """VMCOREINFO: name -> value. Source: Documentation/admin-guide/kdump/vmcoreinfo.rst."""
        self.original_text: Sequence[tuple[int, bytes]]
        """(address, original text) of each range that kprobefs had patched; empty without kprobefs's note."""
        if not self.vmcoreinfo:
            raise unusable_core("no VMCOREINFO is in it: a kernel with CONFIG_CRASH_CORE has that")
        packed = next((text for where in notes for text in self._noted(OWNER, *where)), None)
        try:
            self.original_text = () if packed is None else tuple(unpack_original_text(packed))
        except ValueError:
            raise unusable_core("its note with the original text is damaged") from None

    def _programs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield type, physical address, file offset and file size of each program header."""
        start = self.read(0, min(_HEADER.size, self._size))
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
        if size != _PROGRAM.size or not 0 < count <= _MAX_SEGMENTS:
            raise unusable_core("its program headers are damaged")
        if at + count * size > self._size:
            raise unusable_core("it is truncated within its headers")
        for header in _PROGRAM.iter_unpack(self.read(at, count * size)):
            segment, _, offset, _, pa, file_size, _, _ = header
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
        if sum(segment.size for segment in self.segments) > self._size:
            # Otherwise a small hostile file could fill the disk.
            raise unusable_core("pieces of its memory are the same piece of the file")

    @property
    def end(self) -> int:
        """Physical address of the end of RAM."""
        last = self.segments[-1]
        return last.pa + last.size

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of the file at `offset`."""
        try:
            data = os.pread(self._file, size, offset)
        except OSError as error:
            raise unusable_core(f"it can't be read at {offset:#x}: {error.strerror}") from None
        if len(data) != size:
            raise unusable_core("it was truncated while it was read")
        return data

    def data(self, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
        """Yield (file offset, contents) of each block of pages in a range of the file, without holes."""
        at = offset
        end = offset + size
        while at < end:
            found = self._seek(at, os.SEEK_DATA)
            # Data can begin inside a page whose start is still in a hole; yield the whole page.
            at += (found - at) // PAGE_SIZE * PAGE_SIZE
            stop = min(at - (at - self._seek(found, os.SEEK_HOLE)) // PAGE_SIZE * PAGE_SIZE, end)
            while at < stop:
                block = self.read(at, min(_BLOCK, stop - at))
                yield at, block
                at += len(block)

    def _seek(self, at: int, whence: int) -> int:
        """Return the offset of the next data or hole at or after `at`; the file's end if there is no more.

        `whence`: os.SEEK_DATA for data, os.SEEK_HOLE for a hole.
        """
        try:
            return os.lseek(self._file, at, whence)
        except OSError as error:
            if error.errno != ENXIO:
                raise unusable_core(f"it can't be read at {at:#x}: {error.strerror}") from None
            return max(self._size, at)

    def check_unchanged(self) -> None:
        """Check that the file didn't change since it was opened. Call this after the last read.

        Raises: UnusableFile (the file changed).
        """
        if identity(self._file) != self._identity:
            raise unusable_core("it changed while it was read")

    def _noted(self, owner: bytes, offset: int, size: int) -> Iterator[bytes]:
        """Yield the contents of the notes with the owner's name `owner` in a segment of the file.

        `offset` and `size`: the segment's place in the file, in bytes.
        """
        for name, _, text in elf_notes(self.read(offset, min(size, _NOTES_LIMIT))):
            if name == owner:
                yield text

    def _scanned(self) -> Iterator[str]:
        """Search RAM for the page in which the kernel keeps VMCOREINFO; yield the text in it."""
        for _, offset, size in self.segments:
            for _, block in self.data(offset, size):
                for page in range(0, len(block), PAGE_SIZE):
                    if block.startswith(INFO_START, page):
                        text = block[page : page + PAGE_SIZE].partition(b"\0")[0]
                        if is_vmcoreinfo(text):
                            yield text.decode("latin1")

    @staticmethod
    def _first_info(texts: Iterator[str]) -> dict[str, str]:
        for text in texts:
            lines = (line.partition("=") for line in text.split("\n", _MAX_LINES)[:_MAX_LINES])
            found = {name: value for name, equals, value in lines if equals}
            if "SYMBOL(_stext)" in found:
                return found
        return {}
