"""uprobe_events and uprobe_profile: definitions are parsed and kept; no user code is here to be probed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import argv_split, to_text
from emulated_kernel.trace.definition import MAX_EVENT_NAME_LEN, parse_event_name
from emulated_kernel.trace.dynamic_events import DynamicEvents, discard, run_commands
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import EventRegistry, TraceEvent, address_names, probe_fields, probe_fmt
from emulated_kernel.trace.fetchargs import (
    MAX_ARGSTR_LEN,
    FetchContext,
    ProbeArg,
    first_difference,
    parse_args,
)
from emulated_kernel.trace.numbers import is_digit, kstrtoul
from emulated_kernel.trace.ports import TraceArch, TraceSymbols
from emulated_kernel.trace.probe_errors import CommandLog, ProbeError

UPROBE_EVENT_SYSTEM = "uprobes"
_RETURN = "%return"


@dataclass(frozen=True)
class UserPlace:
    """Where in a file to probe; both offsets in bytes, `reference` 0 where no counter was given."""

    path: str
    offset: int
    reference: int
    is_return: bool
    inode: tuple[int, int]

    def show(self, word_size: int) -> str:
        """As in uprobe_events, and as `-:EVENT PLACE` has to give it."""
        counter = f"({self.reference:#x})" if self.reference else ""
        return f"{self.path}:0x{self.offset:0{2 * word_size}x}{counter}"

    def default_event(self) -> str:
        """The name of an event that was given none. Linux: `p` for return probes too."""
        name = self.path.rpartition("/")[2]
        end = min((at for at in map(name.find, ".-_") if at >= 0), default=len(name))
        return f"p_{name[:end]}_{self.offset:#x}"[: MAX_EVENT_NAME_LEN - 1]


class UprobeTraceEvent(TraceEvent):
    """The event of one or more uprobes, which all have the same arguments.

    Deviates: it can't be enabled, since the guest runs no programs.
    """

    def __init__(
        self, group: str, name: str, is_return: bool, args: tuple[ProbeArg, ...], word_size: int
    ) -> None:
        self.is_return = is_return
        self.args = args
        self.probes: list[TraceUprobe] = []
        names = address_names(is_return)
        super().__init__(group, name, probe_fields(names, args, word_size), probe_fmt(names, args))

    @property
    def is_removed(self) -> bool:
        return not self.probes

    def start(self) -> None:
        """Raises: KernelError EOPNOTSUPP."""
        raise KernelError(errno.EOPNOTSUPP, "there are no programs to probe")

    def stop(self) -> None:
        """It never started."""

    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """Never asked for: an event that never starts has no records."""
        del payload, symbols, sym_addr
        raise AssertionError(f"a record of {self.name}")


@dataclass(eq=False)
class TraceUprobe:
    """Mirrors: kernel/trace/trace_uprobe.c:struct trace_uprobe (v6.1)."""

    owner: UprobeEvents
    event: UprobeTraceEvent
    place: UserPlace
    args: tuple[ProbeArg, ...]

    def _words(self) -> list[str]:
        place = self.place.show(self.owner.word_size)
        return [place, *(f"{arg.name}={arg.expression}" for arg in self.args)]

    def show(self) -> str:
        """Its line. Mirrors: kernel/trace/trace_uprobe.c:trace_uprobe_show (v6.1)."""
        head = f"{'r' if self.place.is_return else 'p'}:{self.event.group}/{self.event.name}"
        return to_text(" ".join([head, *self._words()])) + "\n"

    def profile(self) -> str:
        """Its line in uprobe_profile: there are no hits."""
        return f"  {to_text(self.place.path)} {self.event.name:<44} {0:>15}\n"

    def is_busy(self) -> bool:
        """Mirrors: kernel/trace/trace_uprobe.c:trace_uprobe_is_busy (v6.1)."""
        return self.event.is_enabled

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Mirrors: kernel/trace/trace_uprobe.c:trace_uprobe_match (v6.1)."""
        if event not in ("", self.event.name) or group not in (None, self.event.group):
            return False
        own = self._words()
        if len(words) > len(own):
            return False
        # Linux: of arguments it compares 63 bytes, of the place all.
        shown = [own[0], *(word[:MAX_ARGSTR_LEN] for word in own[1:])]
        return list(words) == shown[: len(words)]

    def is_same_as(self, other: TraceUprobe) -> bool:
        """Whether both probe the same place for the same arguments."""
        if (self.place.inode, self.place.offset) != (other.place.inode, other.place.offset):
            return False
        return [arg.expression for arg in self.args] == [arg.expression for arg in other.args]

    def release(self) -> None:
        """Raises: KernelError EBUSY."""
        self.owner.remove(self)


class UprobeEvents:
    """All uprobe events. Callers serialize: Linux holds event_mutex.

    Mirrors: kernel/trace/trace_uprobe.c (v6.1).
    """

    def __init__(
        self,
        arch: TraceArch,
        registry: EventRegistry,
        dynamic_events: DynamicEvents,
        error_log: ErrorLog,
        printk: Callable[[str], None] = discard,
    ) -> None:
        self._arch = arch
        self._registry = registry
        self._dynamic_events = dynamic_events
        self._error_log = error_log
        self._printk = printk
        self.word_size = arch.word_size
        dynamic_events.register_kind(self.create)

    # The files

    def write(self, data: bytes) -> int:
        """One write(2) to uprobe_events; bytes taken: all of them. Raises: KernelError."""
        return run_commands(data, self._execute, self._printk)

    def records(self) -> list[str]:
        """The lines of uprobe_events."""
        return [probe.show() for probe in self.probes()]

    def profile_records(self) -> list[str]:
        """The lines of uprobe_profile."""
        return [probe.profile() for probe in self.probes()]

    def clear(self) -> None:
        """Remove all, as opening with O_TRUNC does. Raises: KernelError EBUSY."""
        self._dynamic_events.release_all(self.probes())

    def probes(self) -> list[TraceUprobe]:
        """All probes, in order of their making."""
        return [event for event in self._dynamic_events.events if isinstance(event, TraceUprobe)]

    def _execute(self, command: str) -> None:
        if command.startswith("-"):
            self._dynamic_events.release_matching(command, self.probes())
        elif not self.create(command):
            raise KernelError(errno.EINVAL, "not a uprobe event's command")

    # Definitions

    def create(self, command: str) -> bool:
        """Make a probe from `p|r[:[GRP/][EVENT]] PATH:OFFSET[(REF)][%return] [FETCHARGS]`.

        False where the command isn't one for uprobes. Raises: KernelError; logged.
        Mirrors: kernel/trace/trace_uprobe.c:__trace_uprobe_create (v6.1).
        """
        argv = argv_split(command)
        if not argv:
            return True
        if argv[0][0] not in "pr" or len(argv) < 2 or "/" not in argv[1]:
            return False
        if not is_digit(argv[1].rpartition(":")[2]) or ":" not in argv[1]:
            return False
        log = CommandLog(self._error_log, "trace_uprobe", argv)
        log.index = 1
        place = _parse_place(argv[1], argv[0][0] == "r", 8 * self.word_size, log)
        log.index = 0
        group, name = UPROBE_EVENT_SYSTEM, ""
        if argv[0][1:2] == ":":
            group, name = parse_event_name(argv[0][2:], 2, log, UPROBE_EVENT_SYSTEM)
        context = FetchContext(self._arch, log, place.is_return, in_kernel=False)
        args = parse_args(argv[2:], context)
        self._register(to_text(group), to_text(name or place.default_event()), place, args, log)
        return True

    def _register(
        self, group: str, name: str, place: UserPlace, args: tuple[ProbeArg, ...], log: CommandLog
    ) -> None:
        """Mirrors: kernel/trace/trace_uprobe.c:register_trace_uprobe (v6.1)."""
        self._check_reference(place)
        event = self._registry.find(group, name)
        log.index = 0
        if isinstance(event, UprobeTraceEvent):
            probe = TraceUprobe(self, event, place, args)
            _check_append(probe, event, log)
        else:
            event = UprobeTraceEvent(group, name, place.is_return, args, self.word_size)
            probe = TraceUprobe(self, event, place, args)
            self._add(event, log)
        event.probes.append(probe)
        self._dynamic_events.events.append(probe)

    def _add(self, event: UprobeTraceEvent, log: CommandLog) -> None:
        try:
            self._registry.add(event)
        except KernelError as failure:
            if failure.errno == errno.EEXIST:
                log.error(0, ProbeError.EVENT_EXIST)
            raise

    def _check_reference(self, place: UserPlace) -> None:
        """Mirrors: kernel/trace/trace_uprobe.c:validate_ref_ctr_offset (v6.1)."""
        for other in (probe.place for probe in self.probes()):
            same = (other.inode, other.offset) == (place.inode, place.offset)
            if same and other.reference != place.reference:
                self._printk("trace_uprobe: Reference counter offset mismatch.")
                raise KernelError(errno.EINVAL, "another probe there has another reference counter")

    def remove(self, probe: TraceUprobe) -> None:
        """Remove a probe, and its event with the last one. Raises: KernelError EBUSY."""
        event = probe.event
        is_last = event.probes == [probe]
        if is_last and event.references:
            raise KernelError(errno.EBUSY, f"{event.group}/{event.name} is in use")
        event.probes.remove(probe)
        self._dynamic_events.events.remove(probe)
        if is_last:
            self._registry.remove(event)


def _check_append(probe: TraceUprobe, event: UprobeTraceEvent, log: CommandLog) -> None:
    """Mirrors: kernel/trace/trace_uprobe.c:append_trace_uprobe (v6.1)."""
    if probe.place.is_return != event.is_return:
        raise log.error(0, ProbeError.DIFF_PROBE_TYPE, errno.EEXIST)
    different = first_difference(probe.args, event.args)
    if different is not None:
        log.index = different + 2
        raise log.error(0, ProbeError.DIFF_ARG_TYPE, errno.EEXIST)
    if any(probe.is_same_as(other) for other in event.probes):
        raise log.error(0, ProbeError.SAME_PROBE, errno.EEXIST)


def _parse_place(word: str, is_return: bool, bits: int, log: CommandLog) -> UserPlace:
    path, _, rest = word.rpartition(":")
    at = len(path) + 1
    inode = _find_file(path, log)
    digits, brace, counter = rest.partition("(")
    reference = 0
    if brace:
        reference = _reference(counter, at + len(digits) + 1, bits, log)
    digits, percent, suffix = digits.partition("%")
    if percent and percent + suffix != _RETURN:
        raise log.error(at + len(digits), ProbeError.BAD_ADDR_SUFFIX)
    offset = _number(digits, at, bits, ProbeError.BAD_UPROBE_OFFS, log)
    return UserPlace(path, offset, reference, is_return or bool(percent), inode)


def _find_file(path: str, log: CommandLog) -> tuple[int, int]:
    """Device and inode, which tell whether two paths are one file."""
    try:
        found = os.stat(path.encode("latin-1"))
    except (OSError, ValueError) as failure:
        code = getattr(failure, "errno", None) or errno.ENOENT
        raise log.error(0, ProbeError.FILE_NOT_FOUND, code) from failure
    if not stat.S_ISREG(found.st_mode):
        raise log.error(0, ProbeError.NO_REGULAR_FILE)
    return found.st_dev, found.st_ino


def _reference(text: str, at: int, bits: int, log: CommandLog) -> int:
    number, brace, rest = text.partition(")")
    if not brace:
        raise log.error(at + len(text), ProbeError.REFCNT_OPEN_BRACE)
    if rest:
        raise log.error(at + len(number) + 1, ProbeError.BAD_REFCNT_SUFFIX)
    return _number(number, at, bits, ProbeError.BAD_REFCNT, log)


def _number(text: str, at: int, bits: int, error: ProbeError, log: CommandLog) -> int:
    try:
        return kstrtoul(text, 0, bits)
    except KernelError as failure:
        raise log.error(at, error, failure.errno or errno.EINVAL) from None
