"""`kprobefs trace`: probes on the command line, records, and JSON output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from kprobefs.cli import trace_output, trace_records
from kprobefs.cli.main import main
from kprobefs.cli.trace_syntax import parse_probes
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import our_mounts
from tests.fuse.harness import (
    PATIENCE,
    PROGRAM,
    REAL_PROGRAM,
    RUN,
    WATCHDOG,
    daemon,
    environment,
    eventually,
    is_alive,
    kprobefs,
    needs_fuse,
    waits_for_mount,
)
from tests.image.linux.debian import package

TRACED = ("trace", "p:vfs_read count=$arg3", "-f", "count == 131072")


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


def test_a_name_that_another_place_has_is_not_taken_again() -> None:
    typed = ["p:f", "p:f+3", "p:g", "p:f"]
    found = parse_probes(typed, "g")
    assert len({probe.event for probe in found}) == len(typed)


@pytest.mark.parametrize("wrong", ["vfs_read", "p:", "p", "t:sched", "x:y", "x:y vfs_read"])
def test_no_probes_of_a_one_liner(wrong: str) -> None:
    with pytest.raises(CliError, match="not a probe"):
        parse_probes([wrong], "g")


def test_a_probe_ends_with_its_filter() -> None:
    found = parse_probes(["p:a vfs_read c=$arg3 if c > 3 && comm != ' if '", "t:g:e if x == 1"], "g")
    assert [probe.filter for probe in found] == ["c > 3 && comm != ' if '", "x == 1"]
    assert [probe.typed for probe in found] == ["p:a vfs_read c=$arg3", "t:g:e"]
    assert found[0].definition == "p:g/a vfs_read c=$arg3"
    with pytest.raises(CliError, match="its event has a filter already"):
        parse_probes(["p:a vfs_read if x", "p:a vfs_write", "p:a vfs_open if y"], "g")


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
    """From a record of a system call, such as `sys_read(fd: 3)`, record() finds the event sys_enter_read and
    its fields.

    The text shows the call in place of the event's name.
    """
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
    """Fields are parsed with the event's print format. A value may contain blanks, quotes, and text that
    looks like another field.
    """
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
    """`kprobefs trace` with a command, on a new mount or an existing mount."""

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
        # Each file is read twice: its data, and its end.
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
            (("p:vfs_read if common_pid == 1", "--", "cat", "f"), "the filter accepted none of 2 hits"),
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

    def test_hits_that_this_kernel_only_counts(self, tmp_path: Path) -> None:
        """If the kernel has counted hits but recorded none, `trace` says so.

        Linux 6.12 for RISC-V records no hits of its own kprobes.
        """
        image = str(package("linux-image-riscv64", "trixie", "riscv64"))
        (tmp_path / "notes.txt").write_text("hello\n")
        for place, why in (("vfs_read+8", "this kernel counts"), ("vfs_mkdir+8", "the command never came")):
            words = ("trace", "--image", image, "--kprobes", "kernel", f"p:{place}", "--", "cat", "notes.txt")
            done = kprobefs(*words, program=REAL_PROGRAM, cwd=str(tmp_path))
            assert f"nothing was recorded: {why}" in done.stderr

    def test_a_refused_place_is_explained_by_explain(self, directory: Path) -> None:
        with daemon(directory, program=REAL_PROGRAM):
            done = kprobefs("trace", "-m", str(directory), "p:vfs_read+3", "--", "true", program=REAL_PROGRAM)
            assert "`kprobefs explain vfs_read+3` says why" in done.stderr

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
        """`trace` copies a command with a relative path, and files and directories among its arguments, to
        scratch/.
        """
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

    def test_the_value_of_an_argument_is_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        command = ("dd", "if=f", "of=made", "status=none")
        result = kprobefs("trace", "p:vfs_read", "--", *command, program=REAL_PROGRAM)
        assert (result.returncode, "vfs_read" in result.stdout) == (0, True)
        assert result.stderr.startswith("kprobefs: made: created in scratch/")
        assert not (tmp_path / "made").exists()

    def test_two_at_a_time(self, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If two `trace` commands use one mount, each has its own copy of a file.

        The first `trace` also records the command of the second one, but no other process of the second one.
        """
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
            second = kprobefs(*words[len(REAL_PROGRAM) :], "cat", "f", program=REAL_PROGRAM)
            ended.write_bytes(b"")
            output = first.communicate()[0]
            left = os.listdir(running.path("scratch"))
        assert (first.returncode, second.returncode, left) == (0, 0, [])
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
        """`trace` records neither its own system calls nor those of the process that reads the records."""
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
        result = kprobefs(*command, program=REAL_PROGRAM, cwd=str(tmp_path))
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
            meant = kprobefs(
                "trace", "p:vfs_read coutn", "-m", str(directory), "--", "true", program=REAL_PROGRAM
            )
            assert "the event vfs_read at coutn; " in " ".join(meant.stderr.split())
            # Linux: the position of the missing value is behind the end of the filter.
            for text, lines in (
                (("p:vfs_raed",), ["      ^", "    similar names: vfs_read, vfs_write, vfs_rmdir"]),
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
            assert "'r:PLACE ret=$retval if ret > 0'" in wrong.stderr
            assert Path(running.path("tracing/dynamic_events")).read_text() == "p:kprobes/mine vfs_write\n"
            assert os.listdir(running.path("tracing/instances")) == []

    def test_a_filter_of_one_probe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A probe's own filter replaces the filter of option -f for this probe.

        The other probes use the filter of -f.
        """
        (tmp_path / "f").write_text("hello\n")
        monkeypatch.chdir(tmp_path)
        probes = (
            "p:vfs_read count=$arg3 pos=+0($arg4):s64",
            'r:vfs_read ret=$retval:s64 if ret > 0 && comm == "cat"',
            "t:syscalls:sys_exit_read if ret == 0",
        )
        result = kprobefs("trace", *probes, "--", "cat", "f", program=REAL_PROGRAM)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.count(": vfs_read: ") == 2
        assert re.findall(r"ret=(-?\d+)", result.stdout) == ["6"]
        assert result.stdout.count(": sys_read -> 0x") == 1
        assert ": sys_read -> 0x0\n" in result.stdout
        both = ("trace", "-f", "pos == 6", probes[0], probes[1], "--", "cat", "f")
        result = kprobefs(*both, program=REAL_PROGRAM)
        assert result.stdout.count(": vfs_read: ") == 1
        assert re.findall(r"ret=(-?\d+)", result.stdout) == ["6"]

    def test_what_a_killed_one_has_left_goes(self, directory: Path) -> None:
        """`trace` removes the events and instances that a killed `trace` has left.

        Events and instances of a living process, or of a process in another pid namespace, stay.
        """
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
                eventually(
                    lambda: [each.read_text() for each in tracing.glob(enables)] == ["1\n"], patience=RUN
                )
                return process

            killed, living = begin(), begin()
            below = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
            killed.kill()
            killed.wait()
            # The process that reads the records keeps the instance open until it ends.
            eventually(lambda: not any(is_alive(int(pid)) for pid in below))
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


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(("is_attaching", "number"), [(True, signal.SIGTERM), (False, signal.SIGINT)])
def test_a_signal_ends_it_while_its_own_mount_is_slow(
    is_attaching: bool, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends `trace` while its own mount still enables or disables an event. The mount continues only
    after `trace` has ended.
    """
    holding = tmp_path / "holding"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    monkeypatch.setenv("TMPDIR", str(temporary))
    if is_attaching:
        holding.touch()
    process = subprocess.Popen(
        [*PROGRAM, "trace", "--seed", "672", "p:vfs_read", "--", "touch", str(holding)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def waits() -> bool:
        return waits_for_mount(process.pid) and holding.exists() and holding.read_text() == "held"

    eventually(waits, "it does not wait", patience=WATCHDOG)
    try:
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE)
        assert (process.returncode, told) == (-number, "")
        eventually(lambda: not any(temporary.iterdir()), "its mount is still there")
        assert holding.exists()
    finally:
        holding.unlink(missing_ok=True)
        process.kill()
