"""Binary records of a trace: the pages of trace_pipe_raw, decoded by the events' `format` files.

Mirrors: kernel/trace/ring_buffer.c:rb_event_data, rb_update_write_stamp (v6.1).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge

from emulated_kernel.util.fast_dataclass import dataclass

PADDING = 29
TIME_EXTEND = 30
TIME_STAMP = 31
"""Value of type_len in an event's header for an absolute timestamp.

Values of type_len from 29 on are kinds of events; smaller values are lengths of an event's data in units of 4
bytes. If type_len is 0, the next word holds the length.
"""
ABSOLUTE_BITS = 59
"""Number of bits of an absolute timestamp. The higher bits are those of the page's timestamp."""
SIZE_MASK = (1 << 27) - 1
"""Mask of the bits in a page's commit word that hold the length of its data.

The bits above them report lost events.
"""
FIELD = re.compile(
    r"field:(?P<declaration>[^;]*);\s*offset:(?P<offset>\d+);\s*size:(?P<size>\d+);"
    r"(?:\s*signed:(?P<signed>[01]);)?"
)
Value = int | str | list[int]


@dataclass(frozen=True)
class RawField:
    """A field of an event's records, read from the event's `format` file."""

    name: str
    kind: str
    """The declaration of the field without its name, such as `__data_loc char[]`."""
    offset: int
    size: int
    count: int
    """Number of elements of an array of fixed size, or 0 for any other field."""
    is_signed: bool

    def value(self, data: bytes) -> Value:
        """Return the field's value in the record `data`: a text, a number, or the numbers of an array."""
        if "__data_loc" in self.kind or "__rel_loc" in self.kind:
            return self._located(data)
        if self.count and "char" in self.kind:
            return _text(data[self.offset : self.offset + self.size])
        if self.count:
            size = self.size // self.count
            return [self._number(data, self.offset + size * each, size) for each in range(self.count)]
        return self._number(data, self.offset, self.size)

    def _located(self, data: bytes) -> Value:
        word = int.from_bytes(data[self.offset : self.offset + 4], "little")
        start = word & 0xFFFF
        if "__rel_loc" in self.kind:
            start += self.offset + 4
        part = data[start : start + (word >> 16)]
        return _text(part) if "char" in self.kind else list(part)

    def _number(self, data: bytes, offset: int, size: int) -> int:
        return int.from_bytes(data[offset : offset + size], "little", signed=self.is_signed)


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class RawFormat:
    """Layout of the records of an event."""

    name: str
    number: int
    fields: tuple[RawField, ...]

    def values(self, data: bytes) -> dict[str, Value]:
        """Return a map name -> value of the event's own fields in the record `data`."""
        return {
            field.name: field.value(data) for field in self.fields if not field.name.startswith("common_")
        }

    def field(self, name: str) -> RawField:
        """Return the field called `name`. Raises: StopIteration (the event has no such field)."""
        return next(field for field in self.fields if field.name == name)


def parse_format(text: str) -> RawFormat:
    """Return the layout in the text of a `format` file."""
    name = re.search(r"^name: (\S+)", text, re.MULTILINE)
    number = re.search(r"^ID: (\d+)", text, re.MULTILINE)
    assert name is not None
    assert number is not None
    return RawFormat(name[1], int(number[1]), tuple(_field(found) for found in FIELD.finditer(text)))


def _field(found: re.Match[str]) -> RawField:
    declaration = found["declaration"].strip()
    array = re.search(r"(?:\[(\d*)\])$", declaration)
    kind, _, name = declaration.partition("[")[0].rpartition(" ")
    is_located = "_loc" in kind
    if is_located:
        kind, _, name = declaration.rpartition(" ")
    count = int(array[1] or 0) if array and not is_located else 0
    return RawField(name, kind, int(found["offset"]), int(found["size"]), count, found["signed"] == "1")


@dataclass(frozen=True)
class RawRecord:
    """A decoded record of a trace."""

    time: int
    """Time of the record, in nanoseconds of the trace's clock."""
    cpu: int
    pid: int
    event: RawFormat
    data: bytes

    @property
    def values(self) -> dict[str, Value]:
        """Name -> value of the event's own fields."""
        return self.event.values(self.data)


class PageLayout:
    """Layout of the pages of trace_pipe_raw, from the text of events/header_page."""

    def __init__(self, header_page: str) -> None:
        fields = {field.name: field for field in map(_field, FIELD.finditer(header_page))}
        self._commit = fields["commit"]
        self.data = fields["data"].offset
        self.size = self.data + fields["data"].size

    def events(self, page: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (time in nanoseconds, data) of each event of a page."""
        time = int.from_bytes(page[:8], "little")
        high = time >> ABSOLUTE_BITS << ABSOLUTE_BITS
        commit = page[self._commit.offset : self._commit.offset + self._commit.size]
        end = self.data + (int.from_bytes(commit, "little") & SIZE_MASK)
        at = self.data
        while at + 4 <= min(end, len(page)):
            head = int.from_bytes(page[at : at + 4], "little")
            kind, delta = head & 31, head >> 5
            word = int.from_bytes(page[at + 4 : at + 8], "little")
            if kind == PADDING:
                if not delta:
                    return
                time += delta
                at += 4 + word
            elif kind == TIME_EXTEND:
                time += delta | word << 27
                at += 8
            elif kind == TIME_STAMP:
                time = high | delta | word << 27
                at += 8
            else:
                time += delta
                start = at + 4 if kind else at + 8
                length = 4 * kind if kind else word - 4
                yield time, page[start : start + length]
                at = start + (length + 3 & ~3)


def records(
    pages: Mapping[int, Sequence[bytes]], layout: PageLayout, formats: Iterable[RawFormat]
) -> Iterator[RawRecord]:
    """Yield the records of all CPUs in the order of their times.

    `pages`: CPU -> pages. Events that have no item in `formats` are left out. The order of a CPU's records is
    kept.
    """
    known = {each.number: each for each in formats}
    return merge(
        *(_of_cpu(cpu, each, layout, known) for cpu, each in pages.items()), key=lambda record: record.time
    )


def _of_cpu(
    cpu: int, pages: Sequence[bytes], layout: PageLayout, known: Mapping[int, RawFormat]
) -> Iterator[RawRecord]:
    for page in pages:
        for time, data in layout.events(page):
            event = known.get(int.from_bytes(data[:2], "little"))
            if event is not None:
                pid = event.field("common_pid").value(data)
                assert isinstance(pid, int)
                yield RawRecord(time, cpu, pid, event, data)


class SymbolNames:
    """Names of the kernel's functions by address, from the text of kallsyms."""

    def __init__(self, kallsyms: str) -> None:
        """Read the symbols in the text `kallsyms`. If it has no symbols, names are hexadecimal addresses."""
        words = (line.split() for line in kallsyms.splitlines())
        found = sorted((int(each[0], 16), each[2]) for each in words if each[2:] and each[1] in "tTwW")
        self._addresses = [address for address, _ in found]
        self._names = [name for _, name in found]

    def name(self, address: int) -> str:
        """Return the name of the function that contains an address.

        If the address is below all symbols, return it as a hexadecimal number.
        """
        index = bisect_right(self._addresses, address) - 1
        return self._names[index] if index >= 0 else f"0x{address:x}"
