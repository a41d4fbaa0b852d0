"""machine/vmcore of a distribution's kernel: patched text, registers, and the kernel's VMCOREINFO."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.vmcore_file import write_core
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.mounts.probed_tree import vmcoreinfo
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine, LinuxEngine
from emulated_kernel.guests.linux.vmcore.vmcore_guest import started_core
from emulated_kernel.guests.linux.vmcore.vmcore_mount import vmcore_mount
from emulated_kernel.image.linux.debug_file import linux_debug_file
from emulated_kernel.image.original_text import pack_original_text, unpack_original_text
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES
from emulated_kernel.machine.core_dump import RAM_OFFSET, register_names
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from kprobefs.common.errors import CliError
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import planned_kernel
from tests.guests.linux.probing import engine, kernel
from tests.kernel.gdb_client import GdbClient, Request
from tests.oracle.inside.mount_files import read, write

ROOT = Client(os.getpid(), 0, 0)
LISTS_TASKS = (8, 0, 6)
"""Version of crash that lists all tasks of Linux 6.1 and later."""


@pytest.fixture(scope="module")
def guest() -> LinuxEngine:
    """Return an engine with an enabled and optimized probe of vfs_read."""
    found = engine(PROFILES[DEFAULT])
    mount = probed_mount(found, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    write(mount, "/tracing/kprobe_events", "p:reads vfs_read\n")
    write(mount, "/tracing/events/kprobes/reads/enable", "1\n")
    with found.lock:
        if found.kprobes.optimizer is not None:
            found.kprobes.optimizer.work.flush()
    return found


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a debug file with the kernel's symbols and types."""
    path = tmp_path_factory.mktemp("debug") / "vmlinux.debug"
    path.write_bytes(linux_debug_file(kernel()))
    return path


def memory(read: Callable[[int, int], bytes], va: int, size: int) -> bytes:
    """Return `size` bytes at the virtual address `va`, found in the file by its program headers only."""
    for load in ELFFile(io.BytesIO(read(0, RAM_OFFSET))).iter_segments("PT_LOAD"):
        if load["p_vaddr"] <= va and va + size <= load["p_vaddr"] + load["p_filesz"]:
            assert load["p_offset"] == RAM_OFFSET + load["p_paddr"]
            return read(load["p_offset"] + va - load["p_vaddr"], size)
    raise AssertionError(f"{va:#x} is not in the core")


def test_a_mount_shows_the_kernel_of_a_core(
    guest: LinuxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that a mount has written can be mounted itself: text is the original, and probes and calls work.

    Segments of this core overlap, and the core contains mappings of the mount that wrote the core.
    """
    path = tmp_path / "core"
    with guest.lock, write_core(guest.machine, vmcoreinfo(guest)) as file:
        copy = ("cp", "--sparse=always", f"/proc/self/fd/{file.fileno()}", str(path))
        subprocess.run(copy, pass_fds=(file.fileno(),), check=True)
    # The cache keeps nothing of the core.
    monkeypatch.setattr(snapshot, "LIMIT", 0)
    found, symbols = started_core(str(path))
    probed = guest.kernel.required("vfs_read")
    original = guest.machine.text.original(probed, 16)
    assert guest.machine.text.current(probed, 16) != original
    assert found.machine.memory.read(found.root, probed, 16) == original
    mount = vmcore_mount(found, KernelEngine(found, symbols), Owner(0, 0), is_tracefs=False)
    write(mount, "/tracing/kprobe_events", "p:reads int_sqrt\n")
    write(mount, "/tracing/events/kprobes/reads/enable", "1\n")
    write(mount, "/machine/call", "int_sqrt 144\n")
    assert read(mount, "/machine/call") == "int_sqrt = 0xc (12)\n"
    assert read(mount, "/kprobes/stats/kprobes/reads/hits") == "1\n"
    mount.close()


def test_explain_finds_jumps_of_probes(
    guest: LinuxEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core has the jumps of an enabled probe and of a disabled one, because the optimizer has not removed
    the second jump yet.

    A core by kprobefs has a note with the original text, so that verdicts are those without probes. The core
    of another program has no note.
    """
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    optimizer = guest.kprobes.optimizer
    assert optimizer is not None
    start = guest.kernel.required("tcp_sendmsg")
    enabled, disabled = places = separate_places(guest, start)
    for place in places:
        line = f"p:at_{place:x} tcp_sendmsg+{place - start}\n"
        write(mount, "/tracing/kprobe_events", line, os.O_APPEND)
        write(mount, f"/tracing/events/kprobes/at_{place:x}/enable", "1\n")
    with guest.lock:
        optimizer.work.flush()
    write(mount, f"/tracing/events/kprobes/at_{disabled:x}/enable", "0\n")
    assert [guest.machine.text.current(place, 1) for place in places] == [b"\xe9"] * 2
    ours = explained(guest, tmp_path / "ours")
    with monkeypatch.context() as patch:
        patch.setattr(guest.machine, "original_text", lambda: ())
        others = explained(guest, tmp_path / "others")
    with guest.lock:
        optimizer.work.flush()
    assert guest.machine.text.current(disabled, 1) != b"\xe9"
    write(mount, f"/tracing/events/kprobes/at_{enabled:x}/enable", "0\n")
    with guest.lock:
        optimizer.work.flush()
    for place in places:
        write(mount, "/tracing/kprobe_events", f"-:at_{place:x}\n", os.O_APPEND)
    without = explained(guest, tmp_path / "removed")
    assert not without.detoured
    assert not ours.detoured
    assert ours.insns == without.insns
    assert [start + insn.offset for insn in others.detoured] == places
    assert others.insns != without.insns


def separate_places(guest: LinuxEngine, start: int) -> list[int]:
    """Return the first two places in a function that can have jumps that do not overlap."""
    checker = guest.kprobes.probe_checker
    where = guest.kernel.kallsyms.lookup(start)
    assert where is not None
    found: list[int] = []
    end = start
    for place in checker.boundaries(where.symbol):
        region = checker.optimized_region(place)
        if place >= end and not checker.may_probe(place) and isinstance(region, Region):
            found.append(place)
            end = region.addr + region.length
    return found[:2]


def test_a_note_leads_to_no_other_memory(guest: LinuxEngine, tmp_path: Path) -> None:
    """A dump whose note of original text names wrong addresses or sizes is refused."""
    last = guest.kernel.required("vfs_read") | 0xFFF
    for number, piece in enumerate([(last, b"12"), (0x1000, b"1"), (1 << 63, b"1"), (2**64 - 1, b"12")]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guest.machine, "original_text", [piece].__iter__)
            with pytest.raises(CliError, match="original text is damaged"):
                explained(guest, tmp_path / f"{number}")


def test_a_damaged_note_is_refused() -> None:
    packed = pack_original_text([(0x1000, b"123"), (0x2000, b"4")])
    assert [*unpack_original_text(packed)] == [(0x1000, b"123"), (0x2000, b"4")]
    for damaged in (
        b"",
        packed[:-1],
        packed[:5],
        b"x" * 20,
        zlib.compress(b"1234567"),
        zlib.compress(bytes(9) + b"1"),
    ):
        with pytest.raises(ValueError, match=r"."):
            list(unpack_original_text(damaged))


def explained(guest: LinuxEngine, path: Path) -> Explanation:
    """Write a core to `path`, and return the explanation of tcp_sendmsg in this core.

    Do not cache the core: a few cores would displace the snapshot of the kernel that all tests boot.
    """
    with guest.lock, write_core(guest.machine, vmcoreinfo(guest)) as file:
        copy = ("cp", "--sparse=always", f"/proc/self/fd/{file.fileno()}", str(path))
        subprocess.run(copy, pass_fds=(file.fileno(),), check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "LIMIT", 0)
        planned = planned_kernel(None, None, str(path), None)
        return Explanation(planned, find_place("tcp_sendmsg", planned.tables))


def test_memory_and_registers(guest: LinuxEngine) -> None:
    machine = guest.machine
    with guest.lock, write_core(machine, vmcoreinfo(guest)) as file:

        def read(at: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, at)

        assert machine.text.ledger
        probed = guest.kernel.required("vfs_read")
        detours = machine.model.layout.text_space
        variables = guest.kernel.required("init_task")
        for va in (probed, detours, variables, machine.per_cpu_bases[0], machine.model.layout.record_pages):
            assert memory(read, va, 4096 - va % 4096) == machine.memory.read(va, 4096 - va % 4096), hex(va)
        assert memory(read, probed, 5) != guest.kernel.vmlinux.view(probed, 5).tobytes()
        (note,) = ELFFile(io.BytesIO(read(0, RAM_OFFSET))).iter_segments("PT_NOTE")
        notes = read(note["p_offset"], note["p_filesz"])
    names = register_names(machine.model)
    values = dict(zip(names, struct.unpack_from(f"<{len(names)}Q", notes, 20 + 112), strict=True))
    assert all(values[name] == machine.regs.get(name) for name in machine.model.registers)
    assert b"VMCOREINFO\0" in notes
    assert f"OSRELEASE={guest.tasks.release}\n".encode() in notes
    assert f"SYMBOL(_stext)={guest.kernel.required('_stext'):x}\n".encode() in notes


def test_the_file_is_as_large_as_it_says(guest: LinuxEngine) -> None:
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    size = mount.getattr("/machine/vmcore").size
    handle = mount.open(ROOT, "/machine/vmcore", os.O_RDONLY)
    assert mount.read(ROOT, handle, 4, 0) == b"\x7fELF"
    assert mount.read(ROOT, handle, 4096, size - 1) == b"\0"
    mount.release(handle)


def test_drgn_shows_tasks_files_and_mounts(guest: LinuxEngine, debug: Path) -> None:
    """drgn lists the tasks, files and mounts of a core, with types that come from BTF only."""
    drgn = pytest.importorskip("drgn")
    helpers = pytest.importorskip("drgn.helpers.linux")
    with guest.lock, write_core(guest.machine, vmcoreinfo(guest)) as core:
        program = drgn.Program()
        program.set_core_dump(core.fileno())
        program.load_debug_info([debug])
        assert program["init_uts_ns"].name.release.string_().decode() == guest.tasks.release
        tasks = {task.pid.value_(): task.comm.string_() for task in helpers.for_each_task(program)}
        assert tasks[1] == b"init"
        assert tasks[2] == b"kthreadd"
        assert len(tasks) > 20
        first = helpers.find_task(program, 1)
        files = [helpers.d_path(file.f_path) for _, file in helpers.for_each_file(first)]
        mounts = {helpers.mount_dst(mount) for mount in helpers.for_each_mount(program)}
        assert {b"/", b"/proc"} <= mounts
        assert all(any(path.startswith(mount) for mount in mounts) for path in files)
        current = helpers.per_cpu(program["current_task"], 0)
        assert current.value_() == helpers.cpu_curr(program, 0).value_()
        frames = [frame.name for frame in program.stack_trace(2)]
        assert frames[:3] == ["__schedule", "schedule", "kthreadd"]


def test_crash_opens_it(guest: LinuxEngine, debug: Path, tmp_path: Path) -> None:
    crash = shutil.which("crash")
    if crash is None:
        pytest.skip("crash is not installed")
    said = subprocess.run(
        [crash, "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    found = re.search(r"crash (\d+)\.(\d+)\.(\d+)", said)
    assert found is not None, said
    (tmp_path / "commands").write_text("sys\nps\nrd -8 vfs_read 5\nstruct file.f_pos\nquit\n")
    with guest.lock:
        core = write_core(guest.machine, vmcoreinfo(guest))
        patched = guest.machine.memory.read(guest.kernel.required("vfs_read"), 5)
    with core, open(tmp_path / "core", "wb") as copy:
        shutil.copyfileobj(core, copy, 1 << 20)
    run = [crash, "-s", "-i", "commands", str(debug), "core"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert f"RELEASE: {guest.tasks.release}" in done.stdout, done.stdout + done.stderr
    assert "loff_t f_pos" in done.stdout
    assert f"{patched.hex(' ')} " in done.stdout
    if tuple(map(int, found.groups())) >= LISTS_TASKS:
        assert "[kthreadd]" in done.stdout


def test_gdb_steps_in_a_distributions_kernel(guest: LinuxEngine) -> None:
    """A debugger's breakpoint changes no text, a core has the registers at the breakpoint, and a step goes
    on.
    """
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    handle = mount.create(ROOT, "/scratch/file", 0o644, os.O_RDWR)
    mount.write(ROOT, handle, b"hello", 0)
    client = GdbClient(read(mount, "/machine/gdb").strip())
    place = guest.kernel.required("vfs_read")
    before = guest.machine.memory.read(place, 16)
    assert client.ask(f"Z0,{place:x},1") == "OK"
    client.send("c")
    request = Request(lambda: mount.read(ROOT, handle, 16, 0))
    assert client.answer().startswith("T05")
    assert client.ip == place
    assert client.memory(place, 16) == before
    with guest.lock.observing(), write_core(guest.machine, b"") as core:
        assert place.to_bytes(8, "little") in os.pread(core.fileno(), 1 << 16, 0)
    client.send("s")
    assert client.answer().startswith("T05")
    assert client.ip != place
    client.close()
    assert request.done() == b"hello"
    guest.lock.end_debugging()
