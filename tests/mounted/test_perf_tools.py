"""perf-tools on a mount: each tool with its options prints what clients did at the same time.

The table in docs/reference/compatibility.md says which tools cannot run, and why.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.system import as_system, while_sleeping
from tests.mounted.test_tools import needs

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    needs("funccount-perf"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]

WORKER = """
import os, sys, time
name = sys.argv[1]
with open("/proc/self/comm", "w") as comm:
    comm.write(name)
turn = f"{os.environ['HOME']}/{name}.turn"
while True:
    while not os.path.exists(turn):
        time.sleep(0.005)
    for _ in range(3):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        try:
            os.open(f"no-{name}", os.O_RDONLY)
        except FileNotFoundError:
            pass
        os.mkdir(f"{name}.d")
        os.rmdir(f"{name}.d")
    os.unlink(turn)
"""
"""Program that works when it has a turn, which is a file of its name. Then it removes the file.

Three times, it makes a file and a directory of its name, and fails to open another file.
"""
TURN = """
for name in {names}; do : > $HOME/$name.turn; done
for name in {names}; do
    while [ -e $HOME/$name.turn ]; do /bin/sleep 0.01; done
done
"""
"""Script that gives each worker a turn, and waits until the workers have finished."""


LIVE = """
live() {
    env --default-signal=INT setsid "${@:2}" > $HOME/out 2>&1 & tool=$!
    until grep -q "$1" $HOME/out; do sleep; done
    kill -INT -- -$tool; wait $tool; cat $HOME/out
}
"""
"""Shell function that interrupts a tool, as a terminal does, when its output has a text."""


def _beside(tmp_path: Path, *commands: str, names: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the output of each command. Whenever a command sleeps, each worker does its work once.

    `names`: names of the workers, separated by blanks. $P is the pid of the first worker. `options`: options
    of `kprobefs run`.
    """
    (tmp_path / "worker.py").write_text(WORKER)
    start = f"{shlex.quote(sys.executable)} {tmp_path / 'worker.py'}"
    # The first turn waits until the workers have started.
    script = f"""
        {while_sleeping(TURN.format(names=names), tmp_path)}
        {LIVE}
        cd /sys/kernel/debug/scratch
        for name in {names}; do {start} $name & : ${{P:=$!}}; done
        sleep
        for each in {" ".join(map(shlex.quote, commands))}; do eval "$each"; echo =next=; done
        kill $(jobs -p)
    """
    return as_system(f"({script}) 2>&1", tmp_path, *options).split("=next=\n")[:-1]


def _tool(tmp_path: Path, *commands: str) -> list[str]:
    """Return the output of each command. Meanwhile, a process named mkdir makes three directories."""
    return _beside(tmp_path, *commands, names="mkdir")


def _beside_two(tmp_path: Path, *commands: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the output of each command.

    Two processes work meanwhile. $P is the pid of the one named `mine`.
    """
    return _beside(tmp_path, *commands, names="mine other", options=options)


def test_funccount(tmp_path: Path) -> None:
    all_of, twice = _tool(
        tmp_path,
        "funccount-perf -d 2 'vfs_*dir'",
        "funccount-perf -T -t 1 -i 1 -d 2 'vfs_mk*'",
    )
    assert re.findall(r"^(\w+) +(\d+)$", all_of, re.M) == [("vfs_mkdir", "3"), ("vfs_rmdir", "3")]
    assert re.findall(r"^vfs_mkdir +(\d+)$", twice, re.M) == ["3", "3"]


def test_functrace_and_funcgraph(tmp_path: Path) -> None:
    trace, graph = _tool(
        tmp_path,
        "functrace-perf -H -d 2 'vfs_mk*'",
        "funcgraph-perf -aCT -m 2 -d 2 vfs_mkdir",
    )
    assert len(re.findall(r"mkdir-\d+ .*: vfs_mkdir <-do_mkdirat$", trace, re.M)) == 3
    assert len(re.findall(r"mkdir-\d+ +\|.*    ramfs_mkdir\(\);$", graph, re.M)) == 3
    assert len(re.findall(r"mkdir-\d+ +\|.*\} /\* vfs_mkdir \*/$", graph, re.M)) == 3


def test_kprobe_tpoint_and_reset(tmp_path: Path) -> None:
    stacks, filtered, point, reset = _tool(
        tmp_path,
        "kprobe-perf -s -H -d 2 p:vfs_mkdir",
        "kprobe-perf -d 2 'r:r vfs_mkdir $retval:s32' 'arg1 > 0'",
        "tpoint-perf -H -s -d 2 syscalls:sys_enter_mkdir",
        "reset-ftrace-perf",
    )
    assert stacks.count(": vfs_mkdir: (vfs_mkdir+0x0/0x") == 3
    assert len(re.findall(r"<stack trace>\n => vfs_mkdir\n => do_mkdirat\n", stacks)) == 3
    assert filtered.startswith("Tracing kprobe r for")
    assert "<- vfs_mkdir" not in filtered
    assert point.count(": sys_mkdir(pathname: ") == 3
    assert "set_ftrace_filter, after:" in reset


def test_funcslower(tmp_path: Path) -> None:
    """funcslower prints only calls above the threshold. The mount uses the real clock, because most calls
    take less than a microsecond of virtual time.
    """
    slow, of_one, none = _beside_two(
        tmp_path,
        "funcslower-perf -d 0.5 -HtC do_sys_openat2 1",
        "funcslower-perf -d 0.5 -L $P do_sys_openat2 1",
        "funcslower-perf -d 0.5 -p $P do_sys_openat2 10000000",
        options=("--clock", "real"),
    )
    line = r"^ *%s\d+\) [ !#*+$@]*\d+(\.\d+)? us +\| +\} /\* do_sys_openat2 \*/$"
    assert re.search(line % r"\d+\.\d+ \| +", slow, re.M), slow
    assert "TIME        CPU  DURATION" in slow
    assert re.search(line % "", of_one, re.M), of_one
    assert "/* do_sys_openat2 */" not in none


def test_one_process_alone(tmp_path: Path) -> None:
    """With -p or -L, each of these tools prints only lines of the selected process."""
    both, *alone = _beside_two(
        tmp_path,
        "functrace-perf -d 0.5 'vfs_mk*'",
        "functrace-perf -d 0.5 -p $P 'vfs_mk*'",
        "functrace-perf -d 0.5 -L $P 'vfs_mk*'",
        "funcgraph-perf -d 0.5 -DHtP -p $P -m 2 vfs_mkdir",
        "funcgraph-perf -d 0.5 -P -L $P -m 2 vfs_rmdir",
        "kprobe-perf -d 0.5 -p $P p:vfs_mkdir",
        "kprobe-perf -d 0.5 -L $P p:vfs_mkdir",
        "tpoint-perf -d 0.5 -p $P syscalls:sys_enter_mkdir",
        "tpoint-perf -d 0.5 -L $P syscalls:sys_enter_mkdir",
    )
    assert {"mine", "other"} == set(re.findall(r"^ +(\w+)-\d+ ", both, re.M))
    for printed in alone:
        assert {"mine"} == set(re.findall(r"\b(mine|other)-\d+ ", printed)), printed


def test_live(tmp_path: Path) -> None:
    """Without -d, the tools print until they are interrupted, and leave no tracer and no probe."""
    reset = "cat /sys/kernel/tracing/current_tracer /sys/kernel/tracing/kprobe_events"
    trace, graph, probe, point = _beside_two(
        tmp_path,
        f"live ': vfs_mkdir <-do_mkdirat' functrace-perf 'vfs_mk*'; {reset}",
        f"live ' vfs_rmdir() {{' funcgraph-perf -P -m 2 vfs_rmdir; {reset}",
        f"live ': vfs_mkdir: (vfs_mkdir+0x0/0x' kprobe-perf p:vfs_mkdir; {reset}",
        f"live ': sys_mkdir(pathname: ' tpoint-perf syscalls:sys_enter_mkdir; {reset}",
    )
    assert ": vfs_mkdir <-do_mkdirat" in trace
    assert " vfs_rmdir() {" in graph
    assert ": vfs_mkdir: (vfs_mkdir+0x0/0x" in probe
    assert ": sys_mkdir(pathname: " in point
    for printed in (trace, graph, probe, point):
        assert printed.endswith("Ending tracing...\nnop\n"), printed


@needs("gawk")
def test_opensnoop(tmp_path: Path) -> None:
    """opensnoop prints all opened files, or selects by result, process and name. It runs gawk instead of
    mawk, which cannot run opensnoop's program.
    """
    gawk = "mount --bind $(command -v gawk) /usr/bin/mawk;"
    every, failed, mine, named = _beside_two(
        tmp_path,
        f"[ ! -e /usr/bin/mawk ] || {gawk} opensnoop-perf -d 0.5",
        "opensnoop-perf -d 0.5 -x",
        "opensnoop-perf -d 0.5 -p $P",
        "opensnoop-perf -d 0.5 -t -n mine no-",
    )

    def lines(printed: str) -> set[tuple[str, bool, str]]:
        found = re.findall(r"^(?:\d+\.\d+ +)?(\w+) +\d+ +(\S+) (\S+)$", printed, re.M)
        return {(comm, fd == "-1", name) for comm, fd, name in found}

    of_mine = {("mine", False, "mine"), ("mine", True, "no-mine")}
    assert lines(every) >= of_mine | {("other", False, "other"), ("other", True, "no-other")}
    assert lines(failed) == {("mine", True, "no-mine"), ("other", True, "no-other")}
    assert lines(mine) == of_mine
    assert lines(named) == {("mine", True, "no-mine")}
    assert re.search(r"^\d+\.\d+ +mine ", named, re.M)
