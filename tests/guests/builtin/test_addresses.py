"""kptr_restrict: a client that is neither root nor the owner of the mount reads no kernel address in any
file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount

ROOT, OWNER, OTHER = Client(501, 0, 0), Client(502, 1000, 1000), Client(503, 2000, 2000)
SHOWING = ("/machine/kallsyms", "/machine/modules", "/kprobes/stats/kprobes/a/address")
READ_BY_OTHERS, ENTER_BY_OTHERS = 0o004, 0o005


@pytest.fixture(scope="module", params=["x86_64", "i386"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """Yield a mount of a kernel with a module, probes and an Oops, so that many files contain kernel
    addresses.
    """
    with Kernel(MachineConfig(arch=request.param)) as kernel:
        mount = kernel.mount(owner=Owner(OWNER.uid, OWNER.gid))
        write(mount, "/machine/modules", "load ktgt")
        write(mount, "/kprobe_events", "p:a vfs_read x=%ip:x64\nr:b vfs_write\np:c ktgt:ktgt_add\np:d strlen")
        write(mount, "/tracing/events/kprobes/enable", "1")
        with suppress(KernelError):
            write(mount, "/machine/call", 'strlen "hit"\nstrlen 0')
        yield mount


def write(mount: Mount, path: str, text: str) -> None:
    handle = mount.open(ROOT, path, os.O_WRONLY | os.O_APPEND)
    try:
        mount.write(ROOT, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def read(mount: Mount, client: Client, path: str) -> str:
    handle = mount.open(client, path, os.O_RDONLY)
    data = b""
    while more := mount.read(client, handle, 1 << 16, len(data)):
        data += more
    mount.release(handle)
    return data.decode()


def readable(mount: Mount, directory: str = "") -> Iterator[str]:
    """Yield the files below `directory` that other users may read, except files below /dev."""
    for name, *_ in mount.readdir(directory or "/")[2:]:
        path = f"{directory}/{name}"
        if path == "/dev":
            continue  # A read of some devices never ends.
        mode = mount.getattr(path).mode
        if stat.S_ISREG(mode) and mode & READ_BY_OTHERS:
            yield path
        elif stat.S_ISDIR(mode) and mode & ENTER_BY_OTHERS == ENTER_BY_OTHERS:
            yield from readable(mount, path)


def addresses(mount: Mount, text: str) -> list[str]:
    """Return the words of `text` that are kernel addresses in hexadecimal."""
    is_32_bit = "__ia32_sys" in read(mount, ROOT, "/machine/kallsyms")
    first, digits = (0xC0000000, 8) if is_32_bit else (0xFFFF800000000000, 16)
    words = re.findall(rf"(?<![0-9a-f])[0-9a-f]{{{digits}}}(?![0-9a-f])", text)
    return [word for word in words if int(word, 16) >= first]


def test_others_see_none(mount: Mount) -> None:
    paths = set(readable(mount))
    assert set(SHOWING) < paths
    assert not {path for path in paths if addresses(mount, read(mount, OTHER, path))}


@pytest.mark.parametrize("path", SHOWING)
@pytest.mark.parametrize("client", [ROOT, OWNER], ids=["root", "owner"])
def test_root_and_the_owner_see_them(client: Client, path: str, mount: Mount) -> None:
    assert addresses(mount, read(mount, client, path))


def test_zeros_stand_where_they_were(mount: Mount) -> None:
    path = "/kprobes/stats/kprobes/d/address"
    shown, hidden = read(mount, ROOT, path), read(mount, OTHER, path)
    assert re.sub("0x[0-9a-f]+ ", "", shown) == re.sub("0x0+ ", "", hidden)
    assert len(shown) == len(hidden)
