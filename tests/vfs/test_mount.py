"""Mount: its tables of file systems and of open files, and a new kind of mount."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import posixpath
import signal
import stat
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.guests.linux.vmcore.vmcore_files import VmcoreFiles
from emulated_kernel.guests.linux.vmcore.vmcore_fs import VmcoreFs
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limit, Limits
from emulated_kernel.vfs.control_fs import ControlFs
from emulated_kernel.vfs.core.attribute_file import AttributeFile
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Directory, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem
from emulated_kernel.vfs.mount import Mount
from kprobefs.daemon.reboot import RebootableKernel
from tests.fuse.harness import PATIENCE, eventually, is_mounted, needs_fuse

CLIENT = Client(os.getpid(), 0, 0)


class Clock(FileSystem):
    """A new kind of mount: a directory with the file `now`, which shows the host's time."""

    def __init__(self, top: str = "/") -> None:
        super().__init__()
        self.top = top

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        del client
        if path == posixpath.join(self.top, "now"):
            return Stat(5, stat.S_IFREG | 0o444, 1, 0, 0)
        if path == self.top:
            return Stat(9, stat.S_IFDIR | 0o555, 2, 0, 0)
        raise KernelError(errno.ENOENT, path)

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        del path, client
        return [DirEntry(name, stat.S_IFDIR, 9) for name in (".", "..")] + [DirEntry("now", stat.S_IFREG, 5)]

    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        del client
        now = Now(self, path, flags)
        self.opened[now] = None
        return now


class Now(FileDescription):
    """The open file `now`, which shows the host's time."""

    def read(self, client: Client, size: int, offset: int) -> bytes:
        del client
        return f"{time.time():.0f}\n".encode()[offset:][:size]


class File(Clock):
    """A file system whose root is a regular file."""

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        del path, client
        return Stat(6, stat.S_IFREG | 0o444, 1, 0, 0)


class ReadOnly(Clock):
    """A read-only file system."""

    is_read_only = True


def control_fs() -> ControlFs:
    """Return a file system of control files that has no part in a guest."""
    files = {"value": AttributeFile(0o444, lambda: "1\n"), "clock": Directory(0o755, {})}
    return ControlFs(NodeTree(Directory(0o755, {"dir": Directory(0o755, {}), **files})))


def error_of(call: Callable[[], object]) -> int | None:
    """Return the errno with which a call fails."""
    with pytest.raises(KernelError) as failed:
        call()
    return failed.value.errno


def read(mount: Mount, path: str) -> bytes:
    """Return the first 4096 bytes of a file."""
    handle = mount.open(CLIENT, path, os.O_RDONLY)
    try:
        return mount.read(CLIENT, handle, 4096, 0)
    finally:
        mount.release(handle)


def inos(mount: Mount, path: str) -> dict[str, int]:
    """Return name -> inode number of the entries that readdir returns for a directory."""
    return {entry.name: entry.ino for entry in mount.readdir(path)}


# A new kind of mount


@needs_fuse
def test_a_new_kind_of_mount_is_served(tmp_path: Path) -> None:
    fuse = pytest.importorskip("kprobefs.fuse.operations")
    if os.geteuid():
        pytest.skip("mounting here takes root")
    daemon = os.fork()
    if not daemon:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        fuse.Server(Mount({"/": Clock()}), fuse.FuseOptions("clock")).serve(str(tmp_path), lambda: None)
        os._exit(0)
    try:
        eventually(lambda: is_mounted(tmp_path))
        assert os.listdir(tmp_path) == ["now"]
        assert abs(int((tmp_path / "now").read_text()) - time.time()) < 5
        with pytest.raises(PermissionError):
            (tmp_path / "directory").mkdir()
        with pytest.raises(PermissionError):
            (tmp_path / "file").write_text("new")
        with pytest.raises(OSError, match="Invalid argument"), (tmp_path / "now").open("rb") as file:
            os.fsync(file.fileno())
    finally:
        subprocess.run(["umount", tmp_path], check=True, timeout=PATIENCE)
        os.waitpid(daemon, 0)


def test_it_may_lie_beside_others() -> None:
    mount = Mount({"/": control_fs(), "/clock": Clock("/clock")})
    assert read(mount, "/value") == b"1\n"
    assert read(mount, "/clock/now").endswith(b"\n")
    assert inos(mount, "/")["clock"] == 9
    assert inos(mount, "/clock")[".."] == mount.getattr("/").ino != 9


def test_what_is_not_listed_where_it_is_mounted_is_added() -> None:
    mount = Mount({"/": control_fs(), "/dir/clock": Clock("/dir/clock"), "/dir/time": File()})
    assert mount.readdir("/dir")[2:] == [
        DirEntry("clock", stat.S_IFDIR, 9),
        DirEntry("time", stat.S_IFREG, 6),
    ]
    assert inos(mount, "/dir/clock")[".."] == mount.getattr("/dir").ino


def test_a_prefix_may_be_one_file() -> None:
    mount = Mount({"/": control_fs(), "/value": File()})
    assert mount.getattr("/value").ino == 6
    assert read(mount, "/value").endswith(b"\n")
    assert mount.getattr("/dir").ino != 6
    assert error_of(lambda: mount.getattr("/valued")) == errno.ENOENT


# Errors


def scratch_fs(kernel: Kernel) -> FileSystem:
    """Return the file system of a kernel's directory scratch/."""
    return kernel.mount().filesystem_at("/scratch/file")


CHANGES: dict[str, tuple[Any, ...]] = {
    "mkdir": ("/new", 0o755), "rmdir": ("/dir",), "unlink": ("/value",), "rename": ("/value", "/new"),
    "link": ("/value", "/new"), "symlink": ("/new", "target"), "mknod": ("/new", stat.S_IFCHR),
    "chmod": ("/value", 0o600), "chown": ("/value", 1, 1), "utimens": ("/value", 0, 0),
    "truncate": ("/value", -1), "create": ("/new", 0o644, os.O_WRONLY),
}  # fmt: skip
DEFAULTS = dict.fromkeys(CHANGES, errno.EPERM) | {"truncate": errno.EINVAL, "create": errno.EACCES}


def _no_guest(_client: Client | None) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["default", "read only", "control", "scratch", "vmcore"])
def test_no_change_is_enosys(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    """No operation that changes a file system fails with ENOSYS.

    After ENOSYS, FUSE would not send the request again as long as the mount exists.
    """
    nothing = cast("VmcoreFiles", None)
    fs = {
        "default": Clock,
        "read only": ReadOnly,
        "control": control_fs,
        # Only this file system needs a kernel.
        "scratch": lambda: scratch_fs(request.getfixturevalue("kernel")),
        "vmcore": lambda: VmcoreFs(nothing, _no_guest, _no_guest, Owner(), ControlLock()),
    }[kind]()
    try:
        getattr(fs, name)(CLIENT, *CHANGES[name])
    except KernelError as error:
        found = error.errno
    else:
        found = 0
    if kind in ("read only", "vmcore"):
        assert found == errno.EROFS
    elif kind == "default":
        assert found == DEFAULTS[name]
    assert found != errno.ENOSYS


def test_lookups_in_a_dump_begin_no_request() -> None:
    """Lookups in a dump do not advance the guest's clock, because the host may repeat lookups at any time."""
    entered: list[str] = []

    @contextmanager
    def request(_client: Client | None) -> Iterator[None]:
        entered.append("request")
        yield

    @contextmanager
    def look_up(_client: Client | None) -> Iterator[None]:
        entered.append("lookup")
        yield

    class Files:
        """Files of a dump that has one directory with a link."""

        def lstat(self, _path: str) -> Stat:
            return Stat(ino=1, mode=stat.S_IFDIR | 0o755, nlink=2, size=0, uid=0, gid=0)

        def readdir(self, _path: str) -> list[DirEntry]:
            return []

        def readlink(self, _path: str) -> str:
            return "target"

        def read(self, _path: str, _size: int, _offset: int) -> bytes:
            return b"text"

    fs = VmcoreFs(cast("VmcoreFiles", Files()), request, look_up, Owner(), ControlLock())
    fs.getattr("/files")
    fs.readdir("/files", CLIENT)
    fs.readlink(CLIENT, "/files/link")
    assert entered == ["lookup"] * 3
    assert fs.open(CLIENT, "/files/file", os.O_RDONLY).read(CLIENT, 4, 0) == b"text"
    assert entered[3:] == ["request"] * 2


def test_a_kernel_forgets_a_mount_that_nobody_uses(kernel: Kernel) -> None:
    mount = kernel.mount()
    mount.open(CLIENT, "/kprobe_events", os.O_RDONLY)
    mount.close()
    forgotten = weakref.ref(mount)
    del mount
    gc.collect()
    assert forgotten() is None
    kernel.register_kprobe(Kprobe("strlen"))


@pytest.mark.parametrize("name", ["rename", "link"])
def test_names_in_two_file_systems(name: str, kernel: Kernel) -> None:
    """rename(2) and link(2) between two file systems fail with EXDEV, or with EROFS if one is read-only.

    For two file systems of a guest, the guest itself refuses.
    """
    own = Mount({"/": control_fs(), "/clock": Clock("/clock"), "/read": ReadOnly("/read")})
    assert error_of(lambda: getattr(own, name)(CLIENT, "/value", "/clock/now")) == errno.EXDEV
    assert error_of(lambda: getattr(own, name)(CLIENT, "/clock/now", "/value")) == errno.EXDEV
    assert error_of(lambda: getattr(own, name)(CLIENT, "/value", "/read/now")) == errno.EROFS
    assert error_of(lambda: getattr(own, name)(CLIENT, "/read/now", "/value")) == errno.EROFS
    mount = kernel.mount()
    mount.release(mount.create(CLIENT, "/scratch/file", 0o644, os.O_WRONLY))
    for new in ("/kprobes/new", "/dev/new"):
        assert error_of(lambda new=new: getattr(mount, name)(CLIENT, "/scratch/file", new)) == errno.EXDEV  # type: ignore[misc]
    assert error_of(lambda: getattr(mount, name)(CLIENT, "/kprobe_events", "/scratch/new")) == errno.EXDEV


def test_files_and_directories_are_told_apart() -> None:
    mount = Mount({"/": control_fs()})
    directory = mount.opendir(CLIENT, "/dir")
    file = mount.open(CLIENT, "/value", os.O_RDONLY)
    assert error_of(lambda: mount.read(CLIENT, directory, 1, 0)) == errno.EISDIR
    assert error_of(lambda: mount.write(CLIENT, directory, b"", 0)) == errno.EISDIR
    assert error_of(lambda: mount.getdents(CLIENT, file, 0)) == errno.ENOTDIR
    assert error_of(lambda: mount.fsync(CLIENT, file)) == errno.EINVAL
    assert error_of(lambda: mount.read(CLIENT, 99, 1, 0)) == errno.EBADF
    mount.close()
    assert error_of(lambda: mount.read(CLIENT, file, 1, 0)) == errno.EIO
    assert error_of(lambda: mount.open(CLIENT, "/value", os.O_RDONLY)) == errno.EIO
    mount.release(file)


def test_open_files_are_counted_where_there_is_a_limit() -> None:
    limits = Limits({Limit.OPEN_FILES: 1})
    tree = NodeTree(
        Directory(
            0o755, {name: AttributeFile(0o444, lambda: "1\n") for name in ("machine", "machinery", "a")}
        )
    )
    mount = Mount({"/": ControlFs(tree)}, limits=limits)
    first = mount.open(CLIENT, "/a", os.O_RDONLY)
    assert limits.open_files == 1
    assert error_of(lambda: mount.open(CLIENT, "/a", os.O_RDONLY)) == errno.ENFILE
    assert error_of(lambda: mount.opendir(CLIENT, "/")) == errno.ENFILE
    assert error_of(lambda: mount.open(CLIENT, "/machinery", os.O_RDONLY)) == errno.ENFILE
    mount.release(mount.open(CLIENT, "/machine", os.O_RDONLY))
    mount.release(first)
    assert limits.open_files == 0
    mount.open(CLIENT, "/a", os.O_RDONLY)
    other = Mount({"/": ControlFs(tree)}, limits=limits)
    assert error_of(lambda: other.open(CLIENT, "/a", os.O_RDONLY)) == errno.ENFILE
    mount.close()
    assert limits.open_files == 0
    other.release(other.open(CLIENT, "/a", os.O_RDONLY))
    without = Mount({"/": ControlFs(tree)})
    for _ in range(3):
        without.open(CLIENT, "/a", os.O_RDONLY)


# Mounts that outlive their kernel


def test_numbers_of_what_is_mounted_outlive_the_guest(kernel: Kernel) -> None:
    mount = kernel.mount()
    scratch = mount.getattr("/scratch").ino
    assert inos(mount, "/")["scratch"] == scratch
    kernel.guest.runner._die("lost")
    assert mount.is_dead()
    assert error_of(lambda: mount.getattr("/scratch")) == errno.EIO
    assert inos(mount, "/")["scratch"] == scratch


@pytest.fixture
def living() -> Iterator[RebootableKernel]:
    kernel = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner(0, 0))
    yield kernel
    kernel.mount.close()
    kernel._kernel.close()


def test_what_waits_through_a_reboot_is_answered_by_the_new_kernel(living: RebootableKernel) -> None:
    mount = living.mount
    mount.release(mount.create(CLIENT, "/scratch/file", 0o644, os.O_WRONLY))
    control = mount.open(CLIENT, "/kprobes/list", os.O_RDONLY)
    scratch = mount.open(CLIENT, "/scratch/file", os.O_RDONLY)
    directory = mount.opendir(CLIENT, "/scratch")
    answers: dict[str, object] = {}

    def asked(name: str, call: Callable[[], object]) -> Thread:
        def ask() -> None:
            try:
                answers[name] = call()
            except KernelError as error:
                answers[name] = error.errno

        thread = Thread(target=ask)
        thread.start()
        return thread

    with mount.lock:
        threads = [
            asked("name", lambda: mount.getattr("/scratch/file")),
            asked("scratch", lambda: mount.read(CLIENT, scratch, 10, 0)),
            asked("control", lambda: mount.read(CLIENT, control, 10, 0)),
            asked("poll", lambda: mount.poll(control, None) != 0),
        ]
        eventually(lambda: len(mount.lock._waiters) == len(threads))
        living.reboot()
    for thread in threads:
        thread.join()
    assert answers == {"name": errno.ENOENT, "scratch": errno.ESTALE, "control": b"", "poll": True}
    assert [entry.name for entry in mount.getdents(CLIENT, directory, 0)] == [".", ".."]
    for handle in (control, scratch, directory):
        mount.release(handle)
    assert not mount.filesystem_at("/").opened
    assert not mount.filesystem_at("/scratch").opened
