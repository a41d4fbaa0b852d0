"""Base classes of the probes of events and of their kinds: kprobes, fprobes, uprobes and event probes."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeVar

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.fetch.fetchargs import MAX_ARGSTR_LEN
from emulated_kernel.trace.fetch.probe_arg import ProbeArg, first_difference
from emulated_kernel.trace.probes.dynamic_events import DynEvent, EventKind
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError

ENTRY_ADDRESSES = ("__probe_ip",)
"""Names of the address fields before the arguments, for events of probes at entries and instructions.

Event probes have no such fields.
"""
RETURN_ADDRESSES = ("__probe_func", "__probe_ret_ip")
"""Names of the address fields before the arguments, for events of return probes."""


class ProbeTraceEvent(TraceEvent):
    """The event of one or more probes of one kind, whose arguments have the same names and types.

    Mirrors: kernel/trace/trace_probe.h:struct trace_probe_event (v6.1).
    """

    __slots__ = ("_probes", "addresses", "args", "word_size")

    def __init__(
        self,
        group: str,
        name: str,
        args: tuple[ProbeArg, ...],
        word_size: int,
        addresses: tuple[str, ...] = (),
    ) -> None:
        """Create an event without probes.

        `word_size`: size in bytes of a word. `addresses`: names of the fields before the arguments. Each of
        these fields holds an address, which is one word.
        """
        super().__init__(group, name)
        self.args = args
        self.word_size = word_size
        self.addresses = addresses
        self._probes: tuple[TraceProbe, ...] | dict[Hashable, TraceProbe] = ()
        """The probes in order of creation: a tuple of at most one, or a map `sameness` -> probe.

        Thousands of probes may share an event. Most events have one probe, and a tuple takes less memory.
        """

    @property
    def probes(self) -> Collection[TraceProbe]:
        """The probes of the event, in order of creation."""
        return self._probes if isinstance(self._probes, tuple) else self._probes.values()

    @property
    def first_probe(self) -> TraceProbe:
        """The oldest probe of the event. Precondition: the event has a probe."""
        return next(iter(self.probes))

    @property
    def kind(self) -> ProbeKind[Any] | None:
        """The kind of all probes of the event, or None if the event has no probes."""
        return self.first_probe.kind if self._probes else None

    def add_probe(self, probe: TraceProbe) -> None:
        """Add a probe to the event. Precondition: the event has no equal probe; see has_same()."""
        if not self._probes:
            self._probes = (probe,)
            return
        if isinstance(self._probes, tuple):
            self._probes = {each.sameness: each for each in self._probes}
        self._probes[probe.sameness] = probe

    def remove_probe(self, probe: TraceProbe) -> None:
        """Remove a probe of the event."""
        if isinstance(self._probes, tuple):
            self._probes = ()
        else:
            del self._probes[probe.sameness]

    def has_same(self, probe: TraceProbe) -> bool:
        """Return True if a probe of the event has the place and the arguments of `probe`."""
        if isinstance(self._probes, tuple):
            return any(each.sameness == probe.sameness for each in self._probes)
        return probe.sameness in self._probes

    # The fields and the print format are computed on demand, because few events need them.

    @property
    def fields(self) -> tuple[EventField, ...]:
        """The fields of the event. Mirrors: kernel/trace/trace_kprobe.c:kprobe_event_define_fields (v6.1)."""
        word = self.word_size
        start = COMMON_SIZE + self.word_size * len(self.addresses)
        places = zip(self.addresses, range(COMMON_SIZE, start, word), strict=True)
        return (
            *(EventField("unsigned long", name, at, word, False) for name, at in places),
            *(
                EventField(arg.field_type, arg.name, start + arg.offset, arg.size, arg.type.is_signed)
                for arg in self.args
            ),
        )

    @property
    def print_fmt(self) -> str:
        """The text after `print fmt:` in the event's format file.

        Mirrors: kernel/trace/trace_probe.c:__set_print_fmt (v6.1).
        """
        names = self.addresses
        args = self.args
        addresses = f"({' <- '.join('%lx' for _ in names)})" if names else ""
        arguments = "".join(f" {arg.name}={_arg_fmt(arg)}" for arg in args)
        values = [f"REC->{name}" for name in names] + [value for arg in args for value in _arg_values(arg)]
        return ", ".join([f'"{addresses}{arguments}"', *values])

    @property
    def is_removed(self) -> bool:
        return not self._probes

    def start(self) -> None:
        """Enable all probes of the event. If a probe cannot be enabled, leave all of them disabled.

        Raises: errors of TraceProbe.enable().
        Mirrors: kernel/trace/trace_kprobe.c:enable_trace_kprobe (v6.1).
        """
        done: list[TraceProbe] = []
        try:
            for probe in self.probes:
                probe.enable()
                done.append(probe)
        except KernelError:
            for probe in done:
                probe.disable()
            raise

    def stop(self) -> None:
        """Disable all probes of the event.

        Mirrors: kernel/trace/trace_kprobe.c:disable_trace_kprobe (v6.1).
        """
        for probe in self.probes:
            probe.disable()


class TraceProbe(DynEvent):
    """Base class of a probe of an event. Mirrors: kernel/trace/trace_probe.h:struct trace_probe (v6.1)."""

    __slots__ = ("args", "event", "kind")

    def __init__(self, kind: ProbeKind[Any], event: ProbeTraceEvent, args: tuple[ProbeArg, ...]) -> None:
        """Create a probe with a new event; ProbeKind._register() may replace the event by an existing one."""
        self.kind = kind
        self.event = event
        self.args = args

    @property
    def name(self) -> str:
        return self.event.name

    @property
    @abstractmethod
    def place_text(self) -> str:
        """The place as the probe's line shows it. PLACE in `-:EVENT PLACE` must equal this text."""

    @property
    @abstractmethod
    def letter(self) -> str:
        """The beginning of the probe's line, such as `p` or `r16`."""

    @property
    def identity(self) -> Hashable:
        """A value that identifies the place: it is equal for probes of one place."""
        return self.place_text

    def enable(self) -> None:
        """Begin to take hits. This method is called when the event is enabled.

        Raises: KernelError (the probe cannot be enabled).
        """

    def disable(self) -> None:
        """Stop taking hits. This method is called when the event is disabled.

        Raises: KernelError (the probe cannot be disabled).
        """

    def unregister(self) -> None:
        """Release the probe's resources before the probe is removed."""

    def is_busy(self) -> bool:
        return self.event.is_enabled

    def show(self) -> str:
        """Return the probe's line in dynamic_events and the kind's own file, with a newline.

        Mirrors: kernel/trace/trace_kprobe.c:trace_kprobe_show, kernel/trace/trace_uprobe.c:trace_uprobe_show,
        kernel/trace/trace_eprobe.c:eprobe_dyn_event_show (v6.1).
        """
        return f"{self.letter}:{self.event.group}/{self.event.name} {to_text(' '.join(self.words()))}\n"

    def words(self) -> list[str]:
        """Return the words of the probe's line after the name: the place and the arguments."""
        return [self.place_text, *(f"{arg.name}={arg.expression}" for arg in self.args)]

    def matches_place(self, word: str) -> bool:
        """Return True if `word`, PLACE in a command that removes events, is this probe's place."""
        return word == self.place_text

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Return True if `-:[GROUP/][EVENT] [PLACE [ARGS]]` matches this probe.

        ARGS are compared with the probe's first arguments; further arguments of the probe do not matter. As
        in Linux, at most 63 bytes of an argument are compared.
        Mirrors: kernel/trace/trace_probe.c:trace_probe_match_command_args (v6.1).
        """
        if event and to_text(event) != self.event.name:
            return False
        if group is not None and to_text(group) != self.event.group:
            return False
        if not words:
            return True
        own = self.words()
        if len(words) > len(own) or not self.matches_place(words[0]):
            return False
        return all(mine[:MAX_ARGSTR_LEN] == given for mine, given in zip(own[1:], words[1:], strict=False))

    @property
    def sameness(self) -> Hashable:
        """A value that is equal for probes with equal places and equal arguments."""
        return self.identity, tuple(arg.expression for arg in self.args)

    def release(self) -> None:
        """Remove the probe; see ProbeKind.remove().

        Raises: KernelError EBUSY (the event is in use).
        """
        self.kind.remove(self)


P = TypeVar("P", bound=TraceProbe)


class ProbeKind(EventKind[P]):
    """A kind of dynamic events that record hits of probes, such as kprobes.

    An event of the kind can have several probes.
    """

    def probes(self) -> list[P]:
        """Return all probes of this kind, in order of creation."""
        return list(self._own)

    @property
    def count(self) -> int:
        """Number of probes of this kind."""
        return len(self._own)

    @property
    def newest(self) -> P:
        """The newest probe of this kind. Precondition: at least one exists."""
        return next(reversed(self._own))

    def _shared_event(self, probe: P) -> ProbeTraceEvent | None:
        """Return an existing event to which `probe` may be added as one more probe.

        Return None if there is no event with the group, name and kind of the probe's event.
        """
        event = self.registry.find(probe.event.group, probe.event.name)
        if not isinstance(event, ProbeTraceEvent) or type(event) is not type(probe.event):
            return None
        return event if event.kind is self else None

    def _register(self, probe: P, log: TraceProbeLog) -> None:
        """Add a probe to the list, and register its event.

        If _shared_event() returns an existing event, add the probe to that one instead.

        Raises: KernelError EEXIST (another event has the name, or _check_append() refuses the probe; logged),
        ENOSPC (the limit on dynamic events is reached), or the error of _insert().
        Mirrors: kernel/trace/trace_kprobe.c:register_trace_kprobe (v6.1).
        """
        self._check_capacity()
        log.index = 0
        shared = self._shared_event(probe)
        if shared is not None:
            _check_append(probe, shared, log)
            probe.event = shared
            self._insert(probe)
            return
        try:
            self.registry.add(probe.event)
        except KernelError as failure:
            if failure.errno == errno.EEXIST:
                log.error(0, ProbeError.EVENT_EXIST)
            raise
        try:
            self._insert(probe)
        except KernelError:
            self.registry.remove(probe.event)
            raise

    def note_switched(self, event: ProbeTraceEvent) -> None:
        """Handle the enabling or disabling of `event`. By default, do nothing.

        This method is called once after the event is enabled. It is called twice when the event is disabled:
        before and after that.
        """

    def _insert(self, probe: P) -> None:
        probe.event.add_probe(probe)
        self._list(probe)

    def remove(self, probe: P) -> None:
        """Remove a probe. If it is the last probe of its event, remove the event too.

        Raises: KernelError EBUSY (it is the last probe, and the event is enabled or has users; see
        TraceEvent.hold()).
        Mirrors: kernel/trace/trace_kprobe.c:unregister_trace_kprobe (v6.1).
        """
        event = probe.event
        is_last = len(event.probes) == 1
        if is_last and (event.is_enabled or event.references):
            message = (
                f"{event.group}/{event.name}: the event is in use; disable it and remove its users first"
            )
            raise KernelError(errno.EBUSY, message)
        probe.unregister()
        event.remove_probe(probe)
        self._unlist(probe)
        if is_last:
            self._forget(event)


def _check_append(probe: TraceProbe, event: ProbeTraceEvent, log: TraceProbeLog) -> None:
    """Check that `probe` may be added to an event that has probes.

    Raises: KernelError EEXIST (the class of the probe or its arguments differ, or an equal probe exists;
    logged).
    Mirrors: kernel/trace/trace_kprobe.c:append_trace_kprobe (v6.1).
    """
    if probe.event.addresses != event.addresses or type(probe) is not type(event.first_probe):
        raise log.error(0, ProbeError.DIFF_PROBE_TYPE, errno.EEXIST)
    different = first_difference(probe.args, event.args)
    if different is not None:
        log.index = different + 2
        raise log.error(0, ProbeError.DIFF_ARG_TYPE, errno.EEXIST)
    if event.has_same(probe):
        raise log.error(0, ProbeError.SAME_PROBE, errno.EEXIST)


def args_text(args: Sequence[ProbeArg], payload: bytes, start: int, symbols: KernelSymbols) -> str:
    """Return the text that `trace` shows for arguments: ` NAME=VALUE` for each.

    The first argument is at byte `start` of the payload.
    Mirrors: kernel/trace/trace_probe_tmpl.h:print_probe_args (v6.1).
    """
    return "".join(f" {arg.name}={_arg_text(arg, payload, start, symbols)}" for arg in args)


def _arg_text(arg: ProbeArg, payload: bytes, start: int, symbols: KernelSymbols) -> str:
    at = start + arg.offset
    places = range(at, at + arg.size, arg.type.size)
    texts = [arg.type.text(payload, place, symbols) for place in places]
    return "{" + ",".join(texts) + "}" if arg.count else texts[0]


def _arg_fmt(arg: ProbeArg) -> str:
    one = arg.type.print_fmt
    return "{" + ",".join([one] * arg.count) + "}" if arg.count else one


def _arg_values(arg: ProbeArg) -> list[str]:
    elements = [f"{arg.name}[{number}]" for number in range(arg.count)] or [arg.name]
    return [arg.type.print_value(each) for each in elements]
