"""Time to read the symbols and headers of an ELF image, by kprobefs's own reader and by pyelftools."""

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
    """Read all symbols with kprobefs's own reader, and return their number."""
    return len(ElfFile(data).symbols)


def theirs(data: bytes) -> int:
    """Read the same tables with pyelftools, and return the number of symbols.

    They are the headers of sections and segments, and all symbols.
    """
    file = ELFFile(io.BytesIO(data))
    parts: list[Any] = [*file.iter_sections(), *file.iter_segments()]
    _headers = [part.header for part in parts]
    table: Any = file.get_section_by_name(".symtab")
    return len([(symbol.name, symbol.entry) for symbol in table.iter_symbols()])


def seconds(read: Callable[[bytes], int], data: bytes) -> float:
    """Return the CPU time that one run of the reader takes, in seconds."""
    start = time.process_time()
    read(data)
    return time.process_time() - start


def main() -> None:
    """Run the benchmark, and print its figures."""
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
