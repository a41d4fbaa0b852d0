"""`kprobefs coverage`: every instruction is counted exactly once, in each way of counting."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic, Tactics
from kprobefs.cli.main import main
from kprobefs.common.progress import Progress
from kprobefs.measure.coverage import Counting, _decoded, _encoded
from tests.image.linux import made
from tests.oracle.recorded import oracle_directory

Counted = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"
VERDICTS = ("optimized", "breakpoint", "ftrace", "refused")
CALL_FENTRY = b"\xe8\0\0\0\0"
MOVES = bytes.fromhex("4889e5") * 8


def counted(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Counted]:
    """Run `coverage --json` and return its results."""
    assert main(["coverage", *arguments, "--json"]) == 0
    found: list[Counted] = json.loads(capsys.readouterr().out)
    return found


def row(found: Counted) -> str:
    """Return the row of the page for a kernel: shares of the registered probes, or of all instructions if
    pairs are counted.
    """
    verdicts = found["verdicts"]
    total = verdicts["instructions"]
    if found["pairs"] is None:
        shares = [verdicts[name] / (total - verdicts["refused"]) for name in VERDICTS[:3]]
    else:
        shares = [found["pairs"] / total, verdicts["optimized"] / total]
    return "".join(f"| {100 * share:.1f} " for share in shares) + f"| {total:,} |"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Check that `coverage` fails, and return the line of its error."""
    assert main(["coverage", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def adds_up(found: Counted) -> bool:
    """Return True if all ways of counting have the same sum."""
    total = found["verdicts"]
    parts = [part["verdicts"] for part in found["symbols"]], list(found["sections"].values())
    reasons = sum(each["instructions"] for each in found["reasons"])
    return (
        sum(total[verdict] for verdict in VERDICTS) == total["instructions"]
        and all(
            sum(part[key] for part in each) == total[key]
            for each in parts
            for key in ("instructions", *VERDICTS)
        )
        and reasons + total["optimized"] == total["instructions"]
    )


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64", "riscv64i"])
def test_our_own_kernels(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = counted(capsys, "--arch", arch)
    assert adds_up(found)
    assert found["arch"] == arch
    assert found["verdicts"]["instructions"] > 30_000
    assert found["verdicts"]["optimized"] > 5_000
    symbols = {symbol["name"]: symbol for symbol in found["symbols"]}
    assert symbols["vfs_read"]["verdicts"]["instructions"] > 20
    assert (found["pairs"] or 0) > found["verdicts"]["optimized"] or not arch.startswith("riscv")
    assert row(found) in PAGE.read_text(), "docs/reference/coverage.md"


@pytest.mark.parametrize(
    ("arch", "profile", "optimizes"),
    [
        ("x86_64", "kprobes-2010", False),
        ("x86_64", "optprobes-2009", True),
        ("i386", "djprobe-2007", True),
        ("riscv64", "linux-6.1", False),
    ],
)
def test_profiles_decide_who_optimizes(
    arch: str, profile: str, optimizes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = counted(capsys, "--arch", arch, "--profile", profile, "--function", "vfs_*")
    assert adds_up(found)
    assert found["profile"] == profile
    assert (found["verdicts"]["optimized"] > 0) == optimizes
    assert bool(found["verdicts"]["ftrace"]) == (profile == "linux-6.1")


def linux(tmp_path: Path) -> str:
    """Write a vmlinuz with three functions, and return its path.

    One function returns by a thunk, one is not traced, and one is blacklisted.
    """
    kernel = made.Kernel()
    first = kernel.function("vfs_read", CALL_FENTRY + MOVES + made.RETURN_THUNK_CALL)
    site = kernel.text.end - 5
    kernel.function("notrace", MOVES + b"\xc3")
    forbidden = kernel.function("forbidden", CALL_FENTRY + MOVES + b"\xc3")
    kernel.text.data += bytes(8)
    thunk = kernel.mark("__indirect_thunk_start")
    kernel.function("__x86_return_thunk", b"\xc3\xcc")
    kernel.mark("__indirect_thunk_end")
    at = kernel.text.address
    kernel.text.data[site - at + 1 : site - at + 5] = (thunk - site - 5).to_bytes(4, "little", signed=True)
    kernel.table("mcount_loc", first.to_bytes(8, "little") + forbidden.to_bytes(8, "little"))
    kernel.table("kprobe_blacklist", forbidden.to_bytes(8, "little"))
    where = kernel.next_data()
    kernel.define("__return_sites", (site - where).to_bytes(4, "little", signed=True))
    kernel.mark("__return_sites_end", kernel.area.end, "D")
    file = tmp_path / "vmlinuz"
    file.write_bytes(made.vmlinuz(kernel.elf(), "xz"))
    return str(file)


def test_a_distribution_s_kernel_once_for_each_kind_of_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, thunks = counted(capsys, "--image", linux(tmp_path))
    assert plain["subject"] == "Linux 6.1.0-made, plain returns"
    assert adds_up(plain)
    assert adds_up(thunks)
    by_name = {symbol["name"]: symbol for symbol in plain["symbols"]}
    assert by_name["vfs_read"]["verdicts"] == {
        "instructions": 10, "optimized": 7, "breakpoint": 2, "ftrace": 1, "refused": 0,
    }  # fmt: skip
    assert by_name["notrace"]["reasons"] == {"notrace function: no kprobe event may be placed in it": 9}
    assert by_name["forbidden"]["reasons"] == {"in the kprobe blacklist": 10}
    (read,) = (symbol for symbol in thunks["symbols"] if symbol["name"] == "vfs_read")
    assert read["verdicts"]["optimized"] == 0
    assert read["reasons"]["function jumps into the indirect- or return-thunks here"] == 9


def test_the_rules_are_those_of_the_kernels_own_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`coverage` and `explain` choose the rules of the kernel's own version: Linux 6.12 optimizes shifts, 6.1
    does not.
    """
    source = made.Kernel()
    at = source.function("vfs_read", CALL_FENTRY + bytes.fromhex("48c1e003") + MOVES + b"\xc3")
    source.table("mcount_loc", at.to_bytes(8, "little"))
    optimized = []
    for release in (b"6.1.0-made", b"6.12.0-mad"):
        file = tmp_path / release.decode()
        file.write_bytes(made.vmlinuz(source.elf().replace(b"6.1.0-made", release), "xz"))
        (found,) = counted(capsys, "--image", str(file))
        optimized.append(found["verdicts"]["optimized"])
        assert main(["explain", "--image", str(file), "vfs_read+5", "--json"]) == 0
        (explained,) = json.loads(capsys.readouterr().out)
        assert found["profile"] == explained["profile"]
        outcomes = [each["verdict"] for each in explained["instructions"]]
        assert outcomes.count("optimized") == optimized[-1]
    assert optimized[1] > optimized[0] > 0


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--image", linux(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "Linux 6.1.0-made, return thunks (x86_64), profile linux-6.1" in captured.out
    assert "optimized               7" in captured.out
    assert captured.err == ""


RECORDED = {
    "_meta": {"kernel": "made", "rvc": True, "text": ["80000000", 64]},
    "add": {"addr": "80000000", "size": 14, "bytes_hex": "2e95" * 6 + "8280"},
}


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["packed", "plain"])
def test_recorded_functions(pack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "functions.json"
    file.write_bytes(pack(json.dumps(RECORDED).encode()))
    (found,) = counted(capsys, "--functions", str(file))
    assert (found["arch"], found["functions"], found["profile"]) == ("riscv64", 1, "riscv-optprobes-2023")
    assert (found["verdicts"]["instructions"], found["verdicts"]["optimized"], found["pairs"]) == (7, 3, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"nonsense", b"\x1f\x8b\x08nothing", json.dumps({"_meta": {}}).encode(),
        json.dumps(RECORDED | {"add": {"addr": "x"}}).encode(), json.dumps(RECORDED | {"add": []}).encode(),
        b"[" * 100_000, gzip.compress(b"{}")[:-6],
    ],
    ids=range(10),
)  # fmt: skip
def test_what_are_no_recorded_functions(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "functions.json"
    file.write_bytes(data)
    assert "no recorded functions" in refused(capsys, "--functions", str(file))


def test_what_can_not_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no kernel")
    assert "notes.txt: not a usable kernel: neither a vmlinuz" in refused(capsys, "--image", str(file))
    assert "No such file" in refused(capsys, "--image", str(tmp_path / "nothing"))
    assert "No such file" in refused(capsys, "--functions", str(tmp_path / "nothing"))
    assert "unknown architecture" in refused(capsys, "--arch", "vax")
    assert "no profile 'linux-1.0'" in refused(capsys, "--profile", "linux-1.0")
    assert "the pattern is empty" in refused(capsys, "--function", "")


def test_one_thing_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--arch", "i386", "--image", "x"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Progress("counting", 10).add(5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    Progress("counting", 10).add(5)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress("counting", 10)
    progress.add(5)
    progress.end()
    shown = capsys.readouterr().err
    assert "counting [###############               ]  50%" in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_progress_stays_in_its_line(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with Progress("Linux 6.12.117+deb13-cloud-amd64, plain returns, tcp_*", 10) as progress:
        progress.add(5)
    _, first, *_ = capsys.readouterr().err.split("\r")
    assert first.startswith("Linux 6.12")
    assert len(first) < columns
    assert first.endswith("%")


ORACLE = oracle_directory()


@pytest.mark.slow
@pytest.mark.skipif(not (ORACLE / "functions-6.1.json.gz").exists(), reason=f"no recordings in {ORACLE}")
@pytest.mark.parametrize(
    ("recording", "low", "high"), [("functions-6.1", 50, 53), ("functions-6.1-rethunk", 23, 26)]
)
def test_shares_of_a_real_kernel(
    recording: str, low: int, high: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = counted(capsys, "--functions", str(ORACLE / f"{recording}.json.gz"))
    verdicts = found["verdicts"]
    registered = verdicts["instructions"] - verdicts["refused"]
    assert low < 100 * verdicts["optimized"] / registered < high


def test_every_reason_and_tactic_survives_a_results_file() -> None:
    """Every reason and tactic can be stored in a results file, although some reasons and tactics have the
    same names.
    """
    names: list[RejectReason | Tactics | None] = [None, *RejectReason, *((each,) for each in Tactic)]
    names.append(tuple(Tactic))
    counts = Counting(Counter({name: number for number, name in enumerate(names, 1)}), 3, 0.5)
    assert _decoded(json.loads(json.dumps(_encoded([[counts]]))), 1, 1) == [[counts]]
