"""Registers and flags that the liveness analysis calls dead: their values have no effect on the state at the
end of the code.
"""

from __future__ import annotations

import random

import pytest
import unicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from unicorn import x86_const as const

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.liveness import Liveness
from tests.arch import engines
from tests.sample import fewer

ADDR = 0x10_0000
STACK = 0x20_0800
POOL = """
    89d8 88d8 6689d8 0f44c3 480f45d1 31c0 30c0 0f94c0 0f9fc1 f7e3 48f7e9 480fbcc3 f3480fb8c3 0fb1cb 0fc1cb
    d3e0 48d3fa c1e003 c1e000 d0d8 480fa5d8 0fa4d803 4839c3 4801d8 11d8 19c0 21cb 09d1 85c0 a801 0fbae003
    87d8 98 4898 99 0fc8 480fbec3 0fb7d3 8d0458 488d5301 fec0 48ffcb f7d8 f7d3 f5 f8 f9 9c58 7200 eb00
    b001 b800000000 66b80100 48c7c101000000 0fafc3 486bd907 5350585b
"""
INSNS = [bytes.fromhex(code) for code in POOL.split()]
REGISTERS = [name for name in REGISTER_NAMES if name != "sp"]
IDS = {
    name: getattr(const, "UC_X86_REG_" + (name if name[1:].isdigit() else "r" + name).upper())
    for name in REGISTERS
}
STATUS = 0x8D5


def run(code: bytes, values: dict[str, int], flags: int) -> tuple[int, ...]:
    with engines.lent(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64) as uc:
        uc.mem_map(ADDR, 0x1000)
        uc.mem_map(STACK & ~0xFFF, 0x1000)
        uc.mem_write(ADDR, code)
        uc.reg_write(const.UC_X86_REG_RSP, STACK)
        for name, value in values.items():
            uc.reg_write(IDS[name], value)
        uc.reg_write(const.UC_X86_REG_EFLAGS, flags | 2)
        uc.emu_start(ADDR, ADDR + len(code))
        flags_now = uc.reg_read(const.UC_X86_REG_EFLAGS)
        return (*(uc.reg_read(number) for number in IDS.values()), flags_now)


def live(code: str, offset: int = 0, **fields: object) -> LiveRegisters:
    data = bytes.fromhex(code.replace(" ", ""))
    return Liveness(Function("f", ADDR, len(data), data, **fields)).at(ADDR + offset)  # type: ignore[arg-type]


@settings(max_examples=fewer(400, 4))
@given(insns=st.lists(st.sampled_from(INSNS), min_size=1, max_size=8), number=st.integers(0, 1 << 32))
def test_dead_state_does_not_matter(insns: list[bytes], number: int) -> None:
    code = b"".join(insns)
    rng = random.Random(number)
    found = Liveness(Function("f", ADDR, len(code), code)).at(ADDR)
    values = {name: rng.choice((0, 1, 0xFF, rng.getrandbits(64))) for name in REGISTERS}
    changed = {n: v if n in found.registers else rng.getrandbits(64) for n, v in values.items()}
    flags = rng.getrandbits(12) & STATUS
    other = flags if found.flags else flags ^ STATUS
    assert run(code, values, flags) == run(code, changed, other)


def test_overwritten_registers_are_dead() -> None:
    found = live("31c0 b901000000 4889d3 c3")
    assert set(REGISTER_NAMES) - found.registers == {"ax", "cx", "bx"}
    assert not found.flags


@pytest.mark.parametrize("code", ["b001 c3", "66b80100 c3", "480f44c3 c3", "480fbcc3 c3", "d3e0 c3"])
def test_partial_or_conditional_write_keeps_it_live(code: str) -> None:
    assert "ax" in live(code).registers


@pytest.mark.parametrize("code", ["d3e0 f7e3 c3", "d3e0 c3", "c1e000 c3", "d3c0 c3", "f3a6 c3", "90 c3"])
def test_flags_stay_live_where_the_write_may_not_happen(code: str) -> None:
    assert live(code).flags


@pytest.mark.parametrize("leave", ["c3", "ffe0", "f4", "e800000000", "0f0b", "cc", "e910000000"])
def test_all_is_live_where_control_leaves(leave: str) -> None:
    assert live(leave) == LiveRegisters(frozenset(REGISTER_NAMES), True)


def test_both_ways_of_a_branch_count() -> None:
    assert "bx" in live("7405 bb01000000 c3").registers
    assert "bx" not in live("7400 bb01000000 c3").registers


def test_loop_reads_what_the_last_round_left() -> None:
    """Registers that a further round of a loop reads are live.

    The code is `add bx to ax; dec cx; jnz back`. After the loop, all three registers are overwritten, and so
    they are dead.
    """
    code = "4801d8 48ffc9 75f8 31db 31c9 31c0 c3"
    assert {"ax", "bx", "cx"} <= live(code).registers
    assert live(code, 8).registers.isdisjoint({"ax", "bx", "cx"})


def test_fixup_may_see_everything() -> None:
    entries = frozenset({ADDR})
    assert "ax" in live("488b07 c3", exception_entries=entries).registers
    assert "ax" not in live("488b07 c3").registers


def test_unknown_address_is_all_live() -> None:
    assert live("31c0 c3", 1) == LiveRegisters(frozenset(REGISTER_NAMES), True)
