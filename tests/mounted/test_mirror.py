"""Host processes as tasks of the guest: the same pid, name and owner, from fork to exit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, eventually, needs_fuse
from tests.mounted.files import TIMEOUT, Files

pytestmark = [needs_fuse, pytest.mark.mounted]

TASK = re.compile(r" *(?P<pid>\d+) +(?P<parent>\d+) +(?P<uid>\d+) (?P<state>\S) +(?P<comm>.*)")


def tasks(files: Files) -> dict[int, re.Match[str]]:
    """Return pid -> task, from the file machine/tasks."""
    found = (TASK.fullmatch(line) for line in files.lines("machine/tasks")[1:])
    return {int(task["pid"]): task for task in found if task is not None}


@pytest.fixture
def client(files: Files) -> Iterator[subprocess.Popen[str]]:
    """Yield a shell in the mount, which reads commands from a pipe."""
    shell = subprocess.Popen(
        ["bash", "--norc"], cwd=files.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield shell
    shell.kill()
    shell.communicate(timeout=TIMEOUT)


def ask(client: subprocess.Popen[str], command: str) -> str:
    """Let the shell run a command that prints one line, and return this line."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{command}\n")
    client.stdin.flush()
    return client.stdout.readline().rstrip("\n")


def test_clients_have_their_pid_name_and_owner(files: Files, client: subprocess.Popen[str]) -> None:
    assert ask(client, "read -r line < machine/version; echo ${line%% *}") == "Linux"
    known = tasks(files)
    assert known[client.pid]["comm"] == "bash"
    assert known[client.pid]["uid"] == str(os.getuid())
    assert known[os.getpid()]["comm"]


def test_a_child_is_forked_by_its_parent(files: Files, client: subprocess.Popen[str]) -> None:
    files.probe("p:forked kernel_clone")
    ask(client, "read -r line < machine/version; echo")
    child = int(ask(client, "sleep 30 & echo $!"))
    try:
        known = tasks(files)
        assert known[child]["parent"] == str(client.pid)
        eventually(lambda: tasks(files)[child]["comm"] == "sleep")
    finally:
        ask(client, "kill %1; wait %1; echo")
    assert any(f"bash-{client.pid}" in line for line in files.records())


def test_a_name_changes_with_exec(files: Files, client: subprocess.Popen[str]) -> None:
    ask(client, "read -r line < machine/version; echo")
    assert tasks(files)[client.pid]["comm"] == "bash"
    files.probe("p:read vfs_read")
    ask(client, "exec head machine/version")
    assert any(f"head-{client.pid}" in line for line in files.records())


def test_names_in_the_trace_are_the_clients(files: Files) -> None:
    files.probe("p:named vfs_read comm=$comm")
    files.shell("cat machine/version; head -c 3 machine/version; tail -c 3 machine/version")
    comms = {found[1] for line in files.records() if (found := re.search(r'comm="(\w+)"', line))}
    assert {"cat", "head", "tail"} <= comms


def test_exits_leave_the_list(files: Files, client: subprocess.Popen[str]) -> None:
    files.probe("p:ended do_exit")
    ask(client, "read -r line < machine/version; echo")
    assert client.pid in tasks(files)
    client.kill()
    client.wait(TIMEOUT)
    assert client.pid not in tasks(files)
    assert any(f"-{client.pid} " in line and " ended: " in line for line in files.records())


def test_other_users(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("taking another user's identity needs root")
    with daemon(directory, "--allow-other", program=REAL_PROGRAM):
        reader = subprocess.run(
            ["cat", "machine/tasks"],
            cwd=directory,
            user=12345,
            group=12345,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    assert any(line.split()[2] == "12345" for line in reader.stdout.splitlines())


def test_a_storm_of_forks_leaves_nothing_behind(files: Files) -> None:
    storm = files.shell("cat machine/version; for i in {1..300}; do (:); done; echo $$")
    shell = storm.stdout.split()[-1]
    left = [task[0] for task in tasks(files).values() if shell in (task["pid"], task["parent"])]
    assert left == []
