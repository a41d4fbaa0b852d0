"""machine/vmcore of a distribution's kernel: patched text, registers, and the kernel's VMCOREINFO."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable

import pytest
from elftools.elf.elffile import ELFFile

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.common.vmcore_file import write_core
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.mounts.probed_tree import vmcoreinfo
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES
from emulated_kernel.machine.core_dump import RAM_OFFSET, register_names
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux.probing import engine
from tests.oracle.inside import write

ROOT = Client(os.getpid(), 0, 0)


@pytest.fixture(scope="module")
def guest() -> LinuxEngine:
    """An optimized probe in vfs_read."""
    found = engine(PROFILES[DEFAULT])
    mount = probed_mount(found, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    write(mount, "/tracing/kprobe_events", "p:reads vfs_read\n")
    write(mount, "/tracing/events/kprobes/reads/enable", "1\n")
    with found.lock:
        if found.kprobes.optimizer is not None:
            found.kprobes.optimizer.work.flush()
    return found


def memory(read: Callable[[int, int], bytes], va: int, size: int) -> bytes:
    """The bytes at a virtual address, through the program headers alone."""
    for load in ELFFile(io.BytesIO(read(0, RAM_OFFSET))).iter_segments("PT_LOAD"):
        if load["p_vaddr"] <= va and va + size <= load["p_vaddr"] + load["p_filesz"]:
            assert load["p_offset"] == RAM_OFFSET + load["p_paddr"]
            return read(load["p_offset"] + va - load["p_vaddr"], size)
    raise AssertionError(f"{va:#x} is not in the core")


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
