"""Event probes: events that look at the entries of other events."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import argv_split, to_text
from emulated_kernel.trace.definition import parse_event_name, resolve_symbol
from emulated_kernel.trace.dynamic_events import DynamicEvents
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import (
    EventRegistry,
    KprobeTraceEvent,
    TraceEvent,
    args_fmt,
    args_text,
    probe_fields,
)
from emulated_kernel.trace.fetch import FetchEnvironment, Value, store
from emulated_kernel.trace.fetchargs import MAX_ARGSTR_LEN, FetchContext, ProbeArg, parse_args
from emulated_kernel.trace.filter import log_filter_error
from emulated_kernel.trace.filter_errors import FilterParseError
from emulated_kernel.trace.filter_fields import FilterType, filter_type_of, find_event_field
from emulated_kernel.trace.filter_parse import parse_filter
from emulated_kernel.trace.ports import ProbeHit, RawEntry, TraceArch, TraceSymbols
from emulated_kernel.trace.probe_errors import CommandLog, ProbeError
from emulated_kernel.trace.symbols import sprint_symbol
from emulated_kernel.trace.trigger import Trigger, TriggerFilter, TriggerKind
from emulated_kernel.trace.types import FetchInsn, FetchOp

EPROBE_EVENT_SYSTEM = "eprobes"
_COMM = ("comm", "COMM")


@dataclass(frozen=True)
class EprobeDefinition:
    """A parsed command. Strings have one character a byte."""

    group: str
    event: str
    target: TraceEvent
    args: tuple[ProbeArg, ...]
    filter: TriggerFilter | None


class EprobeTrigger(Trigger):
    """What an event probe hangs on its event; the trigger file doesn't show it."""

    kind = TriggerKind.EVENT_PROBE
    wants_entry = True
    is_hidden = True

    def __init__(self, event: EprobeEvent) -> None:
        super().__init__(event.definition.filter)
        self._event = event

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        if entry is not None:
            self._event.hit(hit, entry)

    def show(self) -> str:
        return ""


class EprobeEvent(TraceEvent):
    """Mirrors: kernel/trace/trace_eprobe.c:struct trace_eprobe (v6.1)."""

    def __init__(self, definition: EprobeDefinition, arch: TraceArch, symbols: TraceSymbols) -> None:
        self.definition = definition
        self._arch = arch
        self._symbols = symbols
        self._trigger: EprobeTrigger | None = None
        self.is_gone = False
        args = definition.args
        text, values = args_fmt(args)
        super().__init__(
            to_text(definition.group),
            to_text(definition.event),
            probe_fields((), args, arch.word_size),
            ", ".join([f'"{text}"', *values]),
        )

    @property
    def is_removed(self) -> bool:
        return self.is_gone

    def start(self) -> None:
        """Hang on to the event, in the trace array that enables this one. Raises: KernelError.

        Linux: other trace arrays that enable it later get nothing. Deviates: they get its hits there.
        """
        trigger = EprobeTrigger(self)
        self.definition.target.file(self.recorders[0]).add(trigger, last=True)
        self._trigger = trigger

    def stop(self) -> None:
        """Let go of the event."""
        for file in self.definition.target.files.values():
            if self._trigger in file.triggers:
                assert self._trigger is not None, "it is on a list"
                file.remove(self._trigger)
        self._trigger = None

    def hit(self, hit: ProbeHit, entry: RawEntry) -> None:
        """Its event was hit. Mirrors: __eprobe_trace_func (v6.1)."""
        environment = FetchEnvironment(
            self._arch, hit, partial(sprint_symbol, self._symbols), partial(self._field, entry)
        )
        self.record(store(self.definition.args, b"", environment), hit)

    def _field(self, entry: RawEntry, name: str) -> Value:
        """Mirrors: get_event_field (v6.1)."""
        field = next(field for field in self.definition.target.fields if field.name == name)
        data = entry.data[field.offset : field.offset + field.size]
        match filter_type_of(field.type):
            case FilterType.STATIC_STRING:
                return data
            case FilterType.DYN_STRING:
                location = int.from_bytes(data[:4], "little")
                return entry.data[location & 0xFFFF :]
        word = data[: self._arch.word_size]
        mask = (1 << 8 * self._arch.word_size) - 1
        return int.from_bytes(word, "little", signed=field.is_signed) & mask

    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """Mirrors: kernel/trace/trace_eprobe.c:print_eprobe_event (v6.1)."""
        del sym_addr
        target = self.definition.target
        return f"({target.group}.{target.name}){args_text(self.definition.args, payload, 0, symbols)}"


class Eprobe:
    """An event probe on the list of dynamic events."""

    def __init__(self, event: EprobeEvent, release: Callable[[Eprobe], None]) -> None:
        self.event = event
        self._release = release

    def show(self) -> str:
        """Mirrors: eprobe_dyn_event_show (v6.1)."""
        definition = self.event.definition
        target = definition.target
        words = [f"e:{definition.group}/{definition.event}", f"{target.group}.{target.name}"]
        return to_text(" ".join(words + self._arguments())) + "\n"

    def _arguments(self) -> list[str]:
        return [f"{arg.name}={arg.expression}" for arg in self.event.definition.args]

    def is_busy(self) -> bool:
        return self.event.is_enabled

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Whether `-:[GROUP/][EVENT] [TARGET [ARGS]]` means it. Mirrors: eprobe_dyn_event_match (v6.1)."""
        definition = self.event.definition
        if event not in ("", definition.event) or group not in (None, definition.group):
            return False
        if not words:
            return True
        slash = "/" if "/" in words[0] else "."
        target = definition.target
        if slash not in words[0] or words[0] != f"{target.group}{slash}{target.name}":
            return False
        own = self._arguments()
        if len(words) - 1 > len(own):
            return False
        return all(mine[:MAX_ARGSTR_LEN] == given for mine, given in zip(own, words[1:], strict=False))

    def release(self) -> None:
        """Raises: KernelError EBUSY."""
        self._release(self)


class EventProbes:
    """`e` in dynamic_events. Mirrors: kernel/trace/trace_eprobe.c (v6.1)."""

    def __init__(
        self,
        arch: TraceArch,
        symbols: TraceSymbols,
        registry: EventRegistry,
        dynamic_events: DynamicEvents,
        error_log: ErrorLog,
    ) -> None:
        self._arch = arch
        self._symbols = symbols
        self._registry = registry
        self._dynamic_events = dynamic_events
        self._error_log = error_log
        dynamic_events.register_kind(self.create)

    def create(self, command: str) -> bool:
        """Make a probe from `e[:[GROUP/]EVENT] TARGET_GROUP.TARGET [ARGS] [if FILTER]`; False for others.

        Raises: KernelError EINVAL, ENODEV (no such event), ENOENT (no such field or symbol), EEXIST, E2BIG.
        """
        argv = argv_split(command)
        if len(argv) < 2 or not argv[0].startswith("e"):
            return False
        log = CommandLog(self._error_log, "event_probe", argv)
        event = EprobeEvent(self._parse(argv, log), self._arch, self._symbols)
        try:
            self._registry.add(event)
        except KernelError as failure:
            if failure.errno == errno.EEXIST:
                log.index = 0
                raise log.error(0, ProbeError.EVENT_EXIST, errno.EEXIST) from None
            raise
        event.definition.target.references += 1
        self._dynamic_events.events.append(Eprobe(event, self._remove))
        return True

    def _parse(self, argv: Sequence[str], log: CommandLog) -> EprobeDefinition:
        """Mirrors: __trace_eprobe_create (v6.1)."""
        group, event = EPROBE_EVENT_SYSTEM, ""
        before, colon, name = argv[0].partition(":")
        if colon:
            group, event = parse_event_name(name, len(before) + 1, log, group)
        log.index = 1
        target_group, target_name = self._target_names(argv[1], log)
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
        args = parse_args(words, FetchContext(self._arch, log, finish=partial(self._finish, target, log)))
        return EprobeDefinition(group, event or target_name, target, args, condition)

    @staticmethod
    def _target_names(word: str, log: CommandLog) -> tuple[str, str]:
        try:
            group, name = parse_event_name(word, 0, log, "")
        except KernelError:
            raise log.error(0, ProbeError.NO_EVENT_INFO) from None
        if not group or not name:
            raise log.error(0, ProbeError.NO_EVENT_INFO)
        return group, name

    def _find_target(self, group: str, name: str) -> TraceEvent | None:
        """Linux: no event of another probe. Mirrors: find_and_get_event (v6.1)."""
        found = self._registry.find(group, name)
        is_eligible = found is not None and found.is_switchable
        return found if is_eligible and not isinstance(found, (KprobeTraceEvent, EprobeEvent)) else None

    def _parse_filter(self, target: TraceEvent, words: Sequence[str], log: CommandLog) -> TriggerFilter:
        """Mirrors: trace_eprobe_parse_filter (v6.1)."""
        if not words:
            raise log.error(0, ProbeError.NO_EP_FILTER)
        text = " ".join(words)
        try:
            return TriggerFilter(text, parse_filter(text, partial(find_event_field, target)))
        except FilterParseError as failure:
            log_filter_error(self._error_log, text, failure)
            raise KernelError(errno.EINVAL, "malformed filter") from None

    def _finish(self, target: TraceEvent, log: CommandLog, arg: ProbeArg) -> ProbeArg:
        """Find the field and the symbol that an argument names. Mirrors: trace_eprobe_tp_update_arg."""
        first, *rest = arg.program
        if first.op is FetchOp.TP_ARG and all(field.name != first.name for field in target.fields):
            if first.name not in _COMM:
                raise log.error(0, ProbeError.BAD_ATTACH_ARG, errno.ENOENT)
            arg = replace(arg, program=(FetchInsn(FetchOp.COMM), *rest))
        return resolve_symbol(arg, self._symbols, 8 * self._arch.word_size)

    def _remove(self, probe: Eprobe) -> None:
        """Raises: KernelError EBUSY. Mirrors: unregister_trace_eprobe (v6.1)."""
        event = probe.event
        if event.is_enabled or event.references:
            raise KernelError(errno.EBUSY, f"{event.group}/{event.name} is in use")
        self._registry.remove(event)
        self._dynamic_events.events.remove(probe)
        event.is_gone = True
        event.definition.target.references -= 1
        for recorder in event.seen_by:
            recorder.event_removed(event)
