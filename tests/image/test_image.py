"""The loader: segments, tables and symbols of the prebuilt images, and files that it refuses."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.errors import KernelError
from tests.image.guest import BUGFLAG_WARNING

NOP5 = b"\x0f\x1f\x44\0\0"
UD2 = b"\x0f\x0b"


class Expected(NamedTuple):
    """Values of an image that depend on its architecture."""

    text: int
    entry: str
    interrupt: str
    system_call: str
    pt_regs_size: int
    fentry_site: bytes
    bug: bytes


BY_ARCH = {
    "x86_64": Expected(
        0xFFFF_FFFF_8100_0000, "startup_64", "asm_host_interrupt", "do_syscall_64", 168, NOP5, UD2
    ),
    "i386": Expected(0xC100_0000, "startup_32", "asm_host_interrupt", "do_int80_syscall_32", 68, NOP5, UD2),
    "riscv64": Expected(
        0xFFFF_FFFF_8020_0000, "_start", "handle_exception", "do_trap_ecall_u", 288, b"\1\0" * 4, b"\2\x90"
    ),
    "riscv64i": Expected(
        0xFFFF_FFFF_8020_0000,
        "_start",
        "handle_exception",
        "do_trap_ecall_u",
        288,
        bytes.fromhex("13000000") * 2,
        bytes.fromhex("73001000"),
    ),
}


ENDS = ("entry", "exit")
X86_ALONE = {
    *("startup_64", "x86_64_start_kernel", "asm_host_interrupt", "host_interrupt_return", "do_syscall_64"),
    *("dispatch_vector", "exc_debug", "exc_divide_error", "exc_int3"),
    *("exc_general_protection", "exc_invalid_op", "exc_page_fault", "kernelmode_fixup_or_oops"),
    *("page_fault_oops", "show_fault_oops", "show_opcodes"),
    *("truncate_inode_pages", "__alt_instructions", "__alt_instructions_end"),
    *(f"__traceiter_{each}_{end}" for each in ("local_timer", "reschedule", "call_function") for end in ENDS),
    *("trace_event_raw_event_x86_irq_vector", "__traceiter_page_fault_kernel"),
    "trace_event_raw_event_page_fault_kernel",
}
"""Functions that only the x86_64 image has.

Among them is truncate_inode_pages, which the other architectures' compilers inline.
"""
RISCV_ALONE = {
    *("_start", "riscv_start_kernel", "handle_exception", "ret_from_exception", "do_trap_ecall_u"),
    *("vector_of", "do_exception", "do_trap_break", "do_page_fault", "no_context", "die_kernel_fault"),
    *("__clzdi2", "__ctzdi2", "__popcountdi2", "__bswapsi2", "__bswapdi2"),
}


def address(image: KernelImage, name: str) -> int:
    found = image.kallsyms.lookup_name(name)
    assert found is not None
    return found


def test_segments_are_apart_and_protected(each_image: KernelImage) -> None:
    image = each_image
    protections = [segment.prot for segment in image.segments]
    assert protections[:3] == [Prot.READ | Prot.EXEC, Prot.READ, Prot.READ | Prot.WRITE]
    assert not any(prot & Prot.WRITE and prot & Prot.EXEC for prot in protections)
    ends = [segment.va + segment.mem_size for segment in image.segments]
    for segment, end in zip(image.segments[1:], ends, strict=False):
        assert segment.va >= end
        assert segment.va % 4096 == 0
    assert image.segments[0].va == BY_ARCH[image.arch].text


def test_entry_and_text(each_image: KernelImage) -> None:
    image = each_image
    (text,) = image.text_ranges
    assert text.start <= image.entry < text.end
    assert str(image.kallsyms.lookup(image.entry)).startswith(f"{BY_ARCH[image.arch].entry}+0x0/")


def test_per_cpu_data_is_mapped_where_the_guest_expects_it(each_image: KernelImage) -> None:
    image = each_image
    segment = next(s for s in image.segments if s.va == image.abi["percpu.base"])
    assert segment.mem_size == image.abi["percpu.size"]
    assert address(image, "__per_cpu_start") == segment.va
    assert address(image, "current_task") == image.abi["percpu.current_task"] < segment.mem_size


def test_the_exception_table_leads_from_text_to_text(each_image: KernelImage) -> None:
    image = each_image
    (text,) = image.text_ranges
    assert len(image.ex_table) > 5
    assert list(image.ex_table) == sorted(image.ex_table)
    for insn, fixup in image.ex_table:
        assert text.start <= insn < text.end
        assert text.start <= fixup < text.end
    functions = {str(image.kallsyms.lookup(insn)).split("+")[0] for insn, _ in image.ex_table}
    assert "copy_user_generic" in functions


def test_fentry_sites_hold_nops(each_image: KernelImage) -> None:
    image = each_image
    assert len(image.mcount) > 300
    nops = BY_ARCH[image.arch].fentry_site
    assert {image.read(site, len(nops)) for site in image.mcount} == {nops}
    assert address(image, "vfs_read") in image.mcount
    assert address(image, "sched_clock") not in image.mcount


def test_bugs_are_ud2_or_ebreak(each_image: KernelImage) -> None:
    image = each_image
    insn = BY_ARCH[image.arch].bug
    assert {image.read(bug, len(insn)) for bug in image.bugs} == {insn}
    files = {(bug.file, bool(bug.flags & BUGFLAG_WARNING)) for bug in image.bugs.values()}
    assert ("kernel/sched/core.c", False) in files
    assert ("kernel/mutex.c", True) in files


def test_the_blacklist_has_entries_and_whole_areas(each_image: KernelImage) -> None:
    image = each_image
    names = {name: (start, end) for start, end, name in image.blacklist}
    assert {
        "fixup_exception",
        "do_host_interrupt",
        BY_ARCH[image.arch].interrupt,
        "__switch_to",
    } <= names.keys()
    assert "vfs_read" not in names
    for start, end in names.values():
        assert start < end
    start, end = names[BY_ARCH[image.arch].system_call]
    assert start == address(image, BY_ARCH[image.arch].system_call)


def test_nothing_of_the_hosts_own_calls_can_be_probed(each_image: KernelImage) -> None:
    image = each_image
    blacklisted = {entry.name.split(".")[0] for entry in image.blacklist}
    ours = {s.name.split(".")[0] for s in image.kallsyms.symbols if s.is_text and s.name.startswith("host_")}
    assert {"host_task_create", "host_attach_pid", "host_call", "host_park"} <= ours
    inside = {name for name in ours if str(image.kallsyms.lookup(address(image, name))).startswith(name)}
    assert inside - blacklisted == set()


def test_the_abi_table_speaks_of_this_image(each_image: KernelImage) -> None:
    image = each_image
    assert image.abi["pt_regs.size"] == BY_ARCH[image.arch].pt_regs_size
    assert image.abi["init_stack.top"] == address(image, "init_stack") + image.abi["thread.size"]


def test_the_images_have_the_same_functions(image: KernelImage) -> None:
    """The images of all architectures have the same functions, except entry code, compiler helpers and events
    of x86.

    Prefixes of system calls are not compared.
    """

    def functions(of: KernelImage) -> set[str]:
        names = {symbol.name.split(".")[0] for symbol in of.kallsyms.symbols if symbol.is_text}
        return {re.sub(r"^__(x64|ia32|riscv)_sys_", "sys_", name) for name in names}

    other = load_image(arch="i386")
    assert functions(image) - functions(other) == {"startup_64", "x86_64_start_kernel", "do_syscall_64"}
    riscv = functions(load_image(arch="riscv64"))
    assert riscv == functions(load_image(arch="riscv64i"))
    assert functions(image) - riscv == X86_ALONE
    assert riscv - functions(image) == RISCV_ALONE


def test_banner(each_image: KernelImage) -> None:
    image = each_image
    assert image.version.startswith("Linux version 6.1.0-kprobefs ")
    assert image.version.endswith("\n")


def test_reading_outside_of_the_image_fails(image: KernelImage) -> None:
    with pytest.raises(KernelError, match="aren't in the image"):
        image.read(0x1000, 4)
    assert image.read(image.abi["init_stack.top"] - 8, 8) == bytes(8)


def test_an_architecture_without_image() -> None:
    with pytest.raises(KernelError) as error:
        load_image(arch="vax")
    assert error.value.errno == errno.ENOENT


def refuse(tmp_path: Path, data: bytes, match: str, arch: str = "x86_64") -> None:
    file = tmp_path / "vmlinux"
    file.write_bytes(data)
    with pytest.raises(KernelError, match=match) as error:
        load_image(file, arch)
    assert error.value.errno == errno.ENOEXEC


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d[:0], "no ELF magic"),
        (lambda d: b"#!/bin/sh\n" + d, "no ELF magic"),
        (lambda d: d[:10], "truncated ELF identification"),
        (lambda d: d[:4] + b"\7" + d[5:], "unknown ELF class 7"),
        (lambda d: d[:5] + b"\2" + d[6:], "not little-endian"),
        (lambda d: d[:40], "truncated: header"),
        (lambda d: d[: len(d) // 2], "truncated"),
        (lambda d: d[:-100], "truncated"),
        (lambda d: d[:18] + b"\xf3" + d[19:], "ELF machine 243, not for x86_64"),
        (lambda d: d[:32] + b"\xff" * 8 + d[40:], "truncated: program header"),
        (lambda d: d[:56] + b"\0\0" + d[58:], "no segment"),
        (lambda d: d[:62] + b"\xff\xff" + d[64:], "section names"),
        (lambda d: d[:60] + b"\0\0" + d[62:], "no symbol table"),
    ],
)
def test_foreign_and_broken_files_are_refused(tmp_path: Path, vmlinux: Path, change, match: str) -> None:  # type: ignore[no-untyped-def]
    refuse(tmp_path, change(vmlinux.read_bytes()), match)


def test_an_image_for_another_architecture_is_refused(tmp_path: Path, vmlinux: Path) -> None:
    refuse(tmp_path, vmlinux.read_bytes(), "not for riscv64", "riscv64")


def test_any_cut_is_an_error_of_ours(tmp_path: Path, vmlinux: Path) -> None:
    data = vmlinux.read_bytes()
    file = tmp_path / "vmlinux"
    for length in range(0, len(data), 4999):
        file.write_bytes(data[:length])
        with pytest.raises(KernelError):
            load_image(file)


def test_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, vmlinux: Path) -> None:
    rng = random.Random(1)
    data = vmlinux.read_bytes()
    tables = len(data) - 60_000
    file = tmp_path / "vmlinux"
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(3):
            where = rng.choice([rng.randrange(4, 344), rng.randrange(tables, len(data))])
            damaged[where] = rng.randrange(256)
        file.write_bytes(damaged)
        with contextlib.suppress(KernelError):
            load_image(file)


def test_32_bit_files_are_read() -> None:
    header = b"\x7fELF\1\1\1" + bytes(9)
    header += struct.pack("<HHIIIIIHHHHHH", 2, 3, 1, 0xC100_0000, 52, 0, 0, 52, 32, 1, 40, 0, 0)
    program = struct.pack("<IIIIIIII", 1, 84, 0xC100_0000, 0x100_0000, 4, 8, 5, 4096)
    elf = ElfFile(header + program + b"text")
    assert (elf.bits, elf.machine, elf.entry) == (32, 3, 0xC100_0000)
    (segment,) = elf.segments
    assert (segment.flags, segment.vaddr, segment.mem_size) == (5, 0xC100_0000, 8)
    assert elf.segment_data(segment) == b"text"
    assert elf.symbols == []
