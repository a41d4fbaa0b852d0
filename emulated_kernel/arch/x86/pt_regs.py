"""struct pt_regs on the stack: code that saves registers in it and restores them, on x86_64 and i386."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import AX, SAHF, SP, Encoder, high_byte_load, low_byte_load

_PUSH_IMM8 = b"\x6a"
PUSHF = b"\x9c"
POPF = b"\x9d"
_KEEP_OF = b"\x24\x08"
"""Code of `and $8, %al`, which isolates the overflow flag in the second byte of the flags."""
_SET_OF = b"\x04\x78"
"""Code of `add $0x78, %al`, which sets OF if al is 8."""


class RegsFrame:
    """Generates code that saves all registers in a struct pt_regs on the stack, and restores some of them.

    `save` leaves out sp and the fields with known values; completed() fills them in before a host call.
    `restore` restores the general registers and the arithmetic flags. For the flags, it uses five
    instructions in place of popf, because popf would end Unicorn's translated block, which costs more time.
    """

    def __init__(
        self, encoder: Encoder, pt_regs: Sequence[str], fixed: Mapping[str, int], segments: bytes = b""
    ) -> None:
        """Store the layout of the frame, and generate its code.

        `pt_regs`: names of the fields from the lowest address up, one word each; the general registers come
        first. `fixed`: name -> value of registers that have the same value at every hit. `segments`: code
        that pushes the segment registers, which are never loaded from the frame.
        """
        self.encoder = encoder
        self.pt_regs = tuple(pt_regs)
        self.fixed = fixed
        self.offsets = {name: index * encoder.word for index, name in enumerate(pt_regs)}
        """Register name -> offset in bytes of its field from the start of the frame, to which sp points."""
        self.size = encoder.word * len(pt_regs)
        """Size of the frame in bytes."""
        general = [REGISTER_NAMES.index(name) for name in pt_regs if name in REGISTER_NAMES and name != "sp"]
        self.above_general = len(general) * encoder.word
        """Offset in bytes of the first field above the general registers, which are the lowest fields."""
        at = self.offsets["flags"]
        below = self.above_general
        assert max(self.offsets[REGISTER_NAMES[number]] for number in general) < below
        pushes = b"".join(map(encoder.push, reversed(general)))
        self.pops = b"".join(map(encoder.pop, general))
        """Code that pops the general registers except sp."""
        above = at + encoder.word
        self.save = _skip(encoder, above - self.size) + PUSHF + _skip(encoder, below - at) + pushes
        flags = low_byte_load(at + 1) + _KEEP_OF + _SET_OF + high_byte_load(at) + SAHF
        self.restore = flags + self.pops + encoder.lea(SP, SP, self.size - below)
        self._push_the_rest = segments + pushes
        to_flags = encoder.lea(SP, SP, at - below)
        self.restore_whole = self.pops + to_flags + POPF + encoder.lea(SP, SP, 2 * encoder.word)
        """Code that restores the general registers and all flags after `save_whole`."""

    def save_whole(self, push_ip: bytes, orig_ax: int, words: int) -> bytes:
        """Return code that pushes the whole frame, with all fields filled in.

        `push_ip`: code that pushes the ip to save. `orig_ax`: value of the field orig_ax. The saved sp is
        `words` words above the sp with which the code is entered.
        """
        encoder = self.encoder
        code = self._push_fixed("ss") + encoder.push(SP) + PUSHF
        # add $adjust, word(%sp)
        wide = b"\x48" if encoder.bits == 64 else b""
        adjust = encoder.word * (words + 1)
        code += wide + bytes((0x83, 0x44, 0x24, encoder.word, adjust))
        code += self._push_fixed("cs") + push_ip + _PUSH_IMM8 + orig_ax.to_bytes(1, "little", signed=True)
        return code + self._push_the_rest

    def completed(self, values: Mapping[str, int]) -> bytes:
        """Return code that stores `values` (field -> value) and sp in the frame, and changes no register."""
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
    """Encode `push $address`; on x86_64 the address must be in the upper 2 GiB."""
    return b"\x68" + (address & 0xFFFFFFFF).to_bytes(4, "little")


def _skip(encoder: Encoder, size: int) -> bytes:
    """Encode an addition of `size` to sp; the flags are preserved."""
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
