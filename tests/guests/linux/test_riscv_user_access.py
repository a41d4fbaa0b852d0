"""The bit SUM of a riscv64 guest: user pages are inaccessible while SUM is clear, despite cached
translations.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator

import pytest

from emulated_kernel.guests.linux.pc.linux_machine import IDLE
from emulated_kernel.guests.linux.pc.riscv_cells import find_riscv_cells
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.machine.cpu.riscv import CAUSE_LOAD_FAULT
from emulated_kernel.machine.native import host_code
from emulated_kernel.machine.native.sum_words import SUM

KERNEL = 0xFFFFFFC000000000
"""Virtual address of the physical address 0; the kernel's part of the tables is one large page."""
CODE, HANDLER, ROOT, TABLES, USER = 0x10000, 0x20000, 0x1000, (0x2000, 0x3000), 0x100000
HIGH, HIGH_TABLES = KERNEL + (1 << 30), (0x4000, 0x5000)
"""Virtual address of a kernel page, and physical addresses of the two page tables that map only this page."""
FIRST, PAGES = 0x600000, 400
"""Virtual address of the first user page, and number of user pages: more than the emulator's TLB holds."""
CSRS, CSRC = 0x100FA073, 0x100FB073
LISTING = (
    CSRS,  # csrs sstatus, t6
    0x0005B503,  # loop: ld a0, 0(a1)
    0x00C585B3,  # add a1, a1, a2
    0xFFF68693,  # addi a3, a3, -1
    0xFE069AE3,  # bnez a3, loop
    CSRC,  # csrc sstatus, t6
    0x00073783,  # ld a5, 0(a4)
    0x10500073,  # wfi
)
SITES = {f"{KERNEL + CODE + 4 * at:x}": LISTING[at] for at in (0, 5)}
VALID, WRITABLE, ANY, FOR_USER, USED = 1, 4, 0xE, 0x10, 0xC0


def entry(pa: int, rights: int) -> bytes:
    return struct.pack("<Q", pa >> 2 | rights | VALID)


@pytest.fixture(params=[True, False], ids=["eased", "as the emulator does it"])
def machine(request: pytest.FixtureRequest) -> Iterator[RiscvMachine]:
    ram = mmap.mmap(-1, 4 << 20)
    made = RiscvMachine(ram, 1, find_riscv_cells(), 10.0)
    ram[CODE : CODE + 4 * len(LISTING)] = struct.pack(f"<{len(LISTING)}I", *LISTING)
    ram[HANDLER : HANDLER + 4] = struct.pack("<I", LISTING[-1])
    ram[ROOT : ROOT + 8] = entry(TABLES[0], 0)
    ram[ROOT + 8 * 256 : ROOT + 8 * 258] = entry(0, ANY | USED) + entry(HIGH_TABLES[0], 0)
    ram[TABLES[0] + 8 * 3 : TABLES[0] + 8 * 4] = entry(TABLES[1], 0)
    ram[HIGH_TABLES[0] : HIGH_TABLES[0] + 8] = entry(HIGH_TABLES[1], 0)
    ram[HIGH_TABLES[1] : HIGH_TABLES[1] + 8] = entry(USER, ANY | USED)
    for page in range(PAGES):
        at, slot = USER + page * 4096, TABLES[1] + 8 * page
        ram[slot : slot + 8] = entry(at, WRITABLE | 2 | FOR_USER | USED)
        ram[at : at + 8] = struct.pack("<Q", 1000 + page)
    made.cpu.power_on(KERNEL + CODE, 0)
    made.cpu._satp[0] = 8 << 60 | ROOT >> 12
    made.cpu._stvec[0] = KERNEL + HANDLER
    if request.param:
        made.ease_user_access(SITES)
    yield made
    made.close()


def access(machine: RiscvMachine, pages: int, then: int) -> int | None:
    """Read `pages` user pages while SUM is set, and then the word at the address `then` while SUM is clear.

    Return this word, or None if the access faults.
    """
    regs = machine.regs
    machine.last_exception = None
    for name, value in {"t6": SUM, "a1": FIRST, "a2": 4096, "a3": pages, "a4": then}.items():
        regs.set(name, value)
    regs.ip = KERNEL + CODE
    assert machine.run() is IDLE
    assert regs.get("a0") == 1000 + pages - 1
    if machine.last_exception is None:
        return regs.get("a5")
    assert (machine.last_exception.error_code, machine.last_exception.cr2) == (CAUSE_LOAD_FAULT, then)
    assert regs.ip - KERNEL - HANDLER in (0, 4)
    return None


def spares(machine: RiscvMachine) -> bool:
    return bool(machine.user_access._all)


@pytest.mark.parametrize("pages", [1, 3, 70, PAGES])
def test_no_user_page_is_accessible_without_it(machine: RiscvMachine, pages: int) -> None:
    before = machine.user_access.spared
    probed = sorted({0, 1, 2, *range(0, pages, 7), *range(max(0, pages - 12), pages)} & set(range(pages)))
    for page in probed:
        assert access(machine, pages, FIRST + 4096 * page) is None
    assert access(machine, pages, HIGH) == 1000
    runs = len(probed) + 1
    assert machine.user_access.spared - before == (2 * runs if spares(machine) else 0)


def test_translations_of_kernel_memory_are_kept(machine: RiscvMachine) -> None:
    """With eased access, a change of SUM keeps the emulator's translations of kernel pages.

    Otherwise, the emulator flushes all translations at a change of SUM.
    """
    assert access(machine, 1, HIGH) == 1000
    slot = HIGH_TABLES[1]
    machine.memory.ram[slot : slot + 8] = entry(USER + 4096, ANY | USED)
    assert access(machine, 1, HIGH) == (1000 if spares(machine) else 1001)
    machine.engine.flush_tlb()
    assert access(machine, 1, HIGH) == 1001


def test_the_number_of_used_entries_stays_right(machine: RiscvMachine) -> None:
    """Dropped user pages are not counted as used entries.

    Otherwise the emulator would enlarge its table without end.
    """
    for _ in range(5):
        access(machine, PAGES, HIGH)
    if not spares(machine):
        return
    words = machine.user_access._all[0]
    last, table = struct.unpack("<QQ", ctypes.string_at(words.tlb, 16))
    entries = ctypes.string_at(table, last + 64)
    used = sum(entries[at : at + 24] != b"\xff" * 24 for at in range(0, len(entries), 64))
    assert struct.unpack("<Q", ctypes.string_at(words.used, 8)) == (used,)
    assert last + 64 <= 64 * 1024


def test_a_host_without_routines_leaves_it_to_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_code.PYTHON_TRAPS, "1")
    made = RiscvMachine(mmap.mmap(-1, 4 << 20), 1, find_riscv_cells(), 10.0)
    made.ease_user_access(SITES)
    assert not spares(made)
    made.close()
