"""Short forms of stress.linux.churn; in addition, the same seed and requests give the same trace."""

from __future__ import annotations

import os

import pytest

from emulated_kernel.vfs.core.client import Client
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES
from stress.linux.churn import SHELL, Session, churn, grown
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.sample import fewer

pytestmark = pytest.mark.usefixtures("objects_excluded")


@pytest.mark.parametrize("kprobes", KPROBES)
def test_nothing_grows_and_the_kernel_does_not_complain(kprobes: str) -> None:
    session = Session(kprobes)
    first, *_, last = churn(session, 0, warm_up=fewer(40, 20))
    session.mount.close()
    assert grown(first, last) == []
    assert last.counts["complaints"] == 0
    assert last.cycle > first.cycle


def test_what_grows_is_named() -> None:
    session = Session(KERNEL_KPROBES)
    first = session.sample(0)
    handle = session.mount.create(SHELL, "/scratch/kept", 0o644, os.O_WRONLY)
    for number in range(20):
        session.mount.write(SHELL, handle, bytes(range(256)) * 2000, number * 512_000)
    session.shell.write("/kprobe_events", "p:kept vfs_read")
    session.shell.write("/tracing/events/kprobes/enable", "1")
    named = {fault.split(":")[0] for fault in grown(first, session.sample(1))}
    session.mount.close()
    assert {"guest", "probes"} <= named


def trace() -> str:
    """Return the trace that the kernel's own kprobes and events make of some requests."""
    mount = debian_kernel.mount()
    shell, other = (Files(mount, Client(pid, 0, 0)) for pid in (4001, 4002))
    shell.write("/kprobe_events", "p:a vfs_read\nr:b do_sys_openat2 $retval\n")
    for event in ("kprobes", "sched", "kmem"):
        shell.write(f"/tracing/events/{event}/enable", "1")
    for number in range(5):
        other.write("/dev/null", "x" * number)
        other.read("/machine/version")
    shell.write("/tracing/tracing_on", "0")
    found = shell.read("/tracing/trace")
    mount.close()
    return found


def test_the_same_requests_give_the_same_trace() -> None:
    first, second = trace(), trace()
    assert first.count("\n") > 100
    assert first == second
