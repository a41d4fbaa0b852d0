"""Symbols as trace text shows them."""

from __future__ import annotations

from emulated_kernel.trace.symbols import KernelSymbols


def sprint_symbol(symbols: KernelSymbols, address: int) -> str:
    """`name+0xoffset/0xsize [module]`, or the bare address.

    Mirrors: kernel/kallsyms.c:sprint_symbol (v6.1).
    """
    found = symbols.lookup(address)
    if found is None:
        return f"{address:#x}"
    module = f" [{found.module}]" if found.module else ""
    return f"{found.name}+{found.offset:#x}/{found.symbol.size:#x}{module}"


def print_ip(symbols: KernelSymbols, address: int, *, offset: bool, digits: int) -> str:
    """An instruction address of an entry's header; `digits` is how many trace option sym-addr adds, or 0.

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
    found = symbols.lookup(address)
    return found.name if found is not None else f"0x{address:08x}"
