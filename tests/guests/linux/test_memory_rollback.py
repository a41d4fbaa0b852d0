"""MemoryRollback undoes the writes of a call, even if a written page was dropped and shows the file's content
again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.guests.linux.vmcore.memory_rollback import MemoryRollback
from tests.guests.linux.rewind import PAGE

PAGES = 4


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[mmap.mmap]:
    file = tmp_path / "ram"
    file.write_bytes(b"f" * PAGE * PAGES)
    with file.open("rb") as opened:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        yield mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)


def test_a_page_that_became_the_files_meanwhile(ram: mmap.mmap) -> None:
    undo = MemoryRollback(ram, len(ram))
    assert undo.is_possible
    ram[PAGE], ram[2 * PAGE] = b"k"[0], b"k"[0]
    undo.checkpoint()
    before = ram[:]
    ram[PAGE], ram[2 * PAGE], ram[0] = b"f"[0], b"n"[0], b"n"[0]
    ram.madvise(mmap.MADV_DONTNEED, PAGE, PAGE)
    undo.rollback()
    assert ram[:] == before
    undo.close()
