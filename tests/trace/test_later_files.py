"""Files of tracefs that came after Linux 6.1, over the own kernel with profiles of 6.12 and 7.2."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.util.errors import KernelError

SET_EVENT = "tracing/set_event"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as booted:
        yield booted


@pytest.fixture(scope="module")
def old() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-6.1")) as booted:
        yield booted


def refused(kernel: Kernel, path: str, text: str) -> int:
    with pytest.raises(KernelError) as failure:
        kernel.write_file(path, text)
    return failure.value.errno or 0


@pytest.mark.parametrize(
    "path",
    [
        "available_filter_functions_addrs",
        "touched_functions",
        "show_event_filters",
        "show_event_triggers",
    ],
)
def test_each_file_belongs_to_its_versions(kernel: Kernel, old: Kernel, path: str) -> None:
    kernel.read_file(f"tracing/{path}")
    with pytest.raises(KernelError) as failure:
        old.read_file(f"tracing/{path}")
    assert failure.value.errno == errno.ENOENT
    assert path in kernel.read_file("tracing/README")
    assert path not in old.read_file("tracing/README")


def test_addresses_of_functions_are_those_that_records_have(kernel: Kernel) -> None:
    lines = kernel.read_file("tracing/available_filter_functions_addrs").splitlines()
    names = kernel.read_file("tracing/available_filter_functions").splitlines()
    assert [line.partition(" ")[2] for line in lines] == names
    addresses = {name: int(text, 16) for text, name in (line.split(" ", 1) for line in lines)}
    assert addresses["vfs_read"] == kernel.kallsyms_lookup_name("vfs_read")


def test_functions_that_were_traced_stay_in_touched_functions(kernel: Kernel) -> None:
    kernel.write_file("tracing/kprobe_events", "p:one gcd\np:two int_sqrt")
    kernel.write_file("tracing/events/kprobes/one/enable", "1")
    (line,) = kernel.read_file("tracing/enabled_functions").splitlines()
    assert line.startswith(f"gcd (1) R{' ' * 9}\ttramp: ")
    assert kernel.read_file("tracing/touched_functions").splitlines() == [line]
    kernel.write_file("tracing/events/kprobes/two/enable", "1")
    kernel.write_file("tracing/events/kprobes/one/enable", "0")
    touched = {each.split()[0]: each for each in kernel.read_file("tracing/touched_functions").splitlines()}
    assert touched["gcd"] == f"gcd (0){' ' * 11}"
    assert touched["int_sqrt"] in kernel.read_file("tracing/enabled_functions")
    kernel.write_file("tracing/events/kprobes/two/enable", "0")
    kernel.write_file("tracing/kprobe_events", "-:one\n-:two")
    assert kernel.read_file("tracing/enabled_functions") == ""


def test_filters_and_triggers_of_all_events_are_listed(kernel: Kernel) -> None:
    assert kernel.read_file("tracing/show_event_filters") == ""
    kernel.write_file("tracing/events/sched/sched_switch/filter", "prev_pid > 1")
    kernel.write_file("tracing/events/exceptions/page_fault_kernel/filter", "address != 0")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "traceon:3 if prev_pid == 5")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "stacktrace")
    filters = kernel.read_file("tracing/show_event_filters").splitlines()
    assert sorted(filters) == [
        "exceptions:page_fault_kernel    address != 0",
        "sched:sched_switch              prev_pid > 1",
    ]
    triggers = kernel.read_file("tracing/show_event_triggers").splitlines()
    own = kernel.read_file("tracing/events/sched/sched_switch/trigger").splitlines()
    assert triggers == [f"sched:sched_switch              {line}" for line in own]
    kernel.write_file("tracing/events/sched/sched_switch/filter", "0")
    kernel.write_file("tracing/events/exceptions/page_fault_kernel/filter", "0")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "!stacktrace")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "!traceon:3")
    assert kernel.read_file("tracing/show_event_triggers") == ""


def test_a_name_longer_than_the_column_is_followed_by_one_blank(kernel: Kernel) -> None:
    kernel.write_file("tracing/kprobe_events", f"p:{'g' * 20}/{'e' * 20} gcd a=%di")
    kernel.write_file(f"tracing/events/{'g' * 20}/{'e' * 20}/filter", "a == 1")
    assert kernel.read_file("tracing/show_event_filters") == f"{'g' * 20}:{'e' * 20} a == 1\n"
    kernel.write_file("tracing/kprobe_events", f"-:{'g' * 20}/")


def test_events_of_a_module_that_is_not_loaded_are_awaited(kernel: Kernel) -> None:
    for word in ("xfs:mod:nfs", "xfs:*:mod:nfs", ":mod:a-b", "*:mod:ktgt", ":x:mod:ktgt"):
        kernel.write_file(SET_EVENT, word)
    assert kernel.read_file(SET_EVENT).splitlines() == [
        "*:x:mod:ktgt",
        "*:*:mod:ktgt",
        "*:*:mod:a-b",
        "xfs:*:mod:nfs",
        "xfs:mod:nfs",
    ]
    assert refused(kernel, SET_EVENT, "!y:mod:ktgt") == errno.EINVAL
    kernel.write_file(SET_EVENT, "!xfs:mod:nfs")
    kernel.write_file(SET_EVENT, "!*:mod:a-b")
    assert kernel.read_file(SET_EVENT).splitlines() == ["*:x:mod:ktgt", "*:*:mod:ktgt", "xfs:*:mod:nfs"]
    kernel.load_module("ktgt")
    assert kernel.read_file(SET_EVENT) == "xfs:*:mod:nfs\n"
    assert refused(kernel, SET_EVENT, "sched:mod:ktgt") == errno.EINVAL
    kernel.unload_module("ktgt")
    kernel.write_file(SET_EVENT, "!:mod:nfs")
    assert kernel.read_file(SET_EVENT) == ""


def test_earlier_kernels_know_no_events_of_modules(old: Kernel) -> None:
    assert refused(old, SET_EVENT, "sched:sched_switch:mod:ktgt") == errno.EINVAL
    assert old.read_file(SET_EVENT) == ""


@pytest.mark.parametrize(
    ("profile", "longest", "taken", "shown", "text"),
    [
        ("linux-6.1", 3072, 1024, [16, 16, 20], 1024),
        ("linux-6.12", 4060, 4060, [16, 16, 20], 4054),
        ("linux-7.2", 4064, 4064, [0, 8, 16], 4054),
    ],
)
def test_sizes_of_markers(profile: str, longest: int, taken: int, shown: list[int], text: int) -> None:
    """Bytes that are shown of raw markers of 4, 10 and 17 bytes, and what is taken of long markers."""
    with Kernel(profile=profile_named(profile)) as kernel:
        write = kernel.trace.write_raw_marker
        for size in (3, longest + 1):
            with pytest.raises(KernelError) as failure:
                write(b"x" * size)
            assert failure.value.errno == errno.EINVAL
        for size in (4, 10, 17):
            assert write(b"x" * size) == size
        lines = [line.partition(" buf:") for line in kernel.read_file("tracing/trace").splitlines()]
        assert [len(data.split()) for _, found, data in lines if found] == shown
        assert write(b"x" * longest) == taken
        assert kernel.trace.write_marker(b"y" * 5000) == text
