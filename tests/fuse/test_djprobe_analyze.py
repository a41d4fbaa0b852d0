"""The command djprobe-analyze: the paper's checks on an ELF file with debug information."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kprobefs.cli import main
from kprobefs.failure import Exit
from tests.image.dwarf_file import TEXT, dwarf_file

FUNCTIONS = [
    ("plain", bytes.fromhex("89e5 89e5 83ec10 c3")),
    ("jumps_back", bytes.fromhex("89e5 89e5 89e5 89e5 ebf8 c3")),
    ("relative", bytes.fromhex("89e5 eb02 89e5 90 c3")),
    ("calls", bytes.fromhex("90 e800000000 c3")),
    ("short", bytes.fromhex("89e5 c3")),
    ("bug_of_2007", bytes.fromhex("89e5 89e5 90 0f0b e9ffffffff e9 89e5 c3")),
]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinux"
    path.write_bytes(dwarf_file(FUNCTIONS))
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["djprobe-analyze", *arguments]) == Exit.OK
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("plain", "7"),
        (f"{TEXT:#x}", "7"),
        ("plain+2", "5"),
        ("plain+1", f"0 {TEXT + 1:#x}: not an instruction boundary"),
        ("jumps_back", f"0 {TEXT + 16:#x}: a jump here leads into the bytes to be replaced"),
        ("relative", f"0 {TEXT + 21:#x}: detoured region holds an instruction that needs its address"),
        ("calls", f"0 {TEXT + 28:#x}: detoured region holds a call or trap"),
        ("short", f"0 {TEXT + 37:#x}: no instruction of the function follows the detoured region"),
    ],
)
def test_length_or_the_reason(
    kernel: Path, place: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, str(kernel), place) == answer + "\n"


def test_decoding_starts_afresh_behind_a_bug(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line and file behind the ud2 look like a jump unless they are skipped."""
    assert output(capsys, str(kernel), "bug_of_2007", "--bug-size", "8") == "5\n"


def test_json(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "--json", str(kernel), "plain+2")) == {
        "address": f"{TEXT + 2:#x}",
        "function": "plain",
        "offset": 2,
        "length": 5,
        "reason": "",
    }


def test_debug_information_in_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, debug = tmp_path / "vmlinux", tmp_path / "vmlinux.debug"
    code.write_bytes(dwarf_file(FUNCTIONS, debug=False))
    debug.write_bytes(dwarf_file(FUNCTIONS, text=False))
    assert output(capsys, str(code), "plain", "--debug-info", str(debug)) == "7\n"


@pytest.mark.parametrize(
    ("place", "status", "words"),
    [
        ("nowhere", Exit.FAILURE, "describes no function nowhere"),
        ("0x10", Exit.FAILURE, "0x10 is in no function"),
        ("plain+two", Exit.USAGE, "give an address"),
        ("0xzz", Exit.USAGE, "give an address"),
    ],
)
def test_bad_places(
    kernel: Path, place: str, status: Exit, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["djprobe-analyze", str(kernel), place]) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#!/bin/sh\n", "not a sound ELF file"),
        (dwarf_file(FUNCTIONS)[:200], "ELF"),
        (dwarf_file(FUNCTIONS, debug=False), "no debug information"),
        (dwarf_file(FUNCTIONS, text=False), "no code at"),
        (dwarf_file(FUNCTIONS).replace(b"\x02\x00\x03\x00", b"\x02\x00\xf3\x00"), "not for x86"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(content)
    assert main(["djprobe-analyze", str(path), "plain"]) == Exit.FAILURE
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["djprobe-analyze", str(tmp_path / "none"), "plain"]) == Exit.FAILURE
    assert "No such file" in capsys.readouterr().err
