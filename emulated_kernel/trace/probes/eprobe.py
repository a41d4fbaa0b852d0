"""Event probes: events whose arguments are fetched from the entries of another event, the target."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.context.probe_hit import ProbeHit, within_another
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.event_filters import log_filter_error
from emulated_kernel.trace.events.trigger import Trigger, TriggerKind
from emulated_kernel.trace.fetch.fetch_context import FetchContext, no_types
from emulated_kernel.trace.fetch.fetch_expression import COMM_NAMES
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp
from emulated_kernel.trace.fetch.fetchargs import parse_args
from emulated_kernel.trace.fetch.memory import EntryAddress, FetchEnvironment, Value
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.fetch.store_args import store
from emulated_kernel.trace.filter.fields import FilterType, filter_type_of
from emulated_kernel.trace.filter.filter_errors import FilterParseError
from emulated_kernel.trace.filter.parse import parse_event_filter
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.interface import Interface
from emulated_kernel.trace.probes.definition import parse_event_name, resolve_symbol
from emulated_kernel.trace.probes.dynamic_events import EventCommands
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.trace.probes.trace_probe import ProbeKind, ProbeTraceEvent, TraceProbe, args_text
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import argv_split, to_text
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf

EPROBE_EVENT_SYSTEM = "eprobes"


class EprobeTrigger(Trigger):
    """The trigger by which an event probe receives the entries of its target event.

    Trigger files do not show it.
    """

    kind = TriggerKind.EVENT_PROBE
    wants_entry = True
    is_hidden = True

    def __init__(self, probe: Eprobe) -> None:
        super().__init__(probe.filter)
        self._probe = probe

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        if entry is not None:
            self._probe.hit(hit, entry)

    def show(self) -> str:
        return ""


class EprobeEvent(ProbeTraceEvent):
    """The event that an event probe records for each entry of the event `target`."""

    __slots__ = ("target",)

    def __init__(
        self, group: str, name: str, target: TraceEvent, args: tuple[ProbeArg, ...], word_size: int
    ) -> None:
        super().__init__(group, name, args, word_size)
        self.target = target

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text of a record. Mirrors: kernel/trace/trace_eprobe.c:print_eprobe_event (v6.1)."""
        del sym_addr
        return f"({self.target.group}.{self.target.name}){args_text(self.args, payload, 0, symbols)}"


class Eprobe(TraceProbe):
    """An event probe, which records an event for each entry of its target event.

    Mirrors: kernel/trace/trace_eprobe.c:struct trace_eprobe (v6.1).
    """

    __slots__ = ("_arch", "_fields", "_symbols", "_trigger", "filter", "target")
    letter = "e"

    def __init__(
        self, kind: EventProbes, event: EprobeEvent, condition: EventFilter | None, arch: Arch
    ) -> None:
        super().__init__(kind, event, event.args)
        self.target = event.target
        self._fields = {field.name: field for field in reversed(event.target.fields)}
        """Name of a field of the target event -> the first field with this name."""
        self.filter = condition
        self._arch = arch
        self._symbols = kind.symbols
        self._trigger = EprobeTrigger(self)

    @property
    def place_text(self) -> str:
        return f"{self.target.group}.{self.target.name}"

    def matches_place(self, word: str) -> bool:
        """Return True if `word` names the target event.

        Mirrors: kernel/trace/trace_eprobe.c:eprobe_dyn_event_match (v6.1).
        """
        return word in (self.place_text, f"{self.target.group}/{self.target.name}")

    def enable(self) -> None:
        """Add the trigger to the target event, in the first trace array that has the probe's event enabled.

        Deviates: trace arrays that enable the probe's event later also get hits. In Linux, they get none.
        Raises: errors of TraceEvent.enable().
        """
        self.target.file(self.event.recorders[0]).add(self._trigger, last=True)

    def disable(self) -> None:
        """Remove the trigger from the target event."""
        for file in self.target.files.values():
            if self._trigger in file.triggers:
                file.remove(self._trigger)

    def unregister(self) -> None:
        self.target.let_go()

    def hit(self, hit: ProbeHit, entry: RawEntry) -> None:
        """Record the event for an entry of the target event.

        Mirrors: kernel/trace/trace_eprobe.c:__eprobe_trace_func (v6.1).
        """
        environment = FetchEnvironment(
            self._arch, hit, self._symbols, partial(self._field, entry), entry.data
        )
        # Linux: the target's entry is not yet committed, so preemption is disabled.
        with within_another(hit, preempt_count=1):
            self.event.record(store(self.args, b"", environment), hit)

    def _field(self, entry: RawEntry, name: str) -> Value:
        """Return the value of the field `name` in an entry of the target event.

        For a string, return an EntryAddress: a placeholder for the address of the string in the entry.

        Mirrors: kernel/trace/trace_eprobe.c:get_event_field (v6.1).
        """
        field = self._fields[name]
        data = entry.data[field.offset : field.offset + field.size]
        match filter_type_of(field.type):
            case FilterType.STATIC_STRING:
                return EntryAddress.of(field.offset, self._arch.mask)
            case FilterType.DYN_STRING:
                location = int.from_bytes(data[:4], "little")
                return EntryAddress.of(location & 0xFFFF, self._arch.mask)
        word = data[: self._arch.word_size]
        return int.from_bytes(word, "little", signed=field.is_signed) & self._arch.mask


class EventProbes(ProbeKind[Eprobe]):
    """All event probes of a kernel, which `e` commands in dynamic_events create.

    Mirrors: kernel/trace/trace_eprobe.c (v6.1).
    """

    def __init__(
        self,
        arch: Arch,
        symbols: KernelSymbols,
        commands: EventCommands,
        types: Callable[[], Btf | None] = no_types,
    ) -> None:
        """Create an empty registry. `types` returns the kernel's BTF, or None if the kernel has none."""
        super().__init__(commands)
        self._arch = arch
        self._types = types
        self.symbols = symbols

    def create(self, command: str) -> bool:
        """Create an event probe from `e[:[GROUP/]EVENT] TARGET_GROUP.TARGET [ARGS] [if FILTER]`.

        Return False if the command is for another kind of event.
        Raises: KernelError EINVAL (malformed), ENODEV (no such target), ENOENT (no such field or symbol),
        EEXIST (the new event's name is taken), E2BIG (too many or too long arguments), ENOSPC (the limit on
        dynamic events is reached).
        """
        argv = argv_split(command)
        if len(argv) < 2 or not argv[0].startswith("e"):
            return False
        log = TraceProbeLog(self.error_log, "event_probe", argv)
        self._register(self._parse(argv, log), log)
        return True

    def _shared_event(self, probe: Eprobe) -> None:
        """Return None, because event probes never share an event, as in Linux."""
        del probe

    def _insert(self, probe: Eprobe) -> None:
        probe.target.hold()
        try:
            super()._insert(probe)
        except KernelError:
            probe.target.let_go()
            raise

    def _parse(self, argv: Sequence[str], log: TraceProbeLog) -> Eprobe:
        """Parse a command's words `argv`, and return the event probe.

        Mirrors: kernel/trace/trace_eprobe.c:__trace_eprobe_create (v6.1).
        """
        group = EPROBE_EVENT_SYSTEM
        event = ""
        before, colon, name = argv[0].partition(":")
        if colon:
            group, event = parse_event_name(name, len(before) + 1, log, self.interface, group)
        log.index = 1
        target_group, target_name = self._target_names(argv[1], log, self.interface)
        target = self._find_target(target_group, target_name)
        if target is None:
            raise log.error(0, ProbeError.BAD_ATTACH_EVENT, errno.ENODEV)
        words = list(argv[2:])
        condition = None
        if "if" in words:
            at = words.index("if")
            log.index = at + 3
            condition = self._parse_filter(target, words[at + 1 :], log)
            words = words[:at]
        context = FetchContext(
            self._arch,
            log,
            self.interface,
            finish=partial(self._finish, target, log),
            types=self._types,
            has_field=lambda name: any(field.name == name for field in target.fields),
        )
        args = parse_args(words, context)
        name = to_text(event or target_name)
        made = EprobeEvent(to_text(group), name, target, args, self._arch.word_size)
        return Eprobe(self, made, condition, self._arch)

    @staticmethod
    def _target_names(word: str, log: TraceProbeLog, interface: Interface) -> tuple[str, str]:
        try:
            group, name = parse_event_name(word, 0, log, interface, "")
        except KernelError:
            raise log.error(0, ProbeError.NO_EVENT_INFO) from None
        if not group or not name:
            raise log.error(0, ProbeError.NO_EVENT_INFO)
        return group, name

    def _find_target(self, group: str, name: str) -> TraceEvent | None:
        """Return the event `group`:`name` if it can be the target of an event probe, else None.

        A target is an event that can be enabled. It must not belong to a kprobe, an fprobe or an event probe.
        Mirrors: kernel/trace/trace_eprobe.c:find_and_get_event (v6.1).
        """
        found = self.registry.find(group, name)
        is_eligible = found is not None and found.is_switchable
        return found if is_eligible and not isinstance(found, (KprobeTraceEvent, EprobeEvent)) else None

    def _parse_filter(self, target: TraceEvent, words: Sequence[str], log: TraceProbeLog) -> EventFilter:
        """Parse the filter of a command: `words` after `if`, which test fields of the target event.

        Raises: KernelError EINVAL (no words, or malformed; logged).
        Mirrors: kernel/trace/trace_eprobe.c:trace_eprobe_parse_filter (v6.1).
        """
        if not words:
            raise log.error(0, ProbeError.NO_EP_FILTER)
        text = " ".join(words)
        try:
            return parse_event_filter(text, target.fields, self.filter_words)
        except FilterParseError as failure:
            log_filter_error(self.error_log, text, failure)
            raise KernelError(errno.EINVAL, f"{text!r}: malformed filter") from None

    def _finish(self, target: TraceEvent, log: TraceProbeLog, arg: ProbeArg) -> ProbeArg:
        """Check that `target` has the field that `arg` reads. Return `arg` with an address for `@symbol`.

        If the target has no field for `$comm`, the argument is the current task's name. Raises: KernelError
        ENOENT (no such field or symbol).
        Mirrors: kernel/trace/trace_eprobe.c:trace_eprobe_tp_update_arg (v6.1).
        """
        load = arg.stages.load
        if load.op is FetchOp.TP_ARG and all(field.name != load.name for field in target.fields):
            if load.name not in COMM_NAMES:
                raise log.error(0, ProbeError.BAD_ATTACH_ARG, errno.ENOENT)
            arg = replace(arg, stages=replace(arg.stages, load=FetchInsn(FetchOp.COMM)))
        return resolve_symbol(arg, self.symbols, self._arch.bits)
