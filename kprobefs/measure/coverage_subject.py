"""Subjects of `kprobefs coverage`: the built-in image, a distribution's kernel, or recorded functions."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from errno import EINVAL, EIO
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from emulated_kernel.arch.riscv.insn import RVI_SIZE
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.kallsyms import Kallsyms, Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import Module
from emulated_kernel.image.text_tables import (
    BlacklistEntry,
    ExTableEntry,
    JumpLabel,
    ProbedTables,
    Range,
    StaticCall,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, replace
from emulated_kernel.util.safe_read import read_named
from kprobefs.common.errors import escape_for_terminal
from kprobefs.common.progress import Progress
from kprobefs.mount_options import chosen_cpu

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.guests.linux.guest.cpu_report import CpuReport

_RECORDED_LIMIT = 256 << 20
"""Maximum size in bytes of a file of recorded functions, unpacked."""
_SECTIONS = (
    "entry", "noinstr", "kprobes", "sched", "cpuidle", "lock", "irqentry", "softirqentry", "static_call",
)  # fmt: skip
"""Names of text sections, whose start and end are the symbols __NAME_text_start and __NAME_text_end."""
_TEXT = ".text"
WITH_OPTPROBES = "x86_64", "i386"
"""Architectures on which Linux can replace breakpoints by jumps."""
_UNKNOWN = "?"
"""Symbol name for the text between recorded functions."""


@dataclass(frozen=True)
class Subject:
    """The functions and tables of one kernel, which `coverage` analyses."""

    title: str
    """Name of the kernel in the output."""
    arch: str
    tables: ProbedTables
    recorded: tuple[Symbol, ...] | None = None
    """The functions, if the subject has only some functions of a kernel; None if it has all functions."""
    pattern: str = ""
    """Shell pattern for the names of the functions to analyse; "" for all functions."""
    remarks: tuple[str, ...] = ()
    """Sentences for the output that say for which CPUs the counts are valid."""
    has_own_kprobes: bool = False
    """Whether the verdicts are those of the kernel's own kprobes. If False, they are those of kprobefs's."""

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """Return the functions. Each function is represented by the first symbol at its address."""
        if self.pattern:
            every = replace(self, pattern="").symbols
            return tuple(symbol for symbol in every if fnmatchcase(symbol.name, self.pattern))
        if self.recorded is not None:
            return self.recorded
        text = [range(*span) for span in self.tables.text_ranges]
        firsts: dict[int, Symbol] = {}
        for symbol in self.tables.kallsyms.symbols:
            if symbol.size and any(symbol.address in part for part in text):
                firsts.setdefault(symbol.address, symbol)
        return tuple(firsts.values())

    def of_functions(self, pattern: str) -> Subject:
        """Return the subject with only those functions whose names match the shell pattern `pattern`."""
        return replace(self, title=f"{self.title}, {pattern}", pattern=pattern)

    @property
    def complete(self) -> bool:
        """Whether all functions of the kernel are known, even if `pattern` leaves some of them out."""
        return self.recorded is None

    @cached_property
    def sections(self) -> tuple[tuple[range, str], ...]:
        """Return (addresses, name) of each text section other than .text.

        Return () if not all functions of the kernel are known.
        """
        return _sections(self.tables.kallsyms) if self.complete else ()

    @property
    def has_optprobes(self) -> bool | None:
        """Whether the kernel was built with CONFIG_OPTPROBES; None if its symbols do not say so.

        It is always None on arm64 and RISC-V, where Linux has no optprobes: there, the profile decides.
        """
        if self.arch not in WITH_OPTPROBES:
            return None
        return self._has("arch_prepare_optimized_kprobe")

    def own_kprobes(self, *, has_jumps: bool) -> str:
        """Return a clause that says what the kernel's own kprobes lack in comparison with kprobefs's.

        Return "" on x86, and if no such difference is known. `has_jumps`: whether kprobefs's kprobes are
        optimized.
        """
        if self.arch in WITH_OPTPROBES:
            # On x86, kprobefs's kprobes follow the configuration of the kernel.
            return ""
        missing: list[str] = []
        if has_jumps and self._has("arch_prepare_optimized_kprobe") is False:
            missing.append("have no jumps")
        # On arm64, kprobefs refuses ftrace sites, too.
        if self.refused_sites & set(self.tables.mcount):
            missing.append("refuse function entries, which are ftrace sites")
        if not missing:
            return ""
        return f"with --kprobes kprobefs, the default; this kernel's own kprobes {' and '.join(missing)}"

    @cached_property
    def refused_sites(self) -> frozenset[int]:
        """Addresses that a RISC-V kernel's own kprobes refuse, because ftrace changes their instructions.

        Before v6.16, this is the first instruction of an ftrace site. Since v6.16, it is the second one, the
        only one that ftrace then changes. The set is empty on other architectures, and if the kernel's
        kprobes use ftrace.
        Mirrors: kernel/kprobes.c:check_ftrace_location (v6.12), arch/riscv/kernel/ftrace.c:ftrace_call_adjust
        (v6.16).
        """
        if not self.arch.startswith("riscv") or self._has("kprobe_ftrace_handler") is not False:
            return frozenset()
        offset = RVI_SIZE if self._has("ftrace_call_adjust") else 0
        return frozenset(site + offset for site in self.tables.mcount)

    @cached_property
    def unguarded_sites(self) -> frozenset[int]:
        """Addresses that ftrace patches and at which a RISC-V kernel's own kprobes are accepted nevertheless.

        Before v6.16, ftrace patches both instructions of a site, and the kernel refuses a probe at the first.
        Mirrors: arch/riscv/kernel/ftrace.c:__ftrace_modify_call (v6.12).
        """
        if not self.refused_sites or self._has("ftrace_call_adjust"):
            return frozenset()
        return frozenset(site + RVI_SIZE for site in self.tables.mcount)

    def _has(self, function: str) -> bool | None:
        lookup = self.tables.kallsyms.lookup_name
        if lookup("register_kprobe") is None or lookup("__guest_abi") is not None:
            return None
        return lookup(function) is not None

    def section(self, addr: int) -> str:
        """Return the name of the text section that contains an address."""
        return next((name for part, name in self.sections if addr in part), _TEXT)


def own_image(arch: str) -> Subject:
    """Return the built-in image of an architecture as a subject. Raises: KernelError ENOENT (no image)."""
    return Subject(f"kprobefs's own kernel for {arch}", arch, load_image(None, arch))


def linux_image(source: str) -> Iterator[Subject]:
    """Yield a distribution's kernel as subjects, one for each way in which boot may rewrite its returns.

    If boot rewrites no returns, yield one subject. `source` and `Raises:` are those of kernel_from_file().
    """
    # Coverage of other subjects does not need the cache.
    from emulated_kernel.guests.linux.table_cache import kernel_from_file

    kernel = kernel_from_file(source)
    for returns in kernel.returns:
        yield Subject(f"Linux {kernel.release}, {returns.value}", "x86_64", kernel.booted(returns))
    if not kernel.returns:
        yield Subject(f"Linux {kernel.release}", kernel.architecture, kernel.with_ftrace_sites())


def booted_kernel(source: str, cpu: str) -> tuple[LinuxKernel, CpuReport]:
    """Return a distribution's kernel after its boot on the CPU of option --cpu, and the boot's report.

    `source`: path of the kernel's file, or `host` for the running kernel. `cpu`: value of the option. If the
    cache has no such kernel, boot it and show the progress.

    Raises: CliError (no such CPU), KernelError (the kernel cannot be read or booted), OSError (its file).
    """
    from emulated_kernel.guests.linux.boot_cache import kernel_as_booted
    from emulated_kernel.util.config import DEFAULT_SEED

    bar: Progress | None = None
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal bar, shown
        bar = bar or Progress(f"booting {escape_for_terminal(Path(source).name)}", total)
        bar.add(done - shown)
        shown = done

    found = kernel_as_booted(source, DEFAULT_SEED, chosen_cpu(cpu), progress)
    if bar is not None:
        bar.end()
    return found


def modules_on_cpu(source: str, cpu: str, contents: Iterable[bytes]) -> Sequence[Module]:
    """Return modules as a distribution's kernel has them after it has loaded them on the CPU of option --cpu.

    `contents`: contents of the modules' files, in the order of loading. The result lacks the modules that the
    kernel cannot load there. `source` and `cpu`: see booted_kernel().

    Raises: CliError (no such CPU), KernelError (the emulator cannot run the kernel), OSError (the kernel's
    file).
    """
    from emulated_kernel.guests.linux.boot_cache import modules_as_booted
    from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, MemoryFault
    from emulated_kernel.util.config import DEFAULT_SEED

    try:
        return modules_as_booted(source, DEFAULT_SEED, chosen_cpu(cpu), contents)
    except (GuestFault, HardwareError, MemoryFault) as fault:
        raise KernelError(EIO, str(fault)) from fault


def dumped_kernel(vmcore: str) -> Subject:
    """Return the kernel in a dump, with the text of the dumped machine, as a subject.

    `vmcore`: path of the dump. Raises: as kernel_in_core().
    """
    from emulated_kernel.guests.linux.vmcore.vmcore_guest import kernel_in_core

    kernel = kernel_in_core(vmcore)
    return Subject(f"Linux {kernel.release}, a dump", "x86_64", kernel)


def booted_image(source: str, cpu: str) -> Subject:
    """Return a distribution's kernel after its boot on the CPU of option --cpu, as a subject.

    The parameters and `Raises:` are those of booted_kernel().
    """
    kernel, report = booted_kernel(source, cpu)
    title = f"Linux {kernel.release}, {report.cpu_description}"
    return Subject(title, "x86_64", kernel, remarks=tuple(report.remarks))


def recorded_functions(path: Path) -> Subject:
    """Return the functions in a file like tests/oracle/functions-*.json.gz as a subject.

    Raises: KernelError EINVAL (not a file of recorded functions), OSError.
    """
    data = _unpacked(path)
    try:
        functions: dict[str, Any] = json.loads(data)
        about = functions.pop("_meta")
        recorded = RecordedTables(about, functions)
        title = f"{len(functions)} functions of {about['kernel']}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KernelError(EINVAL, f"no recorded functions: {type(error).__name__} {error}") from error
    return Subject(title, recorded.arch, recorded, recorded.functions)


def _unpacked(path: Path) -> bytes:
    data = read_named(path, _RECORDED_LIMIT)
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(_RECORDED_LIMIT + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise KernelError(EINVAL, f"no recorded functions: {error}") from error
    if len(data) > _RECORDED_LIMIT:
        raise KernelError(EINVAL, f"more than {_RECORDED_LIMIT >> 20} MiB of recorded functions")
    return data


class RecordedTables:
    """Text and tables of a kernel that is known only by some functions in a file; implements ProbedTables.

    The file is one like tests/oracle/functions-*.json.gz. The text between its functions is unknown: the
    symbols there have the name "?", and reading there returns no bytes.
    """

    def __init__(self, about: dict[str, Any], functions: dict[str, dict[str, Any]]) -> None:
        """Decode recorded functions. `about` is the file's entry "_meta"; `functions`: name -> its entry.

        Raises: ValueError, KeyError, TypeError, AttributeError (the JSON is not a recording).
        """
        ranges = {name: _address(value) for name, value in about.get("ranges", {}).items()}
        if ranges:
            self.arch = "x86_64"
            text = ranges["_stext"], ranges["_etext"]
        else:
            self.arch = "riscv64" if about["rvc"] else "riscv64i"
            start, size = about["text"]
            text = _address(start), _address(start) + int(size)
        spans = {name: (_address(entry["addr"]), int(entry["size"])) for name, entry in functions.items()}
        self._code = {
            _address(entry["addr"]): bytes.fromhex(entry["bytes_hex"]) for entry in functions.values()
        }
        self.kallsyms = _symbols(spans, ranges, text)
        firsts = {symbol.address: symbol for symbol in self.kallsyms.symbols if symbol.name in spans}
        self.functions = tuple(firsts.values())
        self.text_ranges = [Range(*text)]
        forbidden = [name for name, entry in functions.items() if entry.get("blacklisted")]
        self.blacklist = [BlacklistEntry(spans[name][0], sum(spans[name]), name) for name in forbidden]

        def entries(key: str) -> Iterator[Any]:
            return (each for entry in functions.values() for each in entry.get(key, ()))

        self.mcount = [_address(site) for site in entries("mcount")]
        self.ex_table = [ExTableEntry(_address(insn), 0) for insn in entries("ex_table")]
        self.bugs = [_address(bug) for bug in entries("bug")]
        self.jump_labels = [JumpLabel(_address(label), 0, 0) for label, _ in entries("jump_labels")]
        self.static_calls = [StaticCall(_address(site), 0) for site in entries("static_calls")]
        self.data: list[tuple[int, bytes]] = []

    def read(self, va: int, size: int, /) -> bytes:
        """Return at most `size` bytes from an address on, up to the end of the function.

        Return b"" if the function was not recorded.
        """
        where = self.kallsyms.lookup(va)
        code = b"" if where is None else self._code.get(where.symbol.address, b"")
        return b"" if where is None else code[where.offset : where.offset + size]


def _symbols(spans: dict[str, tuple[int, int]], ranges: dict[str, int], text: tuple[int, int]) -> Kallsyms:
    """Return a symbol table: functions, gaps between the functions, and symbols that delimit address ranges.

    `spans`: name of a function -> its start and size. `ranges`: name of a symbol that delimits a range ->
    address. `text`: start and end of the text.
    """
    starts = {start for start, _ in spans.values()}
    ends = {sum(span) for span in spans.values()}
    known = [Symbol(name, start, "t") for name, (start, _) in spans.items()]
    gaps = [Symbol(_UNKNOWN, at, "t") for at in {*text, *ends} - starts]
    borders = [Symbol(name, at, "t") for name, at in ranges.items() if at not in starts]
    return Kallsyms([*known, *gaps, *borders], min({*starts, text[0]}), max({*ends, text[1]}))


def _address(text: str) -> int:
    return int(text, 16)


def _sections(kallsyms: Kallsyms) -> tuple[tuple[range, str], ...]:
    parts = [
        (_between(kallsyms, f"__{name}_text_start", f"__{name}_text_end"), f".{name}.text")
        for name in _SECTIONS
    ]
    thunks = _between(kallsyms, "__indirect_thunk_start", "__indirect_thunk_end")
    parts.append((thunks, ".text.__x86.indirect_thunk"))
    return tuple((part, name) for part, name in parts if part)


def _between(kallsyms: Kallsyms, start: str, end: str) -> range:
    first = kallsyms.lookup_name(start)
    last = kallsyms.lookup_name(end)
    return range(0) if first is None or last is None else range(first, last)
