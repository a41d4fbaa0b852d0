"""A hint at the end of `run` and `trace`: why the probes have no hit, or why no hit was recorded."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.errors import CliError, escape_for_terminal
from kprobefs.definitions.tracefs_files import HostFiles

NAMES = 5
"""Maximum number of names that a hint lists."""
NO_HIT = "no hit of {names}: {why}"
NO_RECORD = "{name} has {hits} and no record in the trace; its filter is {filter}"
HINT_LINE = re.compile(r"kprobefs: (?:no hit of .*: |\w+ has \d+ hits? and no record in the trace; ).*")
"""Pattern for a line of the output of `kprobefs run` that has a hint of this module."""
HITS = re.compile(r" *(\S+) +(\d+) +\d+")
"""Pattern for a line of kprobe_profile (event, hits, misses); its groups are the event and its hits."""
BUFFERED = re.compile(r"^(?:entries|overrun|dropped events|read events): (\d+)$", re.MULTILINE)
"""Pattern for the lines of a buffer's `stats` that count records: present, overwritten, dropped or read."""


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended, and the mount that it used."""

    words: Sequence[str]
    status: int
    """Exit status, or 128 + number of the signal that ended the command."""
    directory: str
    """Absolute path of the mount point."""
    place: str
    """The command's working directory, to which relative paths in `words` refer."""


def counted(hits: int) -> str:
    """Return the number `hits` with its noun, such as "1 hit" or "2 hits"."""
    return f"{hits} hit{'s' * (hits != 1)}"


def why_no_hit(ended: EndedCommand, places: Sequence[str]) -> str:
    """Return the likely reason why a command has hit none of the probes at `places`."""
    if ended.status:
        return f"the command ended with status {ended.status} before a probe was hit"
    if not Path(ended.directory, "scratch").is_dir():
        return "this mount has no scratch/; only files there belong to its kernel"
    for file in _files_outside(ended):
        return f"files outside of scratch/, such as {escape_for_terminal(file)}, hit no probe"
    named = escape_for_terminal(", ".join(places[:NAMES]))
    return f"the command never came to {named}; files outside of scratch/ hit no probe"


def _files_outside(ended: EndedCommand) -> Iterator[str]:
    """Yield the command's arguments, and the words in them, that name regular files outside of the mount."""
    arguments = ended.words[1:]
    for word in [*arguments, *(word for text in arguments for word in text.split())]:
        path = os.path.normpath(os.path.join(ended.place, word))
        if os.path.isfile(path) and os.path.commonpath([path, ended.directory]) != ended.directory:
            yield word


def nothing_hints(ended: EndedCommand) -> Iterator[str]:
    """Yield hints about the enabled kprobe events of a mount: no hit, or hits without a record.

    The mount must be about to end, and all its probes disarmed, because the requests of this function would
    hit them. Events that the command has removed get no hint.
    """
    with suppress(OSError, CliError):
        tracefs = Path(ended.directory, HostFiles(ended.directory).tracefs())
        hits: Counter[str] = Counter()
        for name, count in HITS.findall((tracefs / "kprobe_profile").read_text()):
            hits[name] += int(count)
        places = dict(_enabled_events(tracefs))
        unhit = {event: place for event, place in places.items() if not hits[event.name]}
        if unhit and len(unhit) == len(places):
            names = escape_for_terminal(", ".join([event.name for event in unhit][:NAMES]))
            yield NO_HIT.format(names=names, why=why_no_hit(ended, list(unhit.values())))
        elif _is_unrecorded(tracefs):
            for event in places:
                text = (event / "filter").read_text().strip()
                if text != "none" and (event / "enable").read_text().startswith("1"):
                    shown = escape_for_terminal(text)
                    yield NO_RECORD.format(hits=counted(hits[event.name]), name=event.name, filter=shown)


def _enabled_events(tracefs: Path) -> Iterator[tuple[Path, str]]:
    """Yield (directory, place) of each kprobe event that is enabled in at least one trace array.

    The directory is that of the event in the top-level trace array. An event that is enabled only because it
    has triggers is yielded too.
    """
    instances = list((tracefs / "instances").iterdir())
    for line in (tracefs / "kprobe_events").read_text().splitlines():
        event, place = line.split()[:2]
        path = f"events/{event.partition(':')[2]}"
        switches = (array / path / "enable" for array in (tracefs, *instances))
        # Linux: "0*" and "1*" are the soft mode, in which triggers run.
        if any(switch.read_text().strip() != "0" for switch in switches):
            yield tracefs / path, place


def _is_unrecorded(tracefs: Path) -> bool:
    """Return True if the top-level trace array records, and has recorded nothing since its last reset."""
    stats = (file.read_text() for file in tracefs.glob("per_cpu/cpu*/stats"))
    is_on = (tracefs / "tracing_on").read_text().strip() == "1"
    return is_on and not any(int(count) for text in stats for count in BUFFERED.findall(text))
