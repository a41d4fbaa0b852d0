"""kprobefs's own kprobes over Debian's arm64 kernel: hits, records, returns, events, calls, modules."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from errno import EINVAL

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import started, started_with_kernel
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.debian_kernel import SEED, own_cache
from tests.guests.linux.ended_tasks import check_ended_tasks
from tests.guests.linux.files import Files
from tests.guests.linux.model_clock import check_model_clock, check_recording
from tests.guests.linux.probing import disarmed, workload
from tests.guests.linux.processor_tests import (
    CLIENT,
    EngineTests,
    check_unnoticed,
    counts,
    read,
    records,
    write,
)
from tests.guests.linux.test_arm64 import META, SUITE
from tests.image.linux.debian import package
from tests.kernel.gdb_client import GdbClient, Request

FUNCTIONS = "vfs_read", "vfs_write", "do_sys_openat2", "dput", "do_exit", "kmem_cache_alloc_noprof"

OPTIMIZATION = "/sysctl/debug/kprobes-optimization"
PLACES = "do_exit", "el0_svc_common.constprop.0", "dput", "queued_spin_lock_slowpath", "ksys_read"


def new_engine(*, compiled: bool = True, optimizer: bool = True) -> LinuxEngine:
    path = str(package(META, SUITE, "arm64"))
    with own_cache(META, SUITE):
        tasks, kernel = started_with_kernel(path, SEED)
    return LinuxEngine(tasks, kernel, replace(profile_of(kernel), compiled=compiled, optimizer=optimizer))


@pytest.fixture(scope="module")
def engine() -> LinuxEngine:
    return new_engine()


@pytest.fixture(scope="module")
def mount(engine: LinuxEngine) -> Iterator[Mount]:
    modules = ModuleFiles(package(META, SUITE, "arm64"), engine.kernel.release)
    served = probed_mount(engine, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(served, CLIENT, "/scratch/greeting", b"hello\n")
    yield served
    assert not engine.tasks.machine.death
    served.close()


@pytest.fixture
def clean(mount: Mount) -> Iterator[Mount]:
    """Yield the mount, and afterwards disable and remove all definitions."""
    yield mount
    write(mount, CLIENT, "/tracing/events/enable", b"0\n")
    file = mount.open(CLIENT, "/kprobe_events", os.O_WRONLY | os.O_TRUNC)
    mount.release(file)


@pytest.fixture(scope="module")
def native() -> Iterator[Mount]:
    """Yield a mount with the kernel's own kprobes."""
    path = str(package(META, SUITE, "arm64"))
    with own_cache(META, SUITE):
        served = native_mount(started(path, SEED), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(served, CLIENT, "/scratch/greeting", b"hello\n")
    yield served
    served.close()


def test_both_engines_record_the_same(clean: Mount, native: Mount) -> None:
    """kprobefs and the kernel make the same records for probes of four kinds.

    The probes are at an entry, inside a function, on a simulated instruction, and at a return.
    """
    write(clean, CLIENT, OPTIMIZATION, b"0")
    shown = []
    for mount in (clean, native):
        lines = (
            b"p:kprobes/entry vfs_read count=%x2 buf=%x1:x64\np:kprobes/inside vfs_read+16\n"
            b"p:kprobes/call ksys_read+120\nr:kprobes/got vfs_read $retval\n"
        )
        write(mount, CLIENT, "/kprobe_events", lines)
        file = mount.open(CLIENT, "/scratch/greeting", os.O_RDONLY)
        write(mount, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
        assert mount.read(CLIENT, file, 64, 0) == b"hello\n"
        write(mount, CLIENT, "/tracing/events/kprobes/enable", b"0\n")
        mount.release(file)
        shown.append([line for line in records(mount) if "0x600000" not in line or "count=0x40 " in line])
        write(mount, CLIENT, "/kprobe_events", b"")
    write(clean, CLIENT, OPTIMIZATION, b"1")
    assert len(shown[0]) >= 4
    assert shown[0] == shown[1]


EVENTS = (
    b"p:k/entry vfs_read file=%x0 count=%x2:u32 state=%pstate sp=%sp pc=%pc name=$comm\n"
    b"p:k/inside vfs_read+16 b=+0(%x1):x8 deep=+0(+8(%x0)):u64 at=@vfs_write:x32 up=$stack1\n"
    b"p:k/call ksys_read+120 caller=%lr zero=%x19:s16 field=%x2:b4@3/32\n"
    b"p:k/open do_sys_openat2 path=+0($arg2):ustring word=+u1(%x1):u32 any=+0(%x1):string bad=+0(%x28):u64\n"
    b"p:k/later do_sys_openat2+20 list=+0(%x1):u8[4] mode=%x3:x64\n"
    b"r:k/got vfs_read result=$retval:s64 again=%x0 frame=%x29\n"
    b"r:k/opened do_sys_openat2 $retval\n"
    b"p:k/sized ksys_read+16 count=%x2\n"
    b"r:k/found lookup_fast $retval\n"
)
TRIGGERS = {"sized": "hist:keys=count:vals=hitcount", "found": "hist:keys=common_pid:sort=common_pid"}
"""Event -> hist trigger. Python fills the histograms."""


def recorded(probing: LinuxEngine) -> tuple[list[str], dict[str, tuple[int, int]], list[str]]:
    """Return the records, counts and histograms of some requests, with all of EVENTS enabled."""
    served = probed_mount(probing, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(served, CLIENT, "/scratch/greeting", b"hello\n")
    write(served, CLIENT, "/kprobe_events", EVENTS)
    for name, trigger in TRIGGERS.items():
        write(served, CLIENT, f"/tracing/events/k/{name}/trigger", trigger.encode())
    write(served, CLIENT, "/tracing/events/k/entry/filter", b"count > 5 && count < 4000000000")
    write(served, CLIENT, "/tracing/events/k/later/filter", b"mode == 0 || mode != 0")
    write(served, CLIENT, "/tracing/events/k/enable", b"1")
    if probing.kprobes.optimizer is not None:
        with probing.lock:
            probing.kprobes.optimizer.work.flush()
    for turn in range(12):
        assert read(served, Client(5001 + turn % 3, 0, 0), "/scratch/greeting") == b"hello\n"
    write(served, CLIENT, "/tracing/events/k/enable", b"0")
    found = records(served)
    shown = [read(served, CLIENT, f"/tracing/events/k/{name}/hist").decode() for name in TRIGGERS]
    hits = counts(served)
    served.close()
    return found, hits, [text for text in shown if "Hits: " in text]


@pytest.mark.parametrize("optimizer", [False, True])
def test_guest_code_records_what_python_records(optimizer: bool) -> None:
    """Compiled handlers give the same records, counts and histograms as handlers in Python.

    Without the optimizer, the host's routine takes their traps.
    """
    in_python, in_guest = (new_engine(compiled=compiled, optimizer=optimizer) for compiled in (False, True))
    expected = recorded(in_python)
    assert recorded(in_guest) == expected
    assert not in_python.components.engine.kprobes.compiler.made
    assert in_guest.components.engine.kprobes.compiler.made > 5
    if not optimizer and routine_address("arm64") is not None:
        assert in_guest.machine.hooks.native_traps > 200
    shown, hits, histograms = expected
    assert len(shown) > 120
    assert min(count for count, _ in hits.values()) >= 12
    assert len(histograms) == len(TRIGGERS)


def errno_of(mount: Mount, place: str) -> int:
    """Return the errno with which a probe at `place` is refused, or 0. Remove the probe again."""
    try:
        write(mount, CLIENT, "/kprobe_events", f"p:k/a {place}\n".encode())
        write(mount, CLIENT, "/kprobe_events", b"-:k/a\n", os.O_APPEND)
    except KernelError as error:
        return error.errno or 0
    return 0


def test_places_are_those_of_the_kernel(clean: Mount, native: Mount, engine: LinuxEngine) -> None:
    """kprobefs and the kernel accept and refuse the same addresses for probes.

    They include exclusive accesses, loads of literals, returns, ftrace sites and blacklisted functions.
    """
    found = Counter[int]()
    for name in PLACES:
        where = engine.kernel.kallsyms.lookup(engine.kernel.required(name))
        assert where is not None
        for offset in (1, *range(0, min(where.symbol.size, 160), 4)):
            expected = errno_of(native, f"{name}+{offset}")
            assert errno_of(clean, f"{name}+{offset}") == expected, (name, offset)
            found[expected] += 1
    assert found[0] > 80
    assert found[EINVAL] > 20


class TestEngine(EngineTests):
    """Tests of kprobefs's own kprobes in the arm64 kernel."""


def test_events_of_the_kernel(clean: Mount) -> None:
    """The kernel's events are recorded with their fields, and their call chains end at the kernel's entry
    code.
    """
    write(clean, CLIENT, "/tracing/options/stacktrace", b"1")
    for event in ("sched/sched_switch", "syscalls/sys_enter_openat", "raw_syscalls/sys_exit"):
        write(clean, CLIENT, f"/tracing/events/{event}/enable", b"1\n")
    read(clean, CLIENT, "/scratch/greeting")
    read(clean, Client(5002, 0, 0), "/scratch/greeting")
    write(clean, CLIENT, "/tracing/options/stacktrace", b"0")
    text = "\n".join(records(clean))
    assert "sched_switch: prev_comm=init prev_pid=5001" in text
    assert re.search(r"-5002 .*sys_openat\(dfd: ffffffffffffff9c, filename: ", text)
    assert re.search(r"-5002 .*sys_exit: NR 63 = 6", text)
    assert " => do_el0_svc\n => el0_svc\n => el0t_64_sync_handler\n => el0t_64_sync\n" in text


def test_tracers(clean: Mount) -> None:
    """The tracers function and function_graph show selected functions with their callers.

    The tracer function can also trace all functions.
    """
    for function in (b"vfs_open", b"do_dentry_open", b"ksys_read"):
        write(clean, CLIENT, "/tracing/set_ftrace_filter", function + b"\n", os.O_APPEND)
    shown = {
        b"function": (
            "vfs_open <-path_openat\n",
            "do_dentry_open <-vfs_open\n",
            "ksys_read <-__arm64_sys_read\n",
        ),
        b"function_graph": ("|  vfs_open() {\n", "|    do_dentry_open();\n", "|  ksys_read();\n"),
    }
    for tracer, lines in shown.items():
        write(clean, CLIENT, "/tracing/current_tracer", tracer + b"\n")
        read(clean, CLIENT, "/scratch/greeting")
        text = read(clean, CLIENT, "/tracing/trace").decode()
        assert all(line in text for line in lines), text
        write(clean, CLIENT, "/tracing/current_tracer", b"nop\n")
    file = clean.open(CLIENT, "/tracing/set_ftrace_filter", os.O_WRONLY | os.O_TRUNC)
    clean.release(file)
    write(clean, CLIENT, "/tracing/current_tracer", b"function\n")
    assert read(clean, CLIENT, "/scratch/greeting") == b"hello\n"
    write(clean, CLIENT, "/tracing/tracing_on", b"0\n")
    assert len(records(clean)) > 150
    write(clean, CLIENT, "/tracing/current_tracer", b"nop\n")
    write(clean, CLIENT, "/tracing/tracing_on", b"1\n")


def traced_calls(guest: LinuxEngine, tracer: str) -> tuple[list[str], int, int]:
    """Return the workload's records without times, and the numbers of calls that Python handled and of native
    traps.
    """
    shell = Files(probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False), CLIENT)
    sites = guest.kprobes.sites
    assert sites is not None
    shell.write("/tracing/buffer_size_kb", "4000")
    for names in ("vfs_*", "ksys_*", "do_sys*", "*sched*", "kmem_cache_*", "do_exit", "copy_*"):
        shell.write("/tracing/set_ftrace_filter", names, os.O_WRONLY | os.O_APPEND)
    shell.write("/tracing/current_tracer", tracer)
    before = sites.calls, guest.machine.hooks.native_traps
    with guest.lock:
        workload(guest)
    found = sites.calls - before[0], guest.machine.hooks.native_traps - before[1]
    lines = [line for line in shell.read("/tracing/trace").splitlines() if not line.startswith("#")]
    shell.write("/tracing/current_tracer", "nop")
    # The time of a record, or the duration of a call, is before the first colon or bar.
    return [re.sub(r" [\d.]+( us +\||: )|^.*\|", " ", line, count=1) for line in lines], *found


@pytest.mark.parametrize("tracer", ["function", "function_graph"])
def test_tracers_are_guest_code(tracer: str) -> None:
    """Only the first traced call enters Python. Neither calls nor returns cause traps.

    The records are those of tracing in Python.
    """
    expected, by_python, _ = traced_calls(new_engine(compiled=False), tracer)
    found, calls, traps = traced_calls(new_engine(), tracer)
    assert found == expected
    assert by_python > 500
    assert (calls, traps) == (1, 0)


COUNT = "ldr x9, calls; add x9, x9, #1; str x9, calls, x10; ldr x9, sum; add x9, x9, x2; str x9, sum, x10"
OVERWRITE = "; ".join([*(f"mov x{number}, #-1" for number in range(30) if number != 18), "cmp x0, #1"])
COUNT_ATOMICALLY = "adr x4, rets; again: ldxr x5, [x4]; add x5, x5, #1; stxr w6, x5, [x4]; cbnz w6, again"


@pytest.mark.parametrize("optimizer", [False, True])
def test_handlers_in_assembly(optimizer: bool) -> None:
    """Handlers in assembly count in memory cells, are ended by a fault, and preserve the registers of the
    probed code.
    """
    plain = new_engine()
    with plain.lock:
        expected = workload(plain)
    guest = new_engine(optimizer=optimizer)
    probes = guest.kprobes
    entry = guest.kernel.required("vfs_write")
    clobbering = Kprobe(addr=entry + 8, code=f"{COUNT}; {OVERWRITE}; ldr x0, [x0, #3]; str x9, behind, x10")
    two = Kprobe(
        addr=entry + 12,
        code="ldr w9, before; add w9, w9, #1; str w9, before, x11",
        post_code="mov x20, #1; ldr x9, after; add x9, x9, x20; str x9, after, x10",
    )
    returning = Kretprobe(
        addr=guest.kernel.required("ksys_write"),
        maxactive=20,
        return_code=f"ldr x9, got; add x9, x9, x0; str x9, got, x10; {COUNT_ATOMICALLY}",
    )
    with guest.lock:
        probes.register_kprobe(clobbering)
        probes.register_kprobe(two)
        guest.components.engine.kretprobes.register_kretprobe(returning)
        if probes.optimizer is not None:
            probes.optimizer.work.flush()
        assert probes.table.is_patched(clobbering) is optimizer
        assert workload(guest) == expected
        written = clobbering.cells["sum"]
        assert dict(clobbering.cells) == {"calls": 12, "sum": written, "behind": 0}
        assert dict(two.cells) == {"before": 12, "after": 12}
        assert dict(returning.cells) == {"got": written, "rets": 12}
        assert written == 700 * sum(range(12))
        assert (clobbering.failures, two.failures, returning.failures) == (12, 0, 0)
        probes.unregister_kprobe(clobbering)
        probes.unregister_kprobe(two)
        guest.components.engine.kretprobes.unregister_kretprobe(returning)
    disarmed(guest, ())


def test_nothing_is_left_of_tasks_that_end() -> None:
    guest = new_engine()
    check_ended_tasks(
        guest, Files(probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False), CLIENT)
    )


def test_a_function_is_called(clean: Mount) -> None:
    file = clean.open(CLIENT, "/machine/call", os.O_RDWR)
    clean.write(CLIENT, file, b"int_sqrt 1764\nstrlen 'word'\n", 0)
    shown = clean.read(CLIENT, file, 200, 0).decode()
    clean.release(file)
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
    write(clean, CLIENT, "/machine/modules", b"unload dummy\n")
    assert b"dummy" not in read(clean, CLIENT, "/machine/modules")


def test_gdb(clean: Mount, engine: LinuxEngine) -> None:
    """A debugger stops at a breakpoint inside a function with a probed entry, and then steps to the next
    instruction.
    """
    write(clean, CLIENT, "/kprobe_events", b"p:kprobes/entry vfs_read\n")
    write(clean, CLIENT, "/tracing/events/kprobes/entry/enable", b"1\n")
    file = clean.open(CLIENT, "/scratch/greeting", os.O_RDONLY)
    client = GdbClient(read(clean, CLIENT, "/machine/gdb").decode().strip(), "arm64")
    place = engine.kernel.required("vfs_read") + 8
    assert client.ask(f"Z0,{place:x},4") == "OK"
    client.send("c")
    request = Request(lambda: clean.read(CLIENT, file, 64, 0))
    assert client.answer().startswith("T05")
    assert client.ip == place
    assert len(client.ask("g")) == 2 * (33 * 8 + 4)
    client.send("s")
    assert client.answer().startswith("T05")
    assert client.ip == place + 4
    client.close()
    assert request.done() == b"hello\n"
    engine.lock.end_debugging()
    clean.release(file)


def test_the_kernel_does_not_notice() -> None:
    check_unnoticed(new_engine, FUNCTIONS, "arm64", least=(1000, 1000))


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_time_is_the_number_of_instructions() -> None:
    check_model_clock(new_engine(optimizer=False), 4)


@pytest.mark.skipif(routine_address("count") is None, reason="there is no routine for this kind of host")
def test_guest_code_records_with_the_model_clock() -> None:
    check_recording(new_engine())
