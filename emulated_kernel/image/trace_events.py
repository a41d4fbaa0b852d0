"""Decoders of the built-in image's tables of trace events and system calls."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.util.fast_dataclass import dataclass

_STRING_MAX = 8192


@dataclass(frozen=True, slots=True)
class FieldDefinition:
    """A field of an event's record, except the common fields. Sizes are in bytes.

    The kernel computes the offsets at boot: each field is placed at the next multiple of its alignment.
    """

    type: str
    name: str
    size: int
    align: int
    is_signed: bool
    length: int
    """Number of elements of an array; 0 for no array, or for an array whose length is only in `type`."""


@dataclass(frozen=True)
class EventDefinition:
    """A trace event of the built-in image; `address` is the address of its struct trace_event_call."""

    address: int
    system: str
    name: str
    print_fmt: str
    fields: tuple[FieldDefinition, ...]
    key: int
    """Address of the tracepoint's static key."""


@dataclass(frozen=True, slots=True)
class SyscallDefinition:
    """A system call; `name` begins with sys_.

    `types` and `args`: types and names of its parameters.
    """

    nr: int
    """Number of the system call; -1 if the system call table doesn't contain it."""
    name: str
    types: tuple[str, ...]
    args: tuple[str, ...]


def event_definitions(image: KernelImage) -> Iterator[EventDefinition]:
    """Yield the events of the image's table `ftrace_events`. Yield nothing if the image has no such table."""
    reader = _ImageReader(image)
    for address in reader.pointers("ftrace_events"):
        system, name, print_fmt, fields, count, key = reader.words(address, 6)
        yield EventDefinition(
            address,
            reader.string(system),
            reader.string(name),
            reader.string(print_fmt),
            tuple(_field(reader, fields + 6 * number * reader.word) for number in range(count)),
            key,
        )


def _field(reader: _ImageReader, address: int) -> FieldDefinition:
    kind, name, size, align, is_signed, length = reader.words(address, 6)
    return FieldDefinition(reader.string(kind), reader.string(name), size, align, bool(is_signed), length)


def syscall_definitions(image: KernelImage) -> Iterator[SyscallDefinition]:
    """Yield the image's system calls, in the order of its table `syscalls_metadata`."""
    reader = _ImageReader(image)
    for address in reader.pointers("syscalls_metadata"):
        name_at, count, types, args = reader.words(address, 4)
        name = reader.string(name_at)
        yield SyscallDefinition(
            image.abi[f"nr.{name.removeprefix('sys_')}"],
            name,
            tuple(reader.string(each) for each in reader.words(types, count)),
            tuple(reader.string(each) for each in reader.words(args, count)),
        )


class _ImageReader:
    """Reader of words and strings in an image's memory, as the memory is before boot."""

    def __init__(self, image: KernelImage) -> None:
        self._image = image
        self.word = image.bits // 8
        self._code = "Q" if self.word == 8 else "I"
        self._strings: dict[int, str] = {}
        """Cache: address -> string. Many fields share a string, because the linker merges equal ones."""

    def words(self, address: int, count: int) -> tuple[int, ...]:
        data = self._image.read(address, count * self.word) if count else b""
        return struct.unpack(f"<{count}{self._code}", data)

    def pointers(self, table: str) -> Iterator[int]:
        """Yield the pointers of the array at the symbol `table`, which ends with NULL.

        Yield nothing if the image has no such symbol.
        """
        at = self._image.kallsyms.lookup_name(table)
        while at is not None:
            (pointer,) = self.words(at, 1)
            if not pointer:
                return
            yield pointer
            at += self.word

    def string(self, address: int) -> str:
        found = self._strings.get(address)
        if found is None:
            found = self._strings[address] = self._image.string(address, _STRING_MAX)
        return found
