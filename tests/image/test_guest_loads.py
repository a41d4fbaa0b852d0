"""Workloads of the guest: they give the same sum on every architecture, and leave no memory behind."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig

SIZES = {
    "load_pipe": 100,
    "load_files": 20,
    "load_fork": 30,
    "load_workqueue": 40,
    "load_locks": 10,
    "load_memory": 500,
    "load_timers": 5,
    "load_tcp": 10,
    "load_udp": 20,
    "load_ping": 10,
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as booted:
        yield booted


def run(kernel: Kernel, name: str, count: int) -> int:
    """Call the workload `name`, and return its sum or negative errno, which is a 32-bit int on all
    architectures.
    """
    result = kernel.call(name, count) & 0xFFFFFFFF
    return result - (1 << 32) if result >> 31 else result


def block(number: int) -> bytes:
    """Return the block of data that load_fill() of the guest makes for `number`."""
    state, data = (number * 2654435761 + 1) & 0xFFFFFFFF, bytearray()
    for _ in range(1024):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        data.append(state >> 24)
    return bytes(data)


def crc(data: bytes) -> int:
    """Return crc32_le(0, data), which lacks the inversions of zlib's crc32."""
    return (zlib.crc32(data, 0xFFFFFFFF) ^ 0xFFFFFFFF) & 0x7FFFFFFF


def test_what_goes_through_a_pipe(kernel: Kernel) -> None:
    assert run(kernel, "load_pipe", 100) == crc(b"".join(block(n) for n in range(100)))
    assert run(kernel, "load_pipe", 0) == 0


def test_what_goes_through_files(kernel: Kernel) -> None:
    assert run(kernel, "load_files", 20) == crc(b"".join(block(n) * (n % 8 + 1) for n in range(20)))


def test_what_children_return(kernel: Kernel) -> None:
    expected = 0
    for number in range(30):
        expected = (expected * 31 + number) & 0xFFFFFFFF
    assert run(kernel, "load_fork", 30) == expected & 0x7FFFFFFF


def test_every_round_of_every_thread_counts(kernel: Kernel) -> None:
    # 4 threads; every third round writes.
    assert run(kernel, "load_locks", 10) == 40 * 31 + 16


def test_what_goes_through_connections(kernel: Kernel) -> None:
    sent = b"".join(block(n + i) for n in range(10) for i in range(n % 4 + 1))
    assert run(kernel, "load_tcp", 10) == crc(sent)
    assert run(kernel, "load_udp", 20) == crc(b"".join(map(block, range(20))))


def test_timers(kernel: Kernel) -> None:
    assert run(kernel, "load_timers", 5) == 5


@pytest.mark.parametrize("name", SIZES)
def test_the_same_again_without_leaving_anything(kernel: Kernel, name: str) -> None:
    first = run(kernel, name, SIZES[name])
    assert first > 0
    before = kernel.call("nr_free_pages")
    for _ in range(5):
        assert run(kernel, name, SIZES[name]) == first
    assert kernel.call("nr_free_pages") >= before - 2, name
