"""Probes whose hits are events: kprobes, fprobes, uprobes and event probes alike."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.fetch.fetchargs import MAX_ARGSTR_LEN, ProbeArg, first_difference
from emulated_kernel.trace.probes.dynamic_events import DynEvent, EventKind
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError

ENTRY_ADDRESSES, RETURN_ADDRESSES = ("__probe_ip",), ("__probe_func", "__probe_ret_ip")
"""What the events of probes on code begin with."""


class ProbeTraceEvent(TraceEvent):
    """The event of one or more probes of a kind, which all have the same arguments.

    Mirrors: kernel/trace/trace_probe.h:struct trace_probe_event (v6.1).
    """

    __slots__ = ("addresses", "args", "probes", "word_size")

    def __init__(
        self,
        group: str,
        name: str,
        args: tuple[ProbeArg, ...],
        word_size: int,
        addresses: tuple[str, ...] = (),
    ) -> None:
        """`addresses` are names of fields in front of the arguments: addresses, a word each."""
        super().__init__(group, name)
        self.args = args
        self.word_size = word_size
        self.addresses = addresses
        self.probes: tuple[TraceProbe, ...] = ()

    # Made when they are asked for, which few events' are.

    @property
    def fields(self) -> tuple[EventField, ...]:
        """Mirrors: kernel/trace/trace_kprobe.c:kprobe_event_define_fields (v6.1)."""
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
        """Mirrors: kernel/trace/trace_probe.c:__set_print_fmt (v6.1)."""
        names = self.addresses
        args = self.args
        addresses = f"({' <- '.join('%lx' for _ in names)})" if names else ""
        arguments = "".join(f" {arg.name}={_arg_fmt(arg)}" for arg in args)
        values = [f"REC->{name}" for name in names] + [value for arg in args for value in _arg_values(arg)]
        return ", ".join([f'"{addresses}{arguments}"', *values])

    @property
    def is_removed(self) -> bool:
        return not self.probes

    def start(self) -> None:
        """Enable all its probes or none.

        Raises: KernelError (of a probe). Mirrors: kernel/trace/trace_kprobe.c:enable_trace_kprobe (v6.1).
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
        """Mirrors: kernel/trace/trace_kprobe.c:disable_trace_kprobe (v6.1)."""
        for probe in self.probes:
            probe.disable()


class TraceProbe(DynEvent):
    """One probe of an event. Mirrors: kernel/trace/trace_probe.h:struct trace_probe (v6.1)."""

    __slots__ = ("args", "event", "kind")

    def __init__(self, kind: ProbeKind[Any], event: ProbeTraceEvent, args: tuple[ProbeArg, ...]) -> None:
        """`event` is a new one, in whose place an older one of that name may come."""
        self.kind = kind
        self.event = event
        self.args = args

    @property
    def name(self) -> str:
        return self.event.name

    @property
    @abstractmethod
    def place_text(self) -> str:
        """Where it is, as in its line, and as `-:EVENT PLACE` has to give it."""

    @property
    @abstractmethod
    def letter(self) -> str:
        """What its line begins with."""

    @property
    def identity(self) -> Hashable:
        """What two probes on the same place have in common."""
        return self.place_text

    def enable(self) -> None:
        """Let hits come. Raises: KernelError."""

    def disable(self) -> None:
        """Let no more come. Raises: KernelError."""

    def unregister(self) -> None:
        """It is about to be removed."""

    def is_busy(self) -> bool:
        return self.event.is_enabled

    def show(self) -> str:
        """Mirrors: trace_kprobe_show, trace_uprobe_show, eprobe_dyn_event_show (v6.1)."""
        return f"{self.letter}:{self.event.group}/{self.event.name} {to_text(' '.join(self.words()))}\n"

    def words(self) -> list[str]:
        """Of its line, behind the name: its place and its arguments."""
        return [self.place_text, *(f"{arg.name}={arg.expression}" for arg in self.args)]

    def matches_place(self, word: str) -> bool:
        """Whether the PLACE of a command to remove events is this one's."""
        return word == self.place_text

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Whether `-:[GROUP/][EVENT] [PLACE [ARGS]]` means this probe; the ARGS may be its first ones.

        Linux: compares at most 63 bytes of an argument.
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

    def is_same_as(self, other: TraceProbe) -> bool:
        """Whether both probe the same place for the same arguments."""
        if self.identity != other.identity:
            return False
        return [arg.expression for arg in self.args] == [arg.expression for arg in other.args]

    def release(self) -> None:
        """Remove it. Raises: KernelError EBUSY."""
        self.kind.remove(self)


P = TypeVar("P", bound=TraceProbe)


class ProbeKind(EventKind[P]):
    """A kind of dynamic events that are made of probes."""

    def probes(self) -> list[P]:
        """All probes, in order of their making."""
        return list(self._own)

    def _shared_event(self, probe: P) -> ProbeTraceEvent | None:
        """The event that `probe` becomes one more probe of."""
        event = self.registry.find(probe.event.group, probe.event.name)
        if not isinstance(event, ProbeTraceEvent) or type(event) is not type(probe.event):
            return None
        return event if all(each.kind is self for each in event.probes) else None

    def _register(self, probe: P, log: TraceProbeLog) -> None:
        """Put a probe on the list, and its event into the registry unless there is one of that name already.

        Raises: KernelError EEXIST (logged), ENOSPC, as `_insert`. Mirrors: register_trace_kprobe (v6.1).
        """
        self._check_room()
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

    def _insert(self, probe: P) -> None:
        probe.event.probes += (probe,)
        self._list(probe)

    def remove(self, probe: P) -> None:
        """Remove a probe, and its event with the last one.

        Raises: KernelError EBUSY (only for the last one of an event that is enabled or referred to).
        Mirrors: kernel/trace/trace_kprobe.c:unregister_trace_kprobe (v6.1).
        """
        event = probe.event
        is_last = event.probes == (probe,)
        if is_last and (event.is_enabled or event.references):
            raise KernelError(errno.EBUSY, f"{event.group}/{event.name} is in use")
        probe.unregister()
        event.probes = tuple(each for each in event.probes if each is not probe)
        self._unlist(probe)
        if is_last:
            self._forget(event)


def _check_append(probe: TraceProbe, event: ProbeTraceEvent, log: TraceProbeLog) -> None:
    """Whether `probe` may be one more of an event. Mirrors: append_trace_kprobe (v6.1)."""
    if probe.event.addresses != event.addresses:
        raise log.error(0, ProbeError.DIFF_PROBE_TYPE, errno.EEXIST)
    different = first_difference(probe.args, event.args)
    if different is not None:
        log.index = different + 2
        raise log.error(0, ProbeError.DIFF_ARG_TYPE, errno.EEXIST)
    if any(probe.is_same_as(other) for other in event.probes):
        raise log.error(0, ProbeError.SAME_PROBE, errno.EEXIST)


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


def _arg_fmt(arg: ProbeArg) -> str:
    one = arg.type.print_fmt
    return "{" + ",".join([one] * arg.count) + "}" if arg.count else one


def _arg_values(arg: ProbeArg) -> list[str]:
    elements = [f"{arg.name}[{number}]" for number in range(arg.count)] or [arg.name]
    return [arg.type.print_value(each) for each in elements]
