"""x86 decoder with the results of Linux's decoder: lengths, and fields that Linux's probe rules use.

iced-x86 decodes what the processor executes; this decoder reproduces what Linux reads. The two decoders
differ in bytes that are not code, since Linux gives a length to opcodes that don't exist. For a VEX
instruction, this decoder gives the opcode byte without its map. As in Linux, probe rules compare this byte
with one-byte opcodes, although it belongs to another map.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from errno import EINVAL
from functools import lru_cache
from typing import Any

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

MAX_INSN_SIZE = 15
_REMEMBERED = 256
"""Maximum number of decoded instructions in the cache.

A registration decodes the same instructions repeatedly.
"""
_EMULATE_PREFIXES = (b"\x0f\x0bxen", b"\x0f\x0bkvm")
EMULATE_PREFIX_SIZE = 5


class Imm(Enum):
    """Kind of an opcode's immediate operand. The letters are those of the opcode maps in Intel's manual."""

    __hash__ = object.__hash__

    NONE = auto()
    BYTE = auto()
    WORD = auto()
    WORD_BYTE = auto()
    """Iw,Ib: 2 bytes and 1 byte, for enter."""
    VWORD32 = auto()
    """Iz, Jz: 2 bytes if the operand size is 16 bits, otherwise 4."""
    VWORD = auto()
    """Iv: 2, 4 or 8 bytes, depending on the operand size."""
    POINTER = auto()
    """Ap: an offset and a selector, the operand of a direct far call or jump."""
    MOFFSET = auto()
    """Ob, Ov: an address of 2, 4 or 8 bytes, depending on the address size."""


_FIXED_SIZES = {Imm.NONE: 0, Imm.BYTE: 1, Imm.WORD: 2, Imm.WORD_BYTE: 2}


@dataclass(frozen=True, slots=True)
class X86Insn:
    """A decoded instruction. Sizes are in bytes. Mirrors: arch/x86/include/asm/insn.h:struct insn (v6.1)."""

    length: int
    head_size: int
    """Size of the prefixes, opcode, ModRM and SIB, before the displacement and the immediate."""
    prefixes: bytes
    """Bytes of the legacy prefixes, without repetitions."""
    rex: int
    opcode: bytes
    """Opcode with its escape bytes; VEX and EVEX instructions have no escape bytes."""
    modrm: int | None
    displacement: int
    displacement_offset: int
    """Offset of the displacement in the instruction; 0 if there is none."""
    immediate: int
    """The immediate operand, or the displacement of a relative branch, sign-extended; 0 if there is none."""
    immediate_size: int
    address_size: int
    operand_size: int
    emulate_prefix: bool
    """Whether the forced-emulation prefix of Xen or KVM is present."""
    rip_relative: bool

    @property
    def reg(self) -> int:
        """The reg field of ModRM; in opcode groups it selects the instruction."""
        return 0 if self.modrm is None else self.modrm >> 3 & 7

    @property
    def mod(self) -> int:
        """The mod field of ModRM, where 3 means a register operand; 0 without ModRM."""
        return 0 if self.modrm is None else self.modrm >> 6

    @property
    def rm(self) -> int:
        """The r/m field of ModRM, extended by the B bit of REX: a register number."""
        return 0 if self.modrm is None else (self.modrm & 7) | (self.rex & 1) << 3


def decode_insn(code: bytes, bits: int = 64) -> X86Insn:
    """Decode the instruction at the start of `code`, in the mode of 32 or 64 bits.

    Raises: KernelError EINVAL (the instruction is undecodable or incomplete).
    Mirrors: arch/x86/lib/insn.c:insn_decode (v6.1).
    """
    return _decode(bytes(code[:MAX_INSN_SIZE]), bits)


@lru_cache(maxsize=_REMEMBERED)
def _decode(code: bytes, bits: int) -> X86Insn:
    try:
        return _Decoder(code, bits).decode()
    except IndexError:
        raise KernelError(EINVAL, "instruction is not complete") from None


def load_decoder() -> None:
    """Import iced-x86, so that no later call opens files. Raises: ImportError, OSError, MemoryError."""
    import iced_x86  # noqa: F401


def iced_decoder(code: bytes, addr: int, bits: int) -> Any:
    """Return an iced-x86 decoder that, like Linux, accepts encodings that the processor would refuse.

    The import is in this function because loading iced-x86 takes 25 ms, and listing a mount doesn't need it.
    """
    from iced_x86 import Decoder, DecoderOptions

    return Decoder(bits, code, DecoderOptions.NO_INVALID_CHECK, ip=addr)


def is_valid(code: bytes, bits: int = 64) -> bool:
    """Return True if iced-x86 can decode the instruction at the start of `code`.

    Unlike Linux's decoder, iced refuses opcodes that don't exist.
    """
    return bool(iced_decoder(code, 0, bits).decode())


def decode_all(code: bytes, addr: int, bits: int = 64) -> Iterator[tuple[int, int, Any]]:
    """Yield (address, length, iced's instruction) up to the first instruction that Linux can't decode.

    The third item is None if Linux's decoder knows the length of the instruction, but iced can't decode it.
    An instruction that extends beyond the end of `code` is read as if zeros followed.
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


def opcodes(ranges: str) -> frozenset[int]:
    """Return the set of the opcodes in a text of hexadecimal numbers and ranges, such as "00-03 0f"."""
    spans = (span.split("-") for span in ranges.split())
    return frozenset(op for span in spans for op in range(int(span[0], 16), int(span[-1], 16) + 1))


LEGACY_PREFIXES = frozenset(b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3")
OPERAND_SIZE_PREFIX = 0x66
ADDRESS_SIZE_PREFIX = 0x67
_EVEX = 0x62
_VEX3 = 0xC4
_VEX2 = 0xC5

_MODRM_1 = opcodes(
    "00-03 08-0b 10-13 18-1b 20-23 28-2b 30-33 38-3b 62-63 69 6b 80-8f c0-c1 c4-c7 d0-d3 d8-df f6-f7 fe-ff"
)
_IMMEDIATE_1 = {
    Imm.BYTE: opcodes("04 0c 14 1c 24 2c 34 3c 6a 6b 70-7f 80 82 83 a8 b0-b7 c0 c1 c6 cd d4 d5 e0-e7 eb"),
    Imm.WORD: opcodes("c2 ca"),
    Imm.WORD_BYTE: opcodes("c8"),
    Imm.VWORD32: opcodes("05 0d 15 1d 25 2d 35 3d 68 69 81 a9 c7 e8 e9"),
    Imm.VWORD: opcodes("b8-bf"),
    Imm.POINTER: opcodes("9a ea"),
    Imm.MOFFSET: opcodes("a0-a3"),
}
_MODRM_2 = opcodes(
    "00-03 0d 0f 10-18 1a-1c 1e-1f 20-23 28-2f 40-76 78-79 7c-7f 90-9f a3-a7 ab-af b0-b7 b9-c7 d0-fe"
)
_IMMEDIATE_2 = {
    Imm.BYTE: opcodes("0f 70-73 a4 ac ba c2 c4-c6"),
    Imm.VWORD32: opcodes("80-8f"),
}
_FORCE64 = opcodes("50-5f 6a 8f 9c 9d c2 c3 c8 c9 e0-e3 e8 e9 70-7f eb")
"""One-byte opcodes whose operand size is always 64 bits in 64-bit mode, with any prefixes."""


def _by_opcode(table: dict[Imm, frozenset[int]]) -> dict[int, Imm]:
    return {opcode: kind for kind, opcodes in table.items() for opcode in opcodes}


_IMMEDIATE_OF_1 = _by_opcode(_IMMEDIATE_1)
_IMMEDIATE_OF_2 = _by_opcode(_IMMEDIATE_2)
_VEX_MAP_0F3A = 3


class _Decoder:
    """Decodes one instruction from left to right. Raises: IndexError (the bytes end too early)."""

    def __init__(self, code: bytes, bits: int) -> None:
        self._code = code
        self._long = bits == 64
        self._at = 0
        self.prefixes = b""
        self.rex = 0
        self.vex_map: int | None = None
        self.operand_size = 4
        self.address_size = bits // 8

    def decode(self) -> X86Insn:
        emulate_prefix = self._code.startswith(_EMULATE_PREFIXES)
        if emulate_prefix:
            self._at = EMULATE_PREFIX_SIZE
        self._read_prefixes()
        opcode = self._read_opcode()
        has_modrm, kind = self._layout(opcode)
        modrm = self._next() if has_modrm else None
        if self.vex_map is None:
            kind = _immediate_of_group(opcode, modrm, kind)
        self._force_operand_size(opcode, modrm)
        displacement_offset, displacement, head_size = self._read_displacement(modrm)
        immediate_size, immediate = self._read_immediate(kind)
        return X86Insn(
            length=self._at,
            head_size=head_size,
            prefixes=self.prefixes,
            rex=self.rex,
            opcode=opcode,
            modrm=modrm,
            displacement=displacement,
            displacement_offset=displacement_offset,
            immediate=immediate,
            immediate_size=immediate_size,
            address_size=self.address_size,
            operand_size=self.operand_size,
            emulate_prefix=emulate_prefix,
            rip_relative=self._long and modrm is not None and modrm & 0xC7 == 5,
        )

    def _next(self) -> int:
        value = self._code[self._at]
        self._at += 1
        return value

    def _take(self, size: int) -> int:
        """Read `size` bytes as a signed number."""
        data = self._code[self._at : self._at + size]
        if len(data) < size:
            raise IndexError
        self._at += size
        return int.from_bytes(data, "little", signed=True)

    def _read_prefixes(self) -> None:
        """Read the prefixes of the instruction; at most four different legacy prefixes are allowed.

        Mirrors: arch/x86/lib/insn.c:insn_get_prefixes (v6.1).
        """
        while (byte := self._code[self._at]) in LEGACY_PREFIXES:
            if byte not in self.prefixes:
                if len(self.prefixes) == 4:
                    break
                self._add_prefix(byte)
            self._at += 1
        if self._long and self._code[self._at] & 0xF0 == 0x40:
            self.rex = self._next()
            if self.rex & 8:
                self.operand_size = 8
        self._read_vex()

    def _add_prefix(self, byte: int) -> None:
        self.prefixes += bytes((byte,))
        if byte == OPERAND_SIZE_PREFIX:
            self.operand_size ^= 6
        elif byte == ADDRESS_SIZE_PREFIX:
            self.address_size ^= 12 if self._long else 6

    def _read_vex(self) -> None:
        """Read a VEX or EVEX prefix, if there is one.

        In 32-bit mode, the prefix's first byte is bound, les or lds if the byte after it is a ModRM with a
        memory operand.
        """
        first = self._code[self._at]
        if first not in (_EVEX, _VEX3, _VEX2):
            return
        second = self._code[self._at + 1]
        if not self._long and second >> 6 != 3:
            return
        start = self._at
        self._at += {_EVEX: 4, _VEX3: 3, _VEX2: 2}[first]
        self.vex_map = 1 if first == _VEX2 else second & (7 if first == _EVEX else 0x1F)
        wide = first != _VEX2 and bool(self._code[start + 2] & 0x80)
        if self._long and wide:
            self.operand_size = 8
        self._require_known(start)

    def _require_known(self, start: int) -> None:
        """Raise KernelError EINVAL if the VEX or EVEX instruction at `start` is unknown.

        Linux: the decoder's opcode map lists the opcodes that have a VEX form. Deviates: iced's list also
        contains opcodes newer than v6.1.
        """
        if not is_valid(self._code[start:], 64 if self._long else 32):
            raise KernelError(EINVAL, "no such VEX or EVEX instruction")

    def _read_opcode(self) -> bytes:
        opcode = bytes((self._next(),))
        if self.vex_map is None and opcode == b"\x0f":
            opcode += bytes((self._next(),))
            if opcode[1] in (0x38, 0x3A):
                opcode += bytes((self._next(),))
        return opcode

    def _layout(self, opcode: bytes) -> tuple[bool, Imm]:
        """Return whether a ModRM follows the opcode, and the kind of the immediate."""
        last = opcode[-1]
        if self.vex_map is not None:
            if self.vex_map == 1:
                return last != 0x77, _IMMEDIATE_OF_2.get(last, Imm.NONE)
            return True, Imm.BYTE if self.vex_map == _VEX_MAP_0F3A else Imm.NONE
        if len(opcode) == 1:
            return last in _MODRM_1, _IMMEDIATE_OF_1.get(last, Imm.NONE)
        if len(opcode) == 2:
            has_modrm = last in _MODRM_2 or (last == 0xB8 and 0xF3 in self.prefixes)
            return has_modrm, _IMMEDIATE_OF_2.get(last, Imm.NONE)
        # Deviates: Linux ends an opcode that these two maps don't define at this byte; no compiler emits one.
        return True, Imm.BYTE if opcode[1] == 0x3A else Imm.NONE

    def _force_operand_size(self, opcode: bytes, modrm: int | None) -> None:
        near_branch = opcode == b"\xff" and modrm is not None and modrm >> 3 & 7 in (2, 4, 6)
        one_byte = len(opcode) == 1 and self.vex_map is None and (opcode[0] in _FORCE64 or near_branch)
        if self._long and (one_byte or (len(opcode) == 2 and opcode[1] & 0xF0 == 0x80)):
            self.operand_size = 8

    def _read_displacement(self, modrm: int | None) -> tuple[int, int, int]:
        """Return the displacement's offset and value, and the size of prefixes, opcode, ModRM and SIB.

        Offset and value are 0 if there is no displacement.
        """
        if modrm is None or modrm >> 6 == 3:
            return 0, 0, self._at
        mod = modrm >> 6
        rm = modrm & 7
        if self.address_size == 2:
            size = 2 if (mod == 0 and rm == 6) or mod == 2 else mod
        else:
            base = self._next() & 7 if rm == 4 else rm
            size = 4 if (mod == 0 and base == 5) or mod == 2 else mod
        start = self._at
        return (start, self._take(size), start) if size else (0, 0, start)

    def _read_immediate(self, kind: Imm) -> tuple[int, int]:
        """Read an immediate of the kind `kind`, and return its size in bytes and its value.

        If the immediate has two parts, as in a far pointer or enter, return size and value of the first part.
        """
        size = self._immediate_size(kind)
        value = self._take(size)
        if kind is Imm.POINTER:
            self._take(2)
        elif kind is Imm.WORD_BYTE:
            self._take(1)
        return size, value

    def _immediate_size(self, kind: Imm) -> int:
        if kind is Imm.POINTER and self.operand_size == 8:
            raise KernelError(EINVAL, "there is no 64-bit far pointer")
        if kind in (Imm.VWORD, Imm.POINTER):
            return self.operand_size
        if kind is Imm.VWORD32:
            return min(self.operand_size, 4)
        return self.address_size if kind is Imm.MOFFSET else _FIXED_SIZES[kind]


def _immediate_of_group(opcode: bytes, modrm: int | None, kind: Imm) -> Imm:
    """Return the kind of an instruction's immediate. `kind` is the kind that its opcode usually has.

    `modrm`: the ModRM byte, or None. In group 3, only `test` has an immediate, and it has two encodings in
    this group.
    """
    if opcode in (b"\xf6", b"\xf7") and modrm is not None and modrm >> 3 & 7 < 2:
        return Imm.BYTE if opcode == b"\xf6" else Imm.VWORD32
    return kind
