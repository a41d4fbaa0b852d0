"""LiveImage: the symbols and tables of a kernel and its loaded modules, which change with the modules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Generic, Protocol, Self, TypeVar

from emulated_kernel.image.address_set import AddressSet
from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol
from emulated_kernel.image.text_tables import (
    BlacklistEntry,
    BugEntry,
    ExTableEntry,
    JumpLabel,
    ProbedTables,
    Range,
    StaticCall,
)
from emulated_kernel.util.fast_dataclass import dataclass, replace


@dataclass(frozen=True)
class Module:
    """A module loaded in the guest; addresses are virtual.

    After its init function has returned, the module is replaced by the result of without_init().
    """

    name: str
    text: Range
    init_text: Range
    data: tuple[Range, ...]
    init_data: tuple[Range, ...]
    symbols: tuple[Symbol, ...]
    """Symbols with sizes, in the order of the module's symbol table."""
    ex_table: tuple[ExTableEntry, ...]
    blacklist: tuple[BlacklistEntry, ...]
    mcount: frozenset[int]
    bugs: Mapping[int, BugEntry]
    code: Mapping[int, bytes]
    """Start address of each range of the module's text -> the text as it was loaded."""
    contents: Mapping[int, bytes]
    """Start address of each range of the module's data -> the data as they were loaded."""
    jump_labels: tuple[JumpLabel, ...] = ()
    static_calls: tuple[StaticCall, ...] = ()
    address: int = 0
    """Address of the module's struct module in a distribution's kernel; otherwise 0."""

    @property
    def text_ranges(self) -> tuple[Range, ...]:
        """Ranges of the module's text, including its init text."""
        return tuple(part for part in (self.text, self.init_text) if part.end > part.start)

    def contains(self, address: int) -> bool:
        """Return True if `address` is in the text or data of this module.

        Mirrors: include/linux/module.h:within_module (v6.1).
        """
        parts = self.text, self.init_text, *self.data, *self.init_data
        return any(part.start <= address < part.end for part in parts)

    def without_init(self) -> Module:
        """Return the module as it is after its init function returned and its init memory was freed."""
        init = range(*self.init_text)
        freed = (self.init_text, *self.init_data)
        return replace(
            self,
            init_text=Range(0, 0),
            init_data=(),
            symbols=tuple(s for s in self.symbols if not any(p.start <= s.address < p.end for p in freed)),
            ex_table=tuple(e for e in self.ex_table if e.insn not in init),
            blacklist=tuple(b for b in self.blacklist if b.start not in init),
            mcount=frozenset(site for site in self.mcount if site not in init),
            bugs={address: bug for address, bug in self.bugs.items() if address not in init},
            code={start: code for start, code in self.code.items() if start not in init},
            contents={
                start: data
                for start, data in self.contents.items()
                if not any(part.start == start for part in self.init_data)
            },
            jump_labels=tuple(label for label in self.jump_labels if label.code not in init),
            static_calls=tuple(call for call in self.static_calls if call.site not in init),
        )


class ModuleSymbols:
    """The symbols of one module. Mirrors: kernel/module/kallsyms.c (v6.1)."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._by_name: dict[str, list[Symbol]] = {}
        for symbol in module.symbols:
            self._by_name.setdefault(symbol.name, []).append(symbol)
        # The sort is stable: of several symbols at one address, a look-up finds the first.
        self._sorted = sorted(module.symbols, key=lambda symbol: symbol.address)
        self._addresses = [symbol.address for symbol in self._sorted]

    def by_name(self, name: str) -> Sequence[Symbol]:
        return self._by_name.get(name, ())

    def lookup(self, address: int) -> Location | None:
        """Return the module's symbol that contains `address`, and the offset in it; None if there is none.

        Mirrors: kernel/module/kallsyms.c:find_kallsyms_symbol (v6.1).
        """
        if not self.module.contains(address):
            return None
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        first = bisect_right(self._addresses, self._addresses[at] - 1)
        symbol = self._sorted[first]
        if address >= symbol.address + max(symbol.size, 1):
            # The address is before the first symbol of its section.
            return None
        return Location(symbol, address - symbol.address, self.module.name)

    def kallsyms_lines(self, zero_addresses: bool, digits: int) -> Iterable[str]:
        for symbol in self.module.symbols:
            address = 0 if zero_addresses else symbol.address
            yield f"{address:0{digits}x} {symbol.type} {symbol.name}\t[{self.module.name}]\n"


class LiveKallsyms(Kallsyms):
    """The symbols of a kernel and its loaded modules.

    A name MODULE:NAME is looked up only in the module.
    """

    def __init__(self, image: Kallsyms) -> None:
        # Share the image's immutable table: sorting and indexing it again would take 10 % of the boot time.
        self.digits = image.digits
        self.start = image.start
        self.end = image.end
        self._table = image.table
        self._met = {}
        self._numbers = {}
        self._modules: list[ModuleSymbols] = []

    def set_modules(self, modules: Iterable[Module]) -> None:
        """Replace the list of loaded modules; `modules` begins with the newest."""
        self._modules = [ModuleSymbols(module) for module in modules]

    def has_module(self, name: str) -> bool:
        """Return True if a module called `name` is loaded.

        Mirrors: kernel/module/main.c:find_module (v6.1).
        """
        return any(symbols.module.name == name for symbols in self._modules)

    def _of_modules(self, name: str) -> tuple[Symbol, ...]:
        """Return the symbols `name` of the loaded modules, the newest module's first.

        If `name` is MODULE:NAME, return only the symbols NAME of that module.

        Mirrors: kernel/module/kallsyms.c:module_kallsyms_lookup_name (v6.1).
        """
        if not self._modules:
            return ()
        wanted, colon, symbol = name.partition(":")
        modules = [each for each in self._modules if not colon or each.module.name == wanted]
        return tuple(found for each in modules for found in each.by_name(symbol if colon else name))

    def _in_modules(self, address: int) -> Location | None:
        for symbols in self._modules:
            where = symbols.lookup(address)
            if where is not None:
                return where
        return None

    @property
    def line_count(self) -> int:
        return len(self) + sum(len(symbols.module.symbols) for symbols in self._modules)

    def kallsyms_lines(self, start: int, *, zero_addresses: bool) -> Iterator[str]:
        yield from super().kallsyms_lines(start, zero_addresses=zero_addresses)
        lines = (
            line for symbols in self._modules for line in symbols.kallsyms_lines(zero_addresses, self.digits)
        )
        yield from islice(lines, max(start - len(self), 0), None)


class VmlinuxTables(ProbedTables, Protocol):
    """Interface of a kernel's tables, without the tables of its modules."""

    def with_symbols(self, kallsyms: Kallsyms, /) -> Self:
        """Return a copy of this object whose symbol table is `kallsyms`."""


Core = TypeVar("Core", bound=VmlinuxTables)
T = TypeVar("T")


class LiveImage(Generic[Core]):
    """Current tables of a kernel and of its loaded modules, for all text that can be probed.

    The class implements ProbedTables.
    """

    def __init__(self, image: Core) -> None:
        self.kallsyms = LiveKallsyms(image.kallsyms)
        self.core = image.with_symbols(self.kallsyms)
        """The kernel without its modules, except that its symbol table contains their symbols, too."""
        self._modules: dict[str, Module] = {}

    def put(self, module: Module) -> None:
        """Add a module, or replace the loaded module that has the same name."""
        self.put_all((module,))

    def put_all(self, modules: Iterable[Module]) -> None:
        """Add modules in the order of loading; each replaces a loaded module that has the same name."""
        self._modules |= {module.name: module for module in modules}
        self.kallsyms.set_modules(reversed(self._modules.values()))

    def remove(self, name: str) -> None:
        """Remove a module; an unknown name is ignored."""
        self._modules.pop(name, None)
        self.kallsyms.set_modules(reversed(self._modules.values()))

    def find(self, name: str) -> Module | None:
        """Return the loaded module called `name`, or None if there is none."""
        return self._modules.get(name)

    @property
    def text_ranges(self) -> tuple[Range, ...]:
        parts = [part for module in self._modules.values() for part in module.text_ranges]
        return (*self.core.text_ranges, *parts)

    @property
    def ex_table(self) -> Iterable[ExTableEntry]:
        return _joined(self.core.ex_table, [each.ex_table for each in self._modules.values()])

    @property
    def blacklist(self) -> tuple[BlacklistEntry, ...]:
        return (*self.core.blacklist, *(e for module in self._modules.values() for e in module.blacklist))

    @property
    def mcount(self) -> Collection[int]:
        of_modules = [module.mcount for module in self._modules.values()]
        return AddressSet(chain(self.core.mcount, *of_modules)) if of_modules else self.core.mcount

    @property
    def jump_labels(self) -> Iterable[JumpLabel]:
        return _joined(self.core.jump_labels, [each.jump_labels for each in self._modules.values()])

    @property
    def static_calls(self) -> Iterable[StaticCall]:
        return _joined(self.core.static_calls, [each.static_calls for each in self._modules.values()])

    @property
    def bugs(self) -> Collection[int]:
        of_modules = [module.bugs for module in self._modules.values()]
        return AddressSet(chain(self.core.bugs, *of_modules)) if of_modules else self.core.bugs

    @property
    def data(self) -> Iterator[tuple[int, bytes]]:
        """Pairs (address, contents as loaded) of each data range of the kernel and its modules."""
        return chain(self.core.data, *(module.contents.items() for module in self._modules.values()))

    def read(self, va: int, size: int) -> bytes:
        """Return `size` bytes at the address `va` as they are without probes.

        Raises: KernelError ENOEXEC (neither the image nor a module's text contains the bytes).
        """
        for module in self._modules.values():
            for start, code in module.code.items():
                if start <= va and va + size <= start + len(code):
                    return code[va - start : va - start + size]
        return self.core.read(va, size)


def _joined(of_kernel: Iterable[T], of_modules: Sequence[Iterable[T]]) -> Iterable[T]:
    """Return a kernel's table followed by the tables of its modules.

    Without modules, return the kernel's table without a copy.
    """
    return (*of_kernel, *chain.from_iterable(of_modules)) if of_modules else of_kernel
