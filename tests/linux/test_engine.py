"""Our probes in Debian's kernel: what they count, and that the kernel doesn't notice them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest

from emulated_kernel.arch.analysis.reason import Finding
from emulated_kernel.arch.x86.decode import decode_all
from emulated_kernel.image.linux.kernel import LinuxKernel, open_kernel
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.linux.engine import LinuxEngine
from emulated_kernel.linux.syscalls import LinuxSyscalls
from emulated_kernel.linux.tasks import LinuxTask
from tests.linux import debian_kernel

GUEST_RAM = 128 << 20
PLAIN = replace(PROFILES[DEFAULT], ftrace=False, optimizer=False)
MODES = {
    "stepped": PLAIN,
    "boosted": replace(PLAIN, preemption=False),
    "optimized": replace(PLAIN, optimizer=True),
    "ftrace": PROFILES[DEFAULT],
}
FUNCTIONS = (
    "vfs_read", "vfs_write", "do_sys_openat2", "do_filp_open", "path_openat", "shmem_file_read_iter",
    "shmem_write_begin", "shmem_write_end", "generic_perform_write", "getname_flags", "alloc_fd", "fput",
    "__fput", "dput", "kmem_cache_alloc", "kmem_cache_free", "kernel_clone", "copy_process", "do_exit",
    "schedule", "try_to_wake_up", "strncpy_from_user", "handle_mm_fault", "wake_up_new_task",
)  # fmt: skip
"""What the workload runs through."""


@cache
def kernel() -> LinuxKernel:
    return open_kernel(str(debian_kernel.image()))


def engine(profile: Profile) -> LinuxEngine:
    return LinuxEngine(debian_kernel.tasks(), kernel(), profile)


def workload(engine: LinuxEngine) -> list[Any]:
    """System calls of two clients, forks and an exit; what they have answered."""
    tasks, calls = engine.tasks, LinuxSyscalls(engine.tasks)
    first = tasks.fork(tasks.init, 4001)
    second = tasks.fork(first, 4002)
    answers: list[Any] = []
    for turn in range(12):
        answers += _files(calls, (first, second)[turn % 2], turn)
    tasks.exit(second)
    return answers


def _files(calls: LinuxSyscalls, client: LinuxTask, turn: int) -> Iterator[Any]:
    path = f"/scratch/file{turn % 3}"
    fd = calls.open(client, path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    yield calls.write(client, fd, bytes([turn]) * (turn * 700), None)
    size = calls.begin_read(client, fd, 5000, 0, may_block=True)
    yield calls.read_data(client, size)
    yield calls.lstat(path).size
    calls.close(client, fd)
    yield sorted(entry.name for entry in calls.listdir("/scratch"))


def body(engine: LinuxEngine) -> Iterator[int]:
    """Addresses of the instructions of those functions."""
    for name in FUNCTIONS:
        address = kernel().kallsyms.lookup_name(name)
        assert address is not None, name
        where = kernel().kallsyms.lookup(address)
        assert where is not None
        code = engine.machine.text.original(address, where.symbol.size)
        yield from (at for at, *_ in decode_all(code, address))


def chosen(engine: LinuxEngine) -> Iterator[int]:
    """Where probes are: everywhere they can be, but none within another one's jump."""
    verdict, end = engine.kprobes.verdict, 0
    for address in body(engine):
        if verdict.may_probe(address) is not None:
            continue
        if engine.kprobes.optimizer is None:
            yield address
            continue
        region = verdict.detoured(address)
        if address >= end and not isinstance(region, Finding):
            yield address
            end = region.end


def probed(engine: LinuxEngine, addresses: list[int]) -> tuple[list[Any], Counter[int]]:
    """What the workload answers with probes there, and how often each was hit."""
    hits: Counter[int] = Counter()
    probes = [
        Kprobe(addr=address, pre_handler=lambda kprobe, _: hits.update((kprobe.address,)))
        for address in addresses
    ]
    with engine.lock:
        for probe in probes:
            engine.kprobes.register_kprobe(probe)
        if engine.kprobes.optimizer is not None:
            engine.kprobes.optimizer.work.flush()
            heads = [probe.aggregator for probe in probes if not probe.is_ftrace]
            assert all(isinstance(head, AggregatorProbe) and head.is_patched for head in heads)
        answers = workload(engine)
        assert not any(probe.nmissed or probe.failures for probe in probes)
        for probe in probes:
            engine.kprobes.unregister_kprobe(probe)
        if engine.kprobes.optimizer is not None:
            engine.kprobes.optimizer.work.flush()
    assert not engine.machine.text.ledger
    return answers, hits


def ram(engine: LinuxEngine) -> bytes:
    return engine.tasks.machine.memory.ram[:GUEST_RAM]


def differing(one: bytes, other: bytes) -> list[str]:
    """Addresses of the first words that do."""
    pages = (at for at in range(0, GUEST_RAM, 4096) if one[at : at + 4096] != other[at : at + 4096])
    words = (
        at for page in pages for at in range(page, page + 4096, 8) if one[at : at + 8] != other[at : at + 8]
    )
    return [f"{at:#x}: {one[at : at + 8].hex()} {other[at : at + 8].hex()}" for at in islice(words, 20)]


@pytest.fixture(scope="module")
def unprobed() -> tuple[list[Any], bytes]:
    alone = engine(PLAIN)
    # The kernel's page tables lead to the host's window of code.
    alone.machine.text.free_text(alone.machine.text.alloc_text(16))
    return workload(alone), ram(alone)


@pytest.fixture(scope="module")
def hits() -> dict[int, int]:
    """Of each place, whatever the mode."""
    return {}


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_does_not_notice(
    mode: str, unprobed: tuple[list[Any], bytes], hits: dict[int, int]
) -> None:
    """All answers are the same; and all memory, where nothing but the text was written to."""
    probing = engine(MODES[mode])
    places = [*chosen(probing)]
    if mode == "ftrace":
        places = [*probing.kprobes.verdict.fentry.intersection(body(probing))]
    answers, counted = probed(probing, places)
    assert answers == unprobed[0]
    if mode in ("stepped", "boosted"):
        assert not differing(ram(probing), unprobed[1])
    assert len(places) > (3000 if mode in ("stepped", "boosted") else 20)
    assert sum(counted.values()) > 500
    for address in places:
        assert hits.setdefault(address, counted[address]) == counted[address], hex(address)
    assert "WARN" not in LinuxSyscalls(probing.tasks).log().decode()
    probing.tasks.machine.close()
