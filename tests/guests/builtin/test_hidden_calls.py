"""System calls of clients whose memory cannot be read: the guest makes the calls, and probes see faults for
the paths.
"""

from __future__ import annotations

import os

import pytest

from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch

CLIENT = Client(FIRST_PID, 0, 0)
LONG = "/".join(["d" * 200] * 15)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_paths_of_calls_that_are_unknown(arch: str) -> None:
    """openat and renameat2 with unknown paths succeed, also if the paths are long.

    A probe records the path as (fault).
    """
    watch = ScriptedWatch(comms={FIRST_PID: "client"}, free_fds={FIRST_PID: 7})
    with Kernel(MachineConfig(arch=arch), watch) as kernel:
        mount = kernel.mount()
        place = ""
        for name in LONG.split("/"):
            place += f"/{name}"
            mount.mkdir(CLIENT, f"/scratch{place}", 0o755)
        old, new = f"/scratch/{LONG}/old", f"/scratch/{LONG}/new"
        mount.release(mount.create(CLIENT, old, 0o644, os.O_WRONLY))

        def write(path: str, text: str) -> None:
            handle = mount.open(CLIENT, path, os.O_WRONLY | os.O_APPEND)
            mount.write(CLIENT, handle, text.encode(), 0)
            mount.release(handle)

        write("/tracing/kprobe_events", "p:opened do_sys_openat2 path=+0($arg2):ustring\n")
        write("/tracing/events/kprobes/opened/enable", "1")
        watch.calls[FIRST_PID] = ClientCall("openat", (0, 0x1000, os.O_RDONLY, 0), {}, is_hidden=True)
        mount.getattr(old, lambda: CLIENT)
        mount.release(mount.open(CLIENT, old, os.O_RDONLY))
        mount.release(mount.open(CLIENT, "/machine/version", os.O_RDONLY))
        watch.calls[FIRST_PID] = ClientCall("renameat2", (0, 0x1000, 0, 0x1000, 0), {}, is_hidden=True)
        mount.rename(CLIENT, old, new)
        del watch.calls[FIRST_PID]
        assert mount.getattr(new).size == 0
        assert kernel.trace.trace_text().count("path=(fault)") == 2


class UnreadableWatch(ScriptedWatch):
    """A watch that fails the test if the host reads a client's system call."""

    def call(self, pid: int, uid: int, instead: str | None = None) -> ClientCall | None:  # noqa: ARG002
        raise AssertionError("nobody can read the client's call")


def test_a_page_belongs_to_no_call() -> None:
    """read_page does not read the client's system call, because the path of this call may be in the page
    itself.
    """
    watch = UnreadableWatch(comms={FIRST_PID: "client"})
    with Kernel(MachineConfig(), watch) as kernel:
        mount = kernel.mount()
        handle = mount.create(CLIENT, "/scratch/f", 0o644, os.O_RDWR)
        mount.write(CLIENT, handle, b"text", 0)
        for path, text in (("kprobe_events", b"p:read vfs_read"), ("events/kprobes/read/enable", b"1")):
            control = mount.open(CLIENT, f"/tracing/{path}", os.O_WRONLY)
            mount.write(CLIENT, control, text, 0)
        with pytest.raises(AssertionError):
            mount.read(CLIENT, handle, 4096, 0)
        assert mount.read_page(CLIENT, handle, 4096, 0) == b"text"
        assert kernel.trace.trace_text().count("read: (vfs_read") == 1
