"""Members of structures by their offset, from BTF. They describe the data that a dereference reads."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.image.linux.btf import Btf, Kind, StepLimit
from emulated_kernel.util.fast_dataclass import dataclass

_POINTER_SIZE = 8
_DEPTH = 64
"""Maximum nesting of the structures and arrays that are searched for a member."""


@dataclass(frozen=True, slots=True)
class ScalarMember:
    """A member that is no structure; `path` has the names of the structures around it."""

    path: str
    size: int
    """Size of the member in bytes."""
    is_bitfield: bool
    skipped: int = 0
    """Number of the member's bytes before the offset; 0 if the member begins there."""


def pointed_to(btf: Btf, number: int) -> int | None:
    """Return the type id of the structure to which a pointer type points, or None for other types."""
    pointer = btf.type(btf.resolve(number))
    if pointer.kind is not Kind.PTR:
        return None
    below = btf.resolve(pointer.size_or_type)
    return below if btf.type(below).kind in (Kind.STRUCT, Kind.UNION) else None


def members_at(btf: Btf, number: int, offset: int) -> list[ScalarMember]:
    """Return the members that have the byte at an offset of the structure with the type id `number`.

    The list has several members if the offset is in a union.
    """
    return list(_members_at(btf, number, 8 * offset, "", _DEPTH, StepLimit()))


def size_of(btf: Btf, number: int, depth: int = _DEPTH) -> int:
    """Return the size in bytes of the type with the id `number`.

    Return 0 for void and functions, and for arrays of more than `depth` dimensions.
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
            yield ScalarMember(path, size_of(btf, number), is_bitfield=False, skipped=bit // 8)
        return
    for member in btf.members(btf.resolve(number)):
        limit.take()
        width = member.width or 8 * size_of(btf, member.type)
        if not member.offset <= bit < member.offset + max(width, 1):
            continue
        name = f"{path}.{member.name}".lstrip(".") if member.name else path
        if member.width:
            yield ScalarMember(name, size_of(btf, member.type), is_bitfield=True)
        else:
            yield from _members_at(btf, member.type, bit - member.offset, name, depth - 1, limit)
