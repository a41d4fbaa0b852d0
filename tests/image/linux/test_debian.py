"""Debian's kernels as shipped: the tables that are read from a kernel agree with each other."""

from __future__ import annotations

from functools import cache

import pytest

from emulated_kernel.image.linux.kallsyms_tables import find_symbols
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from tests.image.linux.debian import META_PACKAGES, package
from tests.sample import share

pytestmark = pytest.mark.slow


@cache
def opened(meta: str) -> LinuxKernel:
    return open_kernel(str(package(meta)))


@pytest.fixture(params=share(META_PACKAGES, 0, 2))
def kernel(request: pytest.FixtureRequest) -> LinuxKernel:
    package(request.param)
    return opened(request.param)


def test_symbols_are_those_of_its_own_table(kernel: LinuxKernel) -> None:
    symbols = find_symbols(kernel.vmlinux)
    assert len(symbols) == len(kernel.kallsyms) > 80_000
    assert kernel.release in kernel.version
    addresses = [symbol.address for symbol in symbols]
    assert addresses == sorted(addresses)
    first: dict[int, str] = {}
    for symbol in symbols:
        first.setdefault(symbol.address, symbol.name)
    text = [(address, name) for address, name in first.items() if address in range(*kernel.text)]
    assert all(kernel.kallsyms.lookup(address).name == name for address, name in text)  # type: ignore[union-attr]


def test_tables_point_at_what_they_are_about(kernel: LinuxKernel) -> None:
    read = kernel.read
    assert len(kernel.mcount) > 30_000
    assert {read(site, 1) for site in kernel.mcount if kernel.vmlinux.has(site)} <= {b"\xe8", b"\0"}
    assert {read(bug, 2) for bug in kernel.bugs} == {b"\x0f\x0b"}
    assert {read(call.site, 1) for call in kernel.static_calls} <= {b"\xe8", b"\xe9"}
    labels = {read(label.code, 1) for label in kernel.jump_labels}
    assert labels <= {b"\x66", b"\x0f", b"\xe9", b"\xeb"}
    assert all(read(site, 1) == b"\xe9" for site in kernel.return_sites)
    assert len(kernel.ex_table) > 400
    assert {bug.file for bug in kernel.bug_entries.values()} >= {"mm/slub.c", "kernel/fork.c"}


def test_blacklist_has_what_the_kernel_s_own_has(kernel: LinuxKernel) -> None:
    names = {entry.name for entry in kernel.blacklist}
    assert {"asm_exc_int3", "entry_SYSCALL_64", "kprobe_ftrace_handler", "opt_pre_handler"} & names
    assert all(entry.start < entry.end for entry in kernel.blacklist)


def test_types_and_parameters(kernel: LinuxKernel) -> None:
    btf = kernel.btf
    assert 0 < btf.offset("task_struct.comm") < btf.size("task_struct")
    functions = {"vfs_read": 4, "do_sys_openat2": 3, "kernel_clone": 1, "schedule": 0}
    assert {name: btf.parameters(name) for name in functions} == functions


def test_events_and_system_calls(kernel: LinuxKernel) -> None:
    events = {(event.system, event.name): event for event in kernel.events}
    switch = events["sched", "sched_switch"]
    assert [field.name for field in switch.fields][:4] == ["prev_comm", "prev_pid", "prev_prio", "prev_state"]
    assert switch.print_fmt.startswith('"prev_comm=%s')
    assert events["syscalls", "sys_enter_openat"].fields
    calls = {call.name: call for call in kernel.syscalls}
    assert (calls["sys_openat"].nr, calls["sys_openat"].args) == (
        257,
        ("dfd", "filename", "flags", "mode"),
    )
    assert calls["sys_read"].types == ("unsigned int", "char *", "size_t")
