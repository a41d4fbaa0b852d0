#!/usr/bin/env python3
"""Replay recorded writes through a mount, and compare their effects with those that Linux had.

errors.py FILE [--sections NAME,...] [--first N]

The program makes its own mount. If $KPROBEFS is set, it uses that mount. The exit status is 1 if an answer
differs.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Step = str | list[str]

TIMESTAMP = re.compile(r"^\[ *\d+\.\d+\] ", re.MULTILINE)
DEFINITION = re.compile(r"^\s*(?:p|r\w*)(?::\S*)?\s+(?:\w+:)?([A-Za-z_.]\w*)", re.MULTILINE)
IN_MODULE = re.compile(r"^\s*[pr]\w*(?::\S*)?\s+(\w+):(\w+)", re.MULTILINE)
DEFINED = re.compile(r"^\s*[a-z]\w*:(\w+)/(\w+)", re.MULTILINE)
PENDING = "might be able to register after target module is loaded"
MODULE = "ktgt"
MODULE_STAND_INS = {"0": "ktgt_add", "EILSEQ": "ktgt_add", "EINVAL": "ktgt_np"}
"""Recorded errno -> function of MODULE that stands in for a function in a recorded kernel's module."""
HASHED_ADDRESS = re.compile(r"\b0x[0-9a-f]{16}\b")
PLACES = {"tracing": "tracing", "debug": "."}
OPTIMIZATION = "/proc/sys/debug/kprobes-optimization"
EVENT_KINDS = {"e": "e[:[<group>/]", "s": "s:[synthetic/]"}
PARTS = ("errno", "error_log", "kprobe_events", "kmsg")


@dataclass
class Answer:
    """The effects of a write that are compared."""

    errno: str | int
    error_log: str
    kprobe_events: str
    kmsg: list[str] | None
    """New messages in the kernel log; None if the name of a stand-in could change them."""


@dataclass
class Tally:
    """Numbers of answers that agree and of answers that cannot be compared, and descriptions of the answers
    that differ.
    """

    agreed: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        return all(self.agreed[part] == self.compared for part in PARTS)


class Mounted:
    """The files of a mount, and stand-ins for symbols that its kernel doesn't have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names = Counter(line.split()[2] for line in self.read("machine/kallsyms").splitlines())
        self._symbols = frozenset(names)
        blacklisted = [line.split("\t")[1] for line in self.read("kprobes/blacklist").splitlines()]
        self._stand_ins = {
            "0": "vfs_mkdir",
            "EINVAL": next(name for name in blacklisted if names[name] == 1),
        }
        ambiguous = next((name for name, count in names.items() if count > 1), None)
        if ambiguous is not None:
            self._stand_ins["EADDRNOTAVAIL"] = ambiguous
        self.has_ambiguous_names = ambiguous is not None

        self.write("machine/modules", f"load {MODULE}\n".encode(), "plain")

    def read(self, path: str) -> str:
        return (self.root / path).read_text(errors="surrogateescape")

    def messages(self) -> list[str]:
        """Return the kernel log without times."""
        return TIMESTAMP.sub("", self.read("machine/dmesg")).splitlines()

    def path(self, recorded: str) -> Path:
        """Return the path of a recorded kernel's file in the mount."""
        if recorded == OPTIMIZATION:
            return self.root / "kprobes/optimization"
        place, _, rest = recorded.partition("/")
        return self.root / PLACES.get(place, place) / rest

    def write(self, file: str, data: bytes, mode: str) -> str | int:
        """Write with one write(2); return 0 or the name of the errno. `mode`: "append" for O_APPEND."""
        flags = os.O_WRONLY | (os.O_APPEND if mode == "append" else 0)
        try:
            descriptor = os.open(self.path(file), flags)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return 0

    def reset(self) -> None:
        """Restore the state before each record: no events, no messages, and all probes armed."""
        (self.root / "kprobes/enabled").write_text("1")
        self._remove_triggers()
        (self.root / "tracing/events/enable").write_text("0")
        with open(self.root / "tracing/dynamic_events", "w"):
            pass
        with open(self.root / "tracing/error_log", "w"):
            pass

    def _remove_triggers(self) -> None:
        """Remove all triggers, because an event with a trigger cannot be removed.

        Truncation removes histograms, some of which cannot be removed by the line that they show.
        """
        for path in self.root.glob("tracing/events/kprobes/*/trigger"):
            path.write_bytes(b"")
            for line in reversed(path.read_text().splitlines()):
                if not line.startswith("#"):
                    self.write(str(path.relative_to(self.root)), f"!{line.split(' [')[0]}".encode(), "append")

    def prepare(self, step: Step) -> None:
        """Do one step of a record's preparation."""
        if isinstance(step, str):
            self.write("tracing/kprobe_events", _bytes(step), "append")
        else:
            file, text, mode = [*step, "plain"][:3]
            self.write(file, _bytes(text), mode)

    def stand_in(self, record: Record) -> tuple[str, str] | None:
        """Return a symbol of the record that this kernel lacks, and the symbol that stands in for it. Return
        None if no symbol needs a stand-in.
        """
        in_module = IN_MODULE.search(record["bytes"])
        if in_module is not None and not any(PENDING in message for message in record["kmsg"]):
            module, name = in_module.groups()
            return f"{module}:{name}", f"{MODULE}:{MODULE_STAND_INS.get(str(record['errno']), name)}"
        for name in DEFINITION.findall(record["bytes"]):
            answer = str(record["errno"])
            if name not in self._symbols and answer in self._stand_ins:
                return name, self._stand_ins[answer]
        return None


def _lacks_ambiguous_names(mounted: Mounted, record: Record) -> bool:
    return record["errno"] == "EADDRNOTAVAIL" and not mounted.has_ambiguous_names


def _collides_with_static_event(mounted: Mounted, record: Record) -> bool:
    """Return True if the name collides with an event of the recorded kernel that this kernel lacks."""
    named = DEFINED.search(record["bytes"])
    if record["errno"] != "EEXIST" or record["setup"] or named is None:
        return False
    return not mounted.path(f"tracing/events/{named[1]}/{named[2]}").exists()


def _chooses_missing_tracer(mounted: Mounted, record: Record) -> bool:
    chosen = record["bytes"].strip()
    is_tracer = record["file"] == "tracing/current_tracer" and record["errno"] == 0
    return is_tracer and chosen not in mounted.read("tracing/available_tracers").split()


def _is_missing_kind(mounted: Mounted, record: Record) -> bool:
    """Return True if the record defines a kind of event that this kernel's README does not name.

    The first letter of the definition is the kind.
    """
    pattern = EVENT_KINDS.get(record["bytes"][:1])
    of_kind = record["file"] == "tracing/dynamic_events" and pattern is not None
    return of_kind and str(pattern) not in mounted.read("tracing/README")


def _is_histogram(mounted: Mounted, record: Record) -> bool:
    is_trigger = record["file"].endswith("/trigger")
    return is_trigger and "hist" in record["bytes"] and "hist:keys" not in mounted.read("tracing/README")


def _names_static_event(mounted: Mounted, record: Record) -> bool:
    return (
        re.search(r"[: ]sched[:.]", record["bytes"]) is not None
        and not mounted.path("tracing/events/sched").exists()
    )


EXEMPTIONS: dict[str, Callable[[Mounted, Record], bool]] = {
    "ambiguous symbol names": _lacks_ambiguous_names,
    "kinds of events": _is_missing_kind,
    "static events": _collides_with_static_event,
    "events of the scheduler": _names_static_event,
    "histograms": _is_histogram,
    "other tracers": _chooses_missing_tracer,
}
"""Name of an area that this kernel lacks -> test whether a record belongs to the area.

The answers to such records differ from Linux's. docs/reference/compatibility.md lists the areas.
"""


def exemption(mounted: Mounted, record: Record) -> str | None:
    """Return the reason why a record cannot be compared, or None if the record can be compared."""
    return next((reason for reason, applies in EXEMPTIONS.items() if applies(mounted, record)), None)


def replay(mounted: Mounted, record: Record) -> Answer | None:
    """Return the mount's answer, with the recorded kernel's names; None if the mount lacks the file."""
    swap = mounted.stand_in(record)
    text = record["bytes"].replace(*swap) if swap else record["bytes"]
    mounted.reset()
    for step in [*record["setup"], *_carried_over(record)]:
        mounted.prepare(step)
    if not mounted.path(record["file"]).exists():
        return None
    told = len(mounted.messages())
    result = mounted.write(record["file"], _bytes(text), record["mode"])
    log, events = mounted.read("tracing/error_log"), mounted.read("tracing/kprobe_events")
    if swap:
        log, events = _back(log, swap), _renamed(events, swap)
    return Answer(result, log, events, None if swap else mounted.messages()[told:])


def _carried_over(record: Record) -> list[Step]:
    """Return the steps that set the sysctl to the value that it had before the recorded write.

    The write that set this value may not be replayed. The value follows from the message that Linux logged.
    """
    changed = [message for message in record["kmsg"] if "jump-optimization" in message]
    return [[record["file"], "0" if "enabled" in changed[0] else "1"]] if changed else []


def _bytes(text: str) -> bytes:
    return text.encode("latin-1") if all(ord(c) < 256 for c in text) else text.encode()


def _renamed(events: str, swap: tuple[str, str]) -> str:
    """Replace the stand-in by the recorded symbol, also in names that Linux makes from the symbol.

    `swap`: (recorded symbol, stand-in).
    """
    name, stand_in = swap
    return events.replace(stand_in, name).replace(stand_in.replace(":", "_"), name.replace(":", "_"))


def _back(log: str, swap: tuple[str, str]) -> str:
    """Replace the stand-in in a log by the recorded symbol, and shift carets that are to the right of it.

    `swap`: (recorded symbol, stand-in).
    """
    name, stand_in = swap
    shift = len(name) - len(stand_in)
    lines = log.split("\n")
    for at, line in enumerate(lines):
        if stand_in not in line:
            continue
        where = line.index(stand_in)
        lines[at] = line.replace(stand_in, name)
        caret = lines[at + 1] if at + 1 < len(lines) else ""
        if caret.strip() == "^" and caret.index("^") > where:
            lines[at + 1] = " " * (caret.index("^") + shift) + "^"
    return "\n".join(lines)


def _is_comparable(part: str, record: Record, answer: Answer) -> bool:
    """Return True if this part of the answer can be compared.

    The log cannot be compared if a stand-in was used, or if Linux reports that it cannot make an event's
    directory. kprobefs finds such a directory before it makes the event, or has no such directory.
    """
    told_of_directory = any("directory" in message for message in record["kmsg"])
    return part != "kmsg" or not (answer.kmsg is None or told_of_directory)


def normal(part: str, text: str | int | list[str]) -> str:
    """Return `text` without timestamps and hashed pointers, which differ from boot to boot.

    `part`: name of the part of the answer, such as error_log.
    """
    if part == "error_log":
        return TIMESTAMP.sub("", str(text))
    return HASHED_ADDRESS.sub("0x(address)", str(text)) if part == "kprobe_events" else str(text)


def compare(mounted: Mounted, records: Iterable[Record]) -> Tally:
    """Replay the records that can be compared, and return the counts."""
    tally = Tally()
    for record in records:
        reason = exemption(mounted, record)
        answer = None if reason else replay(mounted, record)
        if answer is None:
            tally.skipped[reason or record["file"]] += 1
            continue
        tally.compared += 1
        for part in PARTS:
            expected, got = normal(part, record[part]), normal(part, getattr(answer, part))
            if not _is_comparable(part, record, answer):
                expected = got
            tally.agreed[part] += expected == got
            if expected != got:
                tally.differences.append(
                    f"#{record['id']} {record['file']} {record['bytes'][:60]!r}, {record['setup']!r:.80}\n"
                    f"  {part}: Linux {expected!r:.300}\n  {part}: here  {got!r:.300}"
                )
    mounted.reset()
    return tally


def load(path: Path) -> list[Record]:
    """Return the recorded writes."""
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def main() -> int:
    """Run the comparison that the command line selects; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sections", default="", help="only these, separated by commas")
    parser.add_argument(
        "--first", type=int, default=10, metavar="N", help="differences to list (default: 10)"
    )
    options = parser.parse_args()
    root = os.environ.get("KPROBEFS")
    if root is None:
        return _in_a_mount()
    sections = set(filter(None, options.sections.split(",")))
    records = [r for r in load(options.file) if not sections or r["section"] in sections]
    tally = compare(Mounted(Path(root)), records)
    for part in PARTS:
        print(f"{part}: agree {tally.agreed[part]} of {tally.compared}")
    if tally.skipped:
        skipped = ", ".join(f"{name} ({count})" for name, count in sorted(tally.skipped.items()))
        print(f"not in this kernel: {skipped}")
    for difference in tally.differences[: options.first]:
        print(difference)
    return 0 if tally.perfect else 1


def _in_a_mount() -> int:
    command = [sys.executable, "-m", "kprobefs", "run", "--", sys.executable, *sys.argv]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
