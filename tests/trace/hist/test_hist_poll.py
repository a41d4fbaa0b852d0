"""poll(2) on hist files, which waits for hits since Linux 6.14."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.open_file import ALWAYS_READY
from emulated_kernel.vfs.mount import Mount

CLIENT = Client(4001, 0, 0)
EVENT = "tracing/events/kprobes/calls"
READABLE = select.POLLIN | select.POLLRDNORM


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        kernel.write_file("tracing/kprobe_events", "p:calls gcd a=%di:u64\np:others int_sqrt b=%di:u64")
        kernel.write_file("tracing/events/kprobes/others/trigger", "hist:keys=b")
        yield kernel


@pytest.fixture
def mount(kernel: Kernel) -> Iterator[Mount]:
    kernel.write_file(f"{EVENT}/trigger", "hist:keys=a")
    mount = kernel.mount()
    yield mount
    mount.close()
    kernel.write_file(f"{EVENT}/trigger", "!hist:keys=a")


def test_hits_wake_a_client_until_it_has_read_them(kernel: Kernel, mount: Mount) -> None:
    handle = mount.open(CLIENT, f"/{EVENT}/hist", os.O_RDONLY)
    told: list[int] = []

    def poll() -> int:
        return mount.poll(handle, lambda: told.append(1))

    assert poll() == 0
    kernel.call("int_sqrt", 9)
    assert told == []
    kernel.call("gcd", 12, 18)
    kernel.call("gcd", 12, 18)
    assert told == [1]
    assert poll() == READABLE | select.POLLPRI
    assert poll() == READABLE
    mount.read(CLIENT, handle, 1 << 17, 0)
    assert poll() == 0
    kernel.call("gcd", 12, 18)
    assert told == [1, 1]
    assert poll() == READABLE | select.POLLPRI
    mount.release(handle)
    kernel.call("gcd", 12, 18)
    assert told == [1, 1]


def test_earlier_hits_are_readable_but_no_news(kernel: Kernel, mount: Mount) -> None:
    kernel.call("gcd", 12, 18)
    handle = mount.open(CLIENT, f"/{EVENT}/hist", os.O_RDONLY)
    assert mount.poll(handle, None) == READABLE
    mount.release(handle)


def test_a_histogram_that_is_removed_wakes(kernel: Kernel, mount: Mount) -> None:
    kernel.call("gcd", 12, 18)
    handle = mount.open(CLIENT, f"/{EVENT}/hist", os.O_RDONLY)
    mount.read(CLIENT, handle, 1 << 17, 0)
    told: list[int] = []
    assert mount.poll(handle, lambda: told.append(1)) == 0
    kernel.write_file(f"{EVENT}/trigger", "!hist:keys=a")
    assert told == [1]
    assert mount.poll(handle, None) == READABLE | select.POLLPRI
    mount.release(handle)


def test_before_6_14_hist_is_always_ready() -> None:
    with Kernel(profile=profile_named("linux-6.12")) as kernel:
        mount = kernel.mount()
        handle = mount.open(CLIENT, "/tracing/events/sched/sched_switch/hist", os.O_RDONLY)
        assert mount.poll(handle, None) == ALWAYS_READY
        mount.release(handle)
        mount.close()
