"""Calls and tail calls as bytes show them: how a stack is walked that has no frame pointers."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.arch.base import CallSite
from emulated_kernel.arch.riscv.insn import RA, RVC_SIZE, RVI_SIZE, ZERO, Opcode, decode_all, decode_insn
from emulated_kernel.errors import KernelError

MAX_CALL_SIZE = 8
"""Bytes of auipc and jalr, as a call beyond 1 MiB has."""


def call_before(code: bytes, address: int, *, compressed: bool) -> CallSite | None:
    """The call that returns to `address`, where `code` ends; it isn't known where instructions begin."""
    for size in (RVI_SIZE, RVC_SIZE) if compressed else (RVI_SIZE,):
        try:
            insn = decode_insn(code[-size:], compressed=compressed)
        except KernelError:
            continue
        if insn.length != size or not insn.is_call or insn.rd != RA:
            continue
        if insn.opcode == Opcode.JAL:
            return CallSite(address - size + insn.jump_offset)
        return CallSite(_far_target(code, address) if size == RVI_SIZE else None)
    return None


def _far_target(code: bytes, address: int) -> int | None:
    """Of `auipc; jalr`, the end of `code`, where both go by the same register."""
    if len(code) < MAX_CALL_SIZE:
        return None
    upper = decode_insn(code[-MAX_CALL_SIZE:-RVI_SIZE], compressed=True)
    jalr = decode_insn(code[-RVI_SIZE:], compressed=True)
    if upper.opcode != Opcode.AUIPC or upper.rd != jalr.rs1:
        return None
    return address - MAX_CALL_SIZE + upper.upper_immediate + jalr.immediate


def jump_targets(code: bytes, addr: int, *, compressed: bool) -> Iterator[int]:
    """Where a function may jump to."""
    upper: tuple[int, int] | None = None
    for at, insn in decode_all(code, addr, compressed=compressed):
        if insn.relative_target is not None and (insn.opcode == Opcode.BRANCH or insn.rd == ZERO):
            yield at + insn.relative_target
        if insn.is_indirect_jump and upper is not None and upper[0] == insn.rs1:
            yield upper[1] + insn.immediate
        upper = (insn.rd, at + insn.upper_immediate) if insn.opcode == Opcode.AUIPC else None
