"""Static events of the image: text, records and formats. While no event is enabled, nothing in the guest's
text is patched.
"""

from __future__ import annotations

import errno
import re

import pytest

from emulated_kernel.image.call_graph import Calls
from emulated_kernel.image.trace_events import event_definitions
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.events.static_event import StaticEvent
from emulated_kernel.util.errors import KernelError
from tests.trace.static.conftest import Enable, find, records

FIELD = re.compile(r"\tfield:(.*);\toffset:(\d+);\tsize:(\d+);\tsigned:([01]);")


def test_nothing_is_patched_until_an_event_is_enabled(kernel: Kernel, enable: Enable) -> None:
    text, breakpoints = kernel.machine.text, dict(kernel.machine.breakpoints)
    assert text.ledger == {}
    enable("kmem/kmalloc")
    labels = {
        label.code
        for label in kernel.image.jump_labels
        if kernel.image.kallsyms.lookup_name("__tracepoint_kmalloc") == label.key
    }
    assert labels
    assert {address for address in text.ledger if address in labels} == labels
    assert len(text.ledger) <= 5 * len(labels)
    assert kernel.guest.is_watched(Calls.NAMES)
    enable("kmem/kmalloc", on=False)
    assert text.ledger == {}
    assert dict(kernel.machine.breakpoints) == breakpoints


def test_a_record_says_what_happened(kernel: Kernel, enable: Enable) -> None:
    enable("kmem/kmalloc")
    enable("kmem/kfree")
    pointer = kernel.call("__kmalloc", 100, 0xDC0) & (1 << 64) - 1
    kernel.call("kfree", pointer)
    worker = kernel.guest.processes.worker().pid
    (taken, freed) = records(kernel)
    site = r"call_site=do_syscall_64\+0x[0-9a-f]+/0x[0-9a-f]+"
    assert re.fullmatch(
        rf"{worker} kmalloc: {site} ptr={pointer:016x} bytes_req=100 bytes_alloc=128 "
        r"gfp_flags=GFP_KERNEL\|__GFP_ZERO node=-1 accounted=false",
        taken,
    )
    assert re.fullmatch(rf"{worker} kfree: {site} ptr={pointer:016x}", freed)


def test_what_is_no_record_is_passed_by(kernel: Kernel, enable: Enable) -> None:
    event = find(kernel, "sched/sched_process_exec")
    enable("sched/sched_process_exec")
    before = len(records(kernel))
    known = next(each.address for each in event_definitions(kernel.image) if each.name == event.name)
    for arguments in (
        (0, 0, 0),
        (known, 0, 16),
        (known, kernel.machine.calls.stack_top, 2),
        (known, 1, 1 << 40),
    ):
        kernel.call("host_trace_commit", *arguments)
    assert len(records(kernel)) == before


def test_each_event_of_a_tracepoint_follows_its_switch(kernel: Kernel, enable: Enable) -> None:
    enable("syscalls/sys_enter_getpid")
    enable("raw_syscalls/sys_enter")
    task = kernel.guest.processes.init
    kernel.guest.syscalls.call(task, "getpid")
    enable("raw_syscalls/sys_enter", on=False)
    kernel.guest.syscalls.call(task, "getpid")
    kernel.guest.syscalls.call(task, "gettid")
    enable("syscalls/sys_enter_getpid", on=False)
    kernel.guest.syscalls.call(task, "getpid")
    lines = [line for line in records(kernel) if "getpid" in line or "NR 39 " in line]
    assert len(lines) == 3
    assert sorted({line.split(" ", 1)[1].split("(")[0] for line in lines}) == [
        "sys_enter: NR 39 ",
        "sys_getpid",
    ]
    assert kernel.machine.text.ledger == {}


def test_system_calls_show_their_arguments_and_results(kernel: Kernel, enable: Enable) -> None:
    for name in ("sys_enter_openat", "sys_exit_openat", "sys_enter_close", "sys_exit_umask"):
        enable(f"syscalls/{name}")
    init, syscalls = kernel.guest.processes.init, kernel.guest.syscalls
    fd = syscalls.open(init, "/scratch/a", 0o101, 0o644)
    syscalls.call(init, "close", fd)
    with pytest.raises(KernelError):
        syscalls.open(init, "/scratch/none", 0)
    syscalls.call(init, "umask", 0o77)
    (opened, result, closed, missing, error, masked) = records(kernel)
    assert re.fullmatch(r"1 sys_openat\(dfd: ffffff9c, filename: [0-9a-f]+, flags: 41, mode: 1a4\)", opened)
    assert result == f"1 sys_openat -> {fd:#x}"
    assert closed == f"1 sys_close(fd: {fd:x})"
    assert missing.endswith("flags: 0, mode: 0)")
    assert error == f"1 sys_openat -> {(1 << 64) - errno.ENOENT:#x}"
    assert masked == "1 sys_umask -> 0x0"


def test_filters_look_at_the_fields(kernel: Kernel, enable: Enable) -> None:
    event = find(kernel, "kmem/kmalloc")
    kernel.trace_arrays.top.filters.write(event, b"bytes_req > 100 && bytes_alloc < 512")
    enable("kmem/kmalloc")
    for size in (100, 101, 256, 300):
        kernel.call("__kmalloc", size, 0xCC0)
    assert [line.split("bytes_req=")[1].split()[0] for line in records(kernel)] == ["101", "256"]


def test_the_scheduler_tells_who_follows_whom(kernel: Kernel, enable: Enable) -> None:
    enable("sched/sched_switch")
    worker = kernel.guest.processes.worker()
    kernel.call("strlen", "abc")
    comm = worker.comm
    assert any(
        re.search(rf"prev_state=\S+ ==> next_comm={comm} next_pid={worker.pid} next_prio=120", line)
        for line in records(kernel)
    )


def test_a_jump_label_is_no_place_for_a_probe(kernel: Kernel) -> None:
    label = kernel.image.jump_labels[0].code
    for place in (label, label + 4):
        with pytest.raises(KernelError) as refused:
            kernel.register_kprobe(Kprobe(addr=place))
        assert refused.value.errno == errno.EINVAL


def test_no_detour_covers_a_jump_label(kernel: Kernel) -> None:
    labels = {label.code + byte for label in kernel.image.jump_labels for byte in range(5)}
    optimizer, registered = kernel.kprobes.optimizer, 0
    assert optimizer is not None
    for label in kernel.image.jump_labels:
        for before in range(1, 5):
            probe = Kprobe(addr=label.code - before)
            try:
                kernel.register_kprobe(probe)
            except KernelError:
                continue
            optimizer.flush()
            assert not labels & kernel.machine.text.ledger.keys()
            registered += 1
            kernel.unregister_kprobe(probe)
    assert registered > 10


def test_formats_lay_fields_out_as_the_compiler_does(kernel: Kernel) -> None:
    for event in kernel.tracing.kprobe_events.registry:
        text = event.format_text()
        assert text.startswith(f"name: {event.name}\nID: {event.id}\nformat:\n")
        assert FIELD.search(text)
        end = 0
        for declaration, offset, size, _ in FIELD.findall(text):
            assert int(offset) >= end, (event.name, declaration)
            end = int(offset) + int(size)


def test_every_print_format_is_understood(kernel: Kernel) -> None:
    events = [each for each in kernel.tracing.kprobe_events.registry if isinstance(each, StaticEvent)]
    assert len(events) > 10
    for event in events:
        size = max(field.offset + field.size for field in event.fields)
        assert event.print_record(bytes(size), kernel.tracing.symbols)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("sched/sched_switch", "\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:1;"),
        ("sched/sched_switch", "\tfield:long prev_state;\toffset:32;\tsize:8;\tsigned:1;"),
        ("sched/sched_process_exec", "\tfield:__data_loc char[] filename;\toffset:8;\tsize:4;\tsigned:1;"),
        ("kmem/kmalloc", "\tfield:const void * ptr;\toffset:16;\tsize:8;\tsigned:0;"),
        ("kmem/kmem_cache_alloc", "\tfield:bool accounted;\toffset:52;\tsize:1;\tsigned:0;"),
        ("syscalls/sys_enter_read", "\tfield:unsigned int fd;\toffset:16;\tsize:8;\tsigned:0;"),
        ("syscalls/sys_enter_read", "\tfield:char * buf;\toffset:24;\tsize:8;\tsigned:0;"),
        ("syscalls/sys_exit_read", "\tfield:long ret;\toffset:16;\tsize:8;\tsigned:1;"),
        ("raw_syscalls/sys_enter", "\tfield:unsigned long args[6];\toffset:16;\tsize:48;\tsigned:0;"),
        ("syscalls/sys_exit_read", 'print fmt: "0x%lx", REC->ret'),
        ("timer/timer_cancel", 'print fmt: "timer=%p", REC->timer'),
    ],
)
def test_format_lines(kernel: Kernel, path: str, line: str) -> None:
    assert line in find(kernel, path).format_text().splitlines()


def test_an_instance_of_its_own_each(kernel: Kernel, enable: Enable) -> None:
    enable("timer/timer_init")
    with Kernel() as other:
        assert other.machine.text.ledger == {}
    assert kernel.machine.text.ledger
