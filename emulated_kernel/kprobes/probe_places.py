"""ProbePlaces: finds the address of a probe by symbol or address, and checks that it may be probed."""

from __future__ import annotations

import errno
from typing import Any

from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.image.kallsyms import Kallsyms, Location
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.errors import KernelError


class ProbePlaces:
    """Finds probed addresses in a kernel's symbols, and checks that probes are allowed there.

    The checks use the kernel's text tables and blacklist. They need no machine, because the kernel need not
    run.
    """

    def __init__(self, symbols: Kallsyms, probe_checker: ProbeChecker[Any]) -> None:
        self._symbols = symbols
        self._checker = probe_checker

    def locate(self, kprobe: Kprobe) -> tuple[GuestAddr, Location, bool]:
        """Return the address to be probed, its symbol and offset, and whether it is a function's entry.

        Raises: KernelError EINVAL (not exactly one of symbol and address is given), ENOENT (an unknown
        symbol, or an address in no symbol).
        Mirrors: kernel/kprobes.c:_kprobe_addr (v6.1).
        """
        name = kprobe.symbol_name
        addr = kprobe.addr
        if (name is None) == (addr is None):
            raise KernelError(
                errno.EINVAL,
                "give a symbol name or an address; if it has both, the probe may be registered already",
            )
        if name is not None:
            addr = self._symbols.lookup_name(name)
            if addr is None:
                raise KernelError(errno.ENOENT, f"no symbol named {name!r}")
        assert addr is not None
        addr += kprobe.offset
        where = self._symbols.lookup(addr)
        if where is None:
            raise KernelError(errno.ENOENT, f"{addr:#x} is in no symbol")
        moved, on_entry = self._checker.moved_place(where)
        return GuestAddr(addr + moved.offset - where.offset), moved, on_entry

    def function_entry(self, kprobe: Kprobe) -> GuestAddr:
        """Return the probed address of a probe that must be on a function's entry.

        Raises: KernelError EINVAL (not a function's entry), and the errors of locate().
        """
        address, _, on_entry = self.locate(kprobe)
        if not on_entry:
            raise KernelError(errno.EINVAL, f"{address:#x} is not the entry of a function")
        return address

    def check(self, where: Location, addr: int) -> None:
        """Check that the kernel's text tables and blacklist allow a probe at `addr`.

        `where` is the symbol and offset of `addr`.
        Raises: KernelError EINVAL (not text, blacklisted, or in a jump label, a static call site or a
        BUG()), EILSEQ (within an fentry site).
        """
        refused = self._checker.check_address_safe(where, addr)
        if refused is not None:
            raise KernelError(refused.errno, refused.text)
