"""events/: a directory for each group and each event in it."""

from __future__ import annotations

from emulated_kernel.vfs.modes import DIRECTORY, READ_ONLY, READ_WRITE
from emulated_kernel.vfs.node import Directory, DynamicDirectory, File, Node, Objects
from emulated_kernel.vfs.parse import switch
from emulated_kernel.vfs.ports import EventPort, EventsPort, GroupPort
from emulated_kernel.vfs.seq import AttributeFile, CommandFile, OneReadFile, SeqFile, listing, single


def events_directory(events: EventsPort) -> Directory:
    """The groups, the switch for all events, and how their records look in binary."""
    return DynamicDirectory(
        DIRECTORY,
        Objects(events.names, events.find, _group_directory),
        {
            "enable": _group_enable(events),
            "header_event": AttributeFile(READ_ONLY, events.header_event_text),
            "header_page": AttributeFile(READ_ONLY, events.header_page_text),
        },
    )


def _group_directory(group: GroupPort) -> Directory:
    """Linux: the group of tracing's own events has no files, as there is nothing to switch."""
    files: dict[str, Node] = {
        "enable": _group_enable(group),
        "filter": OneReadFile(READ_WRITE, group.filter_text, group.set_filter),
    }
    return DynamicDirectory(
        DIRECTORY,
        Objects(group.names, group.find, _event_directory),
        files if group.is_switchable else {},
    )


def _group_enable(group: GroupPort | EventsPort) -> File:
    return AttributeFile(
        READ_WRITE,
        show=lambda: f"{group.enabled_text()}\n",
        store=lambda data: group.set_enabled(switch(data)),
    )


def _event_directory(event: EventPort) -> Directory:
    switchable: dict[str, Node] = {
        "enable": AttributeFile(
            READ_WRITE,
            show=lambda: f"{event.enabled_text()}\n",
            store=lambda data: event.set_enabled(switch(data)),
        ),
        "filter": OneReadFile(READ_WRITE, event.filter_text, event.set_filter),
    }
    return Directory(
        DIRECTORY,
        {
            **(switchable if event.is_switchable else {}),
            "format": SeqFile(READ_ONLY, single(event.format_text)),
            "id": AttributeFile(READ_ONLY, show=lambda: f"{event.id}\n"),
            "hist": SeqFile(READ_ONLY, single(event.hist_text)),
            "trigger": CommandFile(
                READ_WRITE, listing(event.triggers), event.execute_trigger, event.drop_histograms
            ),
        },
    )
