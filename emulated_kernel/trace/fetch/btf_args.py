"""Arguments by name: parameters and results of functions, and fields of structures, found in the BTF."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from emulated_kernel.image.linux.btf import Btf, Kind, Member
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

_ANONYMOUS_MAX = 16
"""Maximum number of anonymous structures and unions that wait at one time to be searched for a member."""
_CHAR_BITS = 8


@dataclass(frozen=True, eq=False)
class ProbedFunction:
    """The prototype of a probed function. The id of a type is its number in the BTF; 0 is void."""

    btf: Btf
    returns: int
    parameters: tuple[tuple[str, int], ...]
    """Name and type id of each parameter."""

    def typed(self, number: int) -> TypedValue:
        """Return the type with the id `number`, without typedefs and qualifiers."""
        return TypedValue(self.btf, self.btf.resolve(number))

    def index(self, name: str) -> int | None:
        """Return the index of the parameter `name`, counted from 0, or None if no parameter has this name."""
        return next((at for at, (own, _) in enumerate(self.parameters) if own == name), None)


def find_function(btf: Btf | None, name: str | None, hidden: int = 0) -> ProbedFunction | None:
    """Return the prototype of the function called `name`, without its first `hidden` parameters.

    Return None if `btf` or `name` is None, or if the BTF lacks the function.
    Mirrors: kernel/trace/trace_btf.c:btf_find_func_proto (v6.12).
    """
    if btf is None or name is None:
        return None
    try:
        returns, parameters = btf.prototype(name)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    named = tuple((each.name, each.type) for each in parameters if each.type)
    return ProbedFunction(btf, returns, named[hidden:])


@dataclass(frozen=True)
class TypedValue:
    """The BTF type of a fetched value, and the bits of the value if it is a bit field."""

    btf: Btf
    type: int
    """Type id of the value in the BTF, after typedefs and qualifiers have been followed."""
    bit_offset: int = 0
    bit_size: int = 0
    """Size of a bit field in bits; 0 for other values."""

    @property
    def is_char_array(self) -> bool:
        return self.btf.kind(self.type) is Kind.ARRAY and self._refers_to_char

    @property
    def is_char_pointer(self) -> bool:
        return self.btf.kind(self.type) is Kind.PTR and self._refers_to_char

    @property
    def _refers_to_char(self) -> bool:
        """Whether the type is a pointer to characters or an array of characters.

        Linux: `char` is unsigned since 6.2, and any unsigned byte counts as a character. In the BTF of an
        older kernel `char` is signed; it counts here as well.
        """
        referred = self.btf.referred(self.type)
        if self.btf.kind(referred) is not Kind.INT:
            return False
        signed, bits = self.btf.int_encoding(referred)
        return bits == _CHAR_BITS and (not signed or self.btf.name(referred) == "char")

    @property
    def has_bit_field(self) -> bool:
        """Whether the value is a bit field that shifts must extract from the fetched bytes."""
        return bool(self.bit_size % _CHAR_BITS or self.bit_offset)

    def fetch_type(self, word_bits: int) -> str | None:
        """Return the name of the fetch type that fits the value; None means the default type, a word.

        `word_bits`: size of a word in bits.

        Mirrors: kernel/trace/trace_probe.c:fetch_type_from_btf_type (v6.12).
        """
        match self.btf.kind(self.type):
            case Kind.ENUM:
                return "s32"
            case Kind.ENUM64:
                return "s64"
            case Kind.PTR:
                return f"x{word_bits}"
            case Kind.INT:
                signed, bits = self.btf.int_encoding(self.type)
                if bits in (8, 16, 32, 64):
                    return f"{'s' if signed else 'u'}{bits}"
                return None if signed else "u64"
        return None


class FieldError(Exception):
    """An error in a chain of fields: the message, its column from the start of the chain, and the errno."""

    def __init__(self, error: ProbeError, column: int, code: int) -> None:
        super().__init__(error)
        self.error = error
        self.column = column
        self.code = code


def split_field(text: str) -> tuple[str, str | None, bool]:
    """Split `NAME->REST` or `NAME.REST`. Return the name, the rest, and whether the separator is an arrow.

    The rest is None if there is no separator. Raises: FieldError BAD_HYPHEN (a `-` without `>`).
    Mirrors: kernel/trace/trace_probe.c:split_next_field (v6.12).
    """
    at = min((at for at in (text.find("."), text.find("-")) if at >= 0), default=-1)
    if at < 0:
        return text, None, False
    if text[at] == ".":
        return text[:at], text[at + 1 :], False
    if text[at : at + 2] != "->":
        raise FieldError(ProbeError.BAD_HYPHEN, at, errno.EINVAL)
    return text[:at], text[at + 2 :], True


def find_structure(btf: Btf | None, name: str) -> TypedValue | None:
    """Return the type of the structure called `name`, or None if the BTF lacks it or is None.

    Mirrors: kernel/trace/trace_probe.c:query_btf_struct (v7.2).
    """
    if btf is None:
        return None
    try:
        return TypedValue(btf, btf.find(Kind.STRUCT, name))
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def follow_fields(
    value: TypedValue, chain: str, *, is_cast: bool = False
) -> Iterator[tuple[int, TypedValue, int]]:
    """Follow `chain`, a text like `FIELD.FIELD->FIELD`, from a pointer to a structure.

    `value`: type of the pointer, or of the structure itself if `is_cast` is set. Yield (offset, value,
    column) for each dereference. The dereference reads the last field before the next arrow or the end of
    `chain`. `offset`: bytes from the pointer to this field. `value`: type of the field. `column`: column of
    the field in `chain`.
    Raises: FieldError (`chain` does not match the types).
    Mirrors: kernel/trace/trace_probe.c:parse_btf_field (v6.12).
    """
    btf = value.btf
    column = 0
    left: str | None = chain
    while left is not None:
        if not is_cast and btf.kind(value.type) is not Kind.PTR:
            raise FieldError(ProbeError.NO_PTR_STRCT, column, errno.EINVAL)
        structure = value.type if is_cast else btf.referred(value.type)
        is_cast = False
        bits = 0
        is_arrow = False
        while left is not None and not is_arrow:
            try:
                name, rest, is_arrow = split_field(left)
            except FieldError as failure:
                raise FieldError(failure.error, column + failure.column, failure.code) from None
            start, member = _find_member(btf, structure, name, column)
            bits += start + member.offset
            structure = btf.resolve(member.type)
            value = TypedValue(btf, structure, bits % 8, member.width)
            last = column
            column += len(left) - len(rest or "")
            left = rest
        yield bits // 8, value, last


def _find_member(btf: Btf, structure: int, name: str, column: int) -> tuple[int, Member]:
    """Find the member called `name` in `structure` (a type id) or in an anonymous member of it, at any depth.

    Return (offset, member). `offset`: bits from the start of `structure` to the start of the structure or
    union that directly contains the member; 0 if that is `structure` itself.

    Raises: FieldError BAD_BTF_TID (the type is no structure or union), NO_BTF_FIELD (no such member); both
    with `column`.
    Mirrors: kernel/trace/trace_btf.c:btf_find_struct_member (v6.12).
    """
    if btf.kind(structure) not in (Kind.STRUCT, Kind.UNION):
        raise FieldError(ProbeError.BAD_BTF_TID, column, errno.EINVAL)
    waiting = [(0, structure)]
    while waiting:
        start, owner = waiting.pop()
        for member in btf.members(owner):
            if name and member.name == name:
                return start, member
            if not member.name and len(waiting) < _ANONYMOUS_MAX:
                inner = btf.resolve(member.type)
                if btf.kind(inner) in (Kind.STRUCT, Kind.UNION):
                    waiting.append((start + member.offset, inner))
    raise FieldError(ProbeError.NO_BTF_FIELD, column, errno.ENOENT)
