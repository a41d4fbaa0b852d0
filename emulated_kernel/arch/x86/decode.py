"""Instruction lengths and boundaries: iced-x86 for real code, Linux's rule where it sees none; and calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emulated_kernel.arch.x86.iced import iced_decoder
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, decode_insn
from emulated_kernel.errors import KernelError


def decode_all(code: bytes, addr: int, bits: int = 64) -> Iterator[tuple[int, int, Any]]:
    """Address, length and iced's instruction of each instruction, until one isn't decodable for Linux.

    The instruction is None where only Linux's decoder gives a length. Instructions that run over the
    end of `code` are read as if zeros followed.
    """
    end = addr + len(code)
    padded = code + bytes(MAX_INSN_SIZE)
    decoder = iced_decoder(padded, addr, bits)
    while addr < end:
        start = addr
        for insn in decoder:
            if addr >= end or not insn:
                break
            length = insn.len
            yield addr, length, insn
            addr += length
        if addr >= end:
            return
        at = len(code) - (end - addr)
        try:
            length = decode_insn(padded[at:], bits).length
        except KernelError:
            return
        yield addr, length, None
        addr += length
        at += length
        decoder = iced_decoder(padded[at:], addr, bits)
        assert addr > start
