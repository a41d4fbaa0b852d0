"""kprobefs's own kprobes over Debian's riscv64 kernel: hits, records, returns, events, calls, modules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from errno import EILSEQ
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.request_clock import RequestClock
from emulated_kernel.guests.linux.boot_cache import started, started_with_kernel
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.guests.linux.probing import probe_engine
from emulated_kernel.guests.linux.probing.detect_interface import profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.kprobes.profile import KERNEL_INTERFACE, RISCV_FTRACE_PROFILE, RISCV_PROFILE
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.common.errors import CliError
from kprobefs.daemon.backends import _linux_profile
from kprobefs.mount_options import MountOptions, check_kprobes
from tests.guests.linux.debian_kernel import SEED, own_cache
from tests.guests.linux.model_clock import check_model_clock, check_recording
from tests.guests.linux.processor_tests import (
    CLIENT,
    EngineTests,
    check_unnoticed,
    counts,
    read,
    records,
    write,
)
from tests.guests.linux.stack_dumps import check_stack_dumps
from tests.guests.linux.test_riscv64 import META, SUITE
from tests.guests.linux.user_reads import UserReads, check_hits, check_other_loads_fault
from tests.image.linux.debian import package

FUNCTIONS = "vfs_read", "vfs_write", "do_sys_openat2", "dput", "do_exit", "kmem_cache_alloc_noprof"


def new_engine(
    profile: str = RISCV_PROFILE, *, optimizer: bool = True, pauses: bool = True, compiled: bool = True
) -> LinuxEngine:
    path = str(package(META, SUITE, "riscv64"))
    with own_cache(META, SUITE):
        tasks, kernel = started_with_kernel(path, SEED)
    chosen_profile = replace(profile_of(kernel, profile), optimizer=optimizer, compiled=compiled)
    return LinuxEngine(tasks, kernel, chosen_profile, pauses=pauses)


@pytest.fixture(scope="module")
def engine() -> LinuxEngine:
    return new_engine()


@pytest.fixture(scope="module")
def mount(engine: LinuxEngine) -> Iterator[Mount]:
    modules = ModuleFiles(package(META, SUITE, "riscv64"), engine.kernel.release)
    served = probed_mount(engine, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(served, CLIENT, "/scratch/greeting", b"hello\n")
    yield served
    assert not engine.tasks.machine.death
    served.close()


def call(mount: Mount, text: bytes) -> str:
    """Write a line to machine/call, and return the answer."""
    file = mount.open(CLIENT, "/machine/call", os.O_RDWR)
    mount.write(CLIENT, file, text + b"\n", 0)
    answer = mount.read(CLIENT, file, 200, 0).decode()
    mount.release(file)
    return answer


@pytest.fixture
def clean(mount: Mount) -> Iterator[Mount]:
    """Yield the mount, and afterwards disable and remove all definitions."""
    yield mount
    write(mount, CLIENT, "/tracing/events/enable", b"0\n")
    file = mount.open(CLIENT, "/kprobe_events", os.O_WRONLY | os.O_TRUNC)
    mount.release(file)


def test_a_probe_counts_and_records(clean: Mount, engine: LinuxEngine) -> None:
    """A hit by a breakpoint and a hit by a jump record the same arguments."""
    write(clean, CLIENT, "/kprobe_events", b"p:kprobes/entry vfs_read count=%a2 buf=+0(%a1):u64 $comm\n")
    file = clean.open(CLIENT, "/scratch/greeting", os.O_RDONLY)
    write(clean, CLIENT, "/sysctl/debug/kprobes-optimization", b"0")
    write(clean, CLIENT, "/tracing/events/kprobes/entry/enable", b"1\n")
    assert clean.read(CLIENT, file, 64, 0) == b"hello\n"
    write(clean, CLIENT, "/sysctl/debug/kprobes-optimization", b"1")
    assert engine.kprobes.optimizer is not None
    with engine.lock:
        engine.kprobes.optimizer.work.flush()
    assert clean.read(CLIENT, file, 64, 0) == b"hello\n"
    assert read(clean, CLIENT, "/kprobes/list").endswith(b"vfs_read+0x0    [OPTIMIZED]\n")
    clean.release(file)
    assert counts(clean)["entry"][1] == 0
    found = [line for line in records(clean) if "count=0x40 " in line]
    assert [line.split()[2] for line in found] == ["d.Z..", "....."]
    assert all(line.split()[0].endswith("-5001") and "entry: (vfs_read+0x0/" in line for line in found)


@pytest.mark.parametrize("jumps", [b"0", b"1"])
def test_user_memory_is_fetched(jumps: bytes, clean: Mount, engine: LinuxEngine) -> None:
    """Probes fetch user memory at places where the kernel's own code could not, because sstatus.SUM
    is clear.
    """
    write(clean, CLIENT, "/sysctl/debug/kprobes-optimization", jumps)
    lines = (
        b"p:kprobes/user do_sys_openat2 a=+0(%a1):ustring b=+u1(%a1):u8\n"
        b"p:kprobes/any do_sys_openat2+8 a=+0(%a1):string b=+1(%a1):s8 c=+9(%a1):u64\n"
    )
    write(clean, CLIENT, "/kprobe_events", lines)
    write(clean, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
    with engine.lock:
        assert engine.kprobes.optimizer is not None
        engine.kprobes.optimizer.work.flush()
    for _ in range(3):
        read(clean, CLIENT, "/scratch/greeting")
    write(clean, CLIENT, "/sysctl/debug/kprobes-optimization", b"1")
    word = int.from_bytes(b"greeting", "little")
    found = [line.partition(") ")[2] for line in records(clean) if "greeting" in line]
    assert (
        found
        == [
            f'a="/scratch/greeting" b={ord("s")}',
            f'a="/scratch/greeting" b={ord("s")} c={word}',
        ]
        * 3
    )


@pytest.mark.parametrize(
    ("profile", "optimizer"), [(RISCV_PROFILE, False), (RISCV_PROFILE, True), (RISCV_FTRACE_PROFILE, True)]
)
def test_hits_that_read_user_memory_are_guest_code(profile: str, optimizer: bool) -> None:
    """Compiled handlers that read user memory keep the bit SUM as it was at the hit."""
    in_guest, in_python = (
        UserReads(new_engine(profile, optimizer=optimizer, compiled=compiled)) for compiled in (True, False)
    )
    check_hits(in_guest, in_python)


def test_hits_that_read_user_memory_keep_address_translations() -> None:
    """If a handler changes SUM, the host drops the translations of user pages, and keeps all others."""
    reads = UserReads(new_engine(optimizer=False))
    machine = reads.engine.tasks.machine
    assert isinstance(machine, RiscvMachine)
    with reads.probed("p int_sqrt", ["word=+0(ARG):u64"]):
        reads.call(3, allowed=False)
        before = machine.user_access.spared
        reads.call(50, allowed=False)
        spared = machine.user_access.spared - before
    assert spared >= 100 or routine_address("set_sum") is None
    check_other_loads_fault(reads)


class TestEngine(EngineTests):
    """Tests of kprobefs's own kprobes in the riscv64 kernel."""


def test_events_of_the_kernel(clean: Mount) -> None:
    """Events of the kernel are recorded with their fields, and system calls with their numbers."""
    for event in ("sched/sched_switch", "syscalls/sys_enter_openat", "raw_syscalls/sys_exit"):
        write(clean, CLIENT, f"/tracing/events/{event}/enable", b"1\n")
    read(clean, CLIENT, "/scratch/greeting")
    read(clean, Client(5002, 0, 0), "/scratch/greeting")
    text = "\n".join(records(clean))
    assert "sched_switch: prev_comm=init prev_pid=5001" in text
    assert re.search(r"-5002 .*sys_openat\(dfd: ffffffffffffff9c, filename: ", text)
    assert re.search(r"-5002 .*sys_exit: NR 63 = 6", text)


def test_a_marker_is_as_the_kernel_records_it(clean: Mount) -> None:
    """A marker has the same address in kprobefs's trace as in the kernel's own trace.

    This address is that of a label inside the kernel's function.
    """
    path = str(package(META, SUITE, "riscv64"))
    with own_cache(META, SUITE):
        native = native_mount(started(path, SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    found = []
    for mount in (clean, native):
        write(mount, CLIENT, "/tracing/options/sym-offset", b"1")
        write(mount, CLIENT, "/tracing/trace_marker", b"hello\n")
        found.append(records(mount)[-1].split()[2:])
        write(mount, CLIENT, "/tracing/options/sym-offset", b"0")
    native.close()
    assert found[0] == found[1]
    assert found[0][-1] == "hello"


def test_a_function_is_called(clean: Mount) -> None:
    shown = call(clean, b"int_sqrt 1764\nstrlen 'word'")
    assert re.findall(r"= 0x[0-9a-f]+ \((\d+)\)", shown) == ["42", "4"]


def test_modules(clean: Mount) -> None:
    """A probe of a module that is not loaded yet hits when the module is loaded. The module can be
    unloaded.
    """
    write(clean, CLIENT, "/kprobe_events", b"p:kprobes/init dummy:dummy_init_module\n")
    write(clean, CLIENT, "/tracing/events/kprobes/init/enable", b"1\n")
    write(clean, CLIENT, "/machine/modules", b"load dummy\n")
    assert read(clean, CLIENT, "/machine/modules").startswith(b"dummy ")
    assert counts(clean)["init"] == (1, 0)
    # Labels that the assembler left in the symbol table divide no function.
    file = clean.open(CLIENT, "/kprobe_events", os.O_WRONLY | os.O_APPEND)
    clean.write(CLIENT, file, b"p:kprobes/inside dummy:dummy_xmit+8\n", 0)
    clean.release(file)
    assert b"dummy_xmit+0x8 " in read(clean, CLIENT, "/kprobes/list")
    write(clean, CLIENT, "/machine/modules", b"unload dummy\n")
    assert b"dummy" not in read(clean, CLIENT, "/machine/modules")


def trace_of_requests(monkeypatch: pytest.MonkeyPatch, pause: float) -> bytes:
    """Return the trace of requests of two clients, with host time of `pause` seconds between two requests."""
    wall = count(step=pause)
    monkeypatch.setattr(probe_engine, "RequestClock", partial(RequestClock, wall=lambda: next(wall)))
    served = probed_mount(new_engine(pauses=False), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    write(
        served, CLIENT, "/kprobe_events", b"p:kprobes/a vfs_read $comm\nr:kprobes/b do_sys_openat2 $retval\n"
    )
    for events in ("kprobes", "sched", "kmem"):
        write(served, CLIENT, f"/tracing/events/{events}/enable", b"1\n")
    for pid in (5001, 5002, 5001):
        read(served, Client(pid, 0, 0), "/machine/version")
    write(served, CLIENT, "/tracing/tracing_on", b"0")
    found = read(served, CLIENT, "/tracing/trace")
    served.close()
    return found


def test_the_same_requests_give_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests give the same trace, including times, even if the host pauses between the
    requests.
    """
    first, second = (trace_of_requests(monkeypatch, pause) for pause in (0, 0.2))
    assert first.count(b" a: ") >= 3
    assert first == second


# With the model clock


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_time_is_the_number_of_instructions() -> None:
    """The duration of a function's call grows by one nanosecond for each executed instruction."""
    check_model_clock(new_engine(optimizer=False), 2)


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_guest_code_records_with_the_model_clock() -> None:
    check_recording(new_engine(RISCV_FTRACE_PROFILE))


# With ftrace sites


def test_the_profile_is_for_one_processor(engine: LinuxEngine) -> None:
    """With the RISC-V profile, the interface is still that of the kernel.

    For other architectures, the profile is refused.
    """
    image = package(META, SUITE, "riscv64")
    options = MountOptions(
        str(image.parent), machine=MachineConfig(image=image, profile=RISCV_FTRACE_PROFILE)
    )
    check_kprobes(options)
    found = _linux_profile(options, engine.kernel)
    assert (found.ftrace, found.interface) == (True, KERNEL_INTERFACE)
    other = cast(Any, SimpleNamespace(architecture="x86_64"))
    with pytest.raises(CliError, match="is for riscv64, and the kernel for x86_64; use "):
        _linux_profile(options, other)


@pytest.fixture(scope="module")
def traced() -> Iterator[Mount]:
    engine = new_engine(RISCV_FTRACE_PROFILE)
    served = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    yield served
    assert not engine.tasks.machine.death
    served.close()


def test_entries_by_ftrace(traced: Mount) -> None:
    """The fentry site of a function calls the probes of the entry. A jump of a probe begins after
    the site.
    """
    lines = b"p:kprobes/entry vfs_read\nr:kprobes/got vfs_read $retval\np:kprobes/inside vfs_read+8\n"
    write(traced, CLIENT, "/kprobe_events", lines)
    write(traced, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
    with pytest.raises(KernelError) as refused:
        write(traced, CLIENT, "/kprobe_events", b"p vfs_read+4\n")
    assert refused.value.errno == EILSEQ
    for _ in range(8):
        read(traced, CLIENT, "/scratch/greeting")
    listed = read(traced, CLIENT, "/kprobes/list").decode().splitlines()
    assert sorted(line.split(maxsplit=2)[2] for line in listed) == [
        "vfs_read+0x0    [FTRACE]", "vfs_read+0x0    [FTRACE]", "vfs_read+0x8    [OPTIMIZED]",
    ]  # fmt: skip
    before = counts(traced)
    after = counts(traced)
    assert {name: after[name][0] - before[name][0] for name in after} == dict.fromkeys(after, 1)
    assert len(after) == 3
    write(traced, CLIENT, "/tracing/events/kprobes/enable", b"0\n")


def test_tracers(traced: Mount) -> None:
    for function in (b"vfs_open", b"do_dentry_open", b"ksys_read"):
        file = traced.open(CLIENT, "/tracing/set_ftrace_filter", os.O_WRONLY | os.O_APPEND)
        traced.write(CLIENT, file, function + b"\n", 0)
        traced.release(file)
    shown = {
        b"function": (
            "vfs_open <-path_openat\n",
            "do_dentry_open <-vfs_open\n",
            "ksys_read <-__riscv_sys_read\n",
        ),
        b"function_graph": ("|  vfs_open() {\n", "|    do_dentry_open();\n", "|  ksys_read();\n"),
    }
    for tracer, lines in shown.items():
        write(traced, CLIENT, "/tracing/current_tracer", tracer + b"\n")
        read(traced, CLIENT, "/scratch/greeting")
        text = read(traced, CLIENT, "/tracing/trace").decode()
        assert all(line in text for line in lines), text
        write(traced, CLIENT, "/tracing/current_tracer", b"nop\n")


def test_the_kernel_does_not_notice() -> None:
    check_unnoticed(new_engine, FUNCTIONS, "riscv", least=(500, 100))


@pytest.mark.parametrize("profile", [RISCV_PROFILE, RISCV_FTRACE_PROFILE])
def test_stack_dumps_show_the_callers_of_hooked_calls(profile: str) -> None:
    engine = new_engine(profile)
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    check_stack_dumps(mount, engine, ("dump_backtrace", "show_stack"))
