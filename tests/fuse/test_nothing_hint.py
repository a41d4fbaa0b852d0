"""The hint of `run` that a probe has had no hit, or no hit that left a record."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.trace.probes.probe_history import MAX_REMOVED
from emulated_kernel.trace.probes.trace_kprobe import TraceKprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.seq_file import SeqReader
from emulated_kernel.vfs.trees.stats import HistoryFile
from kprobefs.cli.nothing_hint import (
    HINT_LINE,
    EndedCommand,
    History,
    Past,
    PastEvent,
    nothing_hints,
    present_events,
    why_missed,
    why_no_hit,
)
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.image.linux.debian import package
from tests.vfs.files import ROOT, read, truncate, write

NEWLINE = "\n"

NEVER = "no hit of sent: the command never came to tcp_sendmsg; files outside of the mount hit no probe"
UNRECORDED = "gcds has 1 hit and no record in the trace; "

# Cases without a mount: a line is a write to a file below tracing/, or `gcd`, which calls that function.

SENT = "kprobe_events = p:sent tcp_sendmsg\nevents/kprobes/sent/enable = 1\n"
GCDS = "kprobe_events = p:gcds gcd a=$arg1\nevents/kprobes/gcds/enable = 1\n"
INSIDE = "kprobe_events = p:inside gcd+5\nevents/kprobes/inside/enable = 1\n"
FILTERED = f"{GCDS}events/kprobes/gcds/filter = a == 1\n"
CLEAN = "events/enable = 0\nkprobe_events\n"
DISARM = "../kprobes/enabled = 0\n"
ARM = "../kprobes/enabled = 1\n"
NO_CALLS = "../sysctl/kernel/ftrace_enabled = 0\n"
CALLS = "../sysctl/kernel/ftrace_enabled = 1\n"
ELSEWHERE = "kprobe_events = p:sent tcp_sendmsg\ninstances/a/events/kprobes/sent/enable = 1\n"
STATES = {
    SENT: NEVER,
    f"{SENT}{GCDS}": "no hit of sent, gcds: the command never came to tcp_sendmsg, gcd; ",
    f"{SENT}{GCDS}gcd": "",
    f"{GCDS}gcd": "",
    f"{GCDS}gcd\ntrace": "",
    f"{FILTERED}gcd": f"{UNRECORDED}its filter is a == 1",
    f"{SENT}{FILTERED}gcd\ngcd": "gcds has 2 hits and no record in the trace; its filter is a == 1",
    "": "",
    # The events are disabled and removed.
    f"{SENT}events/kprobes/sent/enable = 0": NEVER,
    f"{SENT}{CLEAN}": NEVER,
    f"{SENT}{CLEAN}{DISARM}": NEVER,
    f"{SENT}{CLEAN}{SENT}{CLEAN}": NEVER,
    f"{ELSEWHERE}instances/a/events/enable = 0\n{CLEAN}": NEVER,
    f"{SENT}{GCDS}gcd\n{CLEAN}": "",
    f"{SENT}{CLEAN}{GCDS}gcd\n{CLEAN}": "",
    f"{FILTERED}gcd\n{CLEAN}": f"{UNRECORDED}its filter is a == 1",
    f"{FILTERED}gcd\ntracing_on = 0\ntrace\n{CLEAN}": f"{UNRECORDED}its filter is a == 1",
    f"{FILTERED}events/kprobes/gcds/filter = a == 12\ngcd\ntrace\n{CLEAN}": "",
    "kprobe_events = p:sent tcp_sendmsg\nkprobe_events": "",
    # Hits are only passed to a trigger.
    "kprobe_events = p:gcds gcd a=$arg1\nevents/kprobes/gcds/filter = a == 1\n"
    "events/kprobes/gcds/trigger = hist:keys=a\ngcd": "",
    # A trigger enables the event.
    f"{SENT.splitlines()[0]}\nevents/kprobes/sent/trigger = hist:keys=common_pid": NEVER,
    # Recording was off.
    f"tracing_on = 0\n{GCDS}gcd": f"{UNRECORDED}tracing_on was 0",
    f"tracing_on = 0\n{FILTERED}gcd\n{CLEAN}": f"{UNRECORDED}tracing_on was 0",
    f"tracing_on = 0\n{GCDS}tracing_on = 1\ntracing_on = 0\ngcd": "",
    f"{GCDS}tracing_on = 0\ngcd": "",
    f"tracing_on = 0\n{FILTERED}tracing_on = 1\ngcd\ntracing_on = 0\n{CLEAN}": UNRECORDED
    + "its filter is a == 1",
    # The probes were not armed.
    f"{DISARM}{GCDS}gcd": "no hit of gcds: kprobes/enabled was 0, so the probes were not armed",
    f"{DISARM}{GCDS}gcd\n{CLEAN}{ARM}": "no hit of gcds: kprobes/enabled was 0, so ",
    f"{DISARM}{GCDS}{ARM}gcd": "no hit of gcds: the event was enabled while kprobes/enabled was 0",
    f"{GCDS}{DISARM}gcd\n{ARM}": "no hit of gcds: the command never came to gcd while the probes were armed "
    "(kprobes/enabled was 0 for a time)",
    f"{NO_CALLS}{GCDS}gcd\n{CLEAN}{CALLS}": "no hit of gcds: sysctl/kernel/ftrace_enabled was 0, so ",
    f"{NO_CALLS}{INSIDE}{CALLS}": "no hit of inside: the command never came to gcd+0x5; ",
    "kprobe_events = p:m none:f\nevents/kprobes/m/enable = 1": "no hit of m: module none was not loaded, so ",
    "kprobe_events = p:m n\x1b[2J:f\nevents/kprobes/m/enable = 1": "no hit of m: module n\\x1b[2J was ",
}
"""Lines (`FILE = VALUE`, or `gcd` for a call of gcd) -> the beginning of the hint after them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("mount")
    (found / "scratch").mkdir()
    return found


@pytest.mark.parametrize("number", range(4))
def test_what_the_history_tells(place: Path, number: int) -> None:
    """After the requests in each key of STATES, the kernel's history of events and hits leads to the expected
    hint.

    `number` selects one of four parts of STATES, which can run in parallel.
    """
    for lines, expected in [*STATES.items()][number::4]:
        with Kernel() as kernel:
            tree = kernel.filesystem()
            if lines.startswith(ELSEWHERE):
                tree.mkdir(ROOT, "/tracing/instances/a", 0o755)
            for line in lines.splitlines():
                name, _, value = line.partition(" = ")
                if name == "gcd":
                    kernel.call("gcd", 12, 18)
                elif value:
                    flags = os.O_WRONLY | os.O_APPEND
                    write(tree, os.path.normpath(f"/tracing/{name}"), f"{value}\n", flags)
                else:
                    truncate(tree, f"/tracing/{name}")
            history = kernel.components.tracing.kprobe_events.history
            events = [PastEvent(**event) for event in history.events()]
            past = Past(events, kernel.components.tracing.arrays.has_recorded, history.forgotten_hits)
        hint = "".join(nothing_hints(EndedCommand(("true",), 0, str(place), "/"), past))
        assert hint.startswith(expected), lines
        assert bool(hint) is bool(expected), lines


@pytest.mark.parametrize(("line", "why"), [("r1:it gcd", "earlier calls"), ("p:it gcd", "the CPU handled")])
@pytest.mark.parametrize("is_removed", [False, True])
def test_missed_hits_are_no_reason_to_look_elsewhere(
    place: Path, line: str, why: str, is_removed: bool
) -> None:
    with Kernel() as kernel:
        define(kernel, [line, "p:other gcd"])
        probes = [*kernel.tracing.kprobe_events.probes()]
        probes[0].nmissed = 3
        if is_removed:
            remove(kernel, probes)
        history = kernel.components.tracing.kprobe_events.history
        events = [PastEvent(**event) for event in history.events()]
    first, second = nothing_hints(EndedCommand(("true",), 5, str(place), "/"), Past(events))
    assert first.startswith(f"no hit of it: 3 hits missed, because {why}")
    assert second.startswith("no hit of other: the command ended with status 5")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("./program", "data"), "data"),
        (("bash", "script"), None),
        (("bash", "-e", "script", "data"), "data"),
        (("timeout", "9", "python3.11", "script", "data"), "data"),
        (("env", "A=1", "./program"), None),
        (("./program", "./shebang"), None),
        (("sh", "-c", "cat data"), "data"),
        (("sh", "-c", "./program; bash script"), None),
        (("sh", "-c", "bash script data"), "data"),
        (("cat", "script"), "script"),
        (("awk", "{ print }", "data"), "data"),
    ],
)
def test_a_script_is_no_file_outside(
    words: tuple[str, ...], named: str | None, place: Path, tmp_path: Path
) -> None:
    """The hint does not name a file that the command only runs."""
    for file, text in {"script": "true\n", "shebang": "#!/bin/sh\n", "program": "", "data": "1\n"}.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "program").chmod(0o755)
    told = why_no_hit(EndedCommand(words, 0, str(place), str(tmp_path)), ["gcd"])
    assert re.findall(r"such as (\S+),", told) == ([] if named is None else [named])


def test_missed_returns_advise_maxactive_only_where_it_has_an_effect(place: Path) -> None:
    """The hint advises a larger maxactive if the return hook has as many nodes as maxactive says."""
    file = place / "kprobes" / "return_hook"
    file.parent.mkdir(exist_ok=True)
    for hook in SHADOW_STACKS:
        with Kernel(MachineConfig(return_hook=hook)) as kernel:
            file.write_text(read(kernel.filesystem(), "/kprobes/return_hook"))
            shown = set()
            for maxactive in (1, 100):
                define(kernel, [f"r{maxactive}:it gcd"])
                shown.add(read(kernel.filesystem(), "/kprobes/stats/kprobes/it/maxactive"))
                remove(kernel, [*kernel.tracing.kprobe_events.probes()])
        assert ("maxactive" in why_missed(1, str(place), at_return=True)) == (len(shown) == 2), hook


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ((), "hit no probe"),
        (("load",), "hit no probe; other code of the kernel is run by machine/load (fork, tcp, timers...)"),
        (("load", "call"), "is run by machine/load (fork, tcp, timers...) and machine/call"),
    ],
)
@pytest.mark.parametrize("words", [("true",), ("cat", __file__)])
def test_other_ways_to_run_the_kernels_code(
    tmp_path: Path, files: tuple[str, ...], end: str, words: tuple[str, ...]
) -> None:
    """The hint for a probe without hits also names machine/load and machine/call, if the mount has these
    files.
    """
    (tmp_path / "scratch").mkdir()
    (tmp_path / "machine").mkdir()
    for file in files:
        (tmp_path / "machine" / file).touch()
    assert why_no_hit(EndedCommand(words, 0, str(tmp_path), "/"), ["gcd"]).endswith(end)


def test_old_events_are_forgotten_but_for_their_hits(place: Path) -> None:
    with Kernel() as kernel:
        tree = kernel.filesystem()
        for number in range(MAX_REMOVED + 2):
            write(tree, "/kprobe_events", f"p:e{number} gcd\n")
            write(tree, f"/tracing/events/kprobes/e{number}/enable", "1")
            if number == 1:
                kernel.call("gcd", 12, 18)
            write(tree, f"/tracing/events/kprobes/e{number}/enable", "0")
            truncate(tree, "/kprobe_events")
        history = kernel.components.tracing.kprobe_events.history
        events = [PastEvent(**event) for event in history.events()]
        assert [event.name for event in events] == [f"e{number}" for number in range(2, MAX_REMOVED + 2)]
        assert history.forgotten_hits == 1
    ended = EndedCommand(("true",), 0, str(place), "/")
    assert list(nothing_hints(ended, Past(events, recorded=True, forgotten_hits=1))) == []


def define(kernel: Kernel, lines: list[str]) -> None:
    """Define the events `lines`, and enable all kprobe events."""
    with kernel.lock:
        kernel.tracing.dynamic_events.write("".join(f"{line}\n" for line in lines).encode())
        for event in kernel.tracing.kprobe_events.events():
            event.enable(kernel.trace)


def remove(kernel: Kernel, probes: list[TraceKprobe]) -> None:
    with kernel.lock:
        for probe in probes:
            probe.event.disable(kernel.trace)
            kernel.tracing.kprobe_events.remove(probe)


def test_a_reader_gets_each_event_once_while_events_are_removed() -> None:
    with Kernel() as kernel:
        names = [f"e{number}" for number in range(60)]
        define(kernel, [f"p:{name} gcd a=$arg1" for name in names])
        write(kernel.filesystem(), "/tracing/events/kprobes/e50/filter", "a == 1")
        reader = SeqReader(HistoryFile(kernel.components).records_for(Client(1, 0, 0)))
        text = reader.read(4096, 0)
        assert b"e20" in text
        assert b"e50" not in text
        kernel.call("gcd", 12, 18)
        remove(kernel, [*kernel.tracing.kprobe_events.probes()][:4:-1])
        while data := reader.read(4096, len(text)):
            text += data
        events = [PastEvent(**json.loads(line)) for line in text.splitlines()[1:]]
        assert [event.name for event in events] == names
        assert [event.hits for event in events[-10:]] == [1] * 10
        assert [event.filters for event in events if event.filters] == [["a == 1"]]


def test_old_probes_of_an_event_are_forgotten_but_for_their_hits() -> None:
    with Kernel() as kernel:
        tree = kernel.filesystem()
        functions = read(tree, "/tracing/available_filter_functions").split()
        refused = {"gcd", *read(tree, "/kprobes/blacklist").split()}
        others = [name for name in functions if name not in refused and functions.count(name) == 1]
        others = others[: MAX_REMOVED + 1]
        define(kernel, [f"p:many {name}" for name in ("gcd", *others)])
        kernel.call("gcd", 12, 18)
        remove(kernel, [*kernel.tracing.kprobe_events.probes()][:-1])
        (event,) = kernel.tracing.kprobe_events.history.events()
        assert event["places"] == others
        assert event["hits"] == 1


# Cases of scripts in a mount

SHELL_SENT = "echo 'p:sent tcp_sendmsg' > kprobe_events\necho 1 > events/kprobes/sent/enable\n"
SHELL_READS = "echo 'p:reads vfs_read n=$arg3' >> kprobe_events\necho 1 > events/kprobes/reads/enable\n"
SHELL_FILTERED = f"{SHELL_READS}echo 'n == 1' > events/kprobes/reads/filter\n"
SHELL_CLEAN = "echo 0 > events/enable\necho > kprobe_events\n"
SHELL_DISARM = "echo 0 > ../kprobes/enabled\n"
SHELL_ARM = "echo 1 > ../kprobes/enabled\n"
SHELL_NO_CALLS = "echo 0 > ../sysctl/kernel/ftrace_enabled\n"
CASES = {
    SHELL_SENT: NEVER,
    f"{SHELL_SENT}exit 3": "no hit of sent: the command ended with status 3 before a probe was hit",
    f"{SHELL_READS}cat /etc/passwd": "no hit of reads: files outside of the mount, such as /etc/passwd, ",
    f"{SHELL_READS}cd - > /dev/null; cat file": "no hit of reads: files outside of the mount, such as file, ",
    f"{SHELL_READS}head -c 8 ../dev/zero > /dev/null": "",
}
"""Script -> the beginning of its hint, also if the script removes its events at the end."""


@needs_fuse
@pytest.mark.mounted
def test_why_nothing_was_hit(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello\n")
    with (
        daemon(directory, program=REAL_PROGRAM) as running,
        closing(History(Path(running.path()))) as history,
    ):
        for script, expected in CASES.items():
            known = len(history.read().events)
            cleaning = f"trap 'cd $KPROBEFS/tracing; {SHELL_CLEAN.replace(NEWLINE, '; ')}' EXIT"
            command = ("sh", "-c", f'{cleaning}\ncd "$KPROBEFS/tracing"\n{script}')
            environment = {**os.environ, "KPROBEFS": running.path()}
            done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
            past = Past(history.read().events[known:], recorded=True)
            assert past.events, script
            ended = EndedCommand(command, done.returncode, running.path(), str(tmp_path))
            hint = "".join(nothing_hints(ended, past))
            assert hint.startswith(expected), script
            assert bool(hint) is bool(expected), script


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("use", "is_used"),
    [
        ("ls -l", False),
        ("ls -l tracing machine", False),
        ("cd scratch", False),
        ("ls scratch", True),
        ("test ! -e scratch/nosuch", True),
        ("echo > scratch/new", True),
    ],
)
def test_only_names_in_scratch_use_it(directory: Path, use: str, is_used: bool) -> None:
    """To list the directory above scratch/ is no use of scratch/."""
    with (
        daemon(directory, program=REAL_PROGRAM) as running,
        closing(History(Path(running.path()))) as history,
    ):
        subprocess.run(["sh", "-c", use], cwd=running.path(), capture_output=True, check=True)
        assert ("/scratch" in (history.read().used or ())) == is_used


SHELL_COUNTS = (
    "echo 'p:reads vfs_read' > kprobe_events\necho hist:keys=common_pid > events/kprobes/reads/trigger\n"
)


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("use", ["cat ../scratch/file", "echo gcd 12 18 > ../machine/call"])
def test_a_histogram_has_only_hits_of_control_files(directory: Path, use: str) -> None:
    """The hint is shown for a histogram if all its hits come from the mount's control files.

    It is not shown after a request in scratch/ or a call of kernel code.
    """
    with daemon(directory, program=REAL_PROGRAM) as running:
        environment = {**os.environ, "KPROBEFS": running.path()}
        for line, expected in (("cat README", "reads has "), (use, "")):
            script = f'cd "$KPROBEFS/tracing"\n{SHELL_COUNTS}cat /etc/passwd\n{line}'
            command = ("sh", "-c", f"{script}\n:")
            with closing(History(Path(running.path()))) as history:
                subprocess.run(command, env=environment, capture_output=True, check=True)
                ended = EndedCommand(command, 0, running.path(), "/")
                hint = "".join(nothing_hints(ended, history.read()))
            assert hint.startswith(expected), line
            assert ("/etc/passwd" in hint) is bool(expected), line
            assert bool(HINT_LINE.fullmatch(f"kprobefs: {hint}")) is bool(expected), line
            Path(running.path("tracing/events/kprobes/reads/trigger")).write_text("!hist:keys=common_pid")


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("is_native", [False, True])
def test_who_uses_scratch_is_not_told_of_other_files(tmp_path: Path, is_native: bool) -> None:
    """If the command used files in scratch/, the hint does not give files outside of the mount as the reason.

    The script that the command runs is such a file.
    """
    script = tmp_path / "script"
    script.write_text(f'cd "$KPROBEFS/tracing"\n{SHELL_SENT}echo a > ../scratch/a\n')
    image = str(package("linux-image-cloud-amd64")) if is_native else ""
    options = ("--image", image, "--kprobes", "kernel") if is_native else ()
    done = kprobefs("run", *options, "--", "sh", str(script), program=REAL_PROGRAM)
    assert done.returncode == 0
    assert done.stderr.startswith("kprobefs: no hit of sent: the command used scratch/, ")
    assert str(script) not in done.stderr


@needs_fuse
@pytest.mark.mounted
def test_histograms_of_several_events_have_one_hint(directory: Path) -> None:
    more = SHELL_COUNTS.replace("reads", "more").replace(" > ", " >> ")
    command = ("sh", "-c", f'cd "$KPROBEFS/tracing"\n{SHELL_COUNTS}{more}cat README /etc/passwd > /dev/null')
    with (
        daemon(directory, program=REAL_PROGRAM) as running,
        closing(History(Path(running.path()))) as history,
    ):
        environment = {**os.environ, "KPROBEFS": running.path()}
        subprocess.run(command, env=environment, check=True)
        [hint] = nothing_hints(EndedCommand(command, 0, running.path(), "/"), history.read())
    assert hint.startswith("reads, more have ")
    assert HINT_LINE.fullmatch(f"kprobefs: {hint}")


@needs_fuse
@pytest.mark.mounted
def test_the_history_is_read_unseen(directory: Path) -> None:
    with (
        daemon(directory, program=REAL_PROGRAM) as running,
        closing(History(Path(running.path()))) as history,
    ):
        Path(running.path("kprobe_events")).write_text("p:reads vfs_read\n")
        Path(running.path("tracing/events/kprobes/reads/enable")).write_text("1")
        assert [event.hits for event in (history.read(), history.read())[1].events] == [0]
        Path(running.path("machine/version")).read_bytes()
        hits = history.read().events[0].hits
        assert hits > 0
        Path(running.path("tracing/events/kprobes/reads/enable")).write_text("0")
        Path(running.path("kprobe_events")).write_text("")
        assert [event.hits for event in history.read().events] == [hits]


@needs_fuse
@pytest.mark.mounted
def test_run_prints_the_hint() -> None:
    script = f'cd "$KPROBEFS/tracing"\n{SHELL_SENT}{SHELL_CLEAN}exit 3'
    done = kprobefs("run", "--", "sh", "-c", script, program=REAL_PROGRAM)
    assert (done.returncode, done.stderr) == (3, f"kprobefs: {CASES[f'{SHELL_SENT}exit 3']}\n")


GUEST_READ = "head -c 8 ../scratch/file > /dev/null\n"
GUEST_CASES = {
    SHELL_SENT: NEVER,
    f"{SHELL_READS}{GUEST_READ}": "",
    f"{SHELL_FILTERED}{GUEST_READ}": "reads has 1 hit and no record in the trace; its filter is n == 1",
    f"{SHELL_READS}{SHELL_DISARM}": "no hit of reads: kprobes/enabled was 0, so ",
    f"{SHELL_DISARM}{SHELL_READS}{SHELL_ARM}{GUEST_READ}": "no hit of reads: the event was enabled "
    "while kprobes/enabled was 0",
    f"{SHELL_NO_CALLS}{SHELL_READS}{GUEST_READ}": "no hit of reads: sysctl/kernel/ftrace_enabled was 0, so ",
}
"""Script -> the beginning of its hint, for the guest's own kprobes."""


@needs_fuse
@pytest.mark.mounted
def test_why_the_guests_own_probes_were_not_hit(directory: Path) -> None:
    image = str(package("linux-image-cloud-amd64"))
    with daemon(directory, "--image", image, "--kprobes", "kernel", program=REAL_PROGRAM) as running:
        Path(running.path("scratch/file")).write_text("hello, world\n")
        for script, expected in GUEST_CASES.items():
            command = ("sh", "-c", f'cd "$KPROBEFS/tracing"\n{script}')
            environment = {**os.environ, "KPROBEFS": running.path()}
            done = subprocess.run(command, env=environment, capture_output=True, check=False)
            past = present_events(running.path())
            ended = EndedCommand(command, done.returncode, running.path(), "/")
            hint = "".join(nothing_hints(ended, past))
            assert hint.startswith(expected), script
            assert bool(hint) is bool(expected), script
            Path(running.path("tracing/events/enable")).write_text("0")
            Path(running.path("kprobe_events")).write_text("")
            Path(running.path("tracing/trace")).write_text("")
            Path(running.path("sysctl/kernel/ftrace_enabled")).write_text("1")
            Path(running.path("kprobes/enabled")).write_text("1")
