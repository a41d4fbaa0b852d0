"""Lists of pids with compiled handlers: the same records as from handlers in Python, without traps."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.test_native_hits import counted_entries
from tests.sample import share

IN_GUEST = PROFILES["linux-6.1"]
IN_PYTHON = replace(IN_GUEST, compiled=False)
PIDS = (601, 602, 603)
DEFINITIONS = (
    "p:a vfs_read",
    "p:a vfs_read c=$comm s=+0($stack):u64",
    "p:a vfs_read+8 c=$comm",
    "r:a vfs_read n=$retval",
)
STEPS = (
    ("set_event_notrace_pid", "602"),
    ("set_event_pid", "601 602"),
    ("set_event_notrace_pid", ""),
    ("set_event_pid", "603 0"),
    ("set_event_pid", ""),
    ("set_event_notrace_pid", "601 602 603"),
    ("instances/other/set_event_pid", "601"),
    ("set_event_notrace_pid", ""),
    ("instances/other/events/kprobes/a/filter", "common_pid != 602"),
    ("set_event_notrace_pid", " ".join(map(str, range(600, 700)))),
    ("instances/other/set_event_pid", ""),
)
"""Files and their contents, written one after the other while several tasks make hits."""


class Shell:
    """The files of a kernel as processes use them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.mount = kernel.mount()

    def write(self, path: str, text: str) -> None:
        """Replace the content of a file in tracing/."""
        client = Client(0, 0, 0)
        handle = self.mount.open(client, f"/tracing/{path}", os.O_WRONLY | os.O_TRUNC)
        if text:
            self.mount.write(client, handle, text.encode() + b"\n", 0)
        self.mount.release(handle)

    def hits(self) -> None:
        """Let each of two processes read a file three times, in turns."""
        clients = [Client(pid, 0, 0) for pid in PIDS]
        handles = [self.mount.open(client, "/scratch/file", os.O_RDONLY) for client in clients]
        for number in (0, 1, 0, 1, 2, 2, 1, 0, 2):
            self.mount.read(clients[number], handles[number], 8, 0)
        for handle in handles:
            self.mount.release(handle)

    def text(self, path: str) -> str:
        return self.kernel.read_file(f"tracing/{path}")


def story(arch: str, definition: str, *, compiled: bool) -> list[str]:
    """Change the lists while several tasks make hits; return the traces and the profile.

    `compiled`: handlers are guest code instead of Python.
    """
    profile = IN_GUEST if compiled else IN_PYTHON
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        shell = Shell(kernel)
        client = Client(600, 0, 0)
        handle = shell.mount.create(client, "/scratch/file", 0o644, os.O_RDWR)
        shell.mount.write(client, handle, b"data" * 10, 0)
        shell.mount.release(handle)
        kernel.write_file("tracing/kprobe_events", definition)
        kernel.trace_arrays.make("other")
        for where in ("", "instances/other/"):
            shell.write(f"{where}events/kprobes/a/enable", "1")
        shell.hits()
        for path, text in STEPS:
            shell.write(path, text)
            shell.hits()
            if kernel.kprobes.optimizer is not None:
                with kernel.lock:
                    kernel.kprobes.optimizer.flush()
            shell.hits()
        shell.write("instances/other/events/kprobes/a/enable", "0")
        told = [shell.text(path) for path in ("trace", "instances/other/trace", "kprobe_profile")]
        kernel.trace_arrays.remove("other")
        return told


@pytest.mark.parametrize(
    ("arch", "definition"), share([*product(("x86_64", "i386", "riscv64"), DEFINITIONS)], 0, 2)
)
def test_compiled_or_not_the_records_are_the_same(arch: str, definition: str) -> None:
    in_python, in_guest = (story(arch, definition, compiled=compiled) for compiled in (False, True))
    assert in_guest == in_python
    assert in_guest[0].count("a: (") > 20


@pytest.mark.parametrize("definition", ["p:a gcd", "p:a gcd+5 c=$comm", "r:a gcd"])
def test_the_host_answers_once_for_each_task(definition: str) -> None:
    with Kernel(MachineConfig()) as kernel:
        shell = Shell(kernel)
        kernel.write_file("tracing/kprobe_events", definition)
        shell.write("events/kprobes/a/enable", "1")
        # The host would save the task's name at the first record of each request.
        shell.write("options/record-cmd", "0")

        def traps() -> int:
            """Return how often ten calls of gcd enter Python, after the handlers were compiled."""
            for _ in range(3):
                kernel.call("gcd", 12, 18)
                with kernel.lock:
                    kernel.kprobes.optimizer.flush()  # type: ignore[union-attr]
            with counted_entries(kernel) as entered:
                for _ in range(10):
                    kernel.call("gcd", 12, 18)
            return len(entered)

        assert traps() == 0
        pid = int(shell.text("trace").splitlines()[-1].split()[0].rpartition("-")[2])
        shell.write("set_event_notrace_pid", f"{pid + 1}")
        assert traps() == 0
        shell.write("set_event_pid", f"{pid} {pid + 1} {pid + 2}")
        assert traps() == 0
        shell.write("set_event_pid", f"{pid + 1}")
        recorded = shell.text("trace")
        assert traps() == 0
        assert shell.text("trace") == recorded
        shell.write("set_event_pid", f"{pid}")
        assert traps() == 0
        assert shell.text("trace") != recorded
