"""Output files of `kprobefs trace -o`: tools for these files, such as Perfetto, can read the files."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kprobefs.cli.raw_records import PageLayout, parse_format, records
from kprobefs.cli.trace import own_name
from kprobefs.cli.trace_graph import SUFFIX, GraphTracer
from kprobefs.cli.trace_records import RecordParser
from kprobefs.common.errors import CliError
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.project.readme import README, blocks

SPEEDSCOPE = "@elg/speedscope@1.9.0-c46bbab"
RETURN_AND_ENTRY = ("r:got vfs_read got=$retval", "p:reads vfs_read count=$arg3", "--stack")
GRAPH = ("--graph", "vfs_read", "p:filled filemap_read")
HEADER_PAGE = """\
\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;
\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;
\tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;
\tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;
"""
FORMAT = """\
name: ev
ID: 7
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:__data_loc char[] name;\toffset:8;\tsize:4;\tsigned:0;
\tfield:s16 n[2];\toffset:12;\tsize:4;\tsigned:1;
\tfield:char text[8];\toffset:16;\tsize:8;\tsigned:1;
"""


def word(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "little")


def page(time: int, *events: bytes) -> bytes:
    data = b"".join(events)
    return (word(time, 8) + word(len(data), 8) + data).ljust(4096, b"\0")


def event(delta: int, data: bytes) -> bytes:
    return word(len(data) // 4 | delta << 5) + data


DATA = word(7, 4) + word(77) + word(24 | 4 << 16) + b"\xff\xff\x02\0" + b"a\0bcdefg" + b"abc\0"


def test_pages_are_decoded() -> None:
    """Pages of the ring buffer are decoded if they have time extensions, absolute times, padding and large
    events.
    """
    extension = word(30 | 5 << 5) + word(1)
    absolute = word(31 | 9 << 5) + word(2)
    padding = word(29 | 3 << 5) + word(12) + bytes(8)
    large = word(0 | 1 << 5) + word(len(DATA) + 4) + DATA
    pages = {
        0: [page(100, event(1, DATA), extension, event(2, DATA), padding, large)],
        1: [page(50, absolute, event(0, DATA), word(29))],
    }
    found = list(records(pages, PageLayout(HEADER_PAGE), [parse_format(FORMAT)]))
    start = 101
    second = start + (5 | 1 << 27) + 2
    assert [(each.cpu, each.time) for each in found] == [
        (0, start),
        (0, second),
        (0, second + 3 + 1),
        (1, 9 | 2 << 27),
    ]
    assert found[0].pid == 77
    assert found[0].values == {"name": "abc", "n": [-1, 2], "text": "a"}


def test_a_stack_belongs_to_the_record_of_its_cpu() -> None:
    parser = RecordParser()
    head = "             cat-7     [00{}] .....     0.00100{}: "
    lines = [
        f"{head.format(0, 1)}one: (f+0x0/0x8)",
        f"{head.format(1, 2)}two: (f+0x0/0x8)",
        f"{head.format(0, 3)}<stack trace>",
        " => f",
        " => g",
        f"{head.format(0, 4)}three: (f+0x0/0x8)",
    ]
    found = [each for line in lines for each in parser.feed(line)] + list(parser.rest())
    stacks = {each["event"]: each.get("stack") for each in found}
    assert stacks == {"one": ["f", "g"], "two": None, "three": None}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    (directory / "f").write_text("hello\n")
    return directory


def traced(work: Path, name: str, *words: str) -> Path:
    """Trace `cat f` with the output file `name`, and return the path of this file.

    Assert that the hint about the virtual clock is shown exactly if the file has durations.
    """
    done = kprobefs("trace", "-o", name, *words, "--", "cat", "f", program=REAL_PROGRAM, cwd=str(work))
    has_durations = "--graph" in words or (name.endswith(".trace.json") and "r:" in "".join(words))
    assert (done.returncode, done.stdout) == (0, "hello\n")
    hint = "kprobefs: the durations in this trace count readings of the virtual clock"
    assert [line[: len(hint)] for line in done.stderr.splitlines()] == [hint] * has_durations
    return work / name


@pytest.fixture(scope="module")
def chrome(work: Path) -> Path:
    return traced(work, "calls.trace.json", *RETURN_AND_ENTRY)


@pytest.fixture(scope="module")
def graph(work: Path) -> Path:
    return traced(work, "graph.trace.json", *GRAPH)


def slices(file: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(file.read_text())["traceEvents"] if each["ph"] == "X"]


@needs_fuse
@pytest.mark.mounted
def test_the_guides_timeline_shows_what_the_optimizer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = blocks("sh", README.parent / "docs" / "guide" / "optimization.md")
    (tmp_path / "calls.sh").write_text(script)
    monkeypatch.chdir(tmp_path)
    words = ("--clock", "model", "-o", "calls.trace.json", "p:gcd+5", "r:gcd", "--", "sh", "calls.sh")
    done = kprobefs("trace", *words, program=REAL_PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    durations = [each["dur"] for each in slices(tmp_path / "calls.trace.json")]
    assert len(durations) == 6
    by_breakpoint, by_jump = durations[:3], durations[3:]
    for first, *others in (by_breakpoint, by_jump):
        # Python handles the first hit of each kind.
        assert len(set(others)) == 1
        assert first > others[0]
    assert all(before > after for before, after in zip(by_breakpoint, by_jump, strict=True))


@needs_fuse
@pytest.mark.mounted
def test_a_probed_return_is_a_slice(chrome: Path) -> None:
    events = json.loads(chrome.read_text())["traceEvents"]
    calls = [("vfs_read", {"count": 131072, "got": got}) for got in (6, 0)]
    shown = [
        {name: value for name, value in each["args"].items() if name != "stack"} for each in slices(chrome)
    ]
    assert [(each["name"], args) for each, args in zip(slices(chrome), shown, strict=True)] == calls
    marks = [each for each in events if each["ph"] == "i"]
    assert [(each["name"], each["args"]["count"]) for each in marks] == [("reads", 131072)] * 2
    # The mark of the entry probe lies within the slice of the same call.
    for mark, each in zip(marks, slices(chrome), strict=True):
        assert each["dur"] > 0
        assert abs(mark["ts"] - each["ts"]) < each["dur"]
    assert marks[0]["args"]["stack"][:2] == ["vfs_read", "ksys_read"]
    names = {each["args"]["name"]: each["tid"] for each in events if each["ph"] == "M"}
    assert names == {"cat": marks[0]["tid"]}


@needs_fuse
@pytest.mark.mounted
def test_a_filter_leaves_the_right_slices(work: Path) -> None:
    found = slices(traced(work, "filtered.trace.json", "r:vfs_read got=$retval", "-f", "got == 0"))
    whole = slices(traced(work, "whole.trace.json", "r:vfs_read got=$retval"))
    assert [each["args"] for each in found] == [{"got": 0}]
    assert found[0]["dur"] == whole[1]["dur"]


@needs_fuse
@pytest.mark.mounted
def test_durations_of_another_clock_have_no_hint(work: Path) -> None:
    """If an existing mount uses the clock `real`, `trace` prints no hint about durations."""
    trace = f"{shlex.join(REAL_PROGRAM)} trace -m $KPROBEFS -o by.trace.json r:vfs_read -- cat f"
    script = f"{trace}; echo --; echo real > $KPROBEFS/machine/clock; {trace}"
    done = subprocess.run(
        [*REAL_PROGRAM, "run", "--", "sh", "-ec", script],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    before, after = done.stdout.split("--\n")
    assert before.count("readings of the virtual clock") == 1
    assert after == "hello\n"


@needs_fuse
@pytest.mark.mounted
def test_a_call_graph_is_nested_slices(graph: Path) -> None:
    found = slices(graph)
    roots = [each for each in found if each["name"] == "vfs_read"]
    assert len(roots) == 2
    for each in found:
        around = [root for root in roots if root["ts"] <= each["ts"] < root["ts"] + root["dur"]]
        assert [round(each["ts"] + each["dur"] - root["ts"] - root["dur"], 3) <= 0 for root in around] == [
            True
        ]


@needs_fuse
@pytest.mark.mounted
def test_a_call_graph_in_each_kind_of_file(work: Path, graph: Path) -> None:
    """A call graph has the same calls and durations in a Chrome trace, as JSON, and as folded stacks."""
    found = json.loads(traced(work, "graph.json", *GRAPH).read_text())
    exits = [each["fields"] for each in found if each["event"] == "funcgraph_exit"]
    expected = sorted((each["name"], each["dur"]) for each in slices(graph))
    assert sorted((each["func"], each["us"]) for each in exits) == expected
    assert [each["event"] for each in found].count("filled") == 2
    entries = [each["fields"] for each in found if each["event"] == "funcgraph_entry"]
    assert entries[0] == {"func": "vfs_read", "depth": 0}
    folded = traced(work, "graph.folded", *GRAPH).read_text().splitlines()
    total = sum(int(line.rpartition(" ")[2]) for line in folded)
    assert total == round(1000 * sum(dur for name, dur in expected if name == "vfs_read"))
    assert all(line.startswith("cat;vfs_read") for line in folded)


@pytest.fixture(scope="module")
def stacks(work: Path) -> Path:
    return traced(work, "stacks.folded", "p:vfs_read")


@needs_fuse
@pytest.mark.mounted
def test_stacks_are_folded(stacks: Path) -> None:
    folded = stacks.read_text()
    assert folded.rstrip("\n").rpartition(" ")[2] == "2"
    assert folded.count("\n") == 1
    assert ";ksys_read;vfs_read 2" in folded


@needs_fuse
@pytest.mark.mounted
@pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="no trace-cmd: apt-get install trace-cmd")
def test_trace_cmd_reads_its_file(work: Path) -> None:
    on_32_bits = (*RETURN_AND_ENTRY, "--arch", "i386")
    for name, words in (("calls.dat", RETURN_AND_ENTRY), ("graph.dat", GRAPH), ("i386.dat", on_32_bits)):
        file = traced(work, name, *words)
        report = subprocess.run(
            ["trace-cmd", "report", "-i", file], capture_output=True, text=True, timeout=60, check=True
        )
        assert report.stderr == ""
        assert report.stdout.startswith("cpus=1\n")
        if words is GRAPH:
            assert report.stdout.count("vfs_read() {") == 2
            assert report.stdout.count(" filled: ") == 2
        else:
            assert report.stdout.count("got=0x") == 2
            assert report.stdout.count("count=0x20000") == 2
            assert report.stdout.count("=> ksys_read") == 4


def of_perfetto(file: Path, query: str) -> list[list[str]]:
    """Return the rows with which Perfetto's trace processor answers `query` about `file`."""
    command = file.with_name("query.sql")
    command.write_text(f"{query};\n")
    done = subprocess.run(
        ["trace_processor_shell", "-q", command, file], capture_output=True, text=True, timeout=60, check=True
    )
    return list(csv.reader(done.stdout.splitlines()))[1:]


@needs_fuse
@pytest.mark.mounted
@pytest.mark.skipif(
    shutil.which("trace_processor_shell") is None,
    reason="no trace_processor_shell, Perfetto's parser",
)
def test_perfetto_reads_its_files(graph: Path, chrome: Path) -> None:
    for file in (graph, chrome):
        assert of_perfetto(file, "SELECT name FROM stats WHERE severity = 'error' AND value > 0") == []
        found = of_perfetto(
            file,
            "SELECT thread.name, slice.name, slice.dur FROM slice "
            "JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) "
            "WHERE slice.dur > 0",
        )
        expected = sorted((each["name"], each["dur"] * 1000) for each in slices(file) if each["dur"])
        assert {task for task, _, _ in found} == {"cat"}
        assert sorted(name for _, name, _ in found) == [name for name, _ in expected]
        durations = sorted(float(duration) for _, _, duration in found)
        assert durations == pytest.approx(sorted(duration for _, duration in expected), abs=1)


@pytest.fixture(scope="module")
def speedscope() -> Path:
    """Return the directory of Speedscope's release, installed by npm. Skip the test if npm cannot
    install it.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("no npm and node, which install and run Speedscope's parser")
    place = Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kprobefs", "tests", "speedscope"
    )
    release = place / "node_modules" / "@elg" / "speedscope" / "dist" / "release"
    if not release.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(place), SPEEDSCOPE]
        try:
            subprocess.run(command, capture_output=True, timeout=60, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm can't install {SPEEDSCOPE}: {error}")
    return release


@needs_fuse
@pytest.mark.mounted
def test_speedscope_reads_its_files(stacks: Path, graph: Path, chrome: Path, speedscope: Path) -> None:
    def parsed(file: Path) -> list[dict[str, Any]]:
        command = ["node", str(Path(__file__).with_name("speedscope.js")), str(speedscope), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    [track] = parsed(graph)
    assert track["name"].startswith("cat ")
    opened = [name.partition(" ")[0] for kind, name, _ in track["calls"] if kind == "open"]
    assert sorted(opened) == sorted(each["name"] for each in slices(graph))
    assert opened[0] == "vfs_read"
    [track] = parsed(chrome)
    assert [kind for kind, name, _ in track["calls"]] == ["open", "close"] * 2
    [track] = parsed(stacks)
    assert [name for kind, name, _ in track["calls"] if kind == "open"][-2:] == ["ksys_read", "vfs_read"]


KEPT = (
    "current_tracer",
    "set_graph_function",
    "set_ftrace_notrace_pid",
    "tracing_on",
    "options/funcgraph-tail",
    "options/funcgraph-proc",
)
"""Files that a call graph changes while it is recorded."""
IN_USE = {
    ("current_tracer", "function", "nop"): "current_tracer is function",
    ("set_graph_function", "vfs_read", ""): "set_graph_function has a selection",
    ("set_ftrace_pid", "1", ""): "set_ftrace_pid has a selection",
    ("events/sched/sched_process_exec/enable", "1", "0"): "sched:sched_process_exec is enabled",
    ("trace_marker", "mine", None): "its trace has records",
}
"""File, text that is written, and text that ends the effect -> the reason why a call graph is refused."""


@needs_fuse
@pytest.mark.mounted
def test_a_call_graph_on_a_mount(directory: Path) -> None:
    """After a call graph on an existing mount, the tracer's files are as before.

    If the tracer is in use already, `trace --graph` is refused.
    """
    words = ("trace", "-m", str(directory), "--json", "--graph", "vfs_read", "--", "cat", "f")
    with daemon(directory, program=REAL_PROGRAM) as running:
        Path(running.path("scratch/f")).write_text("hello\n")
        tracefs = Path(running.path("tracing"))
        (tracefs / "set_ftrace_notrace_pid").write_text("77")
        before = [(tracefs / name).read_text() for name in KEPT]
        done = kprobefs(*words, program=REAL_PROGRAM)
        assert (done.returncode, done.stderr.splitlines()[:1]) == (0, ["hello"])
        found = [json.loads(line) for line in done.stdout.splitlines()]
        roots = {(each["comm"], each["fields"]["func"]) for each in found if not each["fields"]["depth"]}
        assert roots == {("cat", "vfs_read")}
        assert [(tracefs / name).read_text() for name in KEPT] == before
        for (name, text, end), why in IN_USE.items():
            (tracefs / name).write_text(text)
            with pytest.raises(CliError, match=f"trace --graph: {why}; "):
                GraphTracer(tracefs).prepare("vfs_read", (), str)
            if end is not None:
                (tracefs / name).write_text(end)
        assert "mine" in (tracefs / "trace").read_text()
        (tracefs / "trace").write_text("")
        (tracefs / "instances" / f"{own_name()}{SUFFIX}").mkdir()
        assert "another one records on this mount" in kprobefs(*words, program=REAL_PROGRAM).stderr


@needs_fuse
@pytest.mark.mounted
def test_a_call_graph_after_a_killed_one(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        tracefs = Path(running.path("tracing"))
        before = [(tracefs / name).read_text() for name in KEPT]
        # The instance's name has another start time than this process, so its process has ended.
        pid, _, namespace = own_name().removeprefix("trace_").split("_")
        (tracefs / "instances" / f"trace_{pid}_0_{namespace}{SUFFIX}").mkdir()
        tracer = GraphTracer(tracefs)
        tracer.prepare(("vfs_write",), (), str)
        tracer.start([1])
        words = ("--graph", "vfs_read", "--", "true")
        assert kprobefs("trace", "-m", str(directory), *words, program=REAL_PROGRAM).returncode == 0
        assert [(tracefs / name).read_text() for name in KEPT] == before
        assert not os.listdir(tracefs / "instances")


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        ("vfs_raed", "similar names: vfs_read, vfs_write, vfs_rmdir"),
        ("nosuch*", "see available_filter_functions"),
    ],
)
def test_a_call_graph_of_no_function(function: str, remedy: str) -> None:
    done = kprobefs("trace", "--graph", function, "--", "true", program=REAL_PROGRAM)
    assert done.returncode == 1
    assert done.stderr == f"kprobefs: --graph {function}: no such function can be traced; {remedy}\n"


@needs_fuse
@pytest.mark.mounted
def test_call_graphs_of_several_functions() -> None:
    script = 'cat "$KPROBEFS/kprobes/list"; mkdir "$KPROBEFS/scratch/d"'
    words = ("--graph", "vfs_read", "--graph", "vfs_mk*", "--", "sh", "-c", script)
    done = kprobefs("trace", "--json", *words, program=REAL_PROGRAM)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    entries = [record["fields"] for record in records if record.get("event") == "funcgraph_entry"]
    outermost = {entry["func"] for entry in entries if entry["depth"] == 0}
    assert outermost == {"vfs_read", "vfs_mkdir"}


@needs_fuse
@pytest.mark.mounted
def test_a_call_graph_of_a_kernel_without_ftrace() -> None:
    done = kprobefs(
        "trace", "--profile", "kprobes-2010", "--graph", "vfs_read", "--", "true", program=REAL_PROGRAM
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kprobefs: --graph vfs_read: no function graph; use ")
