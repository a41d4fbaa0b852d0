"""Jprobe events on a mount whose profile has jprobes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.mounted.conftest import assert_no_fault
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]


def test_jprobe_events(directory: Path) -> None:
    with daemon(directory, "--profile", "kprobes-2010", program=REAL_PROGRAM) as running:
        files = Files(running.directory)
        files.probe("j:sums gcd a=$arg1:u64 b=$arg2:u64")
        assert files.read("kprobe_events") == "j:kprobes/sums gcd a=$arg1:u64 b=$arg2:u64\n"
        assert [line.split()[1:3] for line in files.lines("kprobes/list")] == [["j", "gcd+0x0"]]
        for a, b in ((12, 18), (35, 49)):
            files.write("machine/call", f"gcd {a} {b}")
        shown = [re.sub(r"/0x\w+", "", line.partition(": ")[2]) for line in files.records()]
        assert shown == ["sums: (gcd+0x0) a=12 b=18", "sums: (gcd+0x0) a=35 b=49"]
        assert files.lines("kprobe_profile")[0].split() == ["sums", "2", "0"]
        files.write("tracing/events/kprobes/sums/enable", "0")
        files.write("kprobe_events", "-:sums")
        assert files.read("kprobes/list") == ""
    assert_no_fault(running)
