"""Damaged and foreign kernel images are refused with an error that names the fault."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from emulated_kernel.image.builtin_image import PREBUILT, load_image
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.sample import fewer

WHOLE = (PREBUILT / "x86_64" / "vmlinux").read_bytes()
DAMAGED = int(os.environ.get("KPROBEFS_DAMAGED", fewer(25, 2)))
"""Number of randomly damaged images that are booted; KPROBEFS_DAMAGED changes the number."""
E_MACHINE, E_ENTRY, E_PHOFF, E_PHENTSIZE, PROGRAM_HEADER = 18, 24, 32, 54, 56
P_FLAGS, P_PADDR, P_MEMSZ = 4, 24, 40


def refusal(data: bytes, tmp_path: Path) -> str:
    """Return the error message for a refused image.

    Assert that the error is a KernelError with ENOEXEC and one line of text.
    """
    file = tmp_path / "vmlinux"
    file.write_bytes(data)
    with pytest.raises(KernelError) as caught:
        Kernel(MachineConfig(image=file)).close()
    assert caught.value.name == "ENOEXEC"
    assert caught.value.strerror
    assert "\n" not in caught.value.strerror
    return caught.value.strerror


def edited(layout: str, offset: int, value: int) -> bytes:
    data = bytearray(WHOLE)
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


def header(segment: int, field: int) -> int:
    """Return the file offset of the field at offset `field` in program header number `segment`."""
    return int(struct.unpack_from("<Q", WHOLE, E_PHOFF)[0]) + segment * PROGRAM_HEADER + field


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no ELF magic"),
        (b"#!/bin/sh\n", "no ELF magic"),
        (WHOLE[:10], "truncated ELF identification"),
        (WHOLE[:60], "truncated: header ends at 0x40, the file at 0x3c"),
        (WHOLE[:-1], "truncated: section header"),
        (edited("<H", E_MACHINE, 183), "for ELF machine 183, not for x86_64"),
        (edited("<H", E_MACHINE, 3), "for ELF machine 3, not for x86_64"),
        (edited("<H", E_PHENTSIZE, 0), "segments with more bytes than the file"),
        (edited("<Q", header(0, P_MEMSZ), 1 << 56), "doesn't boot: a segment of "),
        (edited("<Q", header(1, P_PADDR), 0x1000000), "aren't in the image"),
        (edited("<Q", E_ENTRY, 0), "doesn't boot: "),
        (edited("<Q", E_ENTRY, 0xFFFFFFFF81000000 - 1), "doesn't boot: "),
        (edited("<I", header(0, P_FLAGS), 4), "doesn't boot: "),
        ((PREBUILT / "x86_64/modules/ktgt.ko").read_bytes(), "the image has no segment to load"),
        ((PREBUILT / "i386/vmlinux").read_bytes(), "for ELF machine 3, not for x86_64"),
        (Path("/proc/self/exe").read_bytes(), "the image "),
    ],
)
def test_what_is_wrong_is_named(data: bytes, why: str, tmp_path: Path) -> None:
    assert why in refusal(data, tmp_path)


def test_truncated_at_every_length() -> None:
    """An image that is cut off at any length is refused: the section headers at the end of the file are
    missing.
    """
    near_the_ends = [*range(4096), *range(len(WHOLE) - 4096, len(WHOLE))]
    for length in [*near_the_ends, *range(4096, len(WHOLE) - 4096, 61)]:
        with pytest.raises(KernelError, match="not a usable kernel image: "):
            ElfFile(WHOLE[:length])


@pytest.mark.slow
def test_other_bytes_boot_or_are_refused(tmp_path: Path) -> None:
    """An image with random damage boots or is refused with a KernelError, and no boot hangs."""
    dice = random.Random(3)
    file = tmp_path / "vmlinux"
    refused = 0
    for _ in range(DAMAGED):
        file.write_bytes(damaged(dice))
        try:
            with Kernel(MachineConfig(image=file)) as kernel:
                kernel.mount()
        except KernelError:
            refused += 1
    assert 0 < refused < DAMAGED


def damaged(dice: random.Random) -> bytes:
    """Return the image with flipped bits or an overwritten piece, in its first 1024 bytes or anywhere."""
    data = bytearray(WHOLE)
    end = dice.choice([0x400, len(data)])
    if dice.random() < 0.7:
        for _ in range(dice.choice([1, 1, 3, 30])):
            data[dice.randrange(end)] ^= 1 << dice.randrange(8)
    else:
        at, size = dice.randrange(end), dice.choice([8, 64, 4096])
        data[at : at + size] = bytes([dice.choice([0, 0xCC, 0xFF])]) * len(data[at : at + size])
    return bytes(data)


def test_a_panic_at_boot_is_told(tmp_path: Path) -> None:
    """An image whose first task crashes is refused with the message that the kernel does not boot."""
    file = tmp_path / "vmlinux"
    file.write_bytes(WHOLE)
    symbols = load_image(file).kallsyms
    address = symbols.lookup_name("kernel_init") or symbols.lookup_name("rest_init") or 0
    elf = ElfFile(WHOLE)
    (segment,) = (s for s in elf.segments if s.vaddr <= address < s.vaddr + s.file_size)
    # ud2
    broken = bytearray(WHOLE)
    offset = segment.offset + address - segment.vaddr
    broken[offset : offset + 2] = b"\x0f\x0b"
    assert "doesn't boot: " in refusal(bytes(broken), tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Kernel(MachineConfig(image=tmp_path / "none"))
    with pytest.raises(IsADirectoryError):
        Kernel(MachineConfig(image=tmp_path))
