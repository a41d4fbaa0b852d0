"""Probes in code that repeats a reading of the clock until the clock has not changed meanwhile. Handlers that
also read the clock let this loop end.

Only i386 has such loops; other architectures add to the clock in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import read, write

NOTRACE = ("sched_clock", "local_clock")
"""Functions that read the clock, and on which events are refused because they are notrace."""
PROFILES = ("linux-6.1", "linux-6.1-nopreempt", "kprobes-2010", "optprobes-2009")


@pytest.fixture(params=PROFILES)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch="i386", profile=request.param)) as kernel:
        yield kernel


@pytest.fixture
def tree(kernel: Kernel) -> NodeTree:
    return kernel.filesystem()


def boundaries(kernel: Kernel) -> list[int]:
    """Return the addresses at which a probe can be registered, in the functions that read the clock."""
    found = []
    for loop in kernel.machine.clock_loops:
        where = kernel.image.kallsyms.lookup(loop.start)
        assert where is not None
        if where.name in NOTRACE:
            continue
        start = where.symbol.address
        for address in range(start, start + where.symbol.size):
            probe = Kprobe(addr=address)
            with suppress(KernelError):
                kernel.register_kprobe(probe)
                kernel.unregister_kprobe(probe)
                found.append(address)
    return found


def read_clocks(kernel: Kernel) -> None:
    """Read the clocks several times, because handlers become guest code at the first hit."""
    for _ in range(3):
        before = kernel.call("ktime_get")
        kernel.call("ktime_get_real_ts64", b"x" * 16)
        assert kernel.call("ktime_get") > before


def test_each_address_of_the_clocks_readers(kernel: Kernel, tree: NodeTree) -> None:
    addresses = boundaries(kernel)
    assert sum(address in loop for loop in kernel.machine.clock_loops for address in addresses) > 20
    for address in addresses:
        write(tree, "/kprobe_events", f"p:one {address:#x}\n")
        write(tree, "/tracing/events/kprobes/one/enable", "1")
        read_clocks(kernel)
        write(tree, "/tracing/events/kprobes/one/enable", "0")
        write(tree, "/kprobe_events", "-:one\n")
    assert "Oops" not in read(tree, "/machine/dmesg")


def test_all_addresses_of_the_clocks_readers_at_once(kernel: Kernel, tree: NodeTree) -> None:
    lines = [f"p:at{address:x} {address:#x}\n" for address in boundaries(kernel)]
    write(tree, "/kprobe_events", "".join(lines))
    write(tree, "/tracing/events/kprobes/enable", "1")
    read_clocks(kernel)
    write(tree, "/tracing/events/kprobes/enable", "0")
    records = [line for line in read(tree, "/tracing/trace").splitlines() if "(ktime_get" in line]
    times = [float(line.split()[3].rstrip(":")) for line in records]
    assert times == sorted(times)
    assert len(records) > 3 * 3 * 5
    assert "Oops" not in read(tree, "/machine/dmesg")


def test_post_handlers_too(kernel: Kernel) -> None:
    loop = kernel.machine.clock_loops[0]
    hits = []
    kernel.register_kprobe(
        Kprobe(addr=loop.start, post_handler=lambda *_args: hits.append(kernel.machine.clock.read_ns()))
    )
    assert kernel.call("sched_clock") < kernel.call("sched_clock")
    assert hits
