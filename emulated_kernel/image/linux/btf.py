"""BTF, the kernel's description of its types: sizes, offsets of members, parameters of functions.

Source: Documentation/bpf/btf.rst. pahole writes BTF when a kernel is built with CONFIG_DEBUG_INFO_BTF.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from errno import ENOENT
from functools import cached_property

from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")
_WORDS3 = struct.Struct("<III")
_DEPTH = 64
"""Maximum length of a chain of types that refer to each other: in damaged BTF, a chain can be endless."""
_LONGEST = 1 << 10
"""Maximum length of a name in bytes, including its zero byte."""
_BIG = 1 << 31


class Kind(IntEnum):
    """Kind of a type. Mirrors: include/uapi/linux/btf.h (v6.1)."""

    VOID = 0
    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


_KINDS = tuple(Kind)
"""All kinds by number: a call of Kind() takes longer than the rest of Btf.type()."""
_FIXED_TAIL = {Kind.INT: 4, Kind.ARRAY: 12, Kind.VAR: 4, Kind.DECL_TAG: 4}
_TAIL_EACH = {
    Kind.STRUCT: 12, Kind.UNION: 12, Kind.ENUM: 8, Kind.FUNC_PROTO: 8, Kind.DATASEC: 12, Kind.ENUM64: 12,
}  # fmt: skip
"""Kind -> size in bytes of each member's entry after the fixed part of a type."""
_TAILS = [(_FIXED_TAIL.get(kind, 0), _TAIL_EACH.get(kind, 0)) for kind in Kind]
"""Sizes in bytes by number of a kind: (fixed data after a type's three words, entry of each member)."""
_MODIFIERS = (Kind.TYPEDEF, Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG)
_ENUMS = (Kind.ENUM, Kind.ENUM64)


@dataclass(frozen=True, slots=True)
class Type:
    """One type. `size_or_type` is its size in bytes, or the id of the type to which it refers.

    `name`: offset of its name in the string table. `count`: number of its members, parameters or enumerators
    (vlen). `flag`: kind_flag of struct btf_type.
    """

    kind: Kind
    name: int
    count: int
    flag: bool
    size_or_type: int
    tail: int
    """Offset in the BTF of the data after the type's three words."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a structure or union, or a parameter of a function. `type` is the id of its type.

    Offset and width are in bits. The width is 0 except for bit fields; a parameter's offset is 0, too.
    """

    name: str
    type: int
    offset: int
    width: int


_VOID = Type(Kind.VOID, 0, 0, False, 0, 0)


class StepLimit:
    """Limit on the number of types that one search or one declaration visits.

    In damaged BTF, types can contain each other, or contain one type very many times.
    """

    def __init__(self, limit: int = 3000) -> None:
        self._left = limit

    def take(self) -> None:
        """Count a visit of a type. Raises: KernelError ENOEXEC (there were too many visits)."""
        self._left -= 1
        if self._left < 0:
            raise unusable("types of its BTF contain each other")


class NameIndex(NamedTuple):
    """The names of types and enumerators, sorted by name and then by type id, in arrays of 4-byte words."""

    names: Sequence[int]
    """Offset of each name in the string table."""
    types: Sequence[int]
    """Id of the type with the name, or of the enum that has the enumerator."""


class Btf:
    """The types of one kernel. Each type has an id, which parameters call `number`; void has the id 0.

    Raises: KernelError ENOEXEC (damaged data), ENOENT (an unknown type or member).
    """

    def __init__(self, data: bytes | memoryview, parts: Mapping[str, memoryview] | None = None) -> None:
        """Parse BTF data, which is not copied.

        `parts`: a result of parts() for the same data, which saves 0.15 s; None if there is none.
        """
        if len(data) < _HEADER.size:
            raise unusable("its BTF is truncated")
        magic, _, _, header, type_at, type_size, text_at, text_size = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise unusable("its BTF has another magic number")
        whole = memoryview(data)
        self._types = whole[header + type_at : header + type_at + type_size]
        self._texts = whole[header + text_at : header + text_at + text_size]
        if len(self._types) < type_size or len(self._texts) < text_size:
            raise unusable("its BTF is truncated")
        self._found: dict[tuple[Kind, str], int] = {}
        """Cache of find(): kind and name -> type id, or 0 for a type that doesn't exist."""
        self._located: dict[str, tuple[int, Member] | str] = {}
        """Cache of locate(): path -> result, or message of ENOENT. Each event looks up the same few paths."""
        self._starts: Sequence[int]
        """Offset of each type in the data of all types; the first item is that of the type with id 1."""
        self._named: NameIndex
        """All names, in the order of the types; `_index` sorts them by name.

        The types of a module may also have names in the kernel's string table, which the module's table
        continues.
        """
        if parts is None:
            self._starts, self._named = self._scan()
            return
        self._starts = parts["starts"].cast("I")
        self._index = NameIndex(parts["names"].cast("I"), parts["types"].cast("I"))
        has_types = not self._starts or self._starts[-1] + _TYPE.size <= len(self._types)
        if len(self._index.names) != len(self._index.types) or not has_types:
            raise unusable("its BTF has another index")

    def parts(self) -> dict[str, bytes]:
        """Return the index of types and names, to store it in a file: name of an array -> its bytes."""
        arrays = {"starts": self._starts, **self._index._asdict()}
        return {name: bytes(memoryview(words)) for name, words in arrays.items()}

    @cached_property
    def _index(self) -> NameIndex:
        names, types = self._named
        in_order = sorted(set(names), key=self._name)
        ranks = {name: rank for rank, name in enumerate(in_order)}
        order = sorted(range(len(names)), key=[ranks[name] for name in names].__getitem__)
        return NameIndex(array("I", [names[at] for at in order]), array("I", [types[at] for at in order]))

    def _with_name(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield (offset of the name, type id) of each type and enumerator called `name`, by ascending id."""
        names, types = self._index
        wanted = name.encode()
        at = bisect_left(names, wanted, key=self._name)
        while at < len(names) and self._name(names[at]) == wanted:
            yield names[at], types[at]
            at += 1

    def __len__(self) -> int:
        return len(self._starts) + 1

    def find(self, kind: Kind, name: str) -> int:
        """Return the id of the first type of the kind `kind` called `name`. Raises: KernelError ENOENT."""
        number = self._found.get((kind, name))
        if number is None:
            number = next((each for at, each in self._with_name(name) if self._is(each, kind, at)), 0)
            self._found[kind, name] = number
        if not number:
            raise KernelError(ENOENT, f"this kernel's BTF has no {kind.name.lower()} {name}")
        return number

    def _is(self, number: int, kind: Kind, name: int) -> bool:
        """Return True if the type `number` is of the kind `kind`, and its name is at the offset `name`."""
        found = self.type(number)
        return found.kind is kind and found.name == name

    def size(self, structure: str) -> int:
        """Return the size in bytes of the structure called `structure`. Raises: KernelError ENOENT."""
        return self.type(self.find(Kind.STRUCT, structure)).size_or_type

    def offset(self, path: str) -> int:
        """Return the offset of a member in bytes. `path` is, for example, "task_struct.thread.sp"."""
        bits, _ = self.locate(path)
        return bits // 8

    def locate(self, path: str) -> tuple[int, Member]:
        """Return the offset in bits of the member `path` (STRUCT.MEMBER...), and the member.

        `path` may omit anonymous members. Raises: KernelError ENOENT.
        """
        found = self._located.get(path)
        if found is None:
            try:
                found = self._locate(path)
            except KernelError as error:
                if error.errno != ENOENT:
                    raise
                found = error.strerror or ""
            self._located[path] = found
        if isinstance(found, str):
            raise KernelError(ENOENT, found)
        return found

    def _locate(self, path: str) -> tuple[int, Member]:
        structure, *names = path.split(".")
        number = self.find(Kind.STRUCT, structure)
        offset = 0
        member = None
        for name in names:
            found = self._member(self.resolve(number), name, _DEPTH, set())
            if found is None:
                raise KernelError(ENOENT, f"this kernel's BTF has no {path}")
            member = found[1]
            offset = offset + found[0]
            number = member.type
        if member is None:
            raise KernelError(ENOENT, f"{path} names no member")
        return offset, member

    def length(self, path: str) -> int:
        """Return the number of elements of the array member `path`.

        Raises: KernelError ENOENT (no such member, or it is no array).
        """
        array_type = self.type(self.resolve(self.locate(path)[1].type))
        if array_type.kind is not Kind.ARRAY:
            raise KernelError(ENOENT, f"{path} is no array")
        return int(_WORDS3.unpack_from(self._types, array_type.tail)[2])

    def has(self, path: str) -> bool:
        """Return True if the BTF has the structure or the member `path`."""
        try:
            return bool(self.locate(path) if "." in path else self.find(Kind.STRUCT, path))
        except KernelError as error:
            if error.errno == ENOENT:
                return False
            raise

    def members(self, number: int) -> Iterator[Member]:
        """Yield the members of the structure or union with the type id `number`, in order of declaration."""
        kind = self.type(number)
        if kind.kind not in (Kind.STRUCT, Kind.UNION):
            return
        for index in range(kind.count):
            name, member, offset = _WORDS3.unpack_from(self._types, kind.tail + 12 * index)
            width = offset >> 24 if kind.flag else 0
            yield Member(self.text(name), member, offset & 0xFFFFFF if kind.flag else offset, width)

    def resolve(self, number: int) -> int:
        """Return the id of the type that remains when `number` loses typedefs, qualifiers and type tags."""
        for _ in range(_DEPTH):
            kind = self.type(number)
            if kind.kind not in _MODIFIERS:
                return number
            number = kind.size_or_type
        raise unusable("types of its BTF refer to each other in a circle")

    def enumerators(self, number: int) -> dict[str, int]:
        """Return the enumerators of the enum with the type id `number`: name -> value."""
        kind = self.type(number)
        big = kind.kind is Kind.ENUM64
        found = {}
        for index in range(kind.count):
            if big:
                name, low, high = _WORDS3.unpack_from(self._types, kind.tail + 12 * index)
                value = low | high << 32
            else:
                name, value = struct.unpack_from("<II", self._types, kind.tail + 8 * index)
            bits = 64 if big else 32
            found[self.text(name)] = value - (1 << bits) if kind.flag and value >> bits - 1 else value
        return found

    def constant(self, name: str) -> int:
        """Return the value of the first enumerator called `name`. Raises: KernelError ENOENT."""
        for _, number in self._with_name(name):
            if self.type(number).kind in _ENUMS:
                value = self.enumerators(number).get(name)
                if value is not None:
                    return value
        raise KernelError(ENOENT, f"this kernel's BTF has no enumerator {name}")

    @cached_property
    def constants(self) -> dict[str, int]:
        """Name -> value of the enumerators of all enums. If several have one name, the first counts."""
        return self._enumerated(range(len(self)))

    def constants_of_module(self, data: bytes) -> dict[str, int]:
        """Return the enumerators that a module's BTF adds: name -> value.

        `data`: the module's BTF. Its string table continues that of the kernel.
        """
        own = Btf(data)
        own._texts = memoryview(bytes(self._texts) + bytes(own._texts))
        return own._enumerated(range(len(own)))

    def _enumerated(self, types: Iterable[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for number in types:
            if self.type(number).kind in _ENUMS:
                for name, value in self.enumerators(number).items():
                    found.setdefault(name, value)
        return found

    def parameters(self, function: str) -> int:
        """Return the number of a function's declared parameters, without "...".

        Raises: KernelError ENOENT (no such function).
        """
        _, parameters = self.prototype(function)
        return len(parameters) - (bool(parameters) and not parameters[-1].type)

    def prototype(self, function: str) -> tuple[int, tuple[Member, ...]]:
        """Return the id of a function's result type, and its parameters. "..." has no name and type id 0.

        Raises: KernelError ENOENT (no such function).
        """
        number = self.type(self.find(Kind.FUNC, function)).size_or_type
        if self.type(number).kind is not Kind.FUNC_PROTO:
            raise unusable(f"in its BTF the function {function} has no prototype")
        return self.signature(number)

    def signature(self, number: int) -> tuple[int, tuple[Member, ...]]:
        """Return the id of the result type and the parameters of the prototype with the type id `number`."""
        proto = self.type(number)
        parameters = (
            struct.unpack_from("<II", self._types, proto.tail + 8 * index) for index in range(proto.count)
        )
        return proto.size_or_type, tuple(Member(self.text(name), kind, 0, 0) for name, kind in parameters)

    def array_of(self, number: int) -> tuple[int, int]:
        """Return the type id of the elements of an array type, and the number of its elements."""
        element, _, count = _WORDS3.unpack_from(self._types, self.type(number).tail)
        return element, count

    def int_encoding(self, number: int) -> tuple[bool, int]:
        """Return (is_signed, width in bits) of the integer type with the id `number`."""
        word = int.from_bytes(self._types[self.type(number).tail :][:4], "little")
        return bool(word >> 24 & 1), word & 0xFF

    def is_bool(self, number: int) -> bool:
        """Return True if the integer type with the id `number` is `_Bool`."""
        word = int.from_bytes(self._types[self.type(number).tail :][:4], "little")
        return bool(word >> 24 & 4)

    def kind(self, number: int) -> Kind:
        """Return the kind of the type with the id `number`."""
        return self.type(number).kind

    def name(self, number: int) -> str:
        """Return the name of the type with the id `number`, or "" if it has none."""
        return self.text(self.type(number).name)

    def referred(self, number: int) -> int:
        """Return the id of the type to which the pointer or array type `number` refers.

        For an array, this is the type of the elements. Typedefs and qualifiers of the result are resolved.
        """
        kind = self.type(number)
        if kind.kind is Kind.ARRAY:
            return self.resolve(self.array_of(number)[0])
        return self.resolve(kind.size_or_type)

    def text(self, offset: int) -> str:
        """Return the string at the offset `offset` of the string table."""
        return self._name(offset).decode("utf-8", "replace")

    def _name(self, offset: int) -> bytes:
        name, end, _ = bytes(self._texts[offset : offset + _LONGEST]).partition(b"\0")
        return name if end else b""

    def type(self, number: int) -> Type:
        """Return the type with the id `number`. Raises: KernelError ENOEXEC (there is none)."""
        if not 0 <= number <= len(self._starts):
            raise unusable("its BTF refers to a type that it doesn't have")
        if not number:
            return _VOID
        at = self._starts[number - 1]
        name, info, size = _TYPE.unpack_from(self._types, at)
        kind = _KINDS[info >> 24 & 0x1F]
        return Type(kind, name, info & 0xFFFF, bool(info & _BIG), size, at + _TYPE.size)

    def _scan(self) -> tuple[array[int], NameIndex]:
        """Return the offsets of the types, and all names in the order of the types."""
        starts = array("I")
        names = array("I")
        types = array("I")
        data = self._types
        at = 0
        while at < len(data):
            if at + _TYPE.size > len(data):
                raise unusable("its BTF ends within a type")
            name, info, _ = _TYPE.unpack_from(data, at)
            kind = info >> 24 & 0x1F
            if not 0 < kind < len(_TAILS):
                raise unusable(f"its BTF has types of an unknown kind, {kind}")
            starts.append(at)
            fixed, each = _TAILS[kind]
            tail = at + _TYPE.size + fixed
            at = tail + each * (info & 0xFFFF)
            if at > len(data):
                raise unusable("its BTF ends within a type")
            if name:
                names.append(name)
                types.append(len(starts))
            if kind in _ENUMS:
                names.extend(data[tail:at].cast("I")[:: each // 4])
                types.extend([len(starts)] * (len(names) - len(types)))
        return starts, NameIndex(names, types)

    def _member(self, number: int, name: str, depth: int, others: set[int]) -> tuple[int, Member] | None:
        """Return the offset in bits of the member `name`, and the member; None if it is not found.

        The search covers the structure with the type id `number`, and its anonymous members.
        `depth`: maximum nesting. `others` collects the ids of the types that don't have the member; anonymous
        members of these types are not searched.

        Raises: KernelError ENOEXEC (nested more deeply).
        """
        if not depth:
            raise unusable("structures of its BTF contain each other")
        for member in self.members(number):
            if member.name == name:
                return member.offset, member
            if not member.name:
                inner = self.resolve(member.type)
                found = None if inner in others else self._member(inner, name, depth - 1, others)
                if found:
                    return member.offset + found[0], found[1]
        others.add(number)
        return None
