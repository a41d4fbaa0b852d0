"""Texts of instructions that capstone lacks, and listings with unknown instructions."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig

# Written by `llvm-mc --disassemble` of LLVM 14 for random registers; numbers above 9 are hexadecimal here.
LLVM = {
    0x2065A1B3: "sh1add gp, a1, t1",
    0x21B74833: "sh2add a6, a4, s11",
    0x20F16AB3: "sh3add s5, sp, a5",
    0x09610E3B: "add.uw t3, sp, s6",
    0x2186ABBB: "sh1add.uw s7, a3, s8",
    0x2027C4BB: "sh2add.uw s1, a5, sp",
    0x214C643B: "sh3add.uw s0, s8, s4",
    0x402FFBB3: "andn s7, t6, sp",
    0x40D4E533: "orn a0, s1, a3",
    0x40CE4F33: "xnor t5, t3, a2",
    0x0B11C8B3: "min a7, gp, a7",
    0x0AE55033: "minu zero, a0, a4",
    0x0ACEEC33: "max s8, t4, a2",
    0x0B2E76B3: "maxu a3, t3, s2",
    0x61E99633: "rol a2, s3, t5",
    0x61BFD933: "ror s2, t6, s11",
    0x60071EBB: "rolw t4, a4, zero",
    0x60E45CBB: "rorw s9, s0, a4",
    0x494197B3: "bclr a5, gp, s4",
    0x48B05CB3: "bext s9, zero, a1",
    0x69F493B3: "binv t2, s1, t6",
    0x29CA92B3: "bset t0, s5, t3",
    0x0AC992B3: "clmul t0, s3, a2",
    0x0B812E33: "clmulr t3, sp, s8",
    0x0B24B9B3: "clmulh s3, s1, s2",
    0x08644133: "pack sp, s0, t1",
    0x088A75B3: "packh a1, s4, s0",
    0x08224A3B: "packw s4, tp, sp",
    0x60049513: "clz a0, s1",
    0x601E1D13: "ctz s10, t3",
    0x60269893: "cpop a7, a3",
    0x60041E1B: "clzw t3, s0",
    0x6010191B: "ctzw s2, zero",
    0x6025949B: "cpopw s1, a1",
    0x604D1293: "sext.b t0, s10",
    0x605B9F13: "sext.h t5, s7",
    0x0803C33B: "zext.h t1, t2",
    0x28735193: "orc.b gp, t1",
    0x6B84DE93: "rev8 t4, s1",
    0x6876D693: "brev8 a3, a3",
    0x6283DE93: "rori t4, t2, 0x28",
    0x0A9A121B: "slli.uw tp, s4, 0x29",
    0x4A5B1113: "bclri sp, s6, 0x25",
    0x486C5413: "bexti s0, s8, 6",
    0x69989A93: "binvi s5, a7, 0x19",
    0x29969993: "bseti s3, a3, 0x19",
}
UNKNOWN = 0x2E040857
"""A vector instruction, vxor.vv: neither capstone nor our tables know it."""
BLOCKS = {
    0x000D200F: "cbo.inval (s10)",
    0x0013200F: "cbo.clean (t1)",
    0x0023200F: "cbo.flush (t1)",
    0x004FA00F: "cbo.zero (t6)",
    0x00D00073: "wrs.nto",
    0x01D00073: "wrs.sto",
}
"""Word -> text, from the specifications of Zicbom, Zicboz and Zawrs, which LLVM 14 lacks."""


def texts(code: bytes) -> list[tuple[int, str]]:
    return [(size, text) for _, size, text in RISCV64.disassembler.insns(code, 0x1000)]


@pytest.mark.parametrize("word", [*LLVM, *BLOCKS], ids=hex)
def test_the_text_is_that_of_llvm(word: int) -> None:
    assert texts(word.to_bytes(4, "little")) == [(4, {**LLVM, **BLOCKS}[word])]


def test_a_number_of_a_bit_is_within_the_register() -> None:
    """A bit number must be within the register.

    The field of roriw has five bits; a sixth bit makes the encoding reserved.
    """
    [(size, text)] = texts(0x6248D79B.to_bytes(4, "little"))
    assert (size, text) == (4, ".byte 0x9b, 0xd7, 0x48, 0x62")


def test_instructions_after_an_unknown_one_are_decoded() -> None:
    addi = bytes.fromhex("130101ee")
    unknown = UNKNOWN.to_bytes(4, "little")
    shown = [(4, ".byte 0x57, 0x08, 0x04, 0x2e"), (4, "addi sp, sp, -0x120")]
    assert texts((unknown + addi) * 3) == shown * 3
    assert texts(bytes.fromhex("8280") + unknown + addi) == [(2, "c.jr ra"), *shown]
    assert [text for *_, text in RISCV64I.disassembler.insns(unknown + addi, 0)] == [
        text for _, text in shown
    ]


def test_the_end_of_the_code_may_cut_an_instruction() -> None:
    addi = bytes.fromhex("130101ee")
    for size in range(1, 4):
        assert sum(each for each, _ in texts(addi + addi[:size])) == 4 + size


@pytest.mark.parametrize("arguments", ["", "a=$arg1:x64"])
def test_bytes_have_the_whole_call(arguments: str) -> None:
    """The file `bytes` shows both instructions of the call from an fentry site."""
    with Kernel(MachineConfig(arch="riscv64", profile="riscv-optprobes-2023-ftrace")) as kernel:
        kernel.write_file("/tracing/kprobe_events", f"p:ev int_sqrt {arguments}\n")
        kernel.write_file("/tracing/events/kprobes/ev/enable", "1")
        for _ in range(3):
            original, current = kernel.read_file("/kprobes/stats/kprobes/ev/bytes").splitlines()
            assert {*original.split("  ")[1].split("; ")} <= {"nop", "c.nop"}
            assert current.count("; ") == 1
            assert "  auipc t0, %pcrel_hi(" in current
            assert "; jalr t0, t0, %pcrel_lo(" in current
            kernel.call("int_sqrt", 81)
