"""A mount that only root can use: a client's chdir(2) into the mount is also a system call of the guest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.mounted.files import TIMEOUT, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    if os.geteuid() != 0:
        pytest.skip("anybody else's mount is checked by the kernel alone")
    directory = tmp_path_factory.mktemp("closed") / "mount"
    directory.mkdir()
    with daemon(directory, program=REAL_PROGRAM):
        yield Files(directory)


def records(files: Files, script: str) -> list[str]:
    """Run a shell script, and return the records of sys_enter_chdir and sys_exit_chdir."""
    files.write("tracing/trace", "", os.O_TRUNC)
    for event in ("sys_enter_chdir", "sys_exit_chdir"):
        files.write(f"tracing/events/syscalls/{event}/enable", "1")
    subprocess.run(["sh", "-c", script], cwd="/", check=True, timeout=TIMEOUT)
    for event in ("sys_enter_chdir", "sys_exit_chdir"):
        files.write(f"tracing/events/syscalls/{event}/enable", "0")
    return [line for line in files.records() if "chdir" in line]


def test_a_shell_changes_its_directory(files: Files) -> None:
    found = records(files, f"cd {files.path('tracing')} && cd events && cd events 2>&- || cd ..")
    results = ["0x0", "0x0", "0xfffffffffffffffe", "0x0"]
    shown = [each for result in results for each in ("", f" -> {result}")]
    assert [line.split("chdir")[1].split("(")[0] for line in found] == shown
    assert all("sh-" in line for line in found)


def test_looking_at_a_directory_is_no_change(files: Files) -> None:
    assert records(files, f"test -x {files.path('tracing')} && ls {files.path('scratch')}") == []


def test_the_name_is_the_one_that_the_process_used(files: Files) -> None:
    files.write("tracing/dynamic_events", "e:entered syscalls/sys_enter_chdir file=+0($filename):ustring\n")
    files.write("tracing/events/eprobes/entered/enable", "1")
    script = f"import os; os.chdir('{files.root}/tracing'); os.chdir('./events')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIMEOUT)
    named = [line.partition("file=")[2] for line in files.records() if "file=" in line]
    assert named == [f'"{files.root}/tracing"', '"./events"']
    files.write("tracing/events/eprobes/entered/enable", "0")
    files.write("tracing/dynamic_events", "-:entered\n")


def test_no_file_becomes_executable(files: Files) -> None:
    assert not os.access(files.path("tracing/trace"), os.X_OK)
    assert os.access(files.path("tracing/trace"), os.R_OK | os.W_OK)
    assert os.access(files.path("tracing"), os.R_OK | os.X_OK)
    assert not os.access(files.path("missing"), os.R_OK)


def test_nobody_else_gets_in(files: Files) -> None:
    assert subprocess.run(["ls", files.root], user=12345, capture_output=True, check=False).returncode != 0


def test_a_device_keeps_nothing(files: Files) -> None:
    files.write("dev/null", "gone", os.O_TRUNC)
    assert files.read("dev/null") == ""
    with files.path("dev/zero").open("rb") as zero:
        assert zero.read(10) == bytes(10)
    with assert_errno(28):
        files.write("dev/full", "x")
