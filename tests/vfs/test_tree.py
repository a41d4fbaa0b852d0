"""Filesystem and directories: lookups, numbers, times, errno."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client, Mount
from emulated_kernel.vfs.node import Directory, DynamicDirectory, Objects, Owner
from emulated_kernel.vfs.seq import SeqFile, single
from emulated_kernel.vfs.server import FileServer
from emulated_kernel.vfs.tree import Filesystem
from tests.vfs import oracle
from tests.vfs.fakes import FakeKernel

ROOT = Client(1, 0, 0)
EVENT = "/tracing/events/kprobes/a"


@pytest.fixture
def kernel() -> FakeKernel:
    made = FakeKernel()
    made.events.command("p:a vfs_read")
    return made


@pytest.fixture
def tree(kernel: FakeKernel) -> Filesystem:
    return kernel.filesystem()


def name_of(action: Callable[[], object]) -> str:
    """The errno's name, or "None"."""
    try:
        action()
    except KernelError as error:
        return error.name
    return "None"


def test_directory_operations_fail_as_recorded(tree: Filesystem) -> None:
    create = os.O_CREAT | os.O_WRONLY
    ours = {
        "mkdir tracing/x": name_of(lambda: tree.mkdir("/tracing/x", 0o755)),
        "mkdir events/x": name_of(lambda: tree.mkdir("/tracing/events/x", 0o755)),
        "unlink kprobe_events": name_of(lambda: tree.unlink("/tracing/kprobe_events")),
        "rename": name_of(lambda: tree.rename("/tracing/trace", "/tracing/t")),
        "rmdir events/kprobes/a": name_of(lambda: tree.rmdir(EVENT)),
        "create file": name_of(lambda: tree.open("/tracing/x", create, ROOT)),
        "symlink": name_of(lambda: tree.link("/tracing/x")),
        "link": name_of(lambda: tree.link("/tracing/x")),
        "truncate": name_of(lambda: tree.truncate("/tracing/kprobe_events", 0)),
        "truncate 5": name_of(lambda: tree.truncate("/tracing/kprobe_events", 5)),
        "mkdir debug/kprobes/x": name_of(lambda: tree.mkdir("/kprobes/x", 0o755)),
        "unlink debug/kprobes/list": name_of(lambda: tree.unlink("/kprobes/list")),
        "create debug": name_of(lambda: tree.open("/kprobes/x", create, ROOT)),
    }
    recorded = oracle.quirks()["fs_ops"]
    assert ours == {key: recorded[key].removeprefix("ERR ") for key in ours}


FLAGS = {
    "O_RDONLY": os.O_RDONLY,
    "O_WRONLY": os.O_WRONLY,
    "O_RDWR": os.O_RDWR,
    "O_WRONLY|O_TRUNC": os.O_WRONLY | os.O_TRUNC,
    "O_WRONLY|O_APPEND": os.O_WRONLY | os.O_APPEND,
    "O_RDONLY|O_TRUNC": os.O_RDONLY | os.O_TRUNC,
    "O_RDWR|O_CREAT|O_EXCL": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "O_DIRECTORY": os.O_DIRECTORY,
}
PLACES = {"debug ": "/kprobes/", "ev ": f"{EVENT}/"}


def path_of(recorded: str) -> str:
    for prefix, directory in PLACES.items():
        if recorded.startswith(prefix):
            return directory + recorded.removeprefix(prefix)
    return f"/tracing/{recorded}"


def test_open_modes_as_recorded() -> None:
    compared = 0
    for file, answers in oracle.quirks()["open_modes"].items():
        for flags, answer in answers.items():
            kernel = FakeKernel()
            kernel.events.command("p:a vfs_read")
            tree = kernel.filesystem()
            path = path_of(file)
            if name_of(lambda path=path, tree=tree: tree.lookup(path)) == "ENOENT" and file != "ev inject":
                continue
            opening = name_of(lambda path=path, flags=flags, tree=tree: tree.open(path, FLAGS[flags], ROOT))
            assert (file, flags, opening) == (file, flags, answer.removeprefix("ERR ").replace("ok", "None"))
            compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "None"),
        ("/tracing/events/kprobes/a/enable", "None"),
        ("/nothing", "ENOENT"),
        ("/tracing/trace/x", "ENOTDIR"),
        ("/tracing/events/kprobes/b", "ENOENT"),
        ("/" + "n" * 256, "ENAMETOOLONG"),
    ],
)
def test_lookup(tree: Filesystem, path: str, expected: str) -> None:
    assert name_of(lambda: tree.lookup(path)) == expected


def test_errno_of_the_wrong_kind(tree: Filesystem) -> None:
    assert name_of(lambda: tree.open("/tracing", os.O_RDONLY, ROOT)) == "EISDIR"
    assert name_of(lambda: tree.readdir("/tracing/trace")) == "ENOTDIR"
    assert name_of(lambda: tree.rmdir("/tracing/trace")) == "ENOTDIR"
    assert name_of(lambda: tree.rmdir("/")) == "EBUSY"
    assert name_of(lambda: tree.unlink("/tracing")) == "EISDIR"
    assert name_of(lambda: tree.mkdir("/tracing", 0o755)) == "EEXIST"
    assert name_of(lambda: tree.readlink("/tracing/trace")) == "EINVAL"
    assert name_of(lambda: tree.open("/none/x", os.O_CREAT, ROOT)) == "ENOENT"


def test_inode_numbers_last_as_long_as_the_object(kernel: FakeKernel, tree: Filesystem) -> None:
    first = tree.getattr(f"{EVENT}/enable").ino
    assert tree.getattr(f"{EVENT}/enable").ino == first
    assert tree.getattr("/tracing/trace").ino != first
    kernel.events.command("-:a")
    kernel.events.command("p:a vfs_mkdir")
    assert tree.getattr(f"{EVENT}/enable").ino != first


def test_a_removed_events_files_are_gone(kernel: FakeKernel, tree: Filesystem) -> None:
    """Deletion succeeds with its files open; what is done with those then is ENODEV."""
    enable = tree.open(f"{EVENT}/enable", os.O_RDWR, ROOT)
    assert enable.read(10, 0) == b"0\n"
    kernel.events.command("-:a")
    assert name_of(lambda: tree.lookup(EVENT)) == "ENOENT"
    kernel.events.command("p:a vfs_mkdir")
    assert name_of(lambda: enable.read(10, 0)) == "ENODEV"
    assert name_of(lambda: enable.write(b"1", 0)) == "ENODEV"
    assert name_of(lambda: tree.open(f"{EVENT}/enable", os.O_RDWR, ROOT)) == "None"


def test_nlink_as_recorded(kernel: FakeKernel, tree: Filesystem) -> None:
    assert tree.getattr("/tracing/events/kprobes").nlink == 3
    assert tree.getattr(EVENT).nlink == 2
    assert tree.getattr(f"{EVENT}/enable").nlink == 1
    kernel.events.command("p:g/b vfs_read")
    assert tree.getattr("/tracing/events").nlink == 4


def test_chmod_chown_utimens(tree: Filesystem) -> None:
    path = "/tracing/kprobe_events"
    node = tree.lookup(path)
    node.chmod(0o100600)
    node.chown(65534, -1)
    node.chown(-1, 65534)
    node.utimens(1, 2)
    found = tree.getattr(path)
    assert (found.mode, found.uid, found.gid) == (stat.S_IFREG | 0o600, 65534, 65534)
    assert (found.atime_ns, found.mtime_ns) == (1, 2)
    assert found.ctime_ns > 2


def test_files_belong_to_whom_mounts(kernel: FakeKernel) -> None:
    found = kernel.filesystem(owner=Owner(1000, 1001)).getattr("/tracing/trace")
    assert (found.uid, found.gid, found.size) == (1000, 1001, 0)


def test_a_node_has_one_name() -> None:
    node = SeqFile(0o440, single(lambda: ""))
    Directory(0o755, {"a": node})
    with pytest.raises(ValueError, match="already called a"):
        Directory(0o755, {"b": node})


def test_the_server_is_a_mount(tree: Filesystem) -> None:
    server: Mount = FileServer(tree)
    handle = server.open(ROOT, "/tracing/kprobe_events", os.O_RDWR)
    assert server.read(ROOT, handle, 100, 0) == b"p:kprobes/a vfs_read\n"
    assert not server.is_stream(handle)
    server.release(handle)
    assert name_of(lambda: server.read(ROOT, handle, 1, 0)) == "EBADF"
    server.close()
    assert name_of(lambda: server.read(ROOT, handle, 1, 0)) == "ENODEV"


def test_directories_of_removed_objects_are_forgotten() -> None:
    """Though nobody asks for their names again; those of the others stay the same."""
    names = ["kept"]
    made: dict[str, object] = {}
    objects = Objects(
        lambda: names, lambda name: made.setdefault(name, object()), lambda _: Directory(0o755, {})
    )
    directory = DynamicDirectory(0o755, objects)
    kept = directory.get("kept")
    for number in range(1000):
        names[1:] = [f"n{number}"]
        assert directory.get(names[1]) is not None
    assert len(directory._nodes) < 100
    assert directory.get("kept") is kept
