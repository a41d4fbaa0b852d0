"""`kprobefs matrix`: a command on several kernels, with a table, a report and logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from kprobefs.cli import ended_hint, matrix
from kprobefs.cli.duration_hint import HINT
from kprobefs.cli.main import main
from kprobefs.cli.nothing_hint import NO_HIT, NO_RECORD
from kprobefs.common import production_cpus
from kprobefs.common.errors import ExitStatus
from tests.fuse.harness import PYTEST, REAL_PROGRAM, eventually, is_alive, kprobefs, needs_fuse
from tests.fuse.on_terminal import Terminal
from tests.image.linux import debian
from tests.sample import share

X86, ARM = "/x86.deb", "/arm.deb"


def kernel_of(path: str) -> SimpleNamespace:
    architectures = {X86: "x86_64", ARM: "arm64"}
    if path not in architectures:
        raise FileNotFoundError(path)
    return SimpleNamespace(architecture=architectures[path])


@pytest.mark.parametrize(
    ("images", "cpus", "expected"),
    [
        ([X86, ARM], [], [(X86, None), (ARM, None)]),
        (
            [X86, ARM, "/nosuch"],
            ["milan", "genoa"],
            [(X86, "milan"), (X86, "genoa"), (ARM, None), ("/nosuch", None)],
        ),
        # The missing file is refused when it is used.
        ([ARM, "/nosuch"], ["milan"], [(ARM, "milan"), ("/nosuch", "milan")]),
    ],
)
def test_only_x86_kernels_have_a_cpu_each(
    images: list[str],
    cpus: list[str],
    expected: list[tuple[str, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(production_cpus, "kernel_from_file", kernel_of)
    assert list(production_cpus.images_and_cpus(images, cpus)) == expected


@needs_fuse
@pytest.mark.parametrize(("command", "rest"), [("matrix", ["--", "true"]), ("check", ["/dev/null"])])
def test_cpus_for_other_kernels_only_are_refused_at_once(
    command: str, rest: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(production_cpus, "kernel_from_file", kernel_of)
    options = ["--image", ARM, "--cpu", "milan", "--cpu", "genoa"]
    assert main([command, *options, *rest]) == ExitStatus.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kprobefs: --cpu: ")
    assert "arm64" in err


def is_hint(line: str) -> bool:
    return line.startswith(("kprobefs: the durations", "kprobefs: no hit", "kprobefs: fails has"))


SCRIPT = """\
#!/bin/sh
set -e
cd "$KPROBEFS"
echo 'p:reads vfs_read' > kprobe_events
echo 1 > tracing/events/kprobes/reads/enable
cat dev/null
test -e tracing/touched_functions || { echo 'two words' >&2; echo "error: \x01 no file" >&2; exit 4; }
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x86_64": ("--arch", "x86_64")}),
        ({"archs": ["i386"]}, {"i386": ("--arch", "i386")}),
        (
            {
                "images": [
                    ("/d/linux-image-6.1.0-9-amd64_6.1.2-1_amd64.deb", None),
                    ("/boot/vmlinuz-6.12.1", None),
                ],
                "clock": "real",
            },
            {
                "6.1.0-9-amd64": (
                    "--image",
                    "/d/linux-image-6.1.0-9-amd64_6.1.2-1_amd64.deb",
                    "--clock",
                    "real",
                ),
                "6.12.1": ("--image", "/boot/vmlinuz-6.12.1", "--clock", "real"),
            },
        ),
        (
            {"images": [("/a/bzImage", None), ("/b/bzImage", None)], "kprobes": ["kernel"]},
            {
                "bzImage kernel": ("--image", "/a/bzImage", "--kprobes", "kernel"),
                "bzImage kernel #2": ("--image", "/b/bzImage", "--kprobes", "kernel"),
            },
        ),
        (
            {"images": [("host", "milan"), ("host", "/d/a.cpu"), ("/b/Image", None)], "archs": ["riscv64"]},
            {
                "host milan": ("--image", "host", "--cpu", "milan"),
                "host a.cpu": ("--image", "host", "--cpu", "/d/a.cpu"),
                "Image": ("--image", "/b/Image"),
                "riscv64": ("--arch", "riscv64"),
            },
        ),
        (
            {"images": [("host", None)], "profiles": ["linux-6.1", "kprobes-2010"]},
            {
                "host": ("--image", "host"),
                "x86_64 linux-6.1": ("--arch", "x86_64", "--profile", "linux-6.1"),
                "x86_64 kprobes-2010": ("--arch", "x86_64", "--profile", "kprobes-2010"),
            },
        ),
    ],
)
def test_the_kernels_of_a_matrix(options: dict[str, object], expected: dict[str, tuple[str, ...]]) -> None:
    given: dict[str, object] = {
        "images": [],
        "archs": [],
        "profiles": [],
        "kprobes": [],
        "clock": None,
        **options,
    }
    found = matrix.cases(**given)  # type: ignore[arg-type]
    assert {case.name: case.options for case in found} == expected
    assert len({case.log_name for case in found}) == len(found)


@needs_fuse
@pytest.mark.mounted
def test_a_script_passes_on_some(tmp_path: Path) -> None:
    """A script that needs touched_functions, which Linux 6.1 does not have, fails on 6.1 and passes on 7.2.

    The JSON, the logs and the report show both results.
    """
    (tmp_path / "script").write_text(SCRIPT)
    command = ("matrix", "--arch", "x86_64", "--jobs", "2", "--junit", "report.xml", "--json")
    kernels = ("--profile", "linux-6.1", "--profile", "linux-7.2", "--image", "/nosuch.deb")
    done = kprobefs(*command, *kernels, "--", "sh", "script", program=REAL_PROGRAM, cwd=str(tmp_path))
    assert done.returncode == ExitStatus.FAILURE, done.stderr
    found = {each["kernel"]: each for each in json.loads(done.stdout)}
    assert {name: (each["result"], each["status"]) for name, each in found.items()} == {
        "nosuch.deb": ("error", 125),
        "x86_64 linux-6.1": ("failed", 4),
        "x86_64 linux-7.2": ("passed", 0),
    }
    assert found["x86_64 linux-6.1"]["line"] == "error: \x01 no file"
    assert "/nosuch.deb: No such file" in found["nosuch.deb"]["line"]
    assert "two words" in (tmp_path / found["x86_64 linux-6.1"]["log"]).read_text()
    assert done.stderr.count("\n") == 3
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    failure = cases["x86_64 linux-6.1"].find("failure")
    assert failure is not None
    assert failure.get("message") == "error: \ufffd no file"
    assert cases["x86_64 linux-7.2"].find("failure") is None
    assert cases["nosuch.deb"].find("error") is not None


@needs_fuse
@pytest.mark.mounted
def test_the_kernels_refusal_is_in_the_table(tmp_path: Path) -> None:
    """The table and the report quote the refusal from the kernel's error_log, because dash reports any errno
    as an I/O error.
    """
    script = 'echo "p:oops vfs_read %nosuch" >> "$KPROBEFS/kprobe_events"'
    done = kprobefs(
        "matrix", "--junit", "report.xml", "--", "dash", "-c", script, program=REAL_PROGRAM, cwd=str(tmp_path)
    )
    refusal = 'error_log ends with "trace_kprobe: error: Invalid register name" for "p:oops vfs_read %nosuch"'
    assert refusal in " ".join(done.stdout.split())
    assert all(len(line) <= matrix.COLUMNS for line in done.stdout.splitlines())
    failure = ElementTree.parse(tmp_path / "report.xml").getroot().find("testcase/failure")
    assert failure is not None
    assert refusal in str(failure.get("message"))


TEST = """\
def test_a(tracefs):
    with open(tracefs / "kprobe_events", "w") as file:
        file.write("p:oops vfs_read %nosuch")
"""


@needs_fuse
@pytest.mark.mounted
def test_the_row_of_pytest_names_the_test_and_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TEST)
    done = kprobefs(
        "matrix",
        "--json",
        "--",
        sys.executable,
        "-m",
        "pytest",
        "test_a.py",
        program=REAL_PROGRAM,
        cwd=str(tmp_path),
    )
    assert done.returncode == ExitStatus.FAILURE, done.stderr
    [found] = json.loads(done.stdout)
    assert found["line"].startswith("test_a: ")
    assert "Invalid register name" in found["line"]


def on_two_kernels(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script by `matrix` on Linux 6.1 and 7.2; `directory` gets the report r.xml."""
    kernels = ("--arch", "x86_64", "--profile", "linux-6.1", "--profile", "linux-7.2")
    command = ("sh", "-c", f"cd $KPROBEFS; {script}")
    words = ("matrix", "--junit", "r.xml", *kernels, "--", *command)
    return kprobefs(*words, program=REAL_PROGRAM, cwd=str(directory))


@needs_fuse
@pytest.mark.mounted
def test_a_command_that_exits_with_77_is_skipped(tmp_path: Path) -> None:
    """The last line of the command's output is the reason. A skipped kernel is no failure."""
    script = "echo error: tried; test -e tracing/touched_functions || { echo needs Linux 6.4; exit 77; }"
    done = on_two_kernels(script, tmp_path)
    assert done.returncode == ExitStatus.OK, done.stderr
    _, skipped, passed = done.stdout.splitlines()
    assert skipped.split()[2:] == ["skipped", skipped.split()[3], "needs", "Linux", "6.4"]
    assert passed.split()[2] == "passed"
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")
    assert [each.get("message") for each in suite.iter("skipped")] == ["needs Linux 6.4"]


PYTEST_OPTIONS = ("-p", "no:cacheprovider")
SKIPPING = {
    "each": "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n\n@pytest.mark.skip\ndef test_b(): pass\n",
    "module": "import pytest\npytest.skip('needs Linux 6.4', allow_module_level=True)\n",
}


@pytest.mark.parametrize(
    ("text", "options", "verdict", "line"),
    [
        (SKIPPING["each"], (), "skipped", "2 skipped in "),
        (SKIPPING["each"], ("-q",), "skipped", "2 skipped in "),
        (SKIPPING["module"], (), "skipped", "1 skipped in "),
        (SKIPPING["each"], ("-k", "test_b"), "skipped", "1 skipped, 1 deselected in "),
        (SKIPPING["each"], ("-k", "none"), "failed", "2 deselected in "),
        ("", (), "failed", "no tests ran in "),
        (f"{SKIPPING['each']}def test_c(): pass\n", (), "passed", ""),
    ],
    ids=["each", "quiet", "module", "deselected", "none", "empty", "one"],
)
def test_a_pytest_that_runs_no_test(
    text: str, options: tuple[str, ...], verdict: str, line: str, tmp_path: Path
) -> None:
    """A pytest that skips all tests is skipped. One that finds no test has failed, and the row says why."""
    (tmp_path / "test_a.py").write_text(text)
    # Plugins of others would add a warning that their modules are already imported.
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = kprobefs(*PYTEST_OPTIONS, *options, "test_a.py", program=PYTEST, cwd=str(tmp_path), **own)
    log = tmp_path / "log"
    log.write_text(done.stdout)
    found = matrix.result(matrix.Case("x", ()), done.returncode, 0.1, log)
    assert (found.verdict, found.line[: len(line)]) == (verdict, line)
    assert bool(found.line) == bool(line)


@needs_fuse
@pytest.mark.mounted
def test_a_pytest_that_skips_all_tests_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SKIPPING["each"])
    words = (*PYTEST, *PYTEST_OPTIONS, "test_a.py")
    done = kprobefs("matrix", "--json", "--", *words, program=REAL_PROGRAM, cwd=str(tmp_path))
    assert done.returncode == ExitStatus.OK
    [found] = json.loads(done.stdout)
    assert (found["result"], found["line"][: len("2 skipped in ")]) == ("skipped", "2 skipped in ")


@pytest.mark.parametrize(
    ("status", "last", "verdict"),
    [
        (0, "== 3 skipped, 1 warning in 65.10s (0:01:05) ==", "skipped"),
        (0, "no tests ran in 0.01s", "passed"),
        (0, "1 passed, 2 skipped in 0.10s", "passed"),
        (1, "1 failed, 2 skipped in 0.10s", "failed"),
        (1, "2 skipped in 0.10s", "failed"),
        (0, "2 skipped in the log", "passed"),
    ],
)
def test_only_the_end_of_pytest_counts(status: int, last: str, verdict: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"collected 3 items\n{last}\n")
    assert matrix.result(matrix.Case("x", ()), status, 0.1, log).verdict == verdict


def test_a_panicked_kernel_is_not_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"kprobefs: {ended_hint.PANICKED.format(why='on fire')}\n")
    assert matrix.result(matrix.Case("x", ()), 77, 0.1, log).verdict == "failed"
    log.write_text("on fire\n")
    assert matrix.result(matrix.Case("x", ()), 77, 0.1, log).verdict == "skipped"


@needs_fuse
@pytest.mark.mounted
def test_a_kernel_that_has_panicked_fails(tmp_path: Path) -> None:
    """If a kernel has panicked, its row fails, even if the command has ended with status 0."""
    script = (
        """test ! -e tracing/touched_functions || echo 'panic "disk %s on fire" "sda"' > machine/call; true"""
    )
    done = on_two_kernels(script, tmp_path)
    assert done.returncode == ExitStatus.FAILURE, done.stderr
    _, passed, panicked, *rest = done.stdout.splitlines()
    assert passed.split()[2] == "passed"
    assert panicked.split()[2] == "failed"
    assert "disk sda on fire" in done.stdout
    assert "logs: kprobefs-matrix" in rest
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    [failure] = suite.iter("failure")
    assert "disk sda on fire" in str(failure.get("message"))


@needs_fuse
@pytest.mark.mounted
def test_a_killed_matrix_leaves_no_command(tmp_path: Path) -> None:
    script = "echo $$ $KPROBEFS > made; mv made pid; exec sleep 600"
    killed = subprocess.Popen(
        [*REAL_PROGRAM, "matrix", "--", "sh", "-c", script], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    eventually((tmp_path / "pid").exists, patience=60)
    killed.kill()
    killed.wait()
    pid, mount = (tmp_path / "pid").read_text().split()
    eventually(lambda: not is_alive(int(pid)))
    eventually(lambda: not os.path.lexists(mount))


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_results_of_ended_runs(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGINT or SIGTERM, the report has the run that passed, and counts the interrupted and the
    following run as skipped.
    """
    script = "test -e first || { echo > first; exit 0; }; echo $$ $KPROBEFS > made; mv made pid; sleep 600"
    archs = [word for arch in ("x86_64", "riscv64", "i386") for word in ("--arch", arch)]
    started = subprocess.Popen(
        [*REAL_PROGRAM, "matrix", "--junit", "report.xml", *archs, "--", "sh", "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    eventually((tmp_path / "pid").exists, patience=60)
    started.send_signal(number)
    table, _ = started.communicate(timeout=60)
    assert started.returncode == matrix.INTERRUPTED
    rows = {line.split()[0]: line.split()[1] for line in table.splitlines()[1:4]}
    assert rows == {"x86_64": "passed", "riscv64": "stopped", "i386": "stopped"}
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "0", "2")
    pid, mount = (tmp_path / "pid").read_text().split()
    eventually(lambda: not is_alive(int(pid)))
    assert not os.path.lexists(mount)


CLEANS_UP = """
import os, signal, sys, time

def write(text):
    with open(os.environ["KPROBEFS"] + "/tracing/kprobe_events", "a") as events:
        events.write(text)

def clean_up(*_):
    time.sleep(1)
    write("-:mine")
    open("cleaned", "w").close()
    print("a report")
    sys.exit(0)

signal.signal(signal.SIGINT, clean_up)
signal.signal(signal.SIGTERM, clean_up)
write("p:mine vfs_read")
open("ready", "w").close()
time.sleep(600)
"""
"""A program that removes its probe some time after the signal that ends it, and ends with status 0."""


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("shell", "number"),
    share(
        [("exec", signal.SIGINT), ("", signal.SIGINT), ("exec", signal.SIGTERM), ("", signal.SIGTERM)], 0, 3
    ),
)
def test_a_tool_cleans_up_after_a_signal(shell: str, number: signal.Signals, tmp_path: Path) -> None:
    """The mount exists until the processes of a stopped run have cleaned up. The run has not passed, although
    its command has handled the signal.

    `shell`: the word before the tool in the script. With "exec", the tool is the command itself.
    """
    (tmp_path / "tool.py").write_text(CLEANS_UP)
    script = f"{shell} {sys.executable} tool.py; exit 0"
    started = subprocess.Popen(
        [*REAL_PROGRAM, "matrix", "--json", "--", "sh", "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    eventually((tmp_path / "ready").exists, patience=60)
    started.send_signal(number)
    report, _ = started.communicate(timeout=60)
    assert started.returncode == matrix.INTERRUPTED
    assert [(found["result"], found["line"]) for found in json.loads(report)] == [("stopped", "")]
    assert (tmp_path / "cleaned").exists()


@needs_fuse
@pytest.mark.mounted
def test_a_tool_cleans_up_after_the_interrupt_of_a_terminal(tmp_path: Path) -> None:
    """The terminal's interrupt ends the shell at once, but the mount exists until the tool has cleaned up."""
    (tmp_path / "tool.py").write_text(CLEANS_UP)
    script = f"cd {tmp_path}; {sys.executable} tool.py; exit 0"
    terminal = Terminal(80, 24, "matrix", "--logs", str(tmp_path / "logs"), "--", "sh", "-c", script)
    eventually((tmp_path / "ready").exists, patience=60)
    terminal.press("\x03")
    terminal.until("stopped")
    assert terminal.end() == matrix.INTERRUPTED
    assert (tmp_path / "cleaned").exists()


def test_a_table_shows_what_failed() -> None:
    case = matrix.Case("6.1", ())
    results = [
        matrix.Result(case, 0, 1.25, Path("log"), ""),
        matrix.Result(matrix.Case("a longer name", ()), 3, 12, Path("log"), "word " * 18),
        matrix.Result(case, 125, 0.5, Path("log"), "no kernel"),
    ]
    assert list(matrix.table(results)) == [
        "kernel         result   seconds  first line of what failed",
        "6.1            passed       1.2",
        "a longer name  failed      12.0",
        f"    {'word ' * 15}".rstrip(),
        "    word word word",
        "6.1            error        0.5  no kernel",
        "logs: .",
    ]
    assert list(matrix.table(results[:1]))[1:] == ["6.1     passed       1.2"]
    hints = ("durations are virtual", "no hit", "no hit")
    results = [results[0], *(matrix.Result(case, 0, 2, Path("log"), "", hint) for hint in hints)]
    assert list(matrix.table(results))[5:] == [
        "hint of 1 of 4 kernels (6.1): durations are virtual",
        "hint of 2 of 4 kernels (6.1, 6.1): no hit",
    ]


@pytest.mark.parametrize(
    ("hints", "shown"),
    [
        (["lat_41_read is empty", "lat_52_read is empty", "a"], ["lat_41_read is empty", "a"]),
        (["in41 has 2 hits", "in52 has 2 hits"], ["in41 has 2 hits"]),
        (["in has 2 hits", "in has 3 hits"], ["in has 2 hits", "in has 3 hits"]),
        (["never came to f+0x10", "never came to f+0x20"], ["never came to f+0x10", "never came to f+0x20"]),
    ],
)
def test_hints_that_differ_in_numbers_of_names_are_one(hints: list[str], shown: list[str]) -> None:
    case = matrix.Case("6.1", ())
    results = [matrix.Result(case, 0, 2, Path("log"), "", hint) for hint in hints]
    lines = [line for line in matrix.table(results) if line.startswith("hint of ")]
    assert [line.partition("): ")[2] for line in lines] == shown
    assert any("differ" in line for line in lines) == (len(shown) < len(hints))


def test_a_renamed_package_is_named_with_its_release(tmp_path: Path) -> None:
    package = debian.package("linux-image-cloud-amd64")
    (tmp_path / "mine.deb").symlink_to(package)
    (found,) = matrix.cases([(str(tmp_path / "mine.deb"), None)], [], [], [], None)
    release = package.name.split("_")[0].removeprefix("linux-image-")
    assert found.name == f"mine.deb ({release})"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("one\ntwo\n", "one"),
        ("\n one\nmake: *** Error 2\nfailed\n", "make: *** Error 2"),
        (f"one\nkprobefs: {HINT.format(where='of failures')}\n", "one"),
        (f"kprobefs: {HINT.format(where='of lat')}\n", "status 3"),
        (f"one\nkprobefs: {NO_HIT.format(names='fails', why='the command never came to fail')}\n", "one"),
        (
            f"kprobefs: {NO_RECORD.format(hits='2 hits', name='fails', why='its filter is error == 1')}\n",
            "status 3",
        ),
        ("kprobefs: /nosuch: No such file\n", "kprobefs: /nosuch: No such file"),
        ("", "status 3"),
        (
            'x\nTraceback (most recent call last):\n  File "a", line 1, in f\n    raise KeyError("error")\n'
            "KeyError: 'b'\n",
            "KeyError: 'b'",
        ),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
        (
            "Exception in thread Thread-1 (f):\nTraceback (most recent call last):\n  File 'a'\nOSError: b\n",
            "OSError: b",
        ),
        ("bash: x: Permission denied\nTraceback (most recent call last):\nE\n", "bash: x: Permission denied"),
        (
            "t.py F\n\n==== FAILURES ====\n___ test_a ___\n>   assert 1 == 2\nE   assert 1 == 2\nE   x\n",
            "test_a: assert 1 == 2",
        ),
        (
            "=== ERRORS ===\n___ ERROR at setup of test_a ___\nE       RuntimeError: why\n",
            "ERROR at setup of test_a: RuntimeError: why",
        ),
        (
            "=== FAILURES ===\n_ A.test_a[1] _\na.py:1:\n_ _ _ _\nE   OSError: a\n"
            "--- kprobefs ---\nrefused x\n__ test_b __\nE   b\n"
            "--- kprobefs ---\nrefused y\n=== short test summary info ===\n",
            "A.test_a[1]: OSError: a; refused x",
        ),
        (
            "=== FAILURES ===\n_ test_a _\nE   OSError: a\n_ test_b _\nE   b\n--- kprobefs ---\nrefused y\n",
            "test_a: OSError: a",
        ),
        ("=== FAILURES ===\n_ test_a _\n", "=== FAILURES ==="),
        (
            "=== FAILURES ===\n_ test_a _\nE   AssertionError: tool: Traceback (most recent call last):\n"
            "E           File 'a', line 1, in f\nE             raise KeyError('b')\nE         KeyError: 'b'\n"
            "E         \nE       assert 1 == 0\n",
            "test_a: AssertionError: tool: KeyError: 'b'",
        ),
        (
            "=== FAILURES ===\n_ test_a _\nE   RuntimeError: Traceback (most recent call last):\n"
            "E     File 'a', line 1, in f\nE   KeyError: 'b'\n",
            "test_a: RuntimeError: KeyError: 'b'",
        ),
        (
            "=== FAILURES ===\n_ test_a _\nE   OSError: Traceback (most recent call last):\n",
            "test_a: OSError: Traceback (most recent call last):",
        ),
        ("== 5.10\n./try.sh: line 10: REPO: unbound variable\n", "./try.sh: line 10: REPO: unbound variable"),
        ("== 5.10\nmy try: line 10: REPO: unbound variable\n", "my try: line 10: REPO: unbound variable"),
        ("== 5.10\n./try: 3: REPO: parameter not set\n", "./try: 3: REPO: parameter not set"),
        ("== 5.10\ntry.sh: 3: REPO: parameter not set\n", "try.sh: 3: REPO: parameter not set"),
        ("== 5.10\nsh: 3: REPO: parameter not set\n", "sh: 3: REPO: parameter not set"),
        ("== 5.10\nbash: REPO: unbound variable\n", "bash: REPO: unbound variable"),
        ("== 5.10\ncpu: 3: idle\nflush: 3\n+ ./a: line 3: true\ngrep.c:3: a\n", "== 5.10"),
        ("cat: /t/kprobefs-a1_b2c3d/mnt/x: No such file", "cat: $KPROBEFS/x: No such file"),
    ],
)
def test_the_line_of_a_failure(output: str, line: str, tmp_path: Path) -> None:
    """Result.line is the line of the output that best explains the failure.

    Lines with a hint of `run` are in Result.hint, and not in Result.line.
    """
    log = tmp_path / "log"
    log.write_text(output)
    found = matrix.result(matrix.Case("6.1", ()), 3, 1.0, log)
    assert found.line == line
    assert found.hint == next((each[10:] for each in output.splitlines() if is_hint(each)), "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "no command given; add -- CMD..."),
        (("--kprobes", "kernel", "--", "true"), "no distribution's kernel given; add --image"),
        (("--cpu", "milan", "--", "true"), "no distribution's kernel given; add --image"),
        (("--image", "a.deb", "--cpu", "milan", "--cpu", "nosuch", "--", "true"), "--cpu nosuch: "),
        (
            ("--image", "a.deb", "b.deb", "--", "true"),
            "b.deb: unexpected before --; give each kernel its own",
        ),
    ],
)
def test_a_matrix_that_is_none(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", *words]) == ExitStatus.USAGE
    assert why in capsys.readouterr().err
