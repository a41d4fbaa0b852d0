"""A hint at the end of `run` and `trace`: why the probes have no hit, or why no hit was recorded."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.cli.past_hists import PastHist, present_hists
from kprobefs.common.errors import escape_for_terminal
from kprobefs.definitions.tracefs_files import HostFiles, control_root

NAMES = 5
"""Maximum number of names that a hint lists."""
NO_HIT = "no hit of {names}: {why}"
ENDED_EARLY = "the command ended with status {status} before a probe was hit"
MISSED = "{hits} missed, because the CPU handled another probe"
MISSED_RETURNS = (
    "{hits} missed, because earlier calls have not returned and no instance is free; "
    "a larger maxactive (r100:NAME PLACE) takes more calls"
)
STACK_FULL = (
    "{hits} missed, because earlier calls of the same task have not returned and its shadow stack is full"
)
WITHOUT_MAXACTIVE = ("fgraph", "unified")
"""Names in kprobes/return_hook with which maxactive has no effect, because each task has a shadow stack."""
UNARMED = "{reason}, so the probes were not armed"
NO_RECORD = "{name} has {hits} and no record in the trace; {why}"
NOT_BY_SCRATCH = "{names} {hits}, none of them by a file in scratch/; {why}"
HINT_LINE = lazy_pattern(
    r"kprobefs: (?:no hit of .*: |[\w, ]+ ha(?:s|ve) \d+ hits?"
    r"(?: and no record in the trace|, none of them by a file in scratch/); ).*"
)
"""Pattern for a line with a hint of this module in the output of `kprobefs run`."""
OTHER_WAYS = {"load": "machine/load (fork, tcp, timers...)", "call": "machine/call"}
"""Name of a file in machine/ by which clients run code of the kernel -> text that names it in a hint."""
KPROBES_OFF = "kprobes/enabled was 0"
DISARMED = "Kprobes globally disabled"
"""Text of Linux's message when all kprobes are disarmed."""
FTRACE_ENABLED = "sysctl/kernel/ftrace_enabled"
INTERPRETER = lazy_pattern(r"(?:[akz]|ba|da)?sh|(?:python|perl|ruby|lua)[\d.]*")
"""Pattern for the name of an interpreter: the first file among its arguments is a script."""
HITS = lazy_pattern(r" *(\S+) +(\d+) +(\d+)")
"""Pattern for a line of kprobe_profile; its groups are the event, its hits and its misses."""
BUFFERED = lazy_pattern(r"^(?:entries|overrun|dropped events|read events): (\d+)$", re.MULTILINE)
"""Pattern for the lines of a buffer's `stats` that count records: present, overwritten, dropped or read."""


READ_SIZE = 1 << 16
"""Number of bytes that one read of a history requests."""


@dataclass(frozen=True)
class PastEvent:
    """A kprobe event that was enabled at some time. The attributes are named like keys of machine/history."""

    event: str
    """The event as GROUP/EVENT."""
    places: Sequence[str]
    hits: int
    missed: int = 0
    at_return: bool = False
    armed: bool = True
    unarmed: str = ""
    recording: bool = True
    off: bool = False
    filters: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the event without its group."""
        return self.event.partition("/")[2]


@dataclass(frozen=True)
class Past:
    """The kprobe events that were enabled in a mount, and whether anything was recorded."""

    events: Sequence[PastEvent] = ()
    recorded: bool = False
    """Whether any trace array has had a record."""
    forgotten_hits: int = 0
    """Sum of the hits of removed events that the history has dropped, so that `events` lacks them."""
    is_partial: bool = False
    """Whether the data come from present_events(), because the mount's kernel keeps no history of events."""
    hists: Sequence[PastHist] = ()
    """The histograms that exist, or that were removed or cleared."""
    has_forgotten_hists: bool = False
    """Whether `hists` lacks a removed histogram."""
    removed_errors: Mapping[str, str] = field(default_factory=dict)
    """Name of a removed trace instance -> the last entry of the instance's error_log."""
    used: Sequence[str] | None = None
    """Directories of the mount that had requests, such as "/" and "/scratch"; None if they are unknown."""
    missing: str | None = None
    """Path in the mount of the last file that the kernel lacks and that a client tried to create, or None."""
    refused: Sequence[str] | None = None
    """The last write that the kernel refused: path in the mount, text and reason; None if there is none."""


class History:
    """The history of a mount's kprobe events, which is opened before the command and read after it.

    The kernel does not see the read, so the read hits no probe.
    """

    def __init__(self, root: Path) -> None:
        """Open the history. `root`: directory of the mount that contains machine/."""
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(root / "machine" / "history", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Past:
        """Return the history. If the mount's kernel keeps none, return an empty one with `is_partial` set.

        If the file cannot be read, because the daemon has ended, return an empty history.
        """
        if self._file is None:
            return Past(is_partial=True)
        # The daemon may have ended, and then the command has no hint.
        with suppress(OSError):
            first, *lines = map(json.loads, self._text().splitlines())
            hists = [PastHist(**hist) for hist in first.pop("hists", ())]
            return Past([PastEvent(**line) for line in lines], hists=hists, **first)
        return Past()

    def _text(self) -> bytes:
        assert self._file is not None
        text = b""
        while data := os.pread(self._file, READ_SIZE, len(text)):
            text += data
        return text

    def close(self) -> None:
        """Close the history's file."""
        if self._file is not None:
            os.close(self._file)


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


def _with_hex_offset(place: str) -> str:
    """Return `place` with a hexadecimal offset, as `explain` shows it, in place of a decimal one."""
    return re.sub(r"\+([0-9]+)$", lambda found: f"+{int(found[1]):#x}", place)


def why_no_hit(
    ended: EndedCommand, places: Sequence[str], unarmed: str = "", *, has_used_scratch: bool = False
) -> str:
    """Return the likely reason why a command has hit none of the probes at `places`.

    `unarmed`: why the probes were not armed for a time; "" if they always were. `has_used_scratch`: whether
    the command has used files in scratch/. If it has, files outside of the mount that the command names are
    not given as the reason.
    """
    if ended.status:
        return ENDED_EARLY.format(status=ended.status)
    if not Path(ended.directory, "scratch").is_dir():
        return "this mount has no scratch/; only files there belong to its kernel"
    if not has_used_scratch and (outside := _why_not_outside(ended)):
        return outside
    named = escape_for_terminal(", ".join(map(_with_hex_offset, places[:NAMES])))
    if unarmed:
        reason = escape_for_terminal(unarmed)
        return f"the command never came to {named} while the probes were armed ({reason} for a time)"
    came = "used scratch/, but never came" if has_used_scratch else "never came"
    why = f"the command {came} to {named}; files outside of the mount hit no probe"
    return why + _other_ways(ended.directory)


def why_missed(missed: int, directory: str, *, at_return: bool) -> str:
    """Return the reason why a probe has missed `missed` hits.

    `directory`: the mount. `at_return`: whether the probe is a return probe, which misses hits for other
    reasons than a probe elsewhere.
    """
    if not at_return:
        return MISSED.format(hits=counted(missed))
    text = MISSED_RETURNS
    # Only a kernel with kprobefs's kprobes has the file.
    with suppress(OSError):
        hooks = (control_root(directory) / "kprobes" / "return_hook").read_text()
        if any(f"[{name}]" in hooks for name in WITHOUT_MAXACTIVE):
            text = STACK_FULL
    return text.format(hits=counted(missed))


def profile_counts(tracefs: Path) -> tuple[Counter[str], Counter[str]]:
    """Return two maps from kprobe_profile: event -> hits, and event -> missed hits.

    The file names an event without its group, so events of the same name are added up.
    """
    hits: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name, count, misses in HITS.findall((tracefs / "kprobe_profile").read_text()):
        hits[name] += int(count)
        missed[name] += int(misses)
    return hits, missed


def _why_not_outside(ended: EndedCommand) -> str:
    """Return why the files outside of the mount that the command names hit no probe; "" if it names none."""
    for file in _files_outside(ended):
        outside = f"files outside of the mount, such as {escape_for_terminal(file)}, hit no probe"
        return outside + _other_ways(ended.directory)
    return ""


def _other_ways(directory: str) -> str:
    """Return the end of a hint: files in machine/ by which clients can make the kernel run other code.

    Return "" if the mount has none of these files.
    """
    machine = control_root(directory) / "machine"
    found = [name for file, name in OTHER_WAYS.items() if (machine / file).exists()]
    return f"; other code of the kernel is run by {' and '.join(found)}" if found else ""


def _files_outside(ended: EndedCommand) -> Iterator[str]:
    """Yield the command's arguments, and the words in them, that name regular files outside of the mount.

    Programs and scripts that the command only runs are not among them.
    """
    texts = (text.split() for text in ended.words[1:] if len(text.split()) > 1)
    for words in (ended.words, *texts):
        is_run = False
        for word in words:
            path = os.path.normpath(os.path.join(ended.place, word))
            if os.path.isfile(path) and os.path.commonpath([path, ended.directory]) != ended.directory:
                if not is_run and not _is_program(path):
                    yield word
                is_run = False
            if INTERPRETER.fullmatch(os.path.basename(word)):
                is_run = True
            elif word == "-c":
                is_run = False


def _is_program(path: str) -> bool:
    """Return True if the file `path` is executable or a script."""
    with suppress(OSError), open(path, "rb") as file:
        return os.access(path, os.X_OK) or file.read(2) == b"#!"
    return False


def nothing_hints(ended: EndedCommand, past: Past) -> Iterator[str]:
    """Yield hints about enabled kprobe events, if none of them was hit or if no trace array had a record.

    The hints say why there was no hit, or why hits were not recorded. `past` also contains the events that
    the command has disabled or removed.
    """
    unhit = [event for event in past.events if not event.hits]
    if unhit and len(unhit) == len(past.events) and not past.forgotten_hits:
        yield from _without_hits(ended, unhit, has_used_scratch="/scratch" in (past.used or ()))
    elif not past.recorded:
        for event in past.events:
            if event.hits and event.recording and (why := _why_no_record(event)):
                yield NO_RECORD.format(name=event.name, hits=counted(event.hits), why=why)
        yield from _not_by_scratch(ended, past)


def _not_by_scratch(ended: EndedCommand, past: Past) -> Iterator[str]:
    """Yield a hint that no hit comes from scratch/, because the command's files are outside of the mount.

    The hint names the events that were hit but record nothing, for example because only triggers use the
    hits. There is no hint if the command names no file outside of the mount, if it has used scratch/ or this
    is unknown, or if machine/load or machine/call has run code.
    """
    if past.used is None or "/scratch" in past.used or _has_other_work(ended.directory):
        return
    why = _why_not_outside(ended)
    found = [event for event in past.events if event.hits and not event.recording]
    if why and found:
        hits = f"ha{'s' if len(found) == 1 else 've'} {counted(sum(event.hits for event in found))}"
        yield NOT_BY_SCRATCH.format(names=_names(found), hits=hits, why=why)


def _has_other_work(directory: str) -> bool:
    """Return True if the kernel has run code for machine/load or machine/call."""
    machine = control_root(directory) / "machine"
    files = [machine / file for file in OTHER_WAYS]
    return any(file.exists() and file.read_text().strip() for file in files)


def _without_hits(
    ended: EndedCommand, events: Sequence[PastEvent], *, has_used_scratch: bool
) -> Iterator[str]:
    """Yield hints about events without hits. `has_used_scratch`: as for why_no_hit().

    There is a hint for each event whose hits were missed, a hint for each reason why events were never armed,
    and a single hint for all other events.
    """
    for event in events:
        if event.missed:
            why = why_missed(event.missed, ended.directory, at_return=event.at_return)
            yield NO_HIT.format(names=_names([event]), why=why)
    events = [event for event in events if not event.missed]
    armed = [event for event in events if event.armed]
    for reason in dict.fromkeys(event.unarmed for event in events if not event.armed):
        names = _names(event for event in events if not event.armed and event.unarmed == reason)
        yield NO_HIT.format(names=names, why=UNARMED.format(reason=escape_for_terminal(reason)))
    if armed:
        places = [place for event in armed for place in event.places]
        unarmed = next((event.unarmed for event in armed if event.unarmed), "")
        why = why_no_hit(ended, list(dict.fromkeys(places)), unarmed, has_used_scratch=has_used_scratch)
        yield NO_HIT.format(names=_names(armed), why=why)


def _names(events: Iterable[PastEvent]) -> str:
    """Return the first NAMES different names of events, separated by commas; escaped for a terminal."""
    names = dict.fromkeys(event.name for event in events)
    return escape_for_terminal(", ".join([*names][:NAMES]))


def _why_no_record(event: PastEvent) -> str:
    """Return the reason why no hit of an event was recorded; "" if it is unknown."""
    if event.off:
        return "tracing_on was 0"
    if event.filters:
        return f"its filter is {escape_for_terminal(event.filters[0])}"
    return ""


def disarm(directory: str) -> None:
    """Disarm all probes of a mount, so that later requests hit no probe."""
    with suppress(OSError):
        (control_root(directory) / "kprobes" / "enabled").write_text("0")


def _disarmings(root: Path) -> list[str]:
    """Return the lines of the kernel's log that report the disarming of all probes.

    Return an empty list if there are none, or if the log cannot be read.
    """
    with suppress(OSError):
        lines = (root / "machine" / "dmesg").read_text(errors="replace").splitlines()
        return [line for line in lines if DISARMED in line]
    return []


def present_events(directory: str) -> Past:
    """Disarm all probes, and return what the mount's files show about its kprobe events.

    This is for a kernel that keeps no history of events. Events that were disabled or removed are missing,
    and so are histograms that were removed.
    """
    root = control_root(directory)
    # The kernel logs nothing if the probes were disarmed before. It does not see a read of its log.
    before = _disarmings(root)
    disarm(directory)
    were_armed = _disarmings(root) != before
    tracefs = Path(directory, HostFiles(directory).tracefs())
    hits, missed = profile_counts(tracefs)
    listed = (root / "kprobes" / "list").read_text().splitlines()
    has_calls = _switch(root / FTRACE_ENABLED)
    is_on = _switch(tracefs / "tracing_on")
    events = []
    for path, place, at_return in _enabled_events(tracefs):
        symbol = place.rpartition(":")[2].partition("+")[0]
        probes = [line for line in listed if f" {symbol}+" in line]
        unarmed = KPROBES_OFF if not were_armed else _why_unarmed(probes, has_calls=has_calls)
        text = (path / "filter").read_text().strip()
        events.append(
            PastEvent(
                f"{path.parent.name}/{path.name}",
                [place],
                hits[path.name],
                missed[path.name],
                at_return=at_return,
                armed=not unarmed,
                unarmed=unarmed,
                # Whether recording was on during the whole command is not known.
                recording=is_on and (path / "enable").read_text().startswith("1"),
                filters=[] if text == "none" else [text],
            )
        )
    hists: list[PastHist] = []
    # A kernel may have no synthetic events.
    with suppress(OSError):
        hists += present_hists(tracefs)
    return Past(events, _has_records(tracefs), hists=hists)


def switched_off(directory: str, *, kprobes: bool, calls_alone: bool) -> str:
    """Return a text that names the switch by which probes are unarmed now; "" if no switch is off.

    The text is in the past tense, as a reason why an ended command hit no probe. Precondition: the reads of
    this function hit no probe. `kprobes`: whether the command is traced by kprobes; if False, the switch
    kprobes/enabled is ignored. `calls_alone`: whether fentry sites call all probes and tracers of the
    command; if False, ftrace_enabled is ignored.
    """
    root = control_root(directory)
    if kprobes and not _switch(root / "kprobes" / "enabled"):
        return KPROBES_OFF
    return f"{FTRACE_ENABLED} was 0" if calls_alone and not _switch(root / FTRACE_ENABLED) else ""


def _switch(file: Path) -> bool:
    """Return False if the file of a switch can be read and contains 0, else True."""
    with suppress(OSError):
        return file.read_text().strip() != "0"
    return True


def _why_unarmed(probes: Sequence[str], *, has_calls: bool) -> str:
    """Return the reason why the probes of an enabled event could not be hit; "" if they could be hit.

    `probes`: lines of the probes in kprobes/list. `has_calls`: whether ftrace_enabled is on, so that fentry
    sites may call probes.
    """
    if probes and all("[DISABLED]" in line for line in probes):
        return "the event was enabled while kprobes/enabled was 0"
    if probes and not has_calls and all("[FTRACE]" in line for line in probes):
        return f"{FTRACE_ENABLED} was 0"
    return ""


def _enabled_events(tracefs: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield (directory, place, whether it is a return probe) of each enabled kprobe event.

    An event counts if at least one trace array has it enabled, also if it is enabled only because it has
    triggers. The directory is that of the event in the top-level trace array.
    """
    instances = list((tracefs / "instances").iterdir())
    for line in (tracefs / "kprobe_events").read_text().splitlines():
        event, place = line.split()[:2]
        path = f"events/{event.partition(':')[2]}"
        switches = (array / path / "enable" for array in (tracefs, *instances))
        # Linux: "0*" and "1*" are the soft mode, in which triggers run.
        if any(switch.read_text().strip() != "0" for switch in switches):
            yield tracefs / path, place, event.startswith("r")


def _has_records(tracefs: Path) -> bool:
    """Return True if the top-level trace array has had a record since its buffer was last cleared."""
    stats = (file.read_text() for file in tracefs.glob("per_cpu/cpu*/stats"))
    return any(int(count) for text in stats for count in BUFFERED.findall(text))
