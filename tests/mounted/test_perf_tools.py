"""perf-tools over a mount: each tool with its options prints what the clients beside it did.

The table in docs/compatibility.md says which of them can't, and why.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.system import as_system
from tests.mounted.test_tools import needs

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    needs("funccount-perf"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]

WORK = """
    cd /sys/kernel/debug/scratch
    work() {
        (until [ "$(cat $1)" = "$2" ]; do sleep 0.05; done
         sleep 0.5
         for i in 1 2 3; do mkdir d; rmdir d; done) 2>/dev/null &
    }
"""
"""work FILE TEXT: three rounds, once a file of tracefs reads so; the tool clears the buffer behind that."""


def _tool(tmp_path: Path, *commands: str) -> list[str]:
    """What each command prints, one behind the other in one mount."""
    script = WORK + "\n".join(f"{command}\necho =next=\nwait" for command in commands)
    return as_system(f"({script}) 2>&1", tmp_path).split("=next=\n")[:-1]


def test_funccount(tmp_path: Path) -> None:
    ready = "work /sys/kernel/tracing/function_profile_enabled 1;"
    all_of, twice = _tool(
        tmp_path,
        f"{ready} funccount-perf -d 2 'vfs_*dir'",
        f"{ready} funccount-perf -T -t 1 -i 1 -d 2 'vfs_mk*'",
    )
    assert re.findall(r"^(\w+) +(\d+)$", all_of, re.M) == [("vfs_mkdir", "3"), ("vfs_rmdir", "3")]
    assert sum(map(int, re.findall(r"^vfs_mkdir +(\d+)$", twice, re.M))) == 3


def test_functrace_and_funcgraph(tmp_path: Path) -> None:
    def ready(tracer: str) -> str:
        return f"work /sys/kernel/tracing/current_tracer {tracer};"

    trace, graph = _tool(
        tmp_path,
        f"{ready('function')} functrace-perf -H -d 2 'vfs_mk*'",
        f"{ready('function_graph')} funcgraph-perf -aCT -m 2 -d 2 vfs_mkdir",
    )
    assert len(re.findall(r"mkdir-\d+ .*: vfs_mkdir <-do_mkdirat$", trace, re.M)) == 3
    assert len(re.findall(r"mkdir-\d+ +\|.*    ramfs_mkdir\(\);$", graph, re.M)) == 3
    assert len(re.findall(r"mkdir-\d+ +\|.*\} /\* vfs_mkdir \*/$", graph, re.M)) == 3


def test_kprobe_tpoint_and_reset(tmp_path: Path) -> None:
    probes = "/sys/kernel/tracing/events"
    stacks, filtered, point, reset = _tool(
        tmp_path,
        f"work {probes}/kprobes/vfs_mkdir/enable 1; kprobe-perf -s -H -d 2 p:vfs_mkdir",
        f"work {probes}/kprobes/r/enable 1; kprobe-perf -d 2 'r:r vfs_mkdir $retval:s32' 'arg1 > 0'",
        f"work {probes}/syscalls/sys_enter_mkdir/enable 1; tpoint-perf -H -s -d 2 syscalls:sys_enter_mkdir",
        "reset-ftrace-perf",
    )
    assert stacks.count(": vfs_mkdir: (vfs_mkdir+0x0/0x") == 3
    assert len(re.findall(r"<stack trace>\n => vfs_mkdir\n => do_mkdirat\n", stacks)) == 3
    assert filtered.startswith("Tracing kprobe r for")
    assert "<- vfs_mkdir" not in filtered
    assert point.count(": sys_mkdir(pathname: ") == 3
    assert "set_ftrace_filter, after:" in reset
