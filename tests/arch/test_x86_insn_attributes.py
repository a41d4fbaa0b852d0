"""Instruction attributes are shared among ModRM bytes: each instruction has the same attributes as when
decoded alone.
"""

from __future__ import annotations

import pytest

from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE
from emulated_kernel.arch.x86.insn_attributes import DecodeCache, InsnAttributes
from tests.sample import share

HEADS = tuple(map(bytes.fromhex, ("", "0f", "66", "660f", "67", "48", "f30f", "c5", "0f38", "0f3a")))
MODRM = (0x04, 0x05, 0x07, 0x3F, 0x44, 0x78, 0x85, 0xC0, 0xD0, 0xE5, 0xFF)
"""ModRM bytes: at least one for each kind of operands."""


def facts(table: DecodeCache, code: bytes) -> InsnAttributes | None:
    """Return the attributes of the first instruction, or None if it cannot be decoded."""
    return table.all(code.ljust(MAX_INSN_SIZE, b"\0"), 0, 2).get(0)


@pytest.mark.parametrize("bits", [32, 64])
def test_what_is_shared_is_what_is_decoded(bits: int) -> None:
    for head in HEADS:
        for opcode in range(256):
            code = head + bytes((opcode,))
            shared = DecodeCache(bits)
            first = facts(shared, code + b"\xc1")
            if first is None:
                continue
            for modrm in share(MODRM, opcode, 2):
                whole = code + bytes((modrm,))
                assert facts(shared, whole) == facts(DecodeCache(bits), whole), whole.hex()
