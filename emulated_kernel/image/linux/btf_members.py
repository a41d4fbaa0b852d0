"""Finds the members at an offset of a structure, from BTF, to tell which data a dereference reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.image.linux.btf import Btf, Kind, StepLimit
from emulated_kernel.util.fast_dataclass import dataclass

_POINTER_SIZE = 8
_QUALIFIERS = (Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG)
_ADDRESSES = frozenset(
    {
        *("long unsigned int", "long long unsigned int", "long int"),
        *("unsigned long", "unsigned long long", "long"),
        *(
            "u64",
            "__u64",
            "uint64_t",
            "s64",
            "__s64",
            "uintptr_t",
            "ulong",
            "kernel_ulong_t",
            "__kernel_ulong_t",
        ),
    }
)
"""Names of the integer types in which Linux also keeps addresses. GCC and Clang name them differently."""
_DEPTH = 64
"""Maximum nesting of the structures and arrays that are searched for a member."""


@dataclass(frozen=True, slots=True)
class ScalarMember:
    """A member that is no structure, perhaps within other structures or arrays.

    `path`: names of the members around it and its own name, such as `thread.fpu[2]`. Anonymous members are
    left out.
    """

    path: str
    type: int
    """Type id of the member; for a bit field, of the type with which it is declared."""
    size: int
    """Size of the type in bytes."""
    is_bitfield: bool
    skipped: int = 0
    """Number of the member's bytes before the searched offset; 0 if the member begins at this offset."""


def pointed_to(btf: Btf, number: int) -> int | None:
    """Return the id of the type to which the pointer type `number` points, without qualifiers.

    Return None if `number` is no pointer type.
    """
    pointer = btf.type(btf.resolve(number))
    return unqualified(btf, pointer.size_or_type) if pointer.kind is Kind.PTR else None


def unqualified(btf: Btf, number: int) -> int:
    """Return the id of the type `number` without the qualifiers in front of it. A typedef is kept."""
    for _ in range(_DEPTH):
        kind = btf.type(number)
        if kind.kind not in _QUALIFIERS:
            break
        number = kind.size_or_type
    return number


def is_structure(btf: Btf, number: int) -> bool:
    """Return True if the type `number` is a structure or a union."""
    return btf.kind(btf.resolve(number)) in (Kind.STRUCT, Kind.UNION)


def is_address(btf: Btf, number: int) -> bool:
    """Return True if a value of the type `number` can be an address.

    Linux keeps addresses in pointers, and in integers of some types: `unsigned long` and `u64`, `long` in
    system calls, and `s64` in atomic_long_t. Integers of other types, such as size_t and loff_t, are no
    addresses.
    """
    return btf.kind(btf.resolve(number)) is Kind.PTR or btf.name(unqualified(btf, number)) in _ADDRESSES


def members_at(btf: Btf, number: int, offset: int) -> list[ScalarMember]:
    """Return the members that contain the byte at `offset` of the structure with the type id `number`.

    The list has several members if the offset is in a union, or if bit fields share the byte. The elements of
    an array without length at the end of the structure are members, too.
    """
    return list(_members_at(btf, number, 8 * offset, "", _DEPTH, StepLimit()))


def beginning_with(btf: Btf) -> Mapping[int, Sequence[int]]:
    """Return type id of a structure -> type ids of the structures that have it as their first member."""
    found: dict[int, list[int]] = {}
    for number in range(1, len(btf)):
        if btf.kind(number) is Kind.STRUCT and (first := next(btf.members(number), None)) is not None:
            found.setdefault(btf.resolve(first.type), []).append(number)
    return found


def size_of(btf: Btf, number: int, depth: int = _DEPTH) -> int:
    """Return the size in bytes of the type with the id `number`.

    Return 0 for void, functions and forward declarations, and for arrays of more than `depth` dimensions.
    """
    kind = btf.type(btf.resolve(number))
    if kind.kind is Kind.PTR:
        return _POINTER_SIZE
    if kind.kind is Kind.ARRAY:
        element, count = btf.array_of(btf.resolve(number))
        return count * size_of(btf, element, depth - 1) if depth else 0
    if kind.kind in (Kind.VOID, Kind.FUNC, Kind.FUNC_PROTO, Kind.FWD):
        return 0
    return kind.size_or_type


def _members_at(
    btf: Btf, number: int, bit: int, path: str, depth: int, limit: StepLimit
) -> Iterator[ScalarMember]:
    limit.take()
    kind = btf.type(btf.resolve(number))
    if not depth:
        return
    if kind.kind is Kind.ARRAY:
        element, _ = btf.array_of(btf.resolve(number))
        size = 8 * size_of(btf, element)
        if size:
            yield from _members_at(btf, element, bit % size, f"{path}[{bit // size}]", depth - 1, limit)
        return
    if kind.kind not in (Kind.STRUCT, Kind.UNION):
        if not bit % 8:
            yield ScalarMember(path, number, size_of(btf, number), is_bitfield=False, skipped=bit // 8)
        return
    members = list(btf.members(btf.resolve(number)))
    for member in members:
        limit.take()
        name = f"{path}.{member.name}".lstrip(".") if member.name else path
        if member.width:
            if member.offset < bit + 8 and bit < member.offset + member.width:
                yield ScalarMember(name, member.type, size_of(btf, member.type), is_bitfield=True)
            continue
        width = 8 * size_of(btf, member.type)
        is_last = member is members[-1] or kind.kind is Kind.UNION
        has_end = not (is_last and _is_flexible(btf, member.type, depth - 1, limit))
        if member.offset <= bit and (bit < member.offset + width or not has_end):
            yield from _members_at(btf, member.type, bit - member.offset, name, depth - 1, limit)


def _is_flexible(btf: Btf, number: int, depth: int, limit: StepLimit) -> bool:
    """Return True if the type `number` is an array without length, or ends with one.

    Types nested deeper than `depth` levels are not examined. `limit`: limit on the types that the search
    visits.
    """
    limit.take()
    resolved = btf.resolve(number)
    kind = btf.type(resolved)
    if not depth or kind.kind not in (Kind.ARRAY, Kind.STRUCT, Kind.UNION):
        return False
    if kind.kind is Kind.ARRAY:
        return not btf.array_of(resolved)[1]
    members = list(btf.members(resolved))
    last = members if kind.kind is Kind.UNION else members[-1:]
    return any(not each.width and _is_flexible(btf, each.type, depth - 1, limit) for each in last)
