"""Distributions' kernels behind a real mount: a script works as on a machine that runs the kernel."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kprobefs.cli import control
from kprobefs.cli.top import Probes
from kprobefs.common.errors import CliError
from kprobefs.common.mountpoints import MountState, condition
from tests.fuse.harness import REAL_PROGRAM, daemon, eventually, kprobefs, needs_fuse
from tests.guests.linux import debian_kernel
from tests.kernel.gdb_client import GdbClient

pytestmark = [needs_fuse, pytest.mark.mounted]

SCRIPT = r"""
set -e
cd "$1"
echo 'p:opened do_sys_openat2' > kprobe_events
(echo 'p:wrong no_such_function' >> kprobe_events) 2> /dev/null && exit 1
grep -c 'Invalid probed address or symbol' tracing/error_log
echo 1 > tracing/events/kprobes/enable
awk '{ print $2, $3 }' kprobes/list
echo hello > scratch/file
cat scratch/file
echo 0 > tracing/events/kprobes/enable
grep -c 'cat-[0-9]* .*opened: (do_sys_openat2+0x0' tracing/trace > scratch/count
test "$(cat scratch/count)" -gt 0
mkdir tracing/instances/mine
test -f tracing/instances/mine/trace
rmdir tracing/instances/mine
(echo "load $PWD/scratch/file" > machine/modules) 2> /dev/null && exit 1
echo load dm_mod > machine/modules
grep -c '^dm_mod ' machine/modules
echo unload dm_mod > machine/modules
echo 1 > tracing/events/sched/sched_process_fork/enable
timeout 20 cat tracing/trace_pipe > ../piped &
reader=$!
for number in 1 2 3; do (true); cat machine/version > /dev/null; done
until grep -q 'comm=sh pid=[0-9]* child_comm=sh' ../piped; do cat kprobe_profile > /dev/null; done
kill $reader
wait $reader 2> /dev/null || true
echo 1 > tracing/events/sched/sched_process_exec/enable
cat scratch/file > /dev/null
grep -c 'cat-[0-9]* .*sched_process_exec: filename=.*/cat pid=' tracing/trace
echo 0 > tracing/events/enable
echo > kprobe_events
grep -c 'Linux version' machine/dmesg
"""


OURS = r"""
set -e
cd "$1"
echo 'p:opened do_sys_openat2 path=+0(%si):ustring' > kprobe_events
echo 'r:returned vfs_read size=$retval:s64' >> kprobe_events
echo 'p:within vfs_read+5 size=%dx' >> kprobe_events
(echo 'p:wrong no_such_function' >> kprobe_events) 2> /dev/null && exit 1
grep -c 'Invalid probed address or symbol' tracing/error_log
echo 1 > tracing/events/kprobes/enable
echo hello > scratch/file
for number in 1 2 3 4 5 6 7 8; do cat scratch/file > /dev/null; done
echo nothing > dev/null
test -z "$(cat dev/null)"
ls dev | grep -qx null
awk '{ print $2, $3, $4 }' kprobes/list | sort
cat kprobes/stats/kprobes/within/mode kprobes/stats/kprobes/within/hits > ../stats
grep -c 'cat-[0-9]* .*opened: (do_sys_openat2+0x0/0x[0-9a-f]*) path="/scratch/file"' tracing/trace
grep -c 'sh-[0-9]* .*opened: (do_sys_openat2+0x0/0x[0-9a-f]*) path="/dev/null"' tracing/trace
grep -c 'cat-[0-9]* .*returned: (ksys_read+0x[0-9a-f]*/0x[0-9a-f]* <- vfs_read) size=6$' tracing/trace
echo mark > tracing/trace_marker
grep -c 'sh-[0-9]* .*tracing_mark_write: mark' tracing/trace
: > ../piped
timeout 20 cat tracing/trace_pipe > ../piped &
reader=$!
until grep -q 'within: (vfs_read+0x5' ../piped; do cat scratch/file > /dev/null; done
kill $reader
wait $reader 2> /dev/null || true
echo 0 > tracing/events/enable
echo > kprobe_events
mv scratch/file tracing/trace 2> /dev/null && exit 1
echo load dm_mod > machine/modules
grep -c '^dm_mod ' machine/modules
echo unload dm_mod > machine/modules
echo vfs_read > tracing/set_ftrace_filter
echo function > tracing/current_tracer
cat scratch/file > /dev/null
echo nop > tracing/current_tracer
grep -c 'Linux version' machine/dmesg
"""


def links_and_room(directory: Path) -> None:
    """Check links, FIFOs and the free space in scratch/, by system calls of the host."""
    scratch = directory / "scratch"
    room = os.statvfs(scratch)
    assert room.f_blocks >= room.f_bfree > 0
    (scratch / "whole").write_text("text")
    (scratch / "linked").hardlink_to(scratch / "whole")
    assert (scratch / "linked").read_text() == "text"
    assert (scratch / "linked").stat().st_nlink == 2
    # A change by one name is seen by all, at once.
    whole, linked = scratch / "whole", scratch / "linked"
    for number in range(10):
        assert whole.stat().st_size == linked.stat().st_size == 4 + 2 * number
        with linked.open("a") as file:
            file.write("ab")
        (scratch / "third").hardlink_to(linked)
        assert [each.stat().st_nlink for each in (whole, linked)] == [3, 3]
        whole.chmod(0o600 + number % 2)
        assert linked.stat().st_mode & 0o777 == 0o600 + number % 2
        (scratch / "third").unlink()
        assert [each.stat().st_nlink for each in (whole, linked)] == [2, 2]
    os.mkfifo(scratch / "fifo")
    reader = os.open(scratch / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    (scratch / "fifo").write_bytes(b"through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)


def appends_as_the_host_does(directory: Path) -> None:
    """Check that O_APPEND, also if fcntl(2) sets or clears it, has the same effects in scratch/ as on the
    host.
    """
    answers = []
    for file in (directory.parent / "appended", directory / "scratch/appended"):
        file.write_bytes(b"x" * 100)
        opened = os.open(file, os.O_RDWR | os.O_APPEND)
        said: list[object] = [os.write(opened, b"0123456789"), os.lseek(opened, 10, 0), os.read(opened, 999)]
        for flags, at in ((0, 3), (os.O_APPEND, 5), (0, 5), (os.O_NONBLOCK, 9)):
            fcntl.fcntl(opened, fcntl.F_SETFL, flags)
            said += [os.lseek(opened, at, 0), os.write(opened, b"now"), os.read(opened, 7)]
            said += [os.pwrite(opened, b"P", 1), os.lseek(opened, 0, os.SEEK_CUR)]
        os.close(opened)
        answers.append((said, file.read_bytes()))
    assert answers[0] == answers[1]


def names_come_and_go_as_the_hosts_do(directory: Path) -> None:
    """Check that random calls on names have the same results in scratch/ as on the host, which may cache
    names.
    """
    places = directory.parent / "names", directory / "scratch/names"
    for place in places:
        place.mkdir()
    names = ("a", "b", "c", "a/x", "a/y", "b/x", "b/a/z")

    def said(call: Callable[[Random, Path, Path], object], seed: float, one: Path, other: Path) -> object:
        try:
            return call(Random(seed), one, other)
        except OSError as error:
            return error.errno

    def opened(path: Path, flags: int) -> object:
        with open(os.open(path, flags | os.O_RDWR, 0o644), "r+b", buffering=0) as file:
            found = file.read()
            file.write(b"more")
            return found, os.fstat(file.fileno()).st_nlink

    def looked(path: Path) -> object:
        found = path.lstat()
        return stat.S_IFMT(found.st_mode), stat.S_ISREG(found.st_mode) and (found.st_nlink, found.st_size)

    flags = (0, os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL, os.O_APPEND, os.O_DIRECTORY)
    calls: tuple[Callable[[Random, Path, Path], object], ...] = (
        *[lambda it, one, _: opened(one, it.choice(flags))] * 4,
        *[lambda _, one, __: looked(one)] * 2,
        lambda _, one, __: sorted(os.listdir(one)),
        lambda _, one, __: one.mkdir(),
        lambda _, one, __: one.rmdir(),
        lambda _, one, __: one.unlink(),
        lambda _, one, other: os.rename(one, other),
        lambda _, one, other: os.link(one, other),
        lambda _, one, other: one.symlink_to(os.path.relpath(other, one.parent)),
        lambda _, one, __: os.readlink(one),
        lambda it, one, __: os.truncate(one, it.randrange(9)),
    )
    random = Random(20)
    for number in range(1500):
        call, one, other, seed = random.choice(calls), *random.sample(names, 2), random.random()
        answers = [said(call, seed, place / one, place / other) for place in places]
        assert answers[0] == answers[1], (number, one, other)


def is_refused_to_reboot(directory: Path) -> None:
    with pytest.raises(CliError, match="can't be booted again; unmount it and mount it again"):
        control.reboot(str(directory))


def test_our_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))
    directory = tmp_path / "mnt"
    directory.mkdir()
    with daemon(directory, "--image", str(debian_kernel.image()), program=REAL_PROGRAM) as mounted:
        done = subprocess.run(
            ["sh", "-c", OURS, "sh", str(directory)],
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        error, *listed, opened, null, returned, marks, loaded, log = done.stdout.splitlines()
        assert (error, marks, loaded, log) == ("1", "1", "1", "1")
        assert listed == [
            "k do_sys_openat2+0x0 [FTRACE]",
            "k vfs_read+0x5 [OPTIMIZED]",
            "r vfs_read+0x0 [FTRACE]",
        ]
        assert (opened, null, returned) == ("8", "1", "8")
        saves_no_default_maxactive(directory)
        links_and_room(directory)
        appends_as_the_host_does(directory)
        names_come_and_go_as_the_hosts_do(directory)
        (directory / "kprobe_events").write_text("p:k/seen vfs_read")
        (probe,) = Probes(str(directory)).look()
        assert (probe.event, probe.mode, probe.enabled) == ("k/seen", "disarmed", False)
        is_refused_to_reboot(directory)
        mode, hits = (tmp_path / "stats").read_text().split()
        assert mode == "optimized"
        assert int(hits) >= 16
        assert mounted.log.count("\n") <= 2


def graph_has_the_commands_calls(directory: Path) -> None:
    """Check that `trace --graph` shows only calls of the command, inside of the given function.

    The filter is for speed: the kernel patches 1,600 functions instead of all, which takes a tenth of the
    time.
    """
    filtered = directory / "tracing/set_ftrace_filter"
    filtered.write_text("vfs_*\n*sys_*\n*_file*\n")
    words = ("trace", "-m", str(directory), "--json", "--graph", "vfs_read", "--", "cat", "traced")
    (directory / "scratch/traced").write_text("hello\n")
    done = kprobefs(*words, program=REAL_PROGRAM)
    filtered.write_text("")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    calls = [each for each in found if each.get("event") == "funcgraph_entry"]
    assert {each["comm"] for each in calls} == {"cat"}
    assert [each["fields"]["func"] for each in calls if not each["fields"]["depth"]] == ["vfs_read"] * 2


def is_debugged(directory: Path) -> None:
    """Check that the mount's state is DEBUGGED while a debugger holds the guest, and that a waiting client
    can be killed.
    """
    client = GdbClient((directory / "machine/gdb").read_text().strip())
    eventually(lambda: condition(str(directory)) is MountState.DEBUGGED)
    with subprocess.Popen(["cat", str(directory / "scratch/traced")], stdout=subprocess.PIPE) as reader:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(0.3)
        reader.terminate()
        assert reader.wait(30) == -signal.SIGTERM
    client.close()


def test_new_clients_while_a_debugger_holds_the_guest(tmp_path: Path) -> None:
    """While a debugger holds the guest, new clients can read files of machine/ that need no guest.

    The guest makes no fork for these clients, and closes no earlier file.
    """
    directory = tmp_path / "mnt"
    directory.mkdir()
    with daemon(directory, "--image", str(debian_kernel.image()), program=REAL_PROGRAM):
        file = directory / "scratch/file"
        file.write_text("hello")
        client = GdbClient((directory / "machine/gdb").read_text().strip())
        for name in ("limits", "cpu"):
            subprocess.run(["cat", str(directory / "machine" / name)], check=True, timeout=50)
        client.close()
        assert os.listdir(file.parent) == ["file"]
        assert file.read_text() == "hello"


def test_machine_files_of_the_kernels_own_kprobes_while_a_debugger_holds_it(tmp_path: Path) -> None:
    """While a debugger holds the guest, files of machine/ that need no guest can be read, too, if the host's
    kernel checks modes.

    It then requests the attributes of the root, which is a directory of the guest. A shell looks at its
    former directory, which may be a directory of the guest, too.
    """
    directory = tmp_path / "mnt"
    directory.mkdir()
    words = ("--image", str(debian_kernel.image()), "--kprobes", "kernel", "--allow-other")
    with daemon(directory, *words, program=REAL_PROGRAM):
        client = GdbClient((directory / "machine/gdb").read_text().strip())
        for name in ("cpu", "limits", "load", "vmcore"):
            subprocess.run(["head", "-c", "8", str(directory / "machine" / name)], check=True, timeout=20)
        for name in ("", "tracing"):
            former = {**os.environ, "OLDPWD": str(directory / name)}
            subprocess.run(["bash", "-c", ":"], check=True, timeout=20, env=former)
        client.close()


def saves_no_default_maxactive(directory: Path) -> None:
    definitions = directory / "tracing" / "dynamic_events"
    for line in ("r:chosen vfs_read", "r1:few vfs_read"):
        with definitions.open("a") as file:
            file.write(f"{line}\n")
    lines = kprobefs("save", "-m", str(directory), program=REAL_PROGRAM).stdout.splitlines()
    assert "r:kprobes/chosen vfs_read" in " ".join(lines).replace(" arg1=$retval", "")
    assert any(line.startswith("r1:kprobes/few ") for line in lines)
    assert any(line.startswith("r10:kprobes/chosen ") for line in definitions.read_text().splitlines())


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "runtime"))
    directory = tmp_path / "mnt"
    directory.mkdir()
    options = ("--image", str(debian_kernel.image()), "--kprobes", "kernel")
    with daemon(directory, *options, program=REAL_PROGRAM) as mounted:
        done = subprocess.run(
            ["sh", "-c", SCRIPT, "sh", str(directory)],
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        # If a command fails, the output shows which one.
        printed = ["1", "k do_sys_openat2+0x0", "hello", "1", "1", "1"]
        assert (done.stdout.splitlines(), done.returncode, done.stderr) == (printed, 0, "")
        links_and_room(directory)
        appends_as_the_host_does(directory)
        names_come_and_go_as_the_hosts_do(directory)
        graph_has_the_commands_calls(directory)
        is_debugged(directory)
        is_refused_to_reboot(directory)
        saves_no_default_maxactive(directory)
        assert mounted.log.count("\n") <= 2
