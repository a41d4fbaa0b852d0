"""A struct pt_regs on the stack: how its registers get there, and back, on x86_64 and on i386."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import AX, SAHF, SP, Encoder, high_byte_load, low_byte_load

_PUSH_IMM8 = b"\x6a"
PUSHF = b"\x9c"
POPF = b"\x9d"
_KEEP_OF = b"\x24\x08"
"""and $8, %al: the overflow flag in the second byte of the flags."""
_SET_OF = b"\x04\x78"
"""add $0x78, %al, which overflows for 8."""


class RegsFrame:
    """Saving all registers on the stack, and restoring the general ones and the flags.

    A handler's frame has the fields whose value is known, and sp, only in front of a host call; and its flags
    aren't restored by popf, which would end a translated block, so that it costs more than the five
    instructions in its place.
    """

    def __init__(
        self, encoder: Encoder, pt_regs: Sequence[str], fixed: Mapping[str, int], segments: bytes = b""
    ) -> None:
        """`pt_regs`: the fields from the lowest up, one word each; the general registers come first.

        `fixed`: what the frame has in place of registers that are the same at every hit. `segments` pushes
        segment registers, which are never loaded from the frame.
        """
        self.encoder = encoder
        self.pt_regs = tuple(pt_regs)
        self.fixed = fixed
        self.offsets = {name: index * encoder.word for index, name in enumerate(pt_regs)}
        """Bytes from the stack pointer within the frame."""
        self.size = encoder.word * len(pt_regs)
        """Bytes that it takes on the stack."""
        general = [REGISTER_NAMES.index(name) for name in pt_regs if name in REGISTER_NAMES and name != "sp"]
        self.above_general = len(general) * encoder.word
        """Bytes of the general registers, which are the lowest."""
        at = self.offsets["flags"]
        below = self.above_general
        assert max(self.offsets[REGISTER_NAMES[number]] for number in general) < below
        pushes = b"".join(map(encoder.push, reversed(general)))
        self.pops = b"".join(map(encoder.pop, general))
        """Restores the general registers."""
        above = at + encoder.word
        self.save = _skip(encoder, above - self.size) + PUSHF + _skip(encoder, below - at) + pushes
        flags = low_byte_load(at + 1) + _KEEP_OF + _SET_OF + high_byte_load(at) + SAHF
        self.restore = flags + self.pops + encoder.lea(SP, SP, self.size - below)
        self._push_the_rest = segments + pushes
        to_flags = encoder.lea(SP, SP, at - below)
        self.restore_whole = self.pops + to_flags + POPF + encoder.lea(SP, SP, 2 * encoder.word)
        """Restores the general registers and all flags, behind `save_whole`."""

    def save_whole(self, push_ip: bytes, orig_ax: int, words: int) -> bytes:
        """Code that fills in all of the frame; the saved sp is `words` above where sp is in front of it."""
        encoder = self.encoder
        code = self._push_fixed("ss") + encoder.push(SP) + PUSHF
        # add $adjust, word(%sp)
        wide = b"\x48" if encoder.bits == 64 else b""
        adjust = encoder.word * (words + 1)
        code += wide + bytes((0x83, 0x44, 0x24, encoder.word, adjust))
        code += self._push_fixed("cs") + push_ip + _PUSH_IMM8 + orig_ax.to_bytes(1, "little", signed=True)
        return code + self._push_the_rest

    def completed(self, values: Mapping[str, int]) -> bytes:
        """Code that fills in the rest, `values` and sp; it changes nothing else."""
        encoder = self.encoder
        word = encoder.word
        code = b"".join(
            encoder.store_immediate(SP, self.offsets[name], value, word) for name, value in values.items()
        )
        code += encoder.push(AX) + encoder.lea(AX, SP, self.size + word)
        return code + encoder.store(SP, self.offsets["sp"] + word, AX, word) + encoder.pop(AX)

    def _push_fixed(self, name: str) -> bytes:
        return _PUSH_IMM8 + bytes([self.fixed[name]])


def push_address(address: int) -> bytes:
    """push $address, of the upper 2 GiB on x86_64."""
    return b"\x68" + (address & 0xFFFFFFFF).to_bytes(4, "little")


def _skip(encoder: Encoder, size: int) -> bytes:
    """Move the stack pointer; the flags are left alone."""
    return encoder.lea(SP, SP, size) if size else b""


FRAME_64 = RegsFrame(
    Encoder(64),
    (
        *("r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di"),
        *("orig_ax", "ip", "cs", "flags", "sp", "ss"),
    ),
    {"cs": 0x10, "ss": 0x18, "orig_ax": -1},
)
FRAME_32 = RegsFrame(
    Encoder(32),
    (
        *("bx", "cx", "dx", "si", "di", "bp", "ax", "ds", "es", "fs", "gs"),
        *("orig_ax", "ip", "cs", "flags", "sp", "ss"),
    ),
    {"ds": 0x7B, "es": 0x7B, "fs": 0xD8, "gs": 0, "cs": 0x60, "ss": 0x68, "orig_ax": -1},
    segments=bytes.fromhex("0fa8 0fa0 06 1e"),  # gs, fs, es, ds
)
