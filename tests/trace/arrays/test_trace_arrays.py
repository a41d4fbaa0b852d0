"""The making, use and removal of trace instances. An instance records only the events that are enabled in
this instance.
"""

from __future__ import annotations

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.output.options import TraceOption
from emulated_kernel.trace.trace_arrays import TraceArrays
from tests.trace.arrays.conftest import names
from tests.trace.events.kernel import errno_of


def test_each_records_for_itself(kernel: Kernel, arrays: TraceArrays) -> None:
    one, two = arrays.make("one"), arrays.make("two")
    one.events.write(b"a")
    two.events.write(b"b")
    kernel.call("strlen", "x")
    assert (names(arrays.top), names(one), names(two)) == ([], ["a"], ["b"])
    one.array.set_tracing_on(False)
    kernel.call("strlen", "x")
    assert (names(one), names(two)) == (["a"], ["b", "b"])


def test_the_task_of_a_hit_is_read_once_for_all(
    kernel: Kernel, arrays: TraceArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    tasks = kernel.tracing.system.tasks
    comm = tasks.comm

    def counted() -> bytes:
        reads.append(tasks.pid())
        return comm()

    monkeypatch.setattr(tasks, "comm", counted)
    event = kernel.tracing.kprobe_events.find("kprobes", "a")
    assert event is not None
    counts = []
    for number in range(1, 4):
        instance = arrays.make(f"i{number}")
        instance.events.write(b"a")
        # A filter keeps the hits in Python.
        instance.filters.write(event, b's != "no"')
        reads.clear()
        kernel.call("strlen", "x")
        counts.append(len(reads))
    assert counts == [1, 1, 1]
    texts = [tracing.array.trace_text().splitlines()[-1] for tracing in arrays if names(tracing)]
    assert len(texts) == 3
    assert len(set(texts)) == 1


def test_thread_groups_of_hits_are_recorded(kernel: Kernel, arrays: TraceArrays) -> None:
    """With the option record-tgid, records have the thread group, also of events whose hits guest code
    handled before the option was set.
    """
    one = arrays.make("one")
    one.events.write(b"a")
    for value in (0, 0, 1, 1):
        one.array.options.set("record-tgid", value)
        kernel.call("strlen", "x")
    pid = kernel.tracing.system.tasks.pid()
    assert [f"({pid:7d})" in line for line in one.array.trace_text().splitlines()[-4:]] == [True] * 4
    assert f"{pid} {pid}\n" in kernel.tracing.system.cmdlines.tgid_records()


def test_filters_and_errors_are_its_own(kernel: Kernel, arrays: TraceArrays) -> None:
    one = arrays.make("one")
    event = kernel.tracing.kprobe_events.find("kprobes", "a")
    assert event is not None
    one.filters.write(event, b's == "yes"')
    assert errno_of(lambda: one.filters.write(event, b"nosuch == 1")) == "EINVAL"
    assert (len(one.errors.records()), arrays.top.errors.records()) == (1, [])
    one.filters.write(event, b's == "yes"')
    for tracing in arrays:
        tracing.events.write(b"a")
    kernel.call("strlen", "no")
    assert (names(arrays.top), names(one)) == (["a"], [])


def test_an_instance_keeps_an_event_from_being_removed(kernel: Kernel, arrays: TraceArrays) -> None:
    arrays.make("one").events.write(b"a")
    assert errno_of(lambda: kernel.tracing.kprobe_events.write(b"-:a")) == "EBUSY"
    arrays.remove("one")
    kernel.tracing.kprobe_events.write(b"-:a")


def test_names(arrays: TraceArrays) -> None:
    arrays.make("one")
    assert errno_of(lambda: arrays.make("one")) == "EEXIST"
    assert errno_of(lambda: arrays.remove("two")) == "ENODEV"
    assert list(arrays.names()) == ["one"]
    arrays.remove("one")
    assert arrays.find("one") is None


def test_options_are_inherited_but_two(arrays: TraceArrays) -> None:
    top = arrays.top.array.options
    before = top.flags
    try:
        for name in ("overwrite", "irq-info"):
            top.set(name, 0)
        for name in ("event-fork", "sym-addr"):
            top.set(name, 1)
        one = arrays.make("one").array
        assert not one.options.get("event-fork")
        assert (one.options.get("sym-addr"), one.options.get("irq-info")) == (True, False)
        assert not one.buffers[0].overwrite
        assert "trace_printk" in one.options.names()
        assert "trace_printk" not in one.options.names(instance=True)
    finally:
        for option in TraceOption:
            if (before ^ top.flags) & option:
                top.flags ^= option
        arrays.top.array.apply_switches()


def test_pids(kernel: Kernel, arrays: TraceArrays) -> None:
    one = arrays.make("one")
    one.events.write(b"a")
    one.array.pids.traced.write(b"1")
    kernel.call("strlen", "x")
    assert names(one) == []
    one.array.pids.traced.clear()
    kernel.call("strlen", "x")
    assert names(one) == ["a"]


def test_forks_are_followed_where_the_option_is_on(arrays: TraceArrays) -> None:
    one, two = arrays.make("one").array, arrays.make("two").array
    one.options.set("event-fork", 1)
    for array in (one, two):
        array.pids.traced.write(b"10")
    arrays.forked(10, 11)
    arrays.forked(11, 12)
    arrays.exited(10)
    assert (one.pids.traced.pids, two.pids.traced.pids) == ({11, 12}, {10})
