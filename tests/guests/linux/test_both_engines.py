"""A kernel that kprobefs and the kernel itself probe at the same time: both count the hits that each would
count alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.probing import PLAIN, boundaries, engine
from tests.guests.linux.stack_dumps import frames_of, printed
from tests.oracle.inside.mount_files import read, write
from tests.oracle.inside.places import OPTIMIZING

WRITES = 9
FUNCTIONS = ("shmem_write_begin", "shmem_write_end")
"""Functions that a write to a file of tmpfs calls once, and that requests on control files do not call."""


class Both(NamedTuple):
    """Two mounts of one guest: `ours` uses kprobefs's kprobes, and `native` the kernel's own kprobes."""

    engine: LinuxEngine
    ours: Mount
    native: Mount

    def define(self, mount: Mount, *lines: str) -> list[str]:
        """Write definitions; return the name of the errno for each line, or ""."""
        return [write(mount, "/tracing/kprobe_events", line, os.O_APPEND) for line in lines]

    def enable(self, mount: Mount, *, on: bool = True) -> str:
        if mount is self.native and on:
            error = write(mount, "/tracing/events/kprobes/enable", "1")
            # Let the kernel's optimizer run.
            with self.engine.lock:
                self.engine.tasks.idle(OPTIMIZING)
            return error
        return write(mount, "/tracing/events/kprobes/enable", str(int(on)))

    def places(self, function: str) -> list[int]:
        start = self.engine.kernel.kallsyms.lookup_name(function)
        assert start is not None
        return [*boundaries(self.engine, [start])]

    def work(self) -> None:
        """Write 100 bytes to a file in scratch/, WRITES times."""
        with self.engine.lock:
            calls, init = LinuxSyscalls(self.engine.tasks), self.engine.tasks.init
            fd = calls.open(init, "/scratch/file", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            for number in range(WRITES):
                assert calls.write(init, fd, bytes([number]) * 100, None) == 100
            calls.close(init, fd)

    def hits(self, mount: Mount) -> dict[str, tuple[int, int]]:
        """Return event -> (hits, misses)."""
        rows = map(str.split, read(mount, "/kprobe_profile").splitlines())
        return {name: (int(hits), int(missed)) for name, hits, missed in rows}

    def modes(self, mount: Mount) -> dict[str, str]:
        """Return place -> flags in kprobes/list."""
        rows = (line.split() for line in read(mount, "/kprobes/list").splitlines())
        return {words[2]: "".join(words[3:]) for words in rows}


@pytest.fixture(params=[PROFILES[DEFAULT], PLAIN], ids=["optimized", "stepped"], scope="module")
def mounts(request: pytest.FixtureRequest) -> Iterator[Both]:
    guest = engine(request.param)
    native = native_mount(guest.tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False, lock=guest.lock)
    ours = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False, keeps_tracefs=True)
    yield Both(guest, ours, native)
    ours.close()


@pytest.fixture
def both(mounts: Both) -> Iterator[Both]:
    """Yield the mounts, and check that the test leaves no events and no patches."""
    guest = mounts.engine
    yield mounts
    log = read(mounts.native, "/machine/dmesg")
    assert "WARN" not in log
    assert "BUG" not in log
    assert [read(mount, "/tracing/kprobe_events") for mount in (mounts.native, mounts.ours)] == ["", ""]
    if guest.kprobes.optimizer is not None:
        with guest.lock:
            guest.kprobes.optimizer.work.flush()
    assert not guest.machine.text.ledger


def test_a_marker_has_the_address_that_the_kernel_gives_it(both: Both) -> None:
    found = []
    for mount in (both.native, both.ours):
        for name in ("sym-offset", "sym-addr"):
            assert not write(mount, f"/tracing/options/{name}", "1")
        assert not write(mount, "/tracing/trace_marker", "a marker")
        found.append(read(mount, "/tracing/trace").splitlines()[-1].partition("tracing_mark_write")[2])
        for name in ("sym-offset", "sym-addr"):
            assert not write(mount, f"/tracing/options/{name}", "0")
        assert not write(mount, "/tracing/trace", "", os.O_TRUNC)
    assert found[0] == found[1]
    assert found[0].endswith(": a marker")


def test_options_are_those_of_the_kernel(both: Both) -> None:
    """kprobefs's mount has the same trace options as the kernel's tracefs, including those of tracers that
    kprobefs lacks.

    A write to an option of the blk tracer has the same effects in both mounts, also on the option
    context-info.
    """
    directory = "/tracing/options"
    native = {entry.name for entry in both.native.readdir(directory)}
    # The kernel has no function profiler.
    expected = native | {"graph-time"}
    if not both.engine.kprobes.profile.ftrace:
        # Without ftrace there are no tracers of functions.
        of_tracers = ("func-", "func_", "funcgraph-", "graph-time", "sleep-time")
        expected = {name for name in expected if not name.startswith(of_tracers)}
    assert {entry.name for entry in both.ours.readdir(directory)} == expected
    assert "blk_classic" in native
    for name in ("blk_cgname", "blk_cgroup", "blk_classic"):
        for value in ("1", "0"):
            answers = []
            for mount in (both.native, both.ours):
                error = write(mount, f"{directory}/{name}", value)
                answers.append(
                    (error, *(read(mount, f"{directory}/{each}") for each in (name, "context-info")))
                )
            assert answers[0] == answers[1]


@pytest.mark.parametrize("words", [("vfs_*",), ("*_lock", "!_raw*", "vfs_read"), ("kfree",)])
def test_a_graph_filter_lists_in_the_order_of_the_kernel(both: Both, words: tuple[str, ...]) -> None:
    if both.engine.kprobes.sites is None:
        pytest.skip("the profile does not use the entries of functions")
    found = []
    for mount in (both.native, both.ours):
        assert not write(mount, "/tracing/set_graph_notrace", "", os.O_TRUNC)
        for word in words:
            assert not write(mount, "/tracing/set_graph_notrace", f"{word}\n")
        found.append(read(mount, "/tracing/set_graph_notrace").splitlines())
        assert not write(mount, "/tracing/set_graph_notrace", "", os.O_TRUNC)
    assert found[0] == found[1]


def test_each_has_its_own_places_in_the_same_functions(both: Both) -> None:
    """Breakpoints, jumps, calls at entries and return probes of both engines count all hits in the same
    functions.
    """
    begin, end = map(both.places, FUNCTIONS)
    theirs = (f"p:a {FUNCTIONS[0]}", f"p:b {end[2]:#x}", f"p:c {begin[-12]:#x}", f"r:r {FUNCTIONS[0]}")
    mine = (f"p:a {FUNCTIONS[1]}", f"p:b {begin[2]:#x}", f"p:c {end[9]:#x}", f"r:r {FUNCTIONS[1]}")
    assert both.define(both.native, *theirs) == both.define(both.ours, *mine) == [""] * 4
    for first, second in ((both.native, both.ours), (both.ours, both.native)):
        assert both.enable(first) == both.enable(second) == ""
        before = both.hits(both.native), both.hits(both.ours)
        both.work()
        after = both.hits(both.native), both.hits(both.ours)
        for was, now in zip(before, after, strict=True):
            found = {name: (now[name][0] - was[name][0], now[name][1]) for name in now}
            assert found.pop("c")[0] in (0, WRITES)
            assert set(found.values()) == {(WRITES, 0)}, (both.modes(both.native), both.modes(both.ours))
        both.enable(second, on=False)
        both.work()
        both.enable(first, on=False)
    for mount in (both.native, both.ours):
        assert not write(mount, "/tracing/kprobe_events", "", os.O_TRUNC)


def test_stack_dumps_show_the_callers_of_calls_that_both_hook(both: Both) -> None:
    """Stack dumps show the original callers if both kprobefs and the kernel hook the returns of calls.

    kprobefs hooks some calls for its return probes, and the kernel hooks others for its function graph.
    """
    dumping = "show_trace_log_lvl", "show_stack", "sched_show_task", "show_state_filter"
    # The argument limits the dump to tasks in a freezable sleep.
    shows = "show_state_filter 0x2000"

    def dumps() -> list[list[str]]:
        return [frames_of(printed(both.ours, call)) for call in ("dump_stack", shows)]

    expected = dumps()
    assert all(expected)
    for mine, theirs in ((dumping[:2], dumping[2:]), (dumping[2:], dumping[:2]), (dumping, ())):
        assert both.define(both.ours, *(f"r:{name} {name}" for name in mine)) == [""] * len(mine)
        assert both.enable(both.ours) == ""
        for name in theirs:
            assert not write(both.native, "/tracing/set_ftrace_filter", name, os.O_APPEND)
        assert not write(both.native, "/tracing/current_tracer", "function_graph" if theirs else "nop")
        for _ in range(3):
            assert dumps() == expected
        assert not write(both.native, "/tracing/current_tracer", "nop")
        assert not write(both.native, "/tracing/set_ftrace_filter", "", os.O_TRUNC)
        both.enable(both.ours, on=False)
        assert not write(both.ours, "/tracing/kprobe_events", "", os.O_TRUNC)


@pytest.mark.parametrize("entry", [False, True], ids=["within", "entry"])
def test_what_the_kernel_has_patched_is_not_ours_to_patch(both: Both, entry: bool) -> None:
    """kprobefs refuses a probe at a jump or call that the kernel has written.

    To disarm this probe would restore only the first byte of the jump or call.
    """
    place = both.places(FUNCTIONS[1])[0 if entry else 2]
    assert both.define(both.native, f"p:a {place:#x}") == [""]
    assert both.enable(both.native) == ""
    assert both.engine.machine.text.is_foreign(place, 5)
    assert both.define(both.ours, f"p:b {place:#x}") == ["EINVAL"]
    both.work()
    assert both.hits(both.native) == {"a": (WRITES, 0)}
    both.enable(both.native, on=False)
    assert not write(both.native, "/tracing/kprobe_events", "", os.O_TRUNC)
    assert not write(both.ours, "/tracing/kprobe_events", "", os.O_TRUNC)
    assert not both.engine.machine.text.is_foreign(place, 5)
    assert both.define(both.ours, f"p:b {place:#x}") == [""]
    assert both.enable(both.ours) == ""
    both.work()
    assert both.hits(both.ours) == {"b": (WRITES, 0)}
    both.enable(both.ours, on=False)
    assert not write(both.ours, "/tracing/kprobe_events", "", os.O_TRUNC)


def test_no_jump_is_written_over_a_breakpoint_of_the_kernel_s(both: Both) -> None:
    place, *_, behind = [at for at in both.places(FUNCTIONS[1])[2:] if at < both.places(FUNCTIONS[1])[2] + 5]
    assert not write(both.native, "/sysctl/debug/kprobes-optimization", "0")
    assert both.define(both.native, f"p:a {behind:#x}") == [""]
    assert both.enable(both.native) == ""
    assert both.define(both.ours, f"p:b {place:#x}") == [""]
    assert both.enable(both.ours) == ""
    both.work()
    both.work()
    assert both.modes(both.ours)[f"{FUNCTIONS[1]}+{place - both.places(FUNCTIONS[1])[0]:#x}"] == ""
    assert (both.hits(both.native), both.hits(both.ours)) == ({"a": (2 * WRITES, 0)}, {"b": (2 * WRITES, 0)})
    for mount in (both.native, both.ours):
        both.enable(mount, on=False)
        assert not write(mount, "/tracing/kprobe_events", "", os.O_TRUNC)
    assert not write(both.native, "/sysctl/debug/kprobes-optimization", "1")


def test_the_kernel_patches_its_text_around_our_probes(both: Both) -> None:
    """The kernel's events switch jump labels in functions with many probes of kprobefs.

    Hits and records stay right.
    """
    guest = both.engine
    labels = {label.code for label in guest.kernel.jump_labels}
    verdict, lines = guest.kprobes.probe_checker, []
    for name in ("vfs_write", "kmem_cache_alloc", "kmem_cache_free"):
        for number, place in enumerate(both.places(name)[1::3]):
            if verdict.may_probe(place) is None:
                lines.append(f"p:{name}{number} {place:#x}")
    assert len(lines) > 100
    assert both.define(both.ours, *lines) == [""] * len(lines)
    patched = []
    for switched in ("0", "1", "0", "1"):
        assert both.enable(both.ours) == ""
        assert not write(both.native, "/tracing/events/kmem/enable", switched)
        # Arm the probes while the labels are switched, too.
        both.enable(both.ours, on=False)
        write(both.native, "/tracing/trace", "", os.O_TRUNC)
        assert both.enable(both.ours) == ""
        before = both.hits(both.ours)
        both.work()
        hits = {name: count - before[name][0] for name, (count, _) in both.hits(both.ours).items()}
        both.enable(both.ours, on=False)
        assert hits["vfs_write0"] == WRITES
        assert not any(missed for _, missed in both.hits(both.ours).values())
        trace = read(both.native, "/tracing/trace")
        if switched == "1":
            for name in ("kmem_cache_alloc", "kmem_cache_free"):
                records = [line for line in trace.splitlines() if f" {name}: " in line and "init-1 " in line]
                assert len(records) >= hits[f"{name}0"] > 0
        patched.append(sum(guest.machine.text.original(at, 1) != guest.kernel.read(at, 1) for at in labels))
    assert patched[0] == patched[2] < patched[1] == patched[3]
    assert not write(both.native, "/tracing/events/kmem/enable", "0")
    assert not write(both.ours, "/tracing/kprobe_events", "", os.O_TRUNC)
