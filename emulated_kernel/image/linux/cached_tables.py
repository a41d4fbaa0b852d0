"""CachedKernelTables: a distribution kernel's decoded tables, cached in a file as a few arrays."""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Mapping
from contextlib import suppress
from errno import ENOEXEC
from functools import cached_property
from itertools import chain, starmap
from typing import Any

from emulated_kernel.image.address_set import AddressSet, EntryTable
from emulated_kernel.image.kallsyms import Kallsyms, SymbolTable
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.kernel_events import KernelEvent
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.vmlinux import LinkedMemory, LoadSegment, Section
from emulated_kernel.image.text_tables import BlacklistEntry, ExTableEntry, JumpLabel, StaticCall
from emulated_kernel.image.trace_events import FieldDefinition, SyscallDefinition
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import fields

_ADDRESSES = ("mcount", "return_sites", "bugs")
_DEFINITIONS = ("events", "syscalls")
_WORDS = ("ex_table", "jump_labels", "static_calls")
"""Attributes of LinuxKernel: tables whose entries are tuples of addresses."""


def cached_parts(kernel: LinuxKernel) -> dict[str, bytes | memoryview]:
    """Return the data of a kernel that `CachedKernelTables` needs: name of the part -> contents.

    If events or system calls cannot be read, the data contains the error. `CachedKernelTables` raises this
    error when the events or system calls are used. If the types cannot be read, the data has no index of the
    types.
    """
    memory = kernel.vmlinux
    parts: dict[str, bytes | memoryview] = {
        f"symbols.{name}": data for name, data in kernel.kallsyms.table.parts().items()
    }
    parts |= {f"segment.{number}": segment.data for number, segment in enumerate(memory.segments)}
    parts |= {name: array("Q", getattr(kernel, name)).tobytes() for name in _ADDRESSES}
    parts |= {name: array("Q", chain.from_iterable(getattr(kernel, name))).tobytes() for name in _WORDS}
    # A mount of the kernel's own tracefs needs neither types nor events.
    with suppress(KernelError):
        parts |= {f"btf.{name}": data for name, data in kernel.btf.parts().items()}
    unreadable: dict[str, tuple[int, str]] = {}
    for table in _DEFINITIONS:
        try:
            parts[table] = json.dumps(getattr(kernel, table), default=_values).encode()
        except KernelError as error:
            unreadable[table] = error.errno or ENOEXEC, error.strerror or ""
    about = {
        "unreadable": unreadable,
        "architecture": memory.architecture,
        "entry": memory.entry,
        "segments": [(each.va, each.pa, each.mem_size, each.flags) for each in memory.segments],
        "sections": dict(memory.sections),
        "blacklist": kernel.blacklist,
    }
    return {"about": json.dumps(about, default=_values).encode(), **parts}


def decode_tables(kernel: LinuxKernel) -> None:
    """Decode the tables that cached_parts() needs.

    `kernel` keeps the decoded tables, and later copies of `kernel` have them, too. Ignore tables that cannot
    be decoded.
    """
    for name in (*_ADDRESSES, *_WORDS, *_DEFINITIONS, "blacklist"):
        # Each later use of a table that cannot be decoded raises the error again.
        with suppress(KernelError):
            getattr(kernel, name)


def _values(entry: Any) -> list[Any]:
    """Return the values of the fields of a dataclass, for JSON.

    Unlike astuple(), this function copies no value: copying would take most of the time.
    """
    return [getattr(entry, field.name) for field in fields(entry)]


_MUCH = 1 << 20
"""Minimum size in bytes of a read after which mapped pages are released.

The pages of such a long read are rarely needed again soon.
"""


class CachedKernelTables(LinuxKernel):
    """A kernel restored from the result of cached_parts(). The tables are neither copied nor decoded again.

    Raises: KernelError ENOEXEC, KeyError, TypeError, ValueError (the parts are damaged or incomplete).
    """

    def __init__(self, parts: Mapping[str, memoryview]) -> None:
        self._file = parts["about"].obj
        about = json.loads(bytes(parts["about"]))
        self.vmlinux = LinkedMemory(
            about["entry"],
            tuple(
                LoadSegment(va, pa, parts[f"segment.{number}"], size, flags)
                for number, (va, pa, size, flags) in enumerate(about["segments"])
            ),
            {name: Section(*fields) for name, fields in about["sections"].items()},
        )
        self.vmlinux.architecture = str(about["architecture"])
        self._set_symbols(Kallsyms.of_table(SymbolTable.of_parts(_of(parts, "symbols.")), 0, 1 << 64))
        self.ex_table = EntryTable(parts["ex_table"], 2, ExTableEntry)
        self.jump_labels = EntryTable(parts["jump_labels"], 3, JumpLabel)
        self.static_calls = EntryTable(parts["static_calls"], 2, StaticCall)
        self.blacklist = tuple(starmap(BlacklistEntry, about["blacklist"]))
        self.mcount = AddressSet.of_part(parts["mcount"])
        self.return_sites = AddressSet.of_part(parts["return_sites"])
        self.bugs = AddressSet.of_part(parts["bugs"])
        if "btf.starts" in parts:
            self.btf = Btf(self._btf_data(), _of(parts, "btf."))
        self._unreadable = {
            table: (int(number), str(why)) for table, (number, why) in about["unreadable"].items()
        }
        self._definitions = {table: parts[table] for table in _DEFINITIONS if table not in self._unreadable}

    def read(self, va: int, size: int, /) -> bytes:
        found = super().read(va, size)
        if size >= _MUCH:
            self.release_pages()
        return found

    def release_pages(self) -> None:
        if isinstance(self._file, mmap.mmap):
            self._file.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def events(self) -> tuple[KernelEvent, ...]:
        return tuple(
            KernelEvent(address, system, name, text, tuple(starmap(FieldDefinition, fields)), *rest)
            for address, system, name, text, fields, *rest in self._definition("events")
        )

    @cached_property
    def syscalls(self) -> tuple[SyscallDefinition, ...]:
        return tuple(
            SyscallDefinition(number, name, tuple(types), tuple(args))
            for number, name, types, args in self._definition("syscalls")
        )

    def _definition(self, table: str) -> Any:
        """Return the table `table`, "events" or "syscalls", decoded from JSON.

        Raises: KernelError (the table could not be read when the parts were made).
        """
        if table in self._unreadable:
            raise KernelError(*self._unreadable[table])
        return json.loads(bytes(self._definitions[table]))


def _of(parts: Mapping[str, memoryview], prefix: str) -> dict[str, memoryview]:
    """Return the items of `parts` whose names start with `prefix`, with the prefix removed from the names."""
    return {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
