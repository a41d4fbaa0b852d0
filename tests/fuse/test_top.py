"""`kprobefs top`: rates, screens that fit the terminal, keys, details of a probe, and output to a pipe."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from emulated_kernel.util.fast_dataclass import replace
from kprobefs.cli.top import SORTS, Probe, Probes, View, marked_bytes, plain
from kprobefs.common import mountpoints, terminal
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import MountState
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.fuse.on_terminal import Terminal, drawn
from tests.sample import share

PROBE = {"mode": "optimized", "enabled": True, "optimized": True, "hits": 10, "nmissed": 1, "reason": ""}
SCREENS = [(width, height) for width in (20, 40, 50, 60, 72, 80, 132) for height in (5, 12, 24)]
"""Sizes of the screen: (number of columns, number of lines)."""


class Watched:
    """The files of a mount that top reads. The test writes these files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 0.0
        (directory / "machine").mkdir()
        self.probes = Probes(str(directory), lambda: self.now)

    def has(self, *probes: dict[str, object]) -> None:
        lines = [json.dumps(PROBE | probe) for probe in probes]
        (self.directory / "machine/probes").write_text("".join(f"{line}\n" for line in lines))
        for probe in probes:
            path = self.directory / "kprobes/stats" / str(probe["event"])
            path.mkdir(parents=True, exist_ok=True)
            (path / "cost").write_text("hits 5 median 12.5 ns in guest code\n")
            (path / "bytes").write_text("original 0f 1f 44 00 00  nop\ncurrent  e8 1f 8c ff 1e  call x\n")
            (path / "detour").write_text("".join(f"0x{line:x}: nop\n" for line in range(100)))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_rates_are_of_the_time_that_passed(watched: Watched) -> None:
    watched.has({"event": "g/a", "hits": 10})
    first = watched.probes.look()
    assert [probe.rate for probe in first] == [None]
    assert plain(first).split("\n")[1].split()[:4] == ["g/a", "optimized", "-", "10"]
    watched.now = 4.0
    watched.has({"event": "g/a", "hits": 30}, {"event": "g/new", "hits": 7})
    assert [probe.rate for probe in watched.probes.look()] == [5, None]
    watched.now = 5.0
    watched.has({"event": "g/a", "hits": 30}, {"event": "g/new", "hits": 0})
    # The second probe's count starts again from 0.
    assert [probe.rate for probe in watched.probes.look()] == [0, None]


def test_a_disabled_probe_is_told_from_one_that_nobody_hits(watched: Watched) -> None:
    watched.has({"event": "g/a", "enabled": False}, {"event": "g/b"})
    watched.probes.look()
    watched.now = 1.0
    found = watched.probes.look()
    assert [line.split()[:3] for line in plain(found).split("\n")[1:]] == [
        ["g/a", "optimized", "off"],
        ["g/b", "optimized", "0.0"],
    ]


@pytest.mark.parametrize(("width", "height"), share(SCREENS, 0, 4))
def test_a_picture_fits_the_screen(watched: Watched, width: int, height: int) -> None:
    watched.has(
        *(
            {"event": f"kprobes/{'long' * 9}{number}", "hits": 10**12, "reason": "why " * 40}
            for number in range(40)
        )
    )
    view = View()
    view.show(watched.probes.look())
    for key in ("", *["down"] * 39, "\n"):
        assert view.press(key, watched.probes)
        lines = drawn(view, watched.probes, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        if not view.opened and width >= 60:
            rows = sum(line.startswith("kprobes") for line in lines)
            assert {5: 1, 12: 7, 24: 18}[height] <= rows <= height - 4
            assert view.selected is not None
            number = re.sub(r".*\D", "", view.selected.event)
            assert any(re.match(rf"kprobes\S*\D{number} ", line) for line in lines)
    assert view.opened == view.probes[39].event


@pytest.mark.parametrize("width", [40, 80])
def test_the_chosen_probes_reason_is_shown(watched: Watched, width: int) -> None:
    why = "vfs_read+0x8 is reached by a jump from vfs_read+0x30"
    watched.has(
        {"event": "g/a", "hits": 9, "reason": ""},
        {"event": "g/b", "hits": 5, "reason": why},
        {"event": "g/c", "hits": 1, "reason": "other"},
    )
    view = View()
    found: list[str] = []
    view.show(watched.probes.look())
    for _ in range(3):
        lines = [line.rstrip() for line in drawn(view, watched.probes, width, 24)]
        assert lines[-1].startswith("q quit")
        found.append(" ".join(lines[5:-1]))
        view.press("down", watched.probes)
    assert found == ["", f"reason  {why}", "reason  other"]


def test_what_keys_do(watched: Watched) -> None:
    watched.has({"event": "g/b", "hits": 1}, {"event": "g/a", "hits": 9, "nmissed": 0})
    view, probes = View(), watched.probes
    for number in range(len(SORTS)):
        view.show(probes.look())
        names = [probe.event for probe in view.probes]
        assert names == (["g/b", "g/a"] if view.sort == "missed" else ["g/a", "g/b"]), number
        view.press("s", probes)
    assert view.sort == "rate"
    view.press("r", probes)
    view.show(probes.look())
    assert [probe.event for probe in view.probes] == ["g/b", "g/a"]
    view.press("down", probes)
    view.press("e", probes)
    assert (watched.directory / "kprobes/stats/g/a/enabled").read_text() == "0"
    shutil.rmtree(watched.directory / "kprobes/stats/g/a")
    view.press("o", probes)
    assert view.message == f"g/a: optimized 0: {os.strerror(errno.ENOENT)}"
    view.press("\n", probes)
    assert view.opened == "g/a"
    watched.has({"event": "g/b"})
    view.show(probes.look())
    assert (view.opened, view.message) == ("", "g/a has gone")
    assert view.press("?", probes)
    assert view.shows_keys
    assert view.press("q", probes)
    assert not view.shows_keys
    assert not view.press("q", probes)


def test_keys_go_through_a_long_list(watched: Watched) -> None:
    watched.has(*({"event": f"g/{number:02}"} for number in range(40)))
    view = View()
    view.show(watched.probes.look())
    drawn(view, watched.probes, 80, 12)
    assert view.page == 8
    for key, chosen in (
        ("page down", 8),
        ("page down", 16),
        ("page up", 8),
        ("home", 0),
        ("page up", 0),
        ("end", 39),
        ("page down", 39),
    ):
        view.press(key, watched.probes)
        assert view.chosen == chosen, key


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("\x1b[5~", "page up"),
        ("\x1b[6~", "page down"),
        ("\x1b[H", "home"),
        ("\x1bOF", "end"),
        ("\x1b[1~", "home"),
        ("\x1b[4~", "end"),
        ("\x1b[A", "up"),
        ("\x1bOB", "down"),
        ("\x1b", "escape"),
        ("\x1b[15;2~", "\x1b[15;2~"),
        ("q", "q"),
    ],
)
def test_keys_of_several_bytes(sent: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(reader, encoding="ascii") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(writer, sent.encode())
        assert terminal.key(PATIENCE) == name
        assert terminal.key(0) == ""
        os.close(writer)


def test_input_that_ends_within_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(reader, encoding="ascii") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(writer, b"\x1b[")
        os.close(writer)
        assert terminal.key(PATIENCE) == "\x1b["
        assert terminal.key(PATIENCE) == "q"


def test_a_stale_mount_is_asked_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountpoints, "conditions", lambda asked: {next(iter(asked)): states.pop()})
    states = [MountState.SERVING, MountState.STALE]
    with pytest.raises(CliError, match="its daemon is gone"):
        watched.probes.condition()
    assert states == [MountState.SERVING]


def test_a_list_of_no_probes_takes_all_keys(watched: Watched) -> None:
    watched.has()
    view = View()
    view.show(watched.probes.look())
    for key in ("down", "end", "page down", "home", "up", "\n", "e"):
        assert view.press(key, watched.probes)
        view.show(watched.probes.look())
        assert view.chosen == 0


def test_an_opened_probe(watched: Watched) -> None:
    watched.has({"event": "g/a", "mode": "ftrace", "reason": "why"})
    (watched.directory / "tracing").mkdir()
    records = [f"cat-7  [000] .....  {n}.000000: {'ab'[n % 2]}: (vfs_read+0x0/0x8) n={n}" for n in range(40)]
    (watched.directory / "tracing/trace").write_text("\n".join(records))
    view = View()
    view.show(watched.probes.look())
    assert view.press("\n", watched.probes)
    head, cost, reason, *lines = [line.rstrip() for line in drawn(view, watched.probes, 80, 24)]
    assert head == "g/a  ftrace  -/s  10 hits  1 missed"
    assert (cost, reason) == ("cost    12.5 ns", "reason  why")
    assert lines[:2] == ["original 0f  1f  44  00  00   nop", "current [e8] 1f [8c][ff][1e]  call x"]
    assert lines[2:14] == [
        "runs out of line, lines 1 to 11 of 100 (up, down)",
        *(f"  0x{line:x}: nop" for line in range(11)),
    ]
    assert lines[14:20] == ["last records", *(f"  {record}" for record in records[-10::2])]


def test_the_code_of_an_opened_probe_scrolls_to_its_end_and_no_further(watched: Watched) -> None:
    watched.has({"event": "g/a"}, {"event": "g/b"})
    view = View()
    view.show(watched.probes.look())
    assert view.press("\n", watched.probes)

    def shown() -> list[int]:
        lines = drawn(view, watched.probes, 80, 24)
        return [int(line.split(":")[0], 16) for line in lines if line.endswith(": nop")]

    first = shown()
    assert first[0] == 0
    for key, start in (
        ("down", 1),
        ("page down", 1 + len(first)),
        ("up", len(first)),
        ("end", 100 - len(first)),
        ("down", 100 - len(first)),
        ("home", 0),
        ("up", 0),
    ):
        assert view.press(key, watched.probes)
        assert shown() == list(range(start, start + len(first)))
    assert view.chosen == 0
    view.press("end", watched.probes)
    for key in ("escape", "\n"):
        assert view.press(key, watched.probes)
    assert shown() == first


def test_patched_bytes_are_marked() -> None:
    lines = marked_bytes("original 0f 1f 44 00\ncurrent  e8 1f 45 00", 80)
    assert [line.plain.split() for line in lines] == [
        ["original", "0f", "1f", "44", "00"],
        ["current", "[e8]", "1f", "[45]", "00"],
    ]


def test_text_for_pipes_has_a_line_each() -> None:
    probe = Probe("g/a", "int3\nint3", True, False, 5, 0, "one\ntwo", rate=2.0, cost=12.0)
    head, line = plain([probe]).split("\n")
    assert head.split() == ["EVENT", "MODE", "HITS/S", "HITS", "MISSED", "COST", "REASON"]
    assert line.split("  ") == [word for word in line.split("  ") if "\n" not in word]
    assert line.split() == ["g/a", "int3", "2.0", "5", "0", "12.0", "ns", "one"]
    assert replace(probe, cost=152707.0).shown_cost == "152.7 us"


@needs_fuse
@pytest.mark.mounted
def test_top_of_a_daemon_that_stops_and_of_one_that_ends(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("kprobe_events")).write_text("p:reads vfs_read\n")
        Path(running.path("tracing/events/kprobes/reads/enable")).write_text("1")
        top = Terminal(80, 24, "top", "-d", "1.5", str(directory))
        top.until(r" \d+\.\d\x1b[^\x00]*q quit")
        # Stop the daemon between two updates of top.
        running.process.send_signal(signal.SIGSTOP)
        top.until(r"hung: ")
        assert any(re.match(r"kprobes/reads +ftrace +- +\d+ ", line) for line in top.lines())
        top.press("\re")
        top.until("enabled 0: the mount does not answer")
        running.process.send_signal(signal.SIGCONT)
        top.until(r"kprobes/reads  ftrace  \d")
        assert kprobefs("umount", str(directory), program=REAL_PROGRAM).returncode == ExitStatus.OK
        top.until("isn't mounted there any more")
        assert top.end() == ExitStatus.NOT_MOUNTED
