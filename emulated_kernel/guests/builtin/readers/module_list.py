"""Reads the guest's list of loaded modules, and the tables of one module."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from emulated_kernel.image import text_tables
from emulated_kernel.image.kallsyms import Kallsyms, Symbol
from emulated_kernel.image.live_image import Module
from emulated_kernel.image.text_tables import BlacklistEntry, Range
from emulated_kernel.machine.guest_info import ModuleInfo
from emulated_kernel.machine.loader import page_up
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import ModuleState

TEXT, DATA, INIT_TEXT, INIT_DATA = range(4)
"""Kinds of a module's memory. Values of the guest's enum mod_mem_type."""
REF_BASE = 1
"""Value of a module's refcount if the module has no users."""
_MAX_NAME = 512
"""Maximum length of a symbol's name in bytes. Mirrors: include/linux/kallsyms.h:KSYM_NAME_LEN (v6.1)."""
_NAME_SIZE = 56
_STATES = {ModuleState.COMING: "Loading", ModuleState.GOING: "Unloading"}
_KNOWN_STATES = frozenset(int(state) for state in ModuleState)
_SYMBOLS = {8: struct.Struct("<IBBHQQ"), 4: struct.Struct("<IIIBBH")}
"""Size of a machine word in bytes -> layout of Elf_Sym."""


class ModuleReader:
    """Reads instances of struct module, with the offsets in the guest's ABI table."""

    def __init__(
        self,
        reader: GuestReader,
        symbols: Kallsyms,
        abi: Mapping[str, int],
        is_module_memory: Callable[[int, int], bool],
    ) -> None:
        """Create a reader for one reading of the list of modules, or of one module.

        `is_module_memory(start, size)` returns True if the loader has allocated this memory for a module.
        """
        self._reader = reader
        self._head = symbols.lookup_name("modules") or 0
        self._abi = abi
        self._is_module_memory = is_module_memory
        self._word = reader.word
        self._word_size = reader.word_size

    def modules(self) -> Iterator[ModuleInfo]:
        """Yield the modules, newest first, except damaged ones and those in the state UNFORMED."""
        link = self._abi["module.list"]
        found = self._reader.each(self._reader.nodes(self._head), lambda node: self._listed(node - link))
        return (module for module in found if module is not None)

    def _listed(self, module: int) -> ModuleInfo | None:
        state = self._u32(module, "module.state")
        if state not in _KNOWN_STATES:
            raise MemoryFault(module, f"a module in the state {state}")
        return None if state == ModuleState.UNFORMED else self._info(module, ModuleState(state))

    def name(self, module: int) -> str:
        """Return the name of the module whose struct module is at `module`.

        Raises: MemoryFault (the name cannot be read).
        """
        raw = self._reader.read(module + self._abi["module.name"], _NAME_SIZE)
        return raw.split(b"\0", 1)[0].decode("ascii", "replace")

    def read(self, module: int) -> Module:
        """Return the tables, text and data of a module in the state COMING.

        `module`: address of its struct module.

        Raises: MemoryFault (the guest has damaged the data, or no module is at the address).
        """
        parts = [self._part(module, kind) for kind in (TEXT, DATA, INIT_TEXT, INIT_DATA)]
        symbols = tuple(self._symbols(module, parts))
        return Module(
            name=self.name(module),
            text=parts[TEXT],
            init_text=parts[INIT_TEXT],
            data=(parts[DATA],),
            init_data=(parts[INIT_DATA],),
            symbols=symbols,
            ex_table=tuple(text_tables.ex_table(*self._table(module, "extable", 8, "exentries"), "<ii")),
            blacklist=tuple(self._blacklist(module, symbols)),
            mcount=frozenset(self._words(module, "ftrace_callsites")),
            bugs=text_tables.bugs(*self._table(module, "bug_table", 12, "bugs"), self._string),
            code=self._bytes(parts[TEXT], parts[INIT_TEXT]),
            contents=self._bytes(parts[DATA], parts[INIT_DATA]),
        )

    def _bytes(self, *parts: Range) -> dict[int, bytes]:
        """Return address -> content of each non-empty range in `parts`, ranges of a module's memory."""
        present = [part for part in parts if part.start]
        return {part.start: self._reader.read(part.start, part.end - part.start) for part in present}

    def _info(self, module: int, state: ModuleState) -> ModuleInfo:
        parts = [self._part(module, kind) for kind in (TEXT, DATA, INIT_TEXT, INIT_DATA)]
        use = self._abi["module_use.source_list"]
        source = self._abi["module_use.source"]
        users = self._reader.nodes(module + self._abi["module.source_list"])
        return ModuleInfo(
            name=self.name(module),
            size=sum(page_up(part.end - part.start) for part in parts),
            users=self._u32(module, "module.refcnt") - REF_BASE,
            used_by=tuple(self.name(self._word(entry - use + source)) for entry in users),
            state=_STATES.get(state, "Live"),
            address=parts[TEXT].start,
            digits=2 * self._word_size,
        )

    def _part(self, module: int, kind: int) -> Range:
        memory = module + self._abi["module.mem"] + kind * self._abi["module_memory.size_of"]
        base = self._word(memory + self._abi["module_memory.base"])
        size = self._word(memory + self._abi["module_memory.size"])
        if base and not self._is_module_memory(base, size):
            raise MemoryFault(base, f"{size} bytes that are no module's memory")
        return Range(base, base + size)

    def _symbols(self, module: int, parts: list[Range]) -> Iterator[Symbol]:
        """Yield the symbols of a module that lie in one of `parts`, the ranges of the module's memory.

        A symbol extends to the next symbol, or to the end of its part.
        """
        table = self._word(module + self._abi["module.kallsyms"])
        count = self._u32(table, "mod_kallsyms.num_symtab")
        letters = self._reader.table(self._word(table + self._abi["mod_kallsyms.typetab"]), count, 1)
        found = []
        for (name, address), letter in zip(self._named(table, count), letters.decode("latin-1"), strict=True):
            part = next((part for part in parts if part.start <= address < part.end), None)
            if part is not None and name and not name.startswith(".L"):
                found.append((name, address, letter, part.end))
        _, pairs = self._table(module, "syms", 2 * self._word_size)
        exported = set(text_tables.words(pairs, self._word_size)[::2])
        following = dict(pairwise(sorted({address for _, address, _, _ in found})))
        for name, address, letter, end in found:
            shown = letter.upper() if address in exported else letter.lower()
            yield Symbol(name, address, shown, min(following.get(address, end), end) - address)

    def _named(self, table: int, count: int) -> Iterator[tuple[str, int]]:
        """Yield the name and value of each of the `count` entries of the symbol table at `table`."""
        entry = _SYMBOLS[self._word_size]
        raw = self._reader.table(self._word(table + self._abi["mod_kallsyms.symtab"]), count, entry.size)
        strings = self._word(table + self._abi["mod_kallsyms.strtab"])
        for fields in entry.iter_unpack(raw):
            name = self._reader.cstring(strings + fields[0], _MAX_NAME).decode("ascii", "replace")
            yield name, fields[4] if self._word_size == 8 else fields[1]

    def _blacklist(self, module: int, symbols: tuple[Symbol, ...]) -> Iterator[BlacklistEntry]:
        """Yield the ranges of a module where probes are forbidden.

        Mirrors: kernel/kprobes.c:add_module_kprobe_blacklist (v6.1).
        """
        functions = {symbol.address: symbol for symbol in reversed(symbols)}
        for address in self._words(module, "kprobe_blacklist"):
            symbol = functions.get(address)
            if symbol is not None:
                yield BlacklistEntry(address, address + symbol.size, symbol.name)
        for section in ("kprobes_text", "noinstr_text"):
            start = self._word(module + self._abi[f"module.{section}_start"])
            end = start + self._word(module + self._abi[f"module.{section}_size"])
            for address, symbol in functions.items():
                if start <= address < end:
                    yield BlacklistEntry(address, address + symbol.size, symbol.name)

    def _words(self, module: int, name: str) -> tuple[int, ...]:
        """Return the table of machine words that the field `name` of a struct module points to."""
        return text_tables.words(self._table(module, name, self._word_size)[1], self._word_size)

    def _table(self, module: int, name: str, entry: int, counted: str | None = None) -> tuple[int, bytes]:
        """Return (address, content) of a table of a module; the content is b"" if the module lacks the table.

        `name`: the field of struct module that points to the table. `entry`: size of an entry in bytes. The
        number of entries is in the field `num_` + `counted`, or `num_` + `name` if `counted` is None.
        """
        table = self._word(module + self._abi[f"module.{name}"])
        count = self._word(module + self._abi[f"module.num_{counted or name}"]) if table else 0
        return table, self._reader.table(table, count, entry)

    def _string(self, address: int, limit: int) -> str:
        return self._reader.cstring(address, limit).decode("ascii", "replace")

    def _u32(self, base: int, field: str) -> int:
        return self._reader.u32(base + self._abi[field])
