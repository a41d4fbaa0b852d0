"""Debian's kernel, booted once per machine and then cached. Tests are skipped if its package is not
available.

KPROBEFS_DEBIAN=META[/SUITE] selects another kernel for tests and commands, such as linux-image-amd64/trixie.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import ensure_cached, started, started_with_kernel
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.image.linux.debian import package

META, _, SUITE = os.environ.get("KPROBEFS_DEBIAN", "linux-image-cloud-amd64").partition("/")
SEED = 1


@cache
def _ensure(path: Path) -> Path:
    """Boot the kernel of a package into the cache, unless the cache has the kernel already; return `path`."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_cached(str(path), SEED, lambda _done, _total: None)
    return path


@contextmanager
def own_cache(meta: str, suite: str) -> Iterator[None]:
    """Use a separate snapshot cache for each kernel that is not the default kernel.

    The snapshots of all kernels together exceed the limit of one cache, so that each run would boot kernels
    again.
    """
    if (meta, suite) == (META, SUITE):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(lasting_cache(f"{meta}-{suite}")))
        yield


def lasting_cache(name: str) -> Path:
    """Return a directory for a cache that stays on this machine after the tests."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "kprobefs", "tests", name)


def image(meta: str = META, suite: str = SUITE) -> Path:
    """Return the kernel's package, after the kernel was booted into the cache.

    `meta`, `suite`: Debian's meta package of the kernel, and the release of Debian.
    """
    # The name of a meta package for another architecture ends with the name of this architecture.
    architecture = meta.rpartition("-")[2]
    path = package(meta, suite, architecture if architecture in ("arm64", "riscv64") else "")
    with own_cache(meta, suite):
        return _ensure(path)


def tasks(meta: str = META, suite: str = SUITE) -> LinuxTasks:
    """Return the tasks of a new kernel that has just booted. `meta`, `suite`: as for image()."""
    path = image(meta, suite)
    with own_cache(meta, suite):
        return started(str(path), SEED)


def with_kernel(meta: str = META, suite: str = SUITE) -> tuple[LinuxTasks, LinuxKernel]:
    """Return the tasks of a new kernel, and a LinuxKernel with the tables of the kernel's file.

    `meta`, `suite`: as for image().
    """
    path = image(meta, suite)
    with own_cache(meta, suite):
        return started_with_kernel(str(path), SEED)


class _KeptModules(ModuleFiles):
    """Module files of a package, cached on this machine, because unpacking a package up to a module takes
    seconds.
    """

    def __init__(self, package: Path, release: str) -> None:
        super().__init__(package, release)
        self._kept = lasting_cache("modules") / package.name

    def read(self, name: str) -> list[tuple[str, bytes]]:
        if "/" in name:
            return super().read(name)
        kept = self._kept / name
        if kept.exists():
            found: list[tuple[str, bytes]] = pickle.loads(kept.read_bytes())
            return found
        found = super().read(name)
        self._kept.mkdir(parents=True, exist_ok=True)
        # Another worker may read the same module.
        new = kept.with_name(f"{name}.{os.getpid()}")
        new.write_bytes(pickle.dumps(found))
        new.replace(kept)
        return found


@cache
def modules(release: str, meta: str = META, suite: str = SUITE) -> ModuleFiles:
    """Return the module files of the kernel's package; all tests share the object.

    `release`: release of the kernel. `meta`, `suite`: as for image().
    """
    return _KeptModules(image(meta, suite), release)


def mount(
    watch: ProcessWatch | None = None, meta: str = META, suite: str = SUITE, *, is_tracefs: bool = False
) -> Mount:
    """Return a mount of the kernel with its own kprobes. Its files belong to root.

    `watch`: watch of the clients' processes; None for one that reports nothing. `is_tracefs`: tracefs is the
    root of the mount, which shows nothing else.
    """
    guest = tasks(meta, suite)
    files = modules(guest.release, meta, suite)
    return native_mount(guest, watch or ProcessWatch(), Owner(0, 0), files, is_tracefs=is_tracefs)
