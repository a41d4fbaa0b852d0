"""Triggers and histograms on the real kernel: delays, names and call chains of real requests."""

from __future__ import annotations

import errno
import os
import re

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

OPENED, MADE = "tracing/events/kprobes/opened", "tracing/events/kprobes/made"


@pytest.fixture
def probed(files: Files) -> Files:
    """Define two disabled events that a mkdir(2) hits one after the other. Return the files of the mount."""
    files.write("tracing/kprobe_events", "p:opened do_mkdirat mode=%dx:u32\np:made vfs_mkdir mode=%cx:u32\n")
    return files


def _mkdir(files: Files, name: str) -> None:
    files.path(f"scratch/{name}").mkdir(0o755)


def test_a_histogram_counts_what_a_process_does(probed: Files) -> None:
    probed.write(f"{MADE}/trigger", "hist:keys=common_pid.execname:vals=mode")
    assert probed.read(f"{MADE}/enable") == "0*\n"
    for name in ("a", "b", "c"):
        _mkdir(probed, name)
    line = next(line for line in probed.lines(f"{MADE}/hist") if line.startswith("{"))
    assert re.fullmatch(
        rf"{{ common_pid: \S+ +\[ *{os.getpid()}\] }} hitcount: +3  mode: +\d+", line.rstrip("\n")
    )
    assert "made" not in probed.read("tracing/trace")


def test_a_delay_becomes_an_event(probed: Files) -> None:
    probed.write("tracing/synthetic_events", "delay u64 usecs; s32 task\n")
    probed.write(f"{OPENED}/trigger", "hist:keys=common_pid:t0=common_timestamp.usecs")
    probed.write(
        f"{MADE}/trigger",
        "hist:keys=common_pid:d=common_timestamp.usecs-$t0,p=common_pid"
        ":onmatch(kprobes.opened).trace(delay,$d,$p)",
    )
    probed.write("tracing/events/synthetic/delay/enable", "1")
    _mkdir(probed, "a")
    lines = [line for line in probed.lines("tracing/trace") if "delay:" in line]
    assert len(lines) == 1
    assert re.search(rf"delay: usecs=\d+ task={os.getpid()}$", lines[0].rstrip("\n"))
    with assert_errno(errno.EBUSY):
        probed.write("tracing/synthetic_events", "!delay\n")


def test_a_call_chain(probed: Files) -> None:
    probed.write(f"{MADE}/trigger", "stacktrace:1")
    _mkdir(probed, "a")
    _mkdir(probed, "b")
    text = probed.read("tracing/trace")
    assert text.count("<stack trace>") == 1
    chain = re.findall(r"^ => (\S+)$", text, re.MULTILINE)
    assert chain[:2] == ["vfs_mkdir", "do_mkdirat"]
    assert "do_syscall_64" in chain


def test_one_event_switches_another(probed: Files) -> None:
    probed.write(f"{OPENED}/trigger", "enable_event:kprobes:made:1 if mode > 0")
    assert probed.read(f"{MADE}/enable") == "0*\n"
    _mkdir(probed, "a")
    assert probed.read(f"{MADE}/enable") == "1*\n"
    assert "made: (vfs_mkdir" in probed.read("tracing/trace")
    probed.write(f"{MADE}/trigger", "traceoff")
    _mkdir(probed, "b")
    assert probed.read("tracing/tracing_on") == "0\n"


def test_an_event_probe_looks_at_another_event(probed: Files) -> None:
    probed.write("tracing/synthetic_events", "mode_of u32 mode\n")
    probed.write(f"{MADE}/trigger", "hist:keys=common_pid:m=mode:onchange($m).trace(mode_of,$m)")
    probed.write("tracing/dynamic_events", "e:looked synthetic.mode_of m=$mode:x32\n")
    probed.write("tracing/events/eprobes/looked/enable", "1")
    _mkdir(probed, "a")
    assert re.search(r"looked: \(synthetic\.mode_of\) m=0x\w+\n", probed.read("tracing/trace"))
