"""Memory for records: per-CPU cells, and pages that take memory of the host only after they are written."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory import record_memory
from emulated_kernel.machine.memory.persistent import map_over
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import Prot

PAGE = 4096


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Kernel() as kernel:
        yield kernel.machine


def test_cells_are_zeroed_and_each_cpus_own(machine: Machine) -> None:
    records = machine.records
    first = records.alloc_percpu(8)
    for cell in records.cells(first, 8):
        cell[:] = b"\xff" * 8
    records.free_percpu(first)
    cells = [records.alloc_percpu(24) for _ in range(10_000)]
    assert len(set(cells)) == 10_000
    assert all(cell % 8 == 0 for cell in cells)
    for cpu, base in enumerate(machine.per_cpu_bases):
        assert all(records.address(cell, cpu) == base + cell for cell in cells)
        assert not any(machine.memory.read(base + cell, 24).strip(b"\0") for cell in cells)


def test_cells_as_words(machine: Machine) -> None:
    records = machine.records
    cell = records.alloc_percpu(8)
    for number, words in enumerate(records.words):
        words[records.word_index(cell)] = number + 7
        assert machine.memory.read_u64(records.address(cell, number)) == number + 7


def test_pages_are_the_guests_and_of_no_other_use(machine: Machine) -> None:
    records = machine.records
    pages = records.alloc_pages(3 * PAGE + 1)
    records.view(pages, 4 * PAGE)[:5] = b"hello"
    assert machine.memory.read(pages, 5) == b"hello"
    mapped = machine.memory.find(pages)
    assert mapped is not None
    assert mapped.prot == Prot.READ | Prot.WRITE
    assert mapped.pa >= machine.memory.ram_size
    with pytest.raises(MemoryFault):
        machine.memory.read(machine.model.layout.direct_map + mapped.pa, 1)
    records.free_pages(pages)
    with pytest.raises(HardwareError):
        records.free_pages(pages)


def test_the_host_pays_for_what_is_written(machine: Machine) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = resident()
    pages = machine.records.alloc_pages(300 << 20)
    assert resident() - before < 8 << 20
    view = machine.records.view(pages, 300 << 20)
    for at in range(0, 32 << 20, PAGE):
        view[at] = 1
    view.release()
    grown = resident()
    assert grown - before > 24 << 20
    machine.records.free_pages(pages)
    assert resident() < grown - (24 << 20)


def test_there_is_an_end(machine: Machine) -> None:
    with pytest.raises(HardwareError):
        machine.records.alloc_pages(machine.model.layout.record_pages_size + PAGE)
    with pytest.raises(HardwareError):
        machine.records.alloc_percpu(1 << 30)


def test_a_file_that_only_some_could_be_moved_to(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, mapped = machine.records, []
    cell, pages = records.alloc_percpu(8), records.alloc_pages(PAGE)
    records.cells(cell, 8)[0][:] = b"cell" * 2
    records.view(pages, 5)[:] = b"pages"

    def limited(*where: object) -> None:
        if mapped:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        mapped.append(where)
        map_over(*where)  # type: ignore[arg-type]

    monkeypatch.setattr(record_memory, "map_over", limited)
    file = (tmp_path / "records").open("w+b", buffering=0)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        records.keep_in(file)
    assert bytes(records.cells(cell, 8)[0]) == b"cell" * 2
    assert bytes(records.view(pages, 5)) == b"pages"
    # A page that the disk has no room for would end the process at the first store.
    before = os.fstat(file.fileno()).st_blocks
    records.alloc_pages(64 * PAGE)
    assert os.fstat(file.fileno()).st_blocks - before >= 64 * PAGE // 512
    monkeypatch.undo()
    with (tmp_path / "more").open("w+b", buffering=0) as more:
        records.keep_in(more)
        assert bytes(records.view(pages, 5)) == b"pages"
        assert os.pread(more.fileno(), 5, records.persistent_layout.pages(pages, 5)) == b"pages"


def test_what_cant_be_mapped_changes_nothing() -> None:
    """If map_over() cannot map a file, the memory is unchanged.

    A socket refuses the mapping as late as files of a file system without shared mappings.
    """
    with socket.socket() as refusing:
        child = os.fork()
        if child == 0:
            # A fault of map_over() would be a segmentation fault here.
            with mmap.mmap(-1, 4 * PAGE) as ram, suppress(BaseException):
                ram[PAGE:] = bytes(range(256)) * (3 * PAGE // 256)
                try:
                    map_over(ram, PAGE, 2 * PAGE, refusing.fileno(), 0)
                except OSError:
                    os._exit(ram[PAGE:] != bytes(range(256)) * (3 * PAGE // 256))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
