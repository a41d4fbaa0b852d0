"""trace.dat: the file of trace-cmd(1), which `trace-cmd report` and KernelShark read.

Mirrors: trace-cmd.dat.v6(5): version 6, with each CPU's ring buffer pages after the formats, symbols and
command names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import IO

from emulated_kernel.util.fast_dataclass import dataclass

MAGIC = b"\x17\x08\x44tracing6\0"
LITTLE_ENDIAN = 0
DONE = 0
"""Number of the option that marks the end of the options in the file."""


@dataclass(frozen=True)
class TraceDat:
    """Content of a trace.dat file."""

    header_page: str
    header_event: str
    ftrace: Sequence[str]
    """Texts of the `format` files of events/ftrace."""
    events: Mapping[str, str]
    """Group/name of each event outside of events/ftrace -> text of its `format` file."""
    kallsyms: str
    printk_formats: str
    saved_cmdlines: str
    pages: Sequence[Sequence[bytes]]
    """For each CPU, the pages that were read from its trace_pipe_raw."""
    page_size: int
    """Size in bytes of a page of the ring buffer, including its header."""
    word_size: int
    """Number of bytes of an unsigned long of the kernel."""


def write(found: TraceDat, file: IO[bytes]) -> None:
    """Write `found` to `file` in the format of trace.dat. Raises: OSError."""
    head = _head(found)
    # Offset and length of each CPU's pages come before the pages.
    size = len(head) + 16 * len(found.pages)
    at = _aligned(size, found.page_size)
    file.write(head)
    for pages in found.pages:
        length = found.page_size * len(pages)
        file.write(_number(at, 8) + _number(length, 8))
        at += length
    file.write(bytes(_aligned(size, found.page_size) - size))
    for pages in found.pages:
        for page in pages:
            file.write(page.ljust(found.page_size, b"\0"))
    file.flush()


def _head(found: TraceDat) -> bytes:
    systems: dict[str, list[str]] = defaultdict(list)
    for event, text in found.events.items():
        systems[event.partition("/")[0]].append(text)
    parts = [
        MAGIC,
        bytes([LITTLE_ENDIAN, found.word_size]),
        _number(found.page_size, 4),
        b"header_page\0",
        _sized(found.header_page, 8),
        b"header_event\0",
        _sized(found.header_event, 8),
        _number(len(found.ftrace), 4),
        *(_sized(text, 8) for text in found.ftrace),
        _number(len(systems), 4),
    ]
    for system, texts in systems.items():
        parts += [system.encode() + b"\0", _number(len(texts), 4), *(_sized(text, 8) for text in texts)]
    parts += [
        _sized(found.kallsyms, 4),
        _sized(found.printk_formats, 4),
        _sized(found.saved_cmdlines, 8),
        _number(len(found.pages), 4),
        b"options  \0",
        _number(DONE, 2),
        b"flyrecord\0",
    ]
    return b"".join(parts)


def _sized(text: str, width: int) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return _number(len(data), width) + data


def _number(value: int, width: int) -> bytes:
    return value.to_bytes(width, "little")


def _aligned(value: int, unit: int) -> int:
    return -(-value // unit) * unit
