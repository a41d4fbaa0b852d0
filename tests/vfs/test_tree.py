"""NodeTree, the file system of nodes and directories: lookups, listings, inode numbers, link counts, times
and errnos.
"""

from __future__ import annotations

import os
import stat

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.trace.array.trace_pipe import TracePipe
from emulated_kernel.vfs.core.client import INO_SPACES, DirEntry
from emulated_kernel.vfs.core.node import Directory, DynamicDirectory, Objects, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.seq_file import SeqFile, single
from tests.vfs import oracle
from tests.vfs.files import ROOT, name_of, names

EVENT = "/tracing/events/kprobes/a"


def define(kernel: Kernel, line: str) -> None:
    kernel.tracing.kprobe_events.write(f"{line}\n".encode())


def test_directory_operations_fail_as_recorded(tree: NodeTree) -> None:
    create = os.O_CREAT | os.O_WRONLY
    ours = {
        "mkdir tracing/x": name_of(lambda: tree.mkdir(ROOT, "/tracing/x", 0o755)),
        "mkdir events/x": name_of(lambda: tree.mkdir(ROOT, "/tracing/events/x", 0o755)),
        "unlink kprobe_events": name_of(lambda: tree.unlink(ROOT, "/tracing/kprobe_events")),
        "rename": name_of(lambda: tree.rename(ROOT, "/tracing/trace", "/tracing/t")),
        "rmdir events/kprobes/a": name_of(lambda: tree.rmdir(ROOT, EVENT)),
        "create file": name_of(lambda: tree.open("/tracing/x", create, ROOT)),
        "symlink": name_of(lambda: tree.symlink(ROOT, "/tracing/x", "trace")),
        "link": name_of(lambda: tree.symlink(ROOT, "/tracing/x", "trace")),
        "truncate": name_of(lambda: tree.truncate(ROOT, "/tracing/kprobe_events", 0)),
        "truncate 5": name_of(lambda: tree.truncate(ROOT, "/tracing/kprobe_events", 5)),
        "mkdir debug/kprobes/x": name_of(lambda: tree.mkdir(ROOT, "/kprobes/x", 0o755)),
        "unlink debug/kprobes/list": name_of(lambda: tree.unlink(ROOT, "/kprobes/list")),
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


def test_open_modes_as_recorded(kernel: Kernel, tree: NodeTree) -> None:
    compared = 0
    for file, answers in oracle.quirks()["open_modes"].items():
        path = path_of(file)
        for flags, answer in answers.items():
            if name_of(lambda path=path: tree.lookup(path)) == "ENOENT" and file != "ev inject":
                continue
            opening = name_of(
                lambda path=path, flags=flags: tree.release(tree.open(path, FLAGS[flags], ROOT))
            )
            assert (file, flags, opening) == (file, flags, answer.removeprefix("ERR ").replace("ok", "None"))
            compared += 1
            if name_of(lambda: tree.lookup(EVENT)) == "ENOENT":
                define(kernel, "p:a vfs_read")
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
        ("/" + "n" * 255, "ENOENT"),
        ("/" + "\u00e4" * 128, "ENAMETOOLONG"),
        ("/" + "\u00e4" * 127, "ENOENT"),
        ("/" + "\udcff" * 255, "ENOENT"),
        ("/" + "\udcff" * 256, "ENAMETOOLONG"),
    ],
)
def test_lookup(tree: NodeTree, path: str, expected: str) -> None:
    assert name_of(lambda: tree.lookup(path)) == expected


def test_errno_of_the_wrong_kind(tree: NodeTree) -> None:
    assert name_of(lambda: tree.open("/tracing", os.O_RDONLY, ROOT)) == "EISDIR"
    assert name_of(lambda: tree.readdir("/tracing/trace")) == "ENOTDIR"
    assert name_of(lambda: tree.rmdir(ROOT, "/tracing/trace")) == "ENOTDIR"
    assert name_of(lambda: tree.rmdir(ROOT, "/")) == "EBUSY"
    assert name_of(lambda: tree.unlink(ROOT, "/tracing")) == "EISDIR"
    assert name_of(lambda: tree.mkdir(ROOT, "/tracing", 0o755)) == "EEXIST"
    assert name_of(lambda: tree.readlink(ROOT, "/tracing/trace")) == "EINVAL"
    assert name_of(lambda: tree.open("/none/x", os.O_CREAT, ROOT)) == "ENOENT"


def test_inode_numbers_last_as_long_as_the_object(kernel: Kernel, tree: NodeTree) -> None:
    first = tree.getattr(f"{EVENT}/enable").ino
    assert tree.getattr(f"{EVENT}/enable").ino == first
    assert tree.getattr("/tracing/trace").ino != first
    define(kernel, "-:a")
    define(kernel, "p:a vfs_mkdir")
    assert tree.getattr(f"{EVENT}/enable").ino != first


def test_a_removed_events_files_are_gone(kernel: Kernel, tree: NodeTree) -> None:
    """An event can be removed while its files are open.

    Operations on these open files then fail with ENODEV.
    """
    enable = tree.open(f"{EVENT}/enable", os.O_RDWR, ROOT)
    assert enable.read(10, 0) == b"0\n"
    define(kernel, "-:a")
    assert name_of(lambda: tree.lookup(EVENT)) == "ENOENT"
    define(kernel, "p:a vfs_mkdir")
    assert name_of(lambda: enable.read(10, 0)) == "ENODEV"
    assert name_of(lambda: enable.write(b"1", 0)) == "ENODEV"
    assert name_of(lambda: tree.open(f"{EVENT}/enable", os.O_RDWR, ROOT)) == "None"


def test_nlink_as_recorded(kernel: Kernel, tree: NodeTree) -> None:
    assert tree.getattr("/tracing/events/kprobes").nlink == 3
    assert tree.getattr(EVENT).nlink == 2
    assert tree.getattr(f"{EVENT}/enable").nlink == 1
    define(kernel, "p:g/b vfs_read")
    groups = tree.getattr("/tracing/events").nlink
    define(kernel, "p:h/b vfs_read")
    assert tree.getattr("/tracing/events").nlink == groups + 1


def test_chmod_chown_utimens(tree: NodeTree) -> None:
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


def test_files_belong_to_whom_mounts(kernel: Kernel) -> None:
    found = kernel.filesystem(owner=Owner(1000, 1001)).getattr("/tracing/trace")
    assert (found.uid, found.gid, found.size) == (1000, 1001, 0)


def test_a_node_has_one_name() -> None:
    node = SeqFile(0o440, single(lambda: ""))
    Directory(0o755, {"a": node})
    with pytest.raises(ValueError, match="already called a"):
        Directory(0o755, {"b": node})


def test_handles_end_with_their_file_and_with_the_mount(kernel: Kernel) -> None:
    mount = kernel.mount()
    handle = mount.open(ROOT, "/tracing/kprobe_events", os.O_RDWR)
    assert mount.read(ROOT, handle, 100, 0) == b"p:kprobes/a vfs_read\n"
    assert not mount.is_stream(handle)
    mount.release(handle)
    assert name_of(lambda: mount.read(ROOT, handle, 1, 0)) == "EBADF"
    pipe = mount.open(ROOT, "/tracing/trace_pipe", os.O_RDONLY)
    mount.close()
    assert name_of(lambda: mount.read(ROOT, pipe, 1, 0)) == "EIO"
    TracePipe(kernel.trace).close()


def test_directories_of_removed_objects_are_forgotten() -> None:
    """A dynamic directory forgets the directories of removed objects, even if nobody looks them up again.

    Directories of other objects stay the same.
    """
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
    assert len(directory._members) < 100
    assert directory.get("kept") is kept


@pytest.mark.parametrize(("profile", "inherits"), [("linux-6.1", True), ("linux-6.12", False)])
def test_new_directories_have_the_owner_of_the_one_above(profile: str, inherits: bool) -> None:
    """Files that exist keep their owner, even if nobody has looked them up before chown(2).

    On Linux 6.12, the directories of new events do not take the owner of the directory above, except in
    instances. The results are those of Debian's 6.1.176 and 6.12.117.
    """
    with Kernel(profile=PROFILES[profile]) as kernel:
        tree = kernel.filesystem()

        def gids(*paths: str) -> list[int]:
            return [tree.getattr(f"/tracing/{path}").gid for path in paths]

        define(kernel, "p:old/e vfs_read")
        for path in ("events", "instances"):
            tree.chown(ROOT, f"/tracing/{path}", -1, 65534)
        tree.mkdir(ROOT, "/tracing/instances/a", 0o755)
        define(kernel, "p:new/e vfs_read")
        new = 65534 if inherits else 0
        assert gids("events", "events/old", "events/old/e/id", "trace", "events/enable") == [
            65534,
            0,
            0,
            0,
            0,
        ]
        assert gids("events/new", "events/new/e", "events/new/e/id", "events/new/enable") == [new] * 4
        assert gids("instances/a", "instances/a/trace", "instances/a/events/new/e/id") == [65534] * 3
        tree.chown(ROOT, "/tracing/events/new", 7, 65532)
        define(kernel, "p:new/f vfs_read")
        assert gids("events/new", "events/new/e/id") == [65532, new]
        assert gids("events/new/f/id") == [65532 if inherits else 0]
        assert tree.getattr("/tracing/events/new/f").uid == (7 if inherits else 0)


def test_listings_tell_what_stat_tells(tree: NodeTree) -> None:
    """A directory's listing has the file types and inode numbers that stat(2) returns.

    All files have different numbers, and no file has the number of a file of another file system.
    """
    paths = {4: "/"}

    def look(directory: str) -> None:
        this, parent, *entries = tree.readdir(directory)
        above = tree.getattr(os.path.dirname(directory))
        assert this == DirEntry(".", stat.S_IFDIR, tree.getattr(directory).ino)
        assert parent == DirEntry("..", stat.S_IFDIR, above.ino)
        for name, kind, ino in entries:
            path = os.path.join(directory, name)
            found = tree.getattr(path)
            assert (path, found.ino, stat.S_IFMT(found.mode)) == (path, ino, kind)
            assert ino % INO_SPACES == 0
            assert paths.setdefault(ino, path) == path
            if kind == stat.S_IFDIR:
                look(path)

    look("/")
    assert len(paths) > 1000


def test_listing_a_directory_makes_no_other(kernel: Kernel, tree: NodeTree) -> None:
    """Listing a directory creates no objects of its subdirectories.

    A directory that is created later has the inode number that the listing showed.
    """
    define(kernel, "\n".join(f"p:many/e{number} vfs_read" for number in range(200)))
    group = "/tracing/events/many"
    listed = {entry.name: entry.ino for entry in tree.readdir(group)}
    node = tree.lookup(group)
    assert isinstance(node, DynamicDirectory)
    assert not any(member.directory for member in node._members.values())
    assert tree.getattr(f"{group}/e7").ino == listed["e7"]
    assert {entry.name: entry.ino for entry in tree.readdir(group)} == listed
    define(kernel, "-:many/e7")
    define(kernel, "p:many/e7 vfs_mkdir")
    assert tree.getattr(f"{group}/e7").ino not in listed.values()
    assert names(tree, group)[-1] == "e7"
