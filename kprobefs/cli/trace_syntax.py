"""The probes of a `kprobefs trace` command line, in the short syntax or in that of kprobe_events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count

from emulated_kernel.util.fast_dataclass import dataclass, replace
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal

EVENT = re.compile(r"t:(?P<group>\w+)[:/](?P<event>\w+)$")
DEFINITION = re.compile(
    r"(?P<kind>[pr]\d*|f\d*)(?::(?:(?P<group>\w+)/)?(?P<event>\w+))?\s+"
    r"(?P<place>(?:[A-Za-z_]|0x)[\w.$:*?]*(?:\+\w+)?(?:%return)?)(?P<arguments>(?:\s.*)?)$"
)
"""Matches a line of kprobe_events whose second word is a place to probe, and not an argument."""
SHORT = re.compile(r"(?P<kind>[pr]\d*|f\d*):(?P<place>\S+)(?P<arguments>(?:\s.*)?)$")
USAGE = (
    "p:PLACE [NAME=ARGUMENT...], r:PLACE [...], a line of kprobe_events (p:EVENT PLACE ...), or "
    "t:GROUP:EVENT; `if FILTER` may follow"
)
"""Forms of a probe on the command line, for messages."""
IF = " if "
"""Text between a probe and its filter, as between a trigger and its filter.

The filter follows the first such text, because no argument of a probe contains a blank.
"""
MAX_NAME = 40
"""Maximum length of an event name that is derived from the place of a probe, before a number is added."""


@dataclass(frozen=True)
class AskedProbe:
    """A probe that the command line requests."""

    typed: str
    """The probe as the user has typed it, without its filter."""
    event: str
    """The event that records the probe's hits, as group/name."""
    definition: str = ""
    """The line that defines the event, or "" if the kernel has the event already."""
    place: str = ""
    """The probed place, or "" if the kernel has the event already."""
    is_return: bool = False
    understood: str = ""
    """How the text was understood, for error messages; "" if it has only one possible meaning."""
    names_event: bool = False
    """Whether NAME in `p:NAME ...` was taken as the event's name, and not as the place."""
    filter: str = ""
    """Filter at the end of the probe, after IF; "" if it has none."""


def parse_probes(texts: Sequence[str], group: str) -> list[AskedProbe]:
    """Return the probes that `texts` of the command line define or name.

    `group`: group of the events that they define.

    Raises: CliError (a text is no probe, or gives an event a second filter).
    """
    found: list[AskedProbe] = []
    for text in texts:
        typed, _, condition = text.strip().partition(IF)
        probe = _parse(typed.rstrip(), group, {probe.event for probe in found})
        found.append(replace(probe, filter=condition.strip()))
    filters: dict[str, str] = {}
    for probe in found:
        if probe.filter and filters.setdefault(probe.event, probe.filter) != probe.filter:
            name = escape_for_terminal(probe.typed)
            raise CliError(f"trace: {name}: its event has a filter already; use one", ExitStatus.USAGE)
    return found


def _parse(text: str, group: str, taken: set[str]) -> AskedProbe:
    if event := EVENT.match(text):
        return AskedProbe(text, f"{event['group']}/{event['event']}")
    probe = DEFINITION.match(text)
    if probe is not None:
        name = probe["event"]
        if name is None:
            name = free_name(probe["place"], group, taken)
            understood = f"a line of kprobe_events: a probe at {probe['place']}"
        else:
            understood = (
                f"a line of kprobe_events: the event {name} at {probe['place']}; "
                f"a probe at {name} is {probe['kind']}:{name} with arguments as NAME=ARGUMENT"
            )
    else:
        probe = SHORT.match(text)
        if probe is None:
            raise CliError(f"{escape_for_terminal(text)!r} is not a probe; use {USAGE}", ExitStatus.USAGE)
        name = free_name(probe["place"], group, taken)
        understood = (
            f"{probe['kind']}:PLACE: a probe at {probe['place']}; "
            f"an event of that name is {probe['kind']}:{probe['place']} PLACE"
        )
    place = probe["place"]
    definition = f"{probe['kind']}:{group}/{name} {place}{probe['arguments']}"
    is_return = probe["kind"][0] == "r" or place.endswith("%return")
    names_event = bool(probe.groupdict().get("event"))
    return AskedProbe(text, f"{group}/{name}", definition, place, is_return, understood, names_event)


def free_name(place: str, group: str, taken: set[str]) -> str:
    """Return a name for an event, derived from `place`, that no event of the group has.

    `taken`: GROUP/NAME of the existing events.
    """
    base = re.sub(r"\W", "_", place.rpartition(":")[2])[:MAX_NAME]
    names = chain([base], (f"{base}_{number}" for number in count(len(taken))))
    return next(name for name in names if f"{group}/{name}" not in taken)
