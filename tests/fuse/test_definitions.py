"""`kprobefs apply` and `save`: an exact round trip, errors with file and line number, and the definitions
that a new mount applies.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.vfs.core.node_tree import CONTROL
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import MountState, condition
from kprobefs.definitions import dropins, syntax
from kprobefs.definitions.tracefs_files import HostFiles
from tests.fuse.harness import (
    PATIENCE,
    REAL_PROGRAM,
    Daemon,
    daemon,
    environment,
    eventually,
    is_mounted,
    kprobefs,
    needs_fuse,
)

ALL = """\
# what a reader does
p:reads vfs_read count=$arg3
p:reads vfs_write count=$arg3
r:ret vfs_read \\
    ret=$retval
r3:three vfs_write+0
p:mine/odd ksys_read+0x5 %di
p vfs_mkdir
s:lat u64 x
e:each sched/sched_switch n=$prev_pid
p:up /bin/true:0x1000
events/kprobes/reads/filter = count > 3
events/kprobes/reads/trigger = traceoff:3 if count == 77777
events/kprobes/reads/trigger = stacktrace if count == 77777
events/kprobes/reads/trigger = hist:keys=common_pid:pause if count>3
events/kprobes/ret/trigger = hist:keys=common_pid:ts0=common_timestamp.usecs
events/kprobes/three/trigger = enable_event:kprobes:ret if common_pid == 1
events/mine/odd/filter = common_pid != 3 && comm ~ "a*"
trace_options = sym-offset norecord-cmd
trace_clock = global
buffer_size_kb = 120
per_cpu/cpu1/buffer_size_kb = 203
buffer_percent = 7
saved_cmdlines_size = 300
tracing_cpumask = 1
tracing_thresh = 77
max_graph_depth = 3
set_event_pid = 123456 77
set_event_notrace_pid = 88
set_ftrace_pid = 99
set_ftrace_notrace_pid = 1234567
set_ftrace_notrace = vfs_rename
set_ftrace_filter = vfs_rmdir vfs_truncate vfs_symlink:traceoff:3 vfs_symlink:traceoff \\
    vfs_link:enable_event:kprobes:ret:2
set_ftrace_filter = ktgt*:mod:ktgt n*:mod:nosuch
set_graph_function = vfs_rmdir vfs_truncate
set_graph_notrace = vfs_rename
stack_trace_filter = vfs_rmdir
options/funcgraph-abstime = 1
options/func_stack_trace = 1
current_tracer = function
trace_options = func-no-repeats
instances/slow/set_ftrace_filter = vfs_mkdir:traceon vfs_mkdir
instances/slow/current_tracer = function
instances/slow/set_event_pid = 5
instances/slow/tracing_cpumask = 2
instances/slow/per_cpu/cpu0/buffer_size_kb = 40
instances/slow/events/kprobes/reads/enable = 1
instances/slow/events/kprobes/reads/filter = count < 3
instances/a\\040b/tracing_on = 0
instances/\\342\\200\\250/buffer_percent = 9
instances/a\\040b/trace_options = noprint-parent
events/mine/odd/enable = 1
events/sched/sched_switch/enable = 1
"""
OUTSIDE = """\
kprobes/enabled = 0
sysctl/debug/kprobes-optimization = 0
sysctl/kernel/stack_tracer_enabled = 7
sysctl/kernel/ftrace_enabled = 0
"""
WRONG = """\
p:oops vfs_read \\
   %nosuch

events/kprobes/none/enable = 1
events/sched/sched_switch/filter = nosuch > 3
hello
p:x nosuchfn
trace_options = print-parent badword
/etc/passwd = 3
instances/../x = 1
p:good vfs_read
instances/x/events/kprobes/good/filter = foo > 1
instances/x/events/kprobes/good/trigger = hist:keys=nosuch
"""


def lines(text: str) -> list[tuple[int, str]]:
    return [(line.number, line.text) for line in syntax.read_lines("f", text)]


def test_lines_that_go_on() -> None:
    assert lines("a \\\n  b\n\n # c\nd\\\n\\\ne\nf\\") == [(1, "a b"), (5, "d e"), (8, "f")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# a \\\nb\n", [(2, "b")]),
        ("a\n  # b \\\nc\n", [(1, "a"), (3, "c")]),
        ("a \\\n# b\nc\n", [(1, "a c")]),
        ("a \\\n# b \\\n c \\", [(1, "a c")]),
        ("#", []),
    ],
)
def test_a_comment_joins_nothing(text: str, found: list[tuple[int, str]]) -> None:
    assert lines(text) == found


def test_only_newlines_end_lines() -> None:
    assert lines("a\u2028b\x0cc\n\nd") == [(1, "a\u2028b\x0cc"), (3, "d")]


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("traceoff:unlimited", "traceoff"),
        ("traceoff:count=2 if a > 5", "traceoff:2 if a > 5"),
        ("enable_event:kprobes:rr:unlimited", "enable_event:kprobes:rr"),
        ("enable_hist:a:b:count=1", "enable_hist:a:b:1"),
        ("hist:keys=a:vals=hitcount:size=2048 if c [active]", "hist:keys=a:vals=hitcount:size=2048 if c"),
        ("hist:keys=a:vals=hitcount if c [paused]", "hist:keys=a:vals=hitcount:pause if c"),
        ("hist:keys=a:vals=hitcount [paused]", "hist:keys=a:vals=hitcount:pause"),
        ("hist:keys=a.log2,b.hex:sort=b.hex.descending [active]", "hist:keys=a.log2,b.hex:sort=b.descending"),
        ("hist:keys=a.buckets=5:sort=a.buckets=5 [active]", "hist:keys=a.buckets=5:sort=a"),
        (
            "hist:keys=a:vals=$x:sort=$x if b ~ ':sort=c.hex' [active]",
            "hist:keys=a:vals=$x:sort=x if b ~ ':sort=c.hex'",
        ),
        ("hist:keys=a:d=b-$g.e.t:sort=hitcount [active]", "hist:keys=a:d=b-g.e.$t:sort=hitcount"),
        (
            "hist:keys=common_cpucommon_cpu:sort=common_cpucommon_cpu [active]",
            "hist:keys=common_cpu:sort=common_cpu",
        ),
        (
            "enable_event:my-group:e:count=3 if a == ':unlimited'",
            "enable_event:my-group:e:3 if a == ':unlimited'",
        ),
    ],
)
def test_triggers_as_they_are_written(shown: str, written: str) -> None:
    assert syntax.saved_triggers(f"# head\n{shown}\n") == [written]


@pytest.mark.parametrize(
    ("name", "shown", "written"),
    [
        ("set_ftrace_filter", "#### all functions enabled ####", ""),
        ("set_ftrace_pid", "no pid", ""),
        ("set_event_pid", "3\n77", "3 77"),
        ("set_ftrace_filter", "a\nb [m]\nx*:mod:n\ny*:mod:n", "a y*:mod:n x*:mod:n b:mod:m"),
        ("set_ftrace_filter", "a\na\na:traceon:unlimited\na:traceon:count=3", "a a:traceon:3 a:traceon"),
        ("set_ftrace_filter", "b [m]:enable_event:g:e:count=0", "b:enable_event:g:e:0"),
        ("set_graph_function", "a\nb [m]", "a b"),
    ],
)
def test_lists_as_they_are_written(name: str, shown: str, written: str) -> None:
    assert " ".join(syntax.saved_words(name, f"{shown}\n")) == written


class TestFiles:
    """The files of definitions that a new mount applies."""

    @pytest.fixture
    def places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        found = [tmp_path / name for name in ("first", "second")]
        for place in found:
            place.mkdir()
        monkeypatch.setenv(dropins.VARIABLE, f"{found[0]}:{found[1]}:/no/such/place")
        return found

    def test_order_and_precedence(self, places: list[Path]) -> None:
        first, second = places
        for path in (second / "10-a.probes", second / "20-b.probes", first / "20-b.probes", first / "c.conf"):
            path.touch()
        (first / "30-c.probes").symlink_to(os.devnull)
        (second / "30-c.probes").touch()
        assert dropins.files() == [second / "10-a.probes", first / "20-b.probes"]

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_what_others_may_write_is_not_applied(self, places: list[Path], mode: int) -> None:
        path = places[0] / "a.probes"
        path.touch()
        path.chmod(mode)
        with pytest.raises(CliError, match="others could have written it"):
            dropins.read(path)

    def test_what_others_own_is_not_applied(self, places: list[Path]) -> None:
        if os.geteuid() != 0:
            pytest.skip("giving a file away needs root")
        path = places[0] / "a.probes"
        path.touch()
        os.chown(path, 65534, 65534)
        with pytest.raises(CliError, match="others could have written it"):
            dropins.read(path)

    def test_only_files_are_applied(self, places: list[Path]) -> None:
        path = places[0] / "a.probes"
        os.mkfifo(path)
        with pytest.raises(CliError, match="not a regular file"):
            dropins.read(path)

    def test_root_applies_nothing_of_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(dropins.VARIABLE, raising=False)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert dropins.directories() == list(dropins.SYSTEM)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
        assert dropins.directories() == ["/config/kprobefs/probes.d", *dropins.SYSTEM]


@pytest.fixture
def served(directory: Path) -> Iterator[Daemon]:
    """Yield the daemon of a mount that the real program has made."""
    with daemon(directory, program=REAL_PROGRAM) as running:
        yield running


def command(name: str, mounted: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kprobefs(name, "--mount", str(mounted.directory), *arguments, program=REAL_PROGRAM)


NOT_SAVED = re.compile(
    r"trace(_pipe|_marker|_marker_raw)?|snapshot|saved_(cmdlines|tgids)|error_log|free_buffer"
    r"|stack_(max_size|trace)|tracing_max_latency|kprobe_profile|enabled_functions"
)
"""Files of records and measurements, which are no settings."""


def state_of(tracefs: Path) -> dict[str, str]:
    """Return path -> content of the files that hold a tracefs's settings, except the settings of single
    events.
    """
    found = {}
    for array in (tracefs, *tracefs.glob("instances/*")):
        # os.scandir() does not ask the mount for the kind of each file.
        entries = [*os.scandir(array), *os.scandir(array / "options")]
        files = [entry.path for entry in entries if entry.is_file() and not NOT_SAVED.fullmatch(entry.name)]
        for path in map(Path, [*files, *array.glob("per_cpu/*/buffer_size_kb")]):
            found[str(path.relative_to(tracefs))] = path.read_text()
    return found


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("layout", ["full", "tracefs"])
def test_round_trip(layout: str, directory: Path, tmp_path: Path) -> None:
    file, saved = tmp_path / "all.probes", tmp_path / "saved.probes"
    file.write_text(ALL + OUTSIDE)
    with daemon(directory, "--cpus", "2", "--layout", layout, program=REAL_PROGRAM) as first:
        tracefs = directory / HostFiles(str(directory)).tracefs()
        assert tracefs == directory / ("tracing" if layout == "full" else "")
        applied = command("apply", first, str(file))
        assert (applied.stderr, applied.stdout, applied.returncode) == ("", "", 0)
        assert command("save", first, str(saved)).returncode == 0
        assert set(OUTSIDE.splitlines()) <= set(saved.read_text().splitlines())
        state = state_of(tracefs)
        assert (tracefs / "instances" / "a b").is_dir()
        # The layout tracefs lists only files of Linux; the program's own files can still be opened.
        assert CONTROL not in os.listdir(directory)
        assert (directory / CONTROL).is_dir() == (layout == "tracefs")
        # Existing definitions stay, with their counts.
        before = [path.stat().st_ino for path in tracefs.glob("events/*probes/*")]
        for again in (file, saved):
            applied = command("apply", first, str(again))
            assert (applied.returncode, applied.stderr) == (0, "")
            assert command("save", first).stdout == saved.read_text()
        assert before == [path.stat().st_ino for path in tracefs.glob("events/*probes/*")]
    lines = saved.read_text().splitlines()
    for line in (
        "p:kprobes/reads vfs_write count=$arg3",
        "r3:kprobes/three vfs_write",
        "events/kprobes/reads/filter = count > 3",
        "events/kprobes/reads/trigger = traceoff:3 if count == 77777",
        "instances/slow/events/kprobes/reads/enable = 1",
        "instances/a\\040b/tracing_on = 0",
        "per_cpu/cpu1/buffer_size_kb = 203",
        "set_event_pid = 77 123456",
        "set_ftrace_filter = vfs_symlink:traceoff:3 vfs_symlink:traceoff vfs_link:enable_event:kprobes:ret:2",
        "instances/slow/tracing_cpumask = 2",
    ):
        assert line in lines
    with daemon(directory, "--cpus", "2", "--layout", layout, program=REAL_PROGRAM) as second:
        applied = command("apply", second, str(saved))
        assert (applied.stderr, applied.returncode) == ("", 0)
        assert command("save", second).stdout == saved.read_text()
        assert state_of(tracefs) == state


VARIABLES = """\
p:kprobes/writes vfs_write
r:kprobes/done vfs_write
s:synthetic/lat u64 ns
events/kprobes/writes/trigger = hist:keys=common_pid:t=common_timestamp
events/kprobes/done/trigger = hist:keys=common_pid:d=common_timestamp-$t:onmatch(kprobes.writes).lat($d)
instances/slow/events/kprobes/done/filter = common_pid > 1
instances/slow/trace_options = sym-offset stacktrace
trace_options = nooverwrite sym-offset
instances/slow/events/kprobes/done/enable = 1
"""
"""Definitions in which the event that uses the variable comes first in the order of names."""


@needs_fuse
@pytest.mark.mounted
def test_a_saved_file_is_loaded_line_by_line(directory: Path, tmp_path: Path) -> None:
    """The shell loop of docs/guide/plan-probes.md can load a saved file line by line: no line needs a later
    line.
    """
    guide = (Path(__file__).parents[2] / "docs/guide/plan-probes.md").read_text()
    start = guide.index("    while IFS= read -r line")
    script = guide[start : guide.index("saved.probes", start)] + '"$SAVED"'
    file, saved = tmp_path / "a.probes", tmp_path / "saved.probes"
    file.write_text(VARIABLES)
    with daemon(directory, "--layout", "tracefs", program=REAL_PROGRAM) as first:
        applied = command("apply", first, str(file))
        assert (applied.stderr, applied.returncode) == ("", 0)
        assert command("save", first, str(saved)).returncode == 0
    with daemon(directory, "--layout", "tracefs", program=REAL_PROGRAM) as second:
        environment = {**os.environ, "SAVED": str(saved)}
        words = ["sh", "-ec", script]
        loaded = subprocess.run(words, cwd=directory, env=environment, stderr=subprocess.PIPE, check=False)
        assert (loaded.stderr, loaded.returncode) == (b"", 0)
        assert command("save", second).stdout == saved.read_text()


@needs_fuse
@pytest.mark.mounted
def test_the_program_at_a_tracefs(directory: Path) -> None:
    with daemon(directory, "--layout", "tracefs", program=REAL_PROGRAM) as mounted:
        (directory / "kprobe_events").write_text("p:reads vfs_read\n")
        enable = directory / "events/kprobes/reads/enable"
        enable.write_text("1")

        def hits() -> int:
            return int((directory / "kprobe_profile").read_text().split()[1])

        before = hits()
        assert "events/kprobes/reads/enable = 1\n" in command("save", mounted).stdout
        # save reads one file about all events, and the counts. A read of a file of each event took hundreds.
        assert 0 < hits() - before <= 5
        told = kprobefs("top", "--json", str(directory), program=REAL_PROGRAM)
        assert [each["event"] for each in json.loads(told.stdout)] == ["kprobes/reads"]
        assert kprobefs("reboot", str(directory), program=REAL_PROGRAM).returncode == 0
        assert (hits() > before, enable.read_text()) == (True, "1\n")


@needs_fuse
@pytest.mark.mounted
def test_a_file_of_something_else_is_told_of_shortly(served: Daemon, tmp_path: Path) -> None:
    program = command("apply", served, sys.executable)
    assert program.returncode == ExitStatus.FAILURE
    assert program.stderr == f"kprobefs: {sys.executable}: not a file of definitions; it contains a NUL\n"
    file = tmp_path / "text"
    file.write_text("".join(f"word {number} {'long' * 1000}\n" for number in range(100)))
    text = command("apply", served, str(file))
    assert text.returncode == ExitStatus.FAILURE
    lines = text.stderr.splitlines()
    assert len(lines) == 2 * 20 + 1
    assert max(map(len, lines)) <= 1024
    assert lines[-1] == f"kprobefs: {file}: 80 more lines failed"


@needs_fuse
@pytest.mark.mounted
def test_wrong_lines_are_told_with_their_place(served: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "wrong.probes"
    file.write_text(WRONG)
    result = command("apply", served, str(file))
    assert result.returncode == ExitStatus.FAILURE
    expected = f"""\
kprobefs: {file}:1: Invalid register name: Invalid argument
    p:oops vfs_read %nosuch
                    ^
kprobefs: {file}:4: No such file or directory
    events/kprobes/none/enable = 1
kprobefs: {file}:5: Field not found: Invalid argument
    events/sched/sched_switch/filter = nosuch > 3
                                       ^
kprobefs: {file}:6: neither a definition nor 'FILE = VALUE'
    hello
kprobefs: {file}:7: Invalid probed address or symbol: No such file or directory
    p:x nosuchfn
        ^
kprobefs: {file}:8: Invalid argument
    trace_options = print-parent badword
kprobefs: {file}:9: not a file of the tracefs
    /etc/passwd = 3
kprobefs: {file}:10: not a file of the tracefs
    instances/../x = 1
kprobefs: {file}:12: Field not found: Invalid argument
    instances/x/events/kprobes/good/filter = foo > 1
                                                 ^
kprobefs: {file}:13: Couldn't find field: Invalid argument
    instances/x/events/kprobes/good/trigger = hist:keys=nosuch
                                                        ^
"""
    assert [line for line in result.stderr.splitlines() if line.strip() != "^"] == [
        line for line in expected.splitlines() if line.strip() != "^"
    ]
    assert result.stderr.startswith("".join(expected.splitlines(keepends=True)[:3]))
    # The other lines take effect.
    assert Path(served.path("tracing/dynamic_events")).read_text() == "p:kprobes/good vfs_read\n"


@needs_fuse
@pytest.mark.mounted
def test_a_changed_definition_begins_anew(served: Daemon, tmp_path: Path) -> None:
    file, events = tmp_path / "a.probes", Path(served.path("tracing/dynamic_events"))
    for place in ("vfs_read", "vfs_write n=$arg3"):
        file.write_text(f"p:same {place}\nevents/kprobes/same/enable = 1\n")
        result = command("apply", served, str(file))
        assert (result.returncode, result.stderr) == (0, "")
        assert events.read_text() == f"p:kprobes/same {place}\n"
        assert Path(served.path("tracing/events/kprobes/same/enable")).read_text() == "1\n"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("place", ["", "instances/i/"])
def test_a_definition_that_a_trigger_keeps(served: Daemon, tmp_path: Path, place: str) -> None:
    file, trigger = tmp_path / "a.probes", f"{place}events/kprobes/kept/trigger"
    file.write_text(f"p:kept vfs_read\n{trigger} = hist:keys=common_pid\n")
    assert command("apply", served, str(file)).returncode == 0
    file.write_text("p:kept vfs_write\n")
    result = command("apply", served, str(file))
    assert result.returncode == ExitStatus.FAILURE
    told, line = result.stderr.splitlines()
    busy = f"kprobefs: {file}:1: Device or resource busy: {trigger} has hist:keys=common_pid:vals=hitcount"
    assert told.startswith(busy)
    assert line.strip() == "p:kept vfs_write"
    assert Path(served.path("tracing/dynamic_events")).read_text() == "p:kprobes/kept vfs_read\n"
    # The error names the trigger that prevents the change.
    Path(served.path("tracing", trigger)).write_text(f"!{told.partition(' has ')[2]}\n")
    assert command("apply", served, str(file)).returncode == 0
    if place:
        os.rmdir(served.path("tracing/instances/i"))


@needs_fuse
@pytest.mark.mounted
def test_standard_output_is_a_minus(served: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = command("save", served, "-")
    assert (saved.returncode, saved.stdout) == (0, command("save", served).stdout)
    assert not list(tmp_path.glob("-"))


@needs_fuse
@pytest.mark.mounted
def test_what_is_so_already_stays(served: Daemon, tmp_path: Path) -> None:
    file, tracing = tmp_path / "a.probes", Path(served.path("tracing"))
    file.write_text("trace_clock = local\nset_ftrace_filter = vfs_l*:traceoff:3\n")
    for _ in range(2):
        (tracing / "trace_marker").write_text("kept")
        result = command("apply", served, str(file))
        assert (result.stderr, result.returncode) == ("", 0)
    assert (tracing / "trace").read_text().count("kept") == 2
    assert "vfs_link:traceoff:count=3\n" in (tracing / "set_ftrace_filter").read_text()


@needs_fuse
@pytest.mark.mounted
def test_triggers_that_need_later_ones(served: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "a.probes"
    file.write_text(
        "p:first vfs_read\np:second vfs_write\n"
        "events/kprobes/second/trigger = hist:keys=common_pid:d=common_timestamp.usecs-$t0\n"
        "events/kprobes/first/trigger = hist:keys=common_pid:t0=common_timestamp.usecs\n"
        "events/kprobes/first/trigger = hist:keys=nosuch\n"
    )
    result = command("apply", served, str(file))
    assert result.returncode == ExitStatus.FAILURE
    assert [line.split(": ")[1] for line in result.stderr.splitlines() if line.startswith("kprobefs")] == [
        f"{file}:5"
    ]
    assert "d=common_timestamp" in Path(served.path("tracing/events/kprobes/second/trigger")).read_text()


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_a_mount_begins_with_its_files(
    foreground: bool, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dropins.VARIABLE, str(tmp_path))
    (tmp_path / "10.probes").write_text("p:one vfs_read\n")
    (tmp_path / "20.probes").write_text("p:bad nosuch\nevents/kprobes/one/enable = 1\n")
    os.mkfifo(tmp_path / "15.probes")
    if foreground:
        with daemon(directory, program=REAL_PROGRAM) as running:
            switch = Path(running.path("tracing/events/kprobes/one/enable"))

            eventually(lambda: switch.exists() and switch.read_text() == "1\n")
            eventually(lambda: "20.probes" in running.log)
            told = running.log
    else:
        result = kprobefs("mount", str(directory), program=REAL_PROGRAM)
        assert result.returncode == 0
        told = result.stderr
        try:
            assert (directory / "tracing/events/kprobes/one/enable").read_text() == "1\n"
            (tmp_path / "30.probes").write_text("p:two vfs_write\n")
            # `systemctl reload` runs this command.
            assert kprobefs("apply", "--mount", str(directory), program=REAL_PROGRAM).returncode == 1
            monkeypatch.setenv(dropins.VARIABLE, f"{tmp_path}/none:{tmp_path}/more")
            nothing = kprobefs("apply", "--mount", str(directory), program=REAL_PROGRAM)
            expected = f"nothing to apply: no *.probes in {tmp_path}/none {tmp_path}/more\n"
            assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, expected, "")
            assert (directory / "tracing/events/kprobes/two").is_dir()
        finally:
            assert kprobefs("umount", str(directory)).returncode == 0
    assert f"{tmp_path}/15.probes: not a regular file" in told
    assert f"{tmp_path}/20.probes:1: Invalid probed address or symbol: No such file" in told


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("way", ["link", "directory", "probes.d"])
def test_lines_of_a_private_file_behind_a_link_are_not_shown(
    way: str, served: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `apply` follows a symbolic link to a private file, its errors do not quote lines of this file.

    Another user may have made the link, to see the file in the errors.
    """
    secret = tmp_path / "secrets" / "shadow"
    secret.parent.mkdir()
    secret.write_text("root:$6$hash:1::\np:secret $6$hash\nsecret/file = $6$hash\np:fine vfs_read\n")
    secret.chmod(0o600)
    link = tmp_path / "a.probes"
    link.symlink_to(secret if way != "directory" else secret.parent)
    named = [str(link if way == "link" else link / "shadow")]
    if way == "probes.d":
        monkeypatch.setenv(dropins.VARIABLE, str(tmp_path))
        named = []
    refused = command("apply", served, *named)
    assert refused.returncode == ExitStatus.FAILURE
    assert refused.stderr.count("\n") == 1
    assert "3 lines failed; it is a link" in refused.stderr
    assert "hash" not in refused.stderr
    assert "secret " not in refused.stderr
    for shown in (str(secret), str(link)):
        if shown == str(link):
            secret.chmod(0o644)
        if way != "directory" or shown == str(secret):
            assert "root:$6$hash:1::" in command("apply", served, shown).stderr


@needs_fuse
@pytest.mark.mounted
def test_a_daemon_applies_its_files_whatever_pythons_variables_say(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(sys.executable).with_name("kprobefs")
    if not program.exists():
        pytest.skip("the program is not installed beside this Python")
    monkeypatch.setenv(dropins.VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    (tmp_path / "10.probes").write_text("p:one vfs_read\n")
    with daemon(directory, program=[str(program)]) as running:
        eventually(lambda: "one" in Path(running.path("kprobe_events")).read_text())


@needs_fuse
@pytest.mark.mounted
def test_a_definition_that_hangs_delays_no_stop(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dropins.VARIABLE, str(tmp_path))
    (tmp_path / "10.probes").write_text("sysctl/debug/kprobes-optimization = 0\n")
    with daemon(directory, "--seed", "671") as running:
        eventually(lambda: condition(str(directory)) is MountState.BUSY)
        assert running.stop(signal.SIGTERM) == 0
        assert not is_mounted(directory)


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("wrong", [False, True])
def test_the_manager_is_told_of_definitions(
    wrong: bool, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dropins.VARIABLE, str(tmp_path))
    (tmp_path / "10.probes").write_text("p:one nosuch\n" if wrong else "p:one vfs_read\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory.parent / "notify"))
        manager.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory.parent / "notify"))
        with daemon(directory, program=REAL_PROGRAM) as running:
            assert manager.recv(4096).decode() == f"STATUS=serving {directory}: applying definitions"
            how = ": not all definitions were applied" if wrong else ""
            assert manager.recv(4096).decode() == f"READY=1\nSTATUS=serving {directory}{how}"
            events = Path(running.path("kprobe_events")).read_text()
            assert events == ("" if wrong else "p:kprobes/one vfs_read\n")
            assert ("WARNING" in running.log) is wrong


@needs_fuse
@pytest.mark.mounted
def test_which_mount_it_is_for(mounted: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "isn't mounted" in kprobefs("save", "--mount", str(tmp_path)).stderr
    monkeypatch.setenv("KPROBEFS", str(mounted.directory))
    Path(mounted.path("tracing/trace_clock")).write_text("mono")
    assert kprobefs("save").stdout == "trace_clock = mono\n"
    monkeypatch.setenv("KPROBEFS", str(tmp_path))
    assert kprobefs("save").returncode == ExitStatus.NOT_MOUNTED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    script = kprobefs("completion", shell)
    assert (script.returncode, "kprobefs" in script.stdout) == (0, True)
    assert completions("kprobefs mount --lay", tmp_path) == ["--layout"]


def completions(line: str, tmp_path: Path) -> list[str]:
    """Return the words that the program offers as completions of the last word of the command line `line`."""
    answer = tmp_path / "answer"
    asked = {
        **environment(),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(REAL_PROGRAM, env=asked, capture_output=True, timeout=30, check=False)
    return answer.read_text().split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kprobefs trace p:vfs_rea", "p:vfs_read"),
        ("kprobefs trace t:sched:sched_swi", "t:sched:sched_switch"),
        ("kprobefs explain tcp_sendm", "tcp_sendmsg"),
        ("kprobefs coverage --profile kprobes-", "kprobes-2010"),
        ("kprobefs mount --limit prob", "probes="),
    ],
)
def test_completion_knows_the_kernel(line: str, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert expected in completions(line, tmp_path)


@needs_fuse
@pytest.mark.mounted
def test_completion_offers_mounts(mounted: Daemon, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    for command in ("umount", "status", "save -m"):
        assert str(mounted.directory) in completions(
            f"kprobefs {command} {mounted.directory.parent}/", tmp_path
        )


@needs_fuse
@pytest.mark.mounted
def test_where_definitions_are_read_from(served: Daemon, tmp_path: Path) -> None:
    """`apply` refuses a FIFO and /dev/zero, whose readers might never reach an end. Files, standard input and
    the shell's process substitutions are read.
    """
    fifo = tmp_path / "gf"
    os.mkfifo(fifo)
    refused = command("apply", served, str(fifo), "/dev/zero")
    assert refused.returncode == ExitStatus.FAILURE
    assert refused.stderr.splitlines() == [
        f"kprobefs: {fifo}: not a regular file",
        "kprobefs: /dev/zero: not a regular file",
    ]
    apply = f"{shlex.join(REAL_PROGRAM)} apply --mount {shlex.quote(str(served.directory))}"
    for number, given in enumerate(
        ("- <{}", "/dev/stdin <{}", "<(cat {})", "<(cat {}) /dev/null </dev/null", "- < <(cat {})", "{}")
    ):
        file = tmp_path / f"{number}.probes"
        file.write_text(f"p:given{number} vfs_read\n")
        script = f"{apply} {given.replace('{}', shlex.quote(str(file)))}"
        result = subprocess.run(
            ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=30, check=False
        )
        assert (result.returncode, result.stderr) == (0, ""), script
        assert os.path.isdir(served.path("tracing/events/kprobes", f"given{number}"))


@needs_fuse
@pytest.mark.mounted
def test_what_is_no_setting_is_neither_read_nor_written(mounted: Daemon, tmp_path: Path) -> None:
    """`apply` refuses, without reading or writing, files that are no settings.

    Readers of files of records may wait for ever, and other files cannot be written by anybody.
    """
    names = (
        *("trace", "trace_pipe", "per_cpu/cpu0/trace_pipe", "per_cpu/cpu0/trace_pipe_raw", "trace_marker"),
        *("trace_marker_raw", "snapshot", "free_buffer", "error_log", "instances/new/trace_pipe"),
        *("available_events", "events/header_page", "events"),
    )
    file = tmp_path / "no.probes"
    file.write_text("".join(f"{name} = 1\n" for name in names))
    tracing = mounted.directory / "tracing"
    (tracing / "trace_marker").write_text("kept")
    result = command("apply", mounted, str(file))
    assert result.returncode == 1
    expected = [f"kprobefs: {file}:{number}: not a setting" for number in range(1, len(names) + 1)]
    assert [line for line in result.stderr.splitlines() if line.startswith("kprobefs")] == expected
    assert "kept" in (tracing / "trace").read_text()
    assert not (tracing / "instances/new").exists()
