"""Many client processes at once: every answer is right, no hit is lost, and the daemon logs no error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import Daemon, needs_fuse
from tests.mounted.files import Files
from tests.sample import fewer

pytestmark = [needs_fuse, pytest.mark.mounted]

CLIENT = Path(__file__).with_name("client.py")
CLIENTS = 20
SECONDS = fewer(3, 3)


@pytest.mark.slow
def test_many_clients(mounted: Daemon, files: Files) -> None:
    # The first event that is enabled enlarges the ring buffer, which is EBUSY while another client reads it.
    files.write("tracing/buffer_size_kb", "1408")
    clients = [
        subprocess.Popen(
            [sys.executable, CLIENT, files.root, str(number), str(SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(CLIENTS)
    ]
    results = [client.communicate(timeout=30) for client in clients]
    assert "".join(errors for _, errors in results) == ""
    assert all(int(rounds) > 0 for rounds, _ in results)
    assert (files.read("kprobe_events"), files.read("kprobes/list")) == ("", "")
    assert files.read("kprobes/enabled") == "1\n"
    assert "Oops" not in files.read("machine/dmesg")
    pids = {str(client.pid) for client in clients}
    assert not any(set(line.split()[:2]) & pids for line in files.lines("machine/tasks"))
    assert mounted.process.poll() is None


def test_writers_of_one_file_take_turns(files: Files) -> None:
    files.write("kprobe_events", "p:a vfs_mkdir\np:b vfs_rmdir\n")
    script = """
        for round in $(seq 50); do
            echo 1 > tracing/events/kprobes/$0/enable
            read -r state < tracing/events/kprobes/$0/enable
            [ "$state" = 1 ] || echo "$0: $state"
            echo 0 > tracing/events/kprobes/$0/enable
        done
    """
    writers = [
        subprocess.Popen(["bash", "-c", script, name], cwd=files.root, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    assert [writer.communicate(timeout=30)[0] for writer in writers] == ["", ""]
    assert files.read("tracing/events/enable") == "0\n"


def test_a_hit_for_each_request_of_each_client(files: Files) -> None:
    files.probe("p:made vfs_mkdir")
    makers = [
        subprocess.Popen(
            ["bash", "-c", f"for i in {{1..25}}; do mkdir $i-{number}; done"], cwd=files.path("scratch")
        )
        for number in range(8)
    ]
    assert [maker.wait(30) for maker in makers] == [0] * 8
    assert files.read("kprobes/stats/kprobes/made/hits") == "200\n"
    assert files.read("kprobes/stats/kprobes/made/nmissed") == "0\n"
    hits = [line for line in files.records() if " made: " in line]
    assert len(hits) == 200
    assert all(line.split()[0].startswith("mkdir-") for line in hits)
