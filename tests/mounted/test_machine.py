"""machine/load, clock, cpus and meminfo of a mount, which answers requests while loads run."""

from __future__ import annotations

import errno
import os
import re
import time

import pytest

from tests.fuse.harness import eventually, needs_fuse
from tests.mounted.files import EVENTS, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]


def counts(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def times(files: Files) -> list[float]:
    """Return the times of the records, in seconds."""
    return [float(found[1]) for line in files.records() if (found := re.search(r" (\d+\.\d{6}): ", line))]


def test_a_load_runs_while_the_mount_answers(files: Files) -> None:
    files.probe("p:forks kernel_clone")
    files.write("machine/load", "fork rate=1000 duration=300\n")
    for _ in range(50):
        assert files.read("machine/version").startswith("Linux")
    eventually(lambda: int(counts(files.read("machine/load"))["rounds"]) > 10)
    (line,) = files.lines("machine/load")
    assert counts(line)["state"] == "running"
    files.write("machine/load", "stop")
    (line,) = files.lines("machine/load")
    assert counts(line)["state"] == "stopped"
    assert counts(line)["failed"] == "0"
    forks = [line for line in files.records() if "load/fork-" in line]
    assert abs(len(forks) - int(counts(line)["rounds"])) <= 1
    assert "load/" not in files.read("machine/tasks")


def test_a_load_ends_after_its_duration(files: Files) -> None:
    began = time.monotonic()
    files.write("machine/load", "files rate=50 duration=1\ntimers rate=50 duration=1\n")
    states = {counts(line)["state"] for line in files.lines("machine/load")}
    assert states == {"running"} or time.monotonic() - began >= 1
    eventually(lambda: "running" not in files.read("machine/load"))
    assert time.monotonic() - began >= 1
    for line in files.lines("machine/load"):
        assert counts(line)["state"] == "done"
        assert 1 <= int(counts(line)["rounds"]) <= 51
    assert os.listdir(files.path("scratch")) == []


def test_what_a_load_is_refused_for_stands_in_the_log(files: Files) -> None:
    for line, number, why in (
        (
            "storm",
            errno.EINVAL,
            "'storm' is no load: fork, files, pipe, tcp, loss, udp, timers, all, stop",
        ),
        ("fork rate=0", errno.ERANGE, "load: 'rate=0': more than 0, at most 10000"),
        ("stop fork", errno.ENOENT, "load: fork doesn't run"),
    ):
        with assert_errno(number):
            files.write("machine/load", line)
        assert files.lines("machine/dmesg")[-1].endswith(why)
    assert files.read("machine/load") == ""


def test_the_clock_is_shown_and_set(files: Files) -> None:
    mode, seed, now = files.lines("machine/clock")
    assert (mode, seed) == ("mode virtual", "seed 1")
    assert re.fullmatch(r"time \d+\.\d{9}", now)
    files.write("machine/clock", "virtual seed 7")
    assert files.lines("machine/clock")[:2] == ["mode virtual", "seed 7"]
    files.write("machine/clock", "real\n")
    assert files.lines("machine/clock")[:2] == ["mode real", "seed 7"]
    files.write("machine/clock", "mode virtual\nseed 0x10\n")
    assert files.lines("machine/clock")[:2] == ["mode virtual", "seed 16"]
    wrong = ("sundial", "mode", "mode sundial", "seed", "seed x", "virtual 7")
    for line in (
        *wrong,
        "real virtual",
        "mode real virtual",
        "seed 7 seed 8",
        "seed 7 real seed 7",
        "seed 7 8",
    ):
        with assert_errno(errno.EINVAL):
            files.write("machine/clock", line)
        assert "clock: " in files.lines("machine/dmesg")[-1]
    assert files.lines("machine/clock")[:2] == ["mode virtual", "seed 16"]


def test_records_follow_the_clock(files: Files) -> None:
    """After a change of the clock, records have times of the new clock, also in guest code that reads the
    clock. Time never goes back.
    """
    files.probe("p:reads vfs_read")

    def read_twice(pause: float) -> float:
        before = len(times(files))
        files.read("machine/version")
        time.sleep(pause)
        files.read("machine/version")
        stamps = times(files)
        return stamps[-1] - stamps[before]

    assert read_twice(0.2) < 0.1
    files.write("machine/clock", "real")
    assert 0.2 <= read_twice(0.2) < 5
    files.write("machine/clock", "virtual")
    assert read_twice(0.2) < 0.1
    stamps = times(files)
    assert stamps == sorted(stamps)
    files.write(f"{EVENTS}/reads/enable", "0")


def test_cpus_tell_who_runs(files: Files) -> None:
    header, cpu = files.lines("machine/cpus")
    assert header.split() == ["CPU", "STATE", "RUNNABLE", "SWITCHES", "INTERRUPTS", "PID", "COMM"]
    assert cpu.split()[:2] in (["0", "running"], ["0", "idle"])
    switches = int(cpu.split()[3])
    files.shell("cat machine/version; cat scratch/none")
    assert int(files.lines("machine/cpus")[1].split()[3]) > switches
    with assert_errno(errno.EFAULT):
        files.write("machine/call", 'panic "no reason"')
    assert files.lines("machine/cpus")[1].split()[1] == "dead"


def test_meminfo_is_read_by_tools(files: Files) -> None:
    def cached() -> int:
        return int(files.shell("awk '/^Cached:/ { print $2 }' machine/meminfo").stdout)

    before = cached()
    files.path("scratch/file").write_bytes(bytes(40 << 10))
    assert cached() == before + 40
    files.path("scratch/file").unlink()
    assert cached() == before


def test_a_full_scratch_leaves_the_kernel_its_memory(files: Files) -> None:
    with assert_errno(errno.ENOSPC), files.path("scratch/big").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    files.write("machine/modules", "load ktgt")
    assert files.shell("cat machine/version").returncode == 0
    files.probe("p:removed vfs_unlink")
    files.path("scratch/big").unlink()
    files.path("scratch/small").write_text("there is room again")
    assert any(" removed: " in line for line in files.records())
