"""Every hit is accounted for: hits = records + overrun + dropped + read + cleared, whatever happens to the
buffers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from random import Random

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import WouldBlock
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.test_reserves import OTHER, opened, read, write

STEPS = 20
LIMIT = 500
"""Bound of the filters: the top array records hits with smaller arguments, and the instance all
other hits.
"""
TOP, INSTANCE = "/tracing", "/tracing/instances/rest"
ARRAYS = {TOP: f"n < {LIMIT}", INSTANCE: f"n >= {LIMIT}"}
KINDS = ("records", "overrun", "dropped events", "read events", "cleared")


class Books:
    """An account of all hits, taken only from files of the mount."""

    def __init__(self, mount: Mount, random: Random) -> None:
        self.mount, self.random = mount, random
        self.calls = 0
        self.calls_before = 0
        """Number of hits of events that were deleted."""
        self.closed: Counter[str] = Counter()
        """"cleared", or a name in `stats` -> number of hits in buffers that were cleared."""
        mount.mkdir(OTHER, INSTANCE, 0o755)
        for array in ARRAYS:
            self.write(array, "buffer_size_kb", "4")
        self.define()

    def write(self, array: str, name: str, text: str) -> None:
        write(self.mount, f"{array}/{name}", text.encode())

    def define(self) -> None:
        write(self.mount, f"{TOP}/kprobe_events", b"p:hit gcd n=$arg1:u64 pad=+0($stack):u64[4]")
        for array, condition in ARRAYS.items():
            self.write(array, "events/kprobes/hit/filter", condition)
            self.write(array, "events/kprobes/hit/enable", "1")

    def hits(self) -> int:
        name, hits, missed = read(self.mount, f"{TOP}/kprobe_profile").split()
        assert (name, missed) == (b"hit", b"0")
        return int(hits)

    def stats(self, array: str) -> dict[str, int]:
        text = read(self.mount, f"{array}/per_cpu/cpu0/stats").decode()
        return {name: int(value) for name, value in re.findall(r"^([a-z ]+): (\d+)$", text, re.M)}

    def close(self, array: str) -> None:
        """Add the counts of the array's buffer to `closed`, because the buffer will be cleared."""
        stats = self.stats(array)
        self.closed["cleared"] += stats["entries"]
        for name in ("overrun", "dropped events", "read events"):
            self.closed[name] += stats[name]

    def total(self) -> Counter[str]:
        total = Counter(self.closed)
        for array in ARRAYS:
            stats = self.stats(array)
            total.update({name: stats[name] for name in ("overrun", "dropped events", "read events")})
            total["records"] += stats["entries"]
        return total

    # Steps of the test

    def call(self) -> None:
        self.call_often(self.random.choice((1, 30, 200)))

    def overrun(self) -> None:
        self.switch_overwrite("1")
        self.call_often(400)

    def drop(self) -> None:
        self.switch_overwrite("0")
        self.call_often(400)

    def call_often(self, count: int) -> None:
        self.calls += count
        numbers = [self.random.randrange(2 * LIMIT) for _ in range(count)]
        write(self.mount, "/machine/call", "".join(f"gcd {number} 7\n" for number in numbers).encode())

    def consume(self) -> None:
        array = self.random.choice(list(ARRAYS))
        with opened(self.mount, f"{array}/trace_pipe", os.O_RDONLY | os.O_NONBLOCK) as handle:
            try:
                for _ in range(self.random.randrange(1, 4)):
                    self.mount.read(OTHER, handle, 4096, 0)
            except WouldBlock:
                self.mount.give_up(OTHER, handle, 11)

    def clear(self) -> None:
        array = self.random.choice(list(ARRAYS))
        self.close(array)
        with opened(self.mount, f"{array}/trace", os.O_WRONLY | os.O_TRUNC):
            pass
        assert self.stats(array)["entries"] == 0

    def switch_overwrite(self, value: str) -> None:
        for array in ARRAYS:
            self.write(array, "options/overwrite", value)

    def define_anew(self) -> None:
        """Delete the event and define the event again.

        The deletion clears the buffers and the event's count of hits.
        """
        for array in ARRAYS:
            self.close(array)
            self.write(array, "events/kprobes/hit/enable", "0")
        self.calls_before += self.hits()
        write(self.mount, f"{TOP}/kprobe_events", b"-:hit")
        for array in ARRAYS:
            assert self.stats(array)["entries"] == 0
        self.define()


@pytest.mark.parametrize(("arch", "seed"), [("x86_64", 1), ("x86_64", 2), ("riscv64", 3), ("i386", 4)])
def test_every_hit_is_accounted_for(arch: str, seed: int) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        random = Random(seed)
        books = Books(kernel.mount(), random)
        all_kinds = [books.overrun, books.consume, books.clear, books.drop, books.consume, books.define_anew]
        steps = all_kinds + [random.choice([books.call, *all_kinds]) for _ in range(STEPS)] + [books.call]
        for step in steps:
            step()
            assert books.hits() + books.calls_before == books.calls == books.total().total(), step
        assert min(books.total()[name] for name in KINDS) > 0
