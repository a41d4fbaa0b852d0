"""Alternatives: the image that runs has the instructions that a kernel would write at boot."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.image.alternatives import Alternative, alternatives, replaced
from emulated_kernel.image.builtin_image import KernelImage, load_image
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig

MFENCE = b"\x0f\xae\xf0"
SITE, PLACE = 0x1000, 0x5000


def entries(image: KernelImage) -> list[Alternative]:
    first, last = (image.kallsyms.lookup_name(f"__alt_instructions{end}") for end in ("", "_end"))
    assert first is not None
    assert last is not None
    return list(alternatives(first, image.read(first, last - first)))


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_the_image_has_the_better_instructions(arch: str) -> None:
    image = load_image(arch=arch)
    places = entries(image)
    assert places
    elf = ElfFile(image.path.read_bytes())
    text = next(segment for segment in elf.segments if segment.flags & 1)
    for entry in places:
        in_file = elf.segment_data(text)[entry.site - text.vaddr :][: entry.size]
        now = image.read(entry.site, entry.size)
        assert in_file.startswith(b"\xf0\x83")
        assert now[:3] == MFENCE
        assert now[:3] == image.read(entry.replacement, entry.replacement_size)


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_they_run(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        (entry, *_) = entries(kernel.image)
        assert kernel.machine.memory.read(entry.site, 3) == MFENCE
        assert kernel.call("load_locks", 3) > 0


def test_a_relative_jump_keeps_its_target() -> None:
    """A relative jump in a replacement keeps its target, so its displacement changes at the site."""
    entry = Alternative(SITE, PLACE, 0, 9, 5)
    code = replaced(entry, b"\xe9" + struct.pack("<i", 0x2000 - (PLACE + 5)))
    assert SITE + 5 + struct.unpack_from("<i", code, 1)[0] == 0x2000
    assert code[5:] == b"\x0f\x1f\x40\x00"


@pytest.mark.parametrize("size", range(1, 20))
def test_the_rest_is_nops(size: int) -> None:
    code = replaced(Alternative(SITE, PLACE, 0, size, 1), b"\xc3")
    assert len(code) == size


def test_a_table_of_two() -> None:
    table = struct.pack("<iiHBB", 0x100, 0x200, 26, 6, 3) + struct.pack("<iiHBB", -8, 0x200, 1, 5, 0)
    assert list(alternatives(0x1000, table)) == [
        Alternative(0x1100, 0x1204, 26, 6, 3),
        Alternative(0x1004, 0x1210, 1, 5, 0),
    ]


def test_nothing_is_changed_without_a_table() -> None:
    assert list(alternatives(0, b"")) == []
    image = load_image(arch="riscv64")
    assert image.kallsyms.lookup_name("__alt_instructions") is None
