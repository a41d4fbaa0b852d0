"""Input of the probe checks: a function's code, its table entries, and text that other subsystems patch."""

from __future__ import annotations

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.util.fast_dataclass import dataclass

_EMPTY_RANGE = range(0)


@dataclass(frozen=True, slots=True)
class PatchSite:
    """Range of kernel text that is patched by a subsystem other than kprobes, such as ftrace."""

    addr: int
    size: int

    def overlaps(self, first: int, last: int) -> bool:
        """Return True if any byte of the site lies in first..last, both inclusive."""
        return self.addr <= last and self.addr + self.size > first


@dataclass(frozen=True, eq=False)
class Function:
    """A text symbol with its code, and the entries of the kernel's tables for addresses in it.

    Addresses are absolute. `size` is the size in kallsyms, so it includes padding up to the next symbol.
    """

    name: str
    addr: int
    size: int
    code: bytes
    """Machine code of the function, with original bytes in place of those that probes have patched.

    The code is shorter than `size` if part of the text couldn't be read.
    """
    fentry_sites: tuple[PatchSite, ...] = ()
    """Fentry sites inside the function (its mcount locations); empty if they count as plain nops.

    After ProbeChecker.refuse_sites(), each instruction of a site is a PatchSite of its own.
    """
    exception_entries: frozenset[int] = frozenset()
    """Addresses of the instructions that have a fixup in __ex_table."""
    bug_entries: frozenset[int] = frozenset()
    """Addresses of the trap instructions that __bug_table lists."""
    jump_labels: tuple[PatchSite, ...] = ()
    static_calls: tuple[PatchSite, ...] = ()

    @property
    def end(self) -> int:
        """Address of the first byte after the function."""
        return self.addr + self.size


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Address ranges of a kernel's text that the probe checks use."""

    text: range = _EMPTY_RANGE
    """Kernel text, from _stext to _etext."""
    entry_text: range = _EMPTY_RANGE
    thunks: range = _EMPTY_RANGE
    """Address range of the indirect and return thunks. As in Linux, the end address counts as inside."""
    return_thunks: frozenset[int] = frozenset()
    """Addresses of the return thunks to which the kernel's returns jump after boot."""


def reserved_range(function: Function, first: int, last: int) -> Rejection | None:
    """Return a rejection if a patch site of `function` overlaps first..last, both inclusive; else None.

    Mirrors: arch/x86/kernel/kprobes/opt.c:copy_optimized_instructions (v6.1), the end of that function.
    """
    for sites, reason in (
        (function.fentry_sites, RejectReason.RESERVED_BY_FTRACE),
        (function.jump_labels, RejectReason.RESERVED_BY_JUMP_LABEL),
        (function.static_calls, RejectReason.RESERVED_BY_STATIC_CALL),
    ):
        for site in sites:
            if site.overlaps(first, last):
                return Rejection(reason, site.addr)
    return None
