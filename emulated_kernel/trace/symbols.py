"""Symbols as trace text shows them, and which functions may not be probed because tracing needs them."""

from __future__ import annotations

from emulated_kernel.trace.ports import TraceSymbols


def sprint_symbol(symbols: TraceSymbols, address: int) -> str:
    """`name+0xoffset/0xsize [module]`, or the bare address.

    Mirrors: kernel/kallsyms.c:sprint_symbol (v6.1).
    """
    found = symbols.lookup(address)
    if found is None:
        return f"{address:#x}"
    module = f" [{found.module}]" if found.module else ""
    return f"{found.name}+{found.offset:#x}/{found.size:#x}{module}"


def print_ip(symbols: TraceSymbols, address: int, *, offset: bool, digits: int) -> str:
    """An instruction address of an entry's header; `digits` is how many trace option sym-addr adds, or 0.

    Mirrors: kernel/trace/trace_output.c:seq_print_ip_sym (v6.1).
    """
    if not address:
        return "0"
    suffix = f" <{address:0{digits}x}>" if digits else ""
    return _name_of(symbols, address, offset) + suffix


def _name_of(symbols: TraceSymbols, address: int, offset: bool) -> str:
    if symbols.is_return_trampoline(address):
        return "[unknown/kretprobe'd]"
    if offset:
        return sprint_symbol(symbols, address)
    found = symbols.lookup(address)
    return found.name if found is not None else f"0x{address:08x}"


def within_notrace_func(symbols: TraceSymbols, address: int) -> bool:
    """Whether the function at `address` has no fentry site, so that tracing itself may use it.

    A compiler's part of a function (`foo.cold`) takes this from the function. An address outside all
    symbols isn't in any. Mirrors: kernel/trace/trace_kprobe.c:within_notrace_func (v6.1).
    """
    found = symbols.lookup(address)
    if not address or found is None or symbols.has_fentry(found.start, found.start + found.size - 1):
        return False
    base, dot, _ = found.name.partition(".")
    whole = symbols.lookup_name(base) if dot else None
    if not whole:
        return True
    found = symbols.lookup(whole)
    return found is not None and not symbols.has_fentry(found.start, found.start + found.size - 1)
