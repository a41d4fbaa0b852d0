"""Output files of commands are opened before the work starts. If a file cannot be written, the result is
still shown.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kprobefs.cli.main import main
from kprobefs.common.output_file import OutputFile
from tests.fuse.harness import REAL_PROGRAM, kprobefs, needs_fuse

FULL = Path("/dev/full")
"""A file that can be opened, but never written."""
COMMANDS = (
    pytest.param(("matrix", "--junit", "{}", "--", "true"), marks=needs_fuse),
    ("explain", "--svg", "{}", "vfs_read"),
    ("explain", "--html", "{}", "vfs_read"),
    ("coverage", "--plot", "{}", "--function", "vfs_read"),
    ("coverage", "--html", "{}", "--function", "vfs_read"),
    ("debug-info", "--output", "{}"),
)
"""Commands with `{}` in the place of a file's name."""


def words(command: tuple[str, ...], place: Path) -> list[str]:
    return [word.format(place) for word in command]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: tuple[str, ...],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("the work has started")

    for name in (
        "kprobefs.cli.matrix.run_all",
        "kprobefs.plan.explain.planned_kernel",
        "kprobefs.plan.coverage_command.coverage",
        "kprobefs.plan.debug_info.builtin_debug_file",
    ):
        monkeypatch.setattr(name, work)
    (directory / "file").touch()
    place = directory / "file" / "below"
    assert main(words(command, place)) == 1
    assert f"{place}: Not a directory" in capsys.readouterr().err


@needs_fuse
@pytest.mark.mounted
def test_the_table_is_shown_if_the_report_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--junit", str(FULL), "--json", "--", "true"]) == 1
    out, err = capsys.readouterr()
    assert [each["result"] for each in json.loads(out)] == ["passed"]
    assert f"{FULL}: No space left" in err


@pytest.mark.parametrize(
    ("command", "form"),
    [("explain", "--svg"), ("explain", "--html"), ("coverage", "--plot")],
)
def test_the_answer_is_shown_if_a_document_cannot_be_written(
    command: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["vfs_read"] if command == "explain" else ["--function", "vfs_read"]
    assert main([command, *question]) == 0
    answer = capsys.readouterr().out
    assert main([command, *question, form, str(FULL)]) == 1
    out, err = capsys.readouterr()
    assert out == answer
    assert f"{FULL}: No space left" in err


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_work_that_fails_leaves_files_as_they_were(option: str, directory: Path) -> None:
    (directory / "old").write_text("content")
    for name in ("old", "new"):
        assert main(["explain", option, name, "nosuch_function"]) == 2
    assert [(each.name, each.read_text()) for each in directory.iterdir()] == [("old", "content")]


def test_coverage_that_fails_leaves_no_directory(directory: Path) -> None:
    assert main(["coverage", "--html", "new", "--plot", "x.svg", "--function", "nosuch_function"]) == 2
    assert not list(directory.iterdir())


def test_a_long_file_is_replaced_as_a_whole(directory: Path) -> None:
    file = directory / "file"
    file.write_bytes(b"a long content")
    with OutputFile(file) as output:
        output.write(b"short")
    assert file.read_bytes() == b"short"


@needs_fuse
@pytest.mark.mounted
def test_the_report_may_be_in_the_directory_of_the_logs(directory: Path) -> None:
    assert main(["matrix", "--logs", "new", "--junit", "new/report.xml", "--", "true"]) == 0
    assert {each.name for each in (directory / "new").iterdir()} == {"report.xml", "x86_64.log"}


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("target", ["kept", "new/log"])
def test_an_old_log_that_is_a_link_is_replaced(target: str, directory: Path) -> None:
    """`matrix` replaces a log that is a symbolic link. The file to which the link points keeps its
    content.
    """
    (directory / "kept").write_text("content")
    (directory / "logs").mkdir()
    log = directory / "logs" / "x86_64.log"
    log.symlink_to(directory / target)
    assert main(["matrix", "--logs", "logs", "--", "echo", "output"]) == 0
    assert log.read_text() == "output\n"
    assert (directory / "kept").read_text() == "content"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    "refused",
    [("--image", "nosuch", "p:vfs_read"), ("p:nosuch_function",), ("p:vfs_read", "-f", "nosuch == 1")],
)
def test_a_trace_that_does_not_begin_leaves_files_as_they_were(
    refused: tuple[str, ...], directory: Path
) -> None:
    (directory / "old").write_text("content")
    for name in ("old", "new"):
        result = kprobefs("trace", "-o", name, *refused, "--", "true", program=REAL_PROGRAM)
        assert result.returncode != 0
    files = [each for each in directory.iterdir() if each.is_file()]
    assert [(each.name, each.read_text()) for each in files] == [("old", "content")]


@needs_fuse
@pytest.mark.mounted
def test_a_trace_replaces_a_long_file(directory: Path) -> None:
    (directory / "f").write_text("hello\n")
    file = directory / "records"
    file.write_text("old" * 10_000)
    result = kprobefs("trace", "-o", "records", "p:vfs_read", "--", "cat", "f", program=REAL_PROGRAM)
    assert result.returncode == 0
    assert "vfs_read" in file.read_text()
    assert "old" not in file.read_text()


def test_a_unit_that_cannot_be_written_leaves_the_others(directory: Path) -> None:
    units = directory / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    (units / "kprobefs.service").write_text("old")
    (units / "kprobefs@.service").mkdir()
    assert main(["install-service", "--root", str(directory)]) == 1
    assert (units / "kprobefs.service").read_text() == "old"
