"""Calls and tail calls as bytes show them: how a stack is walked that has no frame pointers."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.arch.base import CallSite

MAX_CALL_SIZE = 7
_CALL, _JUMP, _SHORT_JUMP, _INDIRECT = 0xE8, 0xE9, 0xEB, 0xFF
_NEAR_SIZE, _SHORT_SIZE = 5, 2
_INDIRECT_SIZES = (2, 3, 4, 6, 7)
_REG_FIELD, _CALL_REG = 0x38, 0x10


def call_before(code: bytes, address: int) -> CallSite | None:
    """The call that returns to `address`, where `code` ends; it isn't known where instructions begin."""
    if len(code) >= _NEAR_SIZE and code[-_NEAR_SIZE] == _CALL:
        return CallSite(address + int.from_bytes(code[-4:], "little", signed=True))
    for size in _INDIRECT_SIZES:
        if len(code) >= size and code[-size] == _INDIRECT and code[1 - size] & _REG_FIELD == _CALL_REG:
            return CallSite(None)
    return None


def jump_targets(code: bytes, addr: int) -> Iterator[int]:
    """Where a function may jump to; bytes in the middle of instructions count as well."""
    for at, opcode in enumerate(code):
        if opcode == _JUMP:
            yield addr + at + _NEAR_SIZE + int.from_bytes(code[at + 1 : at + 5], "little", signed=True)
        elif opcode == _SHORT_JUMP:
            yield addr + at + _SHORT_SIZE + int.from_bytes(code[at + 1 : at + 2], "little", signed=True)
