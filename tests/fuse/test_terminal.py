"""Output of status, tour and other commands on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from emulated_kernel.util.config import MachineConfig
from kprobefs.cli import tour
from kprobefs.cli.control import MountStatus
from kprobefs.cli.main import main
from kprobefs.cli.status import print_table
from kprobefs.cli.top import BACK, Probes, View
from kprobefs.common import mountpoints, terminal
from kprobefs.common.daemon_registry import Daemon as Record
from kprobefs.common.errors import ExitStatus
from kprobefs.common.mountpoints import MountState
from kprobefs.mount_options import MountOptions
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.fuse.on_terminal import Terminal, drawn


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
    assert one == other
    assert one.startswith("kprobefs: /nowhere: kprobefs isn't mounted there; ")
    assert main([command, "-m", "/nowhere", "/elsewhere"]) == ExitStatus.USAGE


@pytest.mark.parametrize("command", ["umount", "status", "top", "reboot"])
@pytest.mark.parametrize("names", ["", "ab", "abcdef"])
def test_a_place_without_a_mount_has_a_remedy(
    names: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [mountpoints.MountPoint(1, f"/mnt/{name}", "0:1", mountpoints.FSTYPE, "", 0) for name in names]
    monkeypatch.setattr(mountpoints, "our_mounts", lambda: points)
    assert main([command, "/nowhere"]) == ExitStatus.NOT_MOUNTED
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ("kprobefs mount /nowhere" in err) == (not names)
    assert [f"/mnt/{name}" in err for name in names] == [number < 3 for number in range(len(names))]


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


NAMED = ("-c", r"import ctypes; ctypes.CDLL(None).prctl(15, b'\x1b[2J'); open('f').read()")
"""Arguments of a Python that reads a file under a process name that clears a terminal (15: PR_SET_NAME)."""


@needs_fuse
@pytest.mark.mounted
def test_a_name_that_terminals_obey(directory: Path) -> None:
    """`top` and `trace` escape control characters in the name of a process. Files of tracefs do not."""
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
        # Requests of top are hits, but top does not show their records.
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
    # The tour shows one error on purpose, and has no others.
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


def _bytes_shown(place: Path) -> set[str]:
    """Return the lines of the tour with the bytes of a probed place.

    Bytes that differ from the original are in brackets.
    """
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
        top.until(rf"\[e8\][^\x00]*: reads: \(vfs_read[^\x00]*{BACK}")
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
