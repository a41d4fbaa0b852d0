"""Static events of work, threads, sleep, soft interrupts, timers and the page cache: the records agree with
what the guest did.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from tests.trace.static.conftest import Enable, find, records

_LINE = re.compile(r"\s*.*-(\d+)\s+\[(\d+)\] \S+\s+([\d.]+): (\w+): (.*)")
_UNMAPPED = 0x10
"""An address in user space at which nothing is mapped."""


def told(kernel: Kernel) -> list[tuple[int, int, str, str]]:
    """Return pid, time in nanoseconds, event and text of each record. The time is as exact as the trace shows
    it.
    """
    matches = [_LINE.fullmatch(line) for line in kernel.trace.trace_text().splitlines() if line[0] != "#"]
    return [(int(m[1]), round(float(m[3]) * 1e9), m[4], m[5]) for m in matches if m is not None]


def fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", text))


def test_work_is_queued_begun_and_done(kernel: Kernel, enable: Enable) -> None:
    for name in ("queue_work", "activate_work", "execute_start", "execute_end"):
        enable(f"workqueue/workqueue_{name}")
    kernel.call("load_workqueue", 6)
    stages: dict[str, list[str]] = {}
    for line in records(kernel):
        found = re.fullmatch(r"\d+ workqueue_(\w+): work struct[ =]([0-9a-f]+)(.*)", line)
        assert found is not None, line
        stages.setdefault(found[2], []).append(found[1])
        if found[1] != "activate_work":
            assert "load_work_fn" in found[3], line
    assert len(stages) == 6
    order = ["queue_work", "activate_work", "execute_start", "execute_end"]
    assert all(stage == order for stage in stages.values())


def test_threads_are_stopped_and_children_waited_for(kernel: Kernel, enable: Enable) -> None:
    for name in ("sched_kthread_stop", "sched_kthread_stop_ret", "sched_process_wait", "sched_process_exit"):
        enable(f"sched/{name}")
    kernel.call("load_locks", 2)
    kernel.call("load_fork", 2)
    found = told(kernel)
    stopped = [fields(text)["pid"] for _, _, event, text in found if event == "sched_kthread_stop"]
    ended = [str(pid) for pid, _, event, _ in found if event == "sched_process_exit"]
    assert len(stopped) >= 1
    assert set(stopped) <= set(ended)
    assert len([1 for _, _, event, _ in found if event == "sched_kthread_stop_ret"]) == len(stopped)
    waits = [fields(text) for _, _, event, text in found if event == "sched_process_wait"]
    assert len(waits) >= 2
    assert {wait["pid"] for wait in waits} <= {*ended, "0"}


def test_a_fork_and_a_name(kernel: Kernel, enable: Enable) -> None:
    for path in ("task/task_newtask", "task/task_rename", "sched/sched_process_fork"):
        enable(path)
    kernel.call("load_fork", 2)
    found = told(kernel)
    new = [fields(text) for _, _, event, text in found if event == "task_newtask"]
    forked = [fields(text) for _, _, event, text in found if event == "sched_process_fork"]
    assert [each["pid"] for each in new] == [each["child_pid"] for each in forked]
    assert {each["oom_score_adj"] for each in new} == {"0"}
    renamed = [fields(text) for _, _, event, text in found if event == "task_rename"]
    assert {each["newcomm"] for each in renamed} == {"true"}
    assert {each["pid"] for each in renamed} <= {each["pid"] for each in new}


@pytest.fixture(params=[1, 2])
def busy(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(cpus=request.param)) as kernel:
        yield kernel


def test_soft_interrupts_are_raised_entered_and_left(busy: Kernel) -> None:
    for name in ("raise", "entry", "exit"):
        event = find(busy, f"irq/softirq_{name}")
        busy.trace_arrays.top.events.set_enabled(event, True)
    busy.call("msleep", 20)
    found = [(event, text) for _, _, event, text in told(busy)]
    assert {text for _, text in found} == {"vec=1 [action=TIMER]"}
    events = [event for event, _ in found]
    assert events.count("softirq_entry") == events.count("softirq_exit") > 0
    assert events.count("softirq_raise") >= events.count("softirq_entry")
    entered = [event for event in events if event != "softirq_raise"]
    assert entered == ["softirq_entry", "softirq_exit"] * (len(entered) // 2)


def test_how_long_tasks_sleep_and_wait(busy: Kernel) -> None:
    """The delay in a sched_stat record is the time since the task's last sched_switch or sched_wakeup
    record.
    """
    names = ("sched_switch", "sched_wakeup", "sched_stat_wait", "sched_stat_sleep", "sched_stat_blocked")
    for name in names:
        busy.trace_arrays.top.events.set_enabled(find(busy, f"sched/{name}"), True)
    busy.call("load_locks", 2)
    busy.call("msleep", 20)
    left: dict[str, tuple[int, str]] = {}
    woken: dict[str, int] = {}
    checked = {"sched_stat_wait": 0, "sched_stat_sleep": 0, "sched_stat_blocked": 0}
    for _, time, event, text in told(busy):
        about = fields(text)
        if event == "sched_switch":
            left[about["prev_pid"]] = time, about["prev_state"][0]
            if about["prev_state"][0] == "R":
                woken[about["prev_pid"]] = time
        elif event == "sched_wakeup":
            woken[about["pid"]] = time
        else:
            since = woken if event == "sched_stat_wait" else {pid: at for pid, (at, _) in left.items()}
            pid = about["pid"]
            if pid not in since:
                continue
            checked[event] += 1
            assert abs(time - since[pid] - int(about["delay"])) <= 5000, (event, text)
            if event == "sched_stat_sleep":
                assert left[pid][1] == "S"
            if event == "sched_stat_blocked":
                assert left[pid][1] in "DI"
    assert checked["sched_stat_wait"] > 0
    assert checked["sched_stat_blocked"] > 0


def test_how_often_preemption_is_disabled(busy: Kernel) -> None:
    """The preempt counts of scheduler events are those of Linux.

    __schedule() and try_to_wake_up() add 1, and each held lock adds 1.
    """
    names = ("sched_switch", "sched_waking", "sched_wakeup", "sched_process_exit")
    for name in names:
        busy.trace_arrays.top.events.set_enabled(find(busy, f"sched/{name}"), True)
    busy.call("load_locks", 2)
    context = re.compile(r"\] (.)(.)(.)(.)\. +[\d.]+: (\w+):")
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in names}
    for irqs, _, level, count, event in context.findall(busy.trace.trace_text()):
        if level == ".":
            found[event].add((irqs, count))
    # The context of a switch does not depend on the earlier work of its task.
    assert found["sched_switch"] == {("d", "2")}
    assert {irqs for irqs, _ in found["sched_waking"] | found["sched_wakeup"]} == {"d"}
    fewest = {name: min(int(count) for _, count in found[name]) for name in ("sched_waking", "sched_wakeup")}
    assert fewest["sched_wakeup"] == fewest["sched_waking"] + 1 == 3
    assert found["sched_process_exit"] == {(".", ".")}


def test_a_fault_that_the_kernel_repairs(kernel: Kernel, enable: Enable) -> None:
    enable("exceptions/page_fault_kernel")
    page = kernel.call("__get_free_pages", 0, 0)
    assert kernel.call("_copy_from_user", page, _UNMAPPED, 8) == 8
    lines = records(kernel)
    # After a fault, the copy in words is tried again in bytes.
    assert len(lines) == 2
    for line in lines:
        found = re.fullmatch(
            r"\d+ page_fault_kernel: address=(\w+) ip=copy_user_generic error_code=0x0", line
        )
        assert found is not None, line
        assert int(found[1], 16) == _UNMAPPED


@pytest.mark.parametrize("nanoseconds", [1, 10**6, 10**7 + 1, 3 * 10**7])
def test_a_sleep_of_nanoseconds_is_a_timer(busy: Kernel, nanoseconds: int) -> None:
    """nanosleep(2) arms a timer for the given time from now on. The timer expires at the first tick after
    that time, on the first CPU.
    """
    for name in ("init", "start", "expire_entry", "expire_exit", "cancel"):
        busy.trace_arrays.top.events.set_enabled(find(busy, f"timer/hrtimer_{name}"), True)
    with busy.lock, busy.guest.buffers.borrowed() as request:
        busy.machine.memory.write(request, bytes(8) + nanoseconds.to_bytes(8, "little"))
        busy.guest.syscalls.call(busy.guest.processes.init, "nanosleep", request, 0)
    found = told(busy)
    assert [event.removeprefix("hrtimer_") for _, _, event, _ in found] == [
        *("init", "start", "cancel", "expire_entry", "expire_exit")
    ]
    init, start, _, entry, _ = (fields(text) for _, _, _, text in found)
    assert len({fields(text)["hrtimer"] for _, _, _, text in found}) == 1
    assert (init["clockid"], init["mode"]) == ("CLOCK_MONOTONIC", "REL")
    assert (start["mode"], start["was_armed"], entry["function"]) == ("REL", "0", "hrtimer_wakeup")
    soft, begun = int(start["softexpires"]), found[1][1]
    assert int(start["expires"]) - soft == 50_000
    assert abs(soft - nanoseconds - begun) <= 2000
    tick = 10**9 // 250
    assert soft <= int(entry["now"]) <= soft + tick + 2000
    assert not [
        line for line in busy.trace.trace_text().splitlines() if "expire_" in line and "[000]" not in line
    ]


def test_pages_of_a_file_come_and_go(kernel: Kernel, enable: Enable) -> None:
    enable("filemap/mm_filemap_add_to_page_cache")
    enable("filemap/mm_filemap_delete_from_page_cache")
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    fd = syscalls.open(init, "/scratch/a", os.O_CREAT | os.O_WRONLY, 0o644)
    kernel.call("load_files", 1)
    syscalls.call(init, "close", fd)
    pages: dict[str, list[str]] = {}
    for line in records(kernel):
        found = re.fullmatch(
            r"\d+ mm_filemap_(add_to|delete_from)_page_cache: dev (\d+:\d+) ino [0-9a-f]+ "
            r"pfn=(0x[0-9a-f]+) ofs=\d+ order=0",
            line,
        )
        assert found is not None, line
        pages.setdefault(found[3], []).append(found[1])
    assert pages
    assert all(each == ["add_to", "delete_from"] * (len(each) // 2) for each in pages.values())


def test_interrupts_of_the_cpu(busy: Kernel) -> None:
    for name in ("entry", "exit"):
        busy.trace_arrays.top.events.set_enabled(find(busy, f"irq_vectors/local_timer_{name}"), True)
    busy.call("msleep", 20)
    events = [event for _, _, event, _ in told(busy)]
    assert events
    assert events == ["local_timer_entry", "local_timer_exit"] * (len(events) // 2)
