"""Screens of the program's commands in tmux: nothing is cut off, and the terminal wraps no line."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kprobefs.cli import tour
from kprobefs.cli.top import BACK, KEYS, MORE_KEYS, SORTS
from kprobefs.measure import bench
from tests.fuse.conftest import mount_point
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, ROOT, Daemon, daemon, eventually, needs_fuse

pytestmark = [
    needs_fuse,
    pytest.mark.mounted,
    pytest.mark.skipif(not shutil.which("tmux"), reason="tmux isn't installed"),
]

SIZES = [(80, 24), (60, 20), (40, 12)]
LONG = "a_name_so_long_that_it_takes_half_a_line"
EVENTS = f"p:reads vfs_read\np:{LONG}_1 vfs_write\np:{LONG}_2 vfs_open\np:inside ksys_read+5\n"
LEAVE = "any key goes back"
REDRAWN = 0.25
"""Maximum seconds until top sees that its terminal's size has changed."""


_eventually = partial(eventually, interval=0.02)
"""eventually() for conditions that read the screen, which takes a process each time."""


class Screen:
    """A program on a terminal that tmux draws."""

    def __init__(self, server: str, columns: int, rows: int, *command: str, **more: str) -> None:
        variables = {"PYTHONPATH": str(ROOT), "NO_COLOR": "", "TERM": "tmux-256color"} | more
        words = [
            "env",
            "-u",
            "COLUMNS",
            "-u",
            "LINES",
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        size = ("-x", str(columns), "-y", str(rows))
        self._tmux = ("tmux", "-L", server, "-f", "/dev/null")
        started = ("new-session", "-d", "-P", "-F", "#{pane_id}", *size, shlex.join([*words, *command]))
        options = (
            "set-option",
            "-g",
            "remain-on-exit",
            "on",
            ";",
            "set-option",
            "-g",
            "remain-on-exit-format",
            "",
        )
        self._pane = self._run(*options, ";", "set-option", "-g", "status", "off", ";", *started).strip()

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words], check=True, capture_output=True, text=True, timeout=PATIENCE
        ).stdout

    def press(self, *keys: str) -> None:
        self._run("send-keys", "-t", self._pane, *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-t", self._pane, "-x", str(columns), "-y", str(rows))

    def lines(self, *options: str) -> list[str]:
        return self._run("capture-pane", "-p", "-t", self._pane, *options).rstrip("\n").split("\n")

    def wraps(self, *options: str) -> bool:
        """Return True if the terminal has wrapped any line that the program wrote.

        `options`: further options of tmux's capture-pane.
        """
        columns = int(self._run("display-message", "-p", "-t", self._pane, "#{pane_width}"))
        # Read the screen once: a program that redraws shows another picture at the next read.
        return any(len(line.rstrip()) > columns for line in self.lines(*options, "-J"))

    def fits(self, columns: int, rows: int, check: Callable[[list[str]], None]) -> None:
        """Change the screen's size. Wait until `check` accepts the lines, and the terminal wraps none of
        them.

        `check`: function that raises AssertionError for wrong lines.
        """
        self.resize(columns, rows)
        # Usually, the picture of the old size is gone by then.
        time.sleep(2 * REDRAWN)
        why = ""

        def is_drawn() -> bool:
            nonlocal why
            lines = self.lines()
            try:
                check(lines)
                assert not self.wraps()
            except AssertionError as error:
                why = "\n".join([str(error), *lines])
                return False
            return True

        _eventually(is_drawn, lambda: why)

    def said(self) -> str:
        """Return all words that the program has written since its start, without line breaks."""
        return words_of(self.lines("-S", "-"))

    def has_said(self, words: str, times: int) -> bool:
        """Return True if the program has written `words` exactly `times` times."""
        return self.said().count(words) == times

    def kill(self) -> None:
        """Remove the pane, and end the program if it still runs."""
        self._run("kill-pane", "-t", self._pane)

    def until(self, pattern: str) -> list[str]:
        """Wait until the screen matches `pattern`, and return its lines."""
        lines: list[str] = []

        def matches() -> bool:
            nonlocal lines
            lines = self.lines()
            return bool(re.search(pattern, "\n".join(lines)))

        _eventually(matches, lambda: "\n".join([f"no {pattern}:", *lines]))
        return lines

    def ended(self) -> list[str]:
        """Wait until the program has ended, and return the lines of the screen."""
        _eventually(lambda: self._run("display-message", "-p", "-t", self._pane, "#{pane_dead}") == "1\n")
        return self.lines()


@pytest.fixture(scope="module")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def mounted(runtime_directory: Path) -> Iterator[Daemon]:
    with (
        pytest.MonkeyPatch.context() as patched,
        mount_point() as directory,
    ):
        patched.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(runtime_directory))
        with daemon(directory, program=REAL_PROGRAM, is_shared=True) as running:
            Path(running.path("kprobe_events")).write_text(EVENTS)
            Path(running.path("tracing/events/kprobes/reads/enable")).write_text("1")
            Path(running.path("scratch/f")).write_text("hello\n")
            Path(running.path("scratch/f")).read_text()
            yield running


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the name of a tmux server that only these tests use. The server keeps running without panes, so
    that a client that connects later does not fail.
    """
    name = f"kprobefs-{time.monotonic_ns()}"
    tmux = partial(subprocess.run, check=True, timeout=PATIENCE)
    tmux(
        ["tmux", "-L", name, "-f", "/dev/null", "start-server", ";", "set-option", "-s", "exit-empty", "off"]
    )
    yield name
    tmux(["tmux", "-L", name, "kill-server"])


Start = Callable[..., Screen]


@pytest.fixture
def start(server: str, runtime_directory: Path) -> Iterator[Start]:
    """Yield a function that starts the program on a terminal of a given size.

    The programs are killed after the test.
    """
    started: list[Screen] = []

    def screen(
        size: tuple[int, int], *words: str, program: Sequence[str] = REAL_PROGRAM, **more: str
    ) -> Screen:
        variables = {"KPROBEFS_RUNTIME_DIRECTORY": str(runtime_directory), **more}
        started.append(Screen(server, *size, *program, *words, **variables))
        return started[-1]

    yield screen
    for each in started:
        each.kill()


def words_of(lines: Sequence[str]) -> str:
    """Return the words of `lines`, joined by single blanks."""
    return " ".join(" ".join(lines).split())


def test_top(start: Start, mounted: Daemon) -> None:
    top = start(SIZES[0], "top", "-d", "0.2", str(mounted.directory))
    top.until("kprobes/reads .* ftrace")

    def check(lines: list[str]) -> None:
        assert lines[0].startswith("4 probes by rate  ")
        columns = {80: "HITS/S HITS MISSED COST", 60: "HITS/S HITS MISSED", 40: "HITS/S"}[size[0]]
        assert lines[1].split() == ["EVENT", "MODE", *columns.split()]
        # The two names differ only at their ends, which must be shown.
        assert sum(bool(re.match(r"kprob\S*half_a_line_[12] +disarmed ", line)) for line in lines) == 2
        assert any(re.match(r"kprobes/inside +\S+ +off", line) for line in lines)
        assert "enter open" in lines[-1] or MORE_KEYS in lines[-1]

    for size in SIZES:
        top.fits(*size, check)
    for name in (*list(SORTS)[1:], "rate reversed"):
        top.press("s", *(["r"] if "reversed" in name else []))
        top.until(rf"4 probes by {name}  ")
    top.press("?")
    lines = top.until(rf"keys of[^\0]*{LEAVE}")
    assert [line.split("  ")[0] for line in lines[1:-1]] == [key for key, _ in KEYS]
    assert words_of(lines) == words_of(["keys of kprobefs top", *(" ".join(key) for key in KEYS), LEAVE])
    top.press("x")
    top.until("4 probes")
    top.press("q")
    top.ended()


def test_an_opened_probe(start: Start, mounted: Daemon) -> None:
    top = start(SIZES[0], "top", "-d", "0.2", str(mounted.directory))
    top.until("EVENT")
    while (order := re.match(r"4 probes by \w+", top.lines()[0])) and order[0] != "4 probes by event":
        top.press("s")
        top.until(rf"^4 probes by (?!{order[0].split()[-1]} )")
    top.press("Down", "Down", "Down", "Enter")
    top.until("last records")

    def check(lines: list[str]) -> None:
        said = words_of(lines)
        assert re.match(r"kprobes/reads ftrace [\d.]+/s \d+ hits 0 missed cost ", said)
        assert "reason vfs_read: " in said
        assert said.count(" fentry site: ftrace calls the probe original ") == 1
        assert re.search(r"current ?\[e8\](\[\w\w\]){4}", said)
        assert re.search(r"-\d+ +\[000\].* reads: \(vfs_read\+0x0/0x\w+\)", said)
        # No instruction is cut.
        assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
        assert ("runs out of line" in said) == (size[0] > 40)
        assert lines[-1] == BACK or lines[-1].endswith(MORE_KEYS)

    for size in SIZES:
        top.fits(*size, check)
    top.press("q")
    top.ended()


@pytest.mark.parametrize("size", SIZES)
def test_status(start: Start, mounted: Daemon, size: tuple[int, int]) -> None:
    more = {"TERM": "dumb"} if size[0] == 60 else {"NO_COLOR": "1"} if size[0] == 80 else {}
    status = start(size, "status", str(mounted.directory), **more)
    head, row, *further = status.ended()
    assert not status.wraps()
    assert head.split() == ["STATE", "DIRECTORY", "PID", "KERNEL", "PROFILE", "SINCE"][: len(head.split())]
    directory = "".join([row.split()[1], *further]).replace(" ", "")
    assert (row.split()[0], directory) == ("serving", str(mounted.directory))
    assert str(mounted.process.pid) in row
    assert not further or size[0] == 40
    assert "PID" in head
    coloured = re.search(r"\x1b\[[\d;]*32m[^\n]*serving", "\n".join(status.lines("-e")))
    assert bool(coloured) == (not more)


@pytest.mark.parametrize("size", SIZES[::2])
def test_a_one_liner(start: Start, mounted: Daemon, size: tuple[int, int]) -> None:
    command = ("trace", "--mount", str(mounted.directory), "p:vfs_read count=$arg3", "--", "cat", "f")
    trace = start(size, *command)
    lines = trace.ended()
    assert not trace.wraps()
    said = words_of(lines)
    # The command's output and the records are shown in any order.
    assert "hello" in lines
    record = r"cat-\d+ \[000\] \.{5} [\d.]+: vfs_read: \(vfs_read\+0x0/0x\w+\) count=0x\w+"
    assert len(re.findall(record, said)) == 2
    assert all(line.startswith(("cat-", " ", "hello")) for line in lines)


ERRORS = {
    ("status", "/no/such/place"): "/no/such/place: kprobefs isn't mounted there",
    ("mount", "/etc/passwd"): "/etc/passwd: not a directory; use an empty directory",
    ("mount", "--cpus", "77", "/tmp"): "'77' is not a number from 1 to 64 (kprobefs mount --help)",
    (
        "trace",
        "p:vfs_read",
        "-o",
        "/dev/null",
        "nonsense",
        "--",
        "true",
    ): "'nonsense' is not a probe; use p:PLACE [NAME=ARGUMENT...], r:PLACE [...],",
}


def test_errors_are_broken_between_words(start: Start) -> None:
    screens = {words: start(SIZES[-1], *words) for words in ERRORS}
    for words, expected in ERRORS.items():
        said = words_of(screens[words].ended())
        assert said.startswith("kprobefs: ")
        assert expected in said
        assert not screens[words].wraps()


@pytest.mark.parametrize("size", SIZES)
def test_the_tour(start: Start, size: tuple[int, int]) -> None:
    """The tour shows the text and commands of all of its steps, and no line wraps, including lines that have
    scrolled off the screen.
    """
    walk = start(size, "tour")
    for number, step in enumerate(tour.STEPS, 1):
        if number < len(tour.STEPS):
            _eventually(partial(walk.has_said, tour.PROMPT.strip(), number), f"no prompt {number}")
        else:
            walk.ended()
        assert not walk.wraps("-S", "-")
        said = walk.said()
        shown = said[said.index(f"{number}/{len(tour.STEPS)} {step.title} {step.text} $ ") :]
        # A path may be longer than a line; a command continues after a backslash.
        shown = shown.replace(" \\ ", "").replace(" ", "")
        for command in step.commands:
            assert f"${command}".replace(" ", "") in shown
        walk.press("Enter")
    assert walk.said().endswith(tour.END)
    lines = walk.lines("-S", "-")
    records = [at for at, line in enumerate(lines) if "(vfs_read+0x" in line or "<- vfs_read" in line]
    assert len(records) >= 3
    assert all(lines[at].startswith("    ") for at in records)
    # With 80 columns, no command is broken into lines.
    assert size[0] < 80 or not any(line.endswith("\\") for line in lines)
    bytes_ = r"original [0-9a-f ]+ .*?current"
    assert re.search(rf"int3 {bytes_} cc .* optimized {bytes_} e9 ", walk.said())


@pytest.mark.parametrize("width", [40, 80, None])
def test_commands_of_the_tour_can_be_copied(width: int | None) -> None:
    for command in (command for step in tour.STEPS for command in step.commands):
        lines = list(tour.typed(command, width))
        assert lines[0].startswith("$ ")
        assert "\n".join(lines)[2:].replace(" \\\n   ", "") == command
        assert width != 80 or len(lines) == 1
        too_long = [line for line in lines if width is not None and len(line) > width]
        # A line may be too long only if it has a single word.
        assert all(len(line.strip("$ \\").split()) == 1 or "'" in line for line in too_long)


def test_progress_of_a_bench(start: Start) -> None:
    name, cases = "bench hit", len(bench.cases(bench.ARCHITECTURES[0]))
    shares = [f"{done / cases:4.0%}" for done in range(cases + 1)]
    for size, width in zip(SIZES, (30, 30, 21), strict=True):
        running = start(size, *name.split(), "--hits", "20000", "--rounds", "1")
        (line,) = running.until(rf"{name} \[#.*%")
        done = shares.index(line[-4:])
        assert line == f"{name} [{'#' * int(width * done / cases):<{width}}] {shares[done]}"
        running.press("C-c")
        # The line of progress is removed, although the terminal has written ^C after it.
        assert name not in "".join(running.ended())
