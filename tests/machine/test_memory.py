"""Guest memory as the host reads, writes and maps it, compared with what the guest sees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.paging import LARGE_PAGE_SIZE, X86PageTables
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import Prot
from tests.machine.guests import DATA, LAYOUT, RODATA, TEXT, asm, boot
from tests.sample import fewer

RW = Prot.READ | Prot.WRITE
BASE = 0xFFFF_9000_0000_0000
PAGE = 4096


def _memory() -> Memory:
    return Memory(16 << 20, 4 << 20, X86PageTables, lambda: None)


def _walk(memory: Memory, va: int) -> tuple[int, int] | None:
    """Return (physical address, entry) as the CPU's page walker finds them, or None."""
    table = memory.tables.root
    for shift in (39, 30, 21, 12):
        slot = table + (va >> shift & 511) * 8
        entry = int.from_bytes(memory.ram[slot : slot + 8], "little")
        if not entry & 1:
            return None
        table = entry & 0x000FFFFFFFFFF000
        if shift == 12 or entry & 0x80:
            return table + va % (1 << shift), entry
    raise AssertionError


def test_typed_access() -> None:
    memory = boot().memory
    memory.write_word(DATA, 0x1122334455667788)
    assert memory.read(DATA + 1, 1)[0] == 0x77
    assert memory.read(DATA, 2) == b"\x88\x77"
    assert memory.read_u32(DATA + 4) == 0x11223344
    assert memory.read_u64(DATA) == 0x1122334455667788
    memory.write_u32(DATA, -1)
    assert memory.read_u64(DATA) == 0x11223344FFFFFFFF
    assert memory.read_u64(LAYOUT.direct_map + memory.translate(DATA)) == 0x11223344FFFFFFFF


def test_cstring() -> None:
    memory = boot().memory
    memory.write(DATA + PAGE - 3, b"abcdef\0x")
    assert memory.read_cstring(DATA + PAGE - 3) == b"abcdef"
    assert memory.read_cstring(DATA + PAGE - 3, 4) == b"abcd"
    assert memory.read_cstring(DATA + PAGE - 3, 6) == b"abcdef"
    memory.write(DATA + 4 * PAGE - 2, b"xy")
    with pytest.raises(MemoryFault) as caught:
        memory.read_cstring(DATA + 4 * PAGE - 2)
    assert caught.value.address == DATA + 4 * PAGE


@pytest.mark.parametrize(
    "va", [TEXT, RODATA, LAYOUT.direct_map + 0x1000000, LAYOUT.direct_map + 0x1004000, 0, BASE]
)
def test_writes_the_guest_could_not_do_are_refused(va: int) -> None:
    memory = boot().memory
    with pytest.raises(MemoryFault):
        memory.write(va, b"x")
    with pytest.raises(MemoryFault):
        memory.view(va, 1)


def test_write_over_a_border_is_all_or_nothing() -> None:
    memory = boot().memory
    end = DATA + 4 * PAGE
    memory.write(end - 4, b"1234")
    with pytest.raises(MemoryFault) as caught:
        memory.write(end - 4, b"abcdefgh")
    assert caught.value.address == end
    assert memory.read(end - 4, 4) == b"1234"
    with pytest.raises(MemoryFault):
        memory.read(end - 4, 8)


def test_guest_sees_mapping_changes_at_once() -> None:
    source = f"movabs rbx, {BASE:#x}; again: mov rax, [rbx]; hlt; mov [rbx], rcx; hlt; jmp again"
    machine = boot(source, handler=None)
    memory = machine.memory
    first, second = memory.host_pages.alloc(PAGE), memory.host_pages.alloc(PAGE)
    memory.map(BASE, first, PAGE, RW)
    memory.write_word(BASE, 1)
    machine.run()
    assert machine.regs.ax == 1
    machine.regs.cx = 7
    machine.run()
    assert memory.read_u64(BASE) == 7
    memory.unmap(BASE, PAGE)
    memory.map(BASE, second, PAGE, Prot.READ)
    machine.run()
    assert machine.regs.ax == 0
    trap = machine.run()
    assert (trap.vector, trap.error_code, trap.cr2) == (14, 3, BASE)
    memory.unmap(BASE, PAGE)
    memory.map(BASE, first, PAGE, RW)
    machine.run()
    assert memory.read_u64(BASE) == 7
    memory.unmap(BASE, PAGE)
    trap = machine.run()
    assert (trap.vector, trap.error_code, trap.cr2) == (14, 0, BASE)


def test_large_pages_are_split_where_rights_change() -> None:
    memory = _memory()
    memory.map(BASE, 0, 2 * LARGE_PAGE_SIZE, RW)
    assert memory.tables.root
    walked = _walk(memory, BASE + 5 * PAGE)
    assert walked is not None
    assert walked[1] & 0x80
    memory.unmap(BASE + 5 * PAGE, 2 * PAGE)
    memory.map(BASE + 5 * PAGE, 5 * PAGE, 2 * PAGE, Prot.READ)
    memory.unmap(BASE + 9 * PAGE, PAGE)
    for page in range(512):
        walked = _walk(memory, BASE + page * PAGE)
        if page == 9:
            assert walked is None
            continue
        assert walked is not None
        assert walked[0] == page * PAGE
        assert bool(walked[1] & 2) == (page not in (5, 6))
        assert walked[1] >> 63


def test_large_pages_go_around_tables_and_over_their_ends() -> None:
    """Seven large pages across a border of 1 GiB are mapped right, although one of them has a table of small
    pages.
    """
    memory = _memory()
    start = (BASE & -(1 << 30)) + (1 << 30) - 2 * LARGE_PAGE_SIZE
    middle = start + 4 * LARGE_PAGE_SIZE
    memory.map(middle, 0, PAGE, RW)
    memory.unmap(middle, PAGE)
    memory.map(start, 0, 7 * LARGE_PAGE_SIZE, RW)
    for page in range(7):
        va = start + page * LARGE_PAGE_SIZE
        for at in (va, va + 511 * PAGE):
            walked = _walk(memory, at)
            assert walked is not None
            assert walked[0] == at - start
            assert bool(walked[1] & 0x80) == (va != middle)
    assert _walk(memory, start - PAGE) is None
    assert _walk(memory, start + 7 * LARGE_PAGE_SIZE) is None


ACTIONS = st.sampled_from(["map", "unmap"])
PIECES = st.lists(st.tuples(ACTIONS, st.integers(0, 1100), st.integers(1, 600), st.booleans()), max_size=12)


@settings(max_examples=fewer(60, 3))
@given(PIECES)
def test_host_and_page_walker_agree(steps: list[tuple[str, int, int, bool]]) -> None:
    """After any sequence of mapping calls, translate() and the page tables agree on every page."""
    memory = _memory()
    model: dict[int, tuple[int, bool]] = {}
    for action, page, count, writable in steps:
        va, size, pages = BASE + page * PAGE, count * PAGE, range(page, page + count)
        prot = RW if writable else Prot.READ
        try:
            if action == "map":
                memory.map(va, page % 512 * PAGE, size, prot)
                model.update({p: ((page % 512 + p - page) * PAGE, writable) for p in pages})
            else:
                memory.unmap(va, size)
                for p in pages:
                    del model[p]
        except MemoryFault:
            assert any(p in model for p in pages) if action == "map" else any(p not in model for p in pages)
    for page in range(0, 1700):
        walked, where = _walk(memory, BASE + page * PAGE), memory.find(BASE + page * PAGE)
        if page not in model:
            assert walked is None
            assert where is None
            continue
        assert walked is not None
        assert where is not None
        assert memory.translate(BASE + page * PAGE) == walked[0] == model[page][0]
        assert bool(walked[1] & 2) == bool(where.prot & Prot.WRITE) == model[page][1]


@settings(max_examples=fewer(100, 4))
@given(st.lists(st.one_of(st.integers(1, 200), st.none()), max_size=60))
def test_pool_never_gives_the_same_place_twice(steps: list[int | None]) -> None:
    pool = UnitPool(0x1000, 64 * 16, 16)
    held: dict[int, int] = {}
    for size in steps:
        if size is None:
            if held:
                address, length = held.popitem()
                assert pool.free(address) == length
            continue
        try:
            address = pool.alloc(size)
        except HardwareError:
            continue
        length = -(-size // 16) * 16
        assert address >= 0x1000
        assert address + length <= pool.end
        assert all(address + length <= a or a + n <= address for a, n in held.items())
        held[address] = length
    assert pool.used == sum(held.values())
    with pytest.raises(HardwareError):
        pool.free(0x999)


def test_user_buffers_are_writable_by_both_sides() -> None:
    machine = boot(f"movabs rbx, {LAYOUT.user_buffers:#x}; mov rax, [rbx]; mov [rbx+8], rax; hlt")
    va = machine.user_buffers.alloc(3 * PAGE)
    assert va == LAYOUT.user_buffers
    machine.memory.write_word(va, 42)
    machine.run()
    assert machine.memory.read_u64(va + 8) == 42
    assert machine.user_buffers.free(va) == 3 * PAGE


def test_guest_code_is_where_the_image_says() -> None:
    machine = boot("nop; hlt")
    assert machine.memory.read(TEXT + 0x1000, 2) == asm("nop; hlt")


def test_host_pages_are_zeroed_and_shared_with_the_guest() -> None:
    machine = boot("mov [rdi], rdi; hlt")
    va = machine.alloc_pages(3 * PAGE)
    machine.memory.write(va, b"x" * 3 * PAGE)
    machine.free_pages(va)
    machine.memory.host_pages._next = 0
    again = machine.alloc_pages(2 * PAGE + 1)
    assert again == va
    assert machine.memory.read(va, 3 * PAGE) == bytes(3 * PAGE)
    machine.regs.di = va
    machine.run()
    assert machine.memory.view(va, 8).cast("Q")[0] == va
    with pytest.raises(HardwareError):
        machine.free_pages(va + PAGE)


def test_a_large_window_is_searched_to_its_end() -> None:
    pool = UnitPool(0, 20_000, 1)
    assert [*pool.free_parts(0, 20_000)] == [(0, 20_000)]
    pool = UnitPool(0, 20_000, 1)
    assert [pool.alloc(3000) for _ in range(6)] == [*range(0, 18_000, 3000)]
    with pytest.raises(HardwareError):
        pool.alloc(3000)
    assert [*pool.free_parts(0, 20_000)] == [(18_000, 2000)]
    pool.free(6000)
    assert pool.alloc(3000) == 6000
    assert UnitPool(0, 20_000, 1).alloc(20_000) == 0
