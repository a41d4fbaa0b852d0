"""The parameters of a function that a probe inside the function can fetch, with their fetch arguments."""

from __future__ import annotations

from collections.abc import Iterable

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.entry_values import STACK_WORD, EntryValues, ValuePlace
from emulated_kernel.image.linux.btf_declaration import Parameter
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

_CHANGED = lazy_pattern(r"\.(?:isra|constprop|part|cold)\b")
"""Pattern for the suffix in the name of a function that the compiler made from one of the source."""
_HALF = 4
"""Size in bytes of the lower half of a 64-bit register."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a function, and the fetch arguments that read it at one address of the function."""

    number: int
    """Number of the parameter, from 1 on."""
    name: str
    type: str
    fetches: tuple[str, ...]
    """Complete fetch arguments, such as `size=%r12:u64`; empty if no register or stack word has the value."""
    places: tuple[str, ...]
    """Registers and stack words with the value, such as `%r12` or `$stack2`, in the order of `fetches`."""
    remark: str = ""
    """Reason why there is no fetch argument; "" if there is one."""


def changed_parameters(function: str) -> str:
    """Return the reason why a function's parameters may differ from the source; "" if there is no reason.

    `function`: name of the function. There is a reason if the name says that the compiler made the function
    from another one: NAME.isra.0, NAME.constprop.0, NAME.part.0 or NAME.cold. Linux does not find the
    parameters of such a function, because BTF has the names of the source.
    """
    suffix = _CHANGED.search(function)
    if suffix is None:
        return ""
    source = function[: suffix.start()]
    what = f"the compiler made it from {source}, and its parameters may differ"
    return f"{what}; $argN reads the registers of a call"


def arguments_at(
    arch: Arch, values: EntryValues, addr: int, parameters: Iterable[Parameter], *, on_entry: bool
) -> tuple[Argument, ...]:
    """Return the parameters of a function with the fetch arguments that read them at the address `addr`.

    `values`: the registers and stack words in which the function keeps the parameters. `on_entry`: True if
    the probe is at the function's symbol, where $argN is allowed; otherwise False.
    """
    places = values.at(addr)
    registers = list(arch.registers.arguments)
    words = 0
    found: list[Argument] = []
    has_structures = False
    for number, parameter in enumerate(parameters, 1):
        size = -(-parameter.size // arch.word_size)
        has_structures = has_structures or not parameter.fetch_type or size > 1
        sources = registers[:size] if size <= min(2, len(registers)) else []
        del registers[: len(sources)]
        if not sources:
            sources = [f"{STACK_WORD}{words}"]
            words += size
        ways: list[str] = []
        remark = ""
        if not parameter.fetch_type or size != 1:
            remark = "a structure: read its registers or its place on the stack"
        else:
            fits = [place for place in places.get(sources[0], ()) if _fits(place, parameter)]
            ways = [place.where for place in sorted(fits, key=lambda place: _order(place, sources[0]))]
            # A structure takes several registers, but Linux counts registers.
            if on_entry and not has_structures:
                ways.insert(0, f"$arg{number}")
            remark = "" if ways else "not found on all ways from the entry"
        fetches = tuple(_fetch(parameter, number, way) for way in ways)
        found.append(Argument(number, parameter.name, parameter.type, fetches, tuple(ways), remark))
    return tuple(found)


def _fits(place: ValuePlace, parameter: Parameter) -> bool:
    return not place.is_low_half or parameter.size <= _HALF


def _order(place: ValuePlace, source: str) -> tuple[bool, bool, str]:
    return place.where.startswith("$"), place.where != f"%{source}", place.where


def _fetch(parameter: Parameter, number: int, place: str) -> str:
    name = parameter.name or f"arg{number}"
    if parameter.is_string:
        return f"{name}=+0({place}):string"
    return f"{name}={place}:{parameter.fetch_type}"
