"""`explain`, `check` and `coverage` with --strategy: Linux's verdict comes first, and the strategy's verdict
is separate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.cli.main import main
from kprobefs.plan.text import WIDTH

FUNCTION = "ksys_read"
EXTENDED = ("--strategy", "extended")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command with the extended strategy and --json, and return its output."""
    assert main([*arguments, *EXTENDED, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_answers_are_those_of_a_mount(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = answer(capsys, "explain", FUNCTION)
    with Kernel(MachineConfig(strategy="extended")) as kernel:
        checker = kernel.kprobes.probe_checker
        for insn in told["instructions"]:
            address = int(insn["address"], 16)
            found = checker.optimized_region(address)
            is_jump = checker.may_probe(address) is None and isinstance(found, Region)
            assert (insn["extended"] == "optimized") is is_jump, insn
            if insn["verdict"] == "optimized":
                assert insn["extended"] == "optimized", insn


def place_with_call(capsys: pytest.CaptureFixture[str]) -> str:
    (told,) = answer(capsys, "explain", FUNCTION)
    offset = next(
        insn["offset"]
        for insn in told["instructions"]
        if insn["text"].startswith("call") and insn["extended"] == "optimized"
    )
    return f"{FUNCTION}+{offset:#x}"


def test_linux_first_and_the_tactics_apart(capsys: pytest.CaptureFixture[str]) -> None:
    place = place_with_call(capsys)
    (told,) = answer(capsys, "explain", place)
    assert (told["verdict"], told["extended"]["verdict"]) == ("breakpoint", "optimized")
    assert told["reason"]
    assert "relocated_branch" in told["extended"]["tactics"]
    assert any(each["relocated"] for each in told["detour"])
    assert main(["explain", place, *EXTENDED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert f"{place}: breakpoint" in lines[0]
    assert any(line.startswith("extended   optimized: ") for line in lines)
    assert Tactic.RELOCATED_BRANCH.value in "\n".join(lines)
    assert main(["explain", place, "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert alone["extended"] is None
    assert alone["detour"] == []


def test_check_says_what_the_strategy_would_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = place_with_call(capsys)
    (tmp_path / "file").write_text(f"p:here {place}\n")
    (told,) = answer(capsys, "check", str(tmp_path / "file"))
    (line,) = told["kernels"][0]["lines"]
    assert (line["outcome"], line["extended"]["outcome"]) == ("breakpoint", "optimized")
    assert Tactic.RELOCATED_BRANCH.value in line["extended"]["reason"]


def test_coverage_counts_the_tactics(capsys: pytest.CaptureFixture[str]) -> None:
    functions = "--function", "*s*"
    (told,) = answer(capsys, "coverage", *functions)
    assert main(["coverage", *functions, "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    more = told["verdicts"]["optimized"] - alone["verdicts"]["optimized"]
    assert more > 0.23 * told["verdicts"]["instructions"]
    assert max(told["tactics"].values()) <= more + told["verdicts"]["instructions"] // 100
    assert set(told["tactics"]) == {tactic.name.lower() for tactic in Tactic} - {"return_thunk"}
    assert alone["tactics"] == {}
    unlike = ("optimized", "breakpoint")
    assert {name: told["verdicts"][name] for name in told["verdicts"] if name not in unlike} == {
        name: alone["verdicts"][name] for name in alone["verdicts"] if name not in unlike
    }


def test_a_profile_without_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", FUNCTION, *EXTENDED, "--profile", "kprobes-2010"]) == 2
    assert "has no optimizer; choose linux-6.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile", "djprobe-2007"), "has no optimizer; choose linux-6.1"),
        (("--kprobes", "kernel", "--image", "/dev/null"), "not possible with --kprobes kernel"),
    ],
)
def test_mounts_without_such_a_strategy(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mount", *EXTENDED, *options, str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


def test_recorded_functions_lack_what_the_strategy_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--functions", "/nonexistent", *EXTENDED]) == 2
    assert "leave it out" in capsys.readouterr().err
