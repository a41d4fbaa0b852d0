"""machine/meminfo and machine/cpus: the guest's own counters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.guest_info import MemoryInfo, SlabCache
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from tests.guests.builtin.conftest import tasks


def info(kernel: Kernel) -> MemoryInfo:
    return kernel.guest.kernel.memory()


def slabs(kernel: Kernel) -> Iterable[SlabCache]:
    return kernel.guest.kernel.slabs()


def no_space(actions: Iterable[Callable[[], object]]) -> None:
    """Assert that one of the actions fails because no space is left."""
    with pytest.raises(KernelError, match="No space left"):  # noqa: PT012
        for action in actions:
            action()


def test_pages_are_the_allocators(kernel: Kernel) -> None:
    kernel.call("strlen", "the daemon's task is there now")
    before = info(kernel)
    assert before.free == kernel.call("nr_free_pages")
    assert before.total > before.free > before.available > 0
    page = kernel.call("__get_free_pages", 0, 3)
    assert info(kernel).free == before.free - 8
    kernel.call("free_pages", page, 3)
    assert info(kernel) == before


def test_files_and_stacks_are_counted(kernel: Kernel) -> None:
    system, init = kernel.guest.syscalls, kernel.guest.processes.init
    before = info(kernel)
    fd = system.open(init, "/scratch/file", os.O_CREAT | os.O_WRONLY, 0o600)
    system.write(init, fd, bytes(10 * PAGE_SIZE))
    system.call(init, "close", fd)
    assert info(kernel).file == before.file + 10
    stacks = info(kernel).kernel_stack
    assert stacks == 4 * (len(tasks(kernel)) - 1)
    system.with_path(init, "unlink", "/scratch/file")
    assert info(kernel).file == before.file


def test_slabs_are_told_by_name(kernel: Kernel) -> None:
    before = {cache.name: cache for cache in slabs(kernel)}
    assert {"kmem_cache", "kmalloc-64", "task_struct"} <= set(before)
    objects = [kernel.call("__kmalloc", 200, 0xCC0) for _ in range(100)]
    after = {cache.name: cache for cache in slabs(kernel)}
    assert after["kmalloc-256"].objects == before["kmalloc-256"].objects + 100
    assert after["kmalloc-256"].pages >= 100 * 256 // PAGE_SIZE
    assert info(kernel).slab == sum(cache.pages for cache in after.values())
    for address in objects:
        kernel.call("kfree", address)
    assert {c.name: c.objects for c in slabs(kernel)} == {n: c.objects for n, c in before.items()}


def test_the_form_is_linuxs(kernel: Kernel) -> None:
    lines = list(info(kernel).text())
    assert all(re.fullmatch(r"[A-Z]\w+: +\d+ kB\n", line) and len(line) == 28 for line in lines)


def test_a_file_cannot_starve_the_kernel(kernel: Kernel) -> None:
    """If scratch/ has used all available pages, the kernel still loads a module and runs functions, with
    reserved pages.
    """
    system, init = kernel.guest.syscalls, kernel.guest.processes.init
    fd = system.open(init, "/scratch/big", os.O_CREAT | os.O_WRONLY, 0o600)
    no_space(repeat(lambda: system.write(init, fd, bytes(64 << 10))))
    full = info(kernel)
    assert full.available == 0
    assert full.free >= full.reserve - 1
    names = (f"/scratch/{number}" for number in range(100))
    no_space(lambda name=name: system.open(init, name, os.O_CREAT | os.O_WRONLY, 0o600) for name in names)
    no_space([lambda: system.with_paths(init, "link", "/scratch/big", "/scratch/other")])
    kernel.load_module("ktgt")
    assert kernel.call("strlen", "works") == 5
    kernel.unload_module("ktgt")
    system.call(init, "close", fd)
    system.with_path(init, "unlink", "/scratch/big")
    assert info(kernel).available > full.total // 2


def test_a_sparse_file_cannot_either(kernel: Kernel) -> None:
    """Sparse files, whose tables of pages grow with the size, cannot use up the reserved pages."""
    system, init = kernel.guest.syscalls, kernel.guest.processes.init

    def write_far(number: int) -> None:
        fd = system.open(init, f"/scratch/{number}", os.O_CREAT | os.O_WRONLY, 0o600)
        system.write(init, fd, b"x", (1 << 30) - 1)

    no_space(partial(write_far, number) for number in range(100))
    assert info(kernel).free >= info(kernel).reserve - 1


def test_a_cpu_counts_switches_and_interrupts(kernel: Kernel) -> None:
    (before,) = kernel.guest.kernel.cpus()
    for _ in range(3):
        kernel.guest.processes.resident(600, "other")
        kernel.guest.syscalls.call(kernel.guest.processes.resident(600, "other"), "getpid")
        kernel.guest.syscalls.call(kernel.guest.processes.init, "getpid")
    (after,) = kernel.guest.kernel.cpus()
    assert after.switches >= before.switches + 6
    assert (after.task.comm, after.is_idle) == ("init", False)
    with kernel.guest.buffers.borrowed() as request:
        kernel.machine.memory.write(request, (0).to_bytes(8, "little") + (10**8).to_bytes(8, "little"))
        kernel.guest.syscalls.call(kernel.guest.processes.init, "nanosleep", request, 0)
    (slept,) = kernel.guest.kernel.cpus()
    assert slept.interrupts >= after.interrupts + 25


def test_a_cache_that_was_written_over_has_a_number_of_pages_all_the_same(kernel: Kernel) -> None:
    memory, abi = kernel.machine.memory, kernel.image.abi
    head = kernel.image.kallsyms.lookup_name("slab_caches")
    assert head is not None
    cache = memory.read_word(head) - abi["kmem_cache.list"]
    memory.write_u32(cache + abi["kmem_cache.order"], 0xFFFFFFFF)
    assert max(each.pages for each in slabs(kernel)).bit_length() < 128
