"""LoadedModules: reads the modules of a distribution's kernel from its memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

from emulated_kernel.guests.linux.guest_abi import X86_64, abi_named
from emulated_kernel.guests.linux.probing.running_kernel import RunningMemory
from emulated_kernel.image import text_tables
from emulated_kernel.image.kallsyms import Symbol, is_mapping_symbol
from emulated_kernel.image.linux.kernel_events import KernelEvent, Structures, kernel_events
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.live_image import Module
from emulated_kernel.image.text_tables import BlacklistEntry, BugEntry, Range
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.guest_reader import DamageReports, GuestReader
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE

_SYMBOL = struct.Struct("<IBBHQQ")
"""Layout of an Elf64_Sym."""
_UNDEFINED = 0
_WORD = 8
_COUNT = 4
_ENTRY = {"extable": 12, "jump_entries": 16, "static_call_sites": 8}
"""Name of a module's table -> size of an entry in bytes."""
_MODULES = 1 << 12
"""Maximum number of modules; a longer list is damaged."""
_MAX_ENTRIES = 1 << 18
"""Maximum number of entries in all tables of a module."""
_MAX_BYTES = 48 << 20
"""Maximum size of a module with its tables in bytes; distributions' largest modules have 15 MiB."""
_BTF_LIMIT = 8 << 20
"""Maximum size of a module's BTF in bytes."""
_NAME = 512
"""Maximum length of a symbol's name in bytes. Mirrors: include/linux/kallsyms.h:KSYM_NAME_LEN (v6.1)."""
_UNFORMED = 3
_CORE_DATA = (1, 2, 3)
"""Values of the memory types for data. Mirrors: include/linux/module.h:enum mod_mem_type (v6.12)."""
_INIT_DATA = (5, 6)
"""Values of the memory types for data of init functions."""
_CORE_TEXT = 0
_INIT_TEXT = 4


class LoadedModules:
    """Reads modules from the guest's memory, with the offsets in the kernel's BTF.

    In the methods, `module` is the address of a struct module. Up to Linux 6.3 a module has two pieces of
    memory, later seven.

    All methods raise KernelError ENOEXEC if the data are damaged, and ENOENT or ENODATA if the kernel's
    structures are unknown.
    """

    def __init__(self, kernel: LinuxKernel, memory: GuestMemory, damage: DamageReports) -> None:
        self._guest = memory
        self._damage = damage
        self._memory = _ModuleMemory()
        self._kernel = kernel

    def _begin(self, what: str) -> GuestReader:
        """Return a new reader for one list or one module; its counts of steps and bytes begin at 0.

        `what`: name of the data in reports of damage.
        """
        reader = GuestReader(self._guest, what, self._damage, steps=_MAX_ENTRIES, size=_MAX_BYTES)
        self._memory.reader = reader
        return reader

    def addresses(self) -> list[int]:
        """Return the addresses of the struct modules, the oldest first, without those in the state UNFORMED.

        Damaged modules are left out. Return [] if the kernel has no list of modules.
        """
        head = self._kernel.kallsyms.lookup_name("modules")
        if head is None:
            return []
        reader = self._begin("module list")
        nodes = list[int]()
        with self._damage.left_out(reader.what):
            for node in reader.nodes(head, _MODULES):
                nodes.append(node)
        if not nodes:
            return []
        link = self._structures.btf.offset("module.list")
        state = self._structures.btf.offset("module.state")
        formed = reader.each(nodes, lambda node: (node - link, reader.u32(node - link + state) != _UNFORMED))
        return [module for module, is_formed in formed if is_formed][::-1]

    def name(self, module: int) -> str:
        """Return the name of the module whose struct module is at the address `module`."""
        self._begin("module")
        return self._name(module)

    def _name(self, module: int) -> str:
        return self._memory.string(module + self._structures.btf.offset("module.name"), 64)

    def events(self, module: int) -> tuple[KernelEvent, ...]:
        """Return a module's trace events in the module's order.

        Mirrors: kernel/trace/trace_events.c:trace_module_add_events (v6.1).
        """
        self._begin("module")
        calls, maps = (self._words(module, f"trace_{what}") for what in ("events", "evals"))
        return tuple(kernel_events(self._structures, calls, maps)) if calls else ()

    def constants(self, module: int) -> dict[str, int]:
        """Return name -> value of the enumerators of a module's types; {} if the module has no BTF.

        Mirrors: kernel/bpf/btf.c:btf_modules (v6.1).
        """
        self._begin("module")
        value = self._structures.value
        head = self._kernel.kallsyms.lookup_name("btf_modules")
        link = self._structures.btf.offset("btf_module.list")
        node = head and self._word(head)
        for _ in range(_MODULES):
            if not node or node == head:
                break
            entry = node - link
            if value(entry, "btf_module.module") == module:
                btf = value(entry, "btf_module.btf")
                size = value(btf, "btf.data_size", _COUNT)
                if size > _BTF_LIMIT:
                    raise unusable("the BTF of a module is damaged")
                data = self._memory.read(value(btf, "btf.data"), size)
                return self._kernel.btf.constants_of_module(data)
            node = self._word(node)
        return {}

    def read(self, module: int) -> Module:
        """Return a module with its tables, and with the text that it has in memory now."""
        self._begin("module")
        text, init_text, data, init_data = self._parts(module)
        symbols = tuple(self._symbols(module, (text, init_text, *data, *init_data), self._per_cpu(module)))
        return Module(
            name=self._name(module),
            text=text,
            init_text=init_text,
            data=data,
            init_data=init_data,
            symbols=symbols,
            ex_table=tuple(text_tables.ex_table(*self._table(module, "extable", "num_exentries"))),
            blacklist=tuple(self._blacklist(module, symbols)),
            mcount=frozenset(self._kernel.fentry_sites(self._words(module, "ftrace_callsites"), self._insn)),
            bugs=self._bugs(module),
            code=self._bytes(text, init_text),
            contents=self._bytes(*data, *init_data),
            jump_labels=tuple(
                text_tables.jump_labels(*self._table(module, "jump_entries", "num_jump_entries"))
            ),
            address=module,
            static_calls=tuple(
                text_tables.static_calls(*self._table(module, "static_call_sites", "num_static_call_sites"))
            ),
        )

    # Memory

    @property
    def _structures(self) -> Structures:
        if not hasattr(self, "_found"):
            self._found = Structures(self._memory, self._kernel.btf)
        return self._found

    def _parts(self, module: int) -> tuple[Range, Range, tuple[Range, ...], tuple[Range, ...]]:
        """Return the ranges of a module's text, text of init functions, data, and data of init functions."""
        places = abi_named(self._kernel.architecture).modules
        if self._structures.btf.has("module.mem"):
            base = module + self._structures.btf.offset("module.mem")
            size = self._structures.btf.size("module_memory")
            value = self._structures.value

            def part(kind: int) -> Range:
                at = base + kind * size
                start = value(at, "module_memory.base")
                return _range(start, value(at, "module_memory.size", _COUNT) if start else 0)

            core, init = (tuple(map(part, kinds)) for kinds in (_CORE_DATA, _INIT_DATA))
            return _text(part(_CORE_TEXT), places), _text(part(_INIT_TEXT), places), core, init
        (text, data), (init_text, init_data) = (self._layout(module, name) for name in ("core", "init"))
        return _text(text, places), _text(init_text, places), (data,), (init_data,)

    def _layout(self, module: int, name: str) -> tuple[Range, Range]:
        """Return the ranges of text and data in the module's piece of memory called `name`: `core` or `init`.

        Both are Range(0, 0) if the module has no such piece of memory.
        Mirrors: include/linux/module.h:struct module_layout (v6.1).
        """
        base = self._structures.value(module, f"module.{name}_layout.base")
        if not base:
            return Range(0, 0), Range(0, 0)
        size, text = (self._number(module, f"{name}_layout.{what}") for what in ("size", "text_size"))
        return _range(base, text), _range(base + text, size - text)

    def _per_cpu(self, module: int) -> Range:
        """Return the range of the module's per-CPU variables, as offsets in a per-CPU area; empty if none."""
        if not self._structures.btf.has("module.percpu"):
            return Range(0, 0)
        start = self._structures.value(module, "module.percpu")
        return _range(start, self._number(module, "percpu_size"))

    def _bytes(self, *parts: Range) -> dict[int, bytes]:
        return {p.start: self._memory.read(p.start, p.end - p.start) for p in parts if p.end > p.start}

    def _insn(self, address: int) -> int:
        return int.from_bytes(self._memory.read(address, 4), "little")

    # Symbols

    def _symbols(self, module: int, parts: tuple[Range, ...], per_cpu: Range) -> Iterator[Symbol]:
        """Yield the symbols of the module at `module` that are in `parts` of its memory or in `per_cpu`.

        The size of a symbol extends to the next symbol, or to the end of its part of memory.
        Mirrors: kernel/module/kallsyms.c:find_kallsyms_symbol (v6.1).
        Deviates: Linux also shows the file's other symbols while the init function runs.
        """
        value = self._structures.value
        table = value(module, "module.kallsyms")
        count = value(table, "mod_kallsyms.num_symtab", _COUNT)
        letters = self._memory.table(value(table, "mod_kallsyms.typetab"), count, 1).decode("latin1")
        entries = self._memory.table(value(table, "mod_kallsyms.symtab"), count, _SYMBOL.size)
        strings = value(table, "mod_kallsyms.strtab")
        found = []
        for (name, _, _, section, address, _), letter in zip(
            _SYMBOL.iter_unpack(entries), letters, strict=True
        ):
            if section != _UNDEFINED and name:
                end = next((part.end for part in parts if part.start <= address < part.end), address)
                if end > address or address in range(*per_cpu):
                    found.append((name, address, letter, end))
        text = self._names(strings, [name for name, *_ in found])
        named = [(text(name), *rest) for name, *rest in found]
        # On x86, Linux names addresses by all symbols of the file. Elsewhere, it ignores mapping symbols.
        is_marked = self._kernel.architecture != X86_64.name
        named = [each for each in named if each[0] and not (is_marked and is_mapping_symbol(each[0]))]
        exported = self._exported(module)
        following = dict(pairwise(sorted({address for _, address, _, end in named if end > address})))
        for name, address, letter, end in named:
            shown = letter.upper() if (name, address) in exported else letter.lower()
            yield Symbol(name, address, shown, min(following.get(address, end), end) - address)

    def _names(self, strings: int, places: list[int]) -> Callable[[int], str]:
        """Return a function that maps the offset of a string in a string table to the string.

        `strings`: address of the table. `places`: offsets of all strings that may be requested. The table is
        read up to the string at the largest of them.
        """
        last = max(places, default=0)
        text = self._memory.read(strings, last) + self._memory.string(strings + last, _NAME).encode() + b"\0"
        return lambda at: text[at : text.index(b"\0", at)].decode("utf-8", "replace")

    def _exported(self, module: int) -> frozenset[tuple[str, int]]:
        """Return (name, address) of each symbol that the module exports.

        Mirrors: kernel/module/kallsyms.c:is_exported (v6.1).
        """
        size = self._structures.btf.size("kernel_symbol")
        address, data = self._table(module, "syms", "num_syms", size)
        found = []
        for at in range(0, len(data), size):
            # Both fields are relative to their own addresses.
            value, name = struct.unpack_from("<ii", data, at)
            here = address + at
            found.append((self._memory.string(here + 4 + name, 512), here + value))
        return frozenset(found)

    # Tables

    def _blacklist(self, module: int, symbols: tuple[Symbol, ...]) -> Iterator[BlacklistEntry]:
        """Yield the module's functions that cannot be probed.

        Mirrors: kernel/kprobes.c:add_module_kprobe_blacklist (v6.1).
        """
        functions = {symbol.address: symbol for symbol in reversed(symbols) if symbol.size}
        listed = set(self._words(module, "kprobe_blacklist"))
        areas = []
        for section in ("kprobes_text", "noinstr_text"):
            if self._structures.btf.has(f"module.{section}_start"):
                start = self._structures.value(module, f"module.{section}_start")
                areas.append(range(start, start + self._number(module, f"{section}_size")))
        for address, symbol in functions.items():
            if address in listed or any(address in area for area in areas):
                yield BlacklistEntry(address, address + symbol.size, symbol.name)

    def _bugs(self, module: int) -> dict[int, BugEntry]:
        has_format = self._kernel.bugs_have_format
        address, data = self._table(module, "bug_table", "num_bugs", self._structures.btf.size("bug_entry"))
        return text_tables.bugs(address, data, self._memory.string, has_format=has_format)

    def _words(self, module: int, name: str) -> tuple[int, ...]:
        return text_tables.words(self._table(module, name, f"num_{name}", _WORD)[1])

    def _table(self, module: int, name: str, count: str, size: int = 0) -> tuple[int, bytes]:
        """Return (address, content) of the table that the field `name` of a struct module points to.

        `count`: name of the field with the number of entries. `size`: size of an entry in bytes; 0 for the
        size in _ENTRY. Return (0, b"") if struct module lacks the field `name`.
        Raises: KernelError ENOEXEC (the data are damaged).
        """
        if not self._structures.btf.has(f"module.{name}"):
            return 0, b""
        address = self._structures.value(module, f"module.{name}")
        return address, self._memory.table(address, self._number(module, count), size or _ENTRY[name])

    def _number(self, module: int, name: str) -> int:
        return self._structures.value(module, f"module.{name}", _COUNT)

    def _word(self, va: int) -> int:
        return int.from_bytes(self._memory.read(va, _WORD), "little")


class _ModuleMemory(RunningMemory):
    """Guest memory that is read through `reader`, which limits the steps and bytes of reading one module."""

    reader: GuestReader

    def __init__(self) -> None:
        super().__init__(None, self._read_guest)

    def _read_guest(self, va: int, size: int) -> bytes:
        return self.reader.read(va, size)

    def table(self, va: int, count: int, entry: int) -> bytes:
        """Read a table of `count` entries with `entry` bytes each.

        Raises: KernelError ENOEXEC (the table is not mapped, or larger than the limits of `reader`).
        """
        try:
            return self.reader.table(va, count, entry)
        except MemoryFault as fault:
            raise unusable(f"a table leads to {fault}") from None

    def string(self, va: int, limit: int = PAGE_SIZE) -> str:
        try:
            return self.reader.cstring(va, limit).decode("utf-8", "replace")
        except MemoryFault as fault:
            raise unusable(f"a text leads to {fault}") from None


def _range(start: int, size: int) -> Range:
    if not 0 <= size <= _MAX_BYTES:
        raise unusable("the size of a module is damaged")
    return Range(start, start + size)


def _text(part: Range, places: range) -> Range:
    """Check that the range `part` is in `places`, the addresses for modules' text; return `part`.

    Raises: KernelError ENOEXEC (`part` is not within `places`).
    """
    if part.end > part.start and not (part.start in places and part.end - 1 in places):
        raise unusable(f"a module's text cannot be at {part.start:#x}")
    return part
