"""The guest makes the same system call as the client, with the same arguments, in the client's task."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from emulated_kernel.guests.common.client_call import ARGUMENTS, ClientCall
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client, Stat
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch

CLIENT = Client(FIRST_PID, 0, 0, 0o022)
ROOT = "/mnt/x"
FD = 7
AT_FDCWD = -100 & 0xFFFFFFFF
EVENTS = ("tracing/events/syscalls/enable", "tracing/events/raw_syscalls/enable")
LINE = re.compile(r"\s*(\S+)-(\d+) .*: sys_(\w+)(?:\((.*)\)| -> (\S+))$")


class ClientOfMount:
    """A client that waits in a system call, and the requests that the host's kernel makes for this call."""

    def __init__(self, kernel: Kernel, watch: ScriptedWatch) -> None:
        self.kernel, self.mount = kernel, kernel.mount()
        self._watch = watch
        watch.comms[CLIENT.pid] = "client"

    def write(self, path: str, text: str) -> None:
        handle = self.mount.open(CLIENT, "/" + path, os.O_WRONLY | os.O_APPEND)
        self.mount.write(CLIENT, handle, text.encode(), 0)
        self.mount.release(handle)

    def look(self, path: str) -> Stat:
        return self.mount.getattr(path, lambda: CLIENT)

    @contextmanager
    def call(self, name: str, *args: int | str | bytes) -> Iterator[None]:
        """Let the client wait in the system call `name` during the block; strings are the data of pointer
        arguments.
        """
        kinds = ARGUMENTS[name]
        assert len(kinds) == len(args)
        data = {
            at: arg if isinstance(arg, bytes) else arg.encode()
            for at, arg in enumerate(args)
            if not isinstance(arg, int)
        }
        numbers = tuple(arg if isinstance(arg, int) else 0x1000 for arg in args)
        self._watch.calls[CLIENT.pid] = ClientCall(name, numbers, data)
        self._watch.free_fds[CLIENT.pid] = FD
        try:
            yield
        finally:
            del self._watch.calls[CLIENT.pid]

    def seen(self, action: Callable[[], object]) -> list[tuple[str, str]]:
        """Run `action`, and return (name, arguments or result) for each recorded entry to and exit from a
        system call.

        Addresses are left out.
        """
        self.kernel.trace.clear_trace()
        with suppress(KernelError):
            action()
        found = []
        for line in self.kernel.trace.trace_text().splitlines():
            match = LINE.match(line)
            if match:
                assert (match[1], match[2]) == ("client", str(CLIENT.pid)), line
                found.append(
                    (match[3], re.sub(r"\w+: \w{9,}(, )?", "", match[4] or match[5] or "").removesuffix(", "))
                )
        return found


@pytest.fixture(scope="module")
def watch() -> ScriptedWatch:
    return ScriptedWatch()


@pytest.fixture(scope="module")
def client(watch: ScriptedWatch) -> Iterator[ClientOfMount]:
    with Kernel(MachineConfig(run_budget=0.5), watch) as kernel:
        found = ClientOfMount(kernel, watch)
        handle = found.mount.create(CLIENT, "/scratch/file", 0o644, os.O_RDWR)
        found.mount.write(CLIENT, handle, b"contents", 0)
        found.mount.release(handle)
        found.mount.mkdir(CLIENT, "/scratch/dir", 0o755)
        found.mount.symlink(CLIENT, "/scratch/link", "file")
        found.write("tracing/events/syscalls/enable", "1\n")
        yield found


def check(
    client: ClientOfMount,
    name: str,
    args: tuple[int | str | bytes, ...],
    request: Callable[[], object],
    shown: str,
    result: str,
) -> None:
    with client.call(name, *args):
        assert client.seen(request) == [(name, shown), (name, result)]


PATHS = [ROOT + "/{}", "{}", "./{}", "../{}"]
"""Forms of the path of a file: absolute, or relative to several working directories."""


@pytest.mark.parametrize("top", ["scratch", "tracing"])
@pytest.mark.parametrize("form", PATHS)
def test_names_that_are_missing(client: ClientOfMount, top: str, form: str) -> None:
    """A system call on a missing name ends at the lookup. The guest's call fails with ENOENT, too."""
    path, text = f"/{top}/missing", form.format(f"{top}/missing")
    cases: list[tuple[str, tuple[int | str | bytes, ...], str]] = [
        ("open", (text, 0, 0), "flags: 0, mode: 0"),
        ("openat", (AT_FDCWD, text, os.O_CLOEXEC, 0), "dfd: ffffff9c, flags: 80000, mode: 0"),
        ("newstat", (text, 1), ""),
        ("newfstatat", (AT_FDCWD, text, 1, 0), "dfd: ffffff9c, flag: 0"),
        ("access", (text, 4), "mode: 4"),
        ("unlink", (text,), ""),
        ("rmdir", (text,), ""),
        ("rename", (text, text + "2"), ""),
        ("readlink", (text, 1, 64), "bufsiz: 40"),
        ("chmod", (text, 0o600), "mode: 180"),
        ("truncate", (text, 1), "length: 1"),
    ]
    for name, args, shown in cases:
        check(client, name, args, lambda: client.look(path), shown, "0xfffffffffffffffe")


def test_names_that_are_taken(client: ClientOfMount) -> None:
    exists = "0xffffffffffffffef"
    for path in ("/scratch/file", "/tracing/instances"):
        look = lambda path=path: client.look(path)  # noqa: E731
        check(client, "mkdir", (ROOT + path, 0o777), look, "mode: 1ff", exists)
        check(client, "mknod", (ROOT + path, stat.S_IFIFO | 0o666, 0), look, "mode: 11b6, dev: 0", exists)
        check(client, "symlink", (b"x", ROOT + path), look, "", exists)
        flags = os.O_CREAT | os.O_EXCL
        check(client, "open", (ROOT + path, flags, 0o644), look, f"flags: {flags:x}, mode: 1a4", exists)


def test_looking(client: ClientOfMount) -> None:
    for path in ("/scratch/file", "/scratch/dir", "/tracing/trace", "/tracing/events"):
        look = lambda path=path: client.look(path)  # noqa: E731
        check(client, "newlstat", (ROOT + path, 1), look, "", "0x0")
        check(
            client,
            "statx",
            (AT_FDCWD, ROOT + path, 0x900, 0xFFF, 1),
            look,
            "dfd: ffffff9c, flags: 900, mask: fff",
            "0x0",
        )
        check(
            client,
            "faccessat2",
            (AT_FDCWD, ROOT + path, 4, 0x200),
            look,
            "dfd: ffffff9c, mode: 4, flags: 200",
            "0x0",
        )


def test_components_and_links_on_the_way_are_nobodys_calls(client: ClientOfMount) -> None:
    with client.call("openat", AT_FDCWD, ROOT + "/scratch/link", 0, 0):
        assert client.seen(lambda: (client.look("/scratch"), client.look("/scratch/link"))) == []
        assert client.seen(lambda: client.mount.readlink(CLIENT, "/scratch/link")) == []
    with client.call("readlink", ROOT + "/scratch/link", 1, 3):
        assert client.seen(lambda: client.mount.readlink(CLIENT, "/scratch/link")) == [
            ("readlink", "bufsiz: 3"),
            ("readlink", "0x3"),
        ]
    assert client.mount.readlink(CLIENT, "/scratch/link") == "file"


def test_a_file_from_open_to_close(client: ClientOfMount) -> None:
    """Each request on a file, from open to close, becomes one system call of the guest with the client's
    descriptor.

    If a read(2) does not start at the guest's file position, the guest first calls lseek(2).
    """
    mount, opened = client.mount, []
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with client.call("openat", AT_FDCWD, ROOT + "/scratch/new", flags, 0o666):
        create = lambda: opened.append(mount.create(CLIENT, "/scratch/new", 0o644, flags & ~os.O_CLOEXEC))  # noqa: E731
        assert client.seen(create) == [
            ("openat", f"dfd: ffffff9c, flags: {flags:x}, mode: 1b6"),
            ("openat", f"0x{FD:x}"),
        ]
    handle = opened[0]
    assert client.mount.getattr("/scratch/new").mode == stat.S_IFREG | 0o644
    check(
        client,
        "write",
        (FD, 1, 8),
        lambda: mount.write(CLIENT, handle, b"contents", 0),
        f"fd: {FD}, count: 8",
        "0x8",
    )
    other = FD + 5
    check(
        client,
        "write",
        (other, 1, 2),
        lambda: mount.write(CLIENT, handle, b"xx", 8),
        f"fd: {other:x}, count: 2",
        "0x2",
    )
    check(
        client,
        "pread64",
        (FD, 1, 4, 4),
        lambda: mount.read(CLIENT, handle, 4, 4),
        f"fd: {FD}, count: 4, pos: 4",
        "0x4",
    )
    with client.call("read", FD, 1, 4):
        assert client.seen(lambda: mount.read(CLIENT, handle, 4, 1)) == [
            ("lseek", f"fd: {FD}, offset: 1, whence: 0"),
            ("lseek", "0x1"),
            ("read", f"fd: {FD}, count: 4"),
            ("read", "0x4"),
        ]
        assert mount.read(CLIENT, handle, 9, 5) == b"ntsxx"
    check(client, "newfstat", (FD, 1), lambda: mount.fgetattr(handle, lambda: CLIENT), f"fd: {FD}", "0x0")
    check(
        client,
        "newfstatat",
        (FD, b"", 1, 0x1000),
        lambda: client.look("/scratch/new"),
        f"dfd: {FD}, flag: 1000",
        "0x0",
    )
    check(
        client,
        "fchmod",
        (FD, 0o600),
        lambda: mount.chmod(CLIENT, "/scratch/new", 0o600),
        f"fd: {FD}, mode: 180",
        "0x0",
    )
    check(
        client,
        "fchown",
        (FD, 5, 6),
        lambda: mount.chown(CLIENT, "/scratch/new", 5, 6),
        f"fd: {FD}, user: 5, group: 6",
        "0x0",
    )
    check(
        client,
        "ftruncate",
        (FD, 3),
        lambda: mount.ftruncate(CLIENT, handle, 3),
        f"fd: {FD}, length: 3",
        "0x0",
    )
    check(client, "fsync", (FD,), lambda: mount.fsync(CLIENT, handle), f"fd: {FD}", "0x0")
    check(client, "fdatasync", (FD,), lambda: mount.fsync(CLIENT, handle), f"fd: {FD}", "0x0")
    with client.call("openat", AT_FDCWD, ROOT + "/scratch", os.O_DIRECTORY, 0):
        directory = mount.opendir(CLIENT, "/scratch")
    check(client, "fsync", (FD,), lambda: mount.fsync(CLIENT, directory), f"fd: {FD}", "0x0")
    mount.release(directory)
    with client.call("lseek", FD, -1 & (1 << 64) - 1, os.SEEK_END):
        end = client.seen(lambda: client.look("/scratch/new"))
    assert end == [("lseek", f"fd: {FD}, whence: 2"), ("lseek", "0x2")]
    found = client.mount.getattr("/scratch/new")
    assert (found.mode, found.uid, found.gid, found.size) == (stat.S_IFREG | 0o600, 5, 6, 3)
    assert client.seen(lambda: mount.release(handle)) == [("close", f"fd: {FD}"), ("close", "0x0")]


def test_appending_needs_no_seek(client: ClientOfMount) -> None:
    flags = os.O_WRONLY | os.O_APPEND
    with client.call("open", ROOT + "/scratch/file", flags, 0):
        handle = client.mount.open(CLIENT, "/scratch/file", flags)
    size = client.mount.getattr("/scratch/file").size
    write = lambda: client.mount.write(CLIENT, handle, b"more", size)  # noqa: E731
    check(client, "write", (FD, 1, 4), write, f"fd: {FD}, count: 4", "0x4")
    client.mount.release(handle)
    assert client.mount.getattr("/scratch/file").size == size + 4


def test_making_and_removing(client: ClientOfMount) -> None:
    """The guest's calls that create and remove files have the client's arguments.

    The guest applies the umask to modes.
    """
    mount = client.mount
    check(
        client,
        "mkdirat",
        (AT_FDCWD, "made", 0o777),
        lambda: mount.mkdir(CLIENT, "/scratch/made", 0o755),
        "dfd: ffffff9c, mode: 1ff",
        "0x0",
    )
    assert mount.getattr("/scratch/made").mode == stat.S_IFDIR | 0o755
    check(
        client,
        "mknodat",
        (AT_FDCWD, "fifo", 0o10666, 0),
        lambda: mount.mknod(CLIENT, "/scratch/fifo", 0o10644),
        "dfd: ffffff9c, mode: 11b6, dev: 0",
        "0x0",
    )
    assert mount.getattr("/scratch/fifo").mode == stat.S_IFIFO | 0o644
    check(
        client,
        "link",
        ("fifo", "second"),
        lambda: mount.link(CLIENT, "/scratch/fifo", "/scratch/second"),
        "",
        "0x0",
    )
    assert mount.getattr("/scratch/second").nlink == 2
    check(
        client,
        "renameat2",
        (AT_FDCWD, "second", AT_FDCWD, "made/third", 0),
        lambda: mount.rename(CLIENT, "/scratch/second", "/scratch/made/third"),
        "olddfd: ffffff9c, newdfd: ffffff9c, flags: 0",
        "0x0",
    )
    check(client, "unlink", ("made/third",), lambda: mount.unlink(CLIENT, "/scratch/made/third"), "", "0x0")
    check(client, "rmdir", ("made",), lambda: mount.rmdir(CLIENT, "/scratch/made"), "", "0x0")
    check(
        client,
        "unlinkat",
        (AT_FDCWD, "fifo", 0),
        lambda: mount.unlink(CLIENT, "/scratch/fifo"),
        "dfd: ffffff9c, flag: 0",
        "0x0",
    )
    times = struct.pack("<4q", 1_700_000_000, 5, 0, (1 << 30) - 2)
    check(
        client,
        "utimensat",
        (AT_FDCWD, "file", times, 0),
        lambda: mount.utimens(CLIENT, "/scratch/file", 1, None),
        "dfd: ffffff9c, flags: 0",
        "0x0",
    )
    assert mount.getattr("/scratch/file").atime_ns == 1_700_000_000 * 10**9 + 5


def test_listing(client: ClientOfMount) -> None:
    """Every getdents64(2) of the client is a getdents64(2) of the guest, including the last call, which
    returns 0.
    """
    mount, handles = client.mount, []
    for path, size in (("/scratch", None), ("/tracing/events", "0x0")):
        with client.call("openat", AT_FDCWD, ROOT + path, os.O_DIRECTORY, 0):
            opened = client.seen(lambda path=path: handles.append(mount.opendir(CLIENT, path)))
        assert opened[1] == ("openat", f"0x{FD:x}")
        with client.call("getdents64", FD, 1, 32768):
            first = client.seen(lambda: mount.getdents(CLIENT, handles[-1], 0))
            last = client.seen(lambda: mount.getdents(CLIENT, handles[-1], 99))
        assert first[0] == last[0] == ("getdents64", f"fd: {FD}, count: 8000")
        assert last[1] == ("getdents64", "0x0")
        assert size is None or first[1][1] == size
        assert client.seen(lambda: mount.release(handles[-1])) == [("close", f"fd: {FD}"), ("close", "0x0")]
    listed = mount.getdents(CLIENT, mount.opendir(CLIENT, "/scratch"), 2)
    assert listed
    assert listed == mount.readdir("/scratch")[2:]


def test_instances_are_made_by_their_maker(client: ClientOfMount) -> None:
    """mkdir and rmdir of an instance call the guest's functions, such as vfs_mkdir, even if the host refuses
    the request.
    """
    hits: list[str] = []
    functions = ("do_mkdirat", "vfs_mkdir", "do_rmdir", "vfs_rmdir")
    probes = [
        Kprobe(symbol_name=name, pre_handler=lambda probe, _regs: hits.append(probe.symbol_name or ""))
        for name in functions
    ]
    client.kernel.register_kprobes(probes)
    path = "/tracing/instances/made"
    mkdir = lambda: client.mount.mkdir(CLIENT, path, 0o755)  # noqa: E731
    rmdir = lambda: client.mount.rmdir(CLIENT, path)  # noqa: E731
    check(client, "mkdir", (ROOT + path, 0o777), mkdir, "mode: 1ff", "0x0")
    assert stat.S_ISDIR(client.mount.getattr(path).mode)
    held = client.mount.open(CLIENT, path + "/trace", os.O_RDONLY)
    check(client, "rmdir", (ROOT + path,), rmdir, "", "0xfffffffffffffff0")
    client.mount.release(held)
    check(client, "rmdir", (ROOT + path,), rmdir, "", "0x0")
    with pytest.raises(KernelError, match="made"):
        client.mount.getattr(path)
    assert hits == ["do_mkdirat", "vfs_mkdir", "do_rmdir", "vfs_rmdir", "do_rmdir", "vfs_rmdir"]
    hits.clear()
    refused = "/tracing/events/made"
    check(
        client,
        "mkdir",
        (ROOT + refused, 0o777),
        lambda: client.mount.mkdir(CLIENT, refused, 0o755),
        "mode: 1ff",
        "0xffffffffffffffff",
    )
    assert hits == ["do_mkdirat", "vfs_mkdir"]
    # If /proc does not show the client's call, the guest makes the call that fits the request.
    hits.clear()
    mkdir()
    rmdir()
    assert hits == ["do_mkdirat", "vfs_mkdir", "do_rmdir", "vfs_rmdir"]
    client.kernel.unregister_kprobes(probes)


def test_our_files_are_changed_in_both(client: ClientOfMount) -> None:
    path = "/tracing/tracing_on"
    check(
        client,
        "fchmodat",
        (AT_FDCWD, ROOT + path, 0o600),
        lambda: client.mount.chmod(CLIENT, path, 0o600),
        "dfd: ffffff9c, mode: 180",
        "0x0",
    )
    assert client.mount.getattr(path).mode == stat.S_IFREG | 0o600
    check(
        client, "unlink", (ROOT + path,), lambda: client.mount.unlink(CLIENT, path), "", "0xffffffffffffffff"
    )
    check(
        client,
        "truncate",
        (ROOT + path, 0),
        lambda: client.mount.truncate(CLIENT, path, 0),
        "length: 0",
        "0x0",
    )


def test_names_can_be_read_where_the_process_put_them(client: ClientOfMount) -> None:
    client.write("tracing/dynamic_events", "e:named syscalls/sys_enter_openat file=+0($filename):ustring\n")
    client.write("tracing/events/eprobes/named/enable", "1\n")
    client.kernel.trace.clear_trace()
    for text in (ROOT + "/scratch/none", "none", "../scratch/none", ROOT + "/tracing/../scratch/none"):
        with client.call("openat", AT_FDCWD, text, 0, 0), suppress(KernelError):
            client.look("/scratch/none")
        assert f'file="{text}"' in client.kernel.trace.trace_text()
    client.write("tracing/events/eprobes/named/enable", "0\n")
    client.write("tracing/dynamic_events", "-:named\n")


def test_a_long_name(client: ClientOfMount) -> None:
    """System calls with a path of 3000 bytes have the right result in the guest."""
    text = "./" * 1500 + "scratch/missing"
    check(client, "newstat", (text, 1), lambda: client.look("/scratch/missing"), "", "0xfffffffffffffffe")
    check(
        client, "newstat", ("./" * 1500 + "scratch/file", 1), lambda: client.look("/scratch/file"), "", "0x0"
    )


def test_a_descriptor_is_that_file_whatever_it_is_called_now(client: ClientOfMount) -> None:
    """A call on a descriptor changes the file that the client has opened, not another file that had the same
    name.
    """
    mount = client.mount
    old = mount.create(CLIENT, "/scratch/name", 0o644, os.O_RDWR)
    mount.write(CLIENT, old, b"kept", 0)
    mount.rename(CLIENT, "/scratch/name", "/scratch/renamed")
    new = mount.create(CLIENT, "/scratch/name", 0o644, os.O_RDWR)
    reader = mount.open(CLIENT._replace(pid=CLIENT.pid + 1), "/scratch/name", os.O_RDONLY)
    mount.write(CLIENT, new, b"shortened", 0)
    with client.call("ftruncate", FD, 5):
        mount.ftruncate(CLIENT, new, 5)
    with client.call("fchmod", FD, 0o600):
        mount.chmod(CLIENT, "/scratch/name", 0o600)
    found = {name: client.look(f"/scratch/{name}") for name in ("name", "renamed")}
    assert {name: (stat.S_IMODE(each.mode), each.size) for name, each in found.items()} == {
        "name": (0o600, 5),
        "renamed": (0o644, 4),
    }
    for handle in (old, new, reader):
        mount.release(handle)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_far_offsets_are_refused_alike_with_and_without_its_call(arch: str) -> None:
    watch = ScriptedWatch()
    with Kernel(MachineConfig(arch=arch), watch) as kernel:
        client = ClientOfMount(kernel, watch)
        kernel.register_kprobe(Kprobe(symbol_name="vfs_write", pre_handler=lambda _probe, _regs: None))
        mount = client.mount
        handle = mount.create(CLIENT, "/scratch/far", 0o644, os.O_RDWR)
        mount.write(CLIENT, handle, b"near", 0)

        def errno_of(action: Callable[[], object]) -> int | None:
            with pytest.raises(KernelError) as refused:
                action()
            return refused.value.errno

        def write(offset: int) -> int:
            return mount.write(CLIENT, handle, b"x", offset)

        def truncate(offset: int) -> None:
            mount.truncate(CLIENT, "/scratch/far", offset)

        for offset in (1 << 31, 1 << 32, (1 << 32) + 5, 1 << 62):
            unknown = errno_of(partial(write, offset)), errno_of(partial(truncate, offset))
            with client.call("write", FD, 0x1000, 1):
                known = [errno_of(partial(write, offset))]
            with client.call("truncate", f"{ROOT}/scratch/far", offset):
                known.append(errno_of(partial(truncate, offset)))
            assert tuple(known) == unknown, hex(offset)
            assert mount.read(CLIENT, handle, 10, 0) == b"near"
