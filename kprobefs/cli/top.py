"""`kprobefs top`: a live view of a mount's probes: rates, costs, and why a probe is not in a better mode.

The screen shows the list of the probes, the close-up of one opened probe, or the keys.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emulated_kernel.util.fast_dataclass import asdict, dataclass, field, replace
from kprobefs.common import mountpoints, terminal
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.mountpoints import MountState
from kprobefs.definitions.tracefs_files import control_root

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.text import Text

PROBES = "machine/probes"
"""File of the mount with a JSON object for each probe."""
COST_AGE = 10.0
"""Seconds after which a probe's cost is measured again. A measurement stops the kernel for a moment."""
RECORDS = 500
"""Number of the newest trace lines that are searched for the records of the probe in the close-up."""
HELP = "q quit  up/down choose  enter open  e enable  o optimize  s sort  r reverse"
BACK = "q quit  escape back  up/down scroll  e enable  o optimize"
MAX_LINES = 1 << 20
"""Number of lines by which the keys home and end move; more than a list or close-up can have."""
MORE_KEYS = "? all keys"
"""Last words of the line of keys if the terminal is too narrow to name all keys."""
KEYS = (
    ("q", "quit"),
    ("up down, j k", "choose or scroll"),
    ("pgup pgdn", "by a screen; home, end"),
    ("enter", "open it"),
    ("escape", "back to the list"),
    ("e", "enable or disable it"),
    ("o", "optimize it, or not"),
    ("s", "sort by the next column"),
    ("r", "reverse the order"),
    ("?", "these keys"),
)
UNANSWERED = (MountState.HUNG, MountState.BUSY)
"""States of a mount in which a request to it would block."""
REASON_LINES = 3
"""Maximum number of lines for the reason of a probe's mode, below the list or in the close-up."""
INSN_LINES = 6
"""Maximum number of lines into which the close-up breaks the instructions of one line of the file `bytes`."""
MODE_COLOURS = {"optimized": "green", "ftrace": "green", "boosted": "cyan", "int3": "yellow", "gone": "red"}


@dataclass(frozen=True)
class Probe:
    """A probe event, with the fields of its line in machine/probes."""

    event: str
    """Name of the event, as group/name."""
    mode: str
    enabled: bool
    optimized: bool
    hits: int
    nmissed: int
    reason: str
    rate: float | None = None
    """Hits per second since the last update, or None if the rate is not known."""
    cost: float | None = None
    """Cost of a hit in nanoseconds, or None if it was not measured."""
    asked: str = ""

    @property
    def shown_cost(self) -> str:
        """The cost of a hit with its unit, or "" if it is not known."""
        if self.cost is None:
            return ""
        return f"{self.cost:.1f} ns" if self.cost < 1000 else f"{self.cost / 1000:.1f} us"

    @property
    def directory(self) -> str:
        """Path of the directory with the probe's files, relative to the root of the mount."""
        return f"kprobes/stats/{self.event}"


SORTS: dict[str, Callable[[Probe], tuple[float | str, ...]]] = {
    "rate": lambda probe: (-(probe.rate or 0.0), -probe.hits, probe.event),
    "hits": lambda probe: (-probe.hits, probe.event),
    "missed": lambda probe: (-probe.nmissed, probe.event),
    "mode": lambda probe: (probe.mode, probe.event),
    "event": lambda probe: (probe.event,),
}


class Probes:
    """Reads and switches the probes of one mount; each call of look() makes one request."""

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = Path(directory)
        self._control_root = control_root(directory)
        self._clock = clock
        self._before: dict[str, int] = {}
        self._looked = clock()
        self._costs: dict[str, tuple[float, str, str]] = {}
        self._last: list[Probe] = []
        self.answers = True
        """Whether the mount answered at the last call of condition().

        While it is False, no requests are made, because they would block.
        """

    def condition(self) -> MountState:
        """Return the state of the mount, and update `answers`. Raises: CliError (the mount is stale)."""
        found = mountpoints.condition(str(self.directory))
        if found is MountState.STALE:
            raise mountpoints.unanswered(str(self.directory), found)
        self.answers = found not in UNANSWERED
        return found

    def look(self) -> list[Probe]:
        """Read and return the current probes.

        If the mount does not answer, return those that were read last, without rates.
        Raises: CliError (the mount is gone or has no machine/probes).
        """
        if not self.answers:
            self._before = {}
            return [replace(probe, rate=None) for probe in self._last]
        try:
            lines = (self._control_root / PROBES).read_text("utf-8", "surrogateescape").splitlines()
        except FileNotFoundError:
            if mountpoints.mounted_on(str(self.directory)) is None:
                raise CliError(
                    f"{self.directory}: kprobefs isn't mounted there any more", ExitStatus.NOT_MOUNTED
                ) from None
            raise CliError(
                f"{self.directory}: no {PROBES} with --kprobes kernel; mount with --kprobes kprobefs"
            ) from None
        now = self._clock()
        passed = now - self._looked
        self._looked = now
        found = [Probe(**json.loads(line)) for line in lines]
        before = self._before
        self._before = {probe.event: probe.hits for probe in found}
        self._last = [
            replace(probe, rate=_rate_since(before.get(probe.event), probe.hits, passed)) for probe in found
        ]
        return self._last

    def with_cost(self, probe: Probe) -> Probe:
        """Return the probe with its cost, measured again after COST_AGE seconds or a change of the mode."""
        when, mode, cost = self._costs.get(probe.event, (-COST_AGE, "", ""))
        if self.answers and (self._clock() - when >= COST_AGE or mode != probe.mode):
            cost = self.text(probe, "cost").partition("\n")[0]
            self._costs[probe.event] = self._clock(), probe.mode, cost
        return replace(probe, cost=_median(cost))

    def text(self, probe: Probe, name: str) -> str:
        """Return the content of the probe's file `name`, or "" if it is gone or the mount does not answer."""
        with suppress(OSError):
            if not self.answers:
                return ""
            return (self._control_root / probe.directory / name).read_text("utf-8", "surrogateescape")
        return ""

    def toggle(self, probe: Probe, name: str) -> str:
        """Invert the content of the probe's file `name`, which is `enabled` or `optimized`.

        Return an error message, or "" if the write has succeeded.
        """
        value = "0" if (probe.enabled if name == "enabled" else probe.optimized) else "1"
        if not self.answers:
            return f"{probe.event}: {name} {value}: the mount does not answer"
        try:
            (self._control_root / probe.directory / name).write_text(value)
        except OSError as error:
            return f"{probe.event}: {name} {value}: {error.strerror}"
        return ""

    def records(self, probe: Probe, count: int) -> list[str]:
        """Return the newest `count` trace lines of the probe, except those of hits by this process."""
        name = probe.event.rpartition("/")[2]
        with suppress(OSError):
            if not self.answers:
                return []
            tracing = (
                self._control_root / "tracing" if self._control_root == self.directory else self.directory
            )
            lines = (tracing / "trace").read_text("utf-8", "surrogateescape").splitlines()
            # Requests of this process are traced too.
            others = (line for line in lines[-RECORDS:] if f"-{os.getpid()} " not in line.partition(": ")[0])
            return [line.strip() for line in others if f": {name}: " in line][-count:]
        return []


def _rate_since(before: int | None, hits: int, passed: float) -> float | None:
    """Return the hits per second, or None if there is no earlier count or if the count was reset.

    `before`: the earlier count. `hits`: the current count. `passed`: seconds between the two counts.
    """
    return None if before is None or hits < before else (hits - before) / max(passed, 1e-3)


def _median(text: str) -> float | None:
    """Return the median in nanoseconds in a line of the file `cost`, or None if the line has none."""
    before, found, after = text.partition("median ")
    return float(after.split()[0]) if found and before else None


@dataclass
class View:
    """State of the screen: the order of the list, the selection, the messages and the probes."""

    sort: str = "rate"
    is_reversed: bool = False
    chosen: int = 0
    opened: str = ""
    """Name of the event whose close-up is shown, or "" if the list is shown."""
    scrolled: int = 0
    """Number of lines of the close-up's code that are above the screen."""
    shows_keys: bool = False
    message: str = ""
    condition: str = ""
    """Message about the state of the mount, or "" if the mount answers normally."""
    page: int = 1
    """Number of rows of the list, or of lines of the close-up's code, that fit on the screen."""
    probes: list[Probe] = field(default_factory=list)

    def show(self, probes: Sequence[Probe]) -> None:
        """Store `probes`, which Probes.look() returned, in the order of the list.

        If the list has become too short for the cursor, move the cursor to the last row. If the probe of the
        close-up is gone, show the list and a message.
        """
        self.probes = sorted(probes, key=SORTS[self.sort], reverse=self.is_reversed)
        self._choose(self.chosen)
        if self.opened and all(probe.event != self.opened for probe in self.probes):
            self.message = f"{self.opened} has gone"
            self.opened = ""

    def _choose(self, number: int) -> None:
        self.chosen = max(0, min(number, len(self.probes) - 1))

    @property
    def selected(self) -> Probe | None:
        """The probe of the close-up, else the probe under the cursor; None if there are no probes."""
        for number, probe in enumerate(self.probes):
            if probe.event == self.opened or (not self.opened and number == self.chosen):
                return probe
        return None

    def _move(self, rows: int) -> None:
        """Move the selection by `rows` rows, or scroll the code in the close-up by `rows` lines."""
        if self.opened:
            self.scrolled = max(0, self.scrolled + rows)
        else:
            self._choose(self.chosen + rows)

    def press(self, key: str, probes: Probes) -> bool:
        """Execute the command of a key; return False if the command ends the program.

        `key`: "" if no key was pressed.
        """
        self.message = "" if key else self.message
        if key and self.shows_keys:
            self.shows_keys = False
            return True
        match key:
            case "q":
                return False
            case "?":
                self.shows_keys = True
            case "escape":
                self.opened = ""
            case "up" | "k":
                self._move(-1)
            case "down" | "j":
                self._move(1)
            case "page up":
                self._move(-self.page)
            case "page down":
                self._move(self.page)
            case "home":
                self._move(-MAX_LINES)
            case "end":
                self._move(MAX_LINES)
            case "s":
                names = list(SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "\n" if self.selected is not None:
                self.opened = self.selected.event
                self.scrolled = 0
            case "e" | "o" if self.selected is not None:
                self.message = probes.toggle(self.selected, "enabled" if key == "e" else "optimized")
        return True


def table(view: View, probes: Probes, width: int, height: int) -> Group:
    """Return the screen with the list of probes, `width` columns by `height` lines.

    A narrow screen has fewer columns of the list.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # On a narrow screen the column is missing or cut, so the reason is also below the list.
    why = view.selected.reason.partition("\n")[0] if view.selected is not None else ""
    reason = wrap_lines(
        f"reason  {escape_for_terminal(why)}" if why else "", width, min(REASON_LINES, max(1, height // 6))
    )
    rows = max(1, height - 3 - len(reason))
    view.page = rows
    first = max(0, view.chosen - rows + 1)
    grid = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    grid.add_column("EVENT", no_wrap=True)
    grid.add_column("MODE", no_wrap=True, width=9)
    grid.add_column("HITS/S", justify="right", no_wrap=True, width=8)
    if width >= 50:
        grid.add_column("HITS", justify="right", no_wrap=True, width=9)
    if width >= 60:
        grid.add_column("MISSED", justify="right", no_wrap=True, width=6)
    if width >= 72:
        grid.add_column("COST", justify="right", no_wrap=True, width=9)
    if width >= 90:
        grid.add_column("REASON", no_wrap=True, overflow="ellipsis", ratio=4)
    room = max(8, width - 1 - sum(1 + (column.width or 0) for column in grid.columns[1:]))
    if width >= 90:
        room = room * 3 // 7
    grid.columns[0].width = room
    for number, probe in enumerate(view.probes[first : first + rows], first):
        told = probes.with_cost(probe) if width >= 72 else probe
        mode = Text(probe.mode.partition("\n")[0], style=MODE_COLOURS.get(probe.mode, "dim"))
        cells: list[RenderableType] = [
            Text(_middle_cut(escape_for_terminal(probe.event), room)),
            mode,
            _rate(probe),
            str(probe.hits),
            str(probe.nmissed),
            told.shown_cost,
        ]
        cells.append(Text(escape_for_terminal(probe.reason.partition("\n")[0])))
        grid.add_row(*cells[: len(grid.columns)], style="reverse" if number == view.chosen else "")
    order = f"{view.sort}{' reversed' if view.is_reversed else ''}"
    head = Text(
        f"{len(view.probes)} probes by {order}  {escape_for_terminal(str(probes.directory))}", style="bold"
    )
    head.truncate(width, overflow="ellipsis")
    body: RenderableType = grid if view.probes else Text("no probes: echo 'p:reads vfs_read' > kprobe_events")
    return Group(head, body, *reason, _foot(view, HELP, width))


def wrap_lines(text: str, width: int, max_lines: int, indent: str = "") -> list[Text]:
    """Wrap a text to at least one line and at most `max_lines` lines of at most `width` characters.

    Cut a longer text, and end it with "…".

    `indent`: start of the first line. Further lines begin with `indent` and two blanks; if it is "", no line
    is indented.
    """
    from textwrap import wrap

    from rich.text import Text

    further = f"{indent}  " if indent else ""
    lines = wrap(
        text, width, max_lines=max_lines, placeholder=" …", initial_indent=indent, subsequent_indent=further
    )
    return [Text(line) for line in lines or [""]]


def _middle_cut(name: str, width: int) -> str:
    """Shorten a name to `width` by cutting out its middle, because names differ at their ends."""
    before = (width - 1) // 3
    return name if len(name) <= width else f"{name[:before]}…{name[before + 1 - width :]}"


def closeup(view: View, probe: Probe, probes: Probes, width: int, height: int) -> Group:
    """Return the screen with the close-up of a probe: its bytes, code out of line, and latest records."""
    from rich.console import Group
    from rich.text import Text

    told = probes.with_cost(probe)
    speed = f"{_rate(probe)}/s" if probe.enabled else "disabled"
    counts = f"{speed}  {probe.hits} hits  {probe.nmissed} missed"
    head = wrap_lines(f"{escape_for_terminal(probe.event)}  {probe.mode}  {counts}", width, 2)
    for line in head:
        line.stylize("bold")
    why = escape_for_terminal(probe.reason.partition("\n")[0]) or "none: it is in the best mode"
    lines = [*head, Text(f"cost    {told.shown_cost or 'not measured'}")]
    lines += wrap_lines(f"reason  {why}", width, REASON_LINES if height > 16 else 2)
    lines += marked_bytes(probes.text(probe, "bytes"), width)
    detour = [_instruction(line, width) for line in probes.text(probe, "detour").splitlines()]
    records = probes.records(probe, max(1, (height - 8) // 3))
    records = records or [f"none: they are made while tracing/events/{probe.event}/enable is 1"]
    recorded: list[Text] = []
    for record in reversed(records):
        record_lines = wrap_lines(escape_for_terminal(record), width, 3, "  ")
        if not recorded or len(recorded) + len(record_lines) <= (height - 8) // 3:
            recorded = [*record_lines, *recorded]
    room = height - len(lines) - len(recorded) - 3
    if room > 0:
        view.page = room
        view.scrolled = min(view.scrolled, max(0, len(detour) - room))
        last = view.scrolled + room
        title = "runs out of line"
        if len(detour) > room:
            title = f"{title}, lines {view.scrolled + 1} to {last} of {len(detour)} (up, down)"
        lines += [Text(title, style="bold"), *map(_code_line, detour[view.scrolled : last])]
    lines.append(Text("last records", style="bold"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines[: height - 1 - len(recorded)], *recorded, _foot(view, BACK, width))


def _code_line(line: str) -> Text:
    from rich.text import Text

    # The title of a part ends with a colon.
    return Text(f"  {escape_for_terminal(line)}", style="bold" if line.endswith(":") else "")


def _instruction(line: str, width: int) -> str:
    """Return a line of the file `detour` for a screen of `width` columns.

    A narrow screen gets neither the bytes of the instruction nor the upper halves of addresses.
    """
    return line if width >= 80 else re.sub(r"^0x(?:ffffffff)?(\w+): (?:[0-9a-f]{2} )+ *", r"\1: ", line)


def keys(width: int, height: int) -> Group:
    """Return the screen that explains the keys."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"{key:<12}  {what}"[:width]) for key, what in KEYS]
    return Group(
        Text("keys of kprobefs top", style="bold"),
        *lines[: height - 2],
        _foot(View(), "any key goes back", width),
    )


def marked_bytes(text: str, width: int) -> list[Text]:
    """Return the lines of a file `bytes`; each current byte that differs from the original is marked.

    Instructions that do not fit after their bytes within `width` columns have lines of their own.
    """
    from rich.text import Text

    found = []
    original = []
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        marked = Text(f"{kind:<8}")
        code, _, insns = rest.strip().partition("  ")
        data = code.split()
        if kind == "original":
            original = data
        for number, byte in enumerate(data):
            patched = kind == "current" and original[number : number + 1] != [byte]
            marked.append(f"[{byte}]" if patched else f" {byte} ", style="bold red" if patched else "")
        shown = escape_for_terminal(insns)
        found.append(marked)
        if shown and len(marked) + 2 + len(shown) <= width:
            marked.append(f"  {shown}", style="dim")
        elif shown:
            further = wrap_lines(f"  {shown}", width, INSN_LINES, "  ")
            for each in further:
                each.stylize("dim")
            found += further
    return found


def _rate(probe: Probe) -> str:
    """Return a probe's rate as text: "-" if it is not known, "off" if the probe is disabled."""
    rate = probe.rate
    if not probe.enabled or rate is None:
        return "-" if probe.enabled else "off"
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}" if rate < 1e6 else f"{rate / 1e6:.1f}M"


def _foot(view: View, keys: str, width: int) -> Text:
    from rich.text import Text

    if said := view.message or view.condition:
        line = Text(said, style="red")
        line.truncate(width, overflow="ellipsis")
        return line
    if len(keys) > width:
        while len(keys) + 2 + len(MORE_KEYS) > width and "  " in keys:
            keys = keys.rpartition("  ")[0]
        keys = f"{keys}  {MORE_KEYS}"
    return Text(keys, style="dim")


def picture(view: View, probes: Probes, console: Console) -> Group:
    """Return the content of the whole screen: the list, a close-up or the keys."""
    width, height = console.size
    if view.shows_keys:
        return keys(width, height)
    if view.opened and view.selected is not None and probes.answers:
        return closeup(view, view.selected, probes, width, height)
    return table(view, probes, width, height)


def top(directory: str, delay: float, count: int | None, *, as_json: bool) -> None:
    """Show the probes every `delay` seconds until the key `q` is pressed, or for `count` updates.

    Without a terminal, print text.

    `count`: number of updates; None: no limit, but one if text or JSON is printed. `as_json`: print each
    update as JSON, even on a terminal.
    Raises: CliError (the mount is gone, does not answer, or has no machine/probes).
    """
    probes = Probes(directory)
    view = View()
    if as_json or not terminal.is_interactive(sys.stdout) or not sys.stdin.isatty():
        for number in range(count or 1):
            if number:
                time.sleep(delay)
            condition = probes.condition()
            if condition in UNANSWERED:
                raise CliError(
                    f"{directory}: the mount is {condition.value}; see kprobefs status", condition.status
                )
            view.show(probes.look())
            found = [probes.with_cost(probe) for probe in view.probes]
            print(json.dumps([asdict(probe) for probe in found]) if as_json else plain(found), flush=True)
        return
    _live(probes, view, delay, count)


def plain(found: Sequence[Probe]) -> str:
    """Return a text table with a line for each probe."""
    head = ("EVENT", "MODE", "HITS/S", "HITS", "MISSED", "COST", "REASON")
    rows = [head, *(_cells(probe) for probe in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(probe: Probe) -> tuple[str, ...]:
    counts = str(probe.hits), str(probe.nmissed)
    words = probe.event, probe.mode, _rate(probe), *counts, probe.shown_cost or "-"
    return tuple(escape_for_terminal(word.partition("\n")[0]) for word in (*words, probe.reason or "-"))


def _condition_text(condition: MountState) -> str:
    """Return the message about the state of a mount, or "" if the mount has no problem."""
    if condition.status is ExitStatus.OK:
        return ""
    return f"{condition.value}: see kprobefs status" if condition in UNANSWERED else condition.value


def _live(probes: Probes, view: View, delay: float, count: int | None) -> None:
    from rich.live import Live

    console = terminal.console()
    with terminal.keyboard(), Live(console=console, screen=True, auto_refresh=False) as live:
        shown_times = 0
        while count is None or shown_times < count:
            view.condition = _condition_text(probes.condition())
            view.show(probes.look())
            live.update(picture(view, probes, console), refresh=True)
            shown_times += 1
            until = time.monotonic() + delay
            size = os.get_terminal_size()
            while (left := until - time.monotonic()) > 0:
                pressed = terminal.key(min(left, 0.25))
                if not view.press(pressed, probes):
                    return
                if pressed in ("e", "o"):
                    break
                if pressed or size != os.get_terminal_size():
                    view.show(view.probes)
                    live.update(picture(view, probes, console), refresh=True)
                    size = os.get_terminal_size()
