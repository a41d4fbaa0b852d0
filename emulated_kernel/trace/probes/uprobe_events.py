"""UprobeEvents: uprobe events can be defined and listed, but have no hits: the guest runs no programs."""

from __future__ import annotations

import errno
import stat
from collections.abc import Hashable, Iterator
from itertools import islice
from time import monotonic

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.fetch.fetch_context import FetchContext
from emulated_kernel.trace.fetch.fetchargs import parse_args
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.probes.definition import MAX_EVENT_NAME_LEN, parse_event_name
from emulated_kernel.trace.probes.dynamic_events import EventCommands
from emulated_kernel.trace.probes.trace_probe import (
    ENTRY_ADDRESSES,
    RETURN_ADDRESSES,
    ProbeKind,
    ProbeTraceEvent,
    TraceProbe,
)
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import argv_split, to_text
from emulated_kernel.trace.text.numbers import is_digit, kstrtoul
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import BoundedFileReader

UPROBE_EVENT_SYSTEM = "uprobes"
_RETURN = "%return"
PATIENCE = 0.3
"""Maximum time in seconds for which a command waits for the file system of the probed file.

Other requests wait during this time. On a busy host, a healthy file system has needed more than 0.1 s.
"""


@dataclass(frozen=True)
class UprobePoint:
    """The place of a uprobe in a file."""

    path: str
    offset: int
    """Offset of the probed instruction in the file, in bytes."""
    reference: int
    """Offset of the reference counter in the file, in bytes; 0 if the command has none."""
    is_return: bool
    inode: tuple[int, int]
    """Device and inode number of the file."""

    def show(self, word_size: int) -> str:
        """Return the place as uprobe_events shows it.

        `word_size`: size of an address in bytes; the offset is shown with twice as many digits.

        The command `-:EVENT PLACE` removes only probes whose PLACE equals this text.
        """
        counter = f"({self.reference:#x})" if self.reference else ""
        return f"{self.path}:0x{self.offset:0{2 * word_size}x}{counter}"

    def default_event(self) -> str:
        """Return the event name for a command that contains no name.

        As in Linux, the name begins with `p` for return probes too.
        """
        name = self.path.rpartition("/")[2]
        end = min((name.index(mark) for mark in ".-_" if mark in name), default=len(name))
        return f"p_{name[:end]}_{self.offset:#x}"[: MAX_EVENT_NAME_LEN - 1]


class UprobeTraceEvent(ProbeTraceEvent):
    """The event of one or more uprobes. It has no records, because it cannot be enabled."""

    __slots__ = ()

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Raise AssertionError, because the event has no records."""
        del payload, symbols, sym_addr
        raise AssertionError(f"a record of {self.name}")


class TraceUprobe(TraceProbe):
    """A probe of a uprobe event. Mirrors: kernel/trace/trace_uprobe.c:struct trace_uprobe (v6.1)."""

    __slots__ = ("place",)

    def __init__(
        self, kind: UprobeEvents, event: UprobeTraceEvent, place: UprobePoint, args: tuple[ProbeArg, ...]
    ) -> None:
        super().__init__(kind, event, args)
        self.place = place

    @property
    def place_text(self) -> str:
        return self.place.show(self.event.word_size)

    @property
    def identity(self) -> Hashable:
        return self.place.inode, self.place.offset

    def enable(self) -> None:
        """Raise KernelError EOPNOTSUPP.

        Deviates: uprobes cannot be enabled, because the guest runs no programs.
        """
        raise KernelError(errno.EOPNOTSUPP, "uprobes: the guest runs no programs that could be probed")

    @property
    def letter(self) -> str:
        return "r" if self.place.is_return else "p"

    def profile(self) -> str:
        """Return the probe's line in uprobe_profile; the number of hits in it is always 0."""
        return f"  {to_text(self.place.path)} {self.event.name:<44} {0:>15}\n"


class UprobeEvents(ProbeKind[TraceUprobe]):
    """All uprobe events of a kernel. Mirrors: kernel/trace/trace_uprobe.c (v6.1)."""

    def __init__(self, arch: Arch, commands: EventCommands) -> None:
        super().__init__(commands)
        self._arch = arch
        self._files = BoundedFileReader()
        self._references: dict[Hashable, tuple[int, int]] = {}
        """Identity of a probed place -> (offset of its reference counter, number of probes there).

        The identity is TraceUprobe.identity. The offset is UprobePoint.reference, which is the same for all
        probes of a place.
        """

    def profile_records(self, start: int = 0) -> Iterator[str]:
        """Return the lines of uprobe_profile from line `start` on, counted from 0."""
        return (probe.profile() for probe in islice(self._own, start, None))

    def create(self, command: str) -> bool:
        """Create a probe from `p|r[:[GRP/][EVENT]] PATH:OFFSET[(REF)][%return] [FETCHARGS]`.

        Return False if the command is not for uprobes, else True.
        Raises: KernelError (invalid command, unusable file, or a limit is reached); error_log shows what is
        invalid.
        Mirrors: kernel/trace/trace_uprobe.c:__trace_uprobe_create (v6.1).
        """
        argv = argv_split(command)
        if not argv:
            return True
        if argv[0][0] not in "pr" or len(argv) < 2 or "/" not in argv[1]:
            return False
        if not is_digit(argv[1].rpartition(":")[2]) or ":" not in argv[1]:
            return False
        log = TraceProbeLog(self.error_log, "trace_uprobe", argv)
        log.index = 1
        place = _parse_place(argv[1], argv[0][0] == "r", self._arch.bits, log, self._files)
        log.index = 0
        group = UPROBE_EVENT_SYSTEM
        name = ""
        if argv[0][1:2] == ":":
            group, name = parse_event_name(argv[0][2:], 2, log, self.interface, UPROBE_EVENT_SYSTEM)
        args = parse_args(
            argv[2:], FetchContext(self._arch, log, self.interface, place.is_return, in_kernel=False)
        )
        name = to_text(name or place.default_event())
        addresses = RETURN_ADDRESSES if place.is_return else ENTRY_ADDRESSES
        event = UprobeTraceEvent(to_text(group), name, args, self._arch.word_size, addresses)
        probe = TraceUprobe(self, event, place, args)
        self._check_reference(probe)
        self._register(probe, log)
        return True

    def _check_reference(self, probe: TraceUprobe) -> None:
        """Check that other probes of the place, if any, have the same reference counter.

        Raises: KernelError EINVAL.
        Mirrors: kernel/trace/trace_uprobe.c:validate_ref_ctr_offset (v6.1).
        """
        reference = probe.place.reference
        if self._references.get(probe.identity, (reference, 0))[0] != reference:
            self.printk("trace_uprobe: Reference counter offset mismatch.")
            raise KernelError(
                errno.EINVAL, "reference counter: it differs from that of another probe of this place"
            )

    def _insert(self, probe: TraceUprobe) -> None:
        super()._insert(probe)
        self._count(probe, 1)

    def remove(self, probe: TraceUprobe) -> None:
        super().remove(probe)
        self._count(probe, -1)

    def _count(self, probe: TraceUprobe, change: int) -> None:
        _, count = self._references.pop(probe.identity, (0, 0))
        if count + change:
            self._references[probe.identity] = probe.place.reference, count + change


def _parse_place(
    word: str, is_return: bool, bits: int, log: TraceProbeLog, files: BoundedFileReader
) -> UprobePoint:
    path, _, rest = word.rpartition(":")
    at = len(path) + 1
    inode = _find_file(path, log, files)
    digits, brace, counter = rest.partition("(")
    reference = 0
    if brace:
        reference = _reference(counter, at + len(digits) + 1, bits, log)
    digits, percent, suffix = digits.partition("%")
    if percent and percent + suffix != _RETURN:
        raise log.error(at + len(digits), ProbeError.BAD_ADDR_SUFFIX)
    offset = _number(digits, at, bits, ProbeError.BAD_UPROBE_OFFS, log)
    return UprobePoint(path, offset, reference, is_return or bool(percent), inode)


def _find_file(path: str, log: TraceProbeLog, files: BoundedFileReader) -> tuple[int, int]:
    """Return device and inode number of a file, which identify it independently of its path.

    The control lock is held, so the wait for a slow file system is limited to PATIENCE.
    Raises: KernelError EINVAL (not a regular file), ETIMEDOUT or EBUSY (slow file systems), or the errno of
    stat(2); error_log shows the error.
    """
    try:
        found = files.look(path.encode("latin-1"), monotonic() + PATIENCE)
    except (OSError, ValueError) as failure:
        code = getattr(failure, "errno", None) or errno.ENOENT
        raise log.error(0, ProbeError.FILE_NOT_FOUND, code) from failure
    if not stat.S_ISREG(found.st_mode):
        raise log.error(0, ProbeError.NO_REGULAR_FILE)
    return found.st_dev, found.st_ino


def _reference(text: str, at: int, bits: int, log: TraceProbeLog) -> int:
    number, brace, rest = text.partition(")")
    if not brace:
        raise log.error(at + len(text), ProbeError.REFCNT_OPEN_BRACE)
    if rest:
        raise log.error(at + len(number) + 1, ProbeError.BAD_REFCNT_SUFFIX)
    return _number(number, at, bits, ProbeError.BAD_REFCNT, log)


def _number(text: str, at: int, bits: int, error: ProbeError, log: TraceProbeLog) -> int:
    try:
        return kstrtoul(text, 0, bits)
    except KernelError as failure:
        raise log.error(at, error, failure.errno) from None
