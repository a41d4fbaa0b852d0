"""A kprobe event's command: p|r[MAXACTIVE][:[GRP/][EVENT]] PLACE [FETCHARGS], parsed."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import intern

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import is_good_name, is_good_system_name
from emulated_kernel.trace.fetchargs import FetchContext, ProbeArg, parse_args
from emulated_kernel.trace.guest import GuestPlaces
from emulated_kernel.trace.numbers import is_digit, kstrtol, kstrtoul
from emulated_kernel.trace.ports import ProbeBackend, TraceArch, TraceSymbols
from emulated_kernel.trace.probe_errors import CommandLog, ProbeError
from emulated_kernel.trace.types import FetchInsn, FetchOp

KPROBE_EVENT_SYSTEM = "kprobes"
MAX_EVENT_NAME_LEN = 64
"""Bytes of a name and its ending NUL."""
KRETPROBE_MAXACTIVE_MAX = 4096
_UINT_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Place:
    """Where to probe: `symbol` (may be MODULE:NAME) + `offset` bytes, or `address`."""

    symbol: str | None
    offset: int
    address: int | None
    is_return: bool
    on_entry: bool = False
    """Known to be the entry of a function, of which the arguments can be fetched."""

    def show(self, word_size: int) -> str:
        """As in kprobe_events, and as `-:EVENT PLACE` has to give it.

        Deviates: Linux hashes raw addresses (%p); this is what it shows under `no_hash_pointers`.
        """
        if self.symbol is None:
            return f"0x{self.address or 0:0{2 * word_size}x}"
        return f"{self.symbol}+{self.offset}" if self.offset else self.symbol

    def default_event(self, word_size: int) -> str:
        """The name of an event that was given none."""
        place = f"{self.symbol}_{self.offset}" if self.symbol is not None else self.show(word_size)
        name = f"{'r' if self.is_return else 'p'}_{place}"[: MAX_EVENT_NAME_LEN - 1]
        return name.replace(":", "_").replace(".", "_")


@dataclass(frozen=True, slots=True)
class ProbeDefinition:
    """A parsed command. Strings have one character a byte."""

    group: str
    event: str
    place: Place
    maxactive: int
    args: tuple[ProbeArg, ...]


@dataclass(frozen=True)
class Surroundings:
    """What parsing asks about the kernel that is probed."""

    arch: TraceArch
    symbols: TraceSymbols
    backend: ProbeBackend
    guest: GuestPlaces | None = None
    """For handlers in guest code; None: there are none."""


def parse_definition(argv: Sequence[str], around: Surroundings, log: CommandLog) -> ProbeDefinition | None:
    """Parse a command of one word or more; None where it isn't for kprobes, but maybe another kind of event.

    Raises: KernelError EINVAL, ENOENT, EADDRNOTAVAIL, ERANGE, E2BIG; logged, but for a wrong type of `$comm`.
    Mirrors: kernel/trace/trace_kprobe.c:__trace_kprobe_create (v6.1).
    """
    if len(argv) < 2 or argv[0][0] not in "pr":
        return None
    head, place_word, *arg_words = argv
    maxactive = _maxactive(head, log)
    if "/" in place_word and ":" in place_word:
        return None
    place = _place(place_word, head[0] == "r", around, log)
    log.index = 0
    group, event = KPROBE_EVENT_SYSTEM, ""
    if ":" in head:
        group, event = parse_event_name(head.partition(":")[2], head.index(":") + 1, log)
    on_return = place.is_return and place.symbol is not None
    context = FetchContext(around.arch, log, on_return, place.on_entry)
    args = parse_args(arg_words, context)
    event = event or place.default_event(around.arch.word_size)
    return ProbeDefinition(group, event, place, maxactive, args)


def _maxactive(head: str, log: CommandLog) -> int:
    """The number after `r`, 0 where there is none. Linux: anything that isn't a digit is skipped."""
    if not is_digit(head, 1):
        return 0
    if head[0] != "r":
        raise log.error(1, ProbeError.MAXACT_NO_KPROBE)
    digits = head[1:].partition(":")[0]
    try:
        value = kstrtoul(digits, bits=32) if len(digits) < MAX_EVENT_NAME_LEN else 0
    except KernelError:
        value = 0
    if not value:
        raise log.error(1, ProbeError.BAD_MAXACT)
    # Linux: an int, so that a number above INT_MAX is negative and passes for "default".
    if KRETPROBE_MAXACTIVE_MAX < value <= _UINT_MAX >> 1:
        raise log.error(1, ProbeError.MAXACT_TOO_BIG)
    return value if value <= KRETPROBE_MAXACTIVE_MAX else 0


def _address(word: str, bits: int) -> int | None:
    try:
        return kstrtoul(word, 0, bits)
    except KernelError:
        return None


def _place(word: str, is_return: bool, around: Surroundings, log: CommandLog) -> Place:
    bits = 8 * around.arch.word_size
    address = _address(word, bits)
    if address is not None:
        return Place(None, 0, address, is_return)
    log.index = 1
    name, percent, suffix = word.partition("%")
    if percent and suffix != "return":
        raise log.error(len(name), ProbeError.BAD_ADDR_SUFFIX)
    try:
        symbol, offset = split_symbol_offset(name, bits)
        # Many probes may be in one function.
        symbol = intern(symbol)
    except KernelError:
        offset = -1
    if not 0 <= offset <= _UINT_MAX:
        raise log.error(0, ProbeError.BAD_PROBE_ADDR)
    place = Place(symbol, offset, None, is_return or bool(percent))
    place = _check_entry(place, symbol, around.backend, log)
    if ":" not in symbol:
        _check_unique(symbol, around.symbols, log)
    return place


def split_symbol_offset(text: str, bits: int) -> tuple[str, int]:
    """`SYM`, `SYM+N` or `SYM-N` taken apart, at the first sign.

    Raises: KernelError EINVAL, ERANGE. Mirrors: traceprobe_split_symbol_offset (v6.1).
    """
    signs = [index for index in (text.find("+"), text.find("-")) if index >= 0]
    if not signs:
        return text, 0
    return text[: min(signs)], kstrtol(text[min(signs) :], 0, bits)


def resolve_symbols(args: tuple[ProbeArg, ...], symbols: TraceSymbols, bits: int) -> tuple[ProbeArg, ...]:
    """The arguments with the addresses of their `@symbol` put in; they themselves where there is none.

    Raises: KernelError ENOENT.
    """
    resolved = tuple(resolve_symbol(arg, symbols, bits) for arg in args)
    return args if resolved == args else resolved


def resolve_symbol(arg: ProbeArg, symbols: TraceSymbols, bits: int) -> ProbeArg:
    """The argument with the addresses of its `@symbol` put in.

    Raises: KernelError ENOENT. Mirrors: kernel/trace/trace_probe.c:traceprobe_update_arg (v6.1).
    """
    if all(insn.op is not FetchOp.SYMBOL for insn in arg.program):
        return arg
    program = list(arg.program)
    for index, insn in enumerate(program):
        if insn.op is FetchOp.SYMBOL:
            name, offset = split_symbol_offset(insn.name, bits)
            address = symbols.lookup_name(name)
            if not address:
                raise KernelError(errno.ENOENT, f"no symbol named {name}")
            program[index + 1] = FetchInsn(FetchOp.IMM, value=address + offset)
    return replace(arg, program=tuple(program))


def _check_entry(place: Place, symbol: str, backend: ProbeBackend, log: CommandLog) -> Place:
    """An unknown place is no error yet: its module may come later."""
    try:
        on_entry = backend.on_func_entry(symbol, place.offset)
    except KernelError:
        return place
    if place.is_return and not on_entry:
        raise log.error(0, ProbeError.BAD_RETPROBE)
    return replace(place, on_entry=on_entry and not place.is_return)


def _check_unique(symbol: str, symbols: TraceSymbols, log: CommandLog) -> None:
    count = symbols.count_name(symbol)
    if count > 1:
        raise log.error(0, ProbeError.NON_UNIQ_SYMBOL, errno.EADDRNOTAVAIL)
    if count == 0:
        raise log.error(0, ProbeError.BAD_PROBE_ADDR, errno.ENOENT)


def parse_event_name(
    text: str, offset: int, log: CommandLog, group: str = KPROBE_EVENT_SYSTEM
) -> tuple[str, str]:
    """Group and event of [GRP/][EVENT], a dot for the slash also; the event "" where only a group is given.

    `group` is that of a name without one. Raises: KernelError EINVAL; logged.
    Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_event_name (v6.1).
    """
    event = text
    slash = "/" if "/" in text else "."
    if slash in text:
        group, _, event = text.partition(slash)
        _check_group(group, offset, log)
        offset += len(group) + 1
        if not event:
            return group, ""
    if not event:
        raise log.error(offset, ProbeError.NO_EVENT_NAME)
    if len(event) >= MAX_EVENT_NAME_LEN:
        raise log.error(offset, ProbeError.EVENT_TOO_LONG)
    if not is_good_name(event):
        raise log.error(offset, ProbeError.BAD_EVENT_NAME)
    return group, event


def _check_group(group: str, offset: int, log: CommandLog) -> None:
    if not group:
        raise log.error(offset, ProbeError.NO_GROUP_NAME)
    if len(group) >= MAX_EVENT_NAME_LEN:
        raise log.error(offset, ProbeError.GROUP_TOO_LONG)
    if not is_good_system_name(group):
        raise log.error(offset, ProbeError.BAD_GROUP_NAME)
