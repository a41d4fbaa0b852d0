"""Instances, set_event and set_event_pid, snapshots and binary pages, on a mount of the real kernel."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.harness import eventually, needs_fuse
from tests.mounted.files import TIMEOUT, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

INSTANCE = "tracing/instances/one"


@pytest.fixture
def instance(files: Files) -> Path:
    """Make an instance and the event `made`, which is disabled. Return the instance's path."""
    files.write("kprobe_events", "p:made vfs_mkdir\n")
    path = files.path(INSTANCE)
    path.mkdir()
    return path


def hits(path: Path) -> list[str]:
    """Return the names of the events in the file `trace` of a trace array."""
    lines = (path / "trace").read_text().splitlines()
    return [line.split(": ")[1] for line in lines if not line.startswith("#")]


def test_an_instance_records_what_it_enabled(files: Files, instance: Path) -> None:
    files.write(f"{INSTANCE}/events/kprobes/made/enable", "1")
    files.path("scratch/d").mkdir()
    assert (hits(instance), hits(files.path("tracing"))) == (["made"], [])
    assert files.read("tracing/events/enable") == "0\n"
    with assert_errno(errno.EBUSY):
        files.write("kprobe_events", "-:made\n")
    instance.rmdir()
    files.write("kprobe_events", "-:made\n")


def test_an_open_file_keeps_it(instance: Path) -> None:
    with (instance / "trace_pipe").open("rb"), assert_errno(errno.EBUSY):
        instance.rmdir()
    instance.rmdir()
    assert not instance.exists()


def test_a_reader_that_sleeps_keeps_it_and_nobody_waiting(instance: Path) -> None:
    """While a reader sleeps in an instance's trace_pipe, rmdir(2) of the instance fails at once with EBUSY.

    Other requests are answered.
    """
    with subprocess.Popen(["cat", instance / "trace_pipe"], stdout=subprocess.DEVNULL) as reader:
        try:
            eventually(lambda: _reads(reader.pid, "trace_pipe"))
            for _ in range(6):
                done = subprocess.run(
                    ["rmdir", instance], capture_output=True, text=True, timeout=TIMEOUT, check=False
                )
                assert "busy" in done.stderr
                assert (instance / "options/sym-addr").read_text() == "0\n"
        finally:
            reader.kill()


def _reads(pid: int, name: str) -> bool:
    """Return True if the process sleeps in a read of descriptor 3, which is a file named `name`."""
    with suppress(FileNotFoundError):
        in_read = Path(f"/proc/{pid}/syscall").read_text().startswith("0 0x3 ")
        return in_read and os.path.basename(os.readlink(f"/proc/{pid}/fd/3")) == name
    return False


def test_closing_and_removing_in_one_breath(instance: Path) -> None:
    """An instance can be removed right after one of its files was closed.

    The FUSE front end may get the RELEASE of the file later than the next request.
    """
    instance.rmdir()
    for _ in range(200):
        instance.mkdir()
        (instance / "tracing_on").read_text()
        instance.rmdir()


@pytest.mark.usefixtures("instance")
def test_set_event(files: Files) -> None:
    answer = files.shell("echo made > tracing/set_event && cat tracing/set_event")
    assert answer.stdout == "kprobes:made\n"
    files.shell("echo '!kprobes:*' >> tracing/set_event")
    assert files.read("tracing/set_event") == ""
    files.shell("echo made > tracing/set_event; echo > tracing/set_event")
    assert files.read("tracing/set_event") == ""
    with assert_errno(errno.EINVAL):
        files.write("tracing/set_event", "nosuch")
    assert files.shell("echo made nosuch > tracing/set_event").returncode != 0
    assert files.read("tracing/set_event") == "kprobes:made\n"


@pytest.mark.usefixtures("instance")
def test_pids(files: Files) -> None:
    files.write("tracing/set_event", "made")
    files.write("tracing/set_event_pid", f"{os.getpid()}\n")
    files.path("scratch/mine").mkdir()
    files.shell("mkdir scratch/another")
    assert hits(files.path("tracing")) == ["made"]
    files.write("tracing/options/event-fork", "1")
    files.shell("mkdir scratch/childs")
    assert hits(files.path("tracing")) == ["made"] * 2
    files.write("tracing/set_event_notrace_pid", f"{os.getpid()}\n")
    files.path("scratch/mine2").mkdir()
    assert hits(files.path("tracing")) == ["made"] * 2


@pytest.mark.usefixtures("instance")
def test_snapshots_and_pages(files: Files) -> None:
    files.write("tracing/set_event", "made")
    files.path("scratch/a").mkdir()
    files.write("tracing/snapshot", "1")
    assert hits(files.path("tracing")) == []
    assert "made: (vfs_mkdir" in files.read("tracing/snapshot")
    descriptor = os.open(files.path("tracing/per_cpu/cpu0/snapshot_raw"), os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert len(os.read(descriptor, 4096)) == 4096
        with assert_errno(errno.EAGAIN):
            os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def test_an_entry_that_a_trigger_saw_stays_where_it_was_begun(files: Files, instance: Path) -> None:
    """If a trigger has a filter, the record is begun before the trigger acts, in the buffer that is current
    then.

    A trigger that changes the buffer, such as snapshot, does not move this record.
    """
    trigger = f"{INSTANCE}/events/kprobes/made/trigger"
    files.write(f"{INSTANCE}/events/kprobes/made/enable", "1")
    files.write(trigger, "snapshot:1 if common_pid > 0")
    for name in ("a", "b"):
        files.path(f"scratch/{name}").mkdir()
    assert hits(instance) == ["made"]
    assert files.read(f"{INSTANCE}/snapshot").count(" made: ") == 1
    files.write(trigger, "!snapshot")
    files.shell(f"echo > {INSTANCE}/trace")
    files.write(trigger, "traceon if common_pid > 0")
    files.write(f"{INSTANCE}/tracing_on", "0")
    for name in ("c", "d"):
        files.path(f"scratch/{name}").mkdir()
    assert hits(instance) == ["made"]


def test_variables_of_a_histogram_keep_it(files: Files, instance: Path) -> None:
    trigger = f"{INSTANCE}/events/kprobes/made/trigger"
    files.write(trigger, "hist:keys=common_pid:ip=__probe_ip")
    with assert_errno(errno.EBUSY):
        instance.rmdir()
    files.write(trigger, "!hist:keys=common_pid:ip=__probe_ip")
    files.write(trigger, "hist:keys=common_pid")
    instance.rmdir()


@pytest.mark.usefixtures("instance")
def test_a_snapshot_with_a_condition_is_its_histograms(files: Files) -> None:
    trigger = f"{INSTANCE}/events/kprobes/made/trigger"
    command = "hist:keys=common_pid:ip=__probe_ip:onchange($ip).snapshot()"
    files.write(trigger, command)
    for number in ("0", "1", "2"):
        with assert_errno(errno.EBUSY):
            files.write(f"{INSTANCE}/snapshot", number)
    with assert_errno(errno.EBUSY):
        files.write(f"{INSTANCE}/per_cpu/cpu0/snapshot", "0")
    files.write(trigger, f"!{command}")
    files.write(f"{INSTANCE}/snapshot", "0")


def test_event_directories_are_made_in_the_guest(files: Files) -> None:
    files.probe("p:dir tracefs_create_dir name=+0(%di):string")
    files.write("kprobe_events", "p:grp/new vfs_rmdir\n")
    assert [line.split("name=")[1] for line in files.records()] == ['"grp"', '"new"']


def test_dev_null_can_be_the_guests(files: Files) -> None:
    files.probe("p:opened do_sys_openat2 path=+u0(%si):string")
    files.write("dev/null", "gone")
    assert files.path("dev/null").read_text() == ""
    assert f'path="{files.path("dev/null")}"' in files.records()[0]


def test_listing_a_directory_opens_it(files: Files) -> None:
    files.probe("p:opened do_sys_openat2 path=+u0(%si):string")
    os.listdir(files.path("tracing/options"))
    assert f'path="{files.path("tracing/options")}"' in files.records()[0]
