"""Modules of the images: contents of their files, and a symbol table that changes with loading and
unloading.
"""

from __future__ import annotations

import json

import pytest

from emulated_kernel.image.build_images import MANIFEST, dependencies
from emulated_kernel.image.builtin_image import PREBUILT, KernelImage
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.live_image import LiveImage, Module
from emulated_kernel.image.text_tables import Range

BASE = 0xFFFFFFFFC0000000
ARCHITECTURES = sorted(path.parent.name for path in PREBUILT.glob("*/modules"))


def files_of(arch: str) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (PREBUILT / arch / "modules").glob("*.ko")}


def module(name: str, base: int, *symbols: tuple[str, int, int]) -> Module:
    """Return a module with text of 0x100 bytes at `base`, and init text after the text."""
    return Module(
        name=name,
        text=Range(base, base + 0x100),
        init_text=Range(base + 0x1000, base + 0x1100),
        data=(Range(base + 0x2000, base + 0x2100),),
        init_data=(),
        symbols=tuple(Symbol(symbol, base + offset, "t", size) for symbol, offset, size in symbols),
        ex_table=(),
        blacklist=(),
        mcount=frozenset({base, base + 0x1000}),
        bugs={},
        code={base: bytes(range(256)), base + 0x1000: bytes(256)},
        contents={base + 0x2000: bytes(256)},
    )


@pytest.fixture
def live(image: KernelImage) -> LiveImage[KernelImage]:
    return LiveImage(image)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_manifest_names_them_all(arch: str) -> None:
    manifest, files = json.loads(MANIFEST.read_text())[arch]["modules"], files_of(arch)
    assert set(manifest) == set(files) >= {"trace_printk", "ktgt", "twins", "counter", "counter_user"}
    assert {name: entry["depends"] for name, entry in manifest.items()} == dependencies(files)
    assert dependencies(files)["counter_user"] == ["counter"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(files_of("x86_64")))
def test_a_file_is_relocatable_and_says_its_name(name: str, arch: str) -> None:
    data = files_of(arch)[name]
    elf = ElfFile(data)
    assert elf.type == 1
    section = elf.sections[".modinfo"]
    info = data[section.offset : section.offset + section.size].split(b"\0")
    assert f"name={name}".encode() in info
    assert b"vermagic=6.1.0-kprobefs preempt mod_unload " in info
    assert {"init_module", "cleanup_module", "__this_module"} <= {symbol.name for symbol in elf.symbols}


class TestLookups:
    def test_by_name(self, live: LiveImage[KernelImage]) -> None:
        live.put(module("one", BASE, ("vfs_read", 0, 0x10), ("own", 0x10, 0xF0)))
        symbols = live.kallsyms
        core = symbols.lookup_name("vfs_read")
        assert core == live.core.kallsyms.by_name("vfs_read")[0].address < BASE
        assert symbols.count_name("vfs_read") == 2
        assert symbols.lookup_name("one:vfs_read") == BASE
        assert symbols.lookup_name("own") == symbols.lookup_name("one:own") == BASE + 0x10
        assert symbols.lookup_name("two:own") is None
        assert symbols.lookup_name("one:vfs_write") is None

    def test_by_address(self, live: LiveImage[KernelImage]) -> None:
        live.put(module("one", BASE, ("b_first", 0x10, 0xF0), ("a_alias", 0x10, 0xF0), ("late", 0x2000, 8)))
        assert str(live.kallsyms.lookup(BASE + 0x14)) == "b_first+0x4/0xf0 [one]"
        assert str(live.kallsyms.lookup(BASE + 0x2001)) == "late+0x1/0x8 [one]"
        assert live.kallsyms.lookup(BASE + 8) is None
        assert live.kallsyms.lookup(BASE + 0x100) is None
        assert live.kallsyms.lookup(BASE + 0x3000) is None

    def test_the_newest_module_first(self, live: LiveImage[KernelImage]) -> None:
        live.put(module("one", BASE, ("same", 0, 0x100)))
        live.put(module("two", BASE + 0x10000, ("same", 0, 0x100)))
        assert live.kallsyms.lookup_name("same") == BASE + 0x10000
        lines = live.kallsyms.kallsyms_text().splitlines()[-2:]
        assert lines == [f"{BASE + 0x10000:016x} t same\t[two]", f"{BASE:016x} t same\t[one]"]
        hidden = live.kallsyms.kallsyms_text(zero_addresses=True).splitlines()[-1]
        assert hidden == "0000000000000000 t same\t[one]"

    def test_after_it_went(self, live: LiveImage[KernelImage], image: KernelImage) -> None:
        live.put(module("one", BASE, ("own", 0, 0x100)))
        assert live.kallsyms.has_module("one")
        live.remove("one")
        assert not live.kallsyms.has_module("one")
        assert live.kallsyms.lookup_name("own") is None
        assert live.kallsyms.kallsyms_text() == image.kallsyms.kallsyms_text()
        assert live.mcount == image.mcount


def test_what_init_leaves(live: LiveImage[KernelImage]) -> None:
    whole = module("one", BASE, ("own", 0, 0x100), ("setup", 0x1000, 0x100), ("value", 0x2000, 8))
    live.put(whole)
    assert BASE + 0x1000 in live.mcount
    assert live.text_ranges[-1] == (BASE + 0x1000, BASE + 0x1100)
    live.put(whole.without_init())
    assert [symbol.name for symbol in live.find("one").symbols] == ["own", "value"]  # type: ignore[union-attr]
    assert BASE + 0x1000 not in live.mcount
    assert live.text_ranges[-1] == (BASE, BASE + 0x100)
    assert live.kallsyms.lookup(BASE + 0x1000) is None


def test_original_bytes(live: LiveImage[KernelImage], image: KernelImage) -> None:
    live.put(module("one", BASE))
    assert live.read(BASE + 16, 4) == bytes([16, 17, 18, 19])
    start = image.text_ranges[0].start
    assert live.read(start, 16) == image.read(start, 16)
