"""Places of probes: finds a kernel's address that a user gives as SYMBOL, SYMBOL+OFFSET or a number."""

from __future__ import annotations

import re

from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.similar_names import similar_names, similar_names_hint
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.similar_symbols import nearest_symbols

_INIT = "__init_begin", "__init_end"
"""Symbols at the start and the end of init memory, which is freed after boot."""
_TEXT = "_stext"
"""Symbol at the start of the text that can be probed; KASLR moves it together with the text."""
_PATTERN = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}|[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Place:
    """An address to probe: as the user wrote it, and as symbol and offset in a kernel."""

    text: str
    where: Location
    others: tuple[Symbol, ...]
    """Other symbols with the same name.

    If there are any, the kernel refuses the name, or probes only the first symbol.
    """
    passed: Symbol | None = None
    """The symbol that the user named, if the offset leads out of it to another symbol; otherwise None."""
    line: str = ""
    """Source file and line of the place, as FILE:LINE; "" if the user named no line."""

    @property
    def address(self) -> int:
        """Guest address to probe."""
        return self.where.symbol.address + self.where.offset


def find_place(text: str, tables: ProbedTables) -> Place:
    """Return the place that `text` names in a kernel. Raises: CliError (the kernel has no such place)."""
    kallsyms = tables.kallsyms
    others: tuple[Symbol, ...] = ()
    symbol = None
    if _NUMBER.fullmatch(text):
        address = int(text, 0) if text.startswith("0x") else int(text)
    else:
        symbol, offset, others = _named(text, tables)
        address = symbol.address + offset
    where = kallsyms.lookup(address)
    if where is None or not any(start <= address < end for start, end in tables.text_ranges):
        raise _not_text(text, address, where, tables)
    passed = None if symbol is None else passed_symbol(symbol.name, where, kallsyms)
    return Place(text, where, others, passed)


def passed_symbol(name: str, where: Location, kallsyms: Kallsyms) -> Symbol | None:
    """Return the symbol `name` if `where`, a place at an offset from this symbol, is in another symbol.

    The kernel accepts such a place. Return None for other places, and if `name` is _stext: an offset from
    _stext is meant to lead to other symbols.
    """
    named = kallsyms.by_name(name)
    if name == _TEXT or any(each.address == where.symbol.address for each in named):
        return None
    return next(iter(named), None)


def place_in_any_boot(address: int, kallsyms: Kallsyms) -> str:
    """Return a text for `address`; if possible, one that stays valid if KASLR moves the kernel.

    The text is SYMBOL+OFFSET if the symbol's name is unique. Otherwise it is _stext+OFFSET. But for an
    address in a module, or if _stext is unknown or not unique, it is the number, which is valid only in this
    boot.
    """
    where = kallsyms.lookup(address)
    if where is not None and kallsyms.count_name(where.name) == 1:
        return f"{where.name}+{where.offset:#x}" if where.offset else where.name
    start = kallsyms.lookup_name(_TEXT)
    if where is None or where.module is not None or start is None or kallsyms.count_name(_TEXT) > 1:
        return f"{address:#x}"
    return f"{_TEXT}+{address - start:#x}"


def module_of(text: str) -> str | None:
    """Return the module in a place of the form MODULE:SYMBOL; None for a place of another form.

    Raises: CliError (MODULE is empty or cannot be the name of a module, for example because it has a dash).
    """
    module, colon, symbol = text.partition(":")
    if colon and not module:
        raise CliError(f"'{_shown(text)}': no module is named; give MODULE:SYMBOL", ExitStatus.USAGE)
    if colon and ("." in module or "/" in module):
        why = "neither FILE:LINE with a number nor MODULE:SYMBOL"
        raise CliError(f"{_shown(text)}: {why}; give one of these", ExitStatus.USAGE)
    if colon and "-" in module:
        name = module_name(module)
        why = f"the kernel names this module {name}; give {name}:{symbol}"
        raise CliError(f"{_shown(module)}: {_shown(why)}", ExitStatus.USAGE)
    return module if colon else None


def module_name(name: str) -> str:
    """Return the name that a kernel gives to a module. `name`: name of its file, without the ending."""
    return name.replace("-", "_")


def _named(text: str, tables: ProbedTables) -> tuple[Symbol, int, tuple[Symbol, ...]]:
    kallsyms = tables.kallsyms
    name, plus, number = text.partition("+")
    if plus and not _NUMBER.fullmatch(number):
        raise CliError(f"{_shown(text)}: the offset is no number; give SYMBOL+0x1f", ExitStatus.USAGE)
    if not name or name.endswith(":"):
        raise CliError(f"'{_shown(text)}': no symbol is named; give SYMBOL+0x1f", ExitStatus.USAGE)
    found = kallsyms.by_name(name)
    if not found:
        is_in_module = module_of(name) is not None
        near = nearest_in_module(name, tables) if is_in_module else nearest_symbols(name, kallsyms)
        hint = similar_names_hint(near)
        if not near and _PATTERN.search(name):
            hint = "; `coverage --function` takes patterns"
        what = "this module" if is_in_module else "this kernel"
        raise CliError(f"{_shown(name)}: {what} has no such symbol{hint}", ExitStatus.USAGE)
    offset = int(number, 0) if plus else 0
    return found[0], offset, found[1:]


def nearest_in_module(name: str, tables: ProbedTables) -> list[str]:
    """Return functions with names similar to `name`, from the loaded module that `name` names.

    `name` and the results have the form MODULE:SYMBOL. The list is empty if the module is not loaded.
    """
    where, _, symbol = name.partition(":")
    module = tables.find(where) if isinstance(tables, LiveImage) else None
    known = () if module is None else tuple(each.name for each in module.symbols if each.is_text)
    return [f"{where}:{each}" for each in similar_names(symbol, known)]


def _not_text(text: str, address: int, where: Location | None, tables: ProbedTables) -> CliError:
    shown = _shown(text)
    if where is not None:
        why = f"no probe is possible there: {where} is {_kind(address, where, tables)}"
        return CliError(f"{shown}: {why}", ExitStatus.USAGE)
    start, end = next(iter(tables.text_ranges))
    hint = ""
    if _NUMBER.fullmatch(text) and address >> 32:
        hint = " (if the address is from a running kernel with KASLR, give SYMBOL+OFFSET)"
    return CliError(f"{shown}: not in this kernel's text, {start:#x} to {end:#x}{hint}", ExitStatus.USAGE)


def _kind(address: int, where: Location, tables: ProbedTables) -> str:
    """Return a text for error messages: the kind of memory at `address`, in which no probe can be put.

    `where`: symbol and offset of the address.
    """
    if not where.symbol.is_text:
        return "data"
    start, end = (tables.kallsyms.lookup_name(name) or 0 for name in _INIT)
    return "in init text, which is freed after boot" if start <= address < end else "not in the kernel's text"


def _shown(text: str) -> str:
    return escape_for_terminal(text)
