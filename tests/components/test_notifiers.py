"""Changes of the clock, of event directories and of modules, which tracing and a lower layer must both
follow.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.components.guest_directories import DENTRIES, GuestDirectories
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted, booted.lock:
        yield booted


def test_what_a_clock_switch_leaves_out_stays(kernel: Kernel) -> None:
    clock, before = kernel.machine.clock, kernel.machine.clock.now_ns()
    for kind, seed, found in ((None, 7, ("virtual", 7)), ("real", None, ("real", 7))):
        kernel.components.clock.select(kind, seed)
        assert (clock.kind, clock.seed) == found
    assert clock.now_ns() >= before


def test_a_clock_switch_drops_code_that_reads_the_old_clock(kernel: Kernel) -> None:
    kernel.tracing.kprobe_events.write(b"p:g/e int_sqrt\n")
    event = kernel.tracing.system.events.find("g", "e")
    assert event is not None
    kernel.trace_arrays.top.events.set_enabled(event, True)
    for _ in range(2):
        kernel.call("int_sqrt", 4)
    (probe,) = kernel.kprobes
    head = kernel.kprobes.table.valid(probe)
    assert head is not None
    assert head.compiled is not None
    kernel.components.clock.select("real", None)
    assert head.compiled is None


class Directories:
    """A stand-in for a guest that makes a directory at each call. No call is allowed while the guest runs."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[str, int]] = {}
        self.is_watched, self.is_running = True, False
        self._made = 0

    def call(self, function: str, *args: int | str) -> int:
        assert not self.is_running
        if function == DENTRIES.makes:
            name, parent = args
            self._made += 1
            self.there[self._made] = str(name), int(parent)
            return self._made
        (dentry,) = args
        del self.there[int(dentry)]
        return 0


def test_directories_go_with_their_events(kernel: Kernel) -> None:
    guest, write = Directories(), kernel.tracing.kprobe_events.write
    GuestDirectories(
        kernel.tracing.system.events, guest.call, lambda: guest.is_watched, lambda: guest.is_running
    )
    write(b"p:g/e vfs_read\np:g/f vfs_read\n")
    assert guest.there == {1: ("g", 0), 2: ("e", 1), 3: ("f", 1)}
    write(b"-:g/e\n")
    assert guest.there == {1: ("g", 0), 3: ("f", 1)}
    write(b"-:g/f\n")
    assert guest.there == {}
    for guest.is_watched, guest.is_running in ((False, False), (True, True)):
        write(b"p:g/e vfs_read\n")
        write(b"-:g/e\n")
    assert guest.there == {}


def test_a_module_is_known_to_symbols_and_probes_while_it_is_there(kernel: Kernel) -> None:
    write = kernel.tracing.kprobe_events.write
    write(b"p:g/later ktgt:ktgt_add\n")
    kernel.load_module("ktgt")
    probe = Kprobe("ktgt_add")
    kernel.register_kprobe(probe)
    assert kernel.kprobes.table.valid(probe) is not None
    kernel.unload_module("ktgt")
    assert probe.is_gone
    assert kernel.components.live.kallsyms.lookup_name("ktgt_add") is None
