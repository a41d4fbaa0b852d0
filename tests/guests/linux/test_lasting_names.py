"""Names of files that the front end may cache, on a distribution's kernel, and the notice that a name is no
longer valid.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files

SHELL = Client(4001, 0, 0)
ENABLE = "/tracing/events/kprobes/reads/enable"


def test_names_last_until_their_event_is_removed() -> None:
    """The name of an event's file is valid until the event is removed, even while a probe is armed.

    The front end may answer lookups of the name itself, because the guest makes no calls that end with a
    lookup.
    """
    engine = LinuxEngine(*debian_kernel.with_kernel())
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    shell = Files(mount, SHELL)
    found: list[str | None] = []

    def ended(ends: Collection[str | None]) -> None:
        found.extend(ends)

    mount.at_names_end(ended)
    shell.write("/kprobe_events", "p:reads vfs_read\n")
    shell.write(ENABLE, "1")
    assert mount.name_lasts(ENABLE)
    assert not mount.name_lasts("/scratch")
    shell.write(ENABLE, "0")
    found.clear()
    shell.write("/kprobe_events", "", os.O_WRONLY | os.O_TRUNC)
    assert found == ["kprobes/reads"]
    assert not mount.name_lasts(ENABLE)
    mount.close()
