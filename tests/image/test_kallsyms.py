"""Symbols: the order of aliases, sizes, lookups, and the symbol table that is part of the image."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.kallsyms import Kallsyms, Symbol

from .guest import USER_BUFFER, Guest


def table(*symbols: tuple[int, str, str]) -> Kallsyms:
    return Kallsyms([Symbol(name, address, letter) for address, letter, name in symbols], 0x1000, 0x9000)


def test_the_first_alias_is_shown() -> None:
    aliases = table(
        (0x2000, "T", "__copy"),
        (0x2000, "W", "a_weak_one"),
        (0x2000, "T", "__copy_start"),
        (0x2000, "T", "copy"),
        (0x2000, "t", "_copy"),
        (0x2000, "T", "append"),
    )
    names = [symbol.name for symbol in aliases.symbols]
    assert names == ["append", "copy", "_copy", "__copy", "__copy_start", "a_weak_one"]
    assert str(aliases.lookup(0x2004)) == "append+0x4/0x7000"


def test_all_names_at_an_address_are_found() -> None:
    symbols = [Symbol("b", 8, "T"), Symbol("a", 8, "T"), Symbol("c", 16, "T"), Symbol("d", 0, "T")]
    table = Kallsyms(symbols)
    assert [table.names_at(address) for address in (0, 8, 9, 16, 17)] == [["d"], ["a", "b"], [], ["c"], []]


def test_sizes_go_to_the_next_higher_address() -> None:
    symbols = table((0x2000, "T", "a"), (0x2000, "T", "b"), (0x2010, "T", "c"), (0x8000, "D", "d"))
    assert [symbol.size for symbol in symbols.symbols] == [0x10, 0x10, 0x5FF0, 0x1000]


@pytest.mark.parametrize("address", [0, 0xFFF, 0x1000, 0x1FFF, 0x9000, 1 << 63])
def test_addresses_that_no_symbol_has(address: int) -> None:
    assert table((0x2000, "T", "a")).lookup(address) is None


def test_many_addresses_are_located_as_single_ones() -> None:
    """locate_each() finds the same symbols as single lookups.

    The addresses are before, between and after symbols, and at addresses that several symbols share.
    """
    places = ((0x80, "A", "offset"), (0x2000, "T", "a"), (0x2000, "T", "b"), (0x2010, "T", "c"))
    symbols = table(*places, (0x8000, "D", "d"))
    addresses = (0, 0x90, 0xFFF, 0x1000, 0x2000, 0x2000, 0x200F, 0x2010, 0x7FFF, 0x8FFF, 0x9000, 1 << 63)
    for each in (symbols, Kallsyms([], 0x1000, 0x9000)):
        single = [each.lookup(address) for address in addresses]
        expected = [None if where is None else (where.name, where.offset, where.module) for where in single]
        assert [*each.locate_each(addresses)] == expected


def test_the_symbols_of_a_kernel_are_located(image: KernelImage) -> None:
    addresses = sorted({each + way for each in image.kallsyms.table.addresses for way in (0, 1)})
    for address, found in zip(addresses, image.kallsyms.locate_each(addresses), strict=True):
        where = image.kallsyms.lookup(address)
        assert found == (where and (where.name, where.offset, where.module))


def test_per_cpu_offsets_are_no_addresses(image: KernelImage) -> None:
    assert image.kallsyms.lookup_name("current_task") is not None
    assert image.kallsyms.lookup(image.abi["percpu.current_task"]) is None


def test_names_that_occur_twice(image: KernelImage) -> None:
    assert image.kallsyms.count_name("init_once") == 2
    assert image.kallsyms.count_name("vfs_read") == 1
    assert image.kallsyms.count_name("no_such_symbol") == 0
    first, second = image.kallsyms.by_name("init_once")
    assert image.kallsyms.lookup_name("init_once") == first.address < second.address


def test_aliases_of_the_image(image: KernelImage) -> None:
    assert image.kallsyms.lookup_name("jiffies") == image.kallsyms.lookup_name("jiffies_64")
    memcpy = image.kallsyms.lookup_name("__memcpy")
    assert memcpy is not None
    found = image.kallsyms.lookup(memcpy)
    assert found is not None
    assert found.name == "memcpy"


def test_no_symbol_is_a_local_label(image: KernelImage) -> None:
    assert not [s.name for s in image.kallsyms.symbols if s.name.startswith((".", "$"))]
    assert not [s.name for s in image.kallsyms.symbols if s.name.endswith(".c")]
    assert all(s.type in "AaTtDdBbRrWwVv" for s in image.kallsyms.symbols)


def test_the_text_of_proc_kallsyms(image: KernelImage) -> None:
    lines = image.kallsyms.kallsyms_text().splitlines()
    assert "ffffffff81000000 T startup_64" in lines
    assert len(lines) == len(image.kallsyms)
    hidden = image.kallsyms.kallsyms_text(zero_addresses=True).splitlines()
    assert [line[16:] for line in hidden] == [line[16:] for line in lines]
    assert {line[:17] for line in hidden} == {"0000000000000000 "}


def test_the_guest_knows_the_same_symbols(guest: Guest, task: int) -> None:
    symbols = guest.image.kallsyms
    for name in ("vfs_read", "init_once", "_stext", "__memcpy", "linux_banner", "current_task"):
        guest.write(USER_BUFFER, name.encode() + b"\0")
        found = guest.host_call(task, "kallsyms_lookup_name", USER_BUFFER)
        assert found is not None
        assert found & (1 << 64) - 1 == symbols.lookup_name(name)
    for name in ("vfs_read", "__memcpy", "_stext", "_end", "linux_banner"):
        address = symbols.lookup_name(name)
        assert address is not None
        for offset in (-1, 0, 3):
            guest.host_call(task, "sprint_symbol", USER_BUFFER, address + offset)
            text = guest.read(USER_BUFFER, 200).split(b"\0")[0].decode()
            assert text == str(symbols.lookup(address + offset) or f"{address + offset:#x}")


def test_every_symbol_is_in_the_guests_table(guest: Guest) -> None:
    count = guest.u32(guest_table(guest, "kallsyms_num_syms"))
    raw = guest.read(guest_table(guest, "kallsyms_addresses"), 8 * count)
    assert list(struct.unpack(f"<{count}Q", raw)) == [s.address for s in guest.image.kallsyms.symbols]


def guest_table(guest: Guest, name: str) -> int:
    """Return the address of the symbol `name` in the guest's own symbol table. Only the image's ELF symbols
    contain this symbol.
    """
    from emulated_kernel.image.elf import ElfFile

    elf = ElfFile(guest.image.path.read_bytes())
    return next(symbol.value for symbol in elf.symbols if symbol.name == name)
