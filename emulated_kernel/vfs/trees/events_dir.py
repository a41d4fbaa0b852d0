"""The directory events/, with a directory for each group, and in it a directory for each event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.array_events import ArrayEvents
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.event_filters import GROUP_FILTER_TEXT
from emulated_kernel.trace.hist.poll import HistPoll
from emulated_kernel.trace.hist.trigger import hist_records
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.ring.page_format import header_event_text, header_page_text
from emulated_kernel.trace.trace_arrays import Tracing
from emulated_kernel.trace.trigger.triggers import EventTriggers
from emulated_kernel.vfs.core.attribute_file import AttributeFile, OneReadFile, SteppedAttribute
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import CommandFile
from emulated_kernel.vfs.core.kstrtox import switch
from emulated_kernel.vfs.core.modes import DIRECTORY, READ_ONLY, READ_WRITE
from emulated_kernel.vfs.core.node import Directory, DynamicDirectory, Node, Objects
from emulated_kernel.vfs.core.open_file import File, Moves
from emulated_kernel.vfs.core.seq_file import OpenSeq, SeqFile, StreamFile, single


def events_directory(tracing: Tracing, *, instance: bool = False) -> Directory:
    """Return events/ with a directory for each group, and with enable, header_event and header_page.

    `instance`: whether the trace array is an instance. If so, the directory of a new group gets the user and
    group of events/; otherwise that depends on the kernel's version.
    """
    events = tracing.events
    shares_owner = instance or InterfaceRule.EVENTS_KEEP_OWNER not in tracing.array.system.interface
    return DynamicDirectory(
        DIRECTORY,
        Objects(
            names=events.registry.groups,
            # in_group() returns the same dictionary while the group exists. A group has at least one event.
            find=lambda group: events.registry.in_group(group) or None,
            make=lambda members: _group_directory(tracing, members, shares_owner=shares_owner),
        ),
        {
            "enable": _enable(events, events.switchable),
            "header_event": AttributeFile(READ_ONLY, header_event_text),
            "header_page": AttributeFile(READ_ONLY, partial(_header_page, tracing.array)),
        },
        shares_owner=shares_owner,
    )


class _OpenHist(OpenSeq):
    node: _PolledHist

    def __init__(self, node: _PolledHist, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        self._state = HistPoll(node.triggers, node.event)

    def _read(self, size: int, position: int) -> bytes:
        data = super()._read(size, position)
        if not position:
            self._state.shown()
        return data

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        return self._state.poll(notify)

    def release(self) -> None:
        self._state.forget()


class _PolledHist(StreamFile):
    opened_as = _OpenHist
    __slots__ = ("event", "triggers")

    def __init__(self, triggers: EventTriggers, event: TraceEvent) -> None:
        super().__init__(READ_ONLY, lambda: hist_records(triggers, event))
        self.triggers = triggers
        self.event = event


def _hist_file(triggers: EventTriggers, event: TraceEvent) -> File:
    if InterfaceRule.HIST_POLL in triggers.array.system.interface:
        return _PolledHist(triggers, event)
    return StreamFile(READ_ONLY, lambda: hist_records(triggers, event))


def _header_page(array: TraceArray) -> str:
    interface = array.system.interface
    return header_page_text(
        array.order,
        "char" if InterfaceRule.HEADER_CHAR_OVERWRITE in interface else "int",
        signed_char=InterfaceRule.CHAR_UNSIGNED not in interface,
    )


def _group_directory(tracing: Tracing, members: Mapping[str, TraceEvent], *, shares_owner: bool) -> Directory:
    """Return the directory of a group. As in Linux, the directory of the group ftrace has no files.

    `members`: name -> event of the group. `shares_owner`: whether a new event's directory gets the user and
    group of the group's directory.
    """

    def switchable() -> list[TraceEvent]:
        return [*tracing.events.switchable(members.values())]

    files: dict[str, Node] = {
        "enable": _enable(tracing.events, switchable),
        "filter": OneReadFile(
            READ_WRITE,
            show=lambda: GROUP_FILTER_TEXT,
            store=lambda data: tracing.filters.write_group(list(members.values()), data),
        ),
    }
    return DynamicDirectory(
        DIRECTORY,
        Objects(members.keys, members.get, lambda event: _event_directory(tracing, event)),
        files if switchable() else {},
        shares_owner=shares_owner,
    )


def _enable(events: ArrayEvents, chosen: Callable[[], Iterable[TraceEvent]]) -> File:
    return SteppedAttribute(
        READ_WRITE,
        lambda: f"{events.set_enabled_text(chosen())}\n",
        lambda data: events.set_all_steps(chosen(), switch(data)),
    )


def _event_directory(tracing: Tracing, event: TraceEvent) -> Directory:
    """Return the directory of an event.

    After the event was removed, open files of the directory fail with ENODEV.
    """
    events = tracing.events
    filters = tracing.filters
    triggers = tracing.triggers
    switchable: dict[str, Node] = {
        "enable": AttributeFile(
            READ_WRITE,
            show=lambda: f"{events.enabled_text(event)}\n",
            store=lambda data: events.set_enabled(event, switch(data)),
        ),
        "filter": OneReadFile(
            READ_WRITE, show=lambda: filters.text(event), store=lambda data: filters.write(event, data)
        ),
    }
    registrable: dict[str, Node] = {"id": AttributeFile(READ_ONLY, show=lambda: f"{event.id}\n")}
    triggerable: dict[str, Node] = {
        "trigger": CommandFile(
            READ_WRITE,
            partial(triggers.records, event),
            execute=lambda data: triggers.write(event, data),
            truncate=lambda: triggers.truncate(event),
            moves=Moves.BY_BYTES,
        ),
    }
    return Directory(
        DIRECTORY,
        {
            **(switchable if event.is_switchable else {}),
            "format": SeqFile(READ_ONLY, single(event.format_text)),
            **(registrable if event.is_registrable else {}),
            "hist": _hist_file(triggers, event),
            **(triggerable if event.is_switchable or event.name == "print" else {}),
        },
    )
