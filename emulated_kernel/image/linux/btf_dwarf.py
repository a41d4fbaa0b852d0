"""DWARF made from BTF: the types of a kernel, and the types of its functions and variables.

BTF has no lines, no local variables and no locations of arguments, so the DWARF lacks them, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cache

from emulated_kernel.image.linux.btf import Btf, Kind, Member
from emulated_kernel.util.errors import KernelError

_VERSION = 4
_C11 = 0x1D
_NO, _YES = 0, 1
_ADDR, _DATA8, _STRING, _DATA1, _FLAG, _SDATA, _STRP, _UDATA, _REF4, _EXPRLOC, _PRESENT = (
    0x01, 0x07, 0x08, 0x0B, 0x0C, 0x0D, 0x0E, 0x0F, 0x13, 0x18, 0x19,
)  # fmt: skip
"""Numbers of the forms of DWARF attributes (DW_FORM). Source: DWARF 4, section 7.5.4."""
_NAME, _BYTE_SIZE, _LANGUAGE, _CONST_VALUE, _PRODUCER, _PROTOTYPED = 0x03, 0x0B, 0x13, 0x1C, 0x25, 0x27
_LOW_PC, _HIGH_PC, _BIT_SIZE, _UPPER_BOUND, _MEMBER_LOCATION = 0x11, 0x12, 0x0D, 0x2F, 0x38
_DECLARATION, _ENCODING, _EXTERNAL, _TYPE, _LOCATION, _BIT_OFFSET = 0x3C, 0x3E, 0x3F, 0x49, 0x02, 0x6B
_CU, _BASE, _POINTER, _ARRAY, _SUBRANGE, _STRUCT, _UNION, _MEMBER, _ENUM, _ENUMERATOR = (
    0x11, 0x24, 0x0F, 0x01, 0x21, 0x13, 0x17, 0x0D, 0x04, 0x28,
)  # fmt: skip
_TYPEDEF, _CONST, _VOLATILE, _RESTRICT, _PROTO, _PARAMETER, _VARIADIC, _FUNCTION, _VARIABLE = (
    0x16, 0x26, 0x35, 0x37, 0x15, 0x05, 0x18, 0x2E, 0x34,
)  # fmt: skip
_BOOLEAN, _FLOAT, _SIGNED, _SIGNED_CHAR, _UNSIGNED, _UNSIGNED_CHAR = 0x02, 0x04, 0x05, 0x06, 0x07, 0x08
_OP_ADDR = 3
_TAG_OF = {
    Kind.PTR: _POINTER, Kind.TYPEDEF: _TYPEDEF, Kind.CONST: _CONST, Kind.VOLATILE: _VOLATILE,
    Kind.RESTRICT: _RESTRICT,
}  # fmt: skip
_UNWRITTEN = frozenset((Kind.VOID, Kind.FUNC, Kind.VAR, Kind.DATASEC, Kind.DECL_TAG))
_DEPTH = 64
_UNKNOWN = bytes(4)
"""Placeholder of a reference to a type; finish() replaces it by the offset of the type's entry."""
Attribute = tuple[int, int, int | str | None]
"""Name, form and value of an attribute. The value of a reference is the id of a type."""


class DwarfSections:
    """The sections .debug_info, .debug_abbrev and .debug_str of one compilation unit."""

    def __init__(self, word_size: int) -> None:
        self._word_size = word_size
        self._info = bytearray()
        self._strings = bytearray(b"\0")
        self._string_at: dict[str, bytes] = {"": bytes(4)}
        """String -> its offset in `_strings`, as the four bytes of an attribute."""
        self._abbreviations: dict[tuple[int, bool, tuple[tuple[int, int], ...]], int] = {}
        self._places: dict[int, int] = {}
        """Id of a type -> offset of its entry in the unit."""
        self._references: list[tuple[int, int]] = []
        """Offset in the unit of each reference to a type, and the id of this type."""
        # The header is the unit's length (4), version (2), offset of abbreviations (4) and word size (1).
        self._info += bytes(11)

    def begin(self, tag: int, attributes: Iterable[Attribute], *, children: bool, number: int = 0) -> None:
        """Append an entry with the tag `tag` and those `attributes` whose value is not None.

        If `children` is True, the entries that are appended until end() are children of this entry. `number`:
        id of the type that the entry describes; 0 if the entry describes no type.
        """
        values = [each for each in attributes if each[2] is not None]
        key = tag, children, tuple([each[:2] for each in values])
        code = self._abbreviations.setdefault(key, len(self._abbreviations) + 1)
        if number:
            self._places[number] = len(self._info)
        info = self._info
        info += _uleb(code)
        for _, form, value in values:
            # Nearly all attributes have one of these forms.
            if form == _STRP and isinstance(value, str):
                info += self._string(value)
            elif form == _REF4 and isinstance(value, int):
                self._references.append((len(info), value))
                info += _UNKNOWN
            else:
                self._append(form, value)

    def entry(self, tag: int, attributes: Iterable[Attribute], number: int = 0) -> None:
        """Append an entry without children; the parameters are those of begin()."""
        self.begin(tag, attributes, children=False, number=number)

    def end(self) -> None:
        """End the list of children of the innermost entry whose list is still open; see begin()."""
        self._info.append(0)

    def _append(self, form: int, value: int | str | None) -> None:
        info = self._info
        assert isinstance(value, int)
        if form == _UDATA:
            info += _uleb(value)
        elif form == _SDATA:
            info += _sleb(value)
        elif form == _DATA1:
            info.append(value)
        elif form == _DATA8:
            info += value.to_bytes(8, "little")
        elif form == _ADDR:
            info += value.to_bytes(self._word_size, "little")
        elif form == _EXPRLOC:
            info.append(1 + self._word_size)
            info.append(_OP_ADDR)
            info += value.to_bytes(self._word_size, "little")

    def _string(self, text: str) -> bytes:
        at = self._string_at.get(text)
        if at is None:
            at = self._string_at[text] = len(self._strings).to_bytes(4, "little")
            self._strings += text.encode() + b"\0"
        return at

    def finish(self) -> dict[str, bytes]:
        """Resolve all references, and return name -> contents of each section."""
        info = self._info
        for at, number in self._references:
            info[at : at + 4] = self._places[number].to_bytes(4, "little")
        struct.pack_into("<IHIB", info, 0, len(info) - 4, _VERSION, 0, self._word_size)
        table = bytearray()
        for (tag, children, attributes), code in self._abbreviations.items():
            table += _uleb(code) + _uleb(tag)
            table.append(_YES if children else _NO)
            for name, form in attributes:
                table += _uleb(name) + _uleb(form)
            table += b"\0\0"
        table.append(0)
        return {".debug_info": bytes(info), ".debug_abbrev": bytes(table), ".debug_str": bytes(self._strings)}


class _Writer:
    """Writes the types of a BTF as DWARF."""

    def __init__(self, btf: Btf, word_size: int) -> None:
        self.btf = btf
        self.word_size = word_size
        self.dwarf = DwarfSections(word_size)
        self._written: dict[int, int] = {}
        """Cache of reference(): type id that it was called with -> its result, with 0 in place of None."""
        self._next = len(btf)
        """Id for the next type that declared() makes, because the BTF lacks it: a pointer or an array."""

    def reference(self, number: int) -> int | None:
        """Return the type id to write in a reference to the type `number`; None for void.

        It is `number`, or for a type tag the id of the type after all tags, because the DWARF has no type
        tags.
        """
        found = self._written.get(number)
        if found is None:
            found = self._written[number] = self._find(number)
        return found or None

    def _find(self, number: int) -> int:
        for _ in range(_DEPTH):
            kind = self.btf.type(number)
            if kind.kind is not Kind.TYPE_TAG:
                return 0 if kind.kind in _UNWRITTEN else number
            number = kind.size_or_type
        return 0

    def _type(self, number: int) -> Attribute:
        return _TYPE, _REF4, self.reference(number)

    def write(self, number: int) -> None:
        """Write the type with the id `number`. Write nothing for functions, variables and tags."""
        btf = self.btf
        kind = btf.type(number)
        if kind.kind in _UNWRITTEN:
            return
        name: Attribute = (_NAME, _STRP, btf.text(kind.name) or None)
        dwarf = self.dwarf
        match kind.kind:
            case Kind.INT:
                encoding = (
                    _BOOLEAN if btf.is_bool(number) else _encoding(btf.int_encoding(number)[0], str(name[2]))
                )
                size = kind.size_or_type
                dwarf.entry(_BASE, (name, (_BYTE_SIZE, _UDATA, size), (_ENCODING, _DATA1, encoding)), number)
            case Kind.FLOAT:
                size = kind.size_or_type
                dwarf.entry(_BASE, (name, (_BYTE_SIZE, _UDATA, size), (_ENCODING, _DATA1, _FLOAT)), number)
            case Kind.PTR:
                target = self._type(kind.size_or_type)
                dwarf.entry(_POINTER, ((_BYTE_SIZE, _DATA1, self.word_size), target), number)
            case Kind.TYPEDEF | Kind.CONST | Kind.VOLATILE | Kind.RESTRICT:
                dwarf.entry(_TAG_OF[kind.kind], (name, self._type(kind.size_or_type)), number)
            case Kind.ARRAY:
                element, count = btf.array_of(number)
                dwarf.begin(_ARRAY, (self._type(element),), children=True, number=number)
                # BTF does not distinguish [0] from []. A missing count is right for [], which is frequent.
                dwarf.entry(_SUBRANGE, ((_UPPER_BOUND, _UDATA, count - 1 if count else None),))
                dwarf.end()
            case Kind.STRUCT | Kind.UNION:
                self._structure(number, name)
            case Kind.FWD:
                tag = _UNION if kind.flag else _STRUCT
                dwarf.entry(tag, (name, (_DECLARATION, _PRESENT, 1)), number)
            case Kind.ENUM | Kind.ENUM64:
                self._enum(number, name)
            case Kind.FUNC_PROTO:
                result, parameters = btf.signature(number)
                attributes = ((_PROTOTYPED, _PRESENT, 1), self._type(result))
                dwarf.begin(_PROTO, attributes, children=True, number=number)
                self._parameters(parameters)
                dwarf.end()

    def _structure(self, number: int, name: Attribute) -> None:
        kind = self.btf.type(number)
        tag = _STRUCT if kind.kind is Kind.STRUCT else _UNION
        self.dwarf.begin(tag, (name, (_BYTE_SIZE, _UDATA, kind.size_or_type)), children=True, number=number)
        for member in self.btf.members(number):
            place: tuple[Attribute, ...]
            if member.width:
                place = (_BIT_OFFSET, _UDATA, member.offset), (_BIT_SIZE, _UDATA, member.width)
            else:
                place = ((_MEMBER_LOCATION, _UDATA, member.offset // 8),)
            self.dwarf.entry(_MEMBER, ((_NAME, _STRP, member.name or None), self._type(member.type), *place))
        self.dwarf.end()

    def _enum(self, number: int, name: Attribute) -> None:
        size = self.btf.type(number).size_or_type
        values = self.btf.enumerators(number)
        # Without values, BTF means the declaration of an enum.
        declared = (_DECLARATION, _PRESENT, None if values else 1)
        attributes = (name, (_BYTE_SIZE, _UDATA, size or None), declared)
        self.dwarf.begin(_ENUM, attributes, children=True, number=number)
        for each, value in values.items():
            form = _SDATA if value < 0 else _UDATA
            self.dwarf.entry(_ENUMERATOR, ((_NAME, _STRP, each), (_CONST_VALUE, form, value)))
        self.dwarf.end()

    def _parameters(self, parameters: Iterable[Member]) -> None:
        for each in parameters:
            if not each.type and not each.name:
                self.dwarf.entry(_VARIADIC, ())
            else:
                self.dwarf.entry(_PARAMETER, ((_NAME, _STRP, each.name or None), self._type(each.type)))

    def function(self, number: int, start: int, size: int) -> None:
        """Write the function with the id `number`, whose code begins at `start` and has `size` bytes."""
        kind = self.btf.type(number)
        if self.btf.kind(kind.size_or_type) is not Kind.FUNC_PROTO:
            return
        result, parameters = self.btf.signature(kind.size_or_type)
        attributes = (
            (_NAME, _STRP, self.btf.text(kind.name)),
            (_EXTERNAL, _PRESENT, 1),
            (_PROTOTYPED, _PRESENT, 1),
            self._type(result),
            (_LOW_PC, _ADDR, start),
            (_HIGH_PC, _DATA8, size),
        )
        self.dwarf.begin(_FUNCTION, attributes, children=True)
        self._parameters(parameters)
        self.dwarf.end()

    def variable(self, name: str, number: int, address: int) -> None:
        """Write a global variable `name` at `address`, whose type has the id `number`."""
        self._global(name, self.reference(number), address)

    def described(self, numbers: Iterable[int], symbols: Mapping[str, tuple[int, int]]) -> None:
        """Write those functions and variables of BTF whose names are in `symbols`.

        `numbers`: ids of functions and variables. `symbols`: name -> address and size. If several functions
        share an address or a name, the first counts.
        """
        known: set[int] = set()
        for number in numbers:
            kind = self.btf.type(number)
            name = self.btf.text(kind.name)
            address, size = symbols.get(name, (0, 0))
            if name not in symbols:
                continue
            if kind.kind is Kind.VAR:
                self.variable(name, kind.size_or_type, address)
            elif address not in known:
                known.add(address)
                self.function(number, address, size)

    def declared(self, name: str, text: str, address: int) -> None:
        """Write the global variable `name`, whose type in C is `text`. Do nothing if BTF lacks the type."""
        number = _find(self.btf, text)
        if number is None:
            return
        if text.endswith("*"):
            size: Attribute = (_BYTE_SIZE, _DATA1, self.word_size)
            self.dwarf.entry(_POINTER, (size, (_TYPE, _REF4, number)), self._next)
        elif text.endswith("[]"):
            self.dwarf.begin(_ARRAY, ((_TYPE, _REF4, number),), children=True, number=self._next)
            self.dwarf.entry(_SUBRANGE, ())
            self.dwarf.end()
        if text.endswith(("*", "[]")):
            number = self._next
            self._next += 1
        self._global(name, number, address)

    def _global(self, name: str, number: int | None, address: int) -> None:
        attributes = (_NAME, _STRP, name), (_EXTERNAL, _PRESENT, 1), (_TYPE, _REF4, number)
        self.dwarf.entry(_VARIABLE, (*attributes, (_LOCATION, _EXPRLOC, address)))


def debug_sections(
    btf: Btf,
    word_size: int,
    symbols: Mapping[str, tuple[int, int]],
    variables: Mapping[str, str],
) -> dict[str, bytes]:
    """Return the sections with DWARF for a kernel: name -> contents.

    `symbols`: name -> address and size. `variables`: name of a global variable -> its type in C, which is
    `struct NAME` or `NAME`, perhaps followed by `*` or `[]`. BTF itself has only per-CPU variables.
    Raises: KernelError ENOEXEC (damaged BTF).
    """
    btf = _remembering(btf)
    writer = _Writer(btf, word_size)
    dwarf = writer.dwarf
    kinds = [(number, btf.kind(number)) for number in range(1, len(btf))]
    described = [number for number, kind in kinds if kind in (Kind.FUNC, Kind.VAR)]
    named = (btf.name(number) for number, kind in kinds if kind is Kind.FUNC)
    functions = [symbols[name] for name in named if name in symbols] or [(0, 0)]
    start = min(functions)[0]
    end = max(address + size for address, size in functions)
    attributes = (
        (_PRODUCER, _STRP, "kprobefs, from BTF"),
        (_LANGUAGE, _DATA1, _C11),
        (_NAME, _STRP, "vmlinux"),
        (_LOW_PC, _ADDR, start),
        (_HIGH_PC, _DATA8, end - start),
    )
    dwarf.begin(_CU, attributes, children=True)
    for number, _ in kinds:
        writer.write(number)
    writer.described(described, symbols)
    for name, text in variables.items():
        if name in symbols:
            writer.declared(name, text, symbols[name][0])
    dwarf.end()
    return dwarf.finish()


def _remembering(btf: Btf) -> Btf:
    """Return a copy of `btf` that keeps the types and names that it reads; each is read several times."""
    found = copy(btf)
    vars(found).update(type=cache(btf.type), text=cache(btf.text))
    return found


def empty_sections(word_size: int) -> dict[str, bytes]:
    """Return the sections with DWARF for a kernel without types: name -> contents.

    Their only compilation unit has no entries.
    """
    dwarf = DwarfSections(word_size)
    dwarf.entry(_CU, ((_PRODUCER, _STRP, "kprobefs"), (_LANGUAGE, _DATA1, _C11), (_NAME, _STRP, "vmlinux")))
    return dwarf.finish()


def _find(btf: Btf, text: str) -> int | None:
    """Return the id of the type whose C name is `text` without "*" and "[]"; None if BTF lacks the type."""
    words = text.rstrip("*[] ")
    for kind in (Kind.STRUCT,) if words.startswith("struct ") else (Kind.INT, Kind.TYPEDEF):
        try:
            return btf.find(kind, words.removeprefix("struct "))
        except KernelError:
            continue
    return None


def _encoding(is_signed: bool, name: str) -> int:
    if name in ("char", "signed char", "unsigned char"):
        return _SIGNED_CHAR if is_signed or name == "char" else _UNSIGNED_CHAR
    return _SIGNED if is_signed else _UNSIGNED


def _uleb(value: int) -> bytes:
    """Return the unsigned LEB128 of a number."""
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _sleb(value: int) -> bytes:
    """Return the signed LEB128 of a number."""
    found = bytearray()
    while not -0x40 <= value < 0x40:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value & 0x7F)
    return bytes(found)
