"""The host's help for a faster boot leaves the booted kernel as it would be without this help."""

from __future__ import annotations

import hashlib
import mmap

import pytest

from emulated_kernel.guests.linux import boot_cache
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.guest_abi import X86_64
from emulated_kernel.guests.linux.pc.machines import find_cells
from emulated_kernel.guests.linux.pc.ram import LinuxMemory
from emulated_kernel.image.linux.linux_kernel import open_kernel
from emulated_kernel.machine.memory.paging import LARGE_PAGE_SIZE
from tests.guests.linux.debian_kernel import SEED, image

ROOT = 0x1000
DIRECTORY = 0x3000
LARGE = 0x83
NO_EXECUTE = 1 << 63


@pytest.mark.parametrize(
    ("data", "protected"),
    [
        (range(LARGE_PAGE_SIZE, 3 * LARGE_PAGE_SIZE), {1, 2}),
        (range(LARGE_PAGE_SIZE + 1, 4 * LARGE_PAGE_SIZE - 1), {2}),
        (range(LARGE_PAGE_SIZE + 1, 2 * LARGE_PAGE_SIZE), set()),
        (range(0, 0), set()),
        (range(3 * LARGE_PAGE_SIZE, 6 * LARGE_PAGE_SIZE), {3}),
    ],
    ids=["whole pages", "parts of pages", "a part of a page", "nothing", "other pages"],
)
def test_only_large_pages_inside_of_the_data_are_not_executable(data: range, protected: set[int]) -> None:
    """forbid_execution() changes only present large pages that lie completely in the data.

    Page 4 is not present, and page 5 has a table of small pages.
    """
    memory = LinuxMemory(mmap.mmap(-1, 1 << 20))
    memory.words[ROOT >> 3] = 0x2000 | 3
    memory.words[0x2000 >> 3] = DIRECTORY | 3
    entries = {number: number * LARGE_PAGE_SIZE | LARGE for number in range(4)} | {4: 0, 5: 0x4000 | 3}
    for number, entry in entries.items():
        memory.words[(DIRECTORY >> 3) + number] = entry
    memory.forbid_execution(ROOT, data)
    for number, entry in entries.items():
        expected = entry | NO_EXECUTE if number in protected else entry
        assert memory.words[(DIRECTORY >> 3) + number] == expected


def test_protected_data_leaves_the_booted_kernel_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of RAM is the same as after a boot in which the kernel alone protects its data."""
    path = image()
    kernel = open_kernel(str(path))
    if kernel.architecture != X86_64.name:
        pytest.skip("only the PC's boot protects the data")
    saved = snapshot.load(snapshot.place(path, SEED))
    assert saved is not None
    protected: list[range] = []
    monkeypatch.setattr(LinuxMemory, "forbid_execution", lambda _self, _root, data: protected.append(data))
    cells = find_cells(X86_64)
    machine, _, _ = boot_cache._booted(kernel, SEED, cells, lambda _done, _total: None, None)
    assert len(protected) == 1
    assert len(protected[0]) > LARGE_PAGE_SIZE
    assert hashlib.sha256(machine.memory.ram).digest() == hashlib.sha256(saved.machine.memory.ram).digest()
    machine.close()
    saved.machine.close()
