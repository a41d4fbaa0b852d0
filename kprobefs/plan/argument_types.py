"""Compares fetch arguments with the kernel's types, and warns of wrong types and offsets of members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.image.linux.btf import Btf, Kind
from emulated_kernel.image.linux.btf_declaration import Parameter, declaration, type_kind
from emulated_kernel.image.linux.btf_members import (
    ScalarMember,
    is_address,
    is_structure,
    members_at,
    pointed_to,
    size_of,
)
from emulated_kernel.trace.fetch.fetch_types import String, SymbolString
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.probes.trace_kprobe import TraceKprobe
from emulated_kernel.trace.text.numbers import kstrtol
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.similar_names import SHOWN
from kprobefs.definitions.syntax import Line, word_column
from kprobefs.plan.answer import Finding, Read
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.planned_kernel import PlannedKernel

_OFFSET = r"[+-]u?[+-]?[0-9][0-9a-fA-FxX]*\("
_EXPRESSION = lazy_pattern(
    rf"(?P<offsets>(?:{_OFFSET})*)(?P<base>\$arg[0-9]+|\$stack[0-9]+|\$retval|%[a-z0-9]+|[A-Za-z_]\w*)\)*"
    r"(?::(?P<type>[a-z0-9]+)(?:\[[0-9]+\])?.*)?"
)
"""Pattern for a fetch argument's expression: a base such as `$arg1`, with any number of dereferences."""
_POINTER_SIZE = 8
_SOCKADDR = "struct sockaddr"
"""Structure that stands for the socket addresses of all families; it declares only their start."""
_SOCKADDR_DATA = 2
"""Offset of the first byte of a socket address that depends on the family."""
_BIG_ENDIAN = lazy_pattern(r"__be(?:16|32|64)|__sum16|__wsum")
"""Pattern for the types of numbers in the network's byte order, whose bytes are often read one by one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A fetch argument that starts from a parameter or the result of the probed function.

    In `+8(+16($arg1)):u32`, the argument starts from $arg1.
    """

    arg: ProbeArg
    column: int
    """Column of the argument in the line, from 0 on."""
    base: str
    """The parameter or result as the argument names it, such as `$arg1`."""
    parameter: Parameter
    """The parameter or result of the function that `base` names."""
    offsets: tuple[int, ...]
    """Offsets of the dereferences. The first one is added to the base."""
    type: str
    """Name of the fetch type, or "" if the argument has none."""


def readings(
    kernel: PlannedKernel, line: Line, probe: TraceKprobe, explained: Explanation
) -> Iterator[Reading]:
    """Yield the fetch arguments of a probe that start from a parameter or the result of its function.

    `probe`: the probe that the line has created. `explained`: explanation of the probe's place.
    """
    known = _known(kernel, probe, explained)
    for number, arg in enumerate(probe.args):
        found = _EXPRESSION.fullmatch(arg.expression)
        parameter = None if found is None else known.get(found["base"])
        if found is None or parameter is None:
            continue
        texts = found["offsets"].split("(")[:-1]
        column = word_column(line.text, number + 2)
        offsets = tuple(map(_offset, reversed(texts)))
        yield Reading(arg, column, found["base"], parameter, offsets, found["type"] or "")


def _known(kernel: PlannedKernel, probe: TraceKprobe, explained: Explanation) -> Mapping[str, Parameter]:
    """Return a map from bases of fetch arguments, such as `$arg1`, to the parameters or result they name."""
    prototype = explained.prototype
    if prototype is None:
        return {}
    known = {"$retval": prototype.result} if probe.place.is_return else {}
    for argument, own in zip(explained.arguments, prototype.parameters, strict=False):
        # At the return, $argN is what the entry has stored, but a register has another value.
        places = [each for each in argument.places if each.startswith("$arg") or not probe.place.is_return]
        known |= dict.fromkeys(places, own)
        if own.name and InterfaceRule.BTF_ARGS in kernel.interface:
            known[own.name] = own
    return known


def _offset(text: str) -> int:
    """Return the offset of a dereference `+|-[u]OFFS`, as a signed 32-bit number."""
    number = text.replace("u", "", 1).removeprefix("+")
    return ((kstrtol(number) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def follow(kernel: PlannedKernel, reading: Reading) -> tuple[Read, Finding | None]:
    """Return (what a fetch argument reads, a warning about its types or None).

    The warning says that the argument's type or an offset differs from the kernel's types.
    """
    btf = kernel.btf
    assert btf is not None, "only BTF has parameters"
    parameter = reading.parameter
    walk = _Walk(kernel, btf, reading)
    arg = reading.arg
    warning = walk.warning() if reading.offsets else _scalar(arg, parameter, reading.type)
    read = Read(
        arg.name,
        reading.column,
        reading.base,
        declaration(btf, parameter.type_id, parameter.name),
        (parameter.name, type_kind(btf, parameter.type_id)),
        tuple(walk.members),
        0 if arg.count or arg.type.is_dynamic else arg.type.size,
        walk.value_size if reading.offsets else parameter.size,
    )
    return read, None if warning is None else Finding(warning[0], False, warning[1], reading.column)


def _scalar(arg: ProbeArg, parameter: Parameter, kind: str) -> tuple[str, str] | None:
    wanted = parameter.fetch_type
    if parameter.type == "void":
        return "no-result", f"{arg.name} is undefined: the function has no result"
    if not wanted or arg.type.is_dynamic or arg.count or kind.startswith(("b", "sym")):
        return None
    name = f"{parameter.name or 'the result'} ({parameter.type})"
    bits = 8 * parameter.size
    if arg.type.size < parameter.size:
        return (
            "type-size",
            f"{arg.name} reads {8 * arg.type.size} of the {bits} bits of {name}; use :{wanted}",
        )
    if arg.type.size > parameter.size:
        message = f"{arg.name} reads more than the {bits} bits of {name}, and the rest is undefined"
        return "type-size", f"{message}; use :{wanted}"
    if kind and {kind[0], wanted[0]} == {"s", "u"}:
        is_signed = "signed" if wanted[0] == "s" else "unsigned"
        return "type-sign", f"{name} is {is_signed}; use :{wanted}"
    return None


@dataclass(frozen=True, slots=True)
class _Named:
    """A member, and its name for messages, which begins with the name of the structure."""

    name: str
    member: ScalarMember


class _Walk:
    """The dereferences of a fetch argument, followed through the kernel's types."""

    def __init__(self, kernel: PlannedKernel, btf: Btf, reading: Reading) -> None:
        self._kernel = kernel
        self._btf = btf
        self._reading = reading
        self._name = reading.arg.name
        self.members: list[frozenset[str]] = []
        """For each dereference that was followed, the names of the members that begin at its offset."""
        self.value_size = 0
        """Size in bytes of the last member; 0 if it is unknown, or if the member is a bit field."""

    def warning(self) -> tuple[str, str] | None:
        """Return (rule, message) about the first dereference that does not fit the kernel's types, else None.

        Dereferences after one of an unknown type, such as `void *`, are not checked.
        """
        base = self._reading.parameter
        if not is_address(self._btf, base.type_id):
            return self._no_pointer(base.name or "the result", base.type)
        *inner, last = self._reading.offsets
        pointers = [base.type_id]
        for offset in inner:
            found, warning = self._members(pointers, offset)
            if warning is not None or not found:
                return warning
            addresses = [each.member.type for each in found if _may_be_address(self._btf, each.member)]
            if not addresses:
                return self._no_pointer(found[0].name, declaration(self._btf, found[0].member.type))
            pointers = addresses
        found, warning = self._members(pointers, last, reads_byte=self._reads_byte)
        return warning or (self._size(found) if found else None)

    @property
    def _reads_byte(self) -> bool:
        arg = self._reading.arg
        return arg.type.size == 1 and not arg.count and not arg.type.is_dynamic

    def _members(
        self, pointers: Sequence[int], offset: int, *, reads_byte: bool = False
    ) -> tuple[Sequence[_Named], tuple[str, str] | None]:
        """Return (members that begin at `offset` from a pointer, warning or None).

        The warning says that no member begins there. `pointers`: the types that the pointer may have, more
        than one if the pointer is in a union. If a type is unknown, the result is no members and None.
        `reads_byte`: only one byte is read. If this is a byte of a big-endian number, the result is no
        members and None, because reading any byte of such a number is sensible.

        If members that begin at `offset` are found, also append the set of their names to self.members. For a
        byte of a big-endian number, the name is `byte INDEX of NUMBER`.
        """
        found: list[_Named] = []
        targets = [pointed_to(self._btf, each) for each in pointers]
        for target in targets:
            if target is None:
                return (), None
            name = declaration(self._btf, target)
            if name == _SOCKADDR and offset >= _SOCKADDR_DATA:
                return (), None
            if is_structure(self._btf, target):
                members = members_at(self._btf, target, offset) if offset >= 0 else []
                found += [_Named(f"{name}.{each.path}", each) for each in members]
            elif (scalar := self._element(target, offset)) is not None:
                found.append(_Named(f"{name}{scalar.path}", scalar))
            else:
                return (), None
        if reads_byte and (numbers := [each for each in found if _is_big_endian(self._btf, each.member)]):
            self.members.append(frozenset(f"byte {each.member.skipped} of {each.name}" for each in numbers))
            return (), None
        if begin := [each for each in found if not each.member.skipped]:
            self.members.append(frozenset(each.name for each in begin))
            return begin, None
        return (), ("no-member", self._no_member(targets[0] or 0, offset, found))

    def _element(self, target: int, offset: int) -> ScalarMember | None:
        """Return the element that contains the byte at `offset` in an array of the type `target`, or None.

        Return None unless the type is a pointer, an enum, or an integer, and has at least two bytes: a
        pointer to characters or to a buffer leads to data of any kind.
        """
        size = size_of(self._btf, target)
        is_known = self._btf.kind(self._btf.resolve(target)) in (Kind.PTR, Kind.INT, Kind.ENUM, Kind.ENUM64)
        if not is_known or size < 2:
            return None
        return ScalarMember(f"[{offset // size}]", target, size, is_bitfield=False, skipped=offset % size)

    def _no_member(self, target: int, offset: int, around: Sequence[_Named]) -> str:
        name = declaration(self._btf, target)
        if around:
            member = around[0].member
            begin = f"{member.path} at offset {offset - member.skipped}"
            return f"no member of {name} begins at offset {offset}, which is within {begin}"
        size = size_of(self._btf, target)
        if 0 <= offset < size:
            return f"no member of {name} begins at offset {offset}"
        message = f"{self._name} reads at offset {offset} of {name}, which has {size} bytes"
        if larger := self._of_larger(self._btf.resolve(target), offset):
            return f"{message}; structures that begin with it have there: {', '.join(larger)}"
        return f"{message}; right only if it is part of a larger structure or an array"

    def _of_larger(self, structure: int, offset: int) -> list[str]:
        """Return STRUCTURE.MEMBER for members at `offset` in larger structures that begin with `structure`.

        The kernel casts pointers to such structures: a `struct sock *` often points to a tcp_sock. Return at
        most SHOWN names, the least nested members first.
        """
        found: list[str] = []
        waiting = [structure]
        for inner in waiting:
            for outer in self._kernel.larger_structures.get(inner, ()):
                waiting += [outer] if outer not in waiting else []
                if offset >= size_of(self._btf, inner):
                    members = members_at(self._btf, outer, offset)
                    paths = [each.path for each in members if not each.skipped]
                    found += [f"{self._btf.name(outer)}.{path}" for path in paths[:1]]
        return sorted(found, key=lambda name: name.count("."))[:SHOWN]

    def _no_pointer(self, name: str, kind: str) -> tuple[str, str]:
        return "no-pointer", f"{self._name} dereferences {name} ({kind}), which is no pointer"

    def _size(self, found: Sequence[_Named]) -> tuple[str, str] | None:
        arg = self._reading.arg
        is_text = isinstance(arg.type, String) and not isinstance(arg.type, SymbolString)
        size = 1 if is_text else arg.type.size
        if any(each.member.is_bitfield for each in found):
            return None
        sizes = [each.member.size for each in found]
        self.value_size = size if size in sizes else sizes[0]
        if arg.count or size in sizes:
            return None
        name = found[0].name
        if is_text:
            is_pointer = self._btf.kind(self._btf.resolve(found[0].member.type)) is Kind.PTR
            what = "a pointer; write +0(...) around the argument" if is_pointer else "no array of characters"
            return "type-size", f"{arg.name} reads text at {name}, which is {what}"
        if arg.type.is_dynamic or self._reading.type.startswith("b"):
            return None
        bits = 8 * found[0].member.size
        return "type-size", f"{arg.name} reads {8 * size} bits of {name}, which has {bits}"


def _is_big_endian(btf: Btf, member: ScalarMember) -> bool:
    return not member.is_bitfield and _BIG_ENDIAN.fullmatch(declaration(btf, member.type)) is not None


def _may_be_address(btf: Btf, member: ScalarMember) -> bool:
    return not member.is_bitfield and member.size == _POINTER_SIZE and is_address(btf, member.type)
