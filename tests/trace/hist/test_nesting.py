"""Synthetic events that trigger themselves or other synthetic events, up to Linux's limit of nested
entries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.context.probe_hit import MAX_NESTING
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount

CLIENT = Client(0, 0, 0)
HIST = "hist:keys=common_pid:v=common_timestamp:onmax($v).trace({},$v)\n"


@pytest.fixture
def mount() -> Iterator[Mount]:
    with Kernel() as kernel:
        yield kernel.mount()


def write(mount: Mount, path: str, text: str) -> None:
    handle = mount.open(CLIENT, path, os.O_WRONLY | os.O_APPEND)
    try:
        assert mount.write(CLIENT, handle, text.encode(), 0) == len(text)
    finally:
        mount.release(handle)


def lines(mount: Mount) -> list[str]:
    """Return the lines of `trace` without its header."""
    handle = mount.open(CLIENT, "/tracing/trace", os.O_RDONLY)
    text = b""
    while more := mount.read(CLIENT, handle, 1 << 16, len(text)):
        text += more
    mount.release(handle)
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


def hit(mount: Mount, names: list[str], following: list[str]) -> list[str]:
    """Return the records of one hit, at which each event of `names` triggers the event at the same index in
    `following`.

    A kprobe triggers the first event.
    """
    write(mount, "/kprobe_events", "p:h int_sqrt\n")
    for name in names:
        write(mount, "/tracing/synthetic_events", f"{name} u64 x\n")
    write(mount, "/tracing/events/kprobes/h/trigger", HIST.format(names[0]))
    for name, other in zip(names, following, strict=True):
        if other:
            write(mount, f"/tracing/events/synthetic/{name}/trigger", HIST.format(other))
    write(mount, "/tracing/events/synthetic/enable", "1")
    write(mount, "/machine/call", "int_sqrt 9\n")
    return lines(mount)


def test_an_event_that_triggers_itself_ends(mount: Mount) -> None:
    """An event that triggers itself ends at the limit. The count of preemption levels in the records grows to
    0xe, and stays in its four bits.
    """
    found = hit(mount, ["again"], ["again"])
    assert len(found) == MAX_NESTING - 1
    counts = [int(line.split("]")[1].split()[0][3], 16) for line in found]
    assert counts == sorted(counts)
    assert counts[-1] == 0xE
    assert all(line.split("]")[1].split()[0][4] == "." for line in found)
    write(mount, "/machine/call", "int_sqrt 9\n")
    assert len(lines(mount)) == 2 * len(found)


def test_a_chain_of_events_ends(mount: Mount) -> None:
    names = [f"c{number}" for number in range(MAX_NESTING + 8)]
    found = hit(mount, names, [*names[1:], ""])
    assert [line.split(": ")[1] for line in found] == names[: MAX_NESTING - 1]


def test_a_short_chain_is_whole(mount: Mount) -> None:
    names = ["first", "second", "third"]
    found = hit(mount, names, [*names[1:], ""])
    assert [line.split(": ")[1] for line in found] == names
