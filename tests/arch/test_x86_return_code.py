"""x86 code of return hooks: atomic changes of words in memory, and trampolines, which continue at the caller
or in Python.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Label, Program
from emulated_kernel.arch.x86.arch import I386, X86, X86_64
from emulated_kernel.arch.x86.encoder import Encoder
from emulated_kernel.arch.x86.handler_code import save_all, save_live
from tests.arch.placed import going_on
from tests.arch.random_programs import PROBE, Case, LockedMaker
from tests.arch.test_x86_handler_code import FRAMES, NAMES, PER_CPU_BASE, check, make
from tests.sample import fewer

ARCHS = {64: X86_64(), 32: I386()}
BUFFER = 0xA000_0000


def _case(seed: int, bits: int) -> tuple[random.Random, Case]:
    rng = random.Random(seed)
    case = make(rng, bits)
    names = [name for name in (*NAMES[bits], "flags", "ip") if name != "sp"]
    return rng, replace(case, program=LockedMaker(rng, bits, names, PER_CPU_BASE[bits]).make())


@pytest.mark.parametrize("bits", [64, 32])
def test_locked_words_between_what_is_live(bits: int) -> None:
    for seed in range(fewer(300, 2)):
        rng, case = _case(seed, bits)
        registers = frozenset(name for name in NAMES[bits] if rng.random() < 0.5) | {"sp"}
        live = LiveRegisters(registers, rng.random() < 0.5)
        check(case, save_live(case.program, Encoder(bits), live, {"ip": PROBE + 1}), live)


@pytest.mark.parametrize("bits", [64, 32])
def test_locked_words_in_a_frame(bits: int) -> None:
    frame = FRAMES[bits]
    for seed in range(fewer(300, 2)):
        _, case = _case(seed, bits)
        handler = save_all(case.program, frame, {"ip": PROBE + 1, **frame.fixed})
        check(case, handler, LiveRegisters(frozenset(NAMES[bits]), True), frame)


def _mnemonics(arch: X86, code: bytes) -> list[str]:
    return [line.split(":")[1][31:].split()[0].rstrip("lq") for line in arch.disassemble(code, BUFFER)]


def _dispatch(target: int) -> Program:
    python = Label(0)
    return (
        ir.LoadPerCpu(0, 0, 4),
        ir.BranchImmediate(ir.Condition.EQ, 0, target, python),
        ir.JumpTo(0),
        ir.Place(python),
    )


@pytest.mark.parametrize("bits", [64, 32])
def test_a_trampoline_leaves_registers_to_the_handler(bits: int) -> None:
    """If a trampoline saves no registers, it pushes its own address, and continues through a register that no
    caller reads.
    """
    arch = ARCHS[bits]
    made = arch.returns.dispatch(_dispatch(5), BUFFER, saves_all=False)
    assert made.finish is None
    code = _mnemonics(arch, made.code[made.entry :])
    assert code[:4] == ["push", "mov", "cmp", "je"]
    assert "jmp" in code[4:6]
    own = (BUFFER + made.entry).to_bytes(4, "little")
    assert made.code[made.entry : made.entry + 5] == b"\x68" + own
    assert made.code[made.trap] == 0xCC


@pytest.mark.parametrize("bits", [64, 32])
def test_a_trampoline_may_save_all(bits: int) -> None:
    """A trampoline may save all registers before its program runs.

    The handler then works on saved registers, and ends with a jump to the code that restores the registers.
    """
    arch = ARCHS[bits]
    made = arch.returns.dispatch(_dispatch(5), BUFFER, saves_all=True)
    assert made.finish is not None
    before = _mnemonics(arch, made.code[made.entry :])
    general = 15 if bits == 64 else 7
    assert before[: before.index("mov")].count("push") == 1 + general
    finish = _mnemonics(arch, made.code[made.finish :])
    assert (finish.count("pop"), finish[-1]) == (general, "ret")
    handler = arch.returns.handler((ir.GetRegister(0, "ax"), ir.Store(0, 0, 0, 4)), saves_all=True)
    placed = going_on(arch, handler, BUFFER + 0x1000, BUFFER + made.finish)
    # The handler takes the value from the frame, because the trampoline has overwritten registers.
    assert _mnemonics(arch, placed.code) == ["mov", "mov", "jmp"]


@pytest.mark.parametrize("bits", [64, 32])
def test_a_handler_returns(bits: int) -> None:
    arch = ARCHS[bits]
    handler = arch.returns.handler((ir.SetImmediate(0, 1),), saves_all=False)
    assert _mnemonics(arch, handler.code) == ["mov", "ret"]
