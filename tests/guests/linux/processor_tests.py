"""Tests of Debian's kernels for arm64 and riscv64, and functions that other tests of these kernels share.

The test modules of each architecture have subclasses, and fixtures for the kernel.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from elftools.elf.elffile import ELFFile

from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import BOOTED
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.debug_files import build_id
from emulated_kernel.image.linux.debug_file import linux_debug_file
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux.probing import chosen, differing, probed, ram, workload

CLIENT = Client(5001, 0, 0)
FRACTION = 30
"""Every FRACTION-th fentry site is compared."""


def read(mount: Mount, client: Client, path: str) -> bytes:
    file = mount.open(client, path, os.O_RDONLY)
    try:
        return mount.read(client, file, 1 << 20, 0)
    finally:
        mount.release(file)


def write(mount: Mount, client: Client, path: str, text: bytes, flags: int = 0) -> None:
    file = mount.open(client, path, os.O_WRONLY | flags)
    try:
        assert mount.write(client, file, text, 0) == len(text)
    finally:
        mount.release(file)


def records(mount: Mount) -> list[str]:
    """Return the records of the trace, without their times."""
    lines = read(mount, CLIENT, "/tracing/trace").decode().splitlines()
    return [re.sub(r"\s+[\d.]+: ", " ", line, count=1) for line in lines if not line.startswith("#")]


def counts(mount: Mount) -> dict[str, tuple[int, int]]:
    found = (line.split() for line in read(mount, CLIENT, "/kprobe_profile").decode().splitlines())
    return {name: (int(hits), int(missed)) for name, hits, missed in found}


class KernelTests:
    """Base class of the tests of one architecture's kernel, without probes of kprobefs."""

    compiler: ClassVar[bytes]
    """Part of /proc/version that names the processor."""

    def test_clients_take_turns(self, tasks: LinuxTasks) -> None:
        """If two clients make system calls in turn, both tasks keep their memory and registers."""
        calls = LinuxSyscalls(tasks)
        clients = [tasks.fork(tasks.init, pid) for pid in (4001, 4002)]
        assert [client.pid for client in clients] == [4001, 4002]
        for turn in range(3):
            for client in clients:
                path = f"/scratch/turn-{client.pid}"
                fd = calls.open(client, path, os.O_RDWR | os.O_CREAT, 0o600)
                text = f"{client.pid} {turn}".encode()
                assert calls.write(client, fd, text, None) == len(text)
                count = calls.begin_read(client, fd, 100, 0, may_block=False)
                assert calls.read_data(client, count, 100) == text
                calls.close(client, fd)
        for client in clients:
            calls.on_path(tasks.init, "unlinkat", f"/scratch/turn-{client.pid}", 0)
            tasks.exit(client)
            assert not client.alive
        assert self.compiler in calls.read_all("/proc/version")

    def test_fentry_sites_as_ftrace_writes_them_at_boot(self, tasks: LinuxTasks, kernel: LinuxKernel) -> None:
        """with_ftrace_sites() writes the same bytes to fentry sites as ftrace does at boot, so `explain`
        needs no boot.
        """
        memory = tasks.machine.memory
        root = memory.kernel_root(tasks.root)
        written = kernel.with_ftrace_sites()
        # The fentry site is the second instruction on arm64, and the first one on riscv64.
        before = 4 if kernel.architecture == "arm64" else 0
        sites = [
            site - before
            for site in kernel.mcount
            if any(start <= site < end for start, end in kernel.text_ranges)
        ]
        chosen_sites = sites[::FRACTION]
        assert len(chosen_sites) > 1000
        for site in chosen_sites:
            assert memory.read(root, site, 8) == written.read(site, 8) != kernel.read(site, 8), hex(site)

    def test_the_memory_of_ended_tasks_is_freed(self, tasks: LinuxTasks) -> None:
        """RCU frees the memory of many short processes, which needs guest time to pass between requests."""
        calls = LinuxSyscalls(tasks)

        def free() -> int:
            return int(calls.read_all("/proc/meminfo").split(b"MemFree:")[1].split()[0])

        before = free()
        for pid in range(6000, 6160):
            tasks.exit(tasks.fork(tasks.init, pid))
        assert free() > before - 3000

    def test_a_sleep_passes_guest_time(self, tasks: LinuxTasks) -> None:
        client = tasks.fork(tasks.init, 4003)
        tasks.copy_to_user(client, 0x600000, struct.pack("<2q", 1, 0))
        before = tasks.machine.pc.tsc
        assert tasks.call(client, tasks.machine.abi.syscalls["nanosleep"], 0x600000, 0) == 0
        passed = (tasks.machine.pc.tsc - before) / tasks.machine.pc.khz / 1000
        assert 1 <= passed < 1.1
        tasks.exit(client)

    def test_attributes_from_dentries_and_from_a_call(self, tasks: LinuxTasks) -> None:
        """The host reads the same attributes from the kernel's memory as newfstatat(2) returns."""
        calls = LinuxSyscalls(tasks)
        fd = calls.open(tasks.init, "/scratch/a name of some length", os.O_WRONLY | os.O_CREAT, 0o640)
        calls.write(tasks.init, fd, b"twelve bytes", None)
        calls.close(tasks.init, fd)
        seen = tasks.files.lstat("/scratch/a name of some length")
        calls.on_path(tasks.init, "newfstatat", "/scratch/a name of some length", 0x602000, 0x100)
        assert seen is not None
        assert seen._replace(is_paged=False, rdev=0) == calls._stat()
        assert (seen.size, seen.mode & 0o777) == (12, 0o640)
        assert BOOTED <= seen.mtime_ns // 10**9 < BOOTED + 3600

    def test_the_file_for_debuggers_has_the_build_id(self, kernel: LinuxKernel) -> None:
        """The debug file has the kernel's build ID, by which drgn checks that the file fits a core."""
        assert kernel.build_id
        assert build_id(ELFFile(io.BytesIO(linux_debug_file(kernel)))) == kernel.build_id


class EngineTests:
    """Base class of the tests of kprobefs's own kprobes in the kernel of one architecture."""

    def test_a_control_file_is_seen(self, clean: Mount) -> None:
        """The open, read and close of a control file are system calls of the client's task in the guest."""
        write(
            clean,
            CLIENT,
            "/kprobe_events",
            b"p:kprobes/read vfs_read\nr:kprobes/open do_sys_openat2 $retval\n",
        )
        write(clean, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
        before = counts(clean)
        after = counts(clean)
        assert {name: after[name][0] - before[name][0] for name in after} == {"read": 1, "open": 1}

    def test_returns(self, clean: Mount) -> None:
        """Return probes report the result and the caller, also of nested calls."""
        lines = b"r:kprobes/got vfs_read $retval\nr:kprobes/sys ksys_read $retval\n"
        write(clean, CLIENT, "/kprobe_events", lines)
        write(clean, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
        for _ in range(20):
            assert read(clean, CLIENT, "/scratch/greeting") == b"hello\n"
        found = [line for line in records(clean) if line.endswith("=6")]
        assert sum("(ksys_read+0x" in line and "<- vfs_read) arg1=6" in line for line in found) == 20
        assert sum("<- ksys_read) arg1=6" in line for line in found) == 20
        assert {missed for _, missed in counts(clean).values()} == {0}


def places(engine: LinuxEngine, functions: Iterable[str]) -> Iterator[int]:
    """Yield the addresses of all instructions of the functions `functions`."""
    kallsyms = engine.kernel.kallsyms
    for start in sorted(filter(None, map(kallsyms.lookup_name, functions))):
        where = kallsyms.lookup(start)
        assert where is not None
        code = engine.machine.text.original(start, where.symbol.size)
        yield from engine.components.arch.instruction_boundaries(code, start)


def check_unnoticed(
    new_engine: Callable[..., LinuxEngine], functions: Iterable[str], family: str, least: tuple[int, int]
) -> None:
    """Check that the workload has the same answers and hits in all modes.

    If Python handles stepped probes, the workload also leaves the same memory as without probes.
    `new_engine`: function that boots a kernel, with or without `optimizer`. `family`: kind of guest, by which
    the host's routine for traps is found. `least`: the number of probed places exceeds the first number
    without an optimizer, and the second number with an optimizer.
    """
    alone = new_engine(optimizer=False)
    alone.machine.text.free_text(alone.machine.text.alloc_text(16))
    answers = workload(alone)
    memory = ram(alone)
    alone.tasks.machine.close()
    hits: list[Counter[int]] = []
    for optimizer, is_compiled in ((False, False), (False, True), (True, False)):
        probing = new_engine(optimizer=optimizer)
        chosen_places = [*chosen(probing, places(probing, functions))]
        found = probed(probing, chosen_places, is_compiled=is_compiled)
        assert len(chosen_places) > least[optimizer]
        assert found.answers == answers
        if not optimizer and not is_compiled:
            assert not differing(memory, ram(probing))
        if is_compiled and routine_address(family) is not None:
            assert found.native_traps > found.hits.total()
            assert not found.python_calls
        hits.append(found.hits)
        probing.tasks.machine.close()
    stepped, in_guest, jumped = hits
    assert in_guest == stepped
    assert jumped.total() > 500
    assert {place: stepped[place] for place in jumped} == jumped
