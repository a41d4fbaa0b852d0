"""machine/vmcore is an ELF core with the guest's memory and registers at the time when the file is opened."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from emulated_kernel import Client, Kernel, KernelError, MachineConfig, Mount
from emulated_kernel.guests.common.vmcore_file import write_core
from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.machine.core_dump import RAM_OFFSET, register_names

ROOT = Client(1, 0, 0)
PATH = "/machine/vmcore"
HEADERS = 64 << 10
LARGE = 16 << 20
REGISTERS_AT = {"x86_64": 112, "i386": 72, "riscv64": 112}
"""Architecture -> offset in bytes of the registers in an NT_PRSTATUS note."""


class Core:
    """An open vmcore, which is read in pieces as debuggers do."""

    def __init__(self, at: Callable[[int, int], bytes], close: Callable[[], None]) -> None:
        self.at = at
        """Function of an offset and a size that returns bytes of the file."""
        self.close = close
        self.elf = ELFFile(io.BytesIO(at(0, HEADERS)))

    def memory(self, va: int, size: int) -> bytes:
        """Return `size` bytes of the core at the virtual address `va`, found by the program headers."""
        for load in self.elf.iter_segments("PT_LOAD"):
            if load["p_vaddr"] <= va and va + size <= load["p_vaddr"] + load["p_filesz"]:
                assert load["p_offset"] == RAM_OFFSET + load["p_paddr"]
                return self.at(load["p_offset"] + va - load["p_vaddr"], size)
        raise AssertionError(f"{va:#x} is not in the core")

    def notes(self, name: str) -> list[bytes]:
        """Return the contents of all notes whose owner is `name`."""
        found = []
        for segment in self.elf.iter_segments("PT_NOTE"):
            data = self.at(segment["p_offset"], segment["p_filesz"])
            at = 0
            while at < len(data):
                name_size, size, _ = struct.unpack_from("<III", data, at)
                owner = data[at + 12 : at + 12 + name_size].rstrip(b"\0").decode()
                at += 12 + -(-name_size // 4) * 4
                if owner == name:
                    found.append(data[at : at + size])
                at += -(-size // 4) * 4
        return found


def opened(mount: Mount) -> Core:
    """Open machine/vmcore as a client does, and return the core."""
    handle = mount.open(ROOT, PATH, os.O_RDONLY)
    return Core(lambda at, size: mount.read(ROOT, handle, size, at), lambda: mount.release(handle))


@pytest.fixture
def stopped(kernel: Kernel) -> Iterator[Core]:
    """Yield the core of a guest that does not run during the test."""
    with kernel.lock, write_core(kernel.machine, b"") as file:
        yield Core(lambda at, size: os.pread(file.fileno(), size, at), file.close)


@pytest.fixture(scope="module", params=["x86_64", "i386", "riscv64"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Yield a kernel with two CPUs and an enabled probe of vfs_read, whose handler is already compiled."""
    with Kernel(MachineConfig(arch=request.param, cpus=2)) as made:
        made.write_file("tracing/kprobe_events", "p:reads vfs_read")
        made.write_file("tracing/events/kprobes/reads/enable", "1")
        first = opened(made.mount())
        for _ in range(2):
            assert first.at(0, 1)
        first.close()
        yield made


@pytest.fixture(scope="module")
def mount(kernel: Kernel) -> Mount:
    return kernel.mount()


@pytest.fixture
def core(mount: Mount) -> Iterator[Core]:
    found = opened(mount)
    yield found
    found.close()


def test_memory_is_that_of_the_guest(kernel: Kernel, stopped: Core) -> None:
    """The segments of the core are the mapped ranges of memory.

    The first 16 MiB of a segment have the bytes of memory.
    """
    memory = kernel.machine.memory
    ranges = {(each.start, each.end) for each in memory.ranges}
    loads = [*stopped.elf.iter_segments("PT_LOAD")]
    assert {(load["p_vaddr"], load["p_vaddr"] + load["p_memsz"]) for load in loads} == ranges
    for load in loads:
        assert load["p_filesz"] == load["p_memsz"]
        for at in range(0, min(load["p_filesz"], LARGE), 1 << 20):
            size = min(1 << 20, load["p_filesz"] - at)
            va = load["p_vaddr"] + at
            assert stopped.at(load["p_offset"] + at, size) == memory.read(va, size), hex(va)


def test_registers_are_those_of_each_cpu(kernel: Kernel, stopped: Core) -> None:
    machine = kernel.machine
    notes = stopped.notes("CORE")
    assert len(notes) == 2
    names = register_names(machine.model)
    word = "Q" if machine.model.bits == 64 else "I"
    for number, (note, (ip, sp)) in enumerate(zip(notes, machine.positions(), strict=True)):
        at = REGISTERS_AT[machine.model.name]
        values = struct.unpack_from(f"<{len(names)}{word}", note, at)
        found = dict(zip(names, values, strict=True))
        assert (found["ip"], found["sp"]) == (ip, sp)
        if number == machine.cpu:
            assert all(found[name] == machine.regs.get(name) for name in machine.model.registers)
        # CPUs are numbered from 1, as in cores of other tools, so that the threads are distinct.
        assert struct.unpack_from("<I", note, 32 if machine.model.bits == 64 else 24)[0] == number + 1


def test_vmcoreinfo_leads_to_the_page_tables(kernel: Kernel, core: Core) -> None:
    (text,) = core.notes("VMCOREINFO")
    found = dict(line.split("=", 1) for line in text.decode().splitlines())
    assert found["OSRELEASE"] == kernel.read_file("machine/version").split()[2]
    root = int(found["SYMBOL(swapper_pg_dir)"], 16)
    assert kernel.machine.memory.translate(root) == kernel.machine.memory.tables.root
    assert int(found["SYMBOL(_stext)"], 16) == kernel.machine.image.kallsyms.lookup_name("_stext")


def test_the_jump_and_the_detour_are_there(kernel: Kernel, mount: Mount) -> None:
    """The core contains patched text and detours as they are in memory, not the text of the image."""
    text = kernel.machine.text
    with kernel.lock:
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.work.flush()
        assert text.ledger
        patched = sorted(text.ledger)
    core = opened(mount)
    for va in patched:
        now = core.memory(va, 1)
        assert now == kernel.machine.memory.read(va, 1)
    detours = kernel.machine.model.layout.text_space
    assert core.memory(detours, 4096) == kernel.machine.memory.read(detours, 4096)
    assert any(core.memory(detours, 4096).strip(kernel.machine.model.filler))
    core.close()


def test_it_stays_as_it_was_at_open(kernel: Kernel, mount: Mount) -> None:
    before = opened(mount)
    with kernel.lock:
        page = kernel.machine.alloc_pages(4096)
        kernel.machine.memory.write(page, b"after the open")
    after = opened(mount)
    assert before.memory(page, 14) != b"after the open"
    assert after.memory(page, 14) == b"after the open"
    before.close()
    after.close()
    with kernel.lock:
        kernel.machine.free_pages(page)


def test_few_can_be_open(mount: Mount) -> None:
    several = [opened(mount) for _ in range(4)]
    with pytest.raises(KernelError) as error:
        opened(mount)
    assert error.value.errno == errno.EBUSY
    for each in several:
        each.close()
    opened(mount).close()


def test_only_the_owner_may_read_it(mount: Mount, core: Core) -> None:
    attributes = mount.getattr(PATH)
    assert stat.S_IMODE(attributes.mode) == 0o400
    assert core.at(attributes.size - 1, 2) == b"\0"
    assert core.at(attributes.size, 1) == b""


def test_records_of_a_state_directory(tmp_path: Path) -> None:
    """The core contains the trace records, whose memory `--state` maps from a separate file."""
    with Kernel() as kernel, open(tmp_path / "records", "w+b") as file:
        records = kernel.machine.records
        with kernel.lock:
            records.keep_in(file)
            page = records.alloc_pages(4096)
            records.view(page, 8)[:] = b"persists"
        core = opened(kernel.mount())
        assert core.memory(page, 8) == b"persists"
        core.close()


def test_gdb_opens_it(kernel: Kernel, mount: Mount, core: Core, tmp_path: Path) -> None:
    gdb = shutil.which("gdb")
    arch = kernel.machine.model.name
    if gdb is None or arch.startswith("riscv"):
        pytest.skip("gdb for this architecture is not installed")
    path = tmp_path / "core"
    with open(path, "wb") as file:
        for at in range(0, mount.getattr(PATH).size, 1 << 20):
            if any(data := core.at(at, 1 << 20)):
                file.seek(at)
                file.write(data)
    commands = ("info threads", "x/s &linux_banner", "x/2i vfs_read")
    arguments = [word for command in commands for word in ("-ex", command)]
    run = [gdb, "-nx", "-batch", *arguments, str(PREBUILT / arch / "vmlinux"), str(path)]
    shown = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False).stdout
    assert "LWP 1" in shown
    assert "LWP 2" in shown
    assert kernel.read_file("machine/version").splitlines()[0] in shown
    assert "<vfs_read>:" in shown
