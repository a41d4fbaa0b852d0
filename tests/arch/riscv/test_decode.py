"""Decoded RISC-V instructions, compared with capstone: all 16-bit instructions, and many 32-bit ones."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any

import capstone
import pytest

from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.arch.riscv.compressed import expand
from emulated_kernel.arch.riscv.insn import (
    RiscvOpcode,
    attributes_of_all,
    decode_all,
    decode_insn,
    insn_length,
)
from emulated_kernel.util.errors import KernelError
from tests.arch import decoding

ADDR = 0x10_0000
ENGINE: Any = capstone.Cs(capstone.CS_ARCH_RISCV, capstone.CS_MODE_RISCV64 | capstone.CS_MODE_RISCVC)
_TWICE = (
    "addi",
    "addi16sp",
    "addiw",
    "slli",
    "srli",
    "srai",
    "andi",
    "sub",
    "subw",
    "add",
    "addw",
    "and",
    "or",
    "xor",
)
"""Compressed instructions whose destination is the first source."""


def text(code: bytes) -> tuple[int, str, str] | None:
    """Return length, mnemonic and operands of the first instruction, as capstone decodes it."""
    for _, size, mnemonic, operands in ENGINE.disasm_lite(code, ADDR):
        return size, mnemonic, operands
    return None


def number(operand: str) -> int:
    return int(operand.rsplit(",", 1)[-1], 0)


def written_out(name: str, operands: str) -> tuple[str, list[str]]:
    """Return the name and the operands of an instruction without capstone's aliases, such as `mv` for
    `addi`.
    """
    parts = [part.strip() for part in operands.split(",")] if operands else []
    short = name.removeprefix("c.")
    if name.startswith("c.") and short in _TWICE:
        parts = [parts[0], *parts]
        short = "addi" if short == "addi16sp" else short
    match name, parts:
        case "c.addi4spn", _:
            short = "addi"
        case "c.li", [rd, value]:
            return "addi", [rd, "zero", value]
        case "mv", [rd, rs]:
            return "addi", [rd, rs, "0"]
        case "c.mv", [rd, rs]:
            return "add", [rd, "zero", rs]
        case "sext.w", [rd, rs]:
            return "addiw", [rd, rs, "0"]
        case "ret", _:
            return "jr", ["ra"]
    if short in ("ldsp", "lwsp", "sdsp", "swsp", "fldsp", "fsdsp"):
        short = short.removesuffix("sp")
    return short, parts


def test_each_compressed_instruction_is_what_it_expands_to() -> None:
    wrong = []
    for half in range(1 << 16):
        if half & 3 == 3:
            continue
        short, long = text(half.to_bytes(2, "little") + bytes(2)), expand(half)
        if short is None or short[0] != 2 or long is None or short[1] == "c.nop":
            continue
        found = text(long.to_bytes(4, "little"))
        assert found is not None, hex(half)
        if written_out(*short[1:]) != written_out(*found[1:]):
            wrong.append((hex(half), short, found))
    assert not wrong


def test_what_capstone_refuses_and_what_is_reserved() -> None:
    """kprobefs decodes hints, which write to the zero register; capstone refuses some of them.

    Capstone decodes a c.lui of 0, which is reserved.
    """
    for half in range(1 << 16):
        if half & 3 == 3:
            continue
        known = (text(half.to_bytes(2, "little") + bytes(2)) or (4, "", ""))[0] == 2
        long = expand(half)
        if known and long is None:
            assert half == 0 or half & 0xF07F == 0x6001, hex(half)
        elif not known and long is not None:
            insn = decode_insn(half.to_bytes(2, "little"), compressed=True)
            assert insn.rd == 0, hex(half)
            assert insn.opcode in (RiscvOpcode.OP_IMM, RiscvOpcode.OP, RiscvOpcode.LUI), hex(half)


BRANCHES = {"beq", "bne", "blt", "bge", "bltu", "bgeu", "beqz", "bnez", "blez", "bgez", "bltz", "bgtz"}


def test_fields_of_random_instructions() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(60_000):
        opcode = rng.choice(list(RiscvOpcode))
        word = rng.getrandbits(25) << 7 | opcode
        found = text(word.to_bytes(4, "little"))
        if found is None or found[0] != 4:
            continue
        insn = decode_insn(word.to_bytes(4, "little"), compressed=True)
        name, operands = found[1], found[2]
        if name in BRANCHES or name in ("j", "jal"):
            assert insn.relative_target == number(operands), (hex(word), found)
        elif name in ("lui", "auipc"):
            assert insn.upper_immediate & 0xFFFFFFFF == number(operands) << 12, (hex(word), found)
        elif name in ("addi", "addiw", "andi", "ori", "xori", "slti"):
            assert insn.immediate == number(operands), (hex(word), found)
        else:
            continue
        seen.add(name)
    assert len(seen) > 15


@pytest.mark.parametrize("low", range(4))
def test_length_is_said_by_two_bits(low: int) -> None:
    assert insn_length(0xFFFC | low) == (4 if low == 3 else 2)


def test_a_kernel_without_rvc_has_no_short_instructions() -> None:
    code = bytes.fromhex("13050000 0145 0145")
    assert RISCV64().instruction_boundaries(code, ADDR) == (ADDR, ADDR + 4, ADDR + 6)
    assert RISCV64I().instruction_boundaries(code, ADDR) == (ADDR,)
    assert decoding.insn_length(RISCV64(), code[4:]) == 2
    with pytest.raises(KernelError, match="compressed"):
        decoding.insn_length(RISCV64I(), code[4:])


def test_what_ends_within_an_instruction_isnt_decodable() -> None:
    assert RISCV64().instruction_boundaries(bytes.fromhex("0145 1305"), ADDR) == (ADDR,)


def test_breakpoints_of_both_lengths() -> None:
    rvc = RISCV64()
    ebreak, short = bytes.fromhex("73001000"), bytes.fromhex("0290")
    assert rvc.breakpoint_for(2) == short
    assert rvc.breakpoint_for(4) == ebreak


def test_calls() -> None:
    for code, is_call in (
        ("8280", False),  # ret
        ("67800000", False),  # jr ra
        ("8292", True),  # jalr t0
        ("ef008000", True),  # jal 8
        ("8287", False),  # jr a5
        ("09a0", False),  # j 2
    ):
        assert decode_insn(bytes.fromhex(code), compressed=True).is_call == is_call, code


def test_disassembly() -> None:
    assert RISCV64().disassemble(bytes.fromhex("0145 13050000"), 0x1000) == [
        "0x1000: 01 45        c.li a0, 0",
        "0x1002: 13 05 00 00  mv a0, zero",
    ]


@pytest.mark.parametrize("compressed", [True, False])
def test_what_rules_ask_of_alike_instructions_is_what_each_decodes_to(compressed: bool) -> None:
    rng = random.Random(5)
    asked = attrgetter(
        "kind",
        "handling",
        "effect",
        "mentioned",
        "relative_target",
        "opcode",
        "is_call",
        "is_return",
        "length",
    )
    seen = set()
    for _ in range(400):
        words = (rng.getrandbits(32) & ~0x7F | rng.choice((*RiscvOpcode, 0x57)) for _ in range(20))
        code = b"".join(word.to_bytes(4, "little") for word in words)
        code = code[2 * compressed * rng.randrange(2) :]
        facts = attributes_of_all(code, 0, compressed=compressed)
        decoded = dict(decode_all(code, 0, compressed=compressed))
        assert facts.keys() == decoded.keys()
        for at, each in facts.items():
            assert asked(each) == asked(decoded[at]), code[at : at + 4].hex()
            seen.add(each.kind)
    assert len(seen) >= 4
