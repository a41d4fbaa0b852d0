"""A mount of a 32-bit kernel, end to end: probes, fetch arguments, files and tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]


@pytest.fixture
def files(directory: Path) -> Iterator[Files]:
    with daemon(directory, "--arch", "i386", program=REAL_PROGRAM) as running:
        yield Files(directory)
    assert "ERROR" not in running.log, running.log
    assert "Traceback" not in running.log, running.log


def test_probes_with_their_arguments(files: Files) -> None:
    result = files.shell(
        """
        set -e
        echo 'p:opened do_sys_openat2 dfd=$arg1:s32 file=+0($arg2):ustring sp=%sp seg=%fs' > kprobe_events
        echo 'p:reads vfs_read size=$arg3 fourth=$stack1:x32' >> kprobe_events
        echo 1 > tracing/events/kprobes/enable
        echo hello > scratch/greeting
        cat scratch/greeting
        grep -E ': (opened|reads): .*' tracing/trace
        cat kprobes/list
        cat tracing/events/kprobes/reads/format
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    text = result.stdout
    assert 'dfd=-100 file="scratch/greeting" sp=0xc' in text
    assert " seg=0xd8\n" in text
    assert re.search(r"reads: \(vfs_read\+0x0/0x[0-9a-f]+\) size=0x20000 fourth=0xc[0-9a-f]{7}\n", text)
    assert re.search(r"^c1[0-9a-f]{6}  k  vfs_read\+0x0    \[FTRACE\]$", text, re.MULTILINE)
    assert "field:unsigned long __probe_ip;\toffset:8;\tsize:4;\tsigned:0;" in text
    assert "field:u32 size;\toffset:12;\tsize:4;\tsigned:0;" in text


def test_returns_and_forks(files: Files) -> None:
    result = files.shell(
        """
        set -e
        echo 'r:read vfs_read ret=$retval:s32' > kprobe_events
        echo 'p:forked kernel_clone' >> kprobe_events
        echo 1 > tracing/events/kprobes/enable
        echo four > scratch/f
        (cat scratch/f)
        (cat scratch/none 2> /dev/null || true)
        grep -cE ' forked: ' tracing/trace
        grep -E ' read: .* ret=5$' tracing/trace
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    forks, returned = result.stdout.splitlines()[1:3]
    assert int(forks) >= 2
    assert " <- vfs_read) ret=5" in returned


def test_an_optimized_probe_and_its_detour(files: Files) -> None:
    result = files.shell(
        """
        set -e
        echo p:s gcd+5 > kprobe_events
        echo 1 > tracing/events/kprobes/s/enable
        for n in 1 2 3; do echo "gcd 12 18" > machine/call; done
        cat kprobes/stats/kprobes/s/hits kprobes/list
        # The first hit by the jump has the handler compiled into a detour.
        echo "gcd 12 18" > machine/call
        cat kprobes/stats/kprobes/s/detour
        echo 'kstrtoint "x" 0 0' > machine/call
        cat machine/call
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == "3"
    assert "[OPTIMIZED]" in result.stdout
    assert "%fs:" in result.stdout, "the handler counts in the CPU's own cells"
    assert result.stdout.endswith("kstrtoint = 0xffffffea (-22)\n")


def test_files_with_offsets_and_times(files: Files) -> None:
    result = files.shell(
        """
        set -e
        cd scratch
        seq 2000 > numbers
        dd if=numbers bs=1 skip=5 count=4 status=none
        truncate -s 3 numbers
        cat numbers
        touch -d '2020-01-02 03:04:05 UTC' numbers
        stat -c '%s %Y' numbers
        mkdir d; mv numbers d/n; ls d; rm -r d; ls
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "\n4\n5" + "1\n2" + "3 1577934245\nn\n"


def test_modules(files: Files) -> None:
    result = files.shell(
        """
        set -e
        echo load counter > machine/modules
        cat machine/modules
        echo p:hit counter:counter_add > kprobe_events
        echo 1 > tracing/events/kprobes/hit/enable
        echo 'counter_add 2' > machine/call
        cat kprobes/stats/kprobes/hit/hits
        echo 0 > tracing/events/kprobes/hit/enable
        > kprobe_events
        grep 'counter]' machine/kallsyms | head -n 1
        echo unload counter > machine/modules
        cat machine/modules
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    shown, hits, symbol, *rest = result.stdout.splitlines()
    assert re.fullmatch(r"counter \d+ 0 - Live 0xf4[0-9a-f]{6}", shown)
    assert re.fullmatch(r"f4[0-9a-f]{6} \w \w+\t\[counter\]", symbol)
    assert (hits, rest) == ("1", [])


def test_an_oops_names_the_machines_registers(files: Files) -> None:
    result = files.shell("echo 'strlen 16' > machine/call; cat machine/dmesg")
    assert "Bad address" in result.stderr
    assert "BUG: kernel NULL pointer dereference, address: 00000010" in result.stdout
    assert re.search(r"EIP: strlen\+0x[0-9a-f]+/0x[0-9a-f]+\n", result.stdout)
    assert "EAX: 00000010 " in result.stdout
    assert "note: " not in result.stdout
    assert files.read("machine/tasks")


def test_run_with_an_architecture() -> None:
    command = ["sh", "-c", "head -c 9 $KPROBEFS/machine/kallsyms"]
    result = kprobefs("run", "--arch", "i386", "--", *command, program=REAL_PROGRAM)
    assert (result.returncode, result.stdout) == (0, "00000000 ")
