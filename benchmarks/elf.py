"""Reading an image's symbols and headers: our reader, and the same tables by pyelftools."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from common import Distribution, arguments, report
from elftools.elf.elffile import ELFFile

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.elf import ElfFile

FILES = ("vmlinux", "modules/ktgt.ko")


def ours(data: bytes) -> int:
    """How many symbols there are, each read."""
    return len(ElfFile(data).symbols)


def theirs(data: bytes) -> int:
    """The same by pyelftools: headers of sections and segments, then all symbols."""
    file = ELFFile(io.BytesIO(data))
    parts: list[Any] = [*file.iter_sections(), *file.iter_segments()]
    _headers = [part.header for part in parts]
    table: Any = file.get_section_by_name(".symtab")
    return len([(symbol.name, symbol.entry) for symbol in table.iter_symbols()])


def seconds(read: Callable[[bytes], int], data: bytes) -> float:
    """CPU time of one reading."""
    start = time.process_time()
    read(data)
    return time.process_time() - start


def main() -> None:
    """Run, report."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    figures = []
    for name in FILES:
        data = (PREBUILT / "x86_64" / name).read_bytes()
        assert ours(data) == theirs(data)
        for title, read in (("ours", ours), ("pyelftools", theirs)):
            samples = tuple(seconds(read, data) for _ in range(options.runs))
            figures.append(Distribution(f"{name}, {title}", "s", samples))
    report(figures, options.json)


if __name__ == "__main__":
    main()
