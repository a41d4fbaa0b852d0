"""The example modules that probe, loaded on a mount: their messages, and their probes in the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.mounted.conftest import assert_no_fault
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]

EXAMPLES = ("kprobe_example", "kretprobe_example", "jprobe_example")


def messages(files: Files) -> list[str]:
    return [line.split("] ", 1)[1] for line in files.lines("machine/dmesg")]


def test_examples(directory: Path) -> None:
    with daemon(directory, "--profile", "kprobes-2010", program=REAL_PROGRAM) as running:
        files = Files(running.directory)
        for name in EXAMPLES:
            files.write("machine/modules", f"load {name}")
        listed = sorted(tuple(line.split()[1:3]) for line in files.lines("kprobes/list"))
        assert listed == [("j", "gcd+0x0"), ("k", "kernel_clone+0x0"), ("r", "kernel_clone+0x0")]
        assert [line for line in messages(files) if "planted at" in line][-1].startswith("jprobe_example: ")
        files.write("machine/call", "gcd 12 18")
        assert files.read("machine/call") == "gcd = 0x6 (6)\n"
        assert "jprobe_example: gcd(12, 18)" in messages(files)
        assert files.shell("set -e; (cat kprobes/list) > /dev/null").returncode == 0
        told = "\n".join(messages(files))
        assert re.search(r"^kernel_clone: pre_handler: p->addr = \w+, ip = \w+$", told, re.MULTILINE)
        assert re.search(r"^kernel_clone: post_handler: ip - p->addr = -?\d+, flags = 0$", told, re.MULTILINE)
        assert re.search(r"^kernel_clone returned \d+ and took \d+ ns$", told, re.MULTILINE)
        for name in EXAMPLES:
            files.write("machine/modules", f"unload {name}")
        assert files.read("kprobes/list") == ""
        ended = [line for line in messages(files) if "unregistered" in line]
        assert [line.partition(":")[0] for line in ended] == list(EXAMPLES)
    assert_no_fault(running)


def test_a_kernel_without_jprobes(directory: Path) -> None:
    with daemon(directory, program=REAL_PROGRAM) as running:
        files = Files(running.directory)
        with pytest.raises(OSError, match="not supported"):
            files.write("machine/modules", "load jprobe_example")
        assert files.read("machine/modules") == ""
        assert "jprobe_example: register_jprobe returned -95" in messages(files)
    assert_no_fault(running)
