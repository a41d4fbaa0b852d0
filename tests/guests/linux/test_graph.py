"""function_graph and the function profiler over Debian's kernel: trees are complete, and equal to the
kernel's own.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.trace.symbols import ADDED_TEXT
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.guests.linux.ended_tasks import check_ended_tasks
from tests.guests.linux.files import Files
from tests.guests.linux.model_clock import check_model_clock, check_recording
from tests.guests.linux.probing import engine, workload
from tests.guests.linux.test_handlers import counting

CLIENT = Client(4242, 0, 0)
IN_PYTHON = replace(PROFILES[DEFAULT], compiled=False, optimizer=False)
CALL = re.compile(r"(?P<depth> *)(?P<name>[\w.]+)\(\)(?P<has_calls> \{|;)$")
END = re.compile(r"(?P<depth> *)\}( /\* (?P<name>[\w.]+) \*/)?$")
SWITCH = re.compile(r"(?P<prev>\S+-\d+) +=> +(?P<next>\S+-\d+)")
FAMILIES = "vfs_* ksys_* do_sys* *sched* kmem_cache_* do_exit kernel_clone copy_*"


def mounted(profile: Profile = PROFILES[DEFAULT]) -> tuple[LinuxEngine, Files]:
    guest = engine(profile)
    # Calls of this mount on control files are in no tree.
    return guest, Files(
        probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False, keeps_tracefs=True), CLIENT
    )


def worked(guest: LinuxEngine) -> list[object]:
    with guest.lock:
        return workload(guest)


def column(shell: Files) -> Iterator[str]:
    """Yield the lines of the trace with calls, ends of calls and switches of tasks, without their times."""
    for line in shell.read("/tracing/trace").splitlines():
        if SWITCH.search(line):
            yield line
        elif line[2:4] == ") ":
            yield line.partition("|")[2]


def select(shell: Files, names: str, file: str = "set_ftrace_filter") -> None:
    """Append `names` to a file with one write per name, because a write takes only one name."""
    for name in names.split():
        shell.write(f"/tracing/{file}", name, os.O_WRONLY | os.O_APPEND)


def hits(shell: Files) -> dict[str, int]:
    """Return probe -> number of hits."""
    rows = map(str.split, shell.read("/kprobe_profile").splitlines())
    return {name: int(count) for name, count, _ in rows}


def calls(lines: list[str]) -> Counter[str]:
    """Return function -> number of calls.

    Assert that each call ends in the task that made it, if this task runs again.
    """
    awaited: dict[str, list[str]] = {}
    found: Counter[str] = Counter()
    first: list[str] = []
    stack = first
    for line in lines:
        if (call := CALL.search(line)) is not None:
            assert len(call["depth"]) == 2 + 2 * len(stack), line
            found[call["name"]] += 1
            if call["has_calls"] != ";":
                stack.append(call["name"])
        elif (end := END.search(line)) is not None:
            assert end["name"] in (None, stack.pop()), line
            assert len(end["depth"]) == 2 + 2 * len(stack), line
        else:
            switch = SWITCH.search(line)
            assert switch is not None, line
            if not awaited:
                awaited[switch["prev"]] = first
            assert stack is awaited[switch["prev"]]
            stack = awaited.setdefault(switch["next"], [])
    for task, left in awaited.items():
        assert not left or left[0] in ("schedule", "schedule_idle", "do_exit"), (task, left)
    return found


@pytest.fixture(scope="module")
def expected() -> list[object]:
    """Return the answers of the workload in a guest without a tracer."""
    return worked(engine(PROFILES[DEFAULT]))


@pytest.mark.parametrize("profile", [PROFILES[DEFAULT], IN_PYTHON], ids=["guest code", "Python"])
def test_calls_are_as_many_as_breakpoints_count(profile: Profile, expected: list[object]) -> None:
    """The graph has as many calls of a function, with begin and end, as a breakpoint in the function has
    hits.
    """
    guest, shell = mounted(profile)
    probed = ("vfs_write", "shmem_write_end", "kernel_clone", "schedule")
    for name in probed:
        # Probe after the fentry site, so that the breakpoint does not share the site.
        shell.write("/kprobe_events", f"p:at/{name} {name}+5\n", os.O_WRONLY | os.O_APPEND)
    select(shell, f"{FAMILIES} {' '.join(probed)}")
    shell.write("/tracing/options/funcgraph-tail", "1")
    shell.write("/tracing/events/at/enable", "1")
    shell.write("/tracing/current_tracer", "function_graph")
    assert worked(guest) == expected
    shell.write("/tracing/tracing_on", "0")
    shell.write("/tracing/events/at/enable", "0")
    counted = hits(shell)
    found = calls([line for line in column(shell) if not line.lstrip().startswith("/* ")])
    assert {name: found[name] for name in probed} == counted
    assert min(counted.values()) > 1
    shell.write("/tracing/current_tracer", "nop")
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert not guest.machine.text.ledger


def test_calls_and_returns_stay_in_the_guest() -> None:
    """Calls and returns are recorded without Python, also after a tail call, when two calls share a return
    address.
    """
    guest, shell = mounted()
    shell.write("/tracing/buffer_size_kb", "8000")
    shell.write("/tracing/current_tracer", "function_graph")
    worked(guest)
    taken: Counter[int] = Counter()
    breakpoints = guest.machine.breakpoints
    for address, handler in [*breakpoints.items()]:
        breakpoints[address] = counting(address, handler, taken)
    shell.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
    with guest.lock:
        workload(guest)
    entries = re.match(r"entries: (\d+)\n", shell.read("/tracing/per_cpu/cpu0/stats"))
    assert entries is not None
    assert int(entries[1]) > 10_000
    trampolines = [each for _, each in guest.components.engine.hook_sets.trampolines()]
    pieces = [piece for each in trampolines for _, piece in each.pieces()]
    by_python = [at for at in taken if any(at in piece for piece in pieces)]
    assert not by_python
    shell.write("/tracing/current_tracer", "nop")


def test_kallsyms_has_the_kernel_s_own_trampolines_only() -> None:
    """kallsyms does not list kprobefs's trampolines if the kernel has symbols with their names."""
    guest, shell = mounted()
    shell.write("/kprobe_events", "r:closing filp_close\n")
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.write("/tracing/current_tracer", "function_graph")
    assert any(each.address for _, each in guest.components.engine.hook_sets.trampolines())
    lines = [line.split()[2] for line in shell.read("/machine/kallsyms").splitlines()]
    assert {name: lines.count(name) for name in ADDED_TEXT} == dict.fromkeys(ADDED_TEXT, 1)
    shell.write("/tracing/current_tracer", "nop")
    shell.write("/tracing/events/kprobes/enable", "0")
    shell.write("/kprobe_events", "-:closing\n")


def test_trees_are_the_kernel_s_own_tracer_s() -> None:
    """For requests on tmpfs, kprobefs shows the same tree, line by line, as the tracer of Debian's kernel."""
    native = Files(debian_kernel.mount(), CLIENT)
    _, ours = mounted()
    trees = []
    for shell in (native, ours):
        roots = "shmem_file_read_iter generic_file_write_iter shmem_unlink"
        select(shell, roots, "set_graph_function")
        shell.write("/tracing/set_graph_notrace", "*balance_dirty*")
        # Debian's kernel itself takes two seconds to patch the entries of all functions.
        select(shell, "shmem_* *file* *folio* *inode* *mnt* *write*")
        shell.write("/tracing/max_graph_depth", "4")
        shell.write("/tracing/current_tracer", "function_graph")
        for option in ("funcgraph-tail", "nofuncgraph-overhead"):
            shell.write("/tracing/trace_options", option)
        mount = shell.mount
        mount.release(mount.create(CLIENT, "/scratch/one", 0o644, os.O_WRONLY))
        shell.write("/scratch/one", "some text")
        shell.write("/scratch/one", "x" * 9000)
        assert shell.read("/scratch/one") == "x" * 9000
        mount.unlink(CLIENT, "/scratch/one")
        shell.write("/tracing/tracing_on", "0")
        trees.append([line for line in column(shell) if not SWITCH.search(line)])
        shell.write("/tracing/current_tracer", "nop")
    assert trees[0] == trees[1]
    found = calls(trees[0])
    assert found["generic_file_write_iter"] == 2
    assert found["shmem_unlink"] == 1
    assert found.total() > 40


def test_nothing_is_left_of_tasks_that_end() -> None:
    check_ended_tasks(*mounted())


def test_profiles_count_what_the_tree_shows() -> None:
    """The function profiler counts as many hits of a function as a probe does.

    With the option graph-time, the times include the functions that are called.
    """
    guest, shell = mounted()
    select(shell, "vfs_write ksys_write vfs_read kernel_clone")
    shell.write("/kprobe_events", "p:at/vfs_write vfs_write+5\np:at/kernel_clone kernel_clone+5\n")
    shell.write("/tracing/events/at/enable", "1")
    times = []
    for graph_time in ("1", "0"):
        shell.write("/tracing/options/graph-time", graph_time)
        shell.write("/tracing/function_profile_enabled", "1")
        worked(guest)
        shell.write("/tracing/function_profile_enabled", "0")
        rows = map(str.split, shell.read("/tracing/trace_stat/function0").splitlines()[2:])
        profile = {name: (int(count), float(time)) for name, count, time, *_ in rows}
        times.append(profile["ksys_write"][1])
        # Linux: "hits" of a second run begin anew.
        assert profile["vfs_write"][0] == profile["ksys_write"][0] == 12
    counted = hits(shell)
    assert counted == {"vfs_write": 24, "kernel_clone": 2 * profile["kernel_clone"][0]}
    assert times[0] > times[1] > 0


def test_a_change_of_a_setting_writes_few_places_of_the_text() -> None:
    """The start of the tracer patches all sites.

    A later change of a setting patches only the few affected sites.
    """
    guest, shell = mounted()
    select(shell, FAMILIES)
    with guest.lock:
        client = guest.tasks.fork(guest.tasks.init, 4001)
    syscalls = LinuxSyscalls(guest.tasks)
    text = guest.machine.text
    poke_batch = text.poke_batch
    restore_batch = text.restore_batch
    written: set[int] = set()

    def count(pokes: Iterable[tuple[int, bytes]]) -> None:
        pokes = list(pokes)
        written.update(va for va, _ in pokes)
        poke_batch(pokes)

    def count_restored(places: Sequence[int], size: int) -> None:
        written.update(places)
        restore_batch(places, size)

    def depths_of(name: str) -> list[int]:
        """Open and close a file three times; return the depths of the calls of `name` in the graph."""
        shell.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
        with guest.lock:
            for _ in range(3):
                syscalls.close(client, syscalls.open(client, "/scratch/file", os.O_RDWR | os.O_CREAT, 0o600))
        lines = [CALL.search(line) for line in column(shell)]
        return [len(call["depth"]) // 2 - 1 for call in lines if call is not None and call["name"] == name]

    shell.write("/tracing/current_tracer", "function_graph")
    sites = len(shell.read("/tracing/set_ftrace_filter").splitlines())
    assert sites > 300
    assert depths_of("vfs_open") == [1] * 3
    text.poke_batch = count  # type: ignore[method-assign]
    text.restore_batch = count_restored  # type: ignore[method-assign]
    for file, word, expected in (
        ("set_graph_function", "do_sys_openat2", [1] * 3),
        ("set_graph_notrace", "vfs_open", []),
        ("max_graph_depth", "1", []),
        ("set_graph_notrace", "\n", []),
        ("max_graph_depth", "0", [1] * 3),
        ("set_graph_function", "vfs_open", [0] * 3),
        ("set_ftrace_notrace", "do_sys_openat2", [0] * 3),
    ):
        written.clear()
        shell.write(f"/tracing/{file}", word, os.O_WRONLY | os.O_TRUNC)
        assert depths_of("vfs_open") == expected, (file, word)
        # Up to two sites are patched in two steps, and code is written.
        assert len(written) < 40, (file, word)
    # Two changes before the guest runs, of which the second one attaches sites.
    shell.write("/tracing/set_graph_function", "do_sys_openat2", os.O_WRONLY | os.O_APPEND)
    shell.write("/tracing/set_ftrace_notrace", "vfs_write", os.O_WRONLY | os.O_TRUNC)
    assert depths_of("vfs_open") == [1] * 3
    shell.write("/tracing/set_graph_notrace", "vfs_open")
    shell.write("/tracing/set_ftrace_notrace", "vfs_read", os.O_WRONLY | os.O_TRUNC)
    assert depths_of("vfs_open") == []
    written.clear()
    shell.write("/tracing/current_tracer", "nop")
    assert len(written) >= sites - 1
    assert not text.ledger


# With the model clock


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_time_is_the_number_of_instructions() -> None:
    """A cycle of the time counter is shorter than a nanosecond, and no duration depends on its begin."""
    check_model_clock(engine(PROFILES[DEFAULT]), 1)


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_guest_code_records_with_the_model_clock() -> None:
    check_recording(engine(PROFILES[DEFAULT]))
