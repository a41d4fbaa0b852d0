"""LinuxKernel: symbols, types, tables and events of a distribution's kernel, which are read from its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from enum import Enum
from errno import ENODATA
from functools import cached_property
from itertools import islice
from typing import Self

from emulated_kernel.image import text_tables
from emulated_kernel.image.address_set import AddressSet
from emulated_kernel.image.elf import gnu_build_id
from emulated_kernel.image.kallsyms import Kallsyms, Symbol, SymbolTable, is_mapping_symbol
from emulated_kernel.image.linux.arm64_image import ARM64
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.flat_image import FlatImage
from emulated_kernel.image.linux.kallsyms_tables import find_symbols
from emulated_kernel.image.linux.kernel_events import (
    KernelEvent,
    Structures,
    kernel_events,
    kernel_syscalls,
    syscall_numbers,
)
from emulated_kernel.image.linux.open_image import open_vmlinux
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import LinkedMemory, Vmlinux
from emulated_kernel.image.text_tables import (
    BlacklistEntry,
    BugEntry,
    ExTableEntry,
    JumpLabel,
    Range,
    StaticCall,
)
from emulated_kernel.image.trace_events import SyscallDefinition
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple

_BANNER_LIMIT = 512
_NOTES_LIMIT = 1 << 16
"""Maximum size in bytes of the kernel's notes that are read."""
_JUMP = 0xE9
"""Opcode of a jump with a displacement of 32 bits."""
_NOPS_BEFORE = 8
"""Size in bytes of the nops before a function, in kernels with CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS."""
_SAMPLE = 64
"""Number of fentry sites that are examined to find out whether there are nops before functions."""
_BTI_C = 0xD503245F
_ARM64_SIZE = 4
_ARM64_NOP = bytes.fromhex("1f2003d5")
_MOV_X9_LR = bytes.fromhex("e9031eaa")
_RISCV_C_NOP = bytes.fromhex("0100")
_RISCV_NOP = bytes.fromhex("13000000")
_AUIPC_T0 = 0x297
_SECOND_HALF = 0x20
"""Bit of an address that is set in the second half of a 64-byte cache line."""


class ReturnThunks(Enum):
    """How boot rewrites a kernel's return instructions for CPU mitigations.

    The values are user-visible texts.
    """

    PLAIN = "plain returns"
    ITS = "return thunks in the first half of cache lines"
    """Only returns in the first half of a cache line use the thunk (Indirect Target Selection)."""
    THUNKS = "return thunks"

    def has_thunk(self, site: int) -> bool:
        """Return True if the return at `site` keeps its jump to the return thunk.

        Return False if boot replaces the jump by a plain return.

        Mirrors: arch/x86/kernel/alternative.c:cpu_wants_rethunk_at (v6.1.139).
        """
        return self is ReturnThunks.THUNKS or (self is ReturnThunks.ITS and not site & _SECOND_HALF)


class _TablePlace(NamedTuple):
    """Location of a table: between two symbols or, if the kernel lacks these symbols, in a section."""

    start: str
    stop: str
    section: str = ""


_EX_TABLE = _TablePlace("__start___ex_table", "__stop___ex_table", "__ex_table")
_BLACKLIST = _TablePlace("__start_kprobe_blacklist", "__stop_kprobe_blacklist", "_kprobe_blacklist")
_MCOUNT = _TablePlace("__start_mcount_loc", "__stop_mcount_loc", "__mcount_loc")
_JUMP_LABELS = _TablePlace("__start___jump_table", "__stop___jump_table", "__jump_table")
_STATIC_CALLS = _TablePlace("__start_static_call_sites", "__stop_static_call_sites", ".static_call_sites")
_BUGS = _TablePlace("__start___bug_table", "__stop___bug_table", "__bug_table")
_RETURN_SITES = _TablePlace("__return_sites", "__return_sites_end", ".return_sites")
_BTF = _TablePlace("__start_BTF", "__stop_BTF", ".BTF")
_EVENTS = _TablePlace("__start_ftrace_events", "__stop_ftrace_events", "_ftrace_events")
_EVAL_MAPS = _TablePlace("__start_ftrace_eval_maps", "__stop_ftrace_eval_maps", "_ftrace_eval_map")
_SYSCALLS = _TablePlace("__start_syscalls_metadata", "__stop_syscalls_metadata", "__syscalls_metadata")

_OPTIONS = {
    **dict.fromkeys(("__per_cpu_offset", "cpu_number", "this_cpu_off"), "CONFIG_SMP"),
    "page_offset_base": "CONFIG_RANDOMIZE_MEMORY", "raised_list": "CONFIG_IRQ_WORK",
    "ipi_mux_pcpu": "CONFIG_GENERIC_IRQ_IPI_MUX", "kprobe_blacklist": "CONFIG_KPROBES",
    **dict.fromkeys(("global_trace", "trace_types"), "CONFIG_TRACING"),
    "ftrace_events": "CONFIG_EVENT_TRACING", "ftrace_pages_start": "CONFIG_DYNAMIC_FTRACE",
    "syscalls_metadata": "CONFIG_FTRACE_SYSCALLS", "modules": "CONFIG_MODULES",
}  # fmt: skip
"""Symbol -> build option without which a kernel does not have the symbol."""
_BTF_MAGIC_SIZE = 2
"""Size in bytes of BTF's magic number. If the number is 0, objcopy(1) has removed the BTF."""
_LAST = "_end"
"""Symbol of the end of a kernel.

kallsyms contains the symbol only with CONFIG_KALLSYMS_ALL, because the symbol is not in text.
"""


class LinuxKernel:
    """The contents of a kernel's file.

    A table is decoded on first use. If the kernel does not have the table, the result is empty.
    Raises: KernelError ENOEXEC (a kernel without symbols).
    """

    bits = 64

    def __init__(self, vmlinux: LinkedMemory) -> None:
        self.vmlinux = vmlinux
        symtab = vmlinux.symtab if isinstance(vmlinux, Vmlinux) else ()
        found = find_symbols(vmlinux)
        if found:
            # The symbols are in the kernel's own order.
            symbols = Kallsyms.of_table(SymbolTable.of(found), 0, 1 << 64)
        elif symtab:
            symbols = Kallsyms(
                Symbol(name, address, letter)
                for address, letter, name in symtab
                if not is_mapping_symbol(name)
            )
        else:
            raise unusable(
                "it has no symbols (neither kallsyms nor a symbol table); a kernel needs CONFIG_KALLSYMS"
            )
        self._set_symbols(symbols)

    def _set_symbols(self, symbols: Kallsyms) -> None:
        self.kallsyms = symbols
        """Symbols of the kernel."""
        start = self.required("_stext")
        end = self.required("_etext")
        last = self.required(_LAST)
        if not self.vmlinux.has(start) or not 0 < end - start <= 1 << 30:
            raise unusable("its text isn't where its symbols say")
        self.text = Range(start, end)
        self.kallsyms = Kallsyms.of_table(symbols.table, start, last)

    @property
    def architecture(self) -> str:
        """Name of the kernel's architecture, as in MachineConfig.arch."""
        return self.vmlinux.architecture

    # Tables that decide which addresses can be probed

    @property
    def text_ranges(self) -> Sequence[Range]:
        """Ranges of text that can be probed: text that isn't freed after boot."""
        return (self.text,)

    @cached_property
    def ex_table(self) -> Sequence[ExTableEntry]:
        """The exception table, sorted by the address of the instruction."""
        return tuple(sorted(text_tables.ex_table(*self._table(_EX_TABLE))))

    @cached_property
    def mcount(self) -> AddressSet:
        """Addresses of the fentry sites, which are at or near the start of functions.

        Zero entries in Linux's table are padding; they are left out.
        """
        start, end = self.text
        words = memoryview(self.read(start, (end - start) & -_ARM64_SIZE)).cast("I")
        inside = range(start, end)
        entries = [site for site in text_tables.words(self._table(_MCOUNT)[1]) if site]
        return AddressSet(
            self.fentry_sites(entries, lambda at: words[at - start >> 2] if at in inside else None)
        )

    def fentry_sites(self, entries: Iterable[int], word_at: Callable[[int], int | None]) -> Iterator[int]:
        """Yield the fentry sites for `entries`, which are from the kernel's or a module's table of sites.

        `word_at` returns the instruction at an address, or None if it is unknown.

        x86: an entry of the table is the fentry site. arm64 and riscv64: an entry is the address of a
        function's first nop, which may be before the function's entry. riscv64: the fentry site is the
        function's entry. arm64: the site is the second nop from the function's entry on; if a landing pad
        (bti c) is at the entry, the nops follow the landing pad.
        Mirrors: arch/arm64/kernel/ftrace.c:ftrace_call_adjust (v6.12).
        """
        before = 0 if self.architecture == "x86_64" else self._nops_before
        for entry in entries:
            site = entry + before
            if self.architecture != ARM64:
                yield site
                continue
            yield site + (2 if word_at(site) == _BTI_C else 1) * _ARM64_SIZE

    @cached_property
    def _nops_before(self) -> int:
        """Size in bytes of the nops before each function of an arm64 or riscv64 kernel; 0 without such nops.

        A kernel has these nops if most of the examined entries in the table of fentry sites are
        _NOPS_BEFORE bytes before the start of a function.
        """
        entries = islice(filter(None, text_tables.words(self._table(_MCOUNT)[1])), _SAMPLE)
        behind = [self.kallsyms.lookup(entry + _NOPS_BEFORE) for entry in entries]
        starts = sum(found is not None and not found.offset for found in behind)
        return _NOPS_BEFORE if starts * 2 > len(behind) else 0

    @cached_property
    def jump_labels(self) -> Sequence[JumpLabel]:
        """Branches of static keys, sorted by address."""
        return tuple(sorted(text_tables.jump_labels(*self._table(_JUMP_LABELS))))

    @cached_property
    def static_calls(self) -> Sequence[StaticCall]:
        """Call sites of static calls, sorted by address."""
        return tuple(sorted(text_tables.static_calls(*self._table(_STATIC_CALLS))))

    @property
    def bug_entries(self) -> dict[int, BugEntry]:
        """Address of a trap instruction of BUG() or WARN() -> its entry in the bug table."""
        return text_tables.bugs(*self._table(_BUGS), self.vmlinux.string, has_format=self.bugs_have_format)

    @cached_property
    def bugs(self) -> AddressSet:
        """Addresses of the trap instructions of BUG() and WARN()."""
        return AddressSet(self.bug_entries)

    @property
    def bugs_have_format(self) -> bool:
        """Whether an entry of the bug table has a format string, as in v6.19 and later; False without BTF."""
        try:
            return self.btf.has("bug_entry.format_disp")
        except KernelError as error:
            # The types of a kernel without BTF are unknown; it can be analysed, but not run.
            if error.errno != ENODATA:
                raise
            return False

    @cached_property
    def return_sites(self) -> AddressSet:
        """Addresses of jumps to the return thunk. Boot replaces them by returns if the CPU needs no thunk."""
        return AddressSet(text_tables.return_sites(*self._table(_RETURN_SITES)))

    @property
    def returns(self) -> tuple[ReturnThunks, ...]:
        """The ways in which boot may rewrite this kernel's returns; empty if it has no return thunks."""
        if not self.return_sites:
            return ()
        return tuple(
            kind
            for kind in ReturnThunks
            if kind is not ReturnThunks.ITS or self.kallsyms.lookup_name("its_return_thunk") is not None
        )

    @property
    def booted_returns(self) -> ReturnThunks | None:
        """The way in which boot rewrote the returns in this kernel's text; None without return sites."""
        sites = self.return_sites.between(*self.text)
        code = self.read(self.text.start, self.text.end - self.text.start)
        counts = Counter((site & _SECOND_HALF, code[site - self.text.start] == _JUMP) for site in sites)
        if not counts:
            return None

        def fitting(kind: ReturnThunks) -> int:
            return sum(count for (half, thunk), count in counts.items() if kind.has_thunk(half) == thunk)

        return max(ReturnThunks, key=fitting)

    @cached_property
    def blacklist(self) -> tuple[BlacklistEntry, ...]:
        """Functions that must not be probed. Mirrors: kernel/kprobes.c:populate_kprobe_blacklist (v6.1)."""
        areas = (
            self.between(f"__{area}_text_start", f"__{area}_text_end") for area in text_tables.BLACKLISTED
        )
        return tuple(
            text_tables.blacklist(self.kallsyms, text_tables.words(self._table(_BLACKLIST)[1]), areas)
        )

    def release_pages(self) -> None:
        """Release the memory of mapped file pages, which are read again on demand.

        In this class, no file is mapped, so the method does nothing.
        """

    def forbid(self, functions: Iterable[str]) -> None:
        """Add functions to the blacklist; unknown names are ignored."""
        found = [self.kallsyms.lookup_name(name) for name in functions]
        addresses = [address for address in found if address]
        entries = (*self.blacklist, *text_tables.blacklist(self.kallsyms, addresses, ()))
        self.blacklist = tuple(dict.fromkeys(entries))

    def between(self, start: str, end: str) -> Range:
        """Return the address range from the symbol `start` to the symbol `end`.

        The range is empty if either symbol doesn't exist.
        """
        first = self._address(start)
        last = self._address(end)
        return Range(first, last) if first < last else Range(0, 0)

    def required(self, name: str) -> int:
        """Return the address of the symbol `name`. Raises: KernelError ENOEXEC (there is no such symbol)."""
        address = self.kallsyms.lookup_name(name)
        if address is None:
            raise self._lacks(name)
        return address

    def _lacks(self, name: str) -> KernelError:
        """Return the error for the missing symbol `name`.

        The text of the error names the build option that provides the symbol, if it is known.
        """
        option = self._missing_option(name)
        remedy = f"; a kernel needs {option}" if option else ""
        return unusable(f"its symbols lack {name}{remedy}")

    def _missing_option(self, name: str) -> str | None:
        """Return the build option without which a kernel's symbols lack `name`; None if it is unknown."""
        if self.kallsyms.lookup_name(_LAST) is None:
            return "CONFIG_KALLSYMS_ALL"
        return _OPTIONS.get(name)

    @property
    def is_preemptible(self) -> bool:
        """Whether the kernel was built with CONFIG_PREEMPTION, and kernel code can therefore be preempted."""
        return self.kallsyms.lookup_name("preempt_schedule") is not None

    def per_cpu(self, name: str) -> int | None:
        """Return the per-CPU offset of the variable `name`, or None if the kernel doesn't have it.

        The variable has its own symbol or, from v6.2 to v6.14, is a member of pcpu_hot. Since v6.15, the
        variables are linked at addresses of the kernel. Such an address is returned as a negative offset,
        which is added to a CPU's base modulo 2**64.
        Mirrors: arch/x86/include/asm/percpu.h:__my_cpu_offset, asm/current.h:struct pcpu_hot (v6.12).
        """
        hot = self.kallsyms.lookup_name("pcpu_hot")
        path = f"pcpu_hot.{name.lstrip('_')}"
        if hot is not None and self.btf.has(path):
            return hot + self.btf.offset(path)
        address = self.kallsyms.lookup_name(name)
        return None if address is None else address - (address >> 63 << 64)

    def required_per_cpu(self, name: str) -> int:
        """Return the per-CPU offset of the variable `name`; see per_cpu().

        Raises: KernelError ENOEXEC (the kernel doesn't have the variable).
        """
        found = self.per_cpu(name)
        if found is None:
            raise self._lacks(name)
        return found

    def _address(self, name: str) -> int:
        """Return the address of the symbol `name`, or 0 if there is no such symbol."""
        return self.kallsyms.lookup_name(name) or 0

    # Memory

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes at `va` as they were linked, without the patches that boot applies.

        Raises: KernelError ENOEXEC (no segment contains the bytes).
        """
        return self.vmlinux.read(va, size)

    @property
    def data(self) -> Iterator[tuple[int, bytes]]:
        """(address, contents) of the part of each segment before the text, and of the part after it.

        The start of each part is rounded up to a multiple of 8. A part that is empty is left out.
        """
        for segment in self.vmlinux.segments:
            start = segment.va
            end = segment.va + len(segment.data)
            for first, last in ((start, min(end, self.text.start)), (max(start, self.text.end), end)):
                aligned = -(-first // 8) * 8
                if aligned < last:
                    yield aligned, bytes(segment.data[aligned - start : last - start])

    def text_as_booted(self, returns: ReturnThunks, part: Range | None = None) -> bytes:
        """Return the kernel's text, or the range `part` of it, with its return instructions rewritten.

        `returns`: way in which boot rewrites the returns. The other patches of boot aren't applied.
        """
        start, end = part or self.text
        text = bytearray(self.read(start, end - start))
        for site in self.return_sites.between(start, end):
            at = site - start
            if 0 <= at <= len(text) - text_tables.RETURN_SIZE and not returns.has_thunk(site):
                patched = text_tables.plain_return(bytes(text[at : at + text_tables.RETURN_SIZE]))
                if patched:
                    text[at : at + text_tables.RETURN_SIZE] = patched
        return bytes(text)

    def booted(self, returns: ReturnThunks, part: Range | None = None) -> Self:
        """Return a copy of this kernel with its return instructions rewritten, as text_as_booted() does.

        `returns`: way in which boot rewrites the returns. `part`: range of the text to rewrite; None for all
        text.
        """
        copied = copy(self)
        start, _ = part or self.text
        text = self.text_as_booted(returns, part)
        # A copy of the memory would take most of the time of an explanation.
        if text != self.read(start, len(text)):
            copied.vmlinux = self.vmlinux.with_bytes(start, text)
        return copied

    def with_ftrace_sites(self) -> Self:
        """Return a copy of this arm64 or riscv64 kernel, with its fentry sites as ftrace writes them at boot.

        In the kernel's file, these sites are nops of the compiler. A kernel without fentry sites or for x86
        is returned unchanged. x86: ProbeChecker.unpatched_code() puts nops at a function's fentry sites.
        Mirrors: arch/arm64/kernel/ftrace.c:ftrace_init_nop (v6.12).
        Mirrors: arch/riscv/kernel/ftrace.c:ftrace_init_nop (v6.12, v6.16).
        """
        if self.architecture == "x86_64" or not self.mcount:
            return self
        start, end = self.text
        text = bytearray(self.read(start, end - start))
        caller = self._address("ftrace_caller")
        is_adjusted = self._address("ftrace_call_adjust")
        for site in self.mcount:
            at = site - start
            if self.architecture == ARM64:
                # The fentry site is the second nop.
                if 4 <= at < len(text) and text[at - 4 : at + 4] == 2 * _ARM64_NOP:
                    text[at - 4 : at] = _MOV_X9_LR
            elif 0 <= at <= len(text) - 8 and text[at : at + 8] in (4 * _RISCV_C_NOP, 2 * _RISCV_NOP):
                first = _RISCV_NOP
                if is_adjusted and caller:
                    first = (_AUIPC_T0 | (caller - site + 0x800) & 0xFFFFF000).to_bytes(4, "little")
                text[at : at + 8] = first + _RISCV_NOP
        copied = copy(self)
        copied.vmlinux = self.vmlinux.with_bytes(start, bytes(text))
        return copied

    def with_symbols(self, kallsyms: Kallsyms, /) -> Self:
        """Return a copy of this kernel with another symbol table."""
        copied = copy(self)
        copied.kallsyms = kallsyms
        return copied

    # Version, types and events

    @cached_property
    def version(self) -> str:
        """Text of linux_banner; "" if the kernel doesn't have this symbol."""
        address = self._address("linux_banner")
        return self.vmlinux.string(address, _BANNER_LIMIT).strip() if address else ""

    @cached_property
    def release(self) -> str:
        """Release of the kernel, as uname -r prints it; "" if it is unknown."""
        words = self.version.split()
        return words[2] if len(words) > 2 else ""

    @cached_property
    def build_id(self) -> str:
        """GNU build id of the kernel in hexadecimal; "" if the kernel has none."""
        start, end = self.between("__start_notes", "__stop_notes")
        return gnu_build_id(self.read(start, min(end - start, _NOTES_LIMIT))) if end > start else ""

    @cached_property
    def btf(self) -> Btf:
        """Types of the kernel. Raises: KernelError ENODATA (the kernel was built without BTF)."""
        return Btf(self._btf_data())

    @property
    def has_btf(self) -> bool:
        """Whether the kernel was built with BTF, and its file still has the BTF."""
        return any(self._btf_section()[:_BTF_MAGIC_SIZE])

    def _btf_section(self) -> bytes | memoryview:
        address, size = self._place(_BTF)
        return self.vmlinux.view(address, size) if size else b""

    def _btf_data(self) -> bytes | memoryview:
        data = self._btf_section()
        if not any(data[:_BTF_MAGIC_SIZE]):
            # objcopy(1) can remove the section. The addresses are zeros then.
            raise KernelError(ENODATA, "this kernel has no BTF: it was built without CONFIG_DEBUG_INFO_BTF")
        return data

    @cached_property
    def _structures(self) -> Structures:
        return Structures(self.vmlinux, self.btf)

    @cached_property
    def events(self) -> tuple[KernelEvent, ...]:
        """The kernel's trace events, including those of system calls.

        Raises: KernelError ENODATA (no BTF).
        """
        calls = text_tables.words(self._table(_EVENTS)[1])
        maps = text_tables.words(self._table(_EVAL_MAPS)[1])
        return tuple(kernel_events(self._structures, calls, maps))

    @cached_property
    def syscalls(self) -> tuple[SyscallDefinition, ...]:
        """The kernel's system calls with the types and names of their parameters.

        Raises: KernelError ENODATA (no BTF).
        """
        numbers = self._syscall_numbers(self._address("sys_call_table"))
        return tuple(kernel_syscalls(self._structures, text_tables.words(self._table(_SYSCALLS)[1]), numbers))

    def _syscall_numbers(self, table: int) -> dict[str, int]:
        return syscall_numbers(self.vmlinux, table, self.kallsyms.names_at)

    def _table(self, place: _TablePlace) -> tuple[int, bytes]:
        """Return address and contents of a table; (0, b"") if the kernel doesn't have the table."""
        address, size = self._place(place)
        return address, self.read(address, size) if size else b""

    def _place(self, place: _TablePlace) -> tuple[int, int]:
        """Return address and size of a table; (0, 0) if the kernel doesn't have the table."""
        start, end = self.between(place.start, place.stop)
        return (start, end - start) if end else self.vmlinux.section_place(place.section)


def open_kernel(source: str) -> LinuxKernel:
    """Open a kernel. `source`: path of a vmlinux, vmlinuz, Image or package; `host` for the running kernel.

    Raises: KernelError ENOEXEC (not a kernel), ENOENT (the running kernel's file doesn't exist), OSError.
    """
    vmlinux = open_vmlinux(source)
    kernel = LinuxKernel(vmlinux)
    if isinstance(vmlinux, FlatImage):
        vmlinux.check_complete(kernel.required("_edata"))
    return kernel
