"""A mount of a riscv64 kernel, with and without compressed instructions: the main features, end to end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]


@pytest.fixture(params=["riscv64", "riscv64i"])
def files(request: pytest.FixtureRequest, directory: Path) -> Iterator[Files]:
    with daemon(directory, "--arch", request.param, program=REAL_PROGRAM) as running:
        yield Files(directory)
    assert "ERROR" not in running.log, running.log
    assert "Traceback" not in running.log, running.log


def output(files: Files, script: str) -> str:
    result = files.shell(f"set -e\n{script}")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_files_and_tasks(files: Files) -> None:
    text = output(
        files,
        """
        mkdir scratch/d
        echo hello > scratch/x
        mv scratch/x scratch/d/y
        ln -s d/y scratch/l
        cat scratch/l
        readlink scratch/l
        chmod 600 scratch/d/y
        stat -c '%a %s' scratch/d/y
        touch -d '2001-02-03 04:05:06' scratch/d/y
        chown 1:2 scratch/d/y
        stat -c '%u %g %Y' scratch/d/y
        truncate -s 3 scratch/d/y
        cat scratch/d/y; echo
        rm scratch/d/y scratch/l
        rmdir scratch/d
        ls scratch
        (cat machine/tasks)
        """,
    )
    assert text.startswith("hello\nd/y\n600 6\n1 2 ")
    assert "\nhel\n" in text
    assert re.search(r"^ +1 +0 +0 S +init$", text, re.MULTILINE)
    assert re.search(r" R +cat$| S +cat$", text, re.MULTILINE)


def test_probes_with_their_arguments(files: Files) -> None:
    text = output(
        files,
        """
        echo 'p:opened do_sys_openat2 dfd=$arg1:s32 file=+0($arg2):ustring sp=%sp ip=%epc' > kprobe_events
        echo 'p:reads vfs_read size=$arg3 caller=%ra:symbol comm=$comm' >> kprobe_events
        echo 'p:sums ksys_read+8 a0=%a0' >> kprobe_events
        echo 1 > tracing/events/kprobes/enable
        echo hello > scratch/greeting
        cat scratch/greeting
        cat kprobes/list
        cat tracing/trace
        """,
    )
    assert re.search(
        r': \(do_sys_openat2\+0x0/\w+\) dfd=-100 file="scratch/greeting" sp=0xffffffd\w{9} ip=0xffffffff802',
        text,
    )
    assert re.search(
        r": \(vfs_read\+0x0/0x\w+\) size=0x20000 caller=ksys_read\+0x\w+/0x\w+ comm=\"cat\"$", text, re.M
    )
    assert re.search(r" sums: \(ksys_read\+0x8/0x\w+\) a0=0x\w+$", text, re.MULTILINE)
    assert re.search(r"^ffffffff802\w{5}  k  vfs_read\+0x0    \[FTRACE\]$", text, re.MULTILINE)
    assert re.search(r"^ffffffff802\w{5}  k  ksys_read\+0x8 ", text, re.MULTILINE)


def test_returns_and_forks(files: Files) -> None:
    text = output(
        files,
        """
        echo 'r:read vfs_read ret=$retval:s32' > kprobe_events
        echo 'p:forked kernel_clone' >> kprobe_events
        echo 1 > tracing/events/kprobes/enable
        echo four > scratch/f
        (cat scratch/f)
        grep -cE ' forked: ' tracing/trace
        grep -E ' read: .* ret=5$' tracing/trace
        """,
    )
    assert re.search(r"read: \(ksys_read\+0x\w+/0x\w+ <- vfs_read\) ret=5$", text, re.MULTILINE)


def test_each_hit_counts_whatever_way_it_goes(files: Files) -> None:
    """All hits are counted for probes on copied and on simulated instructions, at a function's entry, and at
    a return.
    """
    text = output(
        files,
        """
        for at in 0 8 12 16 20 24 28 32 36 40; do
            echo "p:at$at crc32_le+$at" >> kprobe_events 2> /dev/null || true
        done
        echo 'r:back crc32_le ret=$retval:x32' >> kprobe_events
        echo 1 > tracing/events/kprobes/enable
        for turn in 1 2 3 4 5; do
            echo 'crc32_le 0xffffffff "123456789" 9' > machine/call
            cat machine/call
        done
        cat kprobe_profile
        tail -n 1 tracing/trace
        echo 0 > tracing/events/kprobes/enable
        echo 'crc32_le 0xffffffff "123456789" 9' > machine/call; cat machine/call
        """,
    )
    assert text.count("crc32_le = 0x340bc6d9") == 6
    hits = {name: int(count) for name, count in re.findall(r"^  (\w+) +(\d+) +0$", text, re.MULTILINE)}
    assert hits["at0"] == hits["back"] == 5
    assert len(hits) >= 6
    assert all(count >= 5 for count in hits.values()), hits


def test_the_kernels_own_events(files: Files) -> None:
    text = output(
        files,
        """
        echo 1 > tracing/events/sched/sched_process_fork/enable
        echo 1 > tracing/events/raw_syscalls/sys_enter/enable
        echo 1 > tracing/events/syscalls/sys_exit_openat/enable
        (true)
        echo > scratch/f
        cat tracing/trace
        """,
    )
    assert re.search(
        r"sched_process_fork: comm=bash pid=\d+ child_comm=bash child_pid=\d+$", text, re.MULTILINE
    )
    assert re.search(r"sys_enter: NR 220 \(1200011, 0, 0, 0, 0, 0\)$", text, re.MULTILINE)
    assert re.search(r"sys_openat -> 0x3$", text, re.MULTILINE)


def test_function_tracers(files: Files) -> None:
    text = output(
        files,
        """
        echo data > scratch/a
        echo 'vfs_*' > tracing/set_ftrace_filter
        echo function > tracing/current_tracer
        cat scratch/a
        grep vfs_read tracing/trace
        echo vfs_read > tracing/set_graph_function
        echo > tracing/set_ftrace_filter
        echo function_graph > tracing/current_tracer
        cat scratch/a
        cat tracing/trace
        """,
    )
    assert "vfs_read <-ksys_read\n" in text
    assert re.search(r"\|  vfs_read\(\) \{$", text, re.MULTILINE)
    assert re.search(r"us    \|    __access_ok\(\);$", text, re.MULTILINE)


def test_modules_and_an_oops(files: Files) -> None:
    text = output(
        files,
        """
        for name in ktgt counter counter_user; do echo load $name > machine/modules; done
        echo 'p:m counter_user:counter_twice' > kprobe_events
        echo 1 > tracing/events/kprobes/m/enable
        echo 'counter_twice 4' > machine/call
        cat machine/call
        grep -c ' m: (counter_twice' tracing/trace
        ! echo 'strlen 5' > machine/call 2> /dev/null
        cat machine/dmesg machine/modules
        """,
    )
    assert "counter_twice = 0x9 (9)\n1\n" in text
    assert "Unable to handle kernel NULL pointer dereference at virtual address 0000000000000005" in text
    assert re.search(r"status: \w{16} badaddr: 0{15}5 cause: 0{15}d$", text, re.MULTILINE)
    assert "epc : strlen+0x" in text
    assert "counter_user 8192 0 - Live 0xffffffffc000" in text
