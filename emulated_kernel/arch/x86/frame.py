"""The frame of a compiled handler that saves everything: a struct pt_regs, filled in as far as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated_kernel.arch.x86.assemble import AX, SAHF, SP, Encoder, high_byte_load, low_byte_load
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES

_PUSHF = b"\x9c"
_KEEP_OF = b"\x24\x08"
"""and $8, %al: the overflow flag in the second byte of the flags."""
_SET_OF = b"\x04\x78"
"""add $0x78, %al, which overflows for 8."""


class Frame:
    """Saving all registers on the stack, and restoring the general ones and the status flags.

    Fields whose value is known, and sp, get it only in front of a host call. popf would end a translated
    block, so that it costs more than the five instructions in its place.
    """

    def __init__(self, encoder: Encoder, pt_regs: Sequence[str]) -> None:
        """`pt_regs`: the fields from the lowest up, one word each; the general registers come first."""
        self._encoder = encoder
        self.offsets = {name: index * encoder.word for index, name in enumerate(pt_regs)}
        """Bytes from the stack pointer within the frame."""
        self.size = encoder.word * len(pt_regs)
        """Bytes that it takes on the stack."""
        general = [REGISTER_NAMES.index(name) for name in pt_regs if name in REGISTER_NAMES and name != "sp"]
        at, below = self.offsets["flags"], len(general) * encoder.word
        assert max(self.offsets[REGISTER_NAMES[number]] for number in general) < below
        pushes = b"".join(map(encoder.push, reversed(general)))
        pops = b"".join(map(encoder.pop, general))
        above = at + encoder.word
        self.save = _skip(encoder, above - self.size) + _PUSHF + _skip(encoder, below - at) + pushes
        flags = low_byte_load(at + 1) + _KEEP_OF + _SET_OF + high_byte_load(at) + SAHF
        self.restore = flags + pops + encoder.lea(SP, SP, self.size - below)

    def completed(self, values: Mapping[str, int]) -> bytes:
        """Code that fills in the rest, `values` and sp; it changes nothing else."""
        encoder = self._encoder
        word = encoder.word
        code = b"".join(
            encoder.store_immediate(SP, self.offsets[name], value, word) for name, value in values.items()
        )
        if "sp" not in self.offsets:
            return code
        code += encoder.push(AX) + encoder.lea(AX, SP, self.size + word)
        return code + encoder.store(SP, self.offsets["sp"] + word, AX, word) + encoder.pop(AX)


def _skip(encoder: Encoder, size: int) -> bytes:
    """Move the stack pointer; the flags are left alone."""
    return encoder.lea(SP, SP, size) if size else b""
