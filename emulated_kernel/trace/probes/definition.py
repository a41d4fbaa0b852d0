"""Parser of a kprobe event's command: p|r[MAXACTIVE]|j[:[GRP/][EVENT]] PLACE [FETCHARGS]."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from sys import intern

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.kallsyms import Location
from emulated_kernel.trace.fetch.fetch_context import FetchContext
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp
from emulated_kernel.trace.fetch.fetchargs import parse_args
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import is_good_name, is_good_system_name
from emulated_kernel.trace.text.numbers import kstrtol, kstrtoul
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf

KPROBE_EVENT_SYSTEM = "kprobes"
MAX_EVENT_NAME_LEN = 64
"""Maximum size of an event's or a group's name in bytes, including its NUL."""
KRETPROBE_MAXACTIVE_MAX = 4096
"""Maximum value of maxactive in a command."""
_UINT_MAX = 0xFFFFFFFF
_SPECIAL = str.maketrans(":.*", "___")


def default_name(text: str) -> str:
    """Return an event name made from `text`: its first 63 bytes, with `_` for `:`, `.` and `*`.

    Mirrors: kernel/trace/trace.h:sanitize_event_name (v6.12).
    """
    return text[: MAX_EVENT_NAME_LEN - 1].translate(_SPECIAL)


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """The place of a probe as written: `symbol` (NAME or MODULE:NAME) plus `offset` bytes, or `address`."""

    symbol: str | None
    offset: int
    address: int | None
    is_return: bool
    is_jprobe: bool = False
    is_tracepoint: bool = False
    """Whether `symbol` is the name of a tracepoint."""

    def show(self, word_size: int) -> str:
        """Return the place as kprobe_events shows it. PLACE in `-:EVENT PLACE` must equal this text.

        Deviates: Linux hashes raw addresses (%p), unless it is booted with `no_hash_pointers`.
        """
        if self.symbol is None:
            return f"0x{self.address or 0:0{2 * word_size}x}"
        return f"{self.symbol}+{self.offset}" if self.offset else self.symbol

    def default_event(self, word_size: int) -> str:
        """Return the event name for a command that contains no name."""
        place = f"{self.symbol}_{self.offset}" if self.symbol is not None else self.show(word_size)
        letter = "p"
        if self.is_return:
            letter = "r"
        elif self.is_jprobe:
            letter = "j"
        return default_name(f"{letter}_{place}")


@dataclass(frozen=True, slots=True)
class ProbeDefinition:
    """A parsed command for a kprobe event. Strings have one character per byte."""

    group: str
    event: str
    place: ProbePoint
    found: Location | None
    """The location of `place`, or None if its symbol or address does not exist (yet)."""
    maxactive: int
    args: tuple[ProbeArg, ...]
    captured: tuple[int, ...] = ()
    """Numbers, from 0, of the arguments that a return probe stores at the entry to record at the return."""


def locate(place: ProbePoint, symbols: KernelSymbols) -> Location | None:
    """Return the location of a place as symbol and offset, or None if the place does not exist (yet)."""
    address = place.address if place.symbol is None else symbols.lookup_name(place.symbol)
    return symbols.lookup(address + place.offset) if address else None


@dataclass(frozen=True, eq=False)
class ProbedSymbols:
    """The kernel's data for the parser of definitions: symbols, BTF types, and entries of functions."""

    arch: Arch
    symbols: KernelSymbols
    interface: Interface
    types: Callable[[], Btf | None]
    """Returns the kernel's BTF, or None if the kernel has no BTF."""
    is_entry: Callable[[Location], bool]
    """Returns True if a location is the entry of a function, before or after its landing pad."""


def parse_definition(
    argv: Sequence[str], kernel: ProbedSymbols, log: TraceProbeLog, letters: str = "pr"
) -> ProbeDefinition | None:
    """Parse `argv`, the words of a command; return None if it may be for another kind of event.

    `letters` are the allowed first letters; they include `j` if the kernel has jprobes.
    Raises: KernelError EINVAL (malformed), ENOENT (an unknown symbol or parameter), EADDRNOTAVAIL (the symbol
    is not unique), ERANGE (a number is too large), E2BIG (too many or too long arguments), EOPNOTSUPP (an
    argument needs BTF, and the kernel has none). All are logged, except in 6.1 a wrong type of `$comm`.
    Mirrors: kernel/trace/trace_kprobe.c:__trace_kprobe_create (v6.1, v6.12).
    """
    if len(argv) < 2 or argv[0][0] not in letters:
        return None
    head, place_word, *arg_words = argv
    interface = kernel.interface
    arch = kernel.arch
    maxactive = 0
    if head[1:2].isdecimal():
        if head[0] != "r":
            at_exit = InterfaceRule.MAXACT_AT_EXIT in interface
            raise log.error(1, ProbeError.BAD_MAXACT_TYPE if at_exit else ProbeError.MAXACT_NO_KPROBE)
        maxactive = parse_maxactive(head, log)
    if "/" in place_word and ":" in place_word:
        return None
    log.index = 1
    place = _place(place_word, head[0], arch.bits, log)
    found = locate(place, kernel.symbols)
    at_entry = found is not None and kernel.is_entry(found)
    if place.symbol is not None:
        checks_first = InterfaceRule.MODULE_SYMBOLS_CHECKED in interface.rules
        if checks_first:
            check_symbol(place.symbol, kernel, log)
        if place.is_return and found is not None and not at_entry:
            raise log.error(0, ProbeError.BAD_RETPROBE)
        if not checks_first:
            check_symbol(place.symbol, kernel, log)
    log.index = 0
    group = KPROBE_EVENT_SYSTEM
    event = ""
    if ":" in head:
        group, event = parse_event_name(head.partition(":")[2], head.index(":") + 1, log, interface)
    is_symbolic = place.symbol is not None
    context = FetchContext(
        arch,
        log,
        interface,
        on_return=place.is_return and is_symbolic,
        on_entry=is_symbolic and at_entry and not place.is_return,
        types=kernel.types,
        function=place.symbol,
    )
    args = parse_args(arg_words, context)
    event = event or place.default_event(arch.word_size)
    return ProbeDefinition(group, event, place, found, maxactive, args, tuple(context.captured))


def parse_maxactive(head: str, log: TraceProbeLog) -> int:
    """Return maxactive, the number after the letter of `head`, the first word of a command.

    As in Linux, a number above INT_MAX means 0, the default.
    Raises: KernelError EINVAL (0, no number, or too large; logged).
    """
    digits = head[1:].partition(":")[0]
    try:
        value = kstrtoul(digits, bits=32) if len(digits) < MAX_EVENT_NAME_LEN else 0
    except KernelError:
        value = 0
    if not value:
        raise log.error(1, ProbeError.BAD_MAXACT)
    # Linux uses an int, so a number above INT_MAX is negative and means "default".
    if KRETPROBE_MAXACTIVE_MAX < value <= _UINT_MAX >> 1:
        raise log.error(1, ProbeError.MAXACT_TOO_BIG)
    return value if value <= KRETPROBE_MAXACTIVE_MAX else 0


def _place(word: str, letter: str, bits: int, log: TraceProbeLog) -> ProbePoint:
    """Parse `word`, the place of a command whose first letter is `letter`.

    A jprobe's place must be the entry of a function, without an offset. `bits`: number of bits of an address.

    Raises: KernelError EINVAL (malformed; logged).
    """
    is_return = letter == "r"
    is_jprobe = letter == "j"
    if word.removeprefix("+")[:1].isdecimal() and not is_jprobe:
        with suppress(KernelError):
            return ProbePoint(None, 0, kstrtoul(word, 0, bits), is_return)
    name, percent, suffix = word.partition("%")
    if percent and (suffix != "return" or is_jprobe):
        raise log.error(len(name), ProbeError.BAD_ADDR_SUFFIX)
    try:
        symbol, offset = split_symbol_offset(name, bits)
    except KernelError:
        symbol = ""
        offset = -1
    if not 0 <= offset <= (0 if is_jprobe else _UINT_MAX):
        raise log.error(0, ProbeError.BAD_PROBE_ADDR)
    # Many probes may be in one function, so its name is interned to save memory.
    return ProbePoint(intern(symbol), offset, None, is_return or bool(percent), is_jprobe)


def check_symbol(symbol: str, kernel: ProbedSymbols, log: TraceProbeLog) -> None:
    """Check that the symbol of a place exists and is unique, if this version of Linux does so in the parser.

    Without InterfaceRule.SYMBOLS_COUNTED, do nothing. A symbol of a module may be unknown, because the module
    may be loaded later.
    Raises: KernelError EADDRNOTAVAIL (not unique) or ENOENT (unknown), or EINVAL for both, depending on the
    version; logged.
    Mirrors: kernel/trace/trace_kprobe.c:validate_probe_symbol (v6.12).
    """
    rules = kernel.interface.rules
    if InterfaceRule.SYMBOLS_COUNTED not in rules:
        return
    symbols = kernel.symbols
    module, colon, _ = symbol.partition(":")
    if colon and not (InterfaceRule.MODULE_SYMBOLS_CHECKED in rules and symbols.has_module(module)):
        return
    count = symbols.count_in_kernel(symbol) if InterfaceRule.SYMBOLS_OF_KERNEL_FIRST in rules else 0
    count = count or symbols.count_name(symbol)
    is_einval = InterfaceRule.SYMBOL_EINVAL in rules
    if count > 1:
        code = errno.EINVAL if is_einval else errno.EADDRNOTAVAIL
        raise log.error(0, ProbeError.NON_UNIQ_SYMBOL, code)
    if count == 0:
        raise log.error(0, ProbeError.BAD_PROBE_ADDR, errno.EINVAL if is_einval else errno.ENOENT)


def split_symbol_offset(text: str, bits: int) -> tuple[str, int]:
    """Split `SYM`, `SYM+N` or `SYM-N` at the first sign, and return the symbol and the offset.

    Raises: KernelError EINVAL (N is no number), ERANGE (N does not fit in `bits` bits).
    Mirrors: kernel/trace/trace_probe.c:traceprobe_split_symbol_offset (v6.1).
    """
    symbol = text.partition("+")[0].partition("-")[0]
    offset = text[len(symbol) :]
    return symbol, kstrtol(offset, 0, bits) if offset else 0


def resolve_symbols(args: tuple[ProbeArg, ...], symbols: KernelSymbols, bits: int) -> tuple[ProbeArg, ...]:
    """Return the arguments `args` with each `@symbol` replaced by an address.

    If no argument has a symbol, return `args` itself, which many events may share.

    `bits`, Raises: as resolve_symbol().
    """
    for arg in args:
        if arg.stages.load.op is FetchOp.SYMBOL:
            return tuple([resolve_symbol(each, symbols, bits) for each in args])
    return args


def resolve_symbol(arg: ProbeArg, symbols: KernelSymbols, bits: int) -> ProbeArg:
    """Return `arg` with its `@symbol` replaced by an address; without a symbol, return `arg` itself.

    `bits`: number of bits of an address; the offset in `@symbol+N` is a signed number of this size.

    Raises: KernelError ENOENT (no such symbol). Mirrors: kernel/trace/trace_probe.c:traceprobe_update_arg
    (v6.1).
    """
    load = arg.stages.load
    if load.op is not FetchOp.SYMBOL:
        return arg
    name, offset = split_symbol_offset(load.name, bits)
    address = symbols.lookup_name(name)
    if not address:
        raise KernelError(errno.ENOENT, f"@{load.name}: no such symbol")
    load = FetchInsn(FetchOp.IMM, value=address + offset)
    return replace(arg, stages=replace(arg.stages, load=load))


def parse_event_name(
    text: str, offset: int, log: TraceProbeLog, interface: Interface, group: str = KPROBE_EVENT_SYSTEM
) -> tuple[str, str]:
    """Parse [GRP/][EVENT], and return group and event. Since Linux 6.1, a dot may replace the slash.

    `group` is the default group, and `offset` the column of `text` in its word of the command, for error_log.
    The event is "" if only a group is given. Raises: KernelError EINVAL (a name is missing, too long, or not
    allowed; logged).
    Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_event_name (v5.10, v6.1).
    """
    event = text
    rules = interface.rules
    slash = "." if InterfaceRule.EVENT_NAME_DOT in rules and "/" not in text else "/"
    if slash in text:
        group, _, event = text.partition(slash)
        _check_group(group, offset, log, interface)
        offset += len(group) + 1
        if not event and InterfaceRule.EVENT_NAME_OPTIONAL in rules:
            return group, ""
    if not event:
        raise log.error(offset, ProbeError.NO_EVENT_NAME)
    if len(event) + (InterfaceRule.NAMES_WITH_NUL in rules) > MAX_EVENT_NAME_LEN:
        raise log.error(offset, ProbeError.EVENT_TOO_LONG)
    if not is_good_name(event):
        raise log.error(offset, ProbeError.BAD_EVENT_NAME)
    return group, event


def _check_group(group: str, offset: int, log: TraceProbeLog, interface: Interface) -> None:
    if not group:
        raise log.error(offset, ProbeError.NO_GROUP_NAME)
    if len(group) >= MAX_EVENT_NAME_LEN:
        raise log.error(offset, ProbeError.GROUP_TOO_LONG)
    is_good = is_good_system_name if InterfaceRule.GROUP_DASHES in interface.rules else is_good_name
    if not is_good(group):
        raise log.error(offset, ProbeError.BAD_GROUP_NAME)
