"""Program that runs a kernel with --state and makes records and definitions until it is killed.

Its arguments are DIR and SEED. In DIR, the file PROGRESS contains the number of records that certainly exist,
and the number of records that may have been consumed. The file DEFINED contains the definitions before the
current step. STEP contains the step: the name of a file, and the text that is written to it.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from kprobefs.daemon.reboot import RebootableKernel
from kprobefs.daemon.state.saved_state import SavedState
from kprobefs.daemon.state.state_directory import StateDirectory
from kprobefs.measure.bench import FUNCTION

PROGRESS, DEFINED, STEP, STATE = "progress", "defined", "step", "state"
CONFIG = MachineConfig(run_budget=60)
CLIENT = Client(os.getpid(), os.getuid(), os.getgid())
MIXED = (
    ("kprobe_events", "p:other vfs_read count=$arg3"),
    ("kprobe_events", "-:other"),
    ("kprobe_events", "p:more vfs_write\nr:back vfs_write $retval"),
    ("kprobe_events", "-:more\n-:back"),
    ("events/kprobes/turn/filter", "n > 3"),
    ("events/kprobes/turn/filter", "0"),
    ("buffer_size_kb", "32"),
    ("buffer_size_kb", "100"),
    ("options/sym-offset", "1"),
    ("options/sym-offset", "0"),
    ("trace_marker", "mark"),
    ("events/sched/enable", "1"),
    ("events/sched/enable", "0"),
)


def begin(directory: Path) -> RebootableKernel:
    """Start a kernel with the state that the previous kernel left."""
    state = SavedState(StateDirectory(str(directory / STATE)), "")
    return RebootableKernel(CONFIG, RootLayout.FULL, Owner(os.getuid(), os.getgid()), state=state)


def defined(living: RebootableKernel) -> str:
    """Return definitions and settings, without instances/last, which has the previous kernel's records."""
    lines = read(living, "/machine/definitions").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("instances/last/"))


def read(living: RebootableKernel, path: str) -> str:
    """Return the text of a file."""
    handle, data = living.mount.open(CLIENT, path, os.O_RDONLY), b""
    while part := living.mount.read(CLIENT, handle, 1 << 17, len(data)):
        data += part
    living.mount.release(handle)
    return data.decode()


def write(living: RebootableKernel, path: str, text: str) -> None:
    """Write a text to a file."""
    handle = living.mount.open(CLIENT, path, os.O_WRONLY)
    try:
        living.mount.write(CLIENT, handle, text.encode(), 0)
    finally:
        living.mount.release(handle)


def do(living: RebootableKernel, step: Sequence[str]) -> None:
    """Execute a step. The step may fail."""
    with suppress(OSError):
        write(living, f"/tracing/{step[0]}", f"{step[1]}\n")


def put(path: Path, text: str) -> None:
    """Replace the contents of a file atomically."""
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


class _Turns:
    """A loop in the guest that calls the probed function with consecutive numbers."""

    def __init__(self, living: RebootableKernel) -> None:
        self._machine = machine = living._kernel.machine
        target = living._kernel.image.kallsyms.lookup_name(FUNCTION)
        assert target is not None
        self._cell, self._code = machine.alloc_pages(1), machine.text.alloc_text(64)
        # push rbx; push rbp; mov rax, cell; mov ebx, [rax]; mov ebp, [rax+4]
        code = b"\x53\x55\x48\xb8" + self._cell.to_bytes(8, "little") + b"\x8b\x18\x8b\x68\x04"
        # mov edi, ebx; call; inc ebx; cmp ebx, ebp; jne; pop rbp; pop rbx; ret
        distance = target - (self._code + len(code) + 7)
        code += b"\x89\xdf\xe8" + distance.to_bytes(4, "little", signed=True)
        code += b"\xff\xc3\x39\xeb\x75\xf3\x5d\x5b\xc3"
        machine.text.poke(self._code, code)

    def run(self, start: int, end: int) -> None:
        """Call the function with the numbers from `start` to `end` - 1."""
        self._machine.memory.write(self._cell, start.to_bytes(4, "little") + end.to_bytes(4, "little"))
        self._machine.call(self._code, 0)


def main() -> None:
    """Run until the process is killed."""
    directory, random = Path(sys.argv[1]), Random(sys.argv[2])
    with open(directory / PROGRESS, "w+b") as file:
        file.truncate(16)
        made = memoryview(mmap.mmap(file.fileno(), 16)).cast("Q")
    living, number = begin(directory), 0
    turns = _Turns(living)
    if not living._kernel.tracing.kprobe_events.find("kprobes", "turn"):
        write(living, "/kprobe_events", f"p:turn {FUNCTION}+5 n=%di\n")
    write(living, "/tracing/buffer_size_kb", "64")
    write(living, "/tracing/events/kprobes/turn/enable", "1")
    pipe = living.mount.open(CLIENT, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    put(directory / DEFINED, defined(living))
    print("ready", flush=True)
    while True:
        with living._kernel.lock:
            end = number + random.choice((5, 500, 50_000))
            turns.run(number, end)
            number = made[0] = end
        if random.random() < 0.3:
            made[1] = number
            with suppress(WouldBlock):
                text = living.mount.read(CLIENT, pipe, 1 << 12, 0)
                if taken := re.findall(rb"n=0x([0-9a-f]+)", text):
                    made[1] = int(taken[-1], 16) + 1
        if random.random() < 0.5:
            step = random.choice(MIXED)
            put(directory / STEP, "\n".join(step))
            do(living, step)
            put(directory / DEFINED, defined(living))


if __name__ == "__main__":
    main()
