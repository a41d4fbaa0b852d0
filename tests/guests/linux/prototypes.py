"""Prototypes of kernel functions, read from the BTF of the kernel."""

from __future__ import annotations

import struct
from typing import NamedTuple

from emulated_kernel.image.linux.btf import Btf, Kind

_KEYWORDS = {Kind.STRUCT: "struct ", Kind.UNION: "union ", Kind.ENUM: "enum ", Kind.ENUM64: "enum "}
_QUALIFIERS = (Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG)


class Prototype(NamedTuple):
    """A prototype, with types in C and without qualifiers."""

    parameters: tuple[str, ...]
    is_variadic: bool


def prototype(btf: Btf, function: str) -> Prototype:
    """Return a function's prototype. Raises: KernelError (no such function)."""
    count = btf.parameters(function)
    proto = btf.type(btf.type(btf.find(Kind.FUNC, function)).size_or_type)
    types = [struct.unpack_from("<II", btf._types, proto.tail + 8 * at)[1] for at in range(count)]
    return Prototype(tuple(_declared(btf, each) for each in types), count < proto.count)


def _declared(btf: Btf, number: int) -> str:
    kind = btf.type(number)
    if kind.kind in _QUALIFIERS:
        return _declared(btf, kind.size_or_type)
    if kind.kind is Kind.FUNC_PROTO:
        return "()"
    if kind.kind is Kind.PTR:
        to = _declared(btf, kind.size_or_type)
        return "(*)" + to if to == "()" else f"{to} *"
    return _KEYWORDS.get(kind.kind, "") + btf.text(kind.name)
