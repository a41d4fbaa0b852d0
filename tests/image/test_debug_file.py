"""Debug information from BTF: types and symbols as pyelftools, drgn and gdb read them."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from emulated_kernel import Kernel
from emulated_kernel.guests.builtin.readers.vmcoreinfo import vmcoreinfo
from emulated_kernel.guests.common.vmcore_file import write_core
from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.debug_elf import MemorySection, NamedAddress, debug_elf
from emulated_kernel.image.linux.debug_file import builtin_debug_file
from emulated_kernel.machine.memory.sparse import data_ranges, write_all
from emulated_kernel.util.config import MachineConfig
from kprobefs.plan import debug_info
from tests.kept_images import load_image

ARCHITECTURES = ("x86_64", "i386", "riscv64")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def image(request: pytest.FixtureRequest) -> KernelImage:
    return load_image(None, request.param)


@pytest.fixture(scope="module")
def elf(image: KernelImage) -> ELFFile:
    return ELFFile(io.BytesIO(builtin_debug_file(image)))


@pytest.fixture(scope="module")
def typed() -> tuple[KernelImage, ELFFile]:
    """Return the image that has types, and its debug file."""
    image = load_image(None, "x86_64")
    return image, ELFFile(io.BytesIO(builtin_debug_file(image)))


def structures(elf: ELFFile) -> dict[str, Any]:
    """Return name -> entry of each complete structure."""
    (unit,) = elf.get_dwarf_info().iter_CUs()
    found = {}
    for die in unit.get_top_DIE().iter_children():
        name = die.attributes.get("DW_AT_name")
        if die.tag == "DW_TAG_structure_type" and name and "DW_AT_declaration" not in die.attributes:
            found[name.value.decode()] = die
    return found


def test_offsets_are_those_of_the_kernel(typed: tuple[KernelImage, ELFFile]) -> None:
    """The debug file gives members of task_struct the offsets that the C compiler recorded in the kernel's
    own table.
    """
    image, elf = typed
    task = structures(elf)["task_struct"]
    offsets = {
        die.attributes["DW_AT_name"].value.decode(): die.attributes["DW_AT_data_member_location"].value
        for die in task.iter_children()
        if "DW_AT_name" in die.attributes and "DW_AT_data_member_location" in die.attributes
    }
    prefix = "task_struct."
    table = {name.removeprefix(prefix): at for name, at in image.abi.items() if name.startswith(prefix)}
    common = offsets.keys() & table.keys()
    assert {"pid", "comm"} <= common
    assert {name: offsets[name] for name in common} == {name: table[name] for name in common}


def test_sections_with_contents_are_within_segments() -> None:
    """Sections of a flat image do not reach beyond the contents of its segment, because gdb warns of such a
    section.
    """
    start = 0xFFFF800080000000
    text = MemorySection(".text", start, 7, bytes(0x1234), 0x5000)
    symbols = [NamedAddress("code", start + 0x1000, 16, "t"), NamedAddress("zeros", start + 0x2000, 8, "b")]
    elf = ELFFile(io.BytesIO(debug_elf(183, 64, [text], symbols, {})))
    loaded = [(each["p_vaddr"], each["p_filesz"], each["p_memsz"]) for each in elf.iter_segments("PT_LOAD")]
    assert loaded == [(start, 0x1234, 0x1234), (start + 0x1234, 0, 0x5000 - 0x1234)]
    sections = [elf.get_section_by_name(name) for name in (".text", ".bss")]
    assert [(each["sh_type"], each["sh_addr"], each["sh_size"]) for each in sections] == [
        ("SHT_PROGBITS", start, 0x1234),
        ("SHT_NOBITS", start + 0x1234, 0x5000 - 0x1234),
    ]
    table = elf.get_section_by_name(".symtab")
    indices = {symbol.name: symbol["st_shndx"] for symbol in table.iter_symbols() if symbol.name}
    assert {name: elf.get_section(index).name for name, index in indices.items()} == {
        "code": ".text",
        "zeros": ".bss",
    }


def test_symbols_are_those_of_the_kernel(image: KernelImage, elf: ELFFile) -> None:
    table = elf.get_section_by_name(".symtab")
    found = {symbol.name: symbol["st_value"] for symbol in table.iter_symbols() if symbol.name}
    assert found == {symbol.name: symbol.address for symbol in image.kallsyms.symbols}


def test_functions_have_prototypes(typed: tuple[KernelImage, ELFFile]) -> None:
    image, elf = typed
    (unit,) = elf.get_dwarf_info().iter_CUs()
    functions = {
        die.attributes["DW_AT_name"].value: die
        for die in unit.get_top_DIE().iter_children()
        if die.tag == "DW_TAG_subprogram"
    }
    read = functions[b"vfs_read"]
    assert read.attributes["DW_AT_low_pc"].value == image.kallsyms.lookup_name("vfs_read")
    parameters = [die.get_DIE_from_attribute("DW_AT_type").tag for die in read.iter_children()]
    assert parameters == [
        "DW_TAG_pointer_type",
        "DW_TAG_pointer_type",
        "DW_TAG_typedef",
        "DW_TAG_pointer_type",
    ]


def test_memory_is_the_files(image: KernelImage, elf: ELFFile) -> None:
    loads = {load["p_vaddr"]: load for load in elf.iter_segments("PT_LOAD")}
    for segment in image.segments:
        assert loads[segment.va].data() == bytes(segment.data)
        assert loads[segment.va]["p_memsz"] == segment.mem_size


def test_each_file_has_one_unit(image: KernelImage, elf: ELFFile) -> None:
    """Each debug file has one unit, even without types, because drgn does not use a file without DWARF."""
    (unit,) = elf.get_dwarf_info().iter_CUs()
    assert unit["address_size"] == image.bits // 8
    assert unit.get_top_DIE().attributes["DW_AT_name"].value == b"vmlinux"


@contextmanager
def debugged(place: Path, arch: str) -> Iterator[tuple[Kernel, Path, Path]]:
    """Yield a kernel, and the paths of its core and its debug file in the directory `place`."""
    with Kernel(MachineConfig(arch=arch)) as kernel:
        kernel.write_file("machine/modules", "load counter")
        kernel.write_file("kprobe_events", "r:returns gcd")
        kernel.write_file("tracing/events/kprobes/returns/enable", "1")
        (place / "debug").write_bytes(builtin_debug_file(kernel.machine.image))
        info = vmcoreinfo(kernel.machine, kernel.machine.image)
        with kernel.lock, write_core(kernel.machine, info) as core, open(place / "core", "wb") as copy:
            size = os.fstat(core.fileno()).st_size
            for at, length in data_ranges(core.fileno(), 0, size):
                write_all(copy.fileno(), os.pread(core.fileno(), length, at), at)
            copy.truncate(size)
        yield kernel, place / "core", place / "debug"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kernel, Path, Path]]:
    """Yield a kernel, the path of its core, and the path of its debug file."""
    with debugged(tmp_path_factory.mktemp("debug"), "x86_64") as made:
        yield made


def test_the_core_names_the_build_of_the_file(session: tuple[Kernel, Path, Path]) -> None:
    kernel, _, debug = session
    info = vmcoreinfo(kernel.machine, kernel.machine.image).decode()
    with open(debug, "rb") as file:
        note = ELFFile(file).get_section_by_name(".note.gnu.build-id").data()
    assert f"BUILD-ID={note[16:].hex()}\n" in info
    assert len(note) == 36


def test_drgn_shows_the_tasks(session: tuple[Kernel, Path, Path]) -> None:
    drgn = pytest.importorskip("drgn")
    lists = pytest.importorskip("drgn.helpers.linux.list")
    kernel, core, debug = session
    program = drgn.Program()
    program.set_core_dump(core)
    program.load_debug_info([debug])
    first = program["init_task"]
    tasks = lists.list_for_each_entry("struct task_struct", first.tasks.address_of_(), "tasks")
    found = [(task.pid.value_(), task.comm.string_().decode()) for task in (first, *tasks)]
    lines = kernel.read_file("machine/tasks").splitlines()[1:]
    assert found == [(int(words[0]), words[-1]) for words in map(str.split, lines)]
    assert found[0] == (0, "swapper/0")


@pytest.mark.parametrize("arch", ["i386", "riscv64", "riscv64i"])
def test_drgn_finds_symbols_of_a_kernel_without_types(tmp_path: Path, arch: str) -> None:
    drgn = pytest.importorskip("drgn")
    with debugged(tmp_path, arch) as (kernel, core, debug):
        program = drgn.Program()
        program.set_core_dump(core)
        program.load_debug_info([debug])
        assert program.symbol("gcd").address == kernel.image.kallsyms.lookup_name("gcd")


def test_drgn_has_no_symbols_of_modules(session: tuple[Kernel, Path, Path]) -> None:
    drgn = pytest.importorskip("drgn")
    kernel, core, debug = session
    program = drgn.Program()
    program.set_core_dump(core)
    program.load_debug_info([debug])
    found = {}
    for name in ("gcd", "counter_add"):
        address = kernel.kallsyms_lookup_name(name)
        assert address
        found[name] = [symbol.name for symbol in program.symbols(address)]
    assert found == {"gcd": ["gcd"], "counter_add": []}


def test_gdb_shows_a_type_and_a_variable(session: tuple[Kernel, Path, Path]) -> None:
    gdb = shutil.which("gdb")
    if gdb is None:
        pytest.skip("gdb is not installed")
    kernel, core, debug = session
    commands = ("p init_task.comm", "ptype vfs_read", "p/x host_return_trampoline")
    words = [word for command in commands for word in ("-ex", command)]
    run = [gdb, "-nx", "-batch", *words, str(debug), str(core)]
    shown = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False).stdout
    assert '"swapper/0\\000' in shown
    trampoline = kernel.machine.memory.read_word(kernel.image.abi["host_return_trampoline"])
    assert trampoline
    assert f" = {trampoline:#x}\n" in shown
    assert "type = long (struct file *, char *, size_t, loff_t *)" in shown


def test_the_command_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    debug_info.run(None, arch="riscv64", image=None)
    (name,) = capsys.readouterr().out.splitlines()
    assert name == "vmlinux-6.1.0-kprobefs-riscv64.debug"
    with open(tmp_path / name, "rb") as file:
        assert ELFFile(file)["e_machine"] == "EM_RISCV"
    debug_info.run("named", arch=None, image=None)
    assert (tmp_path / "named").stat().st_size
