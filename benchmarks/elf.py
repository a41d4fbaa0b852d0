"""Time to read the symbols and headers of an ELF image, by kprobefs's own reader and by pyelftools."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

from common import Distribution, arguments, report, steady
from elftools.elf.elffile import ELFFile

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.elf import ElfFile

FILES = ("vmlinux", "modules/ktgt.ko")


def ours(data: bytes) -> int:
    """Read all symbols with kprobefs's own reader, and return their number."""
    return len(ElfFile(data).symbols)


def theirs(data: bytes) -> int:
    """Read the same tables with pyelftools, and return the number of symbols.

    The tables are the headers of sections and segments, and all symbols.
    """
    file = ELFFile(io.BytesIO(data))
    parts: list[Any] = [*file.iter_sections(), *file.iter_segments()]
    _headers = [part.header for part in parts]
    table: Any = file.get_section_by_name(".symtab")
    return len([(symbol.name, symbol.entry) for symbol in table.iter_symbols()])


def seconds(read: Callable[[bytes], int], data: bytes) -> float:
    """Return the CPU time in seconds that one call of the reader `read` takes."""
    start = time.process_time()
    read(data)
    return time.process_time() - start


def measure(name: str, runs: int) -> list[Distribution]:
    """Measure both readers with the file `name` of the prebuilt image, `runs` times."""
    data = (PREBUILT / "x86_64" / name).read_bytes()
    assert ours(data) == theirs(data)
    return [
        Distribution(f"{name}, {title}", "s", tuple(seconds(read, data) for _ in range(runs)))
        for title, read in (("ours", ours), ("pyelftools", theirs))
    ]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    report([figure for name in FILES for figure in steady(options, measure, name, options.runs)], options)


if __name__ == "__main__":
    main()
