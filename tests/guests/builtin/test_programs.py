"""The program that a process has become, as /proc tells."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from time import monotonic, sleep

from emulated_kernel.guests.common.programs import program_of


def test_a_binary_and_a_script(tmp_path: Path) -> None:
    script = tmp_path / "a-script-with-a-long-name"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    for command, comm in (["/bin/cat"], "cat"), ([str(script)], "a-script-with-a-long-name"[:15]):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            deadline = monotonic() + 5
            # execve() gives the name first, what stands on the stack afterwards.
            while (program := program_of(process.pid, comm)) != command[0] and monotonic() < deadline:
                sleep(0.01)
            process.communicate()
        assert program == command[0]
        assert program_of(process.pid, comm) is None


def test_a_program_by_a_link(tmp_path: Path) -> None:
    """It is called as execve(2) was told, not as its first argument says, nor as the file behind the link."""
    link = tmp_path / "dog"
    link.symlink_to("/bin/cat")
    command = ["neither", "-"]
    with subprocess.Popen(command, executable=link, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        deadline = monotonic() + 5
        while (program := program_of(process.pid, "dog")) is None and monotonic() < deadline:
            sleep(0.01)
        process.communicate()
    assert program == str(link)


def test_a_name_of_its_own() -> None:
    assert program_of(os.getpid(), "no program's") is None
