"""The formats of 32-bit RISC-V instructions: each function composes an instruction word from its fields."""

from __future__ import annotations


def r_type(opcode: int, rd: int, funct3: int, rs1: int, rs2: int, funct7: int) -> int:
    """Compose an R-type instruction: two source registers and a destination register."""
    return opcode | rd << 7 | funct3 << 12 | rs1 << 15 | rs2 << 20 | funct7 << 25


def i_type(opcode: int, rd: int, funct3: int, rs1: int, immediate: int) -> int:
    """Compose an I-type instruction: a source register, a 12-bit immediate, and a destination register."""
    return opcode | rd << 7 | funct3 << 12 | rs1 << 15 | (immediate & 0xFFF) << 20


def s_type(opcode: int, funct3: int, rs1: int, rs2: int, immediate: int) -> int:
    """Compose an S-type instruction, a store of rs2 at rs1 + a 12-bit immediate."""
    return (
        opcode
        | (immediate & 0x1F) << 7
        | funct3 << 12
        | rs1 << 15
        | rs2 << 20
        | (immediate >> 5 & 0x7F) << 25
    )


def b_type(opcode: int, funct3: int, rs1: int, rs2: int, offset: int) -> int:
    """Compose a B-type instruction, a branch: the offset has 13 bits, of which the lowest is 0."""
    low = (offset >> 1 & 0xF) << 8 | (offset >> 11 & 1) << 7
    return (
        opcode
        | low
        | funct3 << 12
        | rs1 << 15
        | rs2 << 20
        | (offset >> 5 & 0x3F) << 25
        | (offset >> 12 & 1) << 31
    )


def u_type(opcode: int, rd: int, value: int) -> int:
    """Compose a U-type instruction from the upper 20 bits of a value and a destination register."""
    return opcode | rd << 7 | value & 0xFFFFF000


def j_type(opcode: int, rd: int, offset: int) -> int:
    """Compose a J-type instruction, a jal: the offset has 21 bits, of which the lowest is 0."""
    low = (offset >> 1 & 0x3FF) << 21 | (offset >> 11 & 1) << 20
    return opcode | rd << 7 | low | offset & 0xFF000 | (offset >> 20 & 1) << 31
