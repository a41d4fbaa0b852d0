"""top, trace, tour and status: plain text in pipes, pictures that fit a terminal, JSON for programs."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.fast_dataclass import replace
from kprobefs.cli import tour, trace_output, trace_records
from kprobefs.cli.control import MountStatus
from kprobefs.cli.main import main
from kprobefs.cli.status import print_table
from kprobefs.cli.top import BACK, SORTS, Probe, Probes, View, marked_bytes, picture, plain
from kprobefs.cli.trace_syntax import parse_probes
from kprobefs.common import mountpoints, terminal
from kprobefs.common.daemon_registry import Daemon as Record
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import MountState, our_mounts
from kprobefs.mount_options import MountOptions
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, environment, eventually, kprobefs, needs_fuse
from tests.sample import share

PROBE = {"mode": "optimized", "enabled": True, "optimized": True, "hits": 10, "nmissed": 1, "reason": ""}
SCREENS = [(width, height) for width in (20, 40, 50, 60, 72, 80, 132) for height in (5, 12, 24)]
"""Sizes in characters."""
TRACED = ("trace", "p:vfs_read count=$arg3", "-f", "count == 131072")


class Watched:
    """A mount's files as top reads them, written by the test."""

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


def drawn(view: View, probes: Probes, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, no_color=True)
    with console.capture() as capture:
        console.print(picture(view, probes, console))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).rstrip("\n").split("\n")


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
    # The second one's count was begun anew.
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


@pytest.mark.parametrize(("width", "height"), share(SCREENS, 0, 2))
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


@pytest.mark.parametrize(
    ("kprobes", "words"),
    [("kprobefs", "kprobes of kprobefs, profile: kernel's version,"), ("kernel", "kprobes of the kernel,")],
)
def test_status_names_the_kprobes_over_an_image(kprobes: str, words: str) -> None:
    machine = MachineConfig(image=Path("/k.deb"))
    options = MountOptions("/a", machine, kprobes=kprobes, follows_version=True)
    record = Record(7, "/a", "x86_64", "full", "1", "now", kernel="/k.deb", profile=options.profile_name)
    assert words in MountStatus("/a", MountState.SERVING, record).details


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100])
def test_status_table_cuts_no_directory(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = "/a/rather/long/path/to/a/mount/point/of/ours"
    record = Record(77, directory, "x86_64", "full", "1", "2026-01-02T03:04:05+00:00")
    console = Console(width=width, file=io.StringIO(), no_color=True)
    monkeypatch.setattr(terminal, "console", lambda: console)
    print_table(
        [MountStatus(directory, MountState.SERVING, record), MountStatus("/b", MountState.STALE, None)]
    )
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    at = lines[0].index("DIRECTORY")
    column = "".join(line[at : at + 60].split(" ")[0] for line in lines[1:-1])
    assert column == directory
    assert ("2026-01-02 03:04" in lines[1]) == (width == 100)


@pytest.mark.parametrize("command", ["umount", "status", "top", "reboot"])
def test_a_mount_is_named_in_one_way(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-m", "/nowhere"]) == ExitStatus.NOT_MOUNTED
    assert main([command, "/nowhere"]) == ExitStatus.NOT_MOUNTED
    one, other = capsys.readouterr().err.splitlines()
    assert one == other == "kprobefs: /nowhere: kprobefs isn't mounted there"
    assert main([command, "-m", "/nowhere", "/elsewhere"]) == ExitStatus.USAGE


@pytest.mark.parametrize("option", ["--image", "--vmcore"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("mount", "OPTION", "FILE", "DIRECTORY"), ExitStatus.USAGE),
        (("run", "OPTION", "FILE", "--", "true"), ExitStatus.RUN_FAILED),
        (("trace", "OPTION", "FILE", "p:vfs_read", "--", "true"), ExitStatus.RUN_FAILED),
    ],
)
def test_a_kernel_that_cannot_be_used_has_one_status(
    words: tuple[str, ...],
    status: ExitStatus,
    option: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mnt").mkdir()
    values = {"OPTION": option, "FILE": "/etc/passwd", "DIRECTORY": str(tmp_path / "mnt")}
    assert main([values.get(word, word) for word in words]) == status
    assert capfd.readouterr().err.startswith("kprobefs: /etc/passwd: not a usable ")


@pytest.mark.parametrize(
    ("typed", "definition", "event"),
    [
        ("p:vfs_read n=$arg3", "p:g/vfs_read vfs_read n=$arg3", "g/vfs_read"),
        ("p:vfs_read $arg3 %di", "p:g/vfs_read vfs_read $arg3 %di", "g/vfs_read"),
        ("r8:vfs_read", "r8:g/vfs_read vfs_read", "g/vfs_read"),
        ("p:m:f+4", "p:g/f_4 m:f+4", "g/f_4"),
        ("t:sched:sched_switch", "", "sched/sched_switch"),
        ("t:sched/sched_switch", "", "sched/sched_switch"),
        ("p:reads vfs_read n=$arg3", "p:g/reads vfs_read n=$arg3", "g/reads"),
        ("p:own/reads vfs_read+0x5", "p:g/reads vfs_read+0x5", "g/reads"),
        ("r16:got m:f got=$retval", "r16:g/got m:f got=$retval", "g/got"),
        ("p:end vfs_read%return", "p:g/end vfs_read%return", "g/end"),
        ("p vfs_read n=$arg3", "p:g/vfs_read vfs_read n=$arg3", "g/vfs_read"),
        ("p 0xffffffff81007a90", "p:g/0xffffffff81007a90 0xffffffff81007a90", "g/0xffffffff81007a90"),
        ("f:seen vfs_read", "f:g/seen vfs_read", "g/seen"),
    ],
)
def test_probes_of_a_one_liner(typed: str, definition: str, event: str) -> None:
    [probe] = parse_probes([typed], "g")
    assert (probe.definition, probe.event) == (definition, event)


def test_two_probes_of_a_place_have_two_events() -> None:
    found = parse_probes(["p:vfs_read", "r:vfs_read", "p vfs_read", "p:one vfs_read", "p:one vfs_write"], "g")
    assert [probe.event for probe in found] == [
        "g/vfs_read",
        "g/vfs_read_1",
        "g/vfs_read_2",
        "g/one",
        "g/one",
    ]


@pytest.mark.parametrize("wrong", ["vfs_read", "p:", "p", "t:sched", "x:y", "x:y vfs_read"])
def test_no_probes_of_a_one_liner(wrong: str) -> None:
    with pytest.raises(CliError, match="not a probe"):
        parse_probes([wrong], "g")


@pytest.mark.parametrize("words", ["top", "save"])
def test_an_ambiguous_command_lists_the_mounts(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KPROBEFS", raising=False)
    points = [
        mountpoints.MountPoint(1, f"/mnt/{name}", "0:1", mountpoints.FSTYPE, "debugfs", 0) for name in "ab"
    ]
    monkeypatch.setattr(mountpoints, "our_mounts", lambda: points)
    assert main(words.split()) == ExitStatus.NOT_MOUNTED
    assert capsys.readouterr().err == (
        "kprobefs: several mounts are active (/mnt/a, /mnt/b); select one with --mount DIR\n"
    )


@pytest.mark.parametrize("words", ["p:vfs_read", "p:vfs_read --", "nonsense -- true"])
def test_wrong_one_liners(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words.split()]) == ExitStatus.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_records_as_objects() -> None:
    line = '     a - [b-77   [002] d..1.    12.000345: ev_1: (f+0x4/0x8) n=0x10 s="a b=\\"c" neg=-3 h=x'
    assert trace_records.record(line, {}) == {
        "time": 12.000345,
        "cpu": 2,
        "pid": 77,
        "comm": "a - [b",
        "event": "ev_1",
        "fields": {"n": 16, "s": 'a b=\\"c', "neg": -3, "h": "x"},
        "text": '(f+0x4/0x8) n=0x10 s="a b=\\"c" neg=-3 h=x',
    }
    assert trace_records.record("CPU:1 [LOST 3 EVENTS]", {}) == {"text": "CPU:1 [LOST 3 EVENTS]"}


@pytest.mark.parametrize(
    ("shown", "event", "fields"),
    [
        ("sys_read(fd: 3, buf: 7f, count: 20)", "sys_enter_read", {"fd": 3, "buf": 0x7F, "count": 0x20}),
        ("sys_read(unsigned int fd: 1f)", "sys_enter_read", {"fd": 31}),
        ("sys_getpid()", "sys_enter_getpid", {}),
        ("sys_openat -> 0xfffffffffffffffe", "sys_exit_openat", {"ret": -2}),
    ],
)  # fmt: skip
def test_records_of_single_system_calls(shown: str, event: str, fields: dict[str, int]) -> None:
    """They show the call, and not the event's name."""
    found = trace_records.record(f"    a b-77      [002] d..1.    12.000345: {shown}", {})
    assert found == {
        "time": 12.000345, "cpu": 2, "pid": 77, "comm": "a b", "event": event, "fields": fields, "text": shown
    }  # fmt: skip


@pytest.mark.parametrize(
    ("print_fmt", "shown", "fields"),
    [
        (
            '"comm=%s pid=%d state=%s%s ==> target_cpu=%03d", REC->comm, REC->pid, (REC->s & 1) ? "a" : "b", '
            'REC->s ? "+" : "", REC->target_cpu',
            "comm=12 pid=7 x pid=77 state=D|K+ ==> target_cpu=003",
            {"comm": "12 pid=7 x", "pid": 77, "state": "D|K+", "target_cpu": 3},
        ),
        (
            '"NR %ld (%lx, %lx)", REC->id, REC->args[0], REC->args[1]',
            "NR 257 (ffffff9c, 0)",
            {"id": 257, "args": [0xFFFFFF9C, 0]},
        ),
        (
            '"(%lx) n=0x%Lx s=\\"%s\\" a={%d,%d}", REC->__probe_ip, REC->n, __get_str(s), REC->a[0]',
            '(f+0x4/0x8) n=0x10 s="b\\" n=3" a={1,-2}',
            {"n": 16, "s": 'b\\" n=3', "a": "{1,-2}"},
        ),
        ('"(%lx) s=\\"%s\\"", REC->__probe_ip, __get_str(s)', "(f+0x4/0x8) s=(fault)", {"s": "(fault)"}),
        ('"ptr=%p in %pS", REC->ptr, REC->ip', "ptr=12 in f+0x1/0x2", {"ptr": "12", "ip": "f+0x1/0x2"}),
    ],
)  # fmt: skip
def test_fields_as_the_format_has_them(print_fmt: str, shown: str, fields: dict[str, object]) -> None:
    """A value may have blanks, quotes, and what looks like another field."""
    layouts = {"ev": [trace_records.layout(f"name: ev\nformat:\n\tfield:int x;\n\nprint fmt: {print_fmt}\n")]}
    found = trace_records.record(f"    a-77      [002] d..1.    12.000345: ev: {shown}", layouts)
    assert (found["fields"], found["text"]) == (fields, shown)


@pytest.mark.parametrize(
    "said", ["at 1.0: sys_foo(a: 3)", "x-7      [001] d..1.     1.0: ev: sys_foo -> 0x1"]
)
def test_what_an_event_says_is_no_other_record(said: str) -> None:
    layouts = {"console": [trace_records.layout('print fmt: "%s", REC->msg')]}
    for comm in ("cat", "a-1 [0] . 1.0:"):
        found = trace_records.record(f"{comm:>16}-77      [002] d..1.    12.000345: console: {said}", layouts)
        assert (found["comm"], found["pid"], found["time"], found["event"]) == (
            comm,
            77,
            12.000345,
            "console",
        )
        assert (found["fields"], found["text"]) == ({"msg": said}, said)


def test_a_record_is_a_line_whatever_is_in_it() -> None:
    shown = '    a-77      [002] d..1.    12.000345: ev: s="a\x0c\x85\u2028b"\n'
    source, end = os.pipe()
    os.write(end, shown.encode() * 2)
    os.close(end)
    output = io.StringIO()
    files = trace_output.TraceFiles(Path(), Path(), Path())
    lines = trace_output.JsonLinesOutput(output, files)
    lines.prepare()
    lines.read(source)
    lines.close()
    os.close(source)
    assert [json.loads(line)["fields"] for line in output.getvalue().splitlines()] == [
        {"s": "a\x0c\x85\u2028b"}
    ] * 2


@needs_fuse
@pytest.mark.mounted
class TestTrace:
    """One-liners."""

    def test_on_a_mount_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        before = our_mounts()
        result = kprobefs(*TRACED, "--", "sh", "-c", "cat f; exit 7", "f", "f", program=REAL_PROGRAM)
        assert (result.returncode, result.stderr) == (7, "")
        lines = result.stdout.splitlines()
        assert "hello" in lines
        hits = [line for line in lines if re.search(r"cat-\d+ .*: vfs_read: \(.*\) count=0x20000$", line)]
        assert len(hits) == 2
        assert our_mounts() == before

    def test_files_that_it_names_are_in_scratch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work = tmp_path / "work"
        (work / "sub/deep").mkdir(parents=True)
        for name in ("f", "sub/n", "sub/deep/n", "../out"):
            (work / name).write_text(f"{name}\n")
        monkeypatch.chdir(work)
        names = ("./f", "sub/n", "sub/deep/n")
        script = f"cat {' '.join(names)} # {'a script may be longer than a name ' * 10}"
        result = kprobefs(*TRACED, "--", "sh", "-c", script, *names, program=REAL_PROGRAM)
        assert (result.returncode, result.stderr) == (0, "")
        # A read of each, and one at its end.
        assert result.stdout.count(": vfs_read: ") == 2 * len(names)
        outside = kprobefs("trace", "p:vfs_read", "--", "cat", "../out", program=REAL_PROGRAM)
        assert "../out: No such file" in outside.stderr

    @pytest.mark.parametrize("probe", ["p:vfs_read", "t:sched:sched_process_exec"])
    def test_nothing_recorded(self, tmp_path: Path, probe: str) -> None:
        file = tmp_path / "f"
        file.write_text("hello\n")
        result = kprobefs(
            "trace", probe, "-f", "common_pid == 1", "--", "cat", str(file), program=REAL_PROGRAM
        )
        assert (result.returncode, result.stdout) == (0, "hello\n")
        why = f"files outside of the mount, such as {file}, hit no probe"
        ways = "; other code of the kernel is run by machine/load (fork, tcp, timers...) and machine/call"
        assert result.stderr == f"kprobefs: nothing was recorded: {why}{ways}\n"

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("p:tcp_sendmsg", "--", "cat", "f"), "the command never came to tcp_sendmsg; "),
            (("p:vfs_read", "-f", "common_pid == 1", "--", "cat", "f"), "the filter accepted none of 2 hits"),
            (
                ("p:tcp_sendmsg", "--", "cat", "none"),
                "the command ended with status 1 before",
            ),
        ],
    )
    def test_why_nothing_was_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
    ) -> None:
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        result = kprobefs("trace", *words, program=REAL_PROGRAM)
        assert f"kprobefs: nothing was recorded: {why}" in result.stderr

    def test_probes_that_are_not_armed(self, directory: Path, tmp_path: Path) -> None:
        file = tmp_path / "f"
        file.write_text("hello\n")
        with daemon(directory, program=REAL_PROGRAM) as running:
            on = ("-m", str(directory), "--")
            switch = Path(running.path("kprobes/enabled"))
            switch.write_text("0")
            never = kprobefs("trace", "p:vfs_read", *on, "cat", str(file), program=REAL_PROGRAM)
            switch.write_text("1")
            script = f"echo 0 > {switch}; cat {running.path('dev/zero')} | head -c 8 > /dev/null"
            partly = kprobefs("trace", "p:vfs_read", *on, "sh", "-c", script, program=REAL_PROGRAM)
            Path(running.path("sysctl/kernel/ftrace_enabled")).write_text("0")
            graph = kprobefs("trace", "--graph", "vfs_read", *on, "cat", str(switch), program=REAL_PROGRAM)
        why = "kprobes/enabled was 0, so the probes were not armed"
        assert never.stderr == f"kprobefs: nothing was recorded: {why}\n"
        why = "the command never came to vfs_read while the probes were armed"
        assert f"nothing was recorded: {why} (kprobes/enabled was 0 for a time)\n" in partly.stderr
        assert "(sysctl/kernel/ftrace_enabled was 0 for a time)" in graph.stderr

    def test_what_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A command by its relative path, and directories among its arguments, as files are."""
        (tmp_path / "d/deep").mkdir(parents=True)
        (tmp_path / "d/deep/f").write_text("hello\n")
        script = tmp_path / "script"
        script.write_text("#!/bin/sh\ncat d/deep/f\necho more > d/deep/f\n")
        script.chmod(0o755)
        monkeypatch.chdir(tmp_path)
        result = kprobefs("trace", "p:vfs_read", "--", "./script", "d", program=REAL_PROGRAM)
        assert (result.returncode, "hello" in result.stdout) == (0, True)
        assert result.stderr.startswith("kprobefs: d/deep/f: changed only in scratch/;")
        assert (tmp_path / "d/deep/f").read_text() == "hello\n"

    def test_two_at_a_time(self, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each has copies of its own, and traces no process of the other one but its command."""
        (tmp_path / "f").write_text("hello\n")
        started, ended = (tmp_path / name for name in ("started", "ended"))
        os.mkfifo(started)
        os.mkfifo(ended)
        monkeypatch.chdir(tmp_path)
        words = [*REAL_PROGRAM, "trace", "-m", str(directory), "p:vfs_read", "--"]
        script = f": > {started}; : < {ended}; cat f"
        with daemon(directory, program=REAL_PROGRAM) as running:
            first = subprocess.Popen([*words, "sh", "-c", script, "f"], stdout=subprocess.PIPE, text=True)
            started.read_bytes()
            second = subprocess.run([*words, "cat", "f"], stdout=subprocess.PIPE, text=True, check=True)
            ended.write_bytes(b"")
            output = first.communicate()[0]
            left = os.listdir(running.path("scratch"))
        assert (first.returncode, left) == (0, [])
        for text, count in ((second.stdout, 2), (output, 4)):
            assert text.count("hello\n") == 1
            records = [line for line in text.splitlines() if line != "hello"]
            assert [line.split("-")[0].strip() for line in records] == ["cat"] * count

    def test_what_a_command_creates_on_a_shared_mount_stays(
        self, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        on = ("trace", "-m", str(directory), "p:vfs_read", "--")
        with daemon(directory, program=REAL_PROGRAM) as running:
            told = kprobefs(*on, "cp", "f", "made", program=REAL_PROGRAM).stderr
            (place,) = os.listdir(running.path("scratch"))
            assert told.startswith(f"kprobefs: made: created in scratch/{place}; ")
            assert Path(running.path(f"scratch/{place}/made")).read_text() == "hello\n"

    def test_it_doesnt_trace_itself(self, directory: Path) -> None:
        """Neither its own calls nor those of the process that reads the records."""
        probes = ("p:vfs_write", "p:vfs_read", "p:do_sys_openat2", "t:syscalls:sys_enter_openat")
        with daemon(directory, program=REAL_PROGRAM) as running:
            Path(running.path("scratch/f")).write_text("hello\n")
            result = kprobefs("trace", *probes, "-m", str(directory), "--", "cat", "f", program=REAL_PROGRAM)
        records = [line for line in result.stdout.splitlines() if line != "hello"]
        assert len(records) >= 4
        assert {record.split("-")[0].strip() for record in records} == {"cat"}

    def test_what_cannot_be_traced_or_written_is_told(self, directory: Path) -> None:
        with daemon(directory, "--layout", "tracefs", program=REAL_PROGRAM) as running:
            Path(running.path("trace_clock")).write_text("mono")
            on = ("-m", str(directory), "--")
            nothing = kprobefs("trace", "p:vfs_read", *on, "true", program=REAL_PROGRAM)
            unknown = kprobefs("trace", "t:nope:nope", *on, "true", program=REAL_PROGRAM)
            saved = kprobefs("save", "-m", str(directory), "/dev/full", program=REAL_PROGRAM)
        assert nothing.stderr.startswith("kprobefs: nothing was recorded: this mount has no scratch/")
        assert unknown.returncode == ExitStatus.FAILURE
        assert unknown.stderr.startswith("kprobefs: nope:nope: no such event, so the command was not run")
        assert saved.returncode == ExitStatus.FAILURE
        assert saved.stderr == "kprobefs: /dev/full: No space left on device\n"

    def test_a_full_disk_is_told_of(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("hello\n")
        command = ("trace", "-o", "/dev/full", "p:vfs_read", "--", "cat", "f")
        result = subprocess.run(
            [*REAL_PROGRAM, *command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (result.returncode, result.stdout) == (0, "hello\n")
        assert result.stderr == "kprobefs: /dev/full: No space left on device: records are missing\n"

    def test_what_is_made_in_scratch_is_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        script = "for n in 1 2 3 4 5 6 7; do cp f copy$n; done; echo more >> f"
        result = kprobefs("trace", "p:vfs_write", "--", "sh", "-c", script, "f", program=REAL_PROGRAM)
        keep, copies = (
            "use absolute paths for files to keep",
            "copy1, copy2, copy3, copy4, copy5 and 2 more",
        )
        assert result.stderr.splitlines() == [
            f"kprobefs: f: changed only in scratch/; {keep}",
            f"kprobefs: {copies}: created in scratch/, which is removed with this mount; {keep}",
        ]
        assert not list(tmp_path.glob("copy*"))
        assert (tmp_path / "f").read_text() == "hello\n"

    def test_on_a_mount_that_is_there(self, directory: Path) -> None:
        with daemon(directory, program=REAL_PROGRAM) as running:
            Path(running.path("kprobe_events")).write_text("p:mine vfs_write\n")
            Path(running.path("scratch/f")).write_text("hello\n")
            result = kprobefs(*TRACED, "--json", "-m", str(directory), "--", "cat", "f", program=REAL_PROGRAM)
            assert (result.returncode, result.stderr) == (0, "hello\n")
            found = [json.loads(line) for line in result.stdout.splitlines()]
            assert [(each["comm"], each["event"], each["fields"]) for each in found] == [
                ("cat", "vfs_read", {"count": 131072})
            ] * 2
            wrong = kprobefs(
                "trace", "p:vfs_read %nosuch", "-m", str(directory), "--", "true", program=REAL_PROGRAM
            )
            assert wrong.returncode == ExitStatus.FAILURE
            assert wrong.stderr.splitlines()[:3] == [
                "kprobefs: trace: Invalid register name: Invalid argument",
                "    p:vfs_read %nosuch",
                "               ^",
            ]
            assert "understood as p:PLACE: a probe at vfs_read; " in wrong.stderr
            other = kprobefs(
                "trace", "p:reads vfs_read %nosuch", "-m", str(directory), "--", "true", program=REAL_PROGRAM
            )
            assert other.stderr.splitlines()[1:3] == [
                "    p:reads vfs_read %nosuch",
                "                     ^",
            ]
            assert "understood as a line of kprobe_events: the event reads at vfs_read; " in other.stderr
            # Linux: the position of the missing value is behind the end of the filter.
            for text, lines in (
                (("p:vfs_raed",), ["      ^", "    nearest: vfs_read, vfs_write, vfs_rmdir"]),
                (("p:vfs_read c=$arg3", "-f", "c >"), ["       ^"]),
            ):
                wrong = kprobefs("trace", *text, "-m", str(directory), "--", "true", program=REAL_PROGRAM)
                assert wrong.stderr.splitlines()[2:-1] == lines
            inside = kprobefs(
                "trace", "p:vfs_read+1", "-m", str(directory), "--", "true", program=REAL_PROGRAM
            )
            assert "trace: Probe point is not an instruction boundary: EILSEQ\n" in inside.stderr
            applied = kprobefs("apply", "-m", str(directory), "/tmp", program=REAL_PROGRAM)
            assert applied.stderr == "kprobefs: /tmp: Is a directory; to select a mount, use -m DIR\n"
            command = ("trace", "-f", "foo > 1", "p:vfs_read", "t:sched:sched_switch", "-m", str(directory))
            wrong = kprobefs(*command, "--", "true", program=REAL_PROGRAM)
            assert wrong.returncode == ExitStatus.FAILURE
            assert wrong.stderr.splitlines()[:6] == [
                "kprobefs: filter of vfs_read: Field not found: Invalid argument",
                "    foo > 1",
                "        ^",
                "kprobefs: filter of sched:sched_switch: Field not found: Invalid argument",
                "    foo > 1",
                "        ^",
            ]
            assert Path(running.path("tracing/dynamic_events")).read_text() == "p:kprobes/mine vfs_write\n"
            assert os.listdir(running.path("tracing/instances")) == []

    def test_what_a_killed_one_has_left_goes(self, directory: Path) -> None:
        """But not what one that lives has, or one of another pid namespace."""
        command = ("trace", "p:vfs_read", "r:vfs_write", "-m", str(directory), "--")
        with daemon(directory, program=REAL_PROGRAM) as running:
            tracing = Path(running.path("tracing"))

            def left() -> set[str]:
                groups = {each.name for each in (tracing / "events").glob("trace_*")}
                assert groups == {each.name for each in (tracing / "instances").iterdir()}
                return groups

            def begin() -> subprocess.Popen[bytes]:
                process = subprocess.Popen(
                    [*REAL_PROGRAM, *command, "sleep", "60"], env=environment(), stdout=subprocess.DEVNULL
                )
                enables = f"instances/trace_{process.pid}_*/events/trace_{process.pid}_*/vfs_write/enable"
                eventually(lambda: [each.read_text() for each in tracing.glob(enables)] == ["1\n"])
                return process

            killed, living = begin(), begin()
            killed.kill()
            killed.wait()
            mine, theirs = (
                next(name for name in left() if name.startswith(f"trace_{it.pid}_"))
                for it in (killed, living)
            )
            _, pid, started, namespace = theirs.split("_")
            reused, foreign = f"trace_{pid}_{int(started, 16) + 1:x}_{namespace}", f"{mine}0"
            for name in (reused, foreign):
                (tracing / "instances" / name).mkdir()
                with (tracing / "dynamic_events").open("a") as file:
                    file.write(f"p:{name}/vfs_read vfs_read\n")
            assert left() == {mine, theirs, reused, foreign}
            assert kprobefs(*command, "true", program=REAL_PROGRAM).returncode == 0
            assert left() == {theirs, foreign}
            living.terminate()
            living.wait()
            assert left() == {foreign}


NAMED = ("-c", r"import ctypes; ctypes.CDLL(None).prctl(15, b'\x1b[2J'); open('f').read()")
"""Python that reads under a name that empties a terminal (15: PR_SET_NAME)."""


@needs_fuse
@pytest.mark.mounted
def test_a_name_that_terminals_obey(directory: Path) -> None:
    """It's escaped wherever people look, and as it is in the files."""
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("kprobe_events")).write_text("p:mine vfs_read\n")
        Path(running.path("scratch/f")).write_text("hello\n")
        enable = Path(running.path("tracing/events/kprobes/mine/enable"))
        enable.write_text("1")
        subprocess.run([sys.executable, *NAMED], cwd=running.path("scratch"), timeout=PATIENCE, check=True)
        enable.write_text("0")
        recorded = Path(running.path("tracing/trace")).read_bytes()
        assert re.search(rb"^ *\x1b\[2J-\d+ .*: mine: ", recorded, re.MULTILINE)
        probes, view = Probes(str(directory)), View()
        enable.write_text("1")
        # Its own requests are hits, and no records that it shows.
        view.show(probes.look())
        probes.look()
        enable.write_text("0")
        assert view.press("\n", probes)
        lines = drawn(view, probes, 80, 24)
        assert not any(f"-{os.getpid()} " in line for line in lines)
        assert any(line.startswith("  \\x1b[2J-") for line in lines[lines.index("last records") :]), lines
        assert "\x1b" not in "".join(lines)
        command = ("trace", "p:vfs_read", "-m", str(directory), "--", sys.executable, *NAMED)
        traced = kprobefs(*command, program=REAL_PROGRAM)
        assert (traced.returncode, traced.stderr) == (0, "")
        assert re.search(r"^ *\\x1b\[2J-\d+ .*: vfs_read: ", traced.stdout, re.MULTILINE)
        assert "\x1b" not in traced.stdout
        coloured = Terminal(80, 24, *command)
        coloured.until(r"\\x1b\[2J-\d+ [^\x00]*vfs_read")
        assert coloured.end() == 0
        assert set(re.findall(r"\x1b\[?[0-9;?]*.", coloured.said)) == {"\x1b[36m", "\x1b[0m"}


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_the_tour_in_a_pipe(arch: str) -> None:
    result = kprobefs("tour", "--arch", arch, program=REAL_PROGRAM)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\033" not in result.stdout
    position = 0
    for step in tour.steps(arch):
        for command in step.commands:
            position = result.stdout.index(f"$ {command}\n", position)
    became = "without jump optimization" if arch.startswith("riscv") else "    optimized\n"
    for said in ("p:kprobes/reads vfs_read", "[FTRACE]", "count=0x7", "got=0x6", became, "^\n"):
        assert said in result.stdout
    # The mistake that it shows is the only one.
    assert re.findall(r"bash: line \d+: (.*)", result.stdout) == ["echo: write error: Invalid argument"]
    assert " ".join(result.stdout.split()).endswith(tour.END)
    assert "No such file" not in result.stdout


@needs_fuse
@pytest.mark.mounted
def test_the_tour_of_the_optimizer_shows_each_stage() -> None:
    result = kprobefs("tour", "optimized", "--arch", "riscv64", program=REAL_PROGRAM)
    assert (result.returncode, result.stderr) == (0, "")
    for step in tour.steps("riscv64", "optimized"):
        assert step.title in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    shown = re.findall(r"current  ([0-9a-f ]+?)  (\S+)", result.stdout)
    original, armed, first, second, jump, *back = shown
    assert [text for _, text in shown[1:5]] == ["ebreak", "c.ebreak", "c.ebreak", "auipc"]
    assert len({code for code, _ in (original, armed, first, second, jump)}) == 5
    assert back == [second, first, armed, original]
    assert re.findall(r"^    (\d)\n    original", result.stdout, re.MULTILINE) == list("01234567")


class Terminal:
    """A program on a terminal of some size."""

    def __init__(self, columns: int, rows: int, *command: str, **more: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = {"COLUMNS": "", "LINES": "", "NO_COLOR": "", "TERM": "xterm-256color"}
        found = environment() | variables | more
        for name in ("COLUMNS", "LINES"):
            del found[name]
        self.process = subprocess.Popen(
            [*REAL_PROGRAM, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=found,
            start_new_session=True,
        )
        os.close(slave)
        self.said = ""

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, pattern: str) -> None:
        """Read until something new matches."""
        start, deadline = len(self.said), time.monotonic() + PATIENCE
        while not re.search(pattern, self.said[start:]):
            assert time.monotonic() < deadline, self.said[start:]
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self._master, 1 << 16).decode("utf-8", "replace")
                except OSError:
                    # The other end is closed.
                    assert re.search(pattern, self.said[start:]), self.said[start:]

    def lines(self) -> list[str]:
        """What was drawn last, without escape sequences."""
        picture = self.said.rpartition("\x1b[H")[2]
        return [line.rstrip() for line in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", picture).splitlines()]

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        os.close(self._master)
        return status


def _bytes_shown(place: Path) -> set[str]:
    """Lines of a probe's bytes; those in brackets aren't the original."""
    lines = [line[9:].split("  ", 1) for line in (place / "bytes").read_text().splitlines()]
    (original, was_text), (current, text) = [(code.split(), insns) for code, insns in lines]
    assert original != current
    marked = [f"[{now}]" if now != was else f" {now} " for was, now in zip(original, current, strict=True)]
    return {
        f"original{''.join(f' {byte} ' for byte in original)}  {was_text}",
        f"current {''.join(marked)}  {text}",
    }


@needs_fuse
@pytest.mark.mounted
def test_on_a_terminal(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("kprobe_events")).write_text("p:reads vfs_read\n")
        top = Terminal(80, 24, "top", "-d", "0.2", str(directory))
        top.until("kprobes/reads")
        top.press("e")
        top.until("ftrace")
        assert Path(running.path("kprobes/stats/kprobes/reads/enabled")).read_text() == "1\n"
        top.press("\r")
        top.until(r"none: they are made while tracing/events/kprobes/reads/enable is 1")
        top.press("\x1b")
        top.until("EVENT")
        Path(running.path("tracing/events/kprobes/reads/enable")).write_text("1")
        Path(running.path("scratch/f")).write_text("hello")
        assert Path(running.path("scratch/f")).read_text() == "hello"
        top.press("\r")
        top.until(r"\[e8\][^\x00]*: reads: \(vfs_read[^\x00]*q quit")
        lines, place = top.lines(), Path(running.path("kprobes/stats/kprobes/reads"))
        assert _bytes_shown(place) <= set(lines)
        detour = (place / "detour").read_text().splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("runs out of line")) + 1
        assert detour
        assert lines[at : at + 3] == [f"  {line}"[:80].rstrip() for line in detour[:3]]
        records = lines[lines.index("last records") + 1 : lines.index(BACK)]
        assert 0 < len(records) <= 5
        assert all(re.fullmatch(r"  \S+-\d+ .* reads: \(vfs_read.*", line) for line in records), records
        top.press("\x1b")
        top.until("EVENT")
        top.press("q")
        top.until(r"\x1b\[\?1049l")
        assert top.end() == 0
        assert "\033[?1049h" in top.said
        for more, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
            status = Terminal(60, 24, "status", str(directory), **more)
            status.until("serving")
            assert status.end() == 0
            assert ("\033[32m" in status.said) == coloured
        file = directory.parent / "written"
        trace = Terminal(
            60, 24, "trace", "-m", str(directory), "-o", str(file), "p:vfs_read", "--", "cat", "f"
        )
        trace.until(f"kprobefs: wrote {file}\r\n")
        assert trace.end() == 0
        dumb = Terminal(60, 24, "top", str(directory), TERM="dumb")
        dumb.until("kprobes/reads")
        assert dumb.end() == 0
        assert "\033" not in dumb.said


@needs_fuse
@pytest.mark.mounted
def test_top_of_a_daemon_that_stops_and_of_one_that_ends(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("kprobe_events")).write_text("p:reads vfs_read\n")
        Path(running.path("tracing/events/kprobes/reads/enable")).write_text("1")
        top = Terminal(80, 24, "top", "-d", "1.5", str(directory))
        top.until(r" \d+\.\d\x1b[^\x00]*q quit")
        # Between two looks.
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


@needs_fuse
@pytest.mark.mounted
def test_the_tour_waits_for_its_reader() -> None:
    walk = Terminal(40, 12, "tour")
    walk.until(tour.PROMPT)
    assert "2/9" not in walk.said
    walk.press("\r")
    walk.until(f"2/{len(tour.STEPS)}")
    walk.until(tour.PROMPT)
    walk.press("q")
    assert walk.end() == 0
    assert "3/9" not in walk.said
