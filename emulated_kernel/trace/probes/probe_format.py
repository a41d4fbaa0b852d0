"""Fields, print format and text of probes' events, made of their fetch arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emulated_kernel.trace.fetch.fetchargs import ProbeArg
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols

ENTRY_ADDRESSES, RETURN_ADDRESSES = ("__probe_ip",), ("__probe_func", "__probe_ret_ip")
"""What the events of probes on code begin with."""


def args_text(args: Sequence[ProbeArg], payload: bytes, start: int, symbols: KernelSymbols) -> str:
    """Arguments as `trace` shows them, a blank before each; they begin at `start` of the payload.

    Mirrors: kernel/trace/trace_probe_tmpl.h:trace_probe_print_args (v6.1).
    """
    return "".join(f" {arg.name}={_arg_text(arg, payload, start, symbols)}" for arg in args)


def _arg_text(arg: ProbeArg, payload: bytes, start: int, symbols: KernelSymbols) -> str:
    at = start + arg.offset
    places = range(at, at + arg.size, arg.type.size)
    texts = [arg.type.text(payload, place, symbols) for place in places]
    return "{" + ",".join(texts) + "}" if arg.count else texts[0]


def probe_fields(names: Sequence[str], args: Sequence[ProbeArg], word_size: int) -> Iterator[EventField]:
    """Fields of a probe's event: `names` are addresses, which come first.

    Mirrors: kernel/trace/trace_kprobe.c:kprobe_event_define_fields (v6.1).
    """
    offset = COMMON_SIZE
    for name in names:
        yield EventField("unsigned long", name, offset, word_size, False)
        offset += word_size
    for arg in args:
        yield EventField(arg.field_type, arg.name, offset + arg.offset, arg.size, arg.type.is_signed)


def probe_fmt(names: Sequence[str], args: Sequence[ProbeArg]) -> str:
    """As in `print fmt:`; `names` are addresses.

    Mirrors: kernel/trace/trace_probe.c:__set_print_fmt (v6.1).
    """
    addresses = f"({' <- '.join('%lx' for _ in names)})" if names else ""
    arguments = "".join(f" {arg.name}={_arg_fmt(arg)}" for arg in args)
    values = [f"REC->{name}" for name in names] + [value for arg in args for value in _arg_values(arg)]
    return ", ".join([f'"{addresses}{arguments}"', *values])


def _arg_fmt(arg: ProbeArg) -> str:
    one = arg.type.print_fmt
    return "{" + ",".join([one] * arg.count) + "}" if arg.count else one


def _arg_values(arg: ProbeArg) -> list[str]:
    elements = [f"{arg.name}[{number}]" for number in range(arg.count)] or [arg.name]
    return [arg.type.print_value(each) for each in elements]
