"""The programs in benchmarks/ start, and report what README's tables need. The figures are not judged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emulated_kernel.image import build_images
from tests.guests.linux.debian_kernel import lasting_cache
from tests.image.linux import debian

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = {
    "events.py": ["--counts", "10", "--rounds", "1", "--daemons", "1"],
    "hit.py": ["--hits", "200", "--rounds", "1"],
    "first_line.py": ["--runs", "1"],
    "start_up.py": ["--runs", "1"],
    "boot.py": ["--runs", "1"],
    "elf.py": ["--runs", "1"],
    "instructions.py": ["--rounds", "1", "--kib", "1"],
    "sources.py": ["--hits", "50", "--rounds", "1", "--only", "here, riscv64"],
    "state.py": ["--hits", "200", "--rounds", "1"],
    "vcpus.py": ["--rounds", "1", "--switches", "10"],
    "ways.py": [],
    "scratch.py": ["--rounds", "1", "--mib", "1"],
    "idle.py": ["--seconds", "0.1"],
    "open_read_close.py": ["--batches", "2", "--size", "5"],
}
WITH_PROGRAMS = {
    "events.py",
    "first_line.py",
    "start_up.py",
    "scratch.py",
    "idle.py",
    "open_read_close.py",
}
"""Benchmarks that start commands. The others run in the tests' process, which is quicker."""


def run(name: str, *options: str) -> str:
    command = [sys.executable, BENCHMARKS / name, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a benchmark in this process, which has imported kprobefs's modules.

    The function takes the benchmark's name and arguments, and returns the output.
    """

    def run_path(name: str, *options: str) -> str:
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [name, *options])
        # Benchmarks change the environment of their commands.
        monkeypatch.setattr(os, "environ", os.environ.copy())
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    return run_path


@pytest.mark.parametrize("name", sorted({*QUICK, "qemu.py", "real_linux.py", "round.py"}))
def test_says_what_it_measures(
    name: str, run_here: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here(name, "--help")
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_checkout_measures_its_own_code(tmp_path: Path) -> None:
    """A benchmark uses the code of its own checkout, not the installed kprobefs and not that in the working
    directory.
    """
    for name in ("checkout", "elsewhere"):
        (tmp_path / name / "kprobefs").mkdir(parents=True)
        (tmp_path / name / "kprobefs" / "__init__.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "kprobefs" / "__main__.py").write_text("import kprobefs\nprint(kprobefs.NAME)\n")
    benchmarks = tmp_path / "checkout" / "benchmarks"
    benchmarks.mkdir()
    shutil.copy(BENCHMARKS / "common.py", benchmarks)
    (benchmarks / "own.py").write_text(
        "import subprocess\n"
        "from common import PROGRAM\n"
        "import kprobefs\n"
        "print(kprobefs.NAME, flush=True)\n"
        "subprocess.run(PROGRAM, check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, benchmarks / "own.py"],
        cwd=tmp_path / "elsewhere",
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["checkout", "checkout"]


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_reports_distributions(name: str, run_here: Callable[..., str]) -> None:
    if name in ("scratch.py", "open_read_close.py") and (os.geteuid() != 0 or shutil.which("gcc") is None):
        pytest.skip("what it compares with needs gcc and root")
    start = run if name in WITH_PROGRAMS else run_here
    figures = json.loads(start(name, "--json", "--repeats", "0", *QUICK[name]))
    assert figures
    for figure in figures:
        assert figure["samples"] >= 1
        assert figure["min"] <= figure["p10"] <= figure["median"] <= figure["p90"]


def of_common(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that uses benchmarks/common.py, and return the completed process."""
    text = f"from common import Distribution, arguments, report, steady\n{program}"
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, cwd=BENCHMARKS, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )


HOST = r"host: load \d+\.\d\d at the start, \d+\.\d\d at the end(; \d+\.\d % of CPU time stolen)?"


def test_a_table_has_median_deciles_ratio_and_goal() -> None:
    done = of_common(
        "first = Distribution('first', 'us', tuple(range(100, 111)), target=6)\n"
        "second = Distribution('second', 'us', (210.0,), target=600)\n"
        "third = Distribution('third', 'us', tuple(range(1, 12)), target=6, runs=3)\n"
        "fourth = Distribution('fourth', 'us', (-1.0, 0.0, 6.0))\n"
        "none = Distribution('none', 'traps', (0.0,))\n"
        "report([first, second, third, fourth, none], arguments(None).parse_args([]))"
    )
    _, first, second, third, fourth, none, host = done.stdout.splitlines()
    assert first.split() == ["first,", "us", "105.000", "101.000", "109.000", "1.00", "6"]
    assert second.split() == ["second,", "us", "210.000", "210.000", "210.000", "2.00", "600"]
    assert third.split("0.06")[1].split(maxsplit=1) == ["6", "wide, the best of 3 runs"]
    assert fourth.split()[-1] == "noise"
    assert none.split() == ["none,", "traps", "0.000", "0.000", "0.000", "-", "-"]
    assert re.fullmatch(HOST, host)


def test_json_has_the_host_on_standard_error() -> None:
    """With --json, standard output has the figures, and standard error describes the host.

    If all samples are equal, every decile is exactly this value. Inexact interpolation would change 6.9632.
    """
    done = of_common(
        "report([Distribution('pages', 'kB', (6.9632,) * 3)], arguments(None).parse_args(['--json']))"
    )
    (figure,) = json.loads(done.stdout)
    assert {figure[name] for name in ("min", "p10", "median", "p90")} == {6.9632}
    assert figure["runs"] == 1
    assert re.fullmatch(HOST, done.stderr.strip())


@pytest.mark.parametrize(
    ("repeats", "runs", "samples"),
    [
        (0, [1, 1], [[1.0, 9.0], [5.0, 5.1]]),
        (1, [2, 1], [[4.0, 6.0], [5.0, 5.1]]),
        (2, [3, 1], [[4.0, 4.1], [5.0, 5.1]]),
        (3, [3, 1], [[4.0, 4.1], [5.0, 5.1]]),
    ],
)
def test_a_wide_row_is_measured_again(repeats: int, runs: list[int], samples: list[list[float]]) -> None:
    """Only rows with widely spread samples are measured again, up to `repeats` times.

    The other rows keep their samples.
    """
    done = of_common(
        "import json, sys\n"
        "wide = iter([(1.0, 9.0), (4.0, 6.0), (4.0, 4.1), (7.0, 7.0)])\n"
        "narrow = iter([(5.0, 5.1), (6.0, 6.1), (6.0, 6.1), (6.0, 6.1)])\n"
        "def measure(unit):\n"
        "    return [Distribution('row', unit, next(wide)), Distribution('other', unit, next(narrow))]\n"
        f"options = arguments(None).parse_args(['--repeats', '{repeats}'])\n"
        "found = steady(options, measure, 'ns')\n"
        "print(json.dumps([[each.runs for each in found], [each.samples for each in found]]))"
    )
    assert json.loads(done.stdout) == [runs, samples]


def test_programs_of_a_benchmark_have_bytecode_caches(tmp_path: Path) -> None:
    """Programs of a benchmark write bytecode caches, even if Python's variables in the shell forbid this."""
    (tmp_path / "cached.py").touch()
    program = (
        "import subprocess, sys\narguments(None)\nsubprocess.run([sys.executable, '-c', 'import cached'])"
    )
    of_common(
        program,
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONPYCACHEPREFIX=str(tmp_path / "elsewhere"),
        PYTHONPATH=str(tmp_path),
    )
    assert [path.name.split(".")[0] for path in tmp_path.glob("__pycache__/*.pyc")] == ["cached"]


def _lines(folder: Path) -> list[str]:
    return [line for path in sorted(folder.glob("*.md")) for line in path.read_text().splitlines()]


def test_rows_of_the_sources_are_filled_in(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """sources.py fills in the row that it measured and changes no other. Each row's label occurs once in the
    pages.
    """
    pages, copies = BENCHMARKS.parent / "docs" / "reference" / "sources", tmp_path / "sources"
    shutil.copytree(pages, copies)
    run_here("sources.py", *QUICK["sources.py"], "--write", "--pages", str(copies))
    before, after = _lines(pages), _lines(copies)
    [(old, new)] = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] or [("", "")]
    assert old.startswith("| here, riscv64 |")
    assert re.fullmatch(r"\| here, riscv64 \|( -?[\d.]+ \|){2} ([\d.]+ : 1)? ?\|", new)
    for row in runpy.run_path(str(BENCHMARKS / "sources.py"))["ROWS"]:
        assert sum(line.startswith(f"| {row.label} |") for line in before) == 1, row.label


# Beside virtual machines

SIDE = (
    "import qemu\n"
    "from pathlib import Path\n"
    "def side(title, *lines):\n"
    "    return qemu.Side(title, lambda _prepared: ['printf', '%s\\n', *lines])\n"
    "reads = 'cat-7  [000] .....  0.1: reads: (vfs_read+0x0/0xd0) count=0x20000'\n"
)
"""Program for qemu.py that makes a side, whose machine prints lines."""


def test_the_rows_of_both_sides_are_compared(tmp_path: Path) -> None:
    (tmp_path / "docs/reports").mkdir(parents=True)
    shutil.copy(BENCHMARKS.parent / "README.md", tmp_path)
    of_common(
        SIDE
        + "first = side('machine', 'booting', 'READY', reads, 'ROW 900 ns a hit', 'ROW -9 ns a return',\n"
        "    'ROW 2500000 us register 1000 events', 'DONE')\n"
        "other = side('here', 'READY', reads, 'ROW 60 ns a hit', 'ROW 80 ns a return',\n"
        "    'ROW 250000 us register 1000 events', 'DONE')\n"
        "for each in (first, other, first, other):\n"
        "    qemu.round_of(each, None)\n"
        f"given = ['--image', 'kernel.deb', '--pages', {str(tmp_path)!r}]\n"
        "qemu.write(qemu.parser().parse_args(given), [first, other], ['virtme-ng: no access to /dev/kvm'])"
    )
    [report] = (tmp_path / "docs/reports").glob("*-qemu.md")
    text = report.read_text()
    assert "Skipped: virtme-ng: no access to /dev/kvm." in text
    assert "kernel.deb" in text
    assert re.search(HOST, text)
    assert "| a hit | 900 ns (900 to 900) | 60 ns (60 to 60) | 15 |" in text
    assert "| a return | noise | 80 ns (80 to 80) | - |" in text
    readme = (tmp_path / "README.md").read_text()
    assert "| register 1000 events | 2.5 s | 0.25 s | 10 |" in readme
    assert f"](docs/reports/{report.name})" in readme
    for start in ("first start, to the script", "start, to the script", "start, to the first trace line"):
        assert re.search(rf"^\| {start} \| [\d.]+ s \| [\d.]+ s \| [\d.]+ \|$", readme, re.MULTILINE)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("READY", "FAILED a hit: 9 hits, not 10", "DONE"), "machine: FAILED a hit: 9 hits, not 10"),
        (("READY", "panic"), "panic"),
    ],
)
def test_a_script_that_fails_gives_no_figures(lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        of_common(SIDE + f"qemu.round_of(side('machine', *{lines!r}), None)")
    assert failed.value.stderr.strip().endswith(said)


def test_without_its_programs_nothing_is_compared(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "qemu.py", "--json"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout) == []
    packages = "qemu-system-x86 busybox-static gcc make cpio dpkg apt"
    assert (
        f"skipped: missing programs; apt install {packages}" in done.stderr or os.uname().machine != "x86_64"
    )


def _kept_module(image: Path) -> Path:
    """Return the path for the compiled module of qemu.py. The path depends on image, compiler and source."""
    source = (BENCHMARKS / "qemu_guest/kb.c").read_bytes()
    compiler = build_images.tool_version("gcc")
    digest = hashlib.sha256(repr((image.name, compiler, source)).encode()).hexdigest()
    place = lasting_cache("bench-module")
    place.mkdir(parents=True, exist_ok=True)
    return place / f"{digest}.ko"


@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_runs_on_a_mount() -> None:
    """benchmarks/qemu.py runs on a mount, and checks its counts of hits and of definitions itself.

    The module stays on this machine, and is compiled again if its source, the kernel or the compiler changes.
    """
    command = [sys.executable, BENCHMARKS / "qemu.py", "--json", "--sides", "kprobefs", "--no-first-start"]
    sizes = ["--rounds", "1", "--turns", "1", "--calls", "1", "--events", "30"]
    image = debian.package("linux-image-cloud-amd64")
    files = ["--image", str(image), "--module", str(_kept_module(image))]
    done = subprocess.run(
        [*command, *sizes, *files], check=False, capture_output=True, text=True, timeout=870
    )
    if "skipped:" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[0])
    assert done.returncode == 0, done.stderr
    found = {(figure["name"].rpartition(", ")[0], figure["unit"]) for figure in json.loads(done.stdout)}
    hits = {f"a {what}, {way}" for what in ("hit", "record") for way in ("stepped", "optimized", "by ftrace")}
    assert {(name, "ns") for name in {*hits, "a hit, emulated", "a return", "a record of a return"}} <= found
    many = ("register 30 events", "read list, 30 events", "read kprobe_profile, 30 events", "clear 30 events")
    assert {(name, "s") for name in many} <= found
