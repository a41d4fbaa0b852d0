"""program_of: the path of the program that a process has executed, as read from /proc."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from emulated_kernel.guests.common.process_memory import ProcessMemory
from emulated_kernel.guests.common.programs import program_of


@pytest.fixture
def memory() -> Iterator[ProcessMemory]:
    memory = ProcessMemory()
    yield memory
    memory.close()


def test_a_binary_and_a_script(tmp_path: Path, memory: ProcessMemory) -> None:
    script = tmp_path / "a-script-with-a-long-name"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    for command, comm in (["/bin/cat"], "cat"), ([str(script)], "a-script-with-a-long-name"[:15]):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            deadline = monotonic() + 5
            # execve() sets the name before it writes the stack.
            while (program := program_of(process.pid, comm, memory)) != command[0] and monotonic() < deadline:
                sleep(0.01)
            process.communicate()
        assert program == command[0]
        assert program_of(process.pid, comm, memory) is None


def test_a_program_by_a_link(tmp_path: Path, memory: ProcessMemory) -> None:
    """program_of returns the path that was passed to execve(2), not the first argument and not the target of
    the link.
    """
    link = tmp_path / "dog"
    link.symlink_to("/bin/cat")
    command = ["neither", "-"]
    with subprocess.Popen(command, executable=link, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        deadline = monotonic() + 5
        while (program := program_of(process.pid, "dog", memory)) is None and monotonic() < deadline:
            sleep(0.01)
        process.communicate()
    assert program == str(link)


def test_a_name_of_its_own(memory: ProcessMemory) -> None:
    assert program_of(os.getpid(), "no program's", memory) is None


def test_a_program_whose_memory_is_not_read(tmp_path: Path) -> None:
    """If memory is not read, /proc gives the path of a binary. The path of a link to a binary is unknown."""
    (tmp_path / "dog").symlink_to("/bin/cat")
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        deadline = monotonic() + 5
        while (program := program_of(process.pid, "cat", None)) is None and monotonic() < deadline:
            sleep(0.01)
        process.communicate()
    assert program == os.path.realpath("/bin/cat")
    with subprocess.Popen([tmp_path / "dog"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert program_of(process.pid, "dog", None) is None
        process.communicate()
