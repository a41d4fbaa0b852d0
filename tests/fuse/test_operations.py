"""FUSE operations and mount points: missing libraries, no memory, faults, mountinfo and unmounting."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Stat
from kprobefs.common import mountpoints
from kprobefs.fuse.memory_reserve import MemoryReserve
from tests.fuse.harness import environment


@pytest.mark.parametrize(
    ("broken", "advice"),
    [("raise ImportError('no module')", "pip install fusepy"), ("raise OSError('no libfuse')", "libfuse2")],
)
def test_missing_libraries(broken: str, advice: str) -> None:
    script = f"""
import sys, types
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "fuse":
            {broken}
sys.meta_path.insert(0, Finder())
import kprobefs.fuse.operations
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kprobefs.common.errors.CliError: ")
    assert advice in last


def test_no_memory_is_an_answer_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    libfuse = pytest.importorskip("kprobefs.fuse.libfuse")

    class Session:
        operations = SimpleNamespace(faults=0, reserve=MemoryReserve())

        def read(self) -> int:
            raise MemoryError

        def open(self) -> int:
            raise ImportError("failed to map segment from shared object")

    wrapper = libfuse.Session._wrapper
    assert wrapper(Session().read) == -errno.ENOMEM
    reserve = Session.operations.reserve
    with monkeypatch.context() as patch:
        # The reserve's memory has not been allocated again yet.
        patch.setattr(reserve, "check", lambda: None)
        assert wrapper(Session().open) == -errno.ENOMEM
    assert Session.operations.faults == 0
    # With memory, the missing library of this mock is a fault.
    assert wrapper(Session().open) == -errno.EIO
    assert Session.operations.faults == 1

    def none(*_arguments: object) -> None:
        raise MemoryError

    # Not even the error can be logged without memory.
    monkeypatch.setattr(reserve, "give_back", none)
    monkeypatch.setattr(libfuse.log, "exception", none)
    assert wrapper(Session().read) == wrapper(Session().open) == -errno.EIO


def test_a_removed_instance_is_gone() -> None:
    """rmdir(2) of a trace instance frees its trace array at once.

    No collection of reference cycles is needed, although the instance's files refer to each other.
    """
    adapter = pytest.importorskip("kprobefs.fuse.operations")
    with Kernel() as kernel:
        operations = adapter._Operations(kernel.mount(), threading.Event())
        operations.mkdir("/tracing/instances/mine", 0o755)
        found = kernel.components.tracing.arrays.find("mine")
        assert found is not None
        array = weakref.ref(found.array)
        del found
        operations.rmdir("/tracing/instances/mine")
        assert array() is None


def test_more_than_was_asked_for_is_a_fault() -> None:
    """If a read returns more bytes than requested, the client gets EIO, and a fault is counted.

    libfuse's buffer has only the requested size.
    """
    adapter = pytest.importorskip("kprobefs.fuse.operations")
    mount = SimpleNamespace(lasting=(), clients_own=(), acting=(), read=lambda *_request: b"x" * 9)
    operations = adapter._Operations(mount, threading.Event())

    def read(size: int) -> object:
        return adapter.libfuse.guarded(operations, operations.read_at_once, 0, 0, 1, 7, 0, size, 1, 0)

    assert read(9) == b"x" * 9
    assert read(8) == -errno.EIO
    assert operations.faults == 1


def test_attributes_of_a_damaged_guest() -> None:
    libfuse = pytest.importorskip("kprobefs.fuse.libfuse")
    for number in (-(1 << 127), -1, 1 << 64, 1 << 127):
        found = Stat(number, 0, 0, 0, 0, number, number, number, number, number)
        assert len(libfuse.stat_bytes(found)) == ctypes.sizeof(libfuse.fuse.c_stat)


def test_mount_points_are_unescaped() -> None:
    line = "36 35 0:98 / /mnt/a\\040b\\134c rw,nosuid shared:1 - fuse.kprobefs trace\\011fs rw\n"
    assert mountpoints._parse(line) == mountpoints.MountPoint(
        36, "/mnt/a b\\c", "0:98", "fuse.kprobefs", "trace\tfs", None
    )
    assert mountpoints._parse(line.replace(" rw\n", " rw,user_id=7,group_id=7\n")).owner == 7


def test_the_root_is_a_mount_point() -> None:
    assert mountpoints.mounted_on("/") is not None
    assert mountpoints.mounted_on("/no/such/place") is None


def test_detaching_what_another_process_has_unmounted_is_done() -> None:
    mountpoints.detach("/no/such/place")


def test_detaching_what_one_may_not_unmount_fails() -> None:
    """In a new user namespace, where root has no rights to the outer mounts, detaching /proc fails with
    EPERM.
    """
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    script = "from kprobefs.common.mountpoints import detach; detach('/proc')"
    done = subprocess.run(
        ["unshare", "-Ur", sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CliError: /proc: can't unmount: Operation not permitted" in done.stderr
