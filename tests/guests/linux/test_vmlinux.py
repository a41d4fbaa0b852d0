"""A vmlinux in place of its package: the same kernel, which boots to the same memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulated_kernel.guests.linux.boot_cache import started_with_kernel
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.linux.open_image import open_elf
from emulated_kernel.util.config import MachineConfig
from kprobefs.daemon.backends import build_kernel
from kprobefs.mount_options import MountOptions, runs_linux
from tests.guests.linux import debian_kernel
from tests.guests.linux.probing import differing, kernel, ram


@pytest.fixture
def vmlinux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return Debian's vmlinux, stripped, with a cache that is separate from that of packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(debian_kernel.lasting_cache("vmlinux")))
    file = tmp_path / "vmlinux"
    with open_elf(debian_kernel.image()) as unpacked:
        file.write_bytes(unpacked.read())
    return file


def test_our_engine_takes_it(vmlinux: Path) -> None:
    packed = LinuxEngine(*debian_kernel.with_kernel())
    tasks, found = started_with_kernel(str(vmlinux), debian_kernel.SEED)
    engine = LinuxEngine(tasks, found)
    assert differing(ram(engine), ram(packed)) == []
    assert found.kallsyms.symbols == kernel().kallsyms.symbols
    for each in (packed, engine):
        each.tasks.machine.close()
    mount = build_kernel(MountOptions("/mnt", MachineConfig(image=vmlinux, seed=debian_kernel.SEED)))
    assert "kprobes" in {entry.name for entry in mount.readdir("/")}
    mount.close()


@pytest.mark.parametrize("arch", [path.parent.name for path in sorted(PREBUILT.glob("*/vmlinux"))])
def test_ours_are_ours(arch: str) -> None:
    config = MachineConfig(image=PREBUILT / arch / "vmlinux", arch=arch.partition("-")[0])
    assert not runs_linux(MountOptions("/mnt", config))
