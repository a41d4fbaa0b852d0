"""Short forms of tests.linux.churn."""

from __future__ import annotations

import os

import pytest

from tests.linux.churn import SHELL, Session, churn, grown
from tests.sample import fewer


@pytest.mark.parametrize("engine", ["native", "ours"])
def test_nothing_grows_and_the_kernel_does_not_complain(engine: str) -> None:
    session = Session(engine)
    first, *_, last = churn(session, 0, warm_up=fewer(40, 8))
    session.mount.close()
    assert grown(first, last) == []
    assert last.counts["complaints"] == 0
    assert last.cycle > first.cycle


def test_what_grows_is_named() -> None:
    session = Session("native")
    first = session.sample(0)
    handle = session.mount.create(SHELL, "/scratch/kept", 0o644, os.O_WRONLY)
    for number in range(20):
        session.mount.write(SHELL, handle, bytes(range(256)) * 2000, number * 512_000)
    session.shell.write("/kprobe_events", "p:kept vfs_read")
    session.shell.write("/tracing/events/kprobes/enable", "1")
    named = {fault.split(":")[0] for fault in grown(first, session.sample(1))}
    session.mount.close()
    assert {"guest", "probes"} <= named
