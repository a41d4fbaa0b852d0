"""trace-cmd at the system's place of tracefs: the decoded records agree with the lines of `trace`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stress.clients import AWAIT_RECORDERS
from tests.fuse.harness import needs_fuse
from tests.mounted.system import as_system
from tests.mounted.test_tools import needs

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    needs("trace-cmd"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]


def _recorded(tmp_path: Path, options: str) -> tuple[list[str], list[str]]:
    """Return the lines of `trace`, and the lines of trace-cmd's report.

    Both show the same records. trace-cmd has read them from trace_pipe_raw.
    """
    calls = "await_recorders; mkdir made; rmdir made; echo 0 > /sys/kernel/tracing/tracing_on"
    script = f"""
        cd /sys/kernel/debug/scratch
        echo p:made vfs_mkdir > /sys/kernel/tracing/kprobe_events
        trace-cmd record -o {tmp_path}/trace.dat {options} \\
            bash -c '{AWAIT_RECORDERS}{calls}; grep -v "^#" /sys/kernel/tracing/trace > {tmp_path}/shown' >&2
        trace-cmd report -i {tmp_path}/trace.dat
    """
    # trace-cmd counts the CPUs of the host.
    report = as_system(script, tmp_path)
    assert "UNKNOWN" not in report
    shown = (tmp_path / "shown").read_text().splitlines()
    return shown, [line for line in report.splitlines() if not line.startswith("cpus=")]


def test_function(tmp_path: Path) -> None:
    shown, report = _recorded(tmp_path, "-p function -l vfs_mkdir -l vfs_rmdir")
    # By default, the plugin of trace-cmd leaves the caller out.
    calls = [line.split(": ", 1)[1].split(" <-")[0] for line in shown]
    assert [line.split("function:")[1].split()[0] for line in report] == calls
    assert "vfs_mkdir" in calls


def test_function_graph(tmp_path: Path) -> None:
    shown, report = _recorded(tmp_path, "-p function_graph -g vfs_mkdir")
    tree = [line.split("|  ", 1)[1] for line in shown if "|  " in line]
    assert tree[0] == "vfs_mkdir() {"
    decoded = [line.split("|  ", 1)[1] for line in report if "funcgraph_" in line]
    assert decoded == [re.sub(r"^(\s*)\} /\*.*", r"\1}", line) for line in tree]


@pytest.mark.parametrize(
    ("options", "functions"),
    [
        ("-T -e kprobes:made -e kmem:kmalloc", {"__kmalloc", "vfs_mkdir"}),
        ("-e kprobes:made -R stacktrace", {"vfs_mkdir"}),
    ],
)
def test_stacks_of_events(options: str, functions: set[str], tmp_path: Path) -> None:
    shown, report = _recorded(tmp_path, options)
    stacks = re.findall(r"<stack trace>((?:\n => \S+)+)", "\n".join(shown))
    expected = [re.findall(r"=> (\S+)", stack) for stack in stacks]
    assert expected
    assert {stack[0] for stack in expected} == functions
    decoded = re.findall(r"kernel_stack: +<stack trace *>((?:\n *=> .+)+)", "\n".join(report))
    assert [re.findall(r"=> (\w+)", stack) for stack in decoded] == expected
