"""kallsyms for tracing: symbols of the kernel, modules, trampolines and freed init text; sprint_symbol()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol
from emulated_kernel.kprobes.hit.ftrace import FTRACE_TRAMPOLINE, FtraceSites
from emulated_kernel.kprobes.return_hook.hook_sets import GRAPH_TRAMPOLINE, RETHOOK_TRAMPOLINE, HookSets
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import replace

ADDED_TEXT = frozenset((RETHOOK_TRAMPOLINE, GRAPH_TRAMPOLINE, FTRACE_TRAMPOLINE))
"""Names of the trampolines that the host has added to the guest's text."""
_REMEMBERED = 8192
"""Maximum number of addresses whose symbols are cached; files print the same few addresses many times."""


GENERATED_SYMBOL = "kprobe_insn_page"
"""Name of the symbol of each page of generated code.

Mirrors: include/linux/kprobes.h:KPROBE_INSN_PAGE_SYM (v6.1).
"""
GENERATED_MODULE = "__builtin__kprobes"
"""Module name of GENERATED_SYMBOL. Mirrors: kernel/kprobes.c:kprobe_cache_get_kallsym (v6.1)."""


def _page_symbol(page: int) -> Symbol:
    return Symbol(GENERATED_SYMBOL, page, "t", PAGE_SIZE)


def _is_no_trampoline(_address: int) -> bool:
    """Return False for every address: a kernel that does not run has no trampolines."""
    return False


class KernelSymbols:
    """Lookup of the guest's symbols by address and by name, with a cache."""

    def __init__(
        self,
        kallsyms: Kallsyms,
        hook_sets: HookSets | None,
        sites: FtraceSites | None,
        generated: Callable[[], Iterable[range]],
    ) -> None:
        """Create the lookup in `kallsyms` and in the tables of what the host has added to the guest's text.

        `hook_sets`: return hooks with their trampolines; None if the kernel does not run. `sites`: fentry
        sites with ftrace's trampoline; None if there are none. `generated` returns the ranges of code that
        kprobefs has generated.
        """
        self._kallsyms = kallsyms
        self._generated = generated
        self.lookup_name = kallsyms.lookup_name
        """Returns the address of the symbol `NAME` or `MODULE:NAME`, or None if there is no such symbol.

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_name (v6.1).
        """
        self.count_name = kallsyms.count_name
        """Returns the number of symbols with the name `NAME` everywhere, or `MODULE:NAME` in a module."""
        self.count_in_kernel = kallsyms.count_in_kernel
        """Returns the number of symbols with the name `NAME` outside of modules."""
        self.locate_each = kallsyms.locate_each
        """Takes ascending addresses, and yields (name, offset, module) of the symbol at each, or None.

        None: no symbol contains the address. `offset`: bytes from the symbol's start to the address.
        `module`: None for a symbol of the kernel itself.
        """
        self.has_module = kallsyms.has_module
        """Returns True if a module with the given name is loaded.

        Mirrors: kernel/module/main.c:find_module (v6.1).
        """
        self.is_return_trampoline: Callable[[int], bool] = (
            _is_no_trampoline if hook_sets is None else hook_sets.first.trampoline.is_one
        )
        """Returns True for the address that hooked functions return to.

        Mirrors: include/linux/kprobes.h:is_kretprobe_trampoline (v6.1).
        """
        self._trampolines = tuple if hook_sets is None else hook_sets.trampolines
        self._sites = sites
        self._freed: dict[str, list[Location]] = {}
        self.version = 0
        """Number of changes of the symbol tables; a cache of symbols is valid until this number changes."""
        self.tables_changed()

    def tables_changed(self) -> None:
        """Empty the cache and increment `version`, because a module was loaded or unloaded."""
        self.version += 1
        self._found: dict[int, Location] = {}

    def lookup(self, address: int) -> Location | None:
        """Return the function that contains `address`, as symbol and offset; None if no function contains it.

        If several symbols have the same address, return the first of them.
        For generated code, return None: the unwinder then maps an address in an insn slot or detour buffer to
        the probed address, and looks that up.
        """
        found = self._found.get(address) or self._kallsyms.lookup(address)
        if found is None:
            return self._lookup_trampoline(address) or self._lookup_freed(address)
        if len(self._found) == _REMEMBERED:
            self._found.clear()
        self._found[address] = found
        return found

    def symbol_at(self, address: int) -> Location | None:
        """Return the symbol that files print for `address`: a function, or a page of generated code.

        Return None if no symbol contains the address.
        Mirrors: kernel/kallsyms.c:kallsyms_lookup (v6.1).
        """
        return self.lookup(address) or self._lookup_generated(address)

    def _lookup_trampoline(self, address: int) -> Location | None:
        for symbol, piece in self._trampoline_symbols():
            if address in piece:
                return Location(symbol, address - symbol.address)
        return None

    def _trampoline_symbols(self) -> Iterator[tuple[Symbol, range]]:
        """Yield symbol and addresses of each piece of the trampolines that exist."""
        for name, trampoline in self._trampolines():
            for entry, piece in trampoline.pieces():
                yield Symbol(name, entry, "t", piece.stop - entry), piece
        sites = self._sites
        if sites is not None:
            piece = range(sites.trampoline, sites.trampoline + sites.trampoline_size)
            yield Symbol(FTRACE_TRAMPOLINE, piece.start, "t", len(piece)), piece

    def _lookup_generated(self, address: int) -> Location | None:
        """Return symbol and offset of an address in a page of generated code; None for other addresses.

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_buildid (v6.1), the part for BPF programs and ftrace
        trampolines.
        """
        if not any(address in code for code in self._generated()):
            return None
        return Location(_page_symbol(address & -PAGE_SIZE), address % PAGE_SIZE, GENERATED_MODULE)

    def kallsyms_text(self, zero_addresses: bool = False) -> str:
        """Return the whole text of /proc/kallsyms. With `zero_addresses`, all addresses are 0."""
        return "".join(self.kallsyms_lines(0, zero_addresses=zero_addresses))

    def kallsyms_lines(self, start: int, *, zero_addresses: bool) -> Iterator[str]:
        """Yield the lines of /proc/kallsyms from index `start` on. With `zero_addresses`, addresses are 0.

        Mirrors: kernel/kallsyms.c:update_iter_mod (v6.1).
        """
        kallsyms = self._kallsyms
        yield from kallsyms.kallsyms_lines(start, zero_addresses=zero_addresses)
        for each in islice(self._added(), max(start - kallsyms.line_count, 0), None):
            address = 0 if zero_addresses else each.symbol.address
            module = f"\t[{each.module}]" if each.module else ""
            yield f"{address:0{kallsyms.digits}x} t {each.name}{module}\n"

    def _added(self) -> Iterator[Location]:
        """Yield the symbols that /proc/kallsyms lists after those of the kernel and its modules.

        These are functions in freed init text, trampolines and pages of generated code. If the kernel itself
        has a symbol with the name or with the address of a trampoline, the trampoline is left out.
        Mirrors: kernel/trace/ftrace.c:ftrace_mod_get_kallsym, kernel/kallsyms.c:get_ksymbol_kprobe (v6.1).
        """
        for functions in self._freed.values():
            yield from functions
        symbols = (symbol for symbol, _ in self._trampoline_symbols())
        for symbol in sorted(symbols, key=attrgetter("address")):
            if not self.count_in_kernel(symbol.name) and self._kallsyms.lookup(symbol.address) is None:
                yield Location(symbol, 0)
        for code in self._generated():
            for page in range(code.start, code.stop, PAGE_SIZE):
                yield Location(_page_symbol(page), 0, GENERATED_MODULE)

    def remember(self, module: str, functions: Iterable[Location]) -> None:
        """Keep the symbols of functions in a module's init text, which was traced and is about to be freed.

        Mirrors: kernel/trace/ftrace.c:save_ftrace_mod_rec (v6.1).
        """
        self._freed[module] = list(functions)

    def forget(self, module: str) -> None:
        """Forget the symbols of a module's freed init text, because the module is unloaded."""
        self._freed.pop(module, None)

    def _lookup_freed(self, address: int) -> Location | None:
        """Return the function in freed init text that contained an address, or None if there was no function.

        Mirrors: kernel/trace/ftrace.c:ftrace_mod_address_lookup (v6.1).
        """
        for functions in self._freed.values():
            for each in functions:
                if 0 <= address - each.symbol.address < each.symbol.size:
                    return replace(each, offset=address - each.symbol.address)
        return None


def sprint_symbol(symbols: KernelSymbols, address: int) -> str:
    """Return `name+0xoffset/0xsize [module]`, or the address in hexadecimal if no symbol contains it.

    Mirrors: kernel/kallsyms.c:sprint_symbol (v6.1).
    """
    found = symbols.symbol_at(address)
    if found is None:
        return f"{address:#x}"
    module = f" [{found.module}]" if found.module else ""
    return f"{found.name}+{found.offset:#x}/{found.symbol.size:#x}{module}"


def sprint_symbol_no_offset(symbols: KernelSymbols, address: int) -> str:
    """Return `name [module]`, or the address in hexadecimal if no symbol contains it.

    Mirrors: kernel/kallsyms.c:sprint_symbol_no_offset (v6.1).
    """
    found = symbols.symbol_at(address)
    if found is None:
        return f"{address:#x}"
    return f"{found.name} [{found.module}]" if found.module else found.name


def print_ip(symbols: KernelSymbols, address: int, *, offset: bool, digits: int) -> str:
    """Return the text of an instruction address in an entry.

    The text is a symbol, with its offset if `offset` is set. If `digits` is not 0 (option sym-addr), the
    address with at least this number of hexadecimal digits follows.
    Mirrors: kernel/trace/trace_output.c:seq_print_ip_sym (v6.1).
    """
    if not address:
        return "0"
    suffix = f" <{address:0{digits}x}>" if digits else ""
    return _name_of(symbols, address, offset) + suffix


def _name_of(symbols: KernelSymbols, address: int, offset: bool) -> str:
    if symbols.is_return_trampoline(address):
        return "[unknown/kretprobe'd]"
    if offset:
        return sprint_symbol(symbols, address)
    found = symbols.symbol_at(address)
    return found.name if found is not None else f"0x{address:08x}"
