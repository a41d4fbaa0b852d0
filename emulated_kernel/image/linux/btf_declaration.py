"""C declarations of types and functions, written from BTF."""

from __future__ import annotations

from emulated_kernel.image.linux.btf import Btf, Kind, Member, StepLimit
from emulated_kernel.util.fast_dataclass import dataclass

_QUALIFIERS = {Kind.CONST: "const", Kind.VOLATILE: "volatile", Kind.RESTRICT: "restrict"}
_TAGS = {
    Kind.STRUCT: "struct ", Kind.UNION: "union ", Kind.ENUM: "enum ", Kind.ENUM64: "enum ",
}  # fmt: skip
_MAX_TYPES = 200
"""Maximum number of types in one declaration, because Python's stack limits the depth of their nesting."""
_POINTER_SIZE = 8


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function."""

    name: str
    """The name; "" if the prototype has none."""
    type: str
    size: int
    """Size of the type in bytes."""
    fetch_type: str
    """Type with which a fetch argument shows the parameter, such as `s32`; "" if none fits (structures)."""
    is_string: bool
    """Whether the parameter is a pointer to constant characters, which usually end with a zero byte."""
    type_id: int = 0
    """Id of the type in the BTF; 0 if it isn't known."""


@dataclass(frozen=True, slots=True)
class Prototype:
    """A function's prototype."""

    text: str
    """The prototype in C, without a semicolon."""
    parameters: tuple[Parameter, ...]
    """The parameters, without "..."."""
    result: Parameter
    """The function's result, as a parameter without a name."""

    def words(self, word_size: int) -> int | None:
        """Return how many words of `word_size` bytes the parameters take; None for a variadic function."""
        if self.text.endswith("...)"):
            return None
        return sum(max(1, -(-parameter.size // word_size)) for parameter in self.parameters)


def prototype(btf: Btf, function: str) -> Prototype:
    """Return the prototype of a function.

    Raises: KernelError ENOENT (the BTF does not have the function), ENOEXEC (damaged BTF).
    """
    result, members = btf.prototype(function)
    text = declaration(btf, result, f"{function}({_parameter_list(btf, members, StepLimit(_MAX_TYPES))})")
    named = [member for member in members if member.type or member.name]
    parameters = tuple(_parameter(btf, member) for member in named)
    return Prototype(text, parameters, _parameter(btf, Member("", result, 0, 0)))


def declaration(btf: Btf, number: int, name: str = "", limit: StepLimit | None = None) -> str:
    """Return the C declaration of `name`, whose type has the id `number`; only the type if `name` is "".

    `limit`: number of types that the declaration may still have; None for _MAX_TYPES.
    Raises: KernelError ENOEXEC (the types contain each other).
    """
    limit = limit or StepLimit(_MAX_TYPES)
    limit.take()
    kind = btf.type(number)
    if kind.kind is Kind.PTR:
        below = btf.type(kind.size_or_type).kind
        pointer = f"(*{name})" if below in (Kind.ARRAY, Kind.FUNC_PROTO) else f"*{name}"
        return declaration(btf, kind.size_or_type, pointer, limit)
    if kind.kind in _QUALIFIERS:
        word = _QUALIFIERS[kind.kind]
        if btf.type(kind.size_or_type).kind is Kind.PTR:
            return declaration(btf, kind.size_or_type, f" {word} {name}".rstrip(), limit)
        return f"{word} {declaration(btf, kind.size_or_type, name, limit)}"
    if kind.kind is Kind.TYPE_TAG:
        return declaration(btf, kind.size_or_type, name, limit)
    if kind.kind is Kind.ARRAY:
        element, count = btf.array_of(number)
        return declaration(btf, element, f"{name}[{count}]", limit)
    if kind.kind is Kind.FUNC_PROTO:
        result, members = btf.signature(number)
        return declaration(btf, result, f"{name}({_parameter_list(btf, members, limit)})", limit)
    base = _TAGS.get(kind.kind, "")
    if kind.kind is Kind.FWD:
        base = "union " if kind.flag else "struct "
    base += btf.text(kind.name) or ("void" if kind.kind is Kind.VOID else "{...}")
    return f"{base} {name}".rstrip() if name and not name.startswith("[") else base + name


def type_kind(btf: Btf, number: int) -> str:
    """Return a name of the type `number`, to compare it with a type of another kernel.

    Typedefs and qualifiers are left out, and an integer type is named by its sign and width, such as `u32`.

    `char` keeps its name, because it is signed in the BTF of Linux before 6.2, and unsigned in later BTF.
    """
    stars = ""
    for _ in range(_MAX_TYPES):
        resolved = btf.resolve(number)
        kind = btf.type(resolved)
        if kind.kind is not Kind.PTR:
            break
        stars += "*"
        number = kind.size_or_type
    name = btf.name(resolved)
    if kind.kind is Kind.INT and name not in ("char", "_Bool"):
        signed, bits = btf.int_encoding(resolved)
        name = f"{'s' if signed else 'u'}{bits}"
    return f"{name or kind.kind.name.lower()}{stars}"


def _parameter_list(btf: Btf, members: tuple[Member, ...], limit: StepLimit) -> str:
    texts = [
        declaration(btf, member.type, member.name, limit) if member.type or member.name else "..."
        for member in members
    ]
    return ", ".join(texts) or "void"


def _parameter(btf: Btf, member: Member) -> Parameter:
    number = btf.resolve(member.type)
    kind = btf.type(number)
    size = kind.size_or_type
    fetch_type = ""
    is_string = False
    if kind.kind is Kind.PTR:
        size = _POINTER_SIZE
        fetch_type = "x64"
        is_string = declaration(btf, kind.size_or_type) == "const char"
    elif kind.kind is Kind.INT:
        signed, _ = btf.int_encoding(number)
        fetch_type = f"{'s' if signed else 'u'}{8 * size}" if size <= _POINTER_SIZE else ""
    elif kind.kind in (Kind.ENUM, Kind.ENUM64):
        fetch_type = f"u{8 * size}" if size <= _POINTER_SIZE else ""
    return Parameter(member.name, declaration(btf, member.type), size, fetch_type, is_string, member.type)
