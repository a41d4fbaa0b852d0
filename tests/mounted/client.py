"""A client for stress tests, which uses control files and scratch/ for some seconds, and checks every answer.

client.py MOUNT NUMBER SECONDS

Prints the number of rounds. Ends with a traceback if an answer is wrong.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

EVENTS = "tracing/events/kprobes"

MODES = ("int3\n", "ftrace\n", "optimized\n")
"""The possible modes of an armed probe in a kernel with preemption."""


class Client:
    """A client process for stress tests. The names of all objects that the client creates contain
    `number`.
    """

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.event = f"e{number}"
        self.directory = root / "scratch" / f"d{number}"
        self.directory.mkdir()
        self.dice = random.Random(number)

    def append(self, name: str, text: str) -> None:
        descriptor = os.open(self.root / name, os.O_WRONLY | os.O_APPEND)
        try:
            assert os.write(descriptor, text.encode()) == len(text)
        finally:
            os.close(descriptor)

    def probe(self) -> None:
        """Define an event, enable the event, check its files, and remove the event."""
        place = self.dice.choice(["vfs_read", "vfs_write+5", "do_sys_openat2", "kernel_clone", "strlen"])
        enable = f"{EVENTS}/{self.event}/enable"
        self.append("kprobe_events", f"p:{self.event} {place} di=%di comm=$comm\n")
        self.append(enable, "1")
        assert (self.root / enable).read_text() == "1\n"
        assert f"p:kprobes/{self.event} {place} " in (self.root / "kprobe_events").read_text()
        assert (self.root / f"kprobes/stats/kprobes/{self.event}/mode").read_text() in MODES
        self.append(enable, "0")
        self.append("kprobe_events", f"-:{self.event}\n")
        assert not (self.root / enable).exists()

    def store(self) -> None:
        """Write a file in pieces, read it, replace it and remove it."""
        data = self.dice.randbytes(self.dice.choice([0, 1, 100, 4096, 5000, 200_000]))
        temporary, file = self.directory / "new", self.directory / "file"
        with temporary.open("wb", buffering=0) as out:
            middle = len(data) // 2
            out.write(data[:middle])
            out.write(data[middle:])
        temporary.rename(file)
        assert file.read_bytes() == data
        assert os.listdir(self.directory) == ["file"]
        file.unlink()

    def call(self) -> None:
        """Call a guest function. The file machine/call may show the result of another client's call."""
        self.append("machine/call", f'strlen "{self.event}"\n')
        assert (self.root / "machine/call").read_text().startswith("strlen = 0x")

    def look(self) -> None:
        """Read and check files that other clients change at the same time."""
        for name in ("tracing/trace", "kprobes/list", "kprobe_profile", "machine/tasks", "tracing/README"):
            assert (self.root / name).read_text() or name in ("kprobes/list", "kprobe_profile")

    def fork(self) -> None:
        """Fork a child, which also makes requests, and wait for the child."""
        child = os.fork()
        if child == 0:
            os._exit((self.root / "machine/version").read_text().startswith("Linux") - 1)
        assert os.waitpid(child, 0)[1] == 0


def main() -> int:
    """Run the client with the arguments of the command line."""
    root, number, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    client = Client(root, number)
    actions = [client.probe, client.store, client.store, client.call, client.look, client.fork]
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        client.dice.choice(actions)()
        rounds += 1
    print(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
